"""Pictures as data: bars and lines in panels. `draw.py` makes PNGs of them, and the same as SVGs of the page."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Final, TypeAlias, TypeVar

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.memory.profile import Category
from cs336_systems.config import Phase, Precision

MARKERS = "osD^vPX<>*hpd8"
"""Marks of lines that belong together, in matplotlib's letters."""
TICKS_APART = 1 / 14
"""Share of a logarithmic axis that the label of a tick needs."""
Place: TypeAlias = str | float
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value with its standard deviation; None is unknown, and `failure` may be the reason."""

    x: str | float
    value: float | None
    error: float | None = None
    error_below: float | None = None
    """Deviation below the value, if it differs from that above."""
    failure: str | None = None
    """How the run ended, in words, where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points that belong together, in order along the axis."""

    name: str
    points: tuple[Point, ...]

    @property
    def known(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.value is not None)

    @property
    def failed(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.failure is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Numbers, or names at equal distances, and what they are."""

    label: str = ""
    names: Sequence[str] = ()
    """In order and distinct; the first stands at 0, the next at 1. Empty for numbers."""
    is_log: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()
    """Numbers that are labelled; without any, matplotlib finds its own."""
    limits: tuple[float, float] | None = None

    def place(self, x: Place) -> float:
        """Where this name or number stands."""
        return self.names.index(x) if isinstance(x, str) else x

    def labels(self, most: int) -> dict[float, str]:
        """The labels of ticks by place, of names at most so many; empty if matplotlib finds its own."""
        if self.names:
            return {place: self.names[place] for place in thinned(range(len(self.names)), most)}
        return {tick: f"{round(tick, 2):g}" for tick in self.ticks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line with its look, or its points alone."""

    line: Line
    """A line without points is only named in the legend."""
    colour: str
    marker: str = ""
    """A letter of matplotlib; empty for none."""
    dash: str = "-"
    """A style of matplotlib: `-`, `--`, `:`, or empty for points that no line joins."""
    width: float = 1.6
    size: float = 5.0
    opacity: float = 1.0
    is_hollow: bool = False
    aside: float = 0.0
    """Shift of the points from their places, so that equal points do not hide each other."""
    label: str | None = None
    """What the legend says, if that is not the name of the line; empty if it is not in the legend."""

    @property
    def named(self) -> str:
        """What the legend says; empty if the curve is not in it."""
        shown = self.line.known or not self.line.points
        return (self.line.name if self.label is None else self.label) if shown else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The look of a part of bars."""

    colour: str
    pattern: str = ""
    """`/` or `x`, drawn in `ink`; empty for none."""
    ink: str = "#FFFFFF"
    """Colour of the pattern and of the edge."""
    label: str | None = None
    """What the legend says, if that is not the name of the part; empty if it is not in the legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Parts one on top of the other, or a run that failed."""

    name: str
    """Its name on the axis, which is its place."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Lengths by the names of `Chart.styles`, in this order."""
    words: str = ""
    """Words at its end."""
    failure: str = ""
    """How the run ended, where it failed."""

    @property
    def length(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A line across a panel at one value; upright, at one place along the axis."""

    value: float
    colour: str
    name: str = ""
    """Name in the legend; empty for none."""
    dash: str = "--"
    is_upright: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Bars and curves over one pair of axes."""

    x: Axis
    y: Axis
    title: str = ""
    bars: Sequence[Bar] = ()
    curves: Sequence[Curve] = ()
    references: Sequence[Reference] = ()

    @property
    def failures(self) -> dict[str, list[float]]:
        """Where runs of curves failed, by how they ended; where curves differ in this, by the curve too."""
        ends: dict[str, dict[str, list[float]]] = {}
        for line in (curve.line for curve in self.curves if curve.line.points):
            own = ends.setdefault(line.name, {})
            for point in line.failed:
                own.setdefault(str(point.failure), []).append(self.x.place(point.x))
        first, *others = ends.values() or [{}]
        if all(own == first for own in others):
            return first
        return {f"{name}: {failure}": places for name, own in ends.items() for failure, places in own.items()}

    @property
    def values(self) -> list[float]:
        """Values of all points that are known."""
        return [point.value or 0.0 for curve in self.curves for point in curve.line.known]

    def top(self, bar: Bar) -> float:
        """Where a bar ends, or the upper deviation of a point at its place."""
        place = self.x.place(bar.name)
        points = [
            (point.value or 0.0) + (point.error or 0.0)
            for curve in self.curves
            for point in curve.line.known
            if self.x.place(point.x) + curve.aside == place
        ]
        return max([bar.length, *points])


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture."""

    name: str
    """Name of its file, without an ending."""
    title: str
    settings: str
    """Settings that everything shown has in common."""
    panels: Sequence[Panel]
    columns: int = 1
    """Number of panels beside each other."""
    size: tuple[float, float] = (6.4, 3.8)
    """Width and height of a panel of a PNG in inches; horizontal bars take the height that they need."""
    legend: int = 4
    """Columns of the legend below the panels."""
    styles: Mapping[str, Style] = field(default_factory=dict)
    """Parts of bars in the order of the legend."""
    is_lying: bool = False
    """Whether bars are horizontal: the x axis runs from the top to the bottom and has names."""
    is_shared: bool = False
    """Whether all panels have one scale of values."""

    def title_of(self, number: int) -> str:
        """The title of a panel, unless the panel above has the same."""
        above = number - self.columns
        title = self.panels[number].title
        return "" if above >= 0 and self.panels[above].title == title else title

    @property
    def shown_styles(self) -> dict[str, Style]:
        """Styles of the parts that some bar has."""
        used = {name for panel in self.panels for bar in panel.bars for name in bar.parts}
        return {name: style for name, style in self.styles.items() if name in used}

    @property
    def keys(self) -> set[str]:
        """What the legend says."""
        styles = {name if style.label is None else style.label for name, style in self.shown_styles.items()}
        curves = {curve.named for panel in self.panels for curve in panel.curves}
        return (styles | curves | {line.name for panel in self.panels for line in panel.references}) - {""}


def distinct(names: Iterable[str]) -> list[str]:
    """The names, each with its number where it is there several times: bars of one name stand at one place."""
    found: Counter[str] = Counter()
    numbered = []
    for name in names:
        found[name] += 1
        numbered.append(f"{name} ({found[name]})" if found[name] > 1 else name)
    return numbered


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of the items, equally far apart, from the first to the last."""
    count = min(len(items), most)
    return [items[i * (len(items) - 1) // max(1, count - 1)] for i in range(count)]


def doubling(sizes: Iterable[float], label: str, room: float = 1.25, others: Iterable[float] = ()) -> Axis:
    """A logarithmic axis with a tick at each size whose label has room, and so much room around these and `others`."""
    known = sorted(set(sizes))
    every = [*known, *others]
    ticks: list[float] = []
    for size in known:
        if not ticks or size / ticks[-1] >= (known[-1] / known[0]) ** TICKS_APART > 1:
            ticks.append(size)
    return Axis(label=label, is_log=True, ticks=ticks, limits=(min(every) / room, max(every) * room))


def curves_of(lines: Iterable[Line], colours: Iterable[str]) -> list[Curve]:
    """The lines in these colours, each with a marker of its own."""
    return [
        Curve(line=line, colour=colour, marker=marker)
        for line, colour, marker in zip(lines, colours, cycle(MARKERS), strict=False)
    ]


def along(values: Sequence[Place], lines: Iterable[Line]) -> tuple[list[str], list[Line]]:
    """Names for an axis of equal distances, and the lines over these."""
    names = {value: str(value) for value in values}
    moved = [replace(line, points=tuple(replace(p, x=names[p.x]) for p in line.points)) for line in lines]
    return list(names.values()), moved


PHASE_COLOURS = {
    Phase.DATA: "#56B4E9",
    Phase.FORWARD: "#0072B2",
    Phase.BACKWARD: "#E69F00",
    Phase.COMMUNICATION: "#CC79A7",
    Phase.OPTIMIZER: "#009E73",
}
PRECISION_COLOURS = {
    Precision.FP32: "#333333",
    Precision.TF32: "#CC79A7",
    Precision.BF16: "#D55E00",
    Precision.FP16: "#56B4E9",
}
"""The palette of Okabe and Ito (2008), which people with any colour vision tell apart."""
CLASS_COLOURS = {
    KernelClass.MATMUL: "#0072B2",
    KernelClass.CONVOLUTION: "#CCFFAA",
    KernelClass.ATTENTION: "#56B4E9",
    KernelClass.SOFTMAX: "#D55E00",
    KernelClass.ELEMENT_WISE: "#E69F00",
    KernelClass.NORMALISATION: "#701C70",
    KernelClass.REDUCTION: "#009E73",
    KernelClass.OPTIMIZER: "#F0E442",
    KernelClass.COPY_AND_FILL: "#6A6A6A",
    KernelClass.COMMUNICATION: "#222222",
    KernelClass.OTHER: "#CC79A7",
}
"""Colours in the order of drawing; neighbours differ in grey too."""
CATEGORY_COLOURS = {
    Category.HELD: "#BBBBBB",
    Category.PARAMETERS: "#0072B2",
    Category.BUFFERS: "#CC79A7",
    Category.OPTIMIZER_STATE: "#009E73",
    Category.GRADIENTS: "#F0E442",
    Category.AUTOCAST_COPIES: "#701C70",
    Category.SAVED: "#56B4E9",
    Category.EARLIER: "#700407",
    Category.KEPT: "#8526FC",
    Category.POOL: "#090416",
    Category.LATER: "#E69F00",
    Category.TEMPORARY: "#D55E00",
}
"""Colours from the bottom of a picture to its top, long-lived categories first."""
REST_COLOUR: Final = "#BBBBBB"
FAILURE_COLOUR: Final = "#B00020"
GREY: Final = "#777777"
"""Colour of values from data sheets, and of other lines that are not measured."""
BLACK, WHITE = "#000000", "#FFFFFF"


def ink(colour: str) -> str:
    """Black or white, whichever is easier to read on the colour."""
    return max((BLACK, WHITE), key=lambda own: contrast(colour, own))


def contrast(first: str, second: str) -> float:
    """The contrast of two colours by WCAG 2, from 1 to 21; a line needs 3."""
    low, high = sorted(map(_luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    shares = [value / 255 for value in bytes.fromhex(colour[1:])]
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True))
