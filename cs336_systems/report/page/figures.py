"""The pictures of steps as plotly's data and layout: the same series and colours as the PNGs, which answer on hover."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias

from markupsafe import Markup
from matplotlib.colors import to_hex

from cs336_systems.config import Precision
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.series import Line, Row
from cs336_systems.report.plots.settings import STYLES, draw_over_setting, values_along
from cs336_systems.report.plots.steps import LEAST_REST, draw_contexts, draw_phases, draw_speed_ups
from cs336_systems.text import inert_line

Spec: TypeAlias = dict[str, Any]
SYMBOLS = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross",
           "X": "x", "<": "triangle-left", ">": "triangle-right", "*": "star", "h": "hexagon"}  # fmt: skip
"""Plotly's names of the markers."""
FAILED = {"symbol": "x", "size": 10, "color": drawing.FAILURE_COLOUR}


def text(words: object) -> str:
    """Words in a picture, on one line; the page escapes them."""
    return inert_line(str(words), drawing.LONGEST_SETTINGS)


def picture(draw: "partial[Any]") -> tuple[str, str, Spec, int]:
    """Title, settings, plotly's data and layout, and height of what `draw` would draw with matplotlib."""
    return _SPECS[draw.func](*draw.args)


def _phases(rows: Sequence[Row], step: str, settings: str) -> tuple[str, str, Spec, int]:
    """Stacked bars by phase, side by side for each context length; crosses where runs failed."""
    places = [[text(f"context {row['context_length']}") for row in rows], [text(row["name"]) for row in rows]]
    data: list[Spec] = []
    rests: list[float | None] = []
    for phase, colour in drawing.PHASE_COLOURS.items():
        times = [row[f"{phase}_mean_ms"] for row in rows]
        if any(time is not None for time in times):
            data.append({"type": "bar", "name": str(phase), "x": places, "y": times, "marker": {"color": colour},
                         "hovertemplate": f"{phase}: %{{y:.4~g}} ms"})  # fmt: skip
    for row in rows:
        parts = sum(row[f"{phase}_mean_ms"] or 0.0 for phase in drawing.PHASE_COLOURS)
        rest = (row["step_mean_ms"] or 0.0) - parts
        rests.append(rest if row["step_mean_ms"] and rest > LEAST_REST * row["step_mean_ms"] else None)
    if any(rests):
        data.append({"type": "bar", "name": "rest of the step", "x": places, "y": rests,
                     "marker": {"color": drawing.REST_COLOUR}, "hovertemplate": "rest: %{y:.4~g} ms"})  # fmt: skip
    data.append(
        {
            "type": "scatter", "mode": "markers", "name": "whole step ± standard deviation", "x": places,
            "y": [row["step_mean_ms"] for row in rows],
            "error_y": {"type": "data", "array": [row["step_std_ms"] for row in rows]},
            "marker": {"symbol": "line-ew-open", "size": 8, "color": drawing.PRECISION_COLOURS[Precision.FP32]},
            "hovertemplate": "whole step: %{y:.4~g} ms",
        }
    )  # fmt: skip
    if failed := [index for index, row in enumerate(rows) if row["failure"] is not None]:
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": "failed", "marker": FAILED,
                "x": [[axis[index] for index in failed] for axis in places], "y": [0] * len(failed),
                "text": [text(rows[index]["failure"]) for index in failed], "hovertemplate": "%{text}",
            }
        )  # fmt: skip
    layout = {"barmode": "stack", "yaxis": {"title": {"text": "time (ms)"}, "rangemode": "tozero"},
              "xaxis": {"type": "multicategory"}, "hovermode": "x unified"}  # fmt: skip
    return f"Time of one {step} by phase", settings, {"data": data, "layout": layout}, 440


def _contexts(lines: Sequence[Line], step: str, settings: str) -> tuple[str, str, Spec, int]:
    """Step time against context length, one line per size, both axes logarithmic."""
    ticks = sorted({int(point.x) for line in lines for point in line.points})
    layout = {
        "xaxis": {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks],
                  "title": {"text": "context length (tokens)"}},
        "yaxis": {"type": "log", "title": {"text": "time (ms)"}},
    }  # fmt: skip
    data = _lines(lines, drawing.shades(len(lines)), "ms")
    return f"Time of one {step} against context length", settings, {"data": data, "layout": layout}, 440


