"""One subject of a report: its tables for people, its values, and how both are written to files."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cs336_systems.files import write_atomically
from cs336_systems.report.formats import WRITERS, to_csv
from cs336_systems.report.table import Table, with_note

if TYPE_CHECKING:
    from cs336_systems.report.plots.draw import Picture

T = TypeVar("T")

_SI = {"ms": ("s", 1e-3), "us": ("s", 1e-6), "mib": ("bytes", 2**20), "gib": ("bytes", 2**30), "gb": ("bytes", 1e9),
       "tflops": ("flops", 1e12)}  # fmt: skip
"""For each scaled unit in a key of a CSV file: the SI unit that replaces it, and the factor for the value."""
_UNIT = re.compile(rf"(?<![a-z])({'|'.join(_SI)})(?![a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One subject of a report: its tables for people, and its values for a CSV file and for JSON."""

    name: str
    """Name of the files, without an ending."""
    tables: tuple[Table, ...] = ()
    """Empty if the subject is written as CSV only."""
    rows: Sequence[Mapping[str, object]] = ()
    """The values by key, in the units of the CSV file; empty if nothing is known of the subject."""
    keys: Sequence[str] = ()
    """Keys of the CSV file's columns, in order; if empty, all keys of the first row."""
    pictures: "Sequence[Picture]" = ()
    """Pictures in files of their names in plots/, and on the page."""

    @property
    def values(self) -> list[dict[str, object]]:
        """The rows of the CSV file."""
        keys = self.keys or (self.rows[0] if self.rows else ())
        return [{key: row[key] for key in keys} for row in self.rows]

    @property
    def csv(self) -> str:
        """The values as CSV; empty without rows."""
        values = self.values
        return to_csv(tuple(values[0]), (row.values() for row in values)) if values else ""

    @property
    def json(self) -> list[dict[str, object]]:
        """The values in SI units."""
        return [in_si(row) for row in self.values]


def texts_of(section: Section, note: str = "") -> dict[str, str]:
    """The text of each file of the section, empty for a file that has no content; `note` comes before a table's own."""
    tables = [with_note(table, note) if note else table for table in section.tables]
    readable = {ending: "\n".join(map(write, tables)) for ending, write in WRITERS.items()}
    return {f"{section.name}.{ending}": text for ending, text in {"csv": section.csv, **readable}.items()}


def pngs_of(section: Section) -> dict[str, bytes]:
    """The PNG of each picture of the section by its file."""
    from cs336_systems.report.plots.draw import png_of  # matplotlib is slow to import, and printing does not need it

    return {f"plots/{picture.name}.png": png_of(picture) for picture in section.pictures}


def write_files(files: Mapping[str, str | bytes], directory: Path) -> list[Path]:
    """Write each file below the directory, and make folders as needed; return the paths.

    An empty file is not written; an earlier file of the same name is removed.
    """
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content:
            write_atomically(path, content if isinstance(content, bytes) else content.encode(errors="replace"))
        else:
            path.unlink(missing_ok=True)
    return [directory / name for name, content in files.items() if content]


def values_of(columns: Mapping[str, Callable[[T], object]], rows: Iterable[T]) -> list[dict[str, object]]:
    """A dict of values for each row; `columns` gives, for each key, the function that takes the value from a row."""
    return [{name: value(row) for name, value in columns.items()} for row in rows]


def in_si(row: Mapping[str, object]) -> dict[str, object]:
    """The row of a CSV file with keys and values in SI units: `step_mean_ms` becomes `step_mean_s`."""
    return dict(_in_si(name, value) for name, value in row.items())


def _in_si(name: str, value: object) -> tuple[str, object]:
    if (found := _UNIT.search(name)) is None:
        return name, value
    unit, factor = _SI[found[0]]
    name = _UNIT.sub(unit, name)
    scaled = value * factor if isinstance(value, int | float) else value
    return name, round(scaled) if name.endswith("bytes") and isinstance(scaled, float) else scaled
