"""A report as one HTML file: findings, sortable tables to copy, interactive pictures; it makes no network requests.

Tables can be read without a script too. With the extra `report` the page embeds, compressed, DataTables (from itables)
and plotly's script; without it, the page has plain tables and the PNGs. Every text is escaped, and the
Content-Security-Policy allows only the script whose hash it names. Equal pages are written as equal bytes.
"""

import base64
import gzip
import hashlib
import importlib.resources
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from cs336_systems.files import write_atomically
from cs336_systems.report.columns import Column
from cs336_systems.report.page.copies import FORMATS, copies
from cs336_systems.report.table import Table
from cs336_systems.text import inert_line

LIBRARIES = {
    "tables": ("itables", "html/dt_bundle.js"),
    "plotly": ("plotly", "package_data/plotly.min.js"),
}
"""Files of other packages that the page embeds, by their identifiers in the page: the package and the file."""

LONGEST_LINE = 100_000
"""Most characters of a line of text."""
LONGEST_IN_FIGURE = 120
"""Most characters of a text in a figure, which plotly does not wrap."""
DIGITS_IN_FIGURE = 6
"""Significant digits of a number in a figure, which are more than a screen can show."""
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


class Integers(list[int]):
    """A long column of a figure, which the page keeps as bytes; its script unpacks it where it is drawn."""


Part = tuple[str, str]
"""A text, and the identifier of the cell or table that it rests on; the identifier may be empty."""


