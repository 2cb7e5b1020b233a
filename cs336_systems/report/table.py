"""One table for people: rows of values below known columns, a title, and notes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cs336_systems.report.columns import Column, Row, column

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table for people: every cell is text, rounded and scaled for reading; `frame` has the values."""

    title: str
    headings: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """Sentences below the table."""
    failed: frozenset[int] = frozenset()
    """Indices of rows that stand out on a terminal: runs without times."""
    values: tuple[Row, ...] = ()
    """The rows by key, unrounded, in the units of CSV files."""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.headings):
                raise ValueError(f"row {index} needs {len(self.headings)} cells, one per heading, got {len(row)}")

    @property
    def frame(self) -> "pd.DataFrame":
        """The values below the headings that have a key, with None for unknown."""
        import pandas as pd  # takes half a second, which a printed table can spare

        keys = list(dict.fromkeys(key for column in self.headings for key in (column.key, column.std) if key))
        return pd.DataFrame([{key: row[key] for key in keys} for row in self.values], columns=keys, dtype=object)


def findings_table(findings: Sequence[str], none: str = "") -> Table:
    """What stands out, the most important first; without any, the note `none`."""
    columns: list[Column] = [
        Column("no.", key="number", write=str),
        Column("finding", key="finding", numeric=False, write=str),
    ]
    rows = [{"number": number, "finding": text} for number, text in enumerate(findings, 1)]
    return make_table("Findings", columns, rows, () if rows or not none else (none,))


def with_note(table: Table, note: str) -> Table:
    """The table with the note before its own."""
    return replace(table, notes=(note, *table.notes))


def known(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns below which at least one row has something."""
    return [column for column in columns if any(column.cell(row) for row in rows)]


def quantity_table(
    title: str,
    rows: Iterable[Sequence[object]],
    notes: Iterable[str] = (),
    keys: Sequence[str] = ("quantity", "amount", "unit"),
) -> Table:
    """Quantities of different kinds, each a row of values below these keys."""
    return make_table(title, [column(key) for key in keys], [dict(zip(keys, row, strict=True)) for row in rows], notes)


def make_table(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Row],
    notes: Iterable[str] = (),
    failed: Callable[[Row], bool] | None = None,
) -> Table:
    """Fill the columns from the rows."""
    kept = tuple(rows)
    return Table(
        title=title,
        headings=tuple(columns),
        rows=tuple(tuple(column.cell(row) for column in columns) for row in kept),
        notes=tuple(notes),
        failed=frozenset(i for i, row in enumerate(kept) if failed is not None and failed(row)),
        values=kept,
    )
