"""One subject of a report, as tables for people and as all of its values, and how both become files."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cs336_systems.json_files import write_atomically
from cs336_systems.report.formats import WRITERS, Table, to_csv

Row = TypeVar("Row")

MAX_LABEL = 64
"""Characters of a name in a readable table; the CSV has all."""
LABEL_END = 8
"""Of these, characters of its end: cuBLAS names its tiles in the middle, by which alone some kernels differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One subject of a profile: what of it people read, and all of its values."""

    name: str
    """Of the files, without an ending."""
    tables: tuple[Table, ...]
    """Empty where only the CSV is of use."""
    csv: str
    """Empty where nothing is known of the subject."""


def texts_of(listing: Listing, note: str = "") -> dict[str, str]:
    """The text of each file of the listing, empty where it has nothing to say; `note` comes before a table's own."""
    tables = [replace(table, notes=(note, *table.notes)) if note else table for table in listing.tables]
    readable = {ending: "\n".join(map(write, tables)) for ending, write in WRITERS.items()}
    return {f"{listing.name}.{ending}": text for ending, text in {"csv": listing.csv, **readable}.items()}


def write_files(files: Mapping[str, str | bytes], directory: Path) -> list[Path]:
    """Write each file into the directory, which is made; return the paths.

    Nothing is written of what is empty: a file of that name, of an earlier profile, is removed.
    """
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content:
            write_atomically(path, content if isinstance(content, bytes) else content.encode(errors="replace"))
        else:
            path.unlink(missing_ok=True)
    return [directory / name for name, content in files.items() if content]


def csv_of(columns: Mapping[str, Callable[[Row], object]], rows: Iterable[Row]) -> str:
    """The rows as CSV, by the name of each column and how to get its value; empty for no rows."""
    values = [[value(row) for value in columns.values()] for row in rows]
    return to_csv(tuple(columns), values) if values else ""


def percent(part: float, whole: float) -> str:
    """The share with one decimal; empty where the whole is nothing."""
    return f"{100 * part / whole:.1f}" if whole else ""


def share(part: float, whole: float) -> float | None:
    """The share as a fraction; None where the whole is nothing."""
    return part / whole if whole else None


def label(name: str) -> str:
    """The name, its middle left out where it is longer than a table has room for."""
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - LABEL_END - 1]}…{name[-LABEL_END:]}"
