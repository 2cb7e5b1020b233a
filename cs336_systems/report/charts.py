"""Pictures as data: lying bars in panels. `draw.py` makes PNGs of them, and `page/chapters.py`
draws them on a page.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ..analysis.kernels.classes import KernelClass
from ..analysis.kernels.phases import LaunchPhase
from ..analysis.memory.profile import Category
from ..config import Phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VISIBLE = 0.001
"""A smaller share of a bar is not in the legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The look of a part of bars."""

    colour: str
    pattern: str = ""
    """`/` or `x`, drawn in `ink`; empty for none."""
    ink: str = "#FFFFFF"
    """Colour of the pattern and of the edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Parts one after the other, or a run that failed."""

    name: str
    """Its name on the axis, which is its place."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Lengths by the names of `Chart.styles`, in this order."""
    figures: Sequence[str] = ()
    """Numbers with their units at its end."""
    failure: str = ""
    """How the run ended, where it failed."""
    mark: float | None = None
    """A value that is marked beside the bar."""

    @property
    def length(self) -> float:
        """The length of the whole bar: the sum of its parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Bars with distinct names on one scale, which begins at 0."""

    label: str
    """What the values are."""
    bars: Sequence[Bar] = ()
    mark: str = ""
    """What the marks of the bars are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture."""

    name: str
    """Name of its file, without an ending."""
    title: str
    settings: str
    """Settings that everything shown has in common."""
    panels: Sequence[Panel]
    legend_columns: int = 4
    """Number of columns of the legend below the panels."""
    styles: Mapping[str, Style] = field(default_factory=dict)
    """Parts of bars in the order of the legend."""


def visible(bars: Iterable[Bar], styles: Mapping[str, Style]) -> dict[str, Style]:
    """The styles of the parts that can be seen in some bar."""
    used = set()
    for bar in bars:
        used |= {name for name, value in bar.parts.items() if value > VISIBLE * bar.length}
    return {name: style for name, style in styles.items() if name in used}


def distinct(names: Iterable[str]) -> list[str]:
    """The names of bars, in which a repeated name is followed by its number: a plot would draw bars
    of equal names at one place.
    """
    counts = Counter[str]()
    numbered = []
    for name in names:
        counts[name] += 1
        numbered.append(f"{name} ({counts[name]})" if counts[name] > 1 else name)
    return numbered


PHASE_COLOURS = {
    Phase.DATA: "#56B4E9",
    Phase.FORWARD: "#0072B2",
    Phase.BACKWARD: "#E69F00",
    Phase.COMMUNICATION: "#CC79A7",
    Phase.OPTIMIZER: "#009E73",
}
"""The palette of Okabe and Ito (2008), which people with any colour vision tell apart. A colour
stands for one thing on all pictures of a page, so that no class of kernels and no category of
memory has a phase's colour, unless it is the same thing.
"""
PHASE_STYLES = {str(phase): Style(colour=colour) for phase, colour in PHASE_COLOURS.items()}
LAUNCH_PHASES = {
    **PHASE_STYLES,
    LaunchPhase.LOSS: Style(colour="#2B3A55"),
    LaunchPhase.WEIGHT_GRADIENTS: Style(colour="#8F6A1E"),
    LaunchPhase.UNATTRIBUTED: Style(colour="#FFFFFF", pattern="/", ink="#6A6A6A"),
}
"""Style of each phase of launches; those that a clock has too look as they do there."""
SHORT_NAMES: Mapping[str, str] = {
    Phase.FORWARD: "fwd",
    Phase.BACKWARD: "bwd",
    Phase.COMMUNICATION: "comm.",
    Phase.OPTIMIZER: "opt.",
}
"""Names of phases that are too short for the whole name."""
CLASS_COLOURS = {
    KernelClass.MATMUL: "#4630B0",
    KernelClass.CONVOLUTION: "#8CC26A",
    KernelClass.ATTENTION: "#9584E8",
    KernelClass.RECURRENCE: "#F9D1E5",
    KernelClass.SOFTMAX: "#7A1A7E",
    KernelClass.ELEMENT_WISE: "#D3EE9C",
    KernelClass.NORMALISATION: "#94210D",
    KernelClass.REDUCTION: "#ED5B14",
    KernelClass.SORT: "#571110",
    KernelClass.OPTIMIZER: PHASE_COLOURS[Phase.OPTIMIZER],
    KernelClass.COPY_AND_FILL: "#736357",
    KernelClass.COMMUNICATION: PHASE_COLOURS[Phase.COMMUNICATION],
    KernelClass.OTHER: "#2F6E7A",
}
"""Colours in the order of drawing; neighbours differ in grey too."""
CATEGORY_COLOURS = {
    Category.HELD: "#7E7A80",
    Category.PARAMETERS: "#1B3C8C",
    Category.BUFFERS: "#8799CA",
    Category.OPTIMIZER_STATE: "#4C6B16",
    Category.GRADIENTS: "#7FE3EA",
    Category.AUTOCAST_COPIES: "#A98B1C",
    Category.SAVED: "#EAE0B0",
    Category.EARLIER: "#72200C",
    Category.KEPT: "#6A2CF0",
    Category.POOL: "#2A2B2A",
    Category.LATER: "#F0A98C",
    Category.TEMPORARY: "#A03A8C",
}
"""Colours from the bottom of a picture to its top, long-lived categories first."""
COMPUTING_COLOUR: Final = "#8796A5"
"""Of all computation together, whatever its phase or class."""
REST_COLOUR: Final = "#BBBBBB"
FAILURE_COLOUR: Final = "#B00020"


def fitting(phase: str, room: float) -> str:
    """The name of a phase, or a short one, that has fewer characters than there is room; empty if
    neither fits.
    """
    names = (phase, SHORT_NAMES.get(phase, ""))
    return next((name for name in names if len(name) < room), "")


def ink(colour: str) -> str:
    """Black or white, whichever has more contrast to the colour.

    By WCAG 2 that is black above a relative luminance of 0.179; here channels are linear by their
    power of 2.2, which is near its curve.
    """
    red, green, blue = ((value / 255) ** 2.2 for value in bytes.fromhex(colour[1:]))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#FFFFFF"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture that is no chart, such as one over time; it is drawn when it is asked for, since
    what draws is slow to import.
    """

    name: str
    """Name of its file, without an ending."""
    make: "Callable[[], Figure]"


Picture = Chart | Drawing
