"""Measures the cells of a study in worker processes, so that no cell's failure touches another. Needs no torch itself.

A worker measures the cells of a group, one after the other. A cell that fails in any way (out of memory, a CUDA error,
a crash, a hang) takes its worker with it, and the next cell gets a fresh one.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic
from typing import Generic, TypeAlias

from cs336_systems.config import Device
from cs336_systems.measure.inputs import source_of
from cs336_systems.measure.nvml import Gpu, visible_gpus
from cs336_systems.record import Environment, Failure, Status
from cs336_systems.studies.kept import Cells
from cs336_systems.studies.records import Cell, Grid, RowT, StudyT
from cs336_systems.sweep.isolation import WorkerProcess, fork_server, preload, wait_for_workers
from cs336_systems.sweep.process import adopt_orphans, begin_worker
from cs336_systems.sweep.store import SweepError, exclusive, gpu_lock_path

Announce: TypeAlias = Callable[[str, int, int], object]
"""Called before each cell with its label, how many cells are done, and how many there are."""


def run_study(
    grid: Grid[RowT, StudyT],
    announce: Announce = lambda *_: None,
    cells: Cells[RowT, StudyT] | None = None,
    on_progress: Callable[[], object] = lambda: None,
) -> StudyT:
    """Measure the cells of the grid that are not done; a cell that fails has rows that say so.

    `cells` keeps each before `on_progress` is called. Raises LockedError if a sweep uses one of the GPUs, and
    SweepError if no worker starts.
    """
    cells = cells or Cells(grid)
    groups = cells.todo()
    if not groups:
        return cells.study()
    adopt_orphans()
    preload("cs336_systems.studies.cell", grid.MEASURE.partition(":")[0])
    gpus = visible_gpus()[: grid.world_size] if grid.device is Device.CUDA else ()
    done, total = 0, sum(map(len, groups))
    with contextlib.ExitStack() as stack:
        for gpu in gpus:
            stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})"))
        announce("importing PyTorch", 0, 0)
        worker = stack.enter_context(contextlib.closing(_CellWorker(grid, gpus)))
        environment = worker.environment()
        for group in groups:
            for key, cell in group.items():
                announce(cell.label, done, total)
                rows, seen = worker.measure(cell)
                if grid.own is not None and grid.source not in (None, source_of(grid.own)):
                    raise SweepError(f"{grid.own} changed while it was measured; run the same command again")
                environment, done = seen or environment, done + 1
                cells.keep(key, rows, environment)
                on_progress()
            worker.close()
    return cells.study()


class _CellWorker(Generic[RowT, StudyT]):
    """Measures cells in a process that starts with the next cell whenever there is none."""

    def __init__(self, grid: Grid[RowT, StudyT], gpus: Sequence[Gpu]) -> None:
        self._grid, self._gpu_uuids = grid, [gpu.uuid for gpu in gpus]
        self._process: WorkerProcess | None = None

    def environment(self) -> Environment:
        """Where cells are measured. Raises SweepError if no worker can say so."""
        answer = self._ask(Cell(label="environment", rows=()))
        if len(answer) == 3:
            return answer[2]
        last_line = (answer[1].log_tail or "").splitlines()[-1:]
        raise SweepError(": ".join(["no worker could start", answer[1].message, *last_line]))

    def measure(self, cell: Cell[RowT]) -> tuple[tuple[RowT, ...], Environment | None]:
        """The rows of the cell, and where they were measured; rows of its failure if the process ends or hangs."""
        answer = self._ask(cell)
        if len(answer) == 2:
            status, failure = answer
            return cell.failed(status, replace(failure, where=cell.label)), None
        rows, is_fit, environment = answer
        if not is_fit:
            self.close()
        return rows, environment

    def _ask(self, cell: Cell[RowT]) -> tuple[tuple[RowT, ...], bool, Environment] | tuple[Status, Failure]:
        """Send the cell to the process, and return its answer, or how it ended or was killed without one."""
        process = self._process or self._start()
        with contextlib.suppress(ConnectionError):  # the process has already died; receiving will raise
            self._connection.send(cell)
        is_in_time = self._wait(process)
        if is_in_time:
            with contextlib.suppress(EOFError, ConnectionError):
                answer: tuple[tuple[RowT, ...], bool, Environment] = self._connection.recv()
                return answer
        else:
            process.kill()
        end = process.failure(process.reap(), None if is_in_time else self._grid.timeout_s)
        self.close()
        return end

    def _start(self) -> WorkerProcess:
        self._connection, theirs = fork_server().Pipe()
        self._process = WorkerProcess(_serve, theirs, self._grid, self._gpu_uuids)
        theirs.close()
        return self._process

    def _wait(self, process: WorkerProcess) -> bool:
        """Wait until the process has answered or ended; False if it does neither within the time of a cell."""
        started, timeout_s = monotonic(), self._grid.timeout_s
        while True:
            left_s = None if timeout_s is None else max(0.0, started + timeout_s - monotonic())
            ready = wait_for_workers([process], [self._connection], left_s)
            if not ready or self._connection in ready or process.process.sentinel in ready:
                return bool(ready)

    def close(self) -> None:
        """Kill the process and all that descends from it; the rows are here, so nothing in it is needed any more."""
        if self._process is not None:
            self._process.kill()
            self._process.reap()
            self._connection.close()
            self._process = None


def _serve(connection: Connection, grid: Grid[RowT, StudyT], gpu_uuids: Sequence[str], log: Connection) -> None:
    """Entry of a worker, which sees the GPUs in `gpu_uuids`, or all that this process sees if that is empty."""
    begin_worker(log, gpu_uuids)
    from cs336_systems.studies import cell  # imports torch, which this module's own process must not

    cell.serve(connection, grid)
