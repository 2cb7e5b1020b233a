"""Measures the cells of a study in worker processes, so that no cell's failure touches another.
Needs no torch itself.

A worker measures the cells of a group, one after the other. A cell that fails in any way (out of
memory, a CUDA error, a crash, a hang) takes its worker with it, and the next cell gets a fresh one.

The folder of cells is the whole state of a study: one that was interrupted is resumed by starting
it again. A cell that has a result is not measured again. Studies with different grids share the
folder.
"""

import contextlib
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, Generic, cast

import msgspec

from ..config import Device
from ..files import encode_json, write_atomically
from ..measure.environment import identity
from ..measure.inputs import source_of
from ..measure.nvml import Gpu, visible_gpus
from ..record import Environment, RecordError
from ..sweep import store
from ..sweep.isolation import WorkerProcess, fork_server, preload, wait_for_workers
from ..sweep.process import adopt_orphans, begin_worker
from ..text import counted, plain_word, print_aside
from .records import Answer, Cell, Grid, RowT, StudyT, read_study


def run_study(
    grid: Grid[RowT, StudyT],
    announce: Callable[[str, int, int], object] = lambda *_: None,
    cells: "Cells[RowT, StudyT] | None" = None,
    on_progress: Callable[[], object] = lambda: None,
) -> StudyT:
    """Measure the cells of the grid that are not done; a cell that fails has rows that say so.

    `announce` is called before each cell with its label, how many cells are done, and how many
    there are. `cells` keeps each before `on_progress` is called. Raises LockedError if a sweep uses
    one of the GPUs, and SweepError if no worker starts.
    """
    cells = cells or Cells(grid)
    groups = cells.todo()
    if not groups:
        return cells.study()
    adopt_orphans()
    preload("cs336.studies.cell", grid.MEASURE.partition(":")[0])
    gpus = visible_gpus()[: grid.world_size] if grid.device is Device.CUDA else ()
    done = 0
    total = sum(map(len, groups))
    seconds: defaultdict[str, float] = defaultdict(float)
    with contextlib.ExitStack() as stack:
        for gpu in gpus:
            lock = store.exclusive(store.gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})")
            stack.enter_context(lock)
        announce("importing PyTorch", 0, 0)
        worker = stack.enter_context(contextlib.closing(_CellWorker(grid, gpus)))
        for group in groups:
            for key, cell in group.items():
                announce(cell.label, done, total)
                started_s = monotonic()
                rows = worker.measure(cell)
                seconds[cell.part] += monotonic() - started_s
                _check_source(grid)
                done += 1
                cells.keep(key, rows, worker.environment)
                on_progress()
            worker.close()
    if len(seconds) > 1:
        parts = [f"{part} {part_s:.1f}" for part, part_s in seconds.items()]
        print_aside(f"seconds by part: {', '.join(parts)}")
    return cells.study()


def _check_source(grid: Grid[RowT, StudyT]) -> None:
    """Raise SweepError if the user's own function is not the one that the grid began with."""
    if grid.own is not None and grid.source not in (None, source_of(grid.own)):
        raise store.SweepError(
            f"{grid.own} changed while it was measured; run the same command again"
        )


class Cells(Generic[RowT, StudyT]):
    """The cells of a grid by key, and of each that is measured a study of this cell alone.

    These studies are the files of `folder`. Without a folder nothing is written.
    """

    def __init__(self, grid: Grid[RowT, StudyT], folder: Path | None = None) -> None:
        """The cells of `grid`, none of them measured yet; results are kept in `folder`, if there is
        one.
        """
        self.grid, self.folder = grid, folder
        self.groups = list(_keyed(grid))
        self.measured: dict[str, Any] = {}

    def todo(self) -> list[dict[str, Cell[RowT]]]:
        """The groups of the cells that are not measured yet."""
        groups = []
        for group in self.groups:
            left = {key: cell for key, cell in group.items() if key not in self.measured}
            if left:
                groups.append(left)
        return groups

    def keep(self, key: str, rows: tuple[RowT, ...], environment: Environment) -> None:
        """Write a cell that has just been measured, and remember it."""
        alone = self.grid.study(rows, environment)
        if self.folder is not None:
            write_atomically(self.folder / f"{key}.json", encode_json(alone))
        self.measured[key] = alone

    def study(self) -> StudyT:
        """The study of all measured cells in the order of the grid, with the last one's
        environment, and those of other conditions that --allow-mixed let in.
        """
        studies = [self.measured[key] for key in chain(*self.groups) if key in self.measured]
        rows = tuple(chain.from_iterable(study.rows for study in studies))
        environments = {study.environment.identity: study.environment for study in studies}
        last = studies[-1].environment
        del environments[last.identity]
        joint: Any = self.grid.study(rows, last)
        if environments:
            joint = replace(joint, other_environments=tuple(environments.values()))
        return cast("StudyT", joint)


