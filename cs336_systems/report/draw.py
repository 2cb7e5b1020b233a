"""A picture as a PNG, and as an SVG of the page."""

import html
import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Final, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import Bbox

from ..text import inert_line, shorten, unbroken_label
from .charts import FAILURE_COLOUR, Bar, Chart, Panel, Picture, Style, ink, visible
from .words import significant

LONGEST_LABEL = 34
"""Most characters in a line of a horizontal bar's label."""
WIDTH = 6.5
"""Inches of a chart's width."""
PAGE_WIDTH = 9.5
"""Inches of a picture's width on a page."""
CHARACTER_INCHES = 0.075
"""Width of a character of a number in a bar."""
BAR_WIDTH, BAR_INCHES = 0.7, 3.6
"""Width of a bar in units of the axis, and approximate length of the longest horizontal one."""
TITLE_INCHES, LABEL_INCHES, PANEL_INCHES = 0.5, 0.29, 0.4
"""Height that a chart needs for its title, for the label of an axis, and for each panel besides its
bars.
"""
MIN_BAR_INCHES, LINE_INCHES, LEGEND_ROW_INCHES = 0.36, 0.16, 0.19
"""Least height of a bar with its distance to the next, and heights of a line of text and of a row
of the legend.
"""
PANEL_BARS = 0.3
"""Height of a panel besides its bars, in bars."""


def png_of(picture: Picture) -> bytes:
    """The picture as a PNG file."""
    return to_png(_figure(picture))


def _figure(picture: Picture) -> Figure:
    """The matplotlib figure of a picture, which is either a chart to be drawn or draws itself."""
    return figure_of(picture) if isinstance(picture, Chart) else picture.make()


def figure_of(chart: Chart) -> Figure:
    """The chart as a figure of matplotlib: its panels below each other, with horizontal bars, and
    one legend for all of them below.

    The figure is as high as its bars and the legend need. A label stands below the last of the
    panels that share it.
    """
    handles = _legend_handles(chart)
    height = _height_inches(chart, math.ceil(len(handles) / chart.legend_columns))
    figure = new_figure(WIDTH, height, chart.title, chart.settings)
    heights = [len(panel.bars) + PANEL_BARS for panel in chart.panels]
    grid = figure.subplots(len(chart.panels), squeeze=False, height_ratios=heights)
    labelled = _are_labelled(chart.panels)
    for axes, panel, is_labelled in zip(grid.flat, chart.panels, labelled, strict=True):
        style(axes, "x")
        _draw_bars(axes, panel, chart.styles)
        if is_labelled:
            axes.set_xlabel(inert(panel.label), fontsize=9)
    if handles:
        legend_below(figure, handles, chart.legend_columns)
    return figure


def _legend_handles(chart: Chart) -> list[Patch | Line2D]:
    """What the legend explains: the parts of bars that can be seen, then the marks."""
    parts = visible(_bars(chart), chart.styles)
    marks = dict.fromkeys(panel.mark for panel in chart.panels if panel.mark)
    handles: list[Patch | Line2D] = []
    for name, of_part in parts.items():
        handles.append(Patch(label=inert(name), **_look(of_part)))
    for mark in marks:
        handles.append(Line2D([], [], label=inert(mark), **MARK))
    return handles


def _bars(chart: Chart) -> Iterable[Bar]:
    """The bars of all panels."""
    return chain.from_iterable(panel.bars for panel in chart.panels)


def _are_labelled(panels: Sequence[Panel]) -> list[bool]:
    """Whether the label stands below each panel: it does unless the next panel has the same."""
    labels = [panel.label for panel in panels]
    return [label != below for label, below in pairwise([*labels, None])]


def _height_inches(chart: Chart, legend_rows: int) -> float:
    """Height of the chart's figure; every bar has room for the name, and for the figures, with the
    most lines.
    """
    bars = [*_bars(chart)]
    most_lines = max((1 + wrapped(bar.name).count("\n") for bar in bars), default=1)
    most_figures = max((len(_figures(bar)) for bar in bars), default=1)
    bar_inches = max(MIN_BAR_INCHES, LINE_INCHES * max(most_lines, most_figures))
    of_bars = PANEL_INCHES * len(chart.panels) + bar_inches * len(bars)
    of_labels = LABEL_INCHES * sum(_are_labelled(chart.panels))
    header = TITLE_INCHES + LINE_INCHES * len(_settings_lines(chart.settings, WIDTH))
    return header + of_bars + of_labels + LEGEND_ROW_INCHES * legend_rows


