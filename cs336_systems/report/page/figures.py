"""A chart as plotly's data and layout: the content of the PNG, with values on hover."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from markupsafe import Markup

from cs336_systems.report.numbers import mean_and_std
from cs336_systems.report.page.write import Figure
from cs336_systems.report.plots.charts import Axis, Bar, Chart, Curve, Panel
from cs336_systems.report.plots.palette import FAILURE_COLOUR
from cs336_systems.text import inert_line

Spec: TypeAlias = dict[str, Any]
SYMBOLS = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross",
           "X": "x", "<": "triangle-left", ">": "triangle-right", "*": "star", "h": "hexagon", "p": "pentagon",
           "d": "diamond-tall", "8": "octagon", ".": "circle", "_": "line-ew-open", "|": "line-ns-open"}  # fmt: skip
"""Plotly's names of the markers."""
DASHES = {"-": "solid", "--": "dash", ":": "dot"}
SMALL = 0.6
"""Size of the marker `.`, relative to other markers."""
FAILED = {"symbol": "x", "size": 10, "color": FAILURE_COLOUR}
WORDS = 11
"""Size of words in a picture, in pixels."""
LONGEST = 500
"""Most characters of a text in a picture."""
PANEL, BAR, GAP, AROUND, NARROW = 270, 30, 90, 130, 50
"""Pixels: height of a panel, of a horizontal bar, between panels, around all panels, and extra on a narrow screen."""
MAX_TICKS = 20
"""Most names along an axis for which there is room."""
LONGEST_LABEL = 34
"""Most characters in a line of a horizontal bar's name, and of a name below an axis."""
MOST_WORDS = 8
"""Most bars of a panel with room for words on a narrow screen."""
FEW = 2
"""Powers of ten below which a logarithmic axis has ticks between them."""
ASIDE = 0.07
"""Part of the width between panels."""


def text(words: object) -> str:
    """Words in a picture, on one line; the page escapes them."""
    return inert_line(str(words), LONGEST)


def figure_of(chart: Chart, id: str, source: str, png: str) -> Figure:
    """The chart as a part of a page; for `png` see `Figure`."""
    title = inert_line(f"{chart.title}: {chart.settings}")
    return Figure(id=id, title=title, spec=spec_of(chart), png=png, source=source, height=height_of(chart))


def height_of(chart: Chart) -> int:
    """Height of the figure in pixels, to which the page adds that of a legend of more than two rows."""
    rows = _row_heights(chart)
    return sum(rows) + GAP * (len(rows) - 1) + AROUND


def spec_of(chart: Chart) -> Spec:
    """Data and layout; and for a narrow screen a layout with its own height, in which no panel is beside another."""
    data: list[Spec] = []
    named = {""}
    for number, panel in enumerate(chart.panels):
        place = {"xaxis": f"x{_ending(number)}", "yaxis": f"y{_ending(number)}"}
        for trace in [*_bars(chart, panel), *_curves(panel, chart.is_lying), *_failures(panel), *_marks(chart, panel)]:
            name = trace.get("name", "")
            data.append({"showlegend": name not in named, "legendgroup": name} | trace | place)
            named.add(name)
    narrow = replace(chart, columns=1)
    return {
        "data": data,
        "layout": _layout(chart, math.inf),
        "narrow": _layout(narrow, MOST_WORDS) | {"height": height_of(narrow) + NARROW},
    }


def _ending(number: int) -> str:
    """Suffix of the names of a panel's axes."""
    return "" if number == 0 else str(number + 1)


def _layout(chart: Chart, most_words: float) -> Spec:
    """Axes, lines across and words; bars have words where there are at most so many in a panel."""
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0}
    layout: Spec = {"barmode": "stack", "hovermode": "closest", "annotations": [], "shapes": [], "legend": legend}
    named = {""}
    for number, panel in enumerate(chart.panels):
        ending, (across, upward) = _ending(number), _domains(chart, number)
        is_left, is_last = number % chart.columns == 0, number + chart.columns >= len(chart.panels)
        x, y = _axis(panel.x, is_named=is_last), _axis(panel.y, is_named=is_left, values=panel.values)
        if chart.is_lying:
            names = list(map(text, panel.x.names))
            x, y = _beside(panel, is_last), {"tickvals": [-place for place in range(len(names))], "ticktext": names}
        if chart.is_shared and number:
            y["matches"] = "y"
        layout[f"xaxis{ending}"] = x | {"domain": across, "anchor": f"y{ending}"}
        layout[f"yaxis{ending}"] = y | {"domain": upward, "anchor": f"x{ending}"}
        for line in panel.references:
            ends, value, name = "y" if line.is_upright else "x", "x" if line.is_upright else "y", text(line.name)
            layout["shapes"].append(
                {
                    "type": "line", f"{ends}ref": f"{ends}{ending} domain", f"{value}ref": f"{value}{ending}",
                    f"{ends}0": 0, f"{ends}1": 1, f"{value}0": line.value, f"{value}1": line.value, "name": name,
                    "line": {"dash": DASHES[line.dash], "color": line.colour, "width": 1.2},
                    "layer": "above" if panel.bars else "below",
                    "showlegend": name not in named, "legendgroup": name,
                }
            )  # fmt: skip
            named.add(name)
        if title := chart.title_of(number):
            layout["annotations"].append(
                {"xref": f"x{ending} domain", "yref": f"y{ending} domain", "x": 0.5, "y": 1, "yanchor": "bottom",
                 "text": text(title), "showarrow": False}
            )  # fmt: skip
        if len(panel.bars) <= most_words:
            layout["annotations"] += [
                {"xref": f"x{ending}", "yref": f"y{ending}"} | own for own in _words(chart, panel)
            ]
    return layout


