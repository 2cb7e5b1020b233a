"""Figures in documents: each is claimed by a function that computes it from a committed file, or
is a setting.
"""

import csv
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[2]
_NAMES = (
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
)
WORDS = {name: number for number, name in enumerate(_NAMES, start=2)} | {
    "twice": 2,
    "hundred": 100,
    "thousand": 1000,
    "half": 1 / 2,
    "third": 1 / 3,
    "quarter": 1 / 4,
}
FRACTION_OFF = 0.02
"""How far a fraction that a word names may be from it."""
NUMBER = re.compile(rf"(?<![\w.])\d+(?:,\d{{3}})*(?:\.\d+)*(?!\w|\.\d)|\b(?:{'|'.join(WORDS)})\b")
NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)")
"""Code within a line, and where a link points to."""

Value: TypeAlias = str | float | tuple[float, float]
"""A text; a number; a number and its standard deviation."""
Row: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True)
class Claim:
    """A sentence, whose groups are figures, and what computes them."""

    document: str
    pattern: str
    compute: Callable[[], Sequence[Value]]

    def problems(self, text: str) -> Iterator[str]:
        found = list(re.finditer(self.pattern, text))
        if len(found) != 1:
            yield f"{self.document}: needed one place that says {self.pattern!r}, got {len(found)}"
            return
        values = self.compute()
        assert len(values) == len(found[0].groups()), self.pattern
        for said, value in zip(found[0].groups(), values, strict=True):
            if not agrees(said, value):
                yield (
                    f"{self.document}: {said} is said in {found[0][0]!r}, but the file has {value}"
                )

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        for match in re.finditer(self.pattern, text):
            yield from (match.span(group) for group in range(1, len(match.groups()) + 1))


@dataclass(frozen=True)
class TableClaim:
    """A table, told by how its head begins, and what computes its rows by heading; no column is
    left out.
    """

    document: str
    head: str
    compute: Callable[[], Sequence[Row]]

    def problems(self, text: str) -> Iterator[str]:
        rows = [cells(line) for line in self._lines(text)]
        if len(rows) < 3:
            yield f"{self.document}: needed a table that begins with {self.head!r}"
            return
        first, _, *body = rows
        head = [name if name not in first[:i] else f"{name} 2" for i, name in enumerate(first)]
        values = self.compute()
        if len(body) != len(values):
            yield (
                f"{self.document}: the table {self.head!r} has {len(body)} rows, the file "
                f"{len(values)}"
            )
            return
        for said, row in zip(body, values, strict=True):
            for name, cell in zip(head, said, strict=True):
                if name not in row or not agrees(cell, row[name]):
                    yield (
                        f"{self.document}: {name!r} is {cell!r} in {' | '.join(said)}, the "
                        f"file has {row.get(name)!r}"
                    )

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        start = 0
        for line in self._lines(text):
            start = text.index(line, start)
            yield start, start + len(line)

    def _lines(self, text: str) -> list[str]:
        lines = text[text.find(self.head) :].split("\n") if self.head in text else []
        return list(takewhile(lambda line: line.startswith("|"), lines))


CLAIMS: list[Claim | TableClaim] = []


def claim(
    document: str, pattern: str
) -> Callable[[Callable[[], Sequence[Value]]], Callable[[], Sequence[Value]]]:
    """The function computes the groups of the pattern, which is in the document once."""

    def register(compute: Callable[[], Sequence[Value]]) -> Callable[[], Sequence[Value]]:
        CLAIMS.append(Claim(document, f"(?s){blanks(pattern)}", cache(compute)))
        return compute

    return register


def blanks(pattern: str) -> str:
    """The pattern, whose blanks stand for line breaks too."""
    return pattern.replace(" ", r"\s+")


def table_claim(
    document: str, head: str
) -> Callable[[Callable[[], Sequence[Row]]], Callable[[], Sequence[Row]]]:
    """The function computes the rows of the table."""

    def register(compute: Callable[[], Sequence[Row]]) -> Callable[[], Sequence[Row]]:
        CLAIMS.append(TableClaim(document, head, cache(compute)))
        return compute

    return register


def agrees(said: str, value: Value) -> bool:
    """Whether the text is the value rounded to as many digits as it has; a fraction in words may
    be off by a little.
    """
    if isinstance(value, str):
        return said == value
    if isinstance(value, tuple):
        return all(map(agrees, said.split(" ± "), value))
    if said in WORDS:
        named = WORDS[said]
        return value == named if isinstance(named, int) else abs(value - named) < FRACTION_OFF
    return said.replace(",", "") == f"{value:.{len(said.partition('.')[2])}f}"


def read(document: str) -> str:
    """The document, of its blocks of code the comments only."""
    text = (ROOT / document).read_text()
    return re.sub(
        r"```.*?```", lambda block: re.sub(r"(?m)^[^#\n]*", "", block[0]), text, flags=re.DOTALL
    )


def unclaimed(document: str, text: str, settings: Sequence[str]) -> list[str]:
    """Figures that no claim computes and that are no settings, each with the words around it."""
    spans = [span for claim in CLAIMS if claim.document == document for span in claim.spans(text)]
    for pattern in (NO_FIGURES, *(re.compile(blanks(pattern), re.DOTALL) for pattern in settings)):
        spans += [match.span() for match in pattern.finditer(text)]
    return [
        f"{match[0]} in {text[max(0, match.start() - 40) : match.end() + 40]!r}"
        for match in NUMBER.finditer(text)
        if not any(start <= match.start() and match.end() <= end for start, end in spans)
    ]


def cells(line: str) -> list[str]:
    """Of a row of a Markdown table."""
    return [cell.strip().replace("\\_", "_") for cell in line.strip().strip("|").split("|")]


@cache
def table(path: str) -> tuple[dict[str, str], ...]:
    """The rows of a table that this project wrote as CSV, below data/."""
    with (ROOT / "data" / "published" / path).open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def linked(document: str, path: str) -> tuple[dict[str, str], ...]:
    """The rows of a CSV below data/, to whose directory the document has a link."""
    where = os.path.relpath((ROOT / "data" / "published" / path).parent, (ROOT / document).parent)
    assert f"]({where}/" in read(document), f"{document} needs a link into {where}"
    return table(path)


def one(rows: Sequence[Mapping[str, str]], **values: object) -> Mapping[str, str]:
    """The only row that has these values."""
    (row,) = some(rows, **values)
    return row


def some(rows: Sequence[Mapping[str, str]], **values: object) -> list[Mapping[str, str]]:
    """The rows that have these values."""
    return [row for row in rows if all(row[name] == str(value) for name, value in values.items())]