def _draw_bars(axes: Axes, panel: Panel, styles: Mapping[str, Style]) -> None:
    """Draw the horizontal bars of a panel with their marks, from top to bottom."""
    longest = max((bar.length for bar in panel.bars), default=0.0)
    for place, bar in enumerate(panel.bars):
        _draw_bar(axes, place, bar, styles, BAR_INCHES / (longest or 1.0))
        if bar.mark is not None:
            axes.plot([bar.mark], [place], clip_on=False, **MARK)
    highest = max([longest, *(bar.mark or 0.0 for bar in panel.bars)])
    axes.set_xlim(0, highest or 1.0)
    if not highest:
        axes.set_xticks([])  # runs that failed have no scale
    axes.set_ylim(len(panel.bars) - 0.45, -0.55)
    axes.set_yticks(
        range(len(panel.bars)), [wrapped(bar.name) for bar in panel.bars], linespacing=1.3
    )
    axes.tick_params(axis="y", length=0)


def _draw_bar(axes: Axes, place: int, bar: Bar, styles: Mapping[str, Style], inches: float) -> None:
    """Draw one horizontal bar; each part is labelled with its length in two digits where there is
    room.

    `inches` is how long one unit of the axis is on paper.
    """
    left = 0.0
    for name, length in bar.parts.items():
        look = styles[name]
        axes.barh(place, length, BAR_WIDTH, left, **_look(look))
        words = significant(length, 2)
        if (len(words) + 1.5) * CHARACTER_INCHES < inches * length:
            # a number is not readable on a pattern
            shade = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
            axes.text(
                left + length / 2,
                place,
                words,
                ha="center",
                va="center",
                fontsize=8,
                color=ink(look.colour),
                bbox=shade if look.pattern else None,
            )
        left += length
    axes.text(
        1.03,
        place,
        "\n".join(_figures(bar)),
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=8,
        linespacing=1.2,
        color=FAILURE_COLOUR if bar.failure else "black",
    )


def _figures(bar: Bar) -> list[str]:
    """The lines at the end of a bar: its figures, and how its run failed."""
    return [inert(line) for line in (*bar.figures, *bar.failure.split("\n")) if line]


def _look(style: Style) -> dict[str, Any]:
    """Keyword arguments of matplotlib that give a bar the colour and hatching of a style."""
    return {
        "facecolor": style.colour,
        "hatch": style.pattern * 4 or None,
        "edgecolor": style.ink,
        "linewidth": 0.5 if style.pattern else 0.0,
    }


MARK: Final[dict[str, Any]] = {
    "color": "#222222",
    "marker": "|",
    "linestyle": "none",
    "markersize": 13,
    "zorder": 3,
}
DPI = 160
MOST_POINTS = 400
"""Most points of a line or an area that is drawn as such on a page."""
LONGEST_TEXT = 60
LONGEST_SOURCE = 70
LONGEST_SETTINGS = 500