def _speed_ups(lines: Sequence[Line], precision: Precision, step: str, settings: str) -> tuple[str, str, Spec, int]:
    """Speed-up over fp32 against size, one line per context length, or the other way round."""
    is_over_contexts = any(isinstance(point.x, int) for line in lines for point in line.points)
    places = list(dict.fromkeys(point.x for line in lines for point in line.points))
    places = sorted(places, key=int) if is_over_contexts else places
    layout = {
        "xaxis": {"type": "category", "categoryorder": "array", "categoryarray": [text(place) for place in places],
                  "title": {"text": "context length (tokens)" if is_over_contexts else "size"}},
        "yaxis": {"title": {"text": f"fp32 time / {precision} time"}, "rangemode": "tozero"},
        "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
                    "line": {"dash": "dash", "color": "#888888", "width": 1}}],
    }  # fmt: skip
    data = _lines(lines, drawing.tints(drawing.PRECISION_COLOURS[precision], len(lines)), "times", as_names=True)
    return f"Speed-up of one {step}, {precision} over fp32", settings, {"data": data, "layout": layout}, 420


def _settings(
    sizes: Mapping[str, Mapping[str, Sequence[Line]]], setting: str, axis: str, title: str, settings: str
) -> tuple[str, str, Spec, int]:
    """The lines of each size, beside each other, over a setting; below it a row of panels for each other quantity."""
    every = next(iter(sizes.values()))
    labels = [label for label in every if any(line.known for panels in sizes.values() for line in panels[label])]
    data: list[Spec] = []
    layout: Spec = {"grid": {"rows": len(labels), "columns": len(sizes), "pattern": "independent"},
                    "annotations": []}  # fmt: skip
    named: set[str] = set()
    for row, label in enumerate(labels):
        for column, (size, panels) in enumerate(sizes.items()):
            number = row * len(sizes) + column + 1
            ending = "" if number == 1 else str(number)
            values = values_along(panels[label])
            words = ["none" if (setting, value) == ("checkpoint_blocks", 0) else text(value) for value in values]
            joined = {} if all(isinstance(value, int) for value in values) else {"mode": "markers"}
            layout[f"xaxis{ending}"] = {"type": "category", "categoryorder": "array", "categoryarray": words,
                                        "title": {"text": axis if row == len(labels) - 1 else ""}}  # fmt: skip
            layout[f"yaxis{ending}"] = {"rangemode": "tozero", "title": {"text": label if column == 0 else ""}}
            if row == 0:
                layout["annotations"].append(
                    {"xref": f"x{ending} domain", "yref": f"y{ending} domain", "x": 0.5, "y": 1.06, "yanchor": "bottom",
                     "text": text(size), "showarrow": False}
                )  # fmt: skip
            known: Mapping[Any, str] = dict(zip(values, words, strict=True))
            for line in panels[label]:
                colour, marker = STYLES[line.name]
                for trace in _traces(line, colour, marker, "", known.__getitem__):
                    place = {"xaxis": f"x{ending}", "yaxis": f"y{ending}"}
                    legend = {"legendgroup": trace["name"], "showlegend": trace["name"] not in named}
                    data.append(trace | joined | place | legend)
                    named.add(trace["name"])
    return title, settings, {"data": data, "layout": layout}, 120 + 260 * len(labels)


def _lines(
    lines: Sequence[Line], colours: Sequence[drawing.Colour], unit: str, *, as_names: bool = False
) -> list[Spec]:
    """The lines with their deviations, and crosses where runs failed, with how they ended."""
    found: list[Spec] = []
    for line, colour, marker in zip(lines, colours, cycle(drawing.MARKERS), strict=False):
        found += _traces(line, colour, marker, unit, text if as_names else lambda x: x)
    return found


def _traces(line: Line, colour: drawing.Colour, marker: str, unit: str, place: Callable[[Any], object]) -> list[Spec]:
    """A line of what is known, and at its lowest point, or at 1, a cross for each run that failed."""
    known, name, own = line.known, text(line.name), to_hex(colour)
    found: list[Spec] = []
    if known:
        found.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": name, "x": [place(point.x) for point in known],
                "y": [point.value for point in known], "line": {"color": own},
                "marker": {"symbol": SYMBOLS[marker], "size": 8, "color": own},
                "error_y": {"type": "data", "array": [point.error for point in known]},
                "hovertemplate": Markup("{}<br>%{{x}}: %{{y:.4~g}} {}<extra></extra>").format(name, unit),
            }
        )  # fmt: skip
    if line.failed:
        lowest = min((point.value for point in known if point.value), default=1.0)
        found.append(
            {
                "type": "scatter", "mode": "markers", "name": f"{name}: failed", "marker": FAILED,
                "x": [place(point.x) for point in line.failed], "y": [lowest] * len(line.failed),
                "text": [text(f"{line.name}: {point.failure}") for point in line.failed],
                "hovertemplate": Markup("%{text}<extra></extra>"),
            }
        )  # fmt: skip
    return found


_SPECS: Mapping[Callable[..., Any], Callable[..., tuple[str, str, Spec, int]]] = {
    draw_phases: _phases,
    draw_contexts: _contexts,
    draw_speed_ups: _speed_ups,
    draw_over_setting: _settings,
}
"""For each function that draws a PNG, the one that makes the same of the same arguments for plotly."""
