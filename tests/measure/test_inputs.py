"""The state of what is the user's own changes exactly when what a run would import or read does."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cs336.config import ModelConfig, RunConfig
from cs336.measure.inputs import all_inputs, check_factory, inputs_of, source_digest

CONFIG = RunConfig(size="custom", model=ModelConfig(d_model=8, d_ff=16, num_layers=1, num_heads=2))
FILES = {
    "mine.py": (
        "import torch, mylayers as layers  # both\nfrom mypackage.blocks import "
        "Block\nprint('mine')\n"
    ),
    "mylayers.py": "def lazy():\n    import mykernels\n\n\nlazy()\n",
    "mykernels.py": "import mine  # round in a circle\n",
    "mypackage/__init__.py": "",
    "mypackage/blocks.py": "from . import deep\n\n\nclass Block: ...\n",
    "mypackage/deep/__init__.py": "",
    "unrelated.py": "raise SystemExit\n",
    "other/__init__.py": "",
    "notes.txt": "not source\n",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path)
    return tmp_path


def write(directory: Path, files: dict[str, str] = FILES) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def imported(module: str, directory: Path) -> set[str]:
    """What Python itself loads from the directory when it imports the module."""
    program = f"""
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
import {module}
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
print(*(file for file in files if file and file.startswith({str(directory)!r})), sep="\\n")
"""
    printed = subprocess.check_output(
        [sys.executable, "-B", "-c", program], cwd=directory, text=True
    )
    return {
        Path(line).relative_to(directory).as_posix()
        for line in printed.splitlines()
        if line.startswith("/")
    }


@pytest.mark.parametrize("module", ["mine", "mykernels", "mypackage.blocks", "other"])
def test_the_digest_changes_with_what_python_imports_and_with_nothing_else(
    here: Path, module: str
) -> None:
    first, changing = source_digest(module), set()
    assert first is not None
    assert source_digest(module) == first
    for name, text in FILES.items():
        (here / name).write_text(text + "# changed\n")
        if source_digest(module) != first:
            changing.add(name)
        (here / name).write_text(text)
    assert source_digest(module) == first
    assert changing == imported(module, here)


def test_of_a_package_every_file_counts(here: Path) -> None:
    """Which of them a factory imports when it is called, the source does not tell."""
    first = source_digest("mypackage.blocks")
    (here / "mypackage" / "new.py").write_text("")
    second = source_digest("mypackage.blocks")
    (here / "mypackage" / "new.py").rename(here / "mypackage" / "newer.py")
    assert len({first, second, source_digest("mypackage.blocks")}) == 3
    assert source_digest("mypackage.blocks") == source_digest("mypackage")


def test_what_is_installed_beside_an_installed_model_does_not_count(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = here / "site-packages"
    write(installed, {"theirs.py": "import engine\n", "engine.py": ""})
    monkeypatch.syspath_prepend(installed)
    first = source_digest("theirs")
    write(installed, {"engine.py": "# changed\n"})
    assert source_digest("theirs") == first
    write(installed, {"theirs.py": "import engine  # changed\n"})
    assert source_digest("theirs") != first


def test_a_folder_that_an_installed_package_comes_before_does_not_count(here: Path) -> None:
    """As loggers leave them beside the script, named after themselves and with copies of it
    inside.
    """
    write(here, {"mine.py": "import numpy\n", "numpy/run-1/mine.py": "", "loose/a.py": ""})
    first = source_digest("mine")
    write(here, {"numpy/run-2/mine.py": ""})
    assert source_digest("mine") == first
    write(here, {"mine.py": "import loose.a\n"})
    second = source_digest("mine")
    write(here, {"loose/a.py": "# changed\n"})
    assert source_digest("mine") not in (first, second)


@pytest.mark.parametrize(("package", "counts"), [("cs336_systems", True), ("cs336", False)])
def test_the_package_of_the_course_is_the_users_and_this_one_has_a_digest_of_its_own(
    here: Path, package: str, counts: bool
) -> None:
    write(here, {"mine.py": f"import {package}.theirs\n", f"{package}/__init__.py": ""})
    write(here, {f"{package}/theirs.py": ""})
    first = source_digest("mine")
    write(here, {f"{package}/theirs.py": "# changed\n"})
    assert (source_digest("mine") != first) is counts


def test_modules_of_this_package_and_of_the_course_s_are_found(here: Path) -> None:
    write(here, {"cs336_systems/__init__.py": "", "cs336_systems/theirs.py": "def make(): pass\n"})
    check_factory("cs336_systems.theirs:make")
    check_factory("cs336.model.transformer:TransformerLM")


def test_a_factory_is_refused_if_its_name_is_nowhere_in_the_source(here: Path) -> None:
    write(
        here,
        {
            "lazy.py": "def __getattr__(name):\n    return name\n",
            "mypackage/sub.py": "def make(): ...\n",
        },
    )
    before = set(sys.modules)
    for name in (
        "mypackage.sub:make",
        "mypackage.blocks:Block",
        "lazy:anything",
        "sys:exit",
        "json:dumps",
    ):
        check_factory(name)
    for name in (
        "nothing:make",
        "mypackage.subb:make",
        "mypackage.sub:mkae",
        "mine.py:make",
        "mylayers:Layers",
    ):
        with pytest.raises(ValueError, match=r"--model .*: no "):
            check_factory(name)
    assert set(sys.modules) == before


def test_the_name_that_is_proposed_is_one_that_the_module_defines(here: Path) -> None:
    """Not a word of its code: None is closer to Nope than anything else is."""
    write(here, {"mine_too.py": "def maker():\n    made = None\n    return made\n\n\nMade = 1\n"})
    for wanted, meant in {"Nope": "", "make": "maker", "Mad": "Made"}.items():
        with pytest.raises(ValueError, match="--model") as refused:
            check_factory(f"mine_too:{wanted}")
        assert str(refused.value).partition("did you mean ")[2] == (meant and f"{meant}?")


def test_runs_name_what_they_depend_on(here: Path) -> None:
    np.save("tokens.npy", np.zeros(100, np.uint16))
    own, both = (
        replace(CONFIG, model_factory="mine:make"),
        replace(CONFIG, model_factory="mine:make", tokens="tokens.npy"),
    )
    assert inputs_of(CONFIG) == ()
    assert [(found.name, found.state) for found in inputs_of(own)] == [
        ("source of mine:make", source_digest("mine"))
    ]
    assert [found.name for found in inputs_of(both)] == [
        "source of mine:make",
        "token file tokens.npy",
    ]
    assert all_inputs([CONFIG, own, both, replace(both, repeat=1)]) == inputs_of(both)


def test_a_token_file_is_told_by_its_size_and_the_time_of_its_last_change(here: Path) -> None:
    def state() -> str | None:
        (found,) = inputs_of(replace(CONFIG, tokens="tokens.npy"))
        return found.state

    path = here / "tokens.npy"
    assert state() is None
    path.write_bytes(bytes(10))
    os.utime(path, ns=(0, 1_500_000_000_000_000_007))
    assert state() == "10 bytes, written 2017-07-14T02:40:00.000000007Z"
    path.write_bytes(bytes(11))
    os.utime(path, ns=(0, 1_500_000_000_000_000_007))
    assert state() == "11 bytes, written 2017-07-14T02:40:00.000000007Z"
    os.utime(path, ns=(0, 1_500_000_000_000_000_008))
    assert state() == "11 bytes, written 2017-07-14T02:40:00.000000008Z"
