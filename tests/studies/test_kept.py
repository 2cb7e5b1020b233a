"""Studies that are interrupted, repeated and run two at once: whatever was measured stays, byte
for byte.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cs336 import cli
from cs336.config import Device
from cs336.interrupt import STOP_SIGNALS, end_at_once
from cs336.measure.environment import identity
from cs336.record import Failure, Measurement, Status
from cs336.report.results import STUDIES
from cs336.studies import runner
from cs336.studies.ceilings_rows import Loops, Timing
from cs336.studies.operators import PHASES
from cs336.studies.records import read_study
from cs336.studies.runner import Cells
from tests.faults.harness import ROOT
from tests.report.making import make_environment

pytestmark = pytest.mark.usefixtures("no_pictures")

ATTENTION = "attention --device cpu --implementations naive sdpa --batch-size 1 --name x "
GRIDS = {
    "--d-heads 4 8 --context-lengths 8 16 --passes 2": 8,
    "--d-heads 4 8 --context-lengths 8 16 --passes 3": 8,
    "--d-heads 4 --context-lengths 8 16 32 --passes 2": 6,
}
"""Each with the number of its cells."""
CELL_S = 0.005
DIRECTORY = Path("data/attention/x")
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 130, signal.SIGKILL: -signal.SIGKILL}


class QuickWorker:
    """Measures nothing. The log says which cells have begun, and with the next which are done,
    with their times.
    """

    failing, begun, signals = 0.0, 0, {}
    """Share of cells that fail; how many have begun; signals to send this process when so many
    have.
    """

    def __init__(self, grid, _gpus):
        self.passes, self.last = getattr(grid, "passes", None), None
        self.environment = replace(make_environment(), identity=identity(Device.CPU))

    def measure(self, cell):
        self.close()
        self.write("begun", name := [self.passes, cell.label])
        QuickWorker.begun += 1
        if self.begun in self.signals:
            os.kill(os.getpid(), self.signals[self.begun])
        time.sleep(CELL_S)
        if random.random() < self.failing:
            return cell.failed(Status.CRASHED, Failure(message="it broke"))
        times_s = (random.random(), random.random())
        measured = {"measurements": tuple(Measurement(phase, times_s) for phase in PHASES)}
        self.last = [name, [times_s] * 2]
        if self.passes is None:
            measured = {"timing": Timing(status=Status.OK, loops=Loops(count=1, times_s=times_s))}
        return tuple(replace(row, **measured) for row in cell.rows)

    def close(self):
        if self.last:
            self.write("done", self.last)
        self.last = None

    def write(self, what, value):
        with Path("log").open("a") as file:
            file.write(f"{json.dumps([os.getpid(), what, value])}\n")


def told(study, what):
    """What the worker of this process has written to the log."""
    lines = Path("log").read_text().splitlines()
    return [
        value for pid, kind, value in map(json.loads, lines) if (pid, kind) == (study.pid, what)
    ]


def _command(words, signals):
    for number in STOP_SIGNALS:
        signal.signal(number, end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    random.seed()
    QuickWorker.signals, QuickWorker.begun = signals, 0
    with (
        Path(f"output.{os.getpid()}").open("w") as sys.stderr,
        contextlib.redirect_stdout(sys.stderr),
    ):
        sys.exit(cli.main(words.split()))


def begin(words, signals=None):
    """The command in a process of its own, forked because importing everything anew takes
    seconds.
    """
    process = multiprocessing.get_context("fork").Process(
        target=_command, args=(words, signals or {})
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return process


def end_of(study):
    study.join()
    return study.exitcode


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_CellWorker", QuickWorker)
    # imports all that processes to be forked need
    assert cli.main([*ATTENTION.split(), "--output", "once"]) == 0
    return tmp_path


def times_in(path):
    """The times of each cell in the file of a study of attention, by passes and label."""
    study = read_study(path, STUDIES["attention"])
    return {
        (study.grid.passes, result.cell.label): [list(each.times_s) for each in result.measurements]
        for result in study.results
    }


class Ledger:
    """What the studies of a schedule have measured, from the log alone."""

    def __init__(self):
        self.times, self.files, self.studies = {}, {}, []

    def check(self, study, status, cells):
        """All that was ever done is on the disk as it was, and was not measured again."""
        assert not {tuple(name) for name in told(study, "begun")} & self.times.keys()
        self.times |= {tuple(name): times_s for name, times_s in told(study, "done")}
        files = {path: path.read_bytes() for path in DIRECTORY.glob("cells/*.json")}
        there = {name: times for path in files for name, times in times_in(path).items()}
        assert self.times.items() <= there.items()
        assert self.files.items() <= files.items()
        self.files = {path: data for path, data in files.items() if all(times_in(path).values())}
        record = DIRECTORY / "attention.json"
        if status == 0:
            assert times_in(record).items() <= there.items()
            assert len(times_in(record)) == cells
            self.studies.append(record.read_bytes())
        kept = [path.read_bytes() for path in DIRECTORY.glob("attention*.json")]
        assert all(data in kept for data in self.studies)


def test_whatever_happens_to_studies_what_they_have_measured_stays(place, monkeypatch):
    monkeypatch.setattr(QuickWorker, "failing", 0.1)
    draw, ledger = random.Random(0), Ledger()
    for _ in range(20):
        grid, end = draw.choice([*GRIDS]), draw.choice([None, "second", *STOPPED])
        study = begin(ATTENTION + grid, {1: signal.SIGSTOP} if end == "second" else None)
        if end in STOPPED:
            time.sleep(draw.uniform(0, 20 * CELL_S))
            os.kill(study.pid, end)
        changed = os.WEXITED | os.WSTOPPED | os.WNOWAIT
        if end == "second" and os.waitid(os.P_PID, study.pid, changed).si_code == os.CLD_STOPPED:
            second = begin(ATTENTION + draw.choice([*GRIDS]))
            assert end_of(second) == 1
            assert f"in use by process {study.pid} on" in Path(f"output.{second.pid}").read_text()
            assert not told(second, "begun")
            os.kill(study.pid, draw.choice([signal.SIGCONT, signal.SIGKILL]))
        assert end_of(study) in {0, 1, STOPPED.get(end), -signal.SIGKILL}
        ledger.check(study, study.exitcode, GRIDS[grid])
    monkeypatch.setattr(QuickWorker, "failing", 0.0)
    for grid, cells in GRIDS.items():
        study = begin(ATTENTION + grid)
        assert end_of(study) == 0
        ledger.check(study, 0, cells)
    assert not [*place.rglob("*.tmp")]


def test_ceilings_interrupted_twice_lose_nothing_and_replace_the_earlier_ones_at_their_end(place):
    words = (
        "ceilings --device cpu --sizes 16 32 --presets --memory-mib 1 --step-presets --loops "
        "3 --name x"
    )
    record = Path("data/ceilings/x/ceilings.json")
    assert end_of(begin(words.replace("loops 3", "loops 2"))) == 0
    earlier = record.read_bytes()
    begun = []
    for number in (signal.SIGINT, signal.SIGKILL):
        study = begin(words, {5: number})
        assert end_of(study) == STOPPED[number]
        assert record.read_bytes() == earlier
        begun += told(study, "begun")[:4]
    study = begin(words)
    assert end_of(study) == 0
    begun += told(study, "begun")
    cells = Cells(read_study(record, STUDIES["ceilings"]).grid)
    assert sorted(name for _, name in begun) == sorted(
        cell.label for group in cells.groups for cell in group.values()
    )
    assert all(
        len(timing.loops.times_s) == 3 * 2
        for timing in read_study(record, STUDIES["ceilings"]).timings
    )
    assert earlier in [path.read_bytes() for path in record.parent.glob("ceilings-before-*.json")]


def test_cells_of_other_conditions_are_refused_mixed_or_set_aside(place):
    words, folder = ATTENTION + next(iter(GRIDS)), DIRECTORY / "cells"
    assert end_of(begin(words)) == 0
    first, *_ = sorted(folder.iterdir())
    first.write_bytes(first.read_bytes().replace(b'"torch": "', b'"torch": "1.'))
    damaged = sorted(folder.iterdir())[1]
    damaged.write_bytes(damaged.read_bytes()[:-9])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for more, status, measured in (("", 1, 0), (" --allow-mixed", 0, 1), (" --fresh", 0, 8)):
        study = begin(words + more)
        assert end_of(study) == status
        assert len(told(study, "begun")) == measured
        if "mixed" in more:
            page = (DIRECTORY / "index.html").read_text()
            there = identity(Device.CPU).torch
            assert f"1.{there}, {there}" in page or f"{there}, 1.{there}" in page
    (aside,) = DIRECTORY.glob("cells-before-*")
    found = {path.name.removesuffix(".invalid"): path.read_bytes() for path in aside.iterdir()}
    assert found == found | {first.name: before[first.name]}


def test_an_own_kernel_that_is_edited_is_measured_anew(place):
    words = (
        ATTENTION.replace("naive sdpa", "naive")
        + "--own mine_kept:flash --d-heads 4 --context-lengths 8 16"
    )
    Path("mine_kept.py").write_text("def flash(q, k, v, is_causal): ...")
    study = begin(words, {4: signal.SIGSTOP})
    os.waitid(os.P_PID, study.pid, os.WSTOPPED | os.WNOWAIT)
    Path("mine_kept.py").write_text("def flash(q, k, v, is_causal): return q")
    os.kill(study.pid, signal.SIGCONT)
    assert end_of(study) == 1, "its last cell may be of either version"
    for measured in (4, 0):
        study = begin(words)
        assert end_of(study) == 0
        assert len(told(study, "begun")) == measured


def test_a_study_is_made_of_its_rows():
    for path in ROOT.glob("data/published/[acf]*/*/*.json"):
        study = read_study(path, STUDIES[path.stem])
        assert study.grid.study(study.rows, study.environment) == study