@dataclass(frozen=True, slots=True)
class Linked:
    """A sentence in parts, of which those with an identifier are links, such as each of its numbers to its cell."""

    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The whole sentence."""
        return "".join(text for text, _ in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Sentences; a sentence that is one `Part` is followed by a link to the cell."""

    paragraphs: Sequence[Part | Linked]
    heading: str = ""
    more: Sequence[Part | Linked] = ()
    """Sentences that are closed until somebody opens them, below `more_title`."""
    more_title: str = "More"
    commands: Sequence[tuple[str, str]] = ()
    """A few words, and the command line that they are about."""
    kind: str = "prose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell as text, and the value that it is sorted by where the text does not sort itself."""

    id: str
    text: str
    numeric: bool
    order: float | None
    """None where the value is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """The cells of one row; `failed` rows stand out."""

    cells: Sequence[Cell]
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBlock:
    """A table below an identifier, with a sentence on where its values come from."""

    id: str
    table: Table
    csv: str = ""
    """The CSV file of the subject, for copying; the cells as they are shown where it is empty."""
    source: str = ""
    kind: str = "table"

    @property
    def cells(self) -> Iterator[CellRow]:
        """Rows of cells, each with the identifier `TABLE.ROW.COLUMN`, which the page has where a link leads to it."""
        table = self.table
        for number, row in enumerate(table.rows):
            values = table.values[number] if number < len(table.values) else {}
            cells = [
                Cell(
                    id=f"{self.id}.{number}.{place}",
                    text=inert_line(text),
                    numeric=heading.numeric,
                    order=_order(heading, values, text),
                )
                for place, (heading, text) in enumerate(zip(table.headings, row, strict=True))
            ]
            yield CellRow(cells=cells, failed=number in table.failed)


def _order(heading: Column, values: Mapping[str, Any], text: str) -> float | None:
    """The value below the heading, unrounded; where only its text is known, the number that begins it."""
    if not heading.numeric:
        return None
    value = values.get(heading.key)
    if isinstance(value, int | float):
        return None if math.isnan(value) else float(value)
    found = _NUMBER.match(text)
    return float(found[0].replace(",", "")) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture: plotly's data and layout, or one step kernel by kernel; the PNG stands in its place without plotly.

    Texts of the specification are escaped here. What is meant as plotly's markup, such as the `<br>` of a
    `hovertemplate`, is a `Markup`, whose `format` escapes what it inserts.
    """

    id: str
    title: str
    spec: Mapping[str, Any]
    """`{"data": ..., "layout": ...}`, or `StepPicture.spec`."""
    png: str = ""
    """The PNG as a `data:` address; empty if there is none."""
    source: str = ""
    height: int = 420
    parts: Sequence[tuple[str, str, str]] = ()
    """Values to read without hovering over the picture: a name, an amount and a share in each row."""
    parts_title: str = ""
    kind: str = "figure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, closed until somebody opens it: facts in a line each, tables and figures, then texts below headings.

    All but the title is packed, and the script of the page unpacks it when the run is opened.
    """

    id: str
    title: str
    texts: Sequence[tuple[str, str]] = ()
    """Long texts as they are: a command, a traceback, a record."""
    facts: Sequence[tuple[str, str]] = ()
    blocks: "Sequence[Prose | TableBlock | Figure]" = ()
    failed: bool = False
    kind: str = "run"


Block = Prose | TableBlock | Figure | Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """Blocks below one heading, then nested chapters."""

    id: str
    title: str
    blocks: Sequence[Block] = ()
    source: str = ""
    chapters: "Sequence[Chapter]" = ()
    short: str = ""
    """Its name in the table of contents, if it differs from the title."""
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
    """The page as text; raise ValueError where two parts have one identifier, or a link leads nowhere."""
    chapters = list(_chapters(page.chapters))
    blocks = list(_blocks(chapters))
    linked = _checked_links(chapters, blocks)
    numbers = bytearray()
    figures = {block.id: _inert(block.spec, numbers) for block in blocks if isinstance(block, Figure)}
    written = {block.id: copies(block.table, block.csv) for block in blocks if isinstance(block, TableBlock)}
    runs: dict[str, str] = {}

    def keep(name: str, inside: Markup) -> str:
        """Take what stands inside a run out of the page, to be packed."""
        runs[name] = inside
        return ""

    def packed() -> dict[str, Markup]:
        parts = {"figures": figures, "copies": written, "runs": runs}
        texts = {name: _packed(_encoded(own)) for name, own in parts.items()}
        return {**texts, "numbers": _packed(bytes(numbers)), **libraries}

    libraries = _libraries(bool(figures))
    script = _read("page.js")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_visible
    )
    return environment.from_string(_read("page.html")).render(
        page=page,
        hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(_read("page.css")),
        script=Markup(script),
        formats=FORMATS,
        has_plotly="plotly" in libraries,
        linked=linked,
        keep=keep,
        packed=packed,
    )


def _chapters(chapters: Iterable[Chapter]) -> Iterator[Chapter]:
    """The chapters and all that are part of them."""
    for chapter in chapters:
        yield chapter
        yield from _chapters(chapter.chapters)


def png_address(path: Path) -> str:
    """The address of a PNG that stands in the place of a figure; empty where plotly draws it, or there is no PNG."""
    if importlib.util.find_spec("plotly") is not None or not path.is_file():
        return ""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _blocks(chapters: Iterable[Chapter]) -> Iterator[Block]:
    """All blocks of the chapters, and those within runs."""
    for chapter in chapters:
        for block in chapter.blocks:
            yield block
            if isinstance(block, Run):
                yield from block.blocks


def _checked_links(chapters: Sequence[Chapter], blocks: Sequence[Block]) -> set[str]:
    """What the page has links to; raise ValueError where two parts have one identifier, or a link leads nowhere."""
    named = [chapter.id for chapter in chapters]
    for block in blocks:
        if not isinstance(block, Prose):
            named.append(block.id)
        if isinstance(block, TableBlock):
            named += [cell.id for row in block.cells for cell in row.cells]
    known = set(named)
    if len(known) < len(named):
        twice = next(name for place, name in enumerate(named) if name in named[:place])
        raise ValueError(f"each part of a page needs an identifier of its own, got {twice!r} twice")
    sentences = [each for block in blocks if isinstance(block, Prose) for each in (*block.paragraphs, *block.more)]
    linked = set()
    for sentence in sentences:
        for text, target in sentence.parts if isinstance(sentence, Linked) else (sentence,):
            if target and target not in known:
                raise ValueError(f"a link needs the identifier of a part of the page, got {target!r} in: {text}")
            linked.add(target)
    return linked


def _inert(value: object, numbers: bytearray) -> object:
    """A copy of a figure's specification in which plotly reads no markup, but for what is a `Markup` already.

    Columns of integers are added to `numbers`.
    """
    if isinstance(value, Integers):
        return _added(value, numbers)
    if isinstance(value, str):
        text = escape(value if isinstance(value, Markup) else inert_line(value, LONGEST_IN_FIGURE))
        return str(text).replace("$", "&#36;")  # plotly reads text between two dollar signs as mathematics
    if isinstance(value, Mapping):
        return {str(key): _inert(part, numbers) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return value if set(map(type, value)) <= {int} else [_inert(part, numbers) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS_IN_FIGURE}g}") if math.isfinite(value) else None
    return value


def _added(column: Integers, numbers: bytearray) -> tuple[int, int, int]:
    """Where in `numbers` the column begins, how many entries it has, and of how many bytes each is.

    The lowest bytes of all entries come first. The lowest bit of an entry is its sign: 2n for n, and 2n - 1 for -n.
    """
    values = np.array(column, dtype=np.int64)
    unsigned = ((values << 1) ^ (values >> 63)).astype("<u8")
    width = max(1, -(-int(unsigned.max(initial=0)).bit_length() // 8))
    begin = len(numbers)
    numbers += unsigned.view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes()
    return begin, len(column), width


def _visible(value: object) -> object:
    """A text with its lines, in which nothing is hidden or turned around."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(inert_line(line.expandtabs(4), LONGEST_LINE) for line in value.split("\n"))


def _read(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _encoded(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _packed(content: bytes) -> Markup:
    return Markup(base64.b64encode(gzip.compress(content, mtime=0)).decode())


@cache
def _libraries(with_plotly: bool) -> Mapping[str, Markup]:
    """What the extra `report` brings, packed; nothing of a package that is not installed."""
    wanted = {name: part for name, part in LIBRARIES.items() if with_plotly or name != "plotly"}
    found = {name: _of_package(package, file) for name, (package, file) in wanted.items()}
    return {name: _packed(content) for name, content in found.items() if content}


def _of_package(package: str, file: str) -> bytes:
    """A file of a package, which is not imported for it; empty where the package is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return next((path.read_bytes() for place in places or () if (path := Path(place) / file).is_file()), b"")
