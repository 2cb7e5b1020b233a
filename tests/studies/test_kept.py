"""Studies that are interrupted, repeated and run two at once: whatever was measured stays, byte for byte."""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems import cli
from cs336_systems.config import Device
from cs336_systems.interrupt import end_at_once
from cs336_systems.measure.environment import identity
from cs336_systems.record import Failure, Measurement, Status
from cs336_systems.studies import runner
from cs336_systems.studies.operators import PHASES
from tests.report.making import make_environment

pytestmark = pytest.mark.usefixtures("no_pictures")

ENVIRONMENT = replace(make_environment(), identity=identity(Device.CPU))
BASE = "attention --device cpu --implementations naive sdpa --batch-size 1 --name x"
GRIDS = {
    "--d-heads 4 8 --context-lengths 8 16 --passes 2": 8,
    "--d-heads 4 8 --context-lengths 8 16 --passes 3": 8,
    "--d-heads 4 --context-lengths 8 16 32 --passes 2": 6,
}
"""Each with the number of its cells."""
CELL_S = 0.005
DIRECTORY = Path("data/attention/x")
RECORD = DIRECTORY / "attention.json"
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 130, signal.SIGKILL: -signal.SIGKILL}


class QuickWorker:
    """Measures nothing; writes to LOG which cells begin, and which are done when it is asked for more."""

    failing, stops = 0.0, False
    log = Path("log")

    def __init__(self, grid, _gpus):
        self.grid, self.last = grid, None

    def environment(self):
        return ENVIRONMENT

    def measure(self, cell):
        self.close()
        self.write("begun", name := [self.grid.passes, cell.label])
        if self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(CELL_S)
        if random.random() < self.failing:
            return cell.failed(Status.CRASHED, Failure(message="it broke")), ENVIRONMENT
        times_s = tuple(random.random() for _ in range(self.grid.passes))
        rows = tuple(
            replace(row, measurements=tuple(Measurement(phase, times_s) for phase in PHASES))
            for row in cell.rows
        )
        self.last = [name, times_s]
        return rows, ENVIRONMENT

    def close(self):
        if self.last:
            self.write("done", self.last)
        self.last = None

    def write(self, what, value):
        with self.log.open("a") as file:
            file.write(f"{json.dumps([os.getpid(), what, value])}\n")


class Study:
    """The command in a process of its own, forked because to import everything anew takes seconds."""

    def __init__(self, words, stops=False):
        self.process = os.fork()
        if not self.process:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, end_at_once)
            random.seed()
            QuickWorker.stops = stops
            output = os.open(f"output.{os.getpid()}", os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(output, stream)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            status = 99
            try:
                status = cli.main([*BASE.split(), *words.split()])
            finally:
                os._exit(status)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def has_stopped(self):
        """Whether it measures and has stopped itself; waits for that or its end."""
        options = os.WEXITED | os.WSTOPPED | os.WNOWAIT
        return os.waitid(os.P_PID, self.process, options).si_code == os.CLD_STOPPED

    @property
    def output(self):
        return Path(f"output.{self.process}").read_text()

    def told(self, what):
        """What its worker has written to the log."""
        lines = QuickWorker.log.read_text().splitlines() if QuickWorker.log.exists() else ()
        return [value for pid, kind, value in map(json.loads, lines) if (pid, kind) == (self.process, what)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_CellWorker", QuickWorker)
    assert cli.main([*BASE.split(), "--output", "once"]) == 0  # imports all that processes to be forked need
    return tmp_path


def times_in(path):
    """The times of each cell in the file of a study, by passes and what was measured."""
    study = json.loads(path.read_bytes())
    found = {}
    for result in study["results"]:
        cell = result["cell"]
        label = f"{cell['implementation']} {cell['precision']}, width {cell['d_head']}, context {cell['context_length']}"
        found[study["grid"]["passes"], label] = [each["times_s"] for each in result["measurements"]]
    return found


class Ledger:
    """What a schedule has measured so far, from the log alone."""

    def __init__(self):
        self.times, self.files, self.studies = {}, {}, []

    def check(self, study, status, cells):
        """All that was ever done is on the disk as it was, and nothing of it was measured again."""
        begun = {(passes, label) for passes, label in study.told("begun")}
        assert not begun & self.times.keys()
        self.times |= {tuple(name): list(times_s) for name, times_s in study.told("done")}
        files = {path: path.read_bytes() for path in DIRECTORY.glob("cells/*.json")}
        there = {name: times for path in files for name, times in times_in(path).items()}
        for name, times_s in self.times.items():
            assert there[name] == [times_s] * len(PHASES)
        for path, data in self.files.items():
            assert files[path] == data
        self.files = {path: data for path, data in files.items() if all(times_in(path).values())}
        if status == 0:
            made = times_in(RECORD)
            assert made.items() <= there.items()
            assert len(made) == cells
            self.studies.append(RECORD.read_bytes())
        kept = [path.read_bytes() for path in DIRECTORY.glob("attention*.json")]
        assert all(data in kept for data in self.studies)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_to_studies_what_they_have_measured_stays(place, seed, monkeypatch):
    monkeypatch.setattr(QuickWorker, "failing", 0.1)
    draw, ledger = random.Random(seed), Ledger()
    for _ in range(12):
        grid, end = draw.choice([*GRIDS]), draw.choice([None, "second", *STOPPED])
        study = Study(grid, stops=end == "second")
        if end in STOPPED:
            time.sleep(draw.uniform(0, 20 * CELL_S))
            os.kill(study.process, end)
        while end == "second" and study.has_stopped():
            second = Study(draw.choice([*GRIDS]))
            assert second.wait() == 1
            assert f"in use by process {study.process} on" in second.output
            assert not second.told("begun")
            os.kill(study.process, draw.choice([signal.SIGCONT, signal.SIGKILL]))
        status = study.wait()
        assert status in {0, 1, STOPPED.get(end), -signal.SIGKILL}, study.output
        ledger.check(study, status, GRIDS[grid])
    monkeypatch.setattr(QuickWorker, "failing", 0.0)
    for grid, cells in GRIDS.items():
        study = Study(grid)
        assert study.wait() == 0
        ledger.check(study, 0, cells)
    assert not [*place.rglob("*.tmp")]
