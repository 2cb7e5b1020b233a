"""The picture of peaks: what the peak of each configuration consists of."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cs336_systems.analysis.memory.profile import MemoryProfile
from cs336_systems.report.numbers import significant
from cs336_systems.report.plots import drawing
from cs336_systems.report.sections.memory.facts import bytes_of
from cs336_systems.report.sections.memory.words import GIB, size

VISIBLE = 1 / 500
"""Of a peak: a category that never has more has no colour in the legend."""
BAR_INCHES = 3.4
"""About what the longest bar takes of the picture's width."""
CHARACTER_INCHES = 0.075
LONGEST_LABEL = 34
RESERVED: dict[str, Any] = {"marker": "|", "markersize": 15, "color": "#222222"}


def draw_peaks(groups: Sequence[Sequence[tuple[str, MemoryProfile]]], settings: str = "") -> Figure:
    """A bar for each labelled profile: what its peak consists of, and as a mark what was reserved then.

    Each group has a panel with a scale of its own, so that a small model is seen beside a large one. Nothing is cut
    off: a scale reaches as far as the largest of its group. Raise ValueError for no profile.
    """
    profiles = [profile for group in groups for _, profile in group]
    if not profiles or not all(groups):
        raise ValueError(f"a picture of peaks needs at least one profile in each group, got {list(map(len, groups))}")
    names = [
        category
        for category in drawing.CATEGORY_COLOURS
        if any(bytes_of(p.peak, category) > VISIBLE * p.peak.allocated_bytes for p in profiles)
    ]
    labels = [[drawing.wrapped(label, LONGEST_LABEL) for label, _ in group] for group in groups]
    bar_inches = max(map(drawing.bar_inches, labels))
    height = 0.95 + bar_inches * len(profiles) + 0.35 * len(groups) + 0.19 * -(-(len(names) + 1) // 4)
    figure = drawing.new_figure(6.5, height, "What the peak of memory consists of, by configuration", settings)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[len(group) + 0.3 for group in groups])
    for panel, group, own in zip(panels[:, 0], groups, labels, strict=True):
        longest = max(max(p.peak.reserved_bytes, p.peak.allocated_bytes) for _, p in group) / GIB or 1.0
        for y, (_, profile) in enumerate(group):
            _draw_bar(panel, y, profile, longest)
        _finish(panel, own, longest)
    panels[-1, 0].set_xlabel("memory at the peak (GiB)", fontsize=9)
    handles: list[Patch | Line2D] = [Patch(color=drawing.CATEGORY_COLOURS[name], label=str(name)) for name in names]
    handles.append(Line2D([], [], linestyle="none", label="reserved", **(RESERVED | {"markersize": 11})))
    drawing.legend_below(figure, handles, 4)
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
    failed = bool(profile.work.out_of_memory)
    panel.plot(profile.peak.reserved_bytes / GIB, y, clip_on=False, **RESERVED)
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
