"""A chart as plotly's data and layout: what the PNG shows, which answers on hover."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from markupsafe import Markup

from cs336_systems.report.numbers import mean_and_std
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
"""Size of the marker `.` in that of others."""
FAILED = {"symbol": "x", "size": 10, "color": FAILURE_COLOUR}
WORDS = 11
"""Size of words in a picture in pixels."""
SPACE = Markup("&nbsp; ")
LONGEST = 500
"""Characters of a text in a picture."""
PANEL, BAR, GAP, AROUND, KEY = 270, 30, 90, 100, 10
"""Pixels: height of a panel, of a lying bar, between panels, around all of them, and for each entry of the legend."""
FEW = 2
"""Powers of ten below which a logarithmic axis has ticks between them."""
ASIDE = 0.07
"""Part of the width between panels."""


def text(words: object) -> str:
    """Words in a picture, on one line; the page escapes them."""
    return inert_line(str(words), LONGEST)


def height_of(chart: Chart) -> int:
    """Height of the figure in pixels."""
    rows = _row_heights(chart)
    return sum(rows) + GAP * (len(rows) - 1) + AROUND + KEY * len(chart.keys)


def spec_of(chart: Chart) -> Spec:
    """Data and layout."""
    data: list[Spec] = []
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0}
    layout: Spec = {"barmode": "stack", "hovermode": "closest", "annotations": [], "shapes": [], "legend": legend}
    named: set[str] = set()
    for number, panel in enumerate(chart.panels):
        ending = "" if number == 0 else str(number + 1)
        across, upward = _domains(chart, number)
        is_left, is_last = number % chart.columns == 0, number + chart.columns >= len(chart.panels)
        x, y = _axis(panel.x, is_last or chart.is_lying), _axis(panel.y, is_left, _decades(panel))
        if chart.is_lying:
            x, y = _beside(panel, is_last), {"tickvals": [-place for place in x["tickvals"]], "ticktext": x["ticktext"]}
        if chart.is_shared and number:
            y["matches"] = "y"
        layout[f"xaxis{ending}"] = x | {"domain": across, "anchor": f"y{ending}"}
        layout[f"yaxis{ending}"] = y | {"domain": upward, "anchor": f"x{ending}"}
        place = {"xaxis": f"x{ending}", "yaxis": f"y{ending}"}
        for trace in [*_bars(chart, panel), *_curves(panel, chart.is_lying), *_failures(panel), *_words(chart, panel)]:
            name = trace.get("name", "")
            data.append({"showlegend": bool(name) and name not in named, "legendgroup": name} | trace | place)
            named.add(name)
        for line in panel.references:
            ends, value = ("y", "x") if line.is_upright else ("x", "y")
            layout["shapes"].append(
                {
                    "type": "line", f"{ends}ref": f"{ends}{ending} domain", f"{value}ref": f"{value}{ending}",
                    f"{ends}0": 0, f"{ends}1": 1, f"{value}0": line.value, f"{value}1": line.value,
                    "name": text(line.name),
                    "line": {"dash": DASHES[line.dash], "color": line.colour, "width": 1.2}, "layer": "below",
                    "showlegend": bool(line.name) and line.name not in named, "legendgroup": text(line.name),
                }
            )  # fmt: skip
            named.add(line.name)
        if panel.title:
            layout["annotations"].append(
                {"xref": f"x{ending} domain", "yref": f"y{ending} domain", "x": 0.5, "y": 1, "yanchor": "bottom",
                 "text": text(panel.title), "showarrow": False}
            )  # fmt: skip
    return {"data": data, "layout": layout}


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


def _decades(panel: Panel) -> float:
    """Powers of ten from the smallest to the largest value that is drawn over a logarithmic axis."""
    known = [point.value for curve in panel.curves for point in curve.line.known if point.value]
    return math.log10(max(known) / min(known)) if known and panel.y.is_log else 0.0


def _axis(axis: Axis, is_named: bool, decades: float = 0.0) -> Spec:
    found: Spec = {"title": {"text": axis.label if is_named else ""}}
    if axis.labels:
        found |= {"tickvals": list(axis.labels), "ticktext": [text(label) for label in axis.labels.values()]}
    if axis.is_log:
        found |= {"type": "log", "exponentformat": "none", "dtick": "D2" if decades < FEW else 1}
    if axis.limits:
        found["range"] = [math.log10(end) if axis.is_log else end for end in axis.limits]
    if axis.from_zero:
        found["rangemode"] = "tozero"
    return found


def _beside(panel: Panel, is_last: bool) -> Spec:
    """The axis of the values of lying bars, with room for the words beside them."""
    values = [point.value or 0.0 for curve in panel.curves for point in curve.line.known]
    longest = max([*values, *(bar.length for bar in panel.bars)], default=0.0) or 1.0
    return _axis(panel.y, is_last) | {"range": [0, 1.25 * longest]}


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
            "text": [_hover(f"{bar.name}: {name}", panel.y, bar.parts[name]) for bar in bars],
            "hovertemplate": Markup("%{text}<extra></extra>"), "textposition": "none",
        }  # fmt: skip


def _place(panel: Panel, bar: Bar, is_lying: bool) -> float:
    place = panel.x.place(bar.name) + bar.aside
    return -place if is_lying else place


def _hover(name: str, axis: Axis, value: float, error: float | None = None, at: str = "") -> Markup:
    """What stands there, where it is if that is not said, and its value."""
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
            "text": [_hover(point.about or curve.line.name, panel.y, point.value or 0.0, point.error, at)
                     for point, at in zip(points, _places(panel.x, [point.x for point in points]), strict=True)],
        }  # fmt: skip


def _places(axis: Axis, values: Sequence[str | float]) -> list[str]:
    """The names or numbers as words."""
    return [value if isinstance(value, str) else f"{axis.label} {value:.4g}" for value in values]


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
    """Crosses at the lowest point of all, or where there is none at 1, for each line and each way to fail."""
    values = [point.value for curve in panel.curves for point in curve.line.known if point.value]
    lowest = min(values, default=1.0)
    for words, places in panel.failures.items():
        yield {
            "type": "scatter", "mode": "markers", "name": text(words), "marker": FAILED, "x": places,
            "y": [lowest] * len(places), "text": [text(words)] * len(places),
            "hovertemplate": Markup("%{text}<extra></extra>"),
        }  # fmt: skip


def _words(chart: Chart, panel: Panel) -> Iterator[Spec]:
    """Words at the ends of bars, how runs failed, and notes."""
    shown: Spec = {"type": "scatter", "mode": "text", "hoverinfo": "skip", "showlegend": False, "cliponaxis": False}
    fonts = {True: {"size": WORDS, "color": FAILURE_COLOUR}, False: {"size": WORDS}}
    for has_failed in (False, True):
        bars = [bar for bar in panel.bars if bool(bar.failure) is has_failed and (bar.words or bar.failure)]
        places, ends = [_place(panel, bar, chart.is_lying) for bar in bars], [panel.top(bar) for bar in bars]
        if bars and chart.is_lying:
            words = [SPACE + _lines([*bar.words.split("\n"), *filter(None, [bar.failure])]) for bar in bars]
            yield shown | {"x": ends, "y": places, "text": words, "textposition": "middle right",
                           "textfont": fonts[has_failed]}  # fmt: skip
        elif bars and has_failed:
            yield {
                "type": "scatter", "mode": "markers+text", "name": "failed", "marker": FAILED, "x": places,
                "y": [0.0] * len(bars), "text": [_lines(bar.failure.split()) for bar in bars],
                "hovertext": [text(f"{bar.name}: {bar.failure}") for bar in bars], "textposition": "top center",
                "hovertemplate": Markup("%{hovertext}<extra></extra>"), "textfont": fonts[True], "cliponaxis": False,
            }  # fmt: skip
        elif bars:
            words = [_lines(bar.words.split("\n")) for bar in bars]
            yield shown | {
                "x": places,
                "y": ends,
                "text": words,
                "textposition": "top center",
                "textfont": fonts[False],
            }
    if panel.notes:
        yield shown | {
            "x": [note.x for note in panel.notes], "y": [note.y for note in panel.notes],
            "text": [SPACE + text(note.words) for note in panel.notes], "textposition": "middle right",
            "textfont": fonts[False],
        }  # fmt: skip


def _lines(lines: Iterable[str]) -> Markup:
    """The lines one below the other; plotly breaks none by itself."""
    return Markup("<br>").join(map(text, lines))
