"""Figures in documents: each follows the mark of a claim, a function that computes it from a
committed file, or was chosen.
"""

import csv
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from typing import TypeAlias, TypeVar

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
NUMBER = rf"(?<![\w.])\d+(?:,\d{{3}})*(?:\.\d+)*(?!\w|\.\d)|\b(?:{'|'.join(WORDS)})\b"
FIGURE = re.compile(rf"(?:{NUMBER})(?: ± (?:{NUMBER}))?")
NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")
"""Code within a line, where a link points to, and marks."""
CHOSEN = [
    re.compile(pattern.replace(" ", r"\s+"))
    for pattern in (
        r"two configurations|three (?:lines|steps)",
        r"Python 3\.\d+ or newer",
        r"\b(?:batch|context) \d+",
        r"\b[Oo](?:n|f) two\b",
        r"\d+ x \d+",
        r"\d+ of 10\b",
        "2026 leaderboard",
        r"ZeRO stage 1",
        r"assignment 2",
        r"et al\. \d{4}",
    )
]
"""Numbers that were chosen, not found; all others have a claim."""

Value: TypeAlias = str | float | tuple[float, float]
"""A text; a number; a number and its standard deviation."""
Row: TypeAlias = Mapping[str, Value]


Claim: TypeAlias = Callable[[], Sequence[Value] | Sequence[Row]]
CLAIMS: dict[str, Claim] = {}
"""The functions that compute what a document says, by name."""
ClaimT = TypeVar("ClaimT", bound=Claim)


def claim(compute: ClaimT) -> ClaimT:
    """Make a function a claim.

    It computes the figures that follow its mark `<!--name-->` in a document, as many as it returns;
    of rows, the table that follows, in which no column is left out.
    """
    CLAIMS[compute.__name__] = cache(compute)
    return compute


@dataclass(frozen=True)
class Mark:
    """A place in a document from which on the figures are those of a claim."""

    document: str
    name: str
    end: int

    def problems(self, text: str) -> Iterator[str]:
        """Where the document says something else than the claim."""
        values = CLAIMS[self.name]()
        if isinstance(values[0], Mapping):
            yield from _in_table(self._table(text), values)
            return
        figures = self.figures(text, len(values))
        for figure, value in zip(figures, values, strict=True):
            if not agrees(figure[0], value):
                yield f"{figure[0]} in {_around(text, figure)!r}, but the file has {value}"

    def figures(self, text: str, most: int) -> list[re.Match[str]]:
        """The first figures after the mark."""
        return list(islice(_figures(text, self.end), most))

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the figures of the claim are, or its table."""
        values = CLAIMS[self.name]()
        if isinstance(values[0], Mapping):
            start = text.index("|", self.end)
            yield start, start + len("\n".join(self._table(text)))
        else:
            yield from (figure.span() for figure in self.figures(text, len(values)))

    def _table(self, text: str) -> list[str]:
        lines = text[text.index("|", self.end) :].split("\n")
        return list(takewhile(lambda line: line.startswith("|"), lines))


def marks(document: str) -> list[Mark]:
    """The marks of a document."""
    found = re.finditer(r"<!--(\w+)-->", read(document))
    return [Mark(document, mark[1], mark.end()) for mark in found]


def said(document: str, name: str, most: int) -> list[float]:
    """The numbers that the document has after a mark, which a claim may start from."""
    (mark,) = (mark for mark in marks(document) if mark.name == name)
    texts = [figure[0] for figure in mark.figures(read(document), most)]
    return [float(WORDS.get(text, text)) for text in texts]


def _in_table(lines: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """Where the table differs from the rows; a heading that stands twice is `name 2` then."""
    first, _, *body = (cells(line) for line in lines)
    head = [name if name not in first[:i] else f"{name} 2" for i, name in enumerate(first)]
    if len(body) != len(rows):
        yield f"the table {lines[0]} has {len(body)} rows, the file {len(rows)}"
        return
    for texts, row in zip(body, rows, strict=True):
        for name, text in zip(head, texts, strict=True):
            if name not in row or not agrees(text, row[name]):
                yield f"{name!r} is {text!r} in {' | '.join(texts)}, the file has {row.get(name)!r}"


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


def _figures(text: str, start: int = 0) -> Iterator[re.Match[str]]:
    """The figures from a place on: numbers and fractions, but for those in code and links, and
    those that were chosen.
    """
    chosen = [match.span() for pattern in (NO_FIGURES, *CHOSEN) for match in pattern.finditer(text)]
    for figure in FIGURE.finditer(text, start):
        if not _is_within(figure, chosen):
            yield figure


def unclaimed(document: str) -> list[str]:
    """Figures that no claim computes, each with the words around it."""
    text = read(document)
    claimed = [span for mark in marks(document) for span in mark.spans(text)]
    figures = (figure for figure in _figures(text) if not _is_within(figure, claimed))
    return [_around(text, figure) for figure in figures]


def _is_within(figure: re.Match[str], spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= figure.start() and figure.end() <= end for start, end in spans)


def _around(text: str, figure: re.Match[str]) -> str:
    return text[max(0, figure.start() - 40) : figure.end() + 40]


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
