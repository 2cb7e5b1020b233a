"""What is kept of a study: each cell that was measured, in a file of its own.

The folder of cells is the whole state: an interrupted study is resumed by starting it again. A cell
that has a result is not measured again; one that crashed, hung or was killed is. Studies with
different grids share the folder.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic

import msgspec

from cs336_systems.files import encode_json, write_atomically
from cs336_systems.measure.environment import identity
from cs336_systems.record import Environment, RecordError
from cs336_systems.studies.records import Cell, Grid, RowT, StudyT, read_study
from cs336_systems.sweep import store
from cs336_systems.text import counted, plain_word, print_aside


class Cells(Generic[RowT, StudyT]):
    """The cells of a grid by key, and of each that is measured a study of this cell alone.

    These studies are the files of `folder`. Without a folder nothing is written.
    """

    def __init__(self, grid: Grid[RowT, StudyT], folder: Path | None = None) -> None:
        self.grid, self.folder = grid, folder
        self.groups = list(_keyed(grid))
        self.measured: dict[str, Any] = {}

    def todo(self) -> list[dict[str, Cell[RowT]]]:
        """The groups of the cells that have no result yet."""
        done = {key for key, study in self.measured.items() if _has_result(study)}
        left = [{key: group[key] for key in group if key not in done} for group in self.groups]
        return [group for group in left if group]

    def keep(self, key: str, rows: tuple[RowT, ...], environment: Environment) -> None:
        """Write a cell that has just been measured, and remember it."""
        alone = self.grid.study(rows, environment)
        if self.folder is not None:
            write_atomically(self.folder / f"{key}.json", encode_json(alone))
        self.measured[key] = alone

    def study(self) -> StudyT:
        """The study of all measured cells in the order of the grid, with the last one's environment."""
        keys = [key for group in self.groups for key in group if key in self.measured]
        rows = tuple(row for key in keys for row in self.measured[key].rows)
        return self.grid.study(rows, self.measured[keys[-1]].environment)


def resume(
    grid: Grid[RowT, StudyT], kind: type[StudyT], folder: Path, *, fresh: bool, allow_mixed: bool
) -> Cells[RowT, StudyT]:
    """The cells of a study with those in `folder`, whose lock is held; `fresh` sets these aside.

    Raises SweepError for results that were not measured under the present conditions, unless they
    may be mixed, and for a file of a later version of this program.
    """
    if fresh:
        store.set_aside(folder)
    cells, problems = Cells(grid, folder), []
    for path in (folder / f"{key}.json" for group in cells.groups for key in group):
        try:
            if path.exists():
                cells.measured[path.stem] = read_study(path, kind)
        except RecordError as error:
            problems.append(error)
    store.set_aside_unreadable(problems)
    for problem in problems:
        print_aside(f"set aside {problem}")
    done = [study for study in cells.measured.values() if _has_result(study)]
    if not allow_mixed:
        store.refuse_to_mix(done, identity(grid.device), (), folder.parent)
    if done:
        print_aside(f"{counted(len(done), 'cell')} kept, {sum(map(len, cells.todo()))} to go")
    return cells


def _has_result(study: Any) -> bool:  # noqa: ANN401
    return all(status.is_result for status in study.statuses)


def _keyed(grid: Grid[RowT, StudyT]) -> Iterator[dict[str, Cell[RowT]]]:
    """The groups of the grid, each cell by its key, which no other cell of any grid has."""
    fields: dict[str, object] = asdict(grid)  # type: ignore[call-overload]
    chosen = {name for name, value in fields.items() if isinstance(value, tuple | None)}
    for name in (*chosen, "timeout_s", "world_size"):
        fields.pop(name, None)
    numbers: Counter[bytes] = Counter()  # a grid may have the same cell several times
    for group in grid.groups():
        keyed = {}
        for cell in group:
            said = msgspec.json.encode((fields, cell.rows))
            numbers[said] += 1
            digest = hashlib.sha256(said + b"%d" % numbers[said]).hexdigest()[:12]
            keyed[f"{plain_word(cell.label)[:80]}_{digest}"] = cell
        yield keyed
