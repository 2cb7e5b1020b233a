"""Ctrl-C while a command starts: whatever is being imported, one line and status 130, and
nothing goes on.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from cs336.studies.ceilings_records import CeilingsStudy
from cs336.studies.records import read_study
from tests.faults.harness import eventually

ROOT = Path(__file__).parents[2]
PROFILE = next((ROOT / "data/published/nsys_profiles/train/kernels").glob("small_ctx128*.json"))
COMMANDS = {
    "benchmark": ("benchmark.py", "--device", "cpu", "--measured-steps", "900000"),
    "kernels": ("-m", "cs336", "kernels", str(PROFILE)),
}
MOMENTS = int(os.environ.get("CS336_MOMENTS", "2"))
"""Moments of each command at which Ctrl-C comes."""


def imports(
    words: tuple[str, ...], place: Path, stop_at: int | None
) -> tuple[int, list[str], list[str], float]:
    """Run the command, and send it SIGINT after so many imports of its own; how it ended, and how
    long that took.

    Returns the exit status, its imports, the other lines on standard error, and the seconds from
    the signal to the end. Python names each module on standard error when its import has ended.
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    killer = threading.Timer(100, process.kill)
    killer.start()
    found, said, sent_s = [], [], monotonic()
    has_begun = False
    for line in process.stderr or ():
        if match := re.match(r"import time: +\d+ \| +\d+ \| +(\S+)", line):
            has_begun |= match[1] == "cs336.start"
            found += [match[1]] if has_begun else []
            if has_begun and len(found) == stop_at:
                sent_s = monotonic()
                os.killpg(process.pid, signal.SIGINT)
        elif not line.startswith("import time:"):
            said.append(line)
    status = process.wait()
    killer.cancel()
    return status, found, said, monotonic() - sent_s


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    for script in ("benchmark.py", "benchmark_sweep.py"):
        shutil.copy(ROOT / script, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_any_moment_is_one_line(name: str, place: Path) -> None:
    usual = {"benchmark": 1500, "kernels": 250}
    missed = 0
    for number in range(MOMENTS):
        stop_at = 1 + number * usual[name] // MOMENTS
        status, found, said, took_s = imports(COMMANDS[name], place, stop_at)
        if len(found) < stop_at or (status == 0 and not said):
            missed += 1  # it had ended already
            continue
        assert status == 130, (stop_at, found[-1], said)
        assert said[-1].startswith("interrupted"), (stop_at, found[-1], said)
        assert all(line.startswith(("[", "in doubt")) for line in said[:-1]), (
            "the status of a sweep that has begun, and a busy machine"
        )
        assert took_s < 10, "it takes well below a second, and a busy machine longer"
    assert missed <= MOMENTS // 2


def test_a_users_module_cannot_catch_ctrl_c_while_it_is_imported_even_where_nobody_reads_the_line(
    place: Path,
) -> None:
    """As `| tee` ends by the same Ctrl-C; libraries catch it so too, and go on without half of
    their names.
    """
    (place / "catches.py").write_text(
        "try:\n    import sends\nexcept BaseException:\n    pass\nfrom torch.nn import Linear\n"
    )
    (place / "sends.py").write_text(
        "import os, signal\nreader, writer = os.pipe()\nos.dup2(writer, "
        "2)\nos.close(reader)\nos.close(writer)\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    words = [sys.executable, "benchmark.py", "--device", "cpu", "--model", "catches:Linear"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run(
            words, cwd=place, env=environment, capture_output=True, timeout=100
        ).returncode
        == 130
    )


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_study_that_ends_early_keeps_its_rows_and_leaves_no_temporary_directory(
    place: Path, number: int
) -> None:
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # sockets need a short path
    words = [sys.executable, "-m", "cs336", "ceilings", "--device", "cpu", "--name", "x"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    study = subprocess.Popen(
        words, cwd=place, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    assert eventually(lambda: [*place.glob("data/ceilings/x/cells/*.json")])
    assert [*temporary.glob("cs336_tmp-*")]
    os.killpg(study.pid, number)
    _, said = study.communicate(timeout=100)
    assert study.returncode == (-number if number == signal.SIGKILL else 130), said
    assert all(
        read_study(path, CeilingsStudy).timings
        for path in place.glob("data/ceilings/x/cells/*.json")
    )
    assert eventually(lambda: not [*temporary.glob("cs336_tmp-*")], patience_s=5)
    shutil.rmtree(temporary)
