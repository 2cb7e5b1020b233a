"""Pictures of a step over a setting that a sweep varies: lines over numbers such as warm-up steps, bars by choices.

A column of panels for each size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.config import Precision
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.series import Line

MAX_VALUES = 8
"""Of the setting: more have no room for all of their labels in one panel."""
STYLES: Mapping[str, tuple[drawing.Colour, str]] = {
    **{str(precision): (drawing.PRECISION_COLOURS[precision], marker)
       for precision, marker in zip(Precision, drawing.MARKERS, strict=False)},
    "mean ± standard deviation": ("black", "o"),
    "first measured step": (drawing.PRECISION_COLOURS[Precision.BF16], "D"),
    "std/mean": ("#888888", "s"),
}  # fmt: skip
"""Colour and marker of the lines by their names."""


def draw_over_setting(
    sizes: Mapping[str, Mapping[str, Sequence[Line]]], setting: str, axis: str, title: str, settings: str
) -> Figure:
    """The lines of each panel, by size and by what the y axis is called; what is known of no size has no panel."""
    every = next(iter(sizes.values()))
    labels = [label for label in every if any(line.known for panels in sizes.values() for line in panels[label])]
    width, height = max(6.0, 2.8 * len(sizes) + 0.6), 2.5 * len(labels) + 1.4
    figure = drawing.new_figure(width, height, title, settings)
    grid = figure.subplots(len(labels), len(sizes), squeeze=False)
    handles: dict[str, Any] = {}
    for column, (size, panels) in zip(grid.T, sizes.items(), strict=True):
        column[0].set_title(drawing.inert(size), fontsize=10)
        for panel, label in zip(column, labels, strict=True):
            handles |= _draw_panel(panel, panels[label], setting)
        column[-1].set_xlabel(axis, fontsize=9)
    for panel, label in zip(grid[:, 0], labels, strict=True):
        panel.set_ylabel(label, fontsize=9)
    drawing.legend_below(figure, handles, 4, fontsize=9)
    return figure


def values_along(lines: Sequence[Line]) -> list[str | int]:
    """The values of the setting: numbers in order, names in the order of the points."""
    found = dict.fromkeys(point.x for line in lines for point in line.points)
    return sorted(found, key=int) if all(isinstance(value, int) for value in found) else list(found)


def _draw_panel(panel: Axes, lines: Sequence[Line], setting: str) -> dict[str, Any]:
    """The lines, or bars, beside each other, so that equal values are seen; failed runs as crosses on the axis."""
    values = values_along(lines)
    is_number = all(isinstance(value, int) for value in values)
    drawing.style(panel)
    labels = ["none" if (setting, value) == ("checkpoint_blocks", 0) else str(value) for value in values]
    drawing.categories(panel, labels, MAX_VALUES)
    places = {value: place for place, value in enumerate(values)}
    handles: dict[str, Any] = {}
    failures: dict[str | int, dict[str, list[str]]] = {}
    width = 0.12 if is_number else 0.8 / len(lines)
    for index, line in enumerate(lines):
        aside = width * (index - (len(lines) - 1) / 2)
        positions: dict[str | int, float] = {value: place + aside for value, place in places.items()}
        if line.known and is_number:
            handles[line.name] = drawing.draw_line(panel, line, positions, *STYLES[line.name])
        elif line.known:
            heights, errors = ([getattr(point, name) or 0.0 for point in line.known] for name in ("value", "error"))
            handles[line.name] = panel.bar(
                [positions[point.x] for point in line.known], heights, 0.9 * width,
                yerr=errors if any(errors) else None, ecolor="#888888", capsize=3, color=STYLES[line.name][0],
            )  # fmt: skip
        for point in line.failed:
            failures.setdefault(point.x, {}).setdefault(point.failure or "", []).append(line.name)
    for value, reasons in failures.items():
        words = [why if len(names) == len(lines) else f"{', '.join(names)}: {why}" for why, names in reasons.items()]
        drawing.write_upright(panel, places[value], "; ".join(words))
    panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
    return handles
