"""Two sweeps on one CPU are both told that they disturbed each other; neither is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems import cli
from cs336_systems.commands import benchmark
from cs336_systems.record import Status, WarningCode, read_record
from cs336_systems.sweep import run as sweep_module
from cs336_systems.sweep.locks import at_work
from tests.faults.harness import MODELS, ROOT, Witness, config, sweep

WORK = """
import sys
from pathlib import Path
from cs336_systems.sweep.locks import at_work
with at_work(Path(sys.argv[1])) as are_others:
    for _ in sys.stdin:
        print(are_others(), flush=True)
"""


class Neighbour:
    """Another process at work on the CPU."""

    def __init__(self, path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORK, str(path)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.sees_others()

    def sees_others(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip() == "True"

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def cpu(tmp_path_factory, monkeypatch):
    """The CPU of these tests alone, whatever else is measured on this machine."""
    path = tmp_path_factory.mktemp("locks") / "cpu.lock"
    for module in (sweep_module, benchmark):
        monkeypatch.setattr(module, "cpu_lock_path", lambda: path)
    return path


@pytest.fixture
def neighbour(cpu):
    """Start another process at work; all end with the test."""
    started = []

    def begin():
        started.append(Neighbour(cpu))
        return started[-1]

    yield begin
    for other in started:
        other.end()


def is_warned(record):
    assert record.status is Status.OK
    return [warning.code for warning in record.warnings].count(WarningCode.CPU_SHARED) == 1


def test_those_at_work_see_each_other_and_not_the_dead(cpu, neighbour):
    with at_work(cpu) as are_others:
        assert not are_others()
        first = neighbour()
        assert are_others()
        assert first.sees_others()
        first.end()
        assert not are_others()
    assert not neighbour().sees_others()


def test_a_lock_that_somebody_holds_for_himself_stops_nobody(cpu):
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(1, flush=True);"
    words = [sys.executable, "-c", hold + "sys.stdin.read()", str(cpu)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        with at_work(cpu) as are_others:
            assert are_others()
            holder.communicate()
            assert not are_others()


@pytest.mark.parametrize("when", ["before the sweep", "after a run has started", "never"])
def test_a_run_is_warned_of_another_that_begins_or_ends_while_it_is_measured(place, neighbour, when):
    other = neighbour() if when == "before the sweep" else None

    class Change(Witness):
        def started(self, config, gpu):
            if other is not None:
                other.end()
            elif when != "never":
                neighbour()

    (record,) = sweep(place, config(), witness=Change()).measured
    assert is_warned(record) == (when != "never")
    (kept,) = sweep(place, config()).records
    assert kept == record


def test_a_sweep_is_at_work_while_it_measures_and_no_longer(place, neighbour):
    seen = []
    other = neighbour()

    class Look(Witness):
        def started(self, config, gpu):
            seen.append(other.sees_others())

    sweep(place, config(), witness=Look())
    assert seen == [True]
    assert not other.sees_others()


def test_a_single_run_is_warned_too(place, neighbour):
    neighbour()
    step = ["--vocab-size", "11", "--context-length", "8", "--device", "cpu"]
    steps = ["--warmup-steps", "2", "--measured-steps", "2"]
    assert cli.benchmark([*step, *steps, "--model", f"{MODELS}:good"]) == 0
    (path,) = Path("data/e2e_benchmark/single/runs").iterdir()
    assert is_warned(read_record(path))
