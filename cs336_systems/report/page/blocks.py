"""What a page consists of: a first screen, and chapters of blocks; in the list of all pages each
page is a block. The template page.html writes each of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..charts import Bar, Chart, Style, visible
from ..columns import Column
from ..section import Table
from ..words import percent, significant

MOST_COLUMNS, LEAST_WORTH = 8, 5
"""A table with more columns than that is shown without those whose `drop_order` is higher, until
somebody asks.
"""


Place: TypeAlias = tuple[str, str]
"""Full name of a kernel, and the thousandths of the timeline in which it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Sentences."""

    paragraphs: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBlock:
    """A table below an identifier."""

    id: str
    table: Table

    @property
    def notes(self) -> list[str]:
        """The notes that are not findings, which the page shows first."""
        return [note for note in self.table.notes if note not in self.table.findings]

    @property
    def columns(self) -> list[tuple[int, Column, bool]]:
        """Index and heading of each column, and whether it is folded; those that are stand last."""
        headings = self.table.headings
        is_wide = len(headings) > MOST_COLUMNS
        columns = [
            (index, heading, is_wide and heading.drop_order > LEAST_WORTH)
            for index, heading in enumerate(headings)
        ]
        return sorted(columns, key=lambda column: column[2])

    @property
    def rows(self) -> Iterator[tuple[bool, list[tuple[str, str | None, bool, Place | None]]]]:
        """Whether each row failed, and its cells: text, the value to sort a number by, whether it
        is folded, and where its kernel is in the timeline.
        """
        table, columns = self.table, self.columns
        for number, row in enumerate(table.rows):
            values = table.values[number] if number < len(table.values) else {}
            cells = [
                (row[index], _sort_value(heading, values), is_folded, _place(heading, values))
                for index, heading, is_folded in columns
            ]
            yield number in table.failed, cells


def _place(heading: Column, values: Mapping[str, Any]) -> Place | None:
    """Full name and places of the kernel whose short name stands below the heading, if known."""
    if heading.key != "short_name" or not values.get("places"):
        return None
    return values["name"], " ".join(map(str, values["places"]))


def _sort_value(heading: Column, values: Mapping[str, Any]) -> str | None:
    """The value below the heading, unrounded; empty if it is not known, and None for a text."""
    if not heading.numeric:
        return None
    value = values.get(heading.key)
    is_known = isinstance(value, int | float) and not math.isnan(value)
    return f"{value:.8g}" if is_known else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBlock:
    """A picture below an identifier, as an SVG; matplotlib escapes its words."""

    id: str
    svg: str


LEAST_LENGTH = 0.15
"""Share of the longest bar. If a bar were shorter than that, its parts could not be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars below each other, with one legend.

    They have one scale that begins at 0, if that shows the parts of all. Otherwise each bar is
    drawn as shares of itself, and its length as a point on a logarithmic scale beside it.
    """

    title: str
    bars: Sequence[Bar]
    styles: Mapping[str, Style]
    unit: str

    @property
    def legend(self) -> list[tuple[str, Style, str]]:
        """Name and style of each part that can be seen in some bar; of a bar alone in its order,
        with the values.
        """
        styles = visible(self.bars, self.styles)
        if len(self.bars) > 1:
            return [(name, style, "") for name, style in styles.items()]
        entries = []
        for bar in self.bars:
            for name in bar.parts:
                if name in styles:
                    entries.append((name, styles[name], self.words(bar, name)))
        return entries

    def words(self, bar: Bar, name: str) -> str:
        """How large the part is, and which share of the bar."""
        share = f"{percent(bar.parts[name], bar.length) or 0} %"
        if self.unit == "%":
            return share
        return f"{significant(bar.parts[name], 3)} {self.unit}, {share}"

    @property
    def are_shares(self) -> bool:
        """Whether the bars are drawn as shares of themselves."""
        lengths = [bar.length for bar in self.bars if bar.length]
        has_parts = any(len(bar.parts) > 1 for bar in self.bars)
        return has_parts and bool(lengths) and min(lengths) < LEAST_LENGTH * max(lengths)

    @property
    def num_figures(self) -> int:
        """Most figures at the end of a bar, and at least 1, whose place a failure takes."""
        return max(1, *(len(bar.figures) for bar in self.bars))

    def width(self, bar: Bar, value: float) -> str:
        """The part of the full width that this value of the bar takes, for CSS."""
        full = bar.length
        if not self.are_shares:
            full = max(other.length for other in self.bars)
        return f"{100 * value / full:.3f}%" if full else "0"

    @property
    def _decades(self) -> tuple[int, int]:
        """The powers of ten at which the scale of lengths begins and ends."""
        lengths = [bar.length for bar in self.bars if bar.length]
        low = math.floor(math.log10(min(lengths)))
        high = math.ceil(math.log10(max(lengths)))
        return low, max(high, low + 1)

    @property
    def scale(self) -> str:
        """The ends of the scale of lengths, in words."""
        low, high = self._decades
        return f"{10.0**low:,g} to {10.0**high:,g} {self.unit}, on a logarithmic scale"

    @property
    def decade(self) -> str:
        """The part of the scale's width that a power of ten takes, for CSS."""
        low, high = self._decades
        return f"{100 / (high - low):.3f}%"

    def point(self, bar: Bar) -> str:
        """Where the length of the bar is on the scale of lengths, for CSS; empty without length."""
        if not bar.length:
            return ""
        low, high = self._decades
        return f"{100 * (math.log10(bar.length) - low) / (high - low):.2f}%"

    def spoken(self, bar: Bar) -> str:
        """The bar in words: its tooltip, and what a screen reader says in its place."""
        parts = [f"{name} {self.words(bar, name)}" for name in bar.parts]
        return f"{bar.name}: {', '.join(filter(None, [*bar.figures, *parts, bar.failure]))}"


def bars_of(chart: Chart) -> list[Bars]:
    """The horizontal bars of a chart; those of all panels with the same label stand together."""
    by_label: dict[str, list[Bar]] = {}
    for panel in chart.panels:
        by_label.setdefault(panel.label, []).extend(panel.bars)
    several = []
    for label, bars in by_label.items():
        unit = next((unit for unit in ("%", "ms", "GiB") if f"({unit})" in label), "")
        title = f"{chart.title}: {label}" if len(by_label) > 1 else chart.title
        several.append(Bars(title=title, bars=bars, styles=chart.styles, unit=unit))
    return several


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Pairs of a name and a text."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A long text as it is, such as a traceback, closed until somebody opens it."""

    title: str
    text: str


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
        for chapter in self.page.chapters:
            for block in chapter.blocks:
                if isinstance(block, PictureBlock | Bars):
                    return block
        return None


Block = Entry | Prose | TableBlock | PictureBlock | Bars | Facts | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """Blocks below one heading."""

    id: str
    title: str
    blocks: Sequence[Block] = ()


@dataclass(frozen=True, slots=True)
class Tile:
    """One number, what it is, and a note below it."""

    name: str
    value: str
    note: str = ""


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
class Page:
    """What a reader sees first, then chapters."""

    title: str
    subject: str = ""
    """Key of the chapter of the list of all pages in which it stands."""
    source: str = ""
    """Device and date of what it shows, as far as they are known."""
    chapters: Sequence[Chapter] = ()
    glance: Glance | None = None
