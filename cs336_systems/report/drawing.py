"""What the pictures have in common: colours, fonts, failed runs, files. No global state of matplotlib is touched."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cs336_systems.config import Phase, Precision
from cs336_systems.report.formats import plain
from cs336_systems.report.series import Line

PHASE_COLOURS = {Phase.FORWARD: "#0072B2", Phase.BACKWARD: "#E69F00", Phase.OPTIMIZER: "#009E73"}
PRECISION_COLOURS = {
    Precision.FP32: "#333333",
    Precision.TF32: "#CC79A7",
    Precision.BF16: "#D55E00",
    Precision.FP16: "#56B4E9",
}
"""The palette of Okabe and Ito (2008), which people with any colour vision tell apart."""
REST_COLOUR: Final = "#BBBBBB"
FAILURE_COLOUR: Final = "#B00020"
CROSS: Final[dict[str, Any]] = {
    "marker": "X", "markersize": 7, "color": FAILURE_COLOUR, "linestyle": "none",
    "zorder": 5, "markeredgecolor": "white",
}  # fmt: skip
MARKERS: Final = "osD^vPX<>*h"
DPI = 160
LONGEST_TEXT = 60


def inert(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, shortened, without mathematics, and without the leading underscore that hides it in a legend."""
    short = plain(text) if len(text) <= longest else plain(text)[: longest - 1] + "…"
    escaped = short.replace("\\$", "\\ $").replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def shades(count: int) -> list[tuple[float, float, float]]:
    """Colours from light to dark that also differ in grey, for things in an order."""
    colours = matplotlib.colormaps["viridis"]
    return [to_rgb(colours(0.85 - 0.85 * i / max(1, count - 1))) for i in range(count)]


def tints(colour: str, count: int) -> list[tuple[float, float, float]]:
    """The colour from pale to full."""
    red, green, blue = to_rgb(colour)
    weights = [1.0 if count == 1 else 0.4 + 0.6 * i / (count - 1) for i in range(count)]
    return [(1 - w + w * red, 1 - w + w * green, 1 - w + w * blue) for w in weights]


def new_figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """A figure with a title and, smaller, the settings below it."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - 0.75 / height)))
    figure.text(0.012, 1 - 0.10 / height, inert(title), fontsize=13, fontweight="bold", va="top")
    lines = textwrap.wrap(plain(subtitle), int(width * 15.5)) or [""]
    below = "\n".join(inert(line, len(line)) for line in lines)
    figure.text(0.012, 1 - 0.38 / height, below, fontsize=8.5, color="#555555", va="top")
    return figure


def style(axes: Axes) -> None:
    """Light grid behind the data, no box."""
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def categories(axes: Axes, names: Sequence[str]) -> None:
    """Names along the x axis, slanted when they are many or long."""
    slanted = len(names) > 6 or max(map(len, names), default=0) > 9
    axes.set_xticks(range(len(names)), [inert(name) for name in names])
    if slanted:
        axes.tick_params(axis="x", rotation=35)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    axes.set_xlim(-0.6, len(names) - 0.4)


def draw_line(axes: Axes, line: Line, positions: Mapping[str | int, float], **look: str) -> Artist:
    """Draw the known points of a line with their standard deviations."""
    points = line.known
    x = [positions[point.x] for point in points]
    errors = [point.error or 0.0 for point in points]
    return axes.errorbar(
        x, [point.value or 0.0 for point in points], errors, capsize=3, linewidth=1.6, markersize=5, **look
    )


def mark_failures(axes: Axes, failures: Sequence[tuple[float, str]]) -> None:
    """A cross on the axis for every failed run, with words to it; those at one place stand above each other."""
    low, high = axes.get_xlim()
    heights: dict[float, int] = {}
    for x, words in failures:
        height = 0.03 + 0.055 * heights.get(x, 0)
        heights[x] = heights.get(x, 0) + 1
        axes.plot(x, height, transform=axes.get_xaxis_transform(), **CROSS)
        left = x > (low * high) ** 0.5 if axes.get_xscale() == "log" else x > (low + high) / 2
        axes.annotate(
            inert(words), (x, height), ((-8 if left else 8), 0), xycoords=axes.get_xaxis_transform(),
            textcoords="offset points", ha="right" if left else "left", va="center", fontsize=8, color=FAILURE_COLOUR,
        )  # fmt: skip


def write_upright(axes: Axes, x: float, y: float, words: str) -> None:
    """A failed run where there is little room to the sides: a cross on the axis, and words that rise from (x, y)."""
    axes.plot(x, 0, transform=axes.get_xaxis_transform(), clip_on=False, **CROSS)
    axes.annotate(
        inert(words), (x, y), (0, 9), textcoords="offset points", rotation=90,
        ha="center", va="bottom", fontsize=8, color=FAILURE_COLOUR,
    )  # fmt: skip


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
