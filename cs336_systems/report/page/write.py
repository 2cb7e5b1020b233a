"""A report as one HTML file: findings, sortable tables to copy, pictures; it makes no network requests.

Tables and pictures can be seen without a script too. With the extra `report` the page embeds DataTables (from itables),
compressed. Every text is escaped, and the Content-Security-Policy allows only the script whose hash it names. Equal
pages are written as equal bytes.
"""

import base64
import gzip
import hashlib
import importlib.resources
import importlib.util
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from cs336_systems.files import write_atomically
from cs336_systems.report.columns import Column
from cs336_systems.report.formats import to_csv, to_latex, to_markdown, to_typst
from cs336_systems.report.plots.draw import Picture, svg_of
from cs336_systems.report.section import Table
from cs336_systems.text import inert_line

TABLES = ("itables", "html/dt_bundle.js")
"""The package that sorts tables, and its file, which the page embeds."""
LONGEST_LINE = 100_000
"""Most characters of a line of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Sentences below a heading."""

    paragraphs: Sequence[str]
    heading: str = ""
    kind: str = "prose"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBlock:
    """A table below an identifier."""

    id: str
    table: Table
    csv: str = ""
    """The CSV file of the subject, for copying; the cells as they are shown where it is empty."""
    kind: str = "table"

    @property
    def copies(self) -> dict[str, str]:
        """What a reader copies, by the name of its format."""
        shown = self.csv or to_csv([heading.label for heading in self.table.headings], self.table.rows)
        readable = {"Markdown": to_markdown, "LaTeX": to_latex, "Typst": to_typst}
        return {"CSV": shown, **{name: write(self.table) for name, write in readable.items()}}

    @property
    def notes(self) -> list[str]:
        """The notes that are not findings, which the page shows first."""
        return [note for note in self.table.notes if note not in self.table.findings]

    @property
    def rows(self) -> Iterator[tuple[bool, list[tuple[str, str | None]]]]:
        """Of each row whether it failed, and its cells: the text, and for a number the value that it is sorted by."""
        table = self.table
        for number, row in enumerate(table.rows):
            values = table.values[number] if number < len(table.values) else {}
            cells = zip(table.headings, row, strict=True)
            yield number in table.failed, [(text, _order(own, values)) for own, text in cells]


def _order(heading: Column, values: Mapping[str, Any]) -> str | None:
    """The value below the heading, unrounded; empty if it is not known, and None for a text."""
    if not heading.numeric:
        return None
    value = values.get(heading.key)
    return f"{value:.8g}" if isinstance(value, int | float) and not math.isnan(value) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBlock:
    """A picture below an identifier."""

    id: str
    picture: Picture
    kind: str = "picture"

    @property
    def svg(self) -> Markup:
        """The picture as an element of the page; matplotlib escapes its words."""
        return Markup(svg_of(self.picture, self.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A long text as it is, such as a traceback, closed until somebody opens it."""

    title: str
    text: str
    kind: str = "closed"


Block = Prose | TableBlock | PictureBlock | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """Blocks below one heading, then nested chapters."""

    id: str
    title: str
    blocks: Sequence[Block] = ()
    source: str = ""
    chapters: "Sequence[Chapter]" = ()
    is_closed: bool = False
    """Only the title and the source are shown until somebody opens the chapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All chapters of a report; `source` says of which hardware and code."""

    title: str
    chapters: Sequence[Chapter]
    source: str = ""


def write_page(page: Page, path: Path) -> None:
    """Write the page to the file at once, so that an interrupted writer leaves the earlier one whole."""
    write_atomically(path, to_html(page).encode())


def to_html(page: Page) -> str:
    """The page as text; raise ValueError where two parts have one identifier."""
    chapters = list(_every(page.chapters))
    blocks = [block for chapter in chapters for block in chapter.blocks]
    named = [part.id for part in (*chapters, *blocks) if isinstance(part, Chapter | TableBlock | PictureBlock)]
    if len(set(named)) < len(named):
        twice = next(name for place, name in enumerate(named) if name in named[:place])
        raise ValueError(f"each part of a page needs an identifier of its own, got {twice!r} twice")
    written = {block.id: block.copies for block in blocks if isinstance(block, TableBlock)}
    packed = {"copies": _packed(json.dumps(written, allow_nan=False, separators=(",", ":")).encode()), **_library()}
    script = _read("page.js")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_visible
    )
    return environment.from_string(_read("page.html")).render(
        page=page,
        hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(_read("page.css")),
        script=Markup(script),
        packed=packed,
    )


def _every(chapters: Iterable[Chapter]) -> Iterator[Chapter]:
    """The chapters and all that are part of them."""
    for chapter in chapters:
        yield chapter
        yield from _every(chapter.chapters)


def _visible(value: object) -> object:
    """A text with its lines, in which nothing is hidden or turned around."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(inert_line(line.expandtabs(4), LONGEST_LINE) for line in value.split("\n"))


def _read(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _packed(content: bytes) -> Markup:
    return Markup(base64.b64encode(gzip.compress(content, mtime=0)).decode())


@cache
def _library() -> Mapping[str, Markup]:
    """What the extra `report` brings, which is not imported for it; nothing where it is not installed."""
    package, file = TABLES
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations if spec else None) or ()
    path = next((path for place in places if (path := Path(place) / file).is_file()), None)
    return {} if path is None else {"tables": _packed(path.read_bytes())}
