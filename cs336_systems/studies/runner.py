"""Measures the cells of a study in worker processes, so that no cell's failure touches another. Needs no torch itself.

A worker measures the cells of a group, one after the other. A cell that fails in any way (out of memory, a CUDA error,
a crash, a hang) takes its worker with it, and the next cell gets a fresh one.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import TypeAlias

from cs336_systems.config import Device
from cs336_systems.measure.nvml import Gpu, visible_gpus
from cs336_systems.record import Environment
from cs336_systems.studies.records import Cell, CellStatus, Grid, RowT
from cs336_systems.sweep.isolation import WorkerProcess, fork_server, preload
from cs336_systems.sweep.locks import exclusive, gpu_lock_path
from cs336_systems.sweep.process import adopt_orphans, begin_worker
from cs336_systems.sweep.store import SweepError

Say: TypeAlias = Callable[[str, int, int], object]
"""Called before each cell with a few words, how many cells are done, and of how many."""
Answer: TypeAlias = tuple[tuple[RowT, ...], bool, Environment | None]
"""Rows of a cell, whether its worker is fit for another cell, and where it was measured."""


def run_cells(
    grid: Grid,
    groups: Sequence[Sequence[Cell[RowT]]],
    measure: str,
    say: Say | None = None,
    *,
    timeout_s: float | None = None,
    num_gpus: int = 1,
    on_rows: Callable[[tuple[RowT, ...], Environment | None], object] = lambda *_: None,
) -> tuple[tuple[RowT, ...], Environment]:
    """Measure every cell; return all rows, and where they were measured, as the last worker that could say so saw it.

    The cells of a group share a process as long as none of them fails. `measure` names a function as `module:function`;
    it gets the grid and the rows of a cell, which have only their parameters, and returns the rows with what it
    measured. `on_rows` gets the rows so far after each cell, so that an interrupted study is not lost. Raises
    LockedError where a sweep is at work on a GPU, and SweepError where no worker lives for long enough to say where it
    is.
    """
    adopt_orphans()
    preload("cs336_systems.studies.cell", measure.partition(":")[0])
    say = say or (lambda *_: None)
    gpus = visible_gpus()[:num_gpus] if grid.device is Device.CUDA else ()
    rows: tuple[RowT, ...] = ()
    environment: Environment | None = None
    worker: _CellWorker | None
    done, total = 0, sum(map(len, groups))
    with contextlib.ExitStack() as stack:
        for gpu in gpus:
            stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})"))
        say("importing PyTorch", 0, 0)
        for cells in groups:
            worker = None
            for cell in cells:
                if worker is None:
                    worker = _CellWorker(grid, measure, gpus)
                    stack.callback(worker.end)
                say(cell.label, done, total)
                measured, is_fit, seen = worker.measure(cell, timeout_s)
                if not is_fit:
                    worker.end()
                    worker = None
                rows, environment, done = (*rows, *measured), seen or environment, done + 1
                on_rows(rows, environment)
            if worker is not None:
                worker.end()
        if environment is None:  # every cell has ended its worker: ask one that has nothing to measure
            worker = _CellWorker(grid, measure, gpus)
            stack.callback(worker.end)
            _, _, environment = worker.measure(Cell(label="environment", rows=()), timeout_s)
    if environment is None:
        raise SweepError("no process that measures could start: see what it printed, and run the same command again")
    return rows, environment


class _CellWorker:
    """A process that measures the cells that it is sent, one after the other."""

    def __init__(self, grid: Grid, measure: str, gpus: Sequence[Gpu]) -> None:
        self._connection, theirs = fork_server().Pipe()
        uuids = [gpu.uuid for gpu in gpus]
        self._worker = WorkerProcess(_serve, theirs, grid, measure, uuids)
        theirs.close()

    def measure(self, cell: Cell[RowT], timeout_s: float | None) -> Answer[RowT]:
        """The rows of the cell, or rows of the failure that the worker's silence or end means."""
        with contextlib.suppress(ConnectionError):  # the worker died before; receiving says so
            self._connection.send(cell)
        is_in_time = self._wait(timeout_s)
        if is_in_time:
            with contextlib.suppress(EOFError, ConnectionError):
                answer: Answer[RowT] = self._connection.recv()
                return answer
        else:
            self._worker.kill()
        status, failure = self._worker.failure(self._worker.reap(), None if is_in_time else timeout_s)
        return cell.failed(CellStatus(status), replace(failure, where=cell.label)), False, None

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait until the worker has answered or ended; False where it does neither in time."""
        started = monotonic()
        ends: list[Connection | int] = [self._connection, self._worker.process.sentinel]
        while True:
            log = [] if self._worker.log_closed else [self._worker.log]
            left_s = None if timeout_s is None else max(0.0, started + timeout_s - monotonic())
            ready = wait([*ends, *log], left_s)
            self._worker.drain()
            if not ready or any(end in ready for end in ends):
                return bool(ready)

    def end(self) -> None:
        """Kill the worker and all that descends from it; once its rows are here, nothing in it is of use."""
        self._worker.kill()
        self._worker.reap()
        self._connection.close()


def _serve(connection: Connection, grid: Grid, measure: str, gpu_uuids: Sequence[str], log: Connection) -> None:
    """Entry of a worker, which sees the GPUs in `gpu_uuids`; without any, those that this process sees."""
    begin_worker(log)
    if gpu_uuids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_uuids)
    from cs336_systems.studies import cell  # brings torch, which this module's own process must not import

    cell.serve(connection, grid, measure)