def _row_heights(chart: Chart) -> list[int]:
    if chart.is_lying:
        return [BAR * (len(panel.x.names) + 1) for panel in chart.panels]
    return [PANEL] * -(-len(chart.panels) // chart.columns)


def _domains(chart: Chart, number: int) -> tuple[list[float], list[float]]:
    """Where a panel is, as parts of the width and of the height."""
    row, column = divmod(number, chart.columns)
    columns, heights = min(chart.columns, len(chart.panels)), _row_heights(chart)
    width = (1 - ASIDE * (columns - 1)) / columns
    whole = sum(heights) + GAP * (len(heights) - 1)
    below = sum(heights[row + 1 :]) + GAP * (len(heights) - 1 - row)
    left = column * (width + ASIDE)
    return [left, left + width], [below / whole, (below + heights[row]) / whole]


def _axis(axis: Axis, *, is_named: bool, values: Sequence[float] = ()) -> Spec:
    found: Spec = {"title": {"text": axis.label if is_named else ""}}
    if labels := axis.labels(MAX_TICKS):
        shown = [_tick(text(label)) for label in labels.values()]
        found |= {"ticklabeloverflow": "allow", "tickvals": list(labels), "ticktext": shown}
    if axis.is_log:
        ends = axis.limits or [value for value in values if value > 0] or [1.0]
        is_short = math.log10(max(ends) / min(ends)) < FEW
        found |= {"type": "log", "exponentformat": "none", "dtick": "D2" if is_short else 1}
    if axis.limits:
        found["range"] = [math.log10(end) if axis.is_log else end for end in axis.limits]
    if axis.from_zero:
        found["rangemode"] = "tozero"
    return found


def _tick(words: str) -> str:
    """The words below an axis, without their middle where they would leave no room for the picture."""
    return words if len(words) <= LONGEST_LABEL else f"{words[: 2 * LONGEST_LABEL // 3]}…{words[-LONGEST_LABEL // 3 :]}"


def _beside(panel: Panel, is_last: bool) -> Spec:
    """The axis of the values of lying bars, with room for the words beside them."""
    longest = max([*panel.values, *(bar.length for bar in panel.bars)], default=0.0) or 1.0
    return _axis(panel.y, is_named=is_last) | {"range": [0, 1.3 * longest]}


def _bars(chart: Chart, panel: Panel) -> Iterator[Spec]:
    """A trace for each kind of part."""
    for name, style in chart.shown_styles.items():
        bars = [bar for bar in panel.bars if name in bar.parts]
        if not bars:
            continue
        places = [_place(panel, bar, chart.is_lying) for bar in bars]
        values = [bar.parts[name] for bar in bars]
        label = name if style.label is None else style.label
        lying = {"orientation": "h", "x": values, "y": places} if chart.is_lying else {"x": places, "y": values}
        yield {
            "type": "bar", "name": text(label), "width": [bar.width for bar in bars], **lying,
            "marker": {"color": style.colour, "line": {"width": 0.5, "color": style.ink},
                       "pattern": {"shape": style.pattern, "fgcolor": style.ink, "bgcolor": style.colour}},
            "text": [_hover(_named(panel, bar, name), panel.y, bar.parts[name]) for bar in bars],
            "hovertemplate": Markup("%{text}<extra></extra>"), "textposition": "none",
        }  # fmt: skip


def _named(panel: Panel, bar: Bar, part: str) -> str:
    return f"{', '.join(filter(None, [panel.title, bar.name]))}: {part}"


def _place(panel: Panel, bar: Bar, is_lying: bool) -> float:
    place = panel.x.place(bar.name) + bar.aside
    return -place if is_lying else place


def _hover(name: str, axis: Axis, value: float, error: float | None = None, at: str = "") -> Markup:
    """Text on hover: the name, the place if the name does not contain it, and the value."""
    words = Markup("<br>").join(filter(None, [text(name), text(at)]))
    return words + Markup(": {} {}").format(mean_and_std(value, error), axis.unit)


def _curves(panel: Panel, is_lying: bool) -> Iterator[Spec]:
    """The known points with their deviations."""
    for curve in panel.curves:
        points = curve.line.known
        if not points and not curve.named:
            continue
        places = [panel.x.place(point.x) + curve.aside for point in points]
        values = [point.value for point in points]
        x, y = (values, [-place for place in places]) if is_lying else (places, values)
        errors = {f"error_{'x' if is_lying else 'y'}": _errors(curve)} if any(p.error for p in points) else {}
        yield {
            "type": "scatter", "mode": _mode(curve), "name": text(curve.named), "opacity": curve.opacity,
            "x": x or [None], "y": y or [None], "line": {"color": curve.colour, "width": curve.width,
                                                         "dash": DASHES[curve.dash or "-"]},
            "marker": _marker(curve), "hovertemplate": Markup("%{text}<extra></extra>"), **errors,
            "text": [_hover(p.about or curve.line.name, panel.y, p.value or 0.0, p.error, _at(panel, p.x))
                     for p in points],
        }  # fmt: skip


def _at(panel: Panel, x: str | float) -> str:
    """Where a point stands, in words."""
    place = f"{panel.x.label} {x}".lstrip() if isinstance(x, str) else f"{panel.x.label} {x:.4g}"
    return ", ".join(filter(None, [panel.title, place]))


def _errors(curve: Curve) -> Spec:
    above = [point.error for point in curve.line.known]
    below = [point.error if point.error_below is None else point.error_below for point in curve.line.known]
    return {"type": "data", "array": above, "arrayminus": below, "symmetric": above == below, "width": 4}


def _mode(curve: Curve) -> str:
    return "+".join([*(["lines"] if curve.dash else []), *(["markers"] if curve.marker else [])]) or "markers"


def _marker(curve: Curve) -> Spec:
    symbol = SYMBOLS.get(curve.marker, "circle")
    size = (SMALL if curve.marker == "." else 1.5) * curve.size if curve.marker else 0
    open_ = "-open" if curve.is_hollow and not symbol.endswith("-open") else ""
    return {"symbol": symbol + open_, "size": size, "color": curve.colour, "opacity": 1 if size else 0}


def _failures(panel: Panel) -> Iterator[Spec]:
    """Crosses at the lowest value of all points, or at 1 without points, for each line and each kind of failure."""
    lowest = min(filter(None, panel.values), default=1.0)
    for words, places in panel.failures.items():
        yield {
            "type": "scatter", "mode": "markers", "name": text(words), "marker": FAILED, "x": places,
            "y": [lowest] * len(places), "text": [text(words)] * len(places),
            "hovertemplate": Markup("%{text}<extra></extra>"),
        }  # fmt: skip


def _marks(chart: Chart, panel: Panel) -> Iterator[Spec]:
    """Crosses where bars are missing because runs failed, and notes."""
    failed = [bar for bar in panel.bars if bar.failure and not chart.is_lying]
    if failed:
        yield {
            "type": "scatter", "mode": "markers", "name": "failed", "marker": FAILED, "y": [0.0] * len(failed),
            "x": [panel.x.place(bar.name) + bar.aside for bar in failed], "cliponaxis": False,
            "text": [text(f"{bar.name}: {bar.failure}") for bar in failed],
            "hovertemplate": Markup("%{text}<extra></extra>"),
        }  # fmt: skip
    if panel.notes:
        yield {
            "type": "scatter", "mode": "text", "hoverinfo": "skip", "cliponaxis": False,
            "x": [note.x for note in panel.notes], "y": [note.y for note in panel.notes],
            "text": [Markup("&nbsp; ") + text(note.words) for note in panel.notes], "textposition": "middle right",
            "textfont": {"size": WORDS},
        }  # fmt: skip


def _words(chart: Chart, panel: Panel) -> Iterator[Spec]:
    """Words at the ends of bars, and how runs failed."""
    for bar in panel.bars:
        place, end, lines = panel.x.place(bar.name) + bar.aside, panel.top(bar), bar.words.split("\n")
        font: Spec = {"size": WORDS} | ({"color": FAILURE_COLOUR} if bar.failure else {})
        own: Spec = {"showarrow": False, "font": font}
        if chart.is_lying:
            words = _lines([*lines, *filter(None, [bar.failure])])
            yield own | {"x": end, "y": -place, "text": words, "xanchor": "left", "xshift": 6, "align": "left"}
        elif bar.failure:
            yield own | {"x": place, "y": 0, "text": _lines(bar.failure.split()), "yanchor": "bottom", "yshift": 6}
        elif bar.words:
            yield own | {"x": place, "y": end, "text": _lines(lines), "yanchor": "bottom"}


def _lines(lines: Iterable[str]) -> Markup:
    """The lines one below the other; plotly breaks none by itself."""
    return Markup("<br>").join(map(text, lines))
