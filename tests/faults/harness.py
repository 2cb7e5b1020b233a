"""Sweeps to go wrong: small configurations, in this process or by the command, and what is left
of them.
"""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cs336.config import SIZES, RunConfig
from cs336.sweep import run as sweep_module
from cs336.sweep.isolation import Worker
from cs336.sweep.keep import Listener
from cs336.sweep.run import run_sweep
from cs336.sweep.store import writing

ROOT = Path(__file__).parents[2]
SHAPE = replace(SIZES["tiny"], vocab_size=11, context_length=8, d_model=8)
NAME = "faulty"
MODELS = "faulty_models"
"""Module of the models, linked into the current directory. Within tests/, each digest would read
the whole folder.
"""
SWEEP = ROOT / "benchmark_sweep.py"
WITHOUT_REPORT = ROOT / "tests/faults/sweep_without_report.py"
PATIENCE_S = 120
"""Far longer than anything here takes on an idle machine: only a hang lasts so long."""


def config(fault="good", **changes):
    shape = replace(SHAPE, context_length=changes.pop("context_length", SHAPE.context_length))
    small = RunConfig(size="custom", model=shape, warmup_steps=2, measured_steps=2)
    return replace(small, model_factory=f"{MODELS}:{fault}", **changes)


@contextmanager
def time_is_up(when):
    """In this process's sweeps a worker has used up its time as soon as `when(worker)` is true, and
    not before.

    How long a good run takes on a busy machine does not matter then.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Worker, "elapsed_s", property(lambda worker: PATIENCE_S if when(worker) else 0.0)
        )
        patch.setattr(sweep_module, "_TICK_S", 0.05)
        yield


class Witness(Listener):
    """Remembers what a sweep told it."""

    def __init__(self):
        self.kept, self.todo, self.problems, self.runs, self.ticks = [], [], [], [], 0
        self.explaining_runs, self.explanations = [], []

    def planned(self, kept, todo, problems):
        self.kept, self.todo, self.problems = list(kept), list(todo), list(problems)

    def started(self, config, gpu):
        self.runs.append(config)

    def explaining(self, config):
        self.explaining_runs.append(config)

    def explained(self, config, failure):
        self.explanations.append((config, failure))

    def tick(self):
        self.ticks += 1


def lay_out_models(directory):
    """Let the workers of sweeps that are started in `directory` find the models that go wrong."""
    (directory / f"{MODELS}.py").symlink_to(ROOT / "tests/faults/models.py")


def sweep(directory, *configs, timeout_s=PATIENCE_S, witness=None, **options):
    with writing(directory):
        return run_sweep(configs, directory, witness or Witness(), timeout_s=timeout_s, **options)


def path_of(config, directory):
    return directory / "runs" / f"{config.key}.json"


def contents(directory):
    """Every file in `directory` by name: its bytes, and when they were written."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in directory.iterdir()
        if path.is_file()
    }


def command(fault="good", contexts=(4, 8, 16), script=WITHOUT_REPORT):
    """The sweep as a user types it, in the current directory."""
    shape = {"vocab-size": 11, "d-model": 8}
    steps = {"warmup-steps": 2, "measured-steps": 2, "timeout-s": PATIENCE_S}
    flags = {**shape, **steps, "device": "cpu", "name": NAME, "model": f"{MODELS}:{fault}"}
    return [
        sys.executable,
        str(script),
        "--context-lengths",
        *map(str, contexts),
        *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
    ]


def results(directory):
    return directory / "data" / "e2e_benchmark" / NAME


def runs(directory):
    return results(directory) / "runs"


def eventually(condition, patience_s=PATIENCE_S):
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + patience_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def processes_in(directory):
    """Processes at work in `directory`, whoever their parent is: those that a sweep there has left.

    Left out: this process, and multiprocessing's own two helpers, which serve all tests.
    """
    own = {
        os.getpid(),
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
    found = psutil.process_iter(["cwd", "cmdline"])
    return [
        process
        for process in found
        if process.info["cwd"] == str(directory) and process.pid not in own
    ]


class Command:
    """A sweep in a process and session of its own, as in a terminal of its own."""

    def __init__(self, directory, words, **options):
        self.directory = directory
        self._outputs = [(directory / name).open("wb") for name in ("stdout", "stderr")]
        streams = dict(zip(("stdout", "stderr"), self._outputs, strict=True))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        options = (
            {"cwd": directory, "env": environment, "start_new_session": True} | streams | options
        )
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, **options)

    @property
    def stdout(self):
        return (self.directory / "stdout").read_text()

    @property
    def stderr(self):
        return (self.directory / "stderr").read_text()

    def wait(self, patience_s=PATIENCE_S):
        return self.process.wait(patience_s)

    def wait_for(self, path):
        """Until `path` is there, or the command ends."""
        assert eventually(lambda: path.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.stderr

    def signal(self, number):
        """As the terminal does: to the whole process group."""
        os.killpg(self.process.pid, number)

    def close(self):
        for process in [self.process, *processes_in(self.directory)]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait()
        for output in self._outputs:
            output.close()