def inert(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text for matplotlib, cut to `longest` characters: dollar signs begin no mathematics, and
    a leading underscore does not hide a legend's entry.
    """
    escaped = shorten(inert_line(text), longest).replace("\\$", "\\ $").replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def wrapped(text: str, longest: int = LONGEST_LABEL) -> str:
    """The text, inert, on lines that are at most so long, and of which none begins with the number
    of a setting; of more than three lines the middle is left out.
    """
    short = unbroken_label(inert_line(text))
    if len(short) > 3 * longest:
        short = f"{short[: 2 * longest - 1]}…{short[-longest:]}"
    lines = textwrap.wrap(short, longest, break_on_hyphens=False)
    return "\n".join(inert(line, longest) for line in lines)


def in_settings(source: str) -> str:
    """The name of a file as one of the settings below a title, which commas separate."""
    return shorten(source.replace(", ", " "), LONGEST_SOURCE)


def new_figure(width: float, height: float, title: str, settings: str) -> Figure:
    """A figure of so many inches with a title and, smaller, the settings below it."""
    lines = _settings_lines(settings, width)
    header = TITLE_INCHES + LINE_INCHES * len(lines)
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - header / height))
    figure = Figure(figsize=(width, height), layout=layout)
    figure.text(0.012, 1 - 0.10 / height, inert(title), fontsize=13, fontweight="bold", va="top")
    below = "\n".join(inert(line, len(line)) for line in lines)
    figure.text(0.012, 1 - 0.38 / height, below, fontsize=8.5, color="#555555", va="top")
    return figure


def _settings_lines(settings: str, width: float) -> list[str]:
    """The settings on lines of so many inches that end between two of them; at least one line."""
    whole = []
    for item in inert_line(settings, LONGEST_SETTINGS).split(", "):
        whole.append(in_settings(item).replace(" ", "\N{NO-BREAK SPACE}"))
    return textwrap.wrap(", ".join(whole), int(width * 15.5), break_on_hyphens=False) or [""]


def style(axes: Axes, values: Literal["x", "y"] = "y") -> None:
    """Draw a light grid behind the data, numbers with commas, and no box around the axes."""
    axes.grid(axis=values, color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.9g}")


def legend_below(figure: Figure, handles: Sequence[Patch | Line2D], num_columns: int) -> None:
    """A legend below the picture that reads row by row; matplotlib fills one column by column."""
    missing = -len(handles) % num_columns if len(handles) > num_columns else 0
    whole = [*handles, *[Patch(alpha=0.0, label="")] * missing]
    columns = [whole[first::num_columns] for first in range(num_columns)]
    by_column = list(chain.from_iterable(columns))
    figure.legend(
        by_column,
        [str(handle.get_label()) for handle in by_column],
        loc="outside lower center",
        ncols=num_columns,
        frameon=False,
        fontsize=8.5,
    )


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def svg_of(picture: Picture, name: str) -> str:
    """The picture as an element of a page, in which words are texts; greys turn around on a dark
    page. `name` is its identifier there.

    Its identifiers are hashed with the name, so that they differ from those of other pictures. What
    has more points than MOST_POINTS is an image. It is wider than in a file, as a page is.
    """
    figure = _figure(picture)
    figure.set_size_inches(PAGE_WIDTH, figure.get_figheight())
    for artist in figure.findobj(lambda artist: isinstance(artist, Collection | Line2D | Patch)):
        shape: Any = artist
        paths = shape.get_paths() if isinstance(artist, Collection) else [shape.get_path()]
        num_points = sum(len(path.vertices) for path in paths)
        artist.set_rasterized(num_points > MOST_POINTS)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        unnamed = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=unnamed, transparent=True, dpi=DPI)
    text = buffer.getvalue().decode().partition("<svg")[2]
    text = re.sub(r"[ \n]+", " ", text).replace("> <", "><")
    text = re.sub(_OF_FILES, "", text)
    # two decimals of a point are finer than a pixel
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    text = re.sub(r"#([0-9a-f]{2})\1\1(?=[;\"])", _themed, text)
    title, sentence = map(html.escape, described(figure))
    spoken = f'role="img" aria-labelledby="{name}-title" aria-describedby="{name}-about"'
    spoken += f' data-lanes="{_lanes(figure)}"'
    words = f'<title id="{name}-title">{title}</title><desc id="{name}-about">{sentence}</desc>'
    begin, bracket, rest = text.partition(">")
    return f"<svg {spoken}{begin}{bracket}{words}{rest}"


def _lanes(figure: Figure) -> str:
    """Where the panels below the first are, or the only one: left, right, top and bottom edge, as
    percents of the figure from its left and upper edges.
    """
    whole = Bbox.union([axes.get_position() for axes in figure.axes[1:] or figure.axes])
    edges = whole.x0, whole.x1, 1 - whole.y1, 1 - whole.y0
    return " ".join(f"{100 * edge:.2f}" for edge in edges)


def described(figure: Figure) -> tuple[str, str]:
    """The title of a picture, and a sentence on what it shows, for those who do not see it."""
    title, *below = [text.get_text() for text in figure.texts]
    legends = list(figure.legends)
    labels = list[str]()
    for axes in figure.axes:
        labels += axes.get_ylabel(), axes.get_xlabel()
        legend = axes.get_legend()
        if legend is not None:
            legends.append(legend)
    texts = chain.from_iterable(legend.get_texts() for legend in legends)
    shown = _listed((text.get_text() for text in texts), ", ") or "one series"
    by_axes = _listed(labels, " and ") or "no axis with a name"
    where = f" ({' '.join(below)})" if any(below) else ""
    return title, " ".join(f"The picture shows {shown}, by {by_axes}{where}.".split())


def _listed(texts: Iterable[str], separator: str) -> str:
    """The texts that are not empty, each once."""
    return separator.join(dict.fromkeys(filter(None, texts)))


_OF_FILES = (
    r"<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id=\"[^\"]*\"|font-family: [^\";]*;? ?"
)
"""What a file needs beside the picture, and a page has in its own style."""


def _themed(grey: re.Match[str]) -> str:
    """The CSS colour that stands for a grey of the picture: the grey itself on light pages, its
    counterpart on dark ones. Colours with a hue are not passed here.
    """
    dark = round(0xE6 - (0xE6 - 0x17) * int(grey[1], 16) / 0xFF)
    return f"light-dark({grey[0]}, #{dark:02x}{dark:02x}{dark:02x})"
