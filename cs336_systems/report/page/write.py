"""A report as one HTML file: findings, sortable tables, pictures; it makes no network requests.

All but sorting and filtering works without a script. With the extra `report` the page embeds DataTables (from itables),
compressed. Every text is escaped, and the Content-Security-Policy allows only the script whose hash it names. Equal
pages are written as equal bytes.
"""

import base64
import gzip
import hashlib
import importlib.resources
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from cs336_systems.files import write_atomically
from cs336_systems.report.charts import Bar, Chart, Style, visible
from cs336_systems.report.columns import Column
from cs336_systems.report.section import Table
from cs336_systems.report.words import in_percent, significant
from cs336_systems.text import inert_line

TABLES = ("itables", "html/dt_bundle.js")
"""The package that sorts tables, and its file, which the page embeds."""
MOST_COLUMNS, LEAST_WORTH = 8, 5
"""A table with more columns than that is shown without those whose `drop_order` is higher, until somebody asks."""
LONGEST_LINE = 100_000
"""Most characters of a line of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Sentences."""

    paragraphs: Sequence[str]
    kind: str = "prose"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBlock:
    """A table below an identifier."""

    id: str
    table: Table
    kind: str = "table"

    @property
    def notes(self) -> list[str]:
        """The notes that are not findings, which the page shows first."""
        return [note for note in self.table.notes if note not in self.table.findings]

    @property
    def columns(self) -> list[tuple[int, Column, bool]]:
        """Index and heading of each column, and whether it is folded; those that are stand last."""
        headings = self.table.headings
        is_wide = len(headings) > MOST_COLUMNS
        found = [(index, own, is_wide and own.drop_order > LEAST_WORTH) for index, own in enumerate(headings)]
        return sorted(found, key=lambda column: column[2])

    @property
    def rows(self) -> Iterator[tuple[bool, list[tuple[str, str | None, bool]]]]:
        """Whether each row failed, and its cells: text, the value to sort a number by, and whether it is folded."""
        table, columns = self.table, self.columns
        for number, row in enumerate(table.rows):
            values = table.values[number] if number < len(table.values) else {}
            yield number in table.failed, [(row[i], _order(own, values), folded) for i, own, folded in columns]


def _order(heading: Column, values: Mapping[str, Any]) -> str | None:
    """The value below the heading, unrounded; empty if it is not known, and None for a text."""
    if not heading.numeric:
        return None
    value = values.get(heading.key)
    return f"{value:.8g}" if isinstance(value, int | float) and not math.isnan(value) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBlock:
    """A picture below an identifier, as an SVG; matplotlib escapes its words."""

    id: str
    svg: str
    kind: str = "picture"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Lying bars on one scale that begins at 0, below each other, with one legend."""

    title: str
    bars: Sequence[Bar]
    styles: Mapping[str, Style]
    unit: str
    kind: str = "bars"

    @property
    def legend(self) -> list[tuple[str, Style, str]]:
        """Name and style of each part that can be seen in some bar; of a bar alone in its order, with the values."""
        styles, only = visible(self.bars, self.styles), self.bars[0] if len(self.bars) == 1 else None
        return [(name, styles[name], self.words(only, name) if only else "")
                for name in (only.parts if only else styles) if name in styles]  # fmt: skip

    def words(self, bar: Bar, name: str) -> str:
        """How large the part is, and which share of the bar."""
        value = f"{significant(bar.parts[name], 3)} {self.unit}, "
        return f"{'' if self.unit == '%' else value}{in_percent(bar.parts[name] / bar.length)} %"

    def width(self, value: float) -> str:
        """The part of the full width that this value takes, for CSS."""
        whole = max(each.length for each in self.bars)
        return f"{100 * value / whole:.3f}%" if whole else "0"

    def spoken(self, bar: Bar) -> str:
        """The bar in words, for those who do not see it."""
        parts = [f"{name} {self.words(bar, name)}" for name in bar.parts]
        return f"{bar.name}: {', '.join([bar.words, *parts, bar.failure])}"

    @classmethod
    def of(cls, chart: Chart) -> "Bars":
        """The lying bars of a chart, whose panels share one scale here."""
        label = chart.panels[0].label
        unit = next((unit for unit in ("%", "ms", "GiB") if f"({unit})" in label), "")
        bars = [bar for panel in chart.panels for bar in panel.bars]
        return cls(title=chart.title, bars=bars, styles=chart.styles, unit=unit)


@dataclass(frozen=True, slots=True)
class Tile:
    """One number, what it is, and a note below it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Pairs of a name and a text."""

    rows: Sequence[tuple[str, str]]
    kind: str = "facts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What a reader sees first."""

    answer: str
    more: str = ""
    """The rest of the finding that the answer is the first sentence of."""
    bars: Sequence[Bars] = ()
    tiles: Sequence[Tile] = ()
    trust: str = ""
    doubts: Sequence[str] = ()
    """What puts the numbers in doubt; where there is anything, `trust` is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A long text as it is, such as a traceback, closed until somebody opens it."""

    title: str
    text: str
    kind: str = "closed"


Block = Prose | TableBlock | PictureBlock | Bars | Facts | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """Blocks below one heading."""

    id: str
    title: str
    blocks: Sequence[Block] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A page in the list of all."""

    link: str
    name: str
    page: "Page"

    @property
    def thumbnail(self) -> Bars | PictureBlock | None:
        """The last bars of the page's first screen, else its first picture."""
        if self.page.glance is not None and self.page.glance.bars:
            return self.page.glance.bars[-1]
        blocks = (block for chapter in self.page.chapters for block in chapter.blocks)
        return next((block for block in blocks if isinstance(block, PictureBlock | Bars)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a reader sees first, then chapters; in the list of all pages, their entries by subject."""

    title: str
    chapters: Sequence[Chapter] = ()
    glance: Glance | None = None
    shelves: Mapping[str, Sequence[Entry]] = field(default_factory=dict)


def write_page(page: Page, path: Path) -> None:
    """Write the page to the file at once, so that an interrupted writer leaves the earlier one whole."""
    write_atomically(path, to_html(page).encode())


def to_html(page: Page) -> str:
    """The page as text; raise ValueError where two parts have one identifier."""
    blocks = [block for chapter in page.chapters for block in chapter.blocks]
    named = [part.id for part in (*page.chapters, *blocks) if isinstance(part, Chapter | TableBlock | PictureBlock)]
    if len(set(named)) < len(named):
        twice = next(name for place, name in enumerate(named) if name in named[:place])
        raise ValueError(f"each part of a page needs an identifier of its own, got {twice!r} twice")
    has_tables = any(isinstance(block, TableBlock) for block in blocks)
    script = _read("page.js")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_visible
    )
    return environment.from_string(_read("page.html")).render(
        page=page,
        hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(_read("page.css")),
        script=Markup(script),
        packed=_library() if has_tables else {},
    )


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
