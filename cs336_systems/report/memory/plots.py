"""Pictures of memory: what was allocated over time by category, and what the peak of each configuration consists of."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from cs336_systems.analysis.memory.profile import Category, MemoryProfile, PhaseMemory
from cs336_systems.json_files import write_atomically
from cs336_systems.report import drawing
from cs336_systems.report.drawing import LONGEST_SOURCE, shorten
from cs336_systems.report.formats import plain, significant
from cs336_systems.report.memory.facts import START, allocated
from cs336_systems.report.memory.tables import bytes_of
from cs336_systems.report.memory.words import GIB, Unit, size, unit_for

SHORT_NAMES = {"forward": "fwd", "backward": "bwd", "optimizer": "opt."}
"""For where the name of a phase does not fit."""
CHARACTER = 0.0135
"""Of the panel's width: what one character of a name takes."""
HEADROOM = 1.17
"""Of the highest value: room for the words at the peak."""
APART = 0.16
"""Of the panel's height: with less between the peak and what is reserved, the words stand above both."""
VISIBLE = 1 / 500
"""Of the highest value: what never has more has no colour in the legend."""
BAR_INCHES = 3.4
"""About what the longest bar takes of the picture's width."""
CHARACTER_INCHES = 0.075
LONGEST_LABEL = 34
RESERVED: dict[str, Any] = {"color": "#222222", "linewidth": 1.1, "linestyle": (0, (5, 2))}
_WHITE_EDGE = [withStroke(linewidth=2.5, foreground="white")]


def write_pictures(profile: MemoryProfile, directory: Path, prefix: str = "", settings: str = "") -> list[Path]:
    """Write the timeline into `directory`/plots, which is made, and return its path in a list."""
    (directory / "plots").mkdir(parents=True, exist_ok=True)
    path = directory / "plots" / f"{prefix}timeline.png"
    write_atomically(path, drawing.to_png(draw_memory(profile, settings)))
    return [path]


