"""Rows of the page's tables by name, and sentences on them whose numbers are links to their cells."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cs336_systems.report.columns import Row
from cs336_systems.report.identity import names_of
from cs336_systems.report.page.write import Block, Linked, Part, TableBlock
from cs336_systems.text import inert_line

MOST_NAMED = 8
"""Most rows that a sentence names one by one."""
Parts: TypeAlias = list[str | Part]


@dataclass(frozen=True, slots=True)
class Named:
    """A row of a table of the page, with what tells its configuration from the others."""

    name: str
    block: TableBlock
    number: int

    @property
    def row(self) -> Row:
        return self.block.table.values[self.number]

    def link(self, key: str, text: str) -> Part:
        """The text with a link to the cell below this key; without one where the table has no such column."""
        keys = [heading.key for heading in self.block.table.headings]
        return text, f"{self.block.id}.{self.number}.{keys.index(key)}" if key in keys else ""

    def cell(self, key: str) -> Part:
        """The text of the cell below this key, with a link to it; empty where the table has no such column."""
        keys = [heading.key for heading in self.block.table.headings]
        return self.link(key, self.block.table.rows[self.number][keys.index(key)] if key in keys else "")


def named_rows(blocks: Iterable[Block], key: str, is_it: Callable[[Row], bool] = lambda _: True) -> list[Named]:
    """The rows for which `is_it` is true, of all tables with a column of this key."""
    tables = [block for block in blocks if isinstance(block, TableBlock)]
    rows = [
        (block, number)
        for block in tables
        if key in [heading.key for heading in block.table.headings]
        for number, row in enumerate(block.table.values)
        if is_it(row)
    ]
    names = names_of([block.table.values[number]["identity"] for block, number in rows])
    return [Named(name, block, number) for name, (block, number) in zip(names, rows, strict=True)]


def linked(*parts: str | Part) -> Linked:
    """A sentence of texts and links."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Linked(tuple((inert_line(text), target) for text, target in pairs))


def listed(rows: Sequence[Named], key: str, write: Callable[[Named], str] = lambda row: row.name) -> Parts:
    """The rows in words, each a link to its cell, and how many more there are after MOST_NAMED."""
    parts: Parts = []
    for row in rows[:MOST_NAMED]:
        parts += [*([", "] if parts else []), row.link(key, write(row))]
    return [*parts, f" and {len(rows) - MOST_NAMED} more"] if len(rows) > MOST_NAMED else parts


def between(
    rows: Sequence[Named], key: str, write: Callable[[Any], str], value: Callable[[Row], float] | None = None
) -> Parts:
    """The least and the largest value below the key, each a link to its cell with the name of the row behind it."""
    values = [row.row[key] if value is None else value(row.row) for row in rows]
    ordered = sorted(zip(values, rows, strict=True), key=lambda pair: pair[0])
    ends = ordered[:1] if write(ordered[0][0]) == write(ordered[-1][0]) else [ordered[0], ordered[-1]]
    parts: Parts = []
    for found, row in ends:
        parts += [*([" to "] if parts else []), row.link(key, write(found)), f" ({row.name})"]
    return parts