def resume(
    grid: Grid[RowT, StudyT], kind: type[StudyT], folder: Path, *, fresh: bool, allow_mixed: bool
) -> Cells[RowT, StudyT]:
    """The cells of a study with those in `folder`, whose lock is held; `fresh` sets these aside.

    Raises SweepError for results that were not measured under the present conditions, unless they
    may be mixed, and for a file of a later version of this program.
    """
    if fresh:
        store.set_aside(folder)
    cells = Cells(grid, folder)
    paths = (folder / f"{key}.json" for key in chain(*cells.groups))
    for path in filter(Path.exists, paths):
        try:
            study: Any = read_study(path, kind)
            if all(status.is_result for status in study.statuses):
                cells.measured[path.stem] = study
        except RecordError as error:
            store.set_aside_unreadable([error])
            print_aside(f"set aside {error}")
    if not allow_mixed:
        store.refuse_to_mix([*cells.measured.values()], identity(grid.device), (), folder.parent)
    if cells.measured:
        left = sum(map(len, cells.todo()))
        print_aside(f"{counted(len(cells.measured), 'cell')} kept, {left} to go")
    return cells


def _keyed(grid: Grid[RowT, StudyT]) -> Iterator[dict[str, Cell[RowT]]]:
    """The groups of the grid, each as its cells by key.

    A key is made from the cell's rows and from those fields of the grid that influence its
    measurement. So equal cells of different grids have one key, and are measured once.
    """
    conditions: dict[str, object] = asdict(grid)  # type: ignore[call-overload]
    # fields with several values, which may be None instead, only say which cells the grid has
    selecting = {name for name, value in conditions.items() if isinstance(value, tuple | None)}
    for name in selecting | grid.SELECTING:
        conditions.pop(name, None)
    numbers: Counter[bytes] = Counter()  # a grid may have the same cell several times
    for group in grid.groups():
        keyed = {}
        for cell in group:
            content = msgspec.json.encode((conditions, cell.rows))
            numbers[content] += 1
            digest = hashlib.sha256(content + b"%d" % numbers[content]).hexdigest()[:12]
            keyed[f"{plain_word(cell.label)[:80]}_{digest}"] = cell
        yield keyed


class _CellWorker(Generic[RowT, StudyT]):
    """Measures cells in a process; after one that failed, the next cell gets a fresh process."""

    environment: Environment
    """Where the process measures."""

    def __init__(self, grid: Grid[RowT, StudyT], gpus: Sequence[Gpu]) -> None:
        """Start the process that measures cells of `grid` on these GPUs."""
        self._grid = grid
        self._gpu_uuids = [gpu.uuid for gpu in gpus]
        self._start()

    def measure(self, cell: Cell[RowT]) -> tuple[RowT, ...]:
        """The rows of the cell; rows of its failure if the process ends or hangs."""
        if self._connection.closed:
            self._start()
        # the process has already died; receiving will raise
        with contextlib.suppress(ConnectionError):
            self._connection.send(cell)
        answer = self._receive()
        if not isinstance(answer, Answer):
            status, failure = answer
            return cell.failed(status, replace(failure, where=cell.label))
        if not answer.is_fit:
            self.close()
        return answer.rows

    def _start(self) -> None:
        """Start a process, which sends its environment. Raises SweepError if it cannot."""
        self._connection, theirs = fork_server().Pipe()
        self._process = WorkerProcess(
            _serve, theirs, self._grid, self._gpu_uuids, timeout_s=self._grid.timeout_s
        )
        theirs.close()
        answer = self._receive()
        if isinstance(answer, Environment):
            self.environment = answer
            return
        _, failure = answer
        last_line = (failure.log_tail or "").splitlines()[-1:]
        raise store.SweepError(": ".join(["no worker could start", failure.message, *last_line]))

    def _receive(self) -> Any:  # noqa: ANN401 (what the process sends)
        """What the process sends next, or the status and the failure of one that ends, or does
        nothing within the time of a cell, and is killed.
        """
        process = self._process
        started = monotonic()
        timeout_s = self._grid.timeout_s
        while True:
            left_s = None if timeout_s is None else max(0.0, started + timeout_s - monotonic())
            ready = wait_for_workers([process], [self._connection], left_s)
            # otherwise it has only printed
            if not ready or self._connection in ready or process.process.sentinel in ready:
                break
        if ready:
            with contextlib.suppress(EOFError, ConnectionError):
                return self._connection.recv()
        else:
            process.kill()
        end = process.failure(process.reap(), None if ready else timeout_s)
        self.close()
        return end

    def close(self) -> None:
        """Kill the process and all that descends from it; the rows are here, so nothing in it is
        needed any more.
        """
        if not self._connection.closed:
            self._process.kill()
            self._process.reap()
            self._connection.close()


def _serve(
    connection: Connection, grid: Grid[RowT, StudyT], gpu_uuids: Sequence[str], log: Connection
) -> None:
    """Entry of a worker, which sees the GPUs in `gpu_uuids`, or all that this process sees if
    that is empty.
    """
    begin_worker(log, gpu_uuids)
    # imports torch, which this module's own process must not
    from . import cell

    cell.serve(connection, grid)
