"""What the pictures have in common: fonts, legends, failed runs, and files of them."""

import hashlib
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cs336_systems.report.plots.palette import FAILURE_COLOUR, on_dark
from cs336_systems.text import inert_line, shorten

CROSS: Final[dict[str, Any]] = {
    "marker": "X", "markersize": 7, "color": FAILURE_COLOUR, "linestyle": "none",
    "zorder": 5, "markeredgecolor": "white",
}  # fmt: skip
DPI = 160
MOST_POINTS = 400
"""Most points of a line or an area that is drawn as such on a page."""
LONGEST_TEXT = 60
LONGEST_SOURCE = 70
LONGEST_SETTINGS = 500


def inert(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, shortened, without mathematics, and without the leading underscore that hides it in a legend."""
    escaped = shorten(inert_line(text), longest).replace("\\$", "\\ $").replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def wrapped(text: str, longest: int) -> str:
    """The text, inert, on lines that are at most so long; of more than three lines the middle is left out."""
    whole = inert_line(text)
    short = whole if len(whole) <= 3 * longest else f"{whole[: 2 * longest - 1]}…{whole[-longest:]}"
    return "\n".join(inert(line, longest) for line in textwrap.wrap(short, longest, break_on_hyphens=False))


def inert_lines(text: str) -> str:
    """The lines of the text, each inert."""
    return "\n".join(inert(line) for line in text.split("\n"))


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


def style(axes: Axes, values: Literal["x", "y"] = "y") -> None:
    """Light grid of the values behind the data, no box."""
    axes.grid(axis=values, color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def legend_below(figure: Figure, handles: Mapping[str, Any] | Sequence[Patch | Line2D], num_columns: int) -> None:
    """A legend below the picture that reads row by row; matplotlib fills one column by column.

    The handles have labels of their own, or stand under them.
    """
    named = handles if isinstance(handles, Mapping) else {str(handle.get_label()): handle for handle in handles}
    missing = -len(named) % num_columns if len(named) > num_columns else 0
    whole = [*named.items(), *[("", Patch(alpha=0.0))] * missing]
    by_column = [entry for column in range(num_columns) for entry in whole[column::num_columns]]
    figure.legend(
        [handle for _, handle in by_column], [label for label, _ in by_column],
        loc="outside lower center", ncols=num_columns, frameon=False, fontsize=8.5,
    )  # fmt: skip


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an element of a page, in which words are texts, and colours those of the page's theme.

    Its identifiers differ from those of pictures of other names. What has more points than MOST_POINTS is an image.
    """
    for artist in figure.findobj(lambda artist: isinstance(artist, Collection | Line2D | Patch)):
        paths: Any = artist.get_paths() if isinstance(artist, Collection) else [artist.get_path()]  # type: ignore[attr-defined]
        num_points = sum(len(path.vertices) for path in paths)
        artist.set_rasterized(num_points > MOST_POINTS)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        unnamed = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=unnamed, transparent=True, dpi=DPI)
    text = re.sub(r"[ \n]+", " ", buffer.getvalue().decode().partition("<svg")[2]).replace("> <", "><")
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), re.sub(_OF_FILES, "", text))
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
    own = {old: f"p{digest}-{n}" for n, old in enumerate(dict.fromkeys(re.findall(r' id="(.*?)"', text)))}
    text = re.sub(r'(?<= id=")[^"]+|(?<=url\(#)[^)]+|(?<=href="#)[^"]+', lambda old: own.get(old[0], old[0]), text)
    return "<svg" + re.sub(r"#[0-9a-f]{6}(?=[;\"])", _themed, text)


_OF_FILES = r"<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id=\"[^\"]*\"|font-family: [^\";]*;? ?"
"""What a file needs beside the picture, and a page has in its own style."""


def _themed(colour: re.Match[str]) -> str:
    dark = on_dark(colour[0])
    return colour[0] if dark.lower() == colour[0] else f"light-dark({colour[0]}, {dark})"
