"""Injected failures of cells: each becomes a row, and affects neither the next cell nor the
parent.
"""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

from cs336.config import Device
from cs336.record import Environment, Failure, Status
from cs336.studies.records import Cell, Grid, StudyRow
from cs336.studies.runner import Cells, run_study
from cs336.sweep import isolation
from cs336.sweep.store import SweepError

ROOT = Path(__file__).parents[2]
CELLS = 3
FAILING = 1
HANGING = ["sleep", "601"]


@dataclass(frozen=True)
class ProcessRow(StudyRow):
    """What a cell measures is the number of its process."""

    number: int
    pid: int | None = None
    status: Status = Status.OK
    failure: Failure | None = None


class ProcessStudy(NamedTuple):
    rows: tuple[ProcessRow, ...]
    environment: Environment

    @property
    def statuses(self):
        return [row.status for row in self.rows]


@dataclass(frozen=True)
class ProcessGrid(Grid):
    """The fault, a function of this module, happens in one cell."""

    fault: str | None = None
    numbers: tuple[tuple[int, ...], ...] = (tuple(range(CELLS)),)
    timeout_s: float | None = None
    device: Device = Device.CPU
    MEASURE: str = f"{__name__}:measure"

    def groups(self):
        return [
            [Cell(label=f"cell {i}", rows=(ProcessRow(i),)) for i in numbers]
            for numbers in self.numbers
        ]

    def study(self, rows, environment):
        return ProcessStudy(rows, environment)


# What happens in a worker, which finds it by its name.
def measure(grid, rows):
    if rows[0].number == FAILING and grid.fault:
        globals()[grid.fault]()
    return [replace(row, pid=os.getpid()) for row in rows]


def run_out_of_memory():
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of"
    )


def exit_at_once():
    os._exit(3)


def fault():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    """Hangs with a child in a session of its own, whose number it prints."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(child.pid, flush=True)
    subprocess.run(HANGING)


def print_much():
    """More than a pipe holds."""
    print("x" * 2**20, flush=True)


def fail_on_the_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def wait_until_it_hangs(objects: list[object], timeout: float) -> list[object]:
    """Like multiprocessing's `wait`, but the time is over as soon as a worker hangs, and not
    before.
    """
    while not (ready := wait(objects, timeout=0.05)):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline() == HANGING:
                    return []
    return ready


FAULTS = {
    run_out_of_memory: (Status.OOM, "out of memory"),
    exit_at_once: (Status.CRASHED, "ended with status 3"),
    fault: (Status.CRASHED, "died of SIGSEGV"),
    be_killed: (Status.KILLED, "SIGKILL"),
    hang: (Status.TIMEOUT, "raise --timeout-s"),
    fail_on_the_device: (Status.CUDA_ERROR, "illegal memory access"),
}


@pytest.mark.parametrize("function", FAULTS, ids=lambda function: function.__name__)
def test_a_failure_is_a_row_and_the_next_cell_has_a_process_of_its_own(
    function, monkeypatch: pytest.MonkeyPatch
) -> None:
    if function is hang:
        monkeypatch.setattr(isolation, "wait", wait_until_it_hangs)
    (before, failed, after), _ = run_study(ProcessGrid(function.__name__, timeout_s=60.0))
    status, words = FAULTS[function]
    assert (before.status, failed.status, after.status) == (Status.OK, status, Status.OK)
    assert words in failed.failure.message
    assert failed.failure.where == "cell 1"
    assert failed.failure.requested_bytes == (8 * 2**30 if function is run_out_of_memory else None)
    assert failed.pid is None
    assert before.pid != after.pid
    if function is hang:
        assert not psutil.pid_exists(int(failed.failure.log_tail))


def test_a_study_whose_cells_all_crash_still_has_an_environment() -> None:
    rows, environment = run_study(ProcessGrid(exit_at_once.__name__, numbers=((FAILING,),)))
    assert [row.status for row in rows] == [Status.CRASHED]
    assert environment.identity.torch == torch.__version__


def test_a_study_whose_workers_cannot_start_is_refused_with_the_reason() -> None:
    with pytest.raises(SweepError, match=r"ended with status 1.*No module named 'nowhere'"):
        run_study(ProcessGrid(MEASURE="nowhere:measure"))
    with pytest.raises(SweepError, match="raise --timeout-s"):
        run_study(ProcessGrid(timeout_s=1e-9))


def test_healthy_cells_of_a_group_share_a_process() -> None:
    (first, second, other), _ = run_study(ProcessGrid(numbers=((0, 1), (2,))))
    assert first.pid == second.pid != other.pid


def test_a_worker_that_prints_more_than_a_pipe_holds_is_not_held_up() -> None:
    rows, _ = run_study(ProcessGrid(print_much.__name__, timeout_s=60.0))
    assert [row.status for row in rows] == [Status.OK] * CELLS


def test_each_cell_is_announced_and_its_rows_are_handed_over_at_once() -> None:
    seen: list[object] = []
    cells = Cells(ProcessGrid())
    rows, _ = run_study(
        cells.grid,
        lambda *words: seen.append(words),
        cells,
        lambda: seen.append(len(cells.study().rows)),
    )
    assert seen == [
        ("importing PyTorch", 0, 0),
        *(
            event
            for number in range(CELLS)
            for event in ((f"cell {number}", number, CELLS), number + 1)
        ),
    ]
    assert [row.number for row in rows] == [0, 1, 2]


INTERRUPTED = """
import multiprocessing, sys
from pathlib import Path
import psutil
from cs336.config import Device
from cs336.studies.operators import AttentionGrid, Implementation
from cs336.studies.runner import Cells, run_study

KEPT = []


class KeepingGrid(AttentionGrid):
    MEASURE = "study:measure"


def measure(grid, rows):
    KEPT.append(multiprocessing.get_context("spawn").Semaphore())
    print(KEPT[0]._semlock.name, file=Path("semaphore").open("w"), flush=True)
    return rows


def interrupt():
    if len(cells.study().results) == 2:
        raise KeyboardInterrupt


if __name__ == "__main__":
    grid = KeepingGrid(
        device=Device.CPU,
        batch_size=1,
        d_heads=(4,),
        context_lengths=(8, 16, 32),
        implementations=(Implementation.NAIVE,),
        passes=1,
        warmup_passes=1,
    )
    assert [r.status for r in run_study(grid).results] == ["ok"] * 3
    cells = Cells(grid)
    try:
        run_study(grid, cells=cells, on_progress=interrupt)
    except KeyboardInterrupt:
        pass
    assert "torch" not in sys.modules
    (server,) = [
        p
        for p in psutil.Process().children()
        if p.children() or "forkserver" in " ".join(p.cmdline())
    ]
    assert not server.children()
"""


def test_the_parent_needs_no_torch_and_an_interrupted_study_leaves_nothing(tmp_path: Path) -> None:
    """No process, and no semaphore such as those of the compiler. On Linux one is a file, whose
    end can be seen.
    """
    (tmp_path / "study.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "study.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    name = (tmp_path / "semaphore").read_text().strip()
    assert not Path(f"/dev/shm/sem.{name.removeprefix('/')}").exists()
