"""Whether modules can be imported, tried by another process, with modules that are made up."""

import random
import sys

import psutil
import pytest

from cs336 import tried_imports


def test_a_package_is_imported_once_for_an_environment_and_never_by_the_command(
    tmp_path, monkeypatch, capsys
):
    """Whether it can be imported or not. Another package, and an answer that is damaged, have it
    imported again.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    chance, imports = random.Random(0), tmp_path / "imports"

    def answer_of_another_process():
        tried_imports.import_failure.cache_clear()
        return tried_imports.import_failure("fake_kernels")

    for number in range(4):
        is_broken, already = chance.random() < 0.5, imports.read_text().count("\n") if number else 0
        counting = f"print(file=open({str(imports)!r}, 'a'))\n"
        (tmp_path / "fake_kernels.py").write_text(counting + "import libcute" * is_broken)
        (tmp_path / f"changed-{number}.dist-info").mkdir()
        answers = [answer_of_another_process() for _ in range(3)]
        assert imports.read_text().count("\n") == already + 1
        assert capsys.readouterr().err.count("looking whether") == 1, "the first look is said"
        assert [answer is not None and "'libcute'" in answer for answer in answers] == [
            is_broken
        ] * 3
        for kept in tmp_path.glob("cache/*/*/*"):
            kept.write_bytes(chance.choice([b"", chance.randbytes(20)]))
        assert (answer_of_another_process() is not None) == is_broken
        assert imports.read_text().count("\n") == already + 2
        capsys.readouterr()
    assert "fake_kernels" not in sys.modules


def test_a_module_that_ends_its_process_leaves_the_others_tried(tmp_path, monkeypatch):
    """One process tries all modules; what one of them does there is no answer for another."""
    sources = {
        "fine_kernels": "",
        "broken_kernels": "import libcute_that_is_not_there",
        "fatal_kernels": "import os; os._exit(7)",
        "later_kernels": "print('cs336 tried nothing')",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    failures = tried_imports._import_elsewhere([*sources])
    assert list(failures) == [*sources]
    assert failures["fine_kernels"] is None
    assert failures["later_kernels"] is None
    assert "libcute_that_is_not_there" in str(failures["broken_kernels"])
    assert "7" in str(failures["fatal_kernels"])


WAITING = """
import os, pathlib, time
began = time.monotonic()
while not pathlib.Path({signal!r}).exists():
    assert time.monotonic() < began + 60, "nothing was done meanwhile"
    time.sleep(0.01)
"""


def test_this_process_goes_on_while_the_other_one_tries(tmp_path, monkeypatch):
    """Each waits for the other: the import for a file, and this process for its end."""
    signal = tmp_path / "signal"
    (tmp_path / "waiting_kernels.py").write_text(WAITING.format(signal=str(signal)))
    monkeypatch.syspath_prepend(tmp_path)
    done = []

    def work():
        done.append("once")
        signal.touch()

    tried_imports.do_meanwhile(work)
    for _ in range(2):
        assert tried_imports._import_elsewhere(["waiting_kernels"]) == {"waiting_kernels": None}
    assert done == ["once"]


def test_a_failure_meanwhile_ends_the_other_process(tmp_path, monkeypatch):
    """It would go on for a minute otherwise, and this process wait for it."""
    (tmp_path / "waiting_kernels.py").write_text(WAITING.format(signal=str(tmp_path / "never")))
    monkeypatch.syspath_prepend(tmp_path)
    before, children = psutil.Process().children(), []

    def interrupted():
        children.extend(set(psutil.Process().children()).difference(before))
        raise KeyboardInterrupt

    tried_imports.do_meanwhile(interrupted)
    with pytest.raises(KeyboardInterrupt):
        tried_imports._import_elsewhere(["waiting_kernels"])
    assert children
    assert not any(child.is_running() for child in children)


IMPORTED = """
import os, pathlib, time
tried_by = os.getpid()

def work(folder, name):
    if name == "ends":
        os._exit(3)
    print("of no interest")
    pathlib.Path(folder, name).write_text(f"{tried_by} {os.getpid()}")
    while len(os.listdir(folder)) < 2:  # each waits for the other
        time.sleep(0.01)
"""


def test_the_process_that_tried_makes_calls_side_by_side(tmp_path, monkeypatch):
    """In processes of their own, which have its imports; a call that fails is in its status."""
    (tmp_path / "kept_kernels.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    for names, status in ((("one", "other"), 0), (("one", "other", "ends"), 1), ((), 0)):
        tried_imports.do_meanwhile(lambda: None)
        assert tried_imports._import_elsewhere(["kept_kernels"]) == {"kept_kernels": None}
        folder = tmp_path / str(len(names))
        folder.mkdir()
        process = tried_imports.call_elsewhere(
            ["kept_kernels", "work", str(folder), name] for name in names
        )
        assert process is not None
        with process:
            assert process.wait(60) == status
        found = [path.read_text().split() for path in folder.iterdir()]
        assert len(found) == min(len(names), 2)
        assert {tried_by for tried_by, _ in found} <= {str(process.pid)}
        assert len({own for _, own in found} - {str(process.pid)}) == len(found)
        assert tried_imports.call_elsewhere([]) is None


def test_nobody_waits_for_calls_unless_there_was_work_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "kept_kernels.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert tried_imports._import_elsewhere(["kept_kernels"]) == {"kept_kernels": None}
    assert tried_imports.call_elsewhere([]) is None
