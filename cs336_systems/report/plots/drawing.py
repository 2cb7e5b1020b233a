"""What the pictures have in common: colours, fonts, failed runs, files. No global state of matplotlib is touched."""

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, Final, TypeAlias, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullLocator

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.memory.profile import Category
from cs336_systems.config import Phase, Precision
from cs336_systems.report.plots.series import Line
from cs336_systems.text import inert_line

Colour: TypeAlias = str | tuple[float, float, float]
Item = TypeVar("Item")

PHASE_COLOURS = {Phase.FORWARD: "#0072B2", Phase.BACKWARD: "#E69F00", Phase.OPTIMIZER: "#009E73"}
PRECISION_COLOURS = {
    Precision.FP32: "#333333",
    Precision.TF32: "#CC79A7",
    Precision.BF16: "#D55E00",
    Precision.FP16: "#56B4E9",
}
"""The palette of Okabe and Ito (2008), which people with any colour vision tell apart."""
CLASS_COLOURS = {
    KernelClass.MATMUL: "#0072B2",
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
"""In the order of drawing, in which neighbours differ in grey too."""
CATEGORY_COLOURS = {
    Category.HELD: "#BBBBBB",
    Category.PARAMETERS: "#0072B2",
    Category.BUFFERS: "#CC79A7",
    Category.OPTIMIZER_STATE: "#009E73",
    Category.GRADIENTS: "#F0E442",
    Category.AUTOCAST_COPIES: "#701C70",
    Category.SAVED: "#56B4E9",
    Category.LATER: "#E69F00",
    Category.TEMPORARY: "#D55E00",
}
"""From the bottom up: what stays first."""
REST_COLOUR: Final = "#BBBBBB"
FAILURE_COLOUR: Final = "#B00020"
CROSS: Final[dict[str, Any]] = {
    "marker": "X", "markersize": 7, "color": FAILURE_COLOUR, "linestyle": "none",
    "zorder": 5, "markeredgecolor": "white",
}  # fmt: skip
MARKERS: Final = "osD^vPX<>*h"
DPI = 160
MAX_LABELS = 16
"""Names along an axis or in a legend beside it that there is room for."""
TICKS_APART = 1 / 14
"""Of a logarithmic axis: what the label of a tick needs."""
LONGEST_TEXT = 60
LONGEST_SOURCE = 70
LONGEST_SETTINGS = 500


def shorten(text: str, longest: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def inert(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, shortened, without mathematics, and without the leading underscore that hides it in a legend."""
    escaped = shorten(inert_line(text), longest).replace("\\$", "\\ $").replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def wrapped(text: str, longest: int) -> str:
    """The text, inert, on lines that are at most so long; of more than three lines the middle is left out."""
    whole = inert_line(text)
    short = whole if len(whole) <= 3 * longest else f"{whole[: 2 * longest - 1]}…{whole[-longest:]}"
    return "\n".join(inert(line, longest) for line in textwrap.wrap(short, longest, break_on_hyphens=False))


def bar_inches(names: Sequence[str]) -> float:
    """Height that a bar takes with the longest of these names beside it."""
    return max([0.36, *(0.16 * (1 + name.count("\n")) for name in names)])


def shades(count: int) -> list[Colour]:
    """Colours from light to dark that also differ in grey, for things in an order."""
    colours = matplotlib.colormaps["viridis"]
    return [to_rgb(colours(0.85 - 0.85 * i / max(1, count - 1))) for i in range(count)]


def tints(colour: str, count: int) -> list[Colour]:
    """The colour from pale to full."""
    red, green, blue = to_rgb(colour)
    weights = [1.0 if count == 1 else 0.45 + 0.55 * i / (count - 1) for i in range(count)]
    return [(1 - w + w * red, 1 - w + w * green, 1 - w + w * blue) for w in weights]


def ink(colour: Colour) -> str:
    """Black or white, whichever is easier to read on the colour (relative luminance of WCAG 2)."""
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True))
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"


def new_figure(width: float, height: float, title: str, settings: str) -> Figure:
    """A figure of so many inches with a title and, smaller, the settings below it."""
    items = [shorten(item, LONGEST_SOURCE) for item in inert_line(settings, LONGEST_SETTINGS).split(", ")]
    whole = [item.replace(" ", "\N{NO-BREAK SPACE}") for item in items]
    lines = textwrap.wrap(", ".join(whole), int(width * 15.5), break_on_hyphens=False) or [""]
    header = 0.5 + 0.16 * len(lines)
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - header / height))
    figure = Figure(figsize=(width, height), layout=layout)
    figure.text(0.012, 1 - 0.10 / height, inert(title), fontsize=13, fontweight="bold", va="top")
    below = "\n".join(inert(line, len(line)) for line in lines)
    figure.text(0.012, 1 - 0.38 / height, below, fontsize=8.5, color="#555555", va="top")
    return figure


def thinned(items: Sequence[Item], most: int = MAX_LABELS) -> list[Item]:
    """At most so many of the items, equally far apart, from the first to the last."""
    count = min(len(items), most)
    return [items[i * (len(items) - 1) // max(1, count - 1)] for i in range(count)]


def style(axes: Axes) -> None:
    """Light grid behind the data, no box."""
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def doubling_axis(axes: Axes, sizes: Iterable[float]) -> None:
    """A logarithmic x axis with a tick at each size whose label has room."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    known = sorted(sizes)
    ticks: list[float] = []
    for size in known:
        if not ticks or size / ticks[-1] >= (known[-1] / known[0]) ** TICKS_APART > 1:
            ticks.append(size)
    axes.set_xticks(ticks, [f"{round(tick, 2):g}" for tick in ticks])


def categories(axes: Axes, names: Sequence[str], most: int = MAX_LABELS) -> None:
    """Names along the x axis, slanted when they are many or long; where there are more than `most`, not all of them."""
    shown = thinned(range(len(names)), most)
    slanted = len(names) > 6 or max(map(len, names), default=0) > 9
    axes.set_xticks(shown, [inert(names[i], 20) for i in shown])
    if slanted:
        axes.tick_params(axis="x", rotation=35)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    axes.set_xlim(-0.6, len(names) - 0.4)


def legend_below(
    figure: Figure, handles: Mapping[str, Any] | Sequence[Patch | Line2D], num_columns: int, fontsize: float = 8.5
) -> None:
    """A legend below the picture that reads row by row; matplotlib fills one column by column.

    The handles have labels of their own, or stand under them.
    """
    named = handles if isinstance(handles, Mapping) else {str(handle.get_label()): handle for handle in handles}
    missing = -len(named) % num_columns if len(named) > num_columns else 0
    whole = [*named.items(), *[("", Patch(alpha=0.0))] * missing]
    by_column = [entry for column in range(num_columns) for entry in whole[column::num_columns]]
    figure.legend(
        [handle for _, handle in by_column], [label for label, _ in by_column],
        loc="outside lower center", ncols=num_columns, frameon=False, fontsize=fontsize,
    )  # fmt: skip


def legend_beside(panel: Axes, handles: Mapping[str, Any]) -> None:
    """A legend to the right, in the order in which growing values stand above each other."""
    names = thinned(list(handles))[::-1]
    title = f"{len(names)} of {len(handles)} lines" if len(names) < len(handles) else None
    panel.legend(
        [handles[name] for name in names], [inert(name) for name in names], title=title, title_fontsize=9,
        frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip


def draw_lines(
    panel: Axes, lines: Sequence[Line], positions: Mapping[str | int, float], colours: Sequence[Colour]
) -> None:
    """Draw lines, below them crosses where runs failed, and to the right a legend."""
    handles = {
        line.name: draw_line(panel, line, positions, colour, marker)
        for line, colour, marker in zip(lines, colours, cycle(MARKERS), strict=False)
        if line.known
    }
    if failures := failure_rows(lines):
        leave_room(panel, failure_band(len(failures)))
        draw_failures(panel, failures, positions)
    legend_beside(panel, handles)


def leave_room(panel: Axes, band: float) -> None:
    """Lower the end of the y axis, so that this fraction of the panel is below all that is drawn."""
    scale = panel.yaxis.get_transform()
    low, high = scale.transform(panel.get_ylim())
    panel.set_ylim(scale.inverted().transform([low - (high - low) * band / (1 - band)])[0], panel.get_ylim()[1])


def draw_line(
    axes: Axes, line: Line, positions: Mapping[str | int, float], colour: Colour, marker: str
) -> ErrorbarContainer:
    """Draw the known points of a line with their standard deviations."""
    points = line.known
    x = [positions[point.x] for point in points]
    values = [point.value or 0.0 for point in points]
    errors = [point.error or 0.0 for point in points]
    return axes.errorbar(x, values, errors, capsize=3, linewidth=1.6, markersize=5, color=colour, marker=marker)


def failure_rows(lines: Sequence[Line]) -> dict[str, list[str | int]]:
    """Where runs failed, by the line and how they ended."""
    rows: dict[str, list[str | int]] = {}
    for line in lines:
        for point in line.failed:
            rows.setdefault(f"{line.name}: {point.failure}", []).append(point.x)
    return rows


def failure_band(rows: int) -> float:
    """Height of the band of failed runs, as a fraction of the panel."""
    return min(0.05 * rows, 0.4)


def draw_failures(axes: Axes, rows: Mapping[str, Sequence[str | int]], positions: Mapping[str | int, float]) -> None:
    """Crosses in a band along the bottom, a row for each line and each way to fail, its words to the right."""
    across, band = axes.get_xaxis_transform(), failure_band(len(rows))
    shade = Rectangle(
        (0, 0), 1, band, transform=axes.transAxes, alpha=0.06, zorder=0.6, linewidth=0, color=FAILURE_COLOUR
    )
    axes.add_patch(shade)
    for index, (words, places) in enumerate(rows.items()):
        height = band * (index + 0.5) / len(rows)
        axes.plot([positions[place] for place in places], [height] * len(places), transform=across, **CROSS)
        short = inert(words, 44)
        axes.text(1.015, height, short, transform=axes.transAxes, va="center", fontsize=8, color=FAILURE_COLOUR)


def write_upright(axes: Axes, x: float, words: str) -> None:
    """A failed run where there is little room to the sides: a cross on the axis, and words that rise from it."""
    axes.plot(x, 0, transform=axes.get_xaxis_transform(), clip_on=False, **CROSS)
    axes.annotate(
        inert(words), (x, 0), (0, 9), textcoords="offset points", rotation=90, ha="center", va="bottom",
        fontsize=8, color=FAILURE_COLOUR, path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )  # fmt: skip


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
