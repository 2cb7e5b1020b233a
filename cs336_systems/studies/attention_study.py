"""The attention grid, measured so that no cell's failure touches another. Needs no torch: the workers have it.

A worker measures the cells of one implementation and precision, the smallest first. A cell that fails in any way (out
of memory, a CUDA error, a crash, a hang) takes its worker with it, and the next cell gets a fresh one.
"""

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from cs336_systems.config import Device
from cs336_systems.measure.nvml import Gpu, visible_gpus
from cs336_systems.record import Environment, Failure
from cs336_systems.studies.attention_records import (
    AttentionCell,
    AttentionGrid,
    AttentionStudy,
    CellResult,
    CellStatus,
)
from cs336_systems.sweep.isolation import LOG_TAIL_BYTES, fork_server, join, kill_orphans, preload, start
from cs336_systems.sweep.locks import exclusive, gpu_lock_path
from cs336_systems.sweep.process import adopt_orphans

Measure = Callable[[AttentionGrid, AttentionCell], CellResult]
"""Measures one cell, in the worker; it is found there by its module and name."""

_HEALTHY = (CellStatus.OK, CellStatus.UNAVAILABLE)
"""After any other end the worker is replaced."""


def run_attention_study(
    grid: AttentionGrid,
    on_progress: Callable[[AttentionStudy], None] | None = None,
    measure: Measure | None = None,
) -> AttentionStudy:
    """Measure every cell; `on_progress` gets the study so far after each, so that an interrupted one is not lost.

    `measure` takes the place of attention_cell.measure_cell. Raises LockedError where a sweep is at work on the GPU.
    """
    adopt_orphans()
    preload("cs336_systems.studies.attention_cell")
    study = AttentionStudy(grid=grid)
    gpu = next(iter(visible_gpus()), None) if grid.device is Device.CUDA else None
    with contextlib.ExitStack() as stack:
        if gpu is not None:
            stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})"))
        for cells in grid.groups:
            for result, environment in _measure_group(grid, cells, gpu, measure):
                results = (*study.results, result)
                study = replace(study, results=results, environment=study.environment or environment)
                if on_progress is not None:
                    on_progress(study)
    return study


def _measure_group(
    grid: AttentionGrid, cells: Sequence[AttentionCell], gpu: Gpu | None, measure: Measure | None
) -> Iterator[tuple[CellResult, Environment | None]]:
    worker: _Worker | None = None
    try:
        for cell in cells:
            worker = worker or _Worker(grid, gpu, measure)
            result, environment = worker.measure(cell)
            if result.status not in _HEALTHY:
                worker.end()
                worker = None
            yield result, environment
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    """A forked process that measures one cell after the other, in a session of its own."""

    def __init__(self, grid: AttentionGrid, gpu: Gpu | None, measure: Measure | None) -> None:
        self._grid = grid
        self._log = tempfile.NamedTemporaryFile(prefix="cs336-attention-")  # noqa: SIM115 (closed by end)
        self._connection, theirs = fork_server().Pipe()
        uuid = gpu.uuid if gpu else None
        self._process = fork_server().Process(target=_serve, args=(theirs, self._log.name, grid, uuid, measure))
        start(self._process)
        theirs.close()

    def measure(self, cell: AttentionCell) -> tuple[CellResult, Environment | None]:
        """The result of the cell, or the failure that the worker's silence or end means."""
        with contextlib.suppress(ConnectionError):  # it died before it was asked: receiving will say so
            self._connection.send(cell)
        if not wait([self._connection, self._process.sentinel], timeout=self._grid.timeout_s):
            message = f"no result within {self._grid.timeout_s:g} s; raise --timeout-s if it needs longer"
            return self._failure(cell, CellStatus.TIMEOUT, message), None
        try:
            answer: tuple[CellResult, Environment] = self._connection.recv()
        except (EOFError, ConnectionError):
            return self._death(cell), None
        return answer

    def end(self) -> None:
        """Kill the worker and all that descends from it; nothing in it is of use once its results are here."""
        self._process.kill()
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        join(self._process)
        kill_orphans()
        self._process.close()
        self._connection.close()
        self._log.close()

    def _death(self, cell: AttentionCell) -> CellResult:
        code = join(self._process)
        if code == -signal.SIGKILL:
            message = "killed by SIGKILL: by a person, or by the system when memory ran out (see dmesg)"
            return self._failure(cell, CellStatus.KILLED, message, "SIGKILL")
        name = _signal_name(code)
        how = f"died of {name}" if name else f"ended with status {code}"
        return self._failure(cell, CellStatus.CRASHED, f"the worker {how} and gave no result", name)

    def _failure(
        self, cell: AttentionCell, status: CellStatus, message: str, signal_name: str | None = None
    ) -> CellResult:
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - LOG_TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").replace("\0", "\\0").strip() or None
        failure = Failure(message=message, where=cell.implementation, signal=signal_name, log_tail=tail)
        return CellResult(cell=cell, status=status, failure=failure)


def _signal_name(exit_code: int | None) -> str | None:
    """The signal that a process died of, or None if it ended by itself."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # most of the real-time signals have no name
        return f"signal {-exit_code}"


def _serve(connection: Connection, log: str, grid: AttentionGrid, uuid: str | None, measure: Measure | None) -> None:
    # Imported here, in the child, because the parent must not import torch.
    from cs336_systems.studies import attention_cell

    attention_cell.serve(connection, log, grid, uuid, measure)
