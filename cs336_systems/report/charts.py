"""Pictures as data: lying bars in panels. `draw.py` makes PNGs of them, and `page/chapters.py`
draws them on a page.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ..analysis.kernels.classes import KernelClass
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
"""The palette of Okabe and Ito (2008), which people with any colour vision tell apart."""
CLASS_COLOURS = {
    KernelClass.MATMUL: "#0072B2",
    KernelClass.CONVOLUTION: "#CCFFAA",
    KernelClass.ATTENTION: "#56B4E9",
    KernelClass.RECURRENCE: "#7010F8",
    KernelClass.SOFTMAX: "#D55E00",
    KernelClass.ELEMENT_WISE: "#E69F00",
    KernelClass.NORMALISATION: "#701C70",
    KernelClass.REDUCTION: "#009E73",
    KernelClass.SORT: "#782000",
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
