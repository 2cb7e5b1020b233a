"""A picture as a PNG, and as an SVG of the page."""

import hashlib
import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis as AnyAxis
from matplotlib.collections import Collection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullLocator

from cs336_systems.report.plots.charts import FAILURE_COLOUR, Bar, Chart, Curve, Panel, Style, ink
from cs336_systems.report.words import significant
from cs336_systems.text import inert_line, shorten

Handles = dict[str, Any]
"""Handles of the legend's entries, by their words."""
LONGEST_LABEL = 34
"""Most characters in a line of a horizontal bar's label."""
LONGEST_NAME = 20
"""Most characters of a name below an axis."""
CHARACTER_INCHES, LABEL_INCHES = 0.075, 0.42
"""Width of a character of a number in a bar, and of a slanted name along an axis."""
BAR_WIDTH, BAR_INCHES = 0.7, 3.6
"""Width of a bar in units of the axis, and approximate length of the longest horizontal one."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture that is no chart, such as one over time; it is drawn when it is asked for."""

    name: str
    """Name of its file, without an ending."""
    make: Callable[[], Figure]


Picture = Chart | Drawing


def png_of(picture: Picture) -> bytes:
    """The picture as a PNG file."""
    return to_png(_figure(picture))


def svg_of(picture: Picture, name: str) -> str:
    """The picture as an element of a page; `name` is its identifier there."""
    return to_svg(_figure(picture), name)


def _figure(picture: Picture) -> Figure:
    return figure_of(picture) if isinstance(picture, Chart) else picture.make()