def draw_memory(profile: MemoryProfile, settings: str = "") -> Figure:
    """What was allocated over time, stacked by category, below what was reserved; phases above, the peak by name.

    `settings` say what was run, in the place of the file's name. Raise ValueError for a timeline without points.
    """
    if not profile.timeline.time_s:
        raise ValueError(f"{profile.source}: a picture needs points on the timeline, but this profile has none")
    source = shorten(plain(profile.source).replace(", ", " "), LONGEST_SOURCE)
    words = [settings or source, f"GPU {profile.device}", *_oom_words(profile), "legend: sizes at the peak"]
    shown = _shown(profile)
    failed = ", out of memory" if profile.work.out_of_memory else ""
    figure = drawing.new_figure(
        6.5,
        3.9 + 0.19 * -(-(len(shown) + 1) // 3),
        f"Memory over time: peak {size(profile.peak.allocated_bytes)}{failed}",
        ", ".join(words),
    )
    panel, unit = figure.subplots(), unit_for(_highest(profile))
    _draw_stack(panel, profile, unit)
    _draw_phases(panel, profile)
    _annotate_peak(panel, profile, unit)
    drawing.style(panel)
    panel.set_xlabel("time (ms)", fontsize=9)
    panel.set_ylabel(f"memory ({unit.name})", fontsize=9)
    handles: list[Patch | Line2D] = [
        Patch(color=drawing.CATEGORY_COLOURS[category], label=f"{category}, {size(num_bytes)}")
        for category, num_bytes in shown.items()
    ]
    handles.append(Line2D([], [], label=f"reserved, {size(profile.peak.reserved_bytes)}", **RESERVED))
    drawing.legend_below(figure, handles, 3)
    return figure


def _oom_words(profile: MemoryProfile) -> Iterator[str]:
    if failure := profile.work.first_failure:
        where = f" in {shorten(plain(failure.phase), 20)} of step {failure.step}" if failure.phase else ""
        yield f"asked for {size(failure.requested_bytes)} with {size(failure.free_bytes)} free{where}"


def _shown(profile: MemoryProfile) -> dict[Category, int]:
    """Categories that can ever be seen, from the bottom up, with what they have at the peak."""
    timeline, least = profile.timeline, VISIBLE * _highest(profile)
    return {
        category: bytes_of(profile.peak, category)
        for category, values in zip(timeline.categories, timeline.num_bytes, strict=True)
        if max(values) > least
    }


def _draw_stack(panel: Axes, profile: MemoryProfile, unit: Unit) -> None:
    timeline = profile.timeline
    time_ms = np.array(timeline.time_s) * 1e3
    bottom = np.zeros(len(time_ms))
    for category, values in zip(timeline.categories, timeline.num_bytes, strict=True):
        top = bottom + np.array(values) / unit.num_bytes
        if any(values):
            colour = drawing.CATEGORY_COLOURS[category]
            panel.fill_between(time_ms, bottom, top, step="post", color=colour, linewidth=0, label=str(category))
        bottom = top
    panel.plot(time_ms, np.array(timeline.reserved_bytes) / unit.num_bytes, drawstyle="steps-post", **RESERVED)
    panel.set_xlim(time_ms[0], time_ms[-1] if time_ms[-1] > time_ms[0] else time_ms[0] + 1.0)
    panel.set_ylim(0, HEADROOM * _highest(profile) / unit.num_bytes or 1.0)


def _highest(profile: MemoryProfile) -> int:
    """The highest value of the picture in bytes."""
    return max(profile.peak.allocated_bytes, int(allocated(profile).max()), *profile.timeline.reserved_bytes)


def _draw_phases(panel: Axes, profile: MemoryProfile) -> None:
    """A line wherever a phase ends, a firm one where a step begins; names between them, above the panel."""
    for moment in profile.boundaries:
        dashes = "solid" if moment.phase == START else (0, (3, 2))
        panel.axvline(moment.time_s * 1e3, color="#444444", linewidth=0.8, linestyle=dashes)
    for phase in profile.phases:
        _write_between(panel, [phase], phase.phase, 1.012)
    steps = dict.fromkeys(phase.step for phase in profile.phases)
    for step in steps if len(steps) > 1 else ():
        own = [phase for phase in profile.phases if phase.step == step]
        _write_between(panel, own, f"step {step}", 1.08, bold=True)


def _write_between(panel: Axes, phases: Sequence[PhaseMemory], name: str, y: float, bold: bool = False) -> None:
    """The name in the middle of the phases, or a short one, where that fits."""
    left, right = panel.get_xlim()
    begin_ms, end_ms = phases[0].begin_s * 1e3, phases[-1].end_s * 1e3
    room = (end_ms - begin_ms) / (right - left) / CHARACTER
    fitting = next((word for word in (name, SHORT_NAMES.get(name, "")) if len(word) < room), "")
    if fitting:
        panel.text(
            (begin_ms + end_ms) / 2, y, drawing.inert(fitting), ha="center", va="bottom", fontsize=8.5,
            transform=panel.get_xaxis_transform(), fontweight="bold" if bold else "normal",
        )  # fmt: skip


def _annotate_peak(panel: Axes, profile: MemoryProfile, unit: Unit) -> None:
    """A point at the peak and its size; the words above the line of what is reserved where that is close."""
    peak = profile.peak
    x, y = peak.time_s * 1e3, peak.allocated_bytes / unit.num_bytes
    left, right = panel.get_xlim()
    limit = panel.get_ylim()[1]
    reserved = peak.reserved_bytes / unit.num_bytes
    base = y if reserved - y > APART * limit else max(y, _highest(profile) / unit.num_bytes)
    across = (x - left) / (right - left)
    side = "left" if across < 0.2 else "right" if across > 0.8 else "center"
    where = f", in {drawing.inert(peak.phase, 20)}" if peak.phase else ""
    panel.annotate(
        f"peak {size(peak.allocated_bytes)}{where}", (x, y), (x, base + 0.035 * limit), ha=side, va="bottom",
        fontsize=8.5, fontweight="bold", path_effects=_WHITE_EDGE, annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": "#222222", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2,
                    "relpos": ({"left": 0.0, "center": 0.5, "right": 1.0}[side], 0.0)},
    )  # fmt: skip
    panel.plot(x, y, marker="o", markersize=4.5, color="#222222", markeredgecolor="white", clip_on=False, zorder=6)


