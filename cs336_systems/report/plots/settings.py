"""Pictures of a step over one setting: how many warm-up steps, or any number that a sweep varies; a column per size."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.config import Precision
from cs336_systems.report.numbers import significant
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.series import SETTINGS_ALONG, Line, SettingLines, WarmupLines

MAX_VALUES = 8
"""Of the setting: more have no room for all of their labels in one panel."""


def draw_setting(sizes: Sequence[SettingLines], setting: str, step: str, settings: str) -> Figure:
    """Above, step time; below, the peak of memory where it is known; by one setting, a line for each precision."""
    has_peaks = any(line.known for size in sizes for line in size.peaks)
    width = max(6.0, 2.8 * len(sizes) + 0.6)
    title = f"One {step} by {SETTINGS_ALONG[setting]}"
    figure = drawing.new_figure(width, 6.4 if has_peaks else 3.9, title, settings)
    panels = figure.subplots(1 + has_peaks, len(sizes), squeeze=False)
    handles: dict[str, Any] = {}
    for column, size in zip(panels.T, sizes, strict=True):
        column[0].set_title(drawing.inert(size.name), fontsize=10)
        for panel, lines in zip(column, (size.times, size.peaks), strict=False):
            handles |= _draw_over_setting(panel, lines, setting)
        column[-1].set_xlabel(SETTINGS_ALONG[setting], fontsize=9)
    for row, label in zip(panels, ("time (ms), mean ± std", "peak of memory (GiB)"), strict=False):
        row[0].set_ylabel(label, fontsize=9)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_over_setting(panel: Axes, lines: Sequence[Line], setting: str) -> dict[str, Any]:
    """The lines beside each other by a little, so that equal values are seen; failed runs as crosses on the axis."""
    values = sorted({int(point.x) for line in lines for point in line.points})
    drawing.style(panel)
    labels = ["none" if (setting, value) == ("checkpoint_blocks", 0) else str(value) for value in values]
    drawing.categories(panel, labels, MAX_VALUES)
    places = {value: place for place, value in enumerate(values)}
    handles: dict[str, Any] = {}
    failures: dict[int, dict[str, list[str]]] = {}
    for index, line in enumerate(lines):
        aside = 0.12 * (index - (len(lines) - 1) / 2)
        positions: dict[str | int, float] = {value: place + aside for value, place in places.items()}
        if line.known:
            precision = Precision(line.name)
            colour, marker = drawing.PRECISION_COLOURS[precision], drawing.MARKERS[list(Precision).index(precision)]
            handles[line.name] = drawing.draw_line(panel, line, positions, colour, marker)
        for point in line.failed:
            failures.setdefault(int(point.x), {}).setdefault(point.failure or "", []).append(line.name)
    for value, reasons in failures.items():
        words = [why if len(names) == len(lines) else f"{', '.join(names)}: {why}" for why, names in reasons.items()]
        drawing.write_upright(panel, places[value], "; ".join(words))
    panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
    return handles


def draw_warmup(sizes: Sequence[WarmupLines], step: str, settings: str) -> Figure:
    """Above, mean, standard deviation and first measured step; below, std/mean; by number of warm-up steps."""
    width = max(5.2, 2.5 * len(sizes) + 0.6)
    figure = drawing.new_figure(width, 6.0, f"Effect of warm-up on the time of one {step}", settings)
    panels = figure.subplots(2, len(sizes), squeeze=False)
    handles: dict[str, Any] = {}
    for size, upper, lower in zip(sizes, panels[0], panels[1], strict=True):
        upper.set_title(drawing.inert(size.name), fontsize=10)
        handles |= _draw_warmup_times(upper, size)
        _draw_warmup_spread(lower, size)
    panels[0][0].set_ylabel("time (ms)", fontsize=9)
    panels[1][0].set_ylabel("std/mean (%)", fontsize=9)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _draw_warmup_times(panel: Axes, size: WarmupLines) -> dict[str, Any]:
    places = _warmup_axis(panel, size)
    left = {count: place - 0.14 for count, place in places.items()}
    mean = drawing.draw_line(panel, size.step, left, "black", "o", joined=False)
    firsts = [(places[point.x] + 0.14, point.value or 0.0) for point in size.first.known]
    first = panel.plot(
        [x for x, _ in firsts], [value for _, value in firsts], linestyle="none", marker="D", markersize=6,
        markerfacecolor="white", color=drawing.PRECISION_COLOURS[Precision.BF16], zorder=4,
    )[0]  # fmt: skip
    panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
    for point in size.step.failed:
        drawing.write_upright(panel, places[point.x], point.failure or "")
    return {"mean ± standard deviation": mean, "first measured step": first}


def _draw_warmup_spread(panel: Axes, size: WarmupLines) -> None:
    places = _warmup_axis(panel, size)
    percents = {places[point.x]: 100 * (point.value or 0.0) for point in size.cv.known}
    bars = panel.bar(list(percents), list(percents.values()), 0.6, color="#888888")
    if len(percents) <= MAX_VALUES:
        panel.bar_label(bars, [significant(percent, 2) for percent in percents.values()], fontsize=8, padding=2)
    panel.set_ylim(0, max([*percents.values(), 1e-9]) * 1.18)
    for point in size.step.failed:
        drawing.write_upright(panel, places[point.x], point.failure or "")
    panel.set_xlabel("warm-up steps", fontsize=9)


def _warmup_axis(panel: Axes, size: WarmupLines) -> dict[str | int, float]:
    """Where on the axis each number of warm-up steps stands."""
    counts = sorted({int(point.x) for point in size.step.points})
    drawing.style(panel)
    drawing.categories(panel, [str(count) for count in counts], MAX_VALUES)
    return {count: place for place, count in enumerate(counts)}
