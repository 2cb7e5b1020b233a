"""The picture of memory: one profile over time."""

import math
from bisect import bisect_left
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ....analysis.memory.notes import START
from ....analysis.memory.profile import MemoryProfile
from ....text import shorten
from ... import charts, draw
from ...charts import CATEGORY_COLOURS, fitting
from .entry import by_category
from .words import MemoryUnit, moment_ms, size, unit_for

CHARACTER = 0.0135
"""Width of a character of a name, as a part of the panel's width."""
HEADROOM = 1.05
"""Upper end of the scale over the highest value."""
VISIBLE = 1 / 500
"""Smallest part of the highest value with which a category is in the legend."""
LEGEND_COLUMNS = 3
LONGEST_NAME = 34
TICKS_APART = 0.07
"""Smallest distance of two ticks, as a part of the panel's width."""
PEAK: dict[str, Any] = {
    "marker": "o",
    "markersize": 4.5,
    "color": "#222222",
    "markeredgecolor": "white",
    "clip_on": False,
    "zorder": 6,
}
RESERVED: dict[str, Any] = {"color": "#222222", "linewidth": 1.1, "linestyle": (0, (5, 2))}


def draw_memory(profile: MemoryProfile, settings: str = "", name: str = "") -> Figure:
    """What was allocated over time, stacked by category, below what was reserved; phases above, a
    point at the peak.

    The points of the timeline are equally far apart, as in PyTorch's viewer: on the CPU's clock,
    waiting for the GPU would take most of the width. `name` of the run is the title; `settings`
    replace the name of the file.
    """
    timeline, peak = profile.timeline, profile.peak
    by_time = np.array(timeline.num_bytes, np.int64).reshape(-1, len(timeline.reserved_bytes))
    allocated_bytes = by_time.sum(axis=0)
    highest_bytes = max(peak.allocated_bytes, int(allocated_bytes.max()), *timeline.reserved_bytes)
    handles = _legend(profile, highest_bytes)
    legend_rows = math.ceil(len(handles) / LEGEND_COLUMNS)
    title = shorten(name, LONGEST_NAME) or "Memory over time"
    title += f": peak {size(peak.allocated_bytes)}"
    if profile.work.out_of_memory:
        title += ", out of memory"
    source = settings or draw.in_settings(profile.source)
    below = f"{source}, GPU {profile.device}, legend: sizes at the peak"
    figure = draw.new_figure(6.5, 3.9 + 0.19 * legend_rows, title, below)
    panel = figure.subplots()
    unit = unit_for(highest_bytes)
    _draw_areas(panel, profile, unit)
    panel.set_xlim(0, _end(profile) or 1)
    panel.set_ylim(0, HEADROOM * highest_bytes / unit.num_bytes or 1.0)
    panel.set_ylabel(f"memory ({unit.name})", fontsize=9)
    draw.style(panel)
    _mark_phases_and_failure(panel, profile)
    peak_point = int(allocated_bytes.argmax()), peak.allocated_bytes / unit.num_bytes
    panel.plot(*peak_point, **PEAK)
    _name_phases(panel, profile)
    _mark_times(panel, profile)
    draw.legend_below(figure, handles, LEGEND_COLUMNS)
    return figure


def _legend(profile: MemoryProfile, highest_bytes: int) -> list[Patch | Line2D]:
    """Handles for the categories that can be seen below `highest_bytes`, and for what is reserved,
    each with its size at the peak.
    """
    timeline = profile.timeline
    at_peak = by_category(profile.peak)
    handles: list[Patch | Line2D] = []
    for category, values in zip(timeline.categories, timeline.num_bytes, strict=True):
        if max(values) > VISIBLE * highest_bytes:
            label = f"{category}, {size(at_peak[category])}"
            handles.append(Patch(color=CATEGORY_COLOURS[category], label=label))
    label = f"reserved, {size(profile.peak.reserved_bytes)}"
    handles.append(Line2D([], [], label=label, **RESERVED))
    return handles