def draw_peaks(groups: Sequence[Sequence[tuple[str, MemoryProfile]]], settings: str = "") -> Figure:
    """A bar for each labelled profile: what its peak consists of, and as a mark what was reserved then.

    Each group has a panel with a scale of its own, so that a small model is seen beside a large one. Raise ValueError
    for no profile.
    """
    profiles = [profile for group in groups for _, profile in group]
    if not profiles or not all(groups):
        raise ValueError(f"a picture of peaks needs at least one profile in each group, got {list(map(len, groups))}")
    names = [
        category
        for category in drawing.CATEGORY_COLOURS
        if any(bytes_of(p.peak, category) > VISIBLE * p.peak.allocated_bytes for p in profiles)
    ]
    height = 0.95 + 0.36 * len(profiles) + 0.35 * len(groups) + 0.19 * -(-(len(names) + 1) // 4)
    figure = drawing.new_figure(6.5, height, "What the peak of memory consists of, by configuration", settings)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[len(group) + 0.3 for group in groups])
    for panel, group in zip(panels[:, 0], groups, strict=True):
        longest = max(max(p.peak.reserved_bytes, p.peak.allocated_bytes) for _, p in group) / GIB or 1.0
        for y, (_, profile) in enumerate(group):
            _draw_bar(panel, y, profile, longest)
        _finish(panel, [drawing.inert(label, LONGEST_LABEL) for label, _ in group], longest)
    panels[-1, 0].set_xlabel("memory at the peak (GiB)", fontsize=9)
    handles: list[Patch | Line2D] = [Patch(color=drawing.CATEGORY_COLOURS[name], label=str(name)) for name in names]
    mark = Line2D([], [], marker="|", markersize=11, color="#222222", linestyle="none", label="reserved")
    drawing.legend_below(figure, [*handles, mark], 4)
    return figure


def _draw_bar(panel: Axes, y: int, profile: MemoryProfile, longest: float) -> None:
    """One bar in GiB, each part with its value where that fits; its sum and phase on the right."""
    left = 0.0
    for category, colour in drawing.CATEGORY_COLOURS.items():
        width = bytes_of(profile.peak, category) / GIB
        if not width:
            continue
        panel.barh(y, width, 0.72, left, color=colour, edgecolor="white", linewidth=0.5)
        words = significant(width, 2)
        if (len(words) + 1.5) * CHARACTER_INCHES < BAR_INCHES * width / longest:
            panel.text(left + width / 2, y, words, ha="center", va="center", fontsize=8, color=drawing.ink(colour))
        left += width
    panel.plot(profile.peak.reserved_bytes / GIB, y, marker="|", markersize=15, color="#222222", clip_on=False)
    failed = bool(profile.work.out_of_memory)
    where = f"\nin {drawing.inert(profile.peak.phase, 16)}" if profile.peak.phase else ""
    panel.text(
        1.03, y, f"{size(profile.peak.allocated_bytes)}{chr(10) + 'out of memory' if failed else where}",
        transform=panel.get_yaxis_transform(), va="center", fontsize=8, linespacing=1.2,
        color=drawing.FAILURE_COLOUR if failed else "black",
    )  # fmt: skip


def _finish(panel: Axes, names: Sequence[str], longest: float) -> None:
    """Names on the left, the first on top, and a grid of the values."""
    drawing.style(panel)
    panel.grid(visible=False, axis="y")
    panel.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    panel.set_yticks(range(len(names)), names)
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(len(names) - 0.45, -0.55)
    panel.set_xlim(0, longest)
