"""Stacked horizontal bars, as the pictures of kernels and of memory have them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from matplotlib.axes import Axes

from cs336_systems.report.numbers import significant
from cs336_systems.report.plots import drawing

Part: TypeAlias = tuple[float, Mapping[str, Any]]
"""Width of a part of a bar, and how matplotlib draws it."""
CHARACTER_INCHES = 0.075
LONGEST_LABEL = 34
"""Characters of a line of a bar's label."""


def draw_bar(panel: Axes, y: int, parts: Iterable[Part], inches: float, digits: int = 2) -> None:
    """One bar, each part with its width in so many digits where that fits; a width of 1 takes so many inches."""
    left = 0.0
    for width, style in parts:
        panel.barh(y, width, 0.72, left, linewidth=0.5, **{"edgecolor": "white", **style})
        words = significant(width, digits)
        if (len(words) + 1.5) * CHARACTER_INCHES < inches * width:
            shade = {"facecolor": "white", "edgecolor": "none", "pad": 1.2} if "hatch" in style else None
            colour = drawing.ink(style["facecolor"])
            panel.text(left + width / 2, y, words, ha="center", va="center", fontsize=8, color=colour, bbox=shade)
        left += width


def write_right(panel: Axes, y: int, words: str, colour: str = "black") -> None:
    """Words to the right of a bar, outside of the panel."""
    panel.text(
        1.03, y, words, transform=panel.get_yaxis_transform(), va="center", fontsize=8, linespacing=1.2, color=colour
    )


def finish(panel: Axes, names: Sequence[str], longest: float) -> None:
    """Names on the left, the first on top, and a grid of the values up to the longest bar's."""
    drawing.style(panel)
    panel.grid(visible=False, axis="y")
    panel.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    panel.set_yticks(range(len(names)), names, linespacing=1.3)
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(len(names) - 0.45, -0.55)
    panel.set_xlim(0, longest)
