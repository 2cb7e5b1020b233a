"""One subject of a report: tables to read and all of its values, and how both become files."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cs336_systems.files import write_atomically
from cs336_systems.report.formats import WRITERS, to_csv
from cs336_systems.report.table import Table, with_note

Row = TypeVar("Row")

_SI = {"ms": ("s", 1e-3), "us": ("s", 1e-6), "mib": ("bytes", 2**20), "gib": ("bytes", 2**30), "gb": ("bytes", 1e9),
       "tflops": ("flops", 1e12)}  # fmt: skip
"""Scaled units in names of columns, the SI unit in its place, and what a value is multiplied by."""
_UNIT = re.compile(rf"(?<![a-z])({'|'.join(_SI)})(?![a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One subject of a report: tables to read, and all of its values by the names of the CSV file's columns."""

    name: str
    """Name of the files, without an ending."""
    tables: tuple[Table, ...] = ()
    """Empty where only the values are of use."""
    rows: Sequence[Mapping[str, object]] = ()
    """The values, in the units of the CSV file; empty where nothing is known of the subject."""
    keys: Sequence[str] = ()
    """Columns of the CSV file in order; without any, those of the first row."""

    @property
    def values(self) -> list[dict[str, object]]:
        """The rows with the columns of the CSV file alone."""
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


def write_files(files: Mapping[str, str | bytes], directory: Path) -> list[Path]:
    """Write each file into the directory, which is made; return the paths.

    An empty file is not written, and an earlier one of its name is removed.
    """
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content:
            write_atomically(path, content if isinstance(content, bytes) else content.encode(errors="replace"))
        else:
            path.unlink(missing_ok=True)
    return [directory / name for name, content in files.items() if content]


def values_of(columns: Mapping[str, Callable[[Row], object]], rows: Iterable[Row]) -> list[dict[str, object]]:
    """The rows by the names of the columns; each column has a function that takes its value from a row."""
    return [{name: value(row) for name, value in columns.items()} for row in rows]


def in_si(row: Mapping[str, object]) -> dict[str, object]:
    """The values of a CSV's row by the names of its columns, both in SI units: `step_mean_ms` is `step_mean_s`."""
    return dict(_in_si(name, value) for name, value in row.items())


def _in_si(name: str, value: object) -> tuple[str, object]:
    if (found := _UNIT.search(name)) is None:
        return name, value
    unit, factor = _SI[found[0]]
    name = _UNIT.sub(unit, name)
    scaled = value * factor if isinstance(value, int | float) else value
    return name, round(scaled) if name.endswith("bytes") and isinstance(scaled, float) else scaled