def _mark_phases_and_failure(panel: Axes, profile: MemoryProfile) -> None:
    """Draw vertical lines where steps begin, where phases end, and where memory ran out."""
    for moment in profile.boundaries:
        dashes = "solid" if moment.phase == START else (0, (3, 2))
        panel.axvline(_x(profile, moment.time_s), color="#444444", linewidth=0.8, linestyle=dashes)
    failure = profile.work.first_failure
    if failure and profile.timeline.time_s:
        panel.axvline(_x(profile, failure.time_s), color=charts.FAILURE_COLOUR, linewidth=2)


def _draw_areas(panel: Axes, profile: MemoryProfile, unit: MemoryUnit) -> None:
    """Draw what each category holds, stacked, and as a line what is reserved."""
    timeline = profile.timeline
    x = np.arange(len(timeline.reserved_bytes))
    rows = dict(zip(timeline.categories, timeline.num_bytes, strict=True))
    present = [category for category, values in rows.items() if any(values)]
    if present:
        panel.stackplot(
            x,
            [np.array(rows[category]) / unit.num_bytes for category in present],
            labels=present,
            step="post",
            linewidth=0,
            colors=[CATEGORY_COLOURS[category] for category in present],
        )
    reserved = np.array(timeline.reserved_bytes) / unit.num_bytes
    # a line of few points stays a line on a page, and turns around with the theme
    corners = np.flatnonzero(np.diff(reserved, prepend=-1.0))
    places = [*corners, *x[-1:]]
    panel.plot(x[places], reserved[places], drawstyle="steps-post", **RESERVED)


def _x(profile: MemoryProfile, time_s: float | None) -> int:
    """Place of a time on the x axis: the number of the first point that is not before it; that of
    the last point if there is none, or if the file has no times.
    """
    last = len(profile.timeline.reserved_bytes) - 1
    if time_s is None:
        return last
    return min(bisect_left(profile.timeline.time_s, time_s), last)


def _end(profile: MemoryProfile) -> int:
    """The point of the timeline at which the last step, the peak and the failed request are over;
    what is freed later belongs to no step.
    """
    if not profile.phases:
        return _x(profile, None)
    times_s = [profile.phases[-1].end_s, profile.peak.time_s]
    if failure := profile.work.first_failure:
        times_s.append(failure.time_s)
    return max(_x(profile, time_s) for time_s in times_s)


def _mark_times(panel: Axes, profile: MemoryProfile) -> None:
    """Ticks with the times at which phases begin and end, as far as there is room; without
    phases at even distances.
    """
    last = panel.get_xlim()[1]
    if not profile.timeline.time_s:
        panel.set_xticks([])
        panel.set_xlabel("all allocations and frees, equally far apart", fontsize=9)
        return
    marked = [
        *(moment.time_s for moment in profile.boundaries),
        *(phase.end_s for phase in profile.phases),
    ]
    times = {_x(profile, time_s): time_s for time_s in marked if time_s is not None}
    if not times:
        points_s = profile.timeline.time_s
        times = {x: points_s[x] for x in np.linspace(0, len(points_s) - 1, 6, dtype=int)}
    ticks: list[int] = []
    for x in sorted(times):
        if not ticks or x - ticks[-1] > TICKS_APART * last:
            ticks.append(x)
    panel.set_xticks(ticks, [moment_ms(times[x]) for x in ticks])
    panel.set_xlabel(
        "all allocations and frees, equally far apart; the CPU's time at them (ms)", fontsize=9
    )


def _name_phases(panel: Axes, profile: MemoryProfile) -> None:
    """Names of phases above the panel between their lines where they fit, and above these the
    numbers of steps.
    """
    named = [(phase.phase, [phase], 1.012) for phase in profile.phases]
    steps = groupby(profile.phases, lambda phase: phase.step)
    of_steps = [(f"step {step}", list(phases), 1.08) for step, phases in steps]
    if len(of_steps) > 1:
        named += of_steps
    for name, phases, y in named:
        begin, end = _x(profile, phases[0].begin_s), _x(profile, phases[-1].end_s)
        if word := fitting(name, (end - begin) / panel.get_xlim()[1] / CHARACTER):
            panel.text(
                (begin + end) / 2,
                y,
                draw.inert(word),
                ha="center",
                va="bottom",
                fontsize=8.5,
                transform=panel.get_xaxis_transform(),
            )