def figure_of(chart: Chart) -> Figure:
    """The chart as a figure of matplotlib."""
    columns = min(chart.columns, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    height, weights = rows * chart.size[1], [1.0] * rows
    if chart.is_lying:
        weights = [len(panel.x.names) + 0.3 for panel in chart.panels]
        names = [wrapped(name) for panel in chart.panels for name in panel.x.names]
        height = 0.4 * rows + len(names) * max([0.36, *(0.16 * (1 + name.count("\n")) for name in names)])
    handles = {
        inert(label): Patch(**_look(style))
        for label, style in ((style.label or name, style) for name, style in chart.shown_styles.items())
        if style.label != ""
    }
    height += 0.95 + 0.19 * -(-len(chart.keys) // chart.legend)
    figure = new_figure(max(6.0, columns * chart.size[0] + 0.5), height, chart.title, chart.settings)
    grid = figure.subplots(rows, columns, sharey=chart.is_shared, squeeze=False, height_ratios=weights)
    panels = list(zip(grid.flat, chart.panels, strict=False))
    for axes, panel in panels:
        handles |= _draw_panel(axes, panel, chart)
    for spare in grid.flat[len(panels) :]:
        spare.remove()
    for axes, panel in panels[: 1 if chart.is_shared else None]:
        _limit_values(axes, panel, chart)
    _draw_failures(panels, chart.is_shared)
    for number, (axes, _) in enumerate(panels):
        _label(axes, chart, number)
    if handles:
        legend_below(figure, handles, chart.legend)
    return figure


def _draw_panel(axes: Axes, panel: Panel, chart: Chart) -> Handles:
    """Draw the panel, along all of its x axis; return what of it belongs in the legend."""
    style(axes, "x" if chart.is_lying else "y")
    if panel.x.is_log:
        axes.set_xscale("log")
    if panel.y.is_log:
        axes.set_yscale("log")
    longest = max((bar.length for bar in panel.bars), default=0.0) or 1.0
    for bar in panel.bars:
        if chart.is_lying:
            _draw_lying(axes, panel, bar, chart.styles, BAR_INCHES / longest)
        else:
            _draw_upright(axes, panel, bar, chart.styles)
    handles: Handles = {}
    for curve in panel.curves:
        drawn = _draw_curve(axes, panel, curve, chart.is_lying)
        if curve.named:
            handles[inert(curve.named)] = drawn
    for line in panel.references:
        across = axes.axvline if line.is_upright else axes.axhline
        drawn_line = across(line.value, color=line.colour, linewidth=1.2, linestyle=line.dash, zorder=2.5)
        if line.name:
            handles[inert(line.name)] = drawn_line
    if panel.x.names and chart.is_lying:
        axes.set_ylim(len(panel.x.names) - 0.45, -0.55)
    elif panel.x.names:
        axes.set_xlim(-0.6, len(panel.x.names) - 0.4)
    elif panel.x.limits:
        axes.set_xlim(panel.x.limits)
    return handles


def _draw_curve(axes: Axes, panel: Panel, curve: Curve, is_lying: bool) -> ErrorbarContainer | Line2D:
    """The known points with their deviations, or for a curve without points what stands in the legend."""
    look: dict[str, Any] = {
        "color": curve.colour, "marker": curve.marker, "linestyle": curve.dash or "none", "linewidth": curve.width,
        "markersize": curve.size, "alpha": curve.opacity, "zorder": 3 if curve.dash else 4,
    }  # fmt: skip
    if curve.is_hollow:
        look |= {"markerfacecolor": "none", "markeredgewidth": 1.4}
    elif curve.size > 6 and curve.marker not in "|_":
        look |= {"markeredgecolor": "white", "markeredgewidth": 0.8}
    points = curve.line.known
    if not points:
        return Line2D([], [], **look)
    places = [panel.x.place(point.x) + curve.aside for point in points]
    values = [point.value or 0.0 for point in points]
    above = [point.error or 0.0 for point in points]
    below = [
        high if point.error_below is None else point.error_below for point, high in zip(points, above, strict=True)
    ]
    errors = [below, above] if any(point.error is not None for point in points) else None
    drawn: ErrorbarContainer = (
        axes.errorbar(values, places, xerr=errors, capsize=3, clip_on=False, **look) if is_lying else
        axes.errorbar(places, values, yerr=errors, capsize=3, **look)
    )  # fmt: skip
    return drawn


def _draw_upright(axes: Axes, panel: Panel, bar: Bar, styles: Mapping[str, Style]) -> None:
    place, bottom = panel.x.place(bar.name), 0.0
    for name, length in bar.parts.items():
        axes.bar(place, length, BAR_WIDTH, bottom, **_look(styles[name]))
        bottom += length
    if bar.words:
        axes.annotate(
            inert_lines(bar.words),
            (place, panel.top(bar)),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    if bar.failure:
        _write_upright(axes, place, bar.failure)


def _draw_lying(axes: Axes, panel: Panel, bar: Bar, styles: Mapping[str, Style], inches: float) -> None:
    """A bar, each part with its length in two digits where that fits; a length of 1 takes so many inches."""
    place, left = panel.x.place(bar.name), 0.0
    for name, length in bar.parts.items():
        style = styles[name]
        axes.barh(place, length, BAR_WIDTH, left, **_look(style))
        words = significant(length, 2)
        if (len(words) + 1.5) * CHARACTER_INCHES < inches * length:
            shade = {"facecolor": "white", "edgecolor": "none", "pad": 1.2} if style.pattern else None
            axes.text(
                left + length / 2,
                place,
                words,
                ha="center",
                va="center",
                fontsize=8,
                color=ink(style.colour),
                bbox=shade,
            )
        left += length
    words = "\n".join(filter(None, [bar.words, bar.failure]))
    axes.text(
        1.03, place, inert_lines(words), transform=axes.get_yaxis_transform(), va="center", fontsize=8,
        linespacing=1.2, color=FAILURE_COLOUR if bar.failure else "black",
    )  # fmt: skip


def _look(style: Style) -> dict[str, Any]:
    return {
        "facecolor": style.colour, "hatch": style.pattern * 4 or None, "edgecolor": style.ink,
        "linewidth": 0.5 if style.pattern else 0.0,
    }  # fmt: skip


def _limit_values(axes: Axes, panel: Panel, chart: Chart) -> None:
    """Ends of the axis of values, with room for the words above bars; lying bars have theirs beside the panel."""
    if chart.is_lying:
        axes.set_xlim(0, max([*panel.values, *(bar.length for bar in panel.bars)], default=0.0) or 1.0)
        return
    low, high = panel.y.limits or axes.get_ylim()
    if panel.y.from_zero:
        lines = max((1 + bar.words.count("\n") for bar in panel.bars if bar.words), default=0)
        low, high = min(0.0, low), high * (1.03 + 0.06 * lines)
    axes.set_ylim(low, high)


def _draw_failures(panels: Sequence[tuple[Axes, Panel]], is_shared: bool) -> None:
    """Crosses in a band along the bottom, a row for each line and each way to fail, with its words beside."""
    most = max(len(panel.failures) for _, panel in panels)
    for number, (axes, panel) in enumerate(panels):
        rows = panel.failures
        band = min(0.08 * (most if is_shared else len(rows)), 0.4)
        if band and (number == 0 or not is_shared):
            _leave_room(axes, band)
        if rows:
            across = axes.transAxes
            shade = Rectangle(
                (0, 0), 1, band, transform=across, alpha=0.06, zorder=0.6, linewidth=0, color=FAILURE_COLOUR
            )
            axes.add_patch(shade)
        for index, (words, places) in enumerate(rows.items()):
            height = band * (index + 0.5) / len(rows)
            axes.plot(places, [height] * len(places), transform=axes.get_xaxis_transform(), **CROSS)
            _write_inside(axes, places, height, words)


def _leave_room(axes: Axes, band: float) -> None:
    """Lower the end of the y axis, so that this fraction of the panel is below all that is drawn."""
    scale = axes.yaxis.get_transform()
    low, high = scale.transform(axes.get_ylim())
    axes.set_ylim(scale.inverted().transform([low - (high - low) * band / (1 - band)])[0], axes.get_ylim()[1])


def _write_inside(axes: Axes, places: Sequence[float], height: float, words: str) -> None:
    """Words on the side of the crosses that has more room."""
    across = axes.get_xaxis_transform()
    first, last = (axes.transAxes.inverted().transform(across.transform((x, 0)))[0] for x in (min(places), max(places)))
    on_the_left = first > 1 - last
    axes.annotate(
        inert(words, 44), (min(places) if on_the_left else max(places), height), (-8 if on_the_left else 8, 0),
        xycoords=across, textcoords="offset points", ha="right" if on_the_left else "left", va="center", fontsize=8,
        color=FAILURE_COLOUR,
    )  # fmt: skip


def _write_upright(axes: Axes, x: float, words: str) -> None:
    """A failed run where there is little room to the sides: a cross on the axis, and words that rise from it."""
    axes.plot(x, 0, transform=axes.get_xaxis_transform(), clip_on=False, **CROSS)
    axes.annotate(
        inert(words), (x, 0), (0, 9), textcoords="offset points", rotation=90, ha="center", va="bottom",
        fontsize=8, color=FAILURE_COLOUR,
    )  # fmt: skip


def _label(axes: Axes, chart: Chart, number: int) -> None:
    """Title, ticks and names of the axes of a panel; names of axes stand at the left and below only."""
    panel, title = chart.panels[number], chart.title_of(number)
    is_left, is_last = number % chart.columns == 0, number + chart.columns >= len(chart.panels)
    axes.set_title(inert(title), fontsize=10)
    if chart.is_lying:
        axes.set_yticks(range(len(panel.x.names)), [wrapped(name) for name in panel.x.names], linespacing=1.3)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(inert(panel.y.label) if is_last else "", fontsize=9)
        return
    for axis, own in ((panel.x, axes.xaxis), (panel.y, axes.yaxis)):
        if labels := axis.labels(int(chart.size[0] / LABEL_INCHES)):
            own.set_ticks(list(labels), labels=[inert(words, LONGEST_NAME) for words in labels.values()])
            own.set_minor_locator(NullLocator())
        elif axis.is_log:
            _show_decades(own)
    if len(panel.x.names) > 6 or max(map(len, panel.x.names), default=0) > 9:
        axes.tick_params(axis="x", rotation=35)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    if chart.is_shared and not panel.x.names:
        axes.tick_params(labelbottom=is_last)
    axes.set_xlabel(inert(panel.x.label) if is_last else "", fontsize=9)
    axes.set_ylabel(inert(panel.y.label) if is_left else "", fontsize=9)


def _show_decades(axis: AnyAxis) -> None:
    """Name the powers of ten that a logarithmic axis shows, without an exponent, and more where it shows few."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    steps = (1,) if decades >= 2 else (1, 2, 5) if decades >= 0.7 else range(1, 10)
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = [tick for power in powers for step in steps if low <= (tick := step * 10.0**power) <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


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


def wrapped(text: str, longest: int = LONGEST_LABEL) -> str:
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
    """The figure as an element of a page, in which words are texts; greys turn around on a dark page.

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
    return "<svg" + re.sub(r"#([0-9a-f]{2})\1\1(?=[;\"])", _themed, text)


_OF_FILES = r"<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id=\"[^\"]*\"|font-family: [^\";]*;? ?"
"""What a file needs beside the picture, and a page has in its own style."""


def _themed(grey: re.Match[str]) -> str:
    """A grey from white to black turns around on dark paper; colours with a hue stay."""
    dark = round(0xE6 - (0xE6 - 0x17) * int(grey[1], 16) / 0xFF)
    return f"light-dark({grey[0]}, #{dark:02x}{dark:02x}{dark:02x})"
