"""The picture of peaks: what the peak of each configuration consists of."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cs336_systems.analysis.memory.profile import MemoryProfile
from cs336_systems.report.plots import bars, drawing
from cs336_systems.report.sections.memory.facts import by_category, bytes_of
from cs336_systems.report.sections.memory.words import GIB, size

VISIBLE = 1 / 500
"""Smallest part of any peak with which a category is in the legend."""
BAR_INCHES = 3.4
"""Approximate length of the longest bar in the picture."""
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
    labels = [[drawing.wrapped(label, bars.LONGEST_LABEL) for label, _ in group] for group in groups]
    height = (
        0.95
        + max(map(drawing.bar_inches, labels)) * len(profiles)
        + 0.35 * len(groups)
        + 0.19 * -(-(len(names) + 1) // 4)
    )
    figure = drawing.new_figure(6.5, height, "What the peak of memory consists of, by configuration", settings)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[len(group) + 0.3 for group in groups])
    for panel, group, own in zip(panels[:, 0], groups, labels, strict=True):
        longest = max(max(p.peak.reserved_bytes, p.peak.allocated_bytes) for _, p in group) / GIB or 1.0
        for y, (_, profile) in enumerate(group):
            _draw_peak(panel, y, profile, longest)
        bars.finish(panel, own, longest)
    panels[-1, 0].set_xlabel("memory at the peak (GiB)", fontsize=9)
    handles: list[Patch | Line2D] = [Patch(color=drawing.CATEGORY_COLOURS[name], label=str(name)) for name in names]
    handles.append(Line2D([], [], linestyle="none", label="reserved", **(RESERVED | {"markersize": 11})))
    drawing.legend_below(figure, handles, 4)
    return figure


def _draw_peak(panel: Axes, y: int, profile: MemoryProfile, longest: float) -> None:
    """One bar in GiB, its sum and phase on the right, and as a mark what was reserved then."""
    peak, found = profile.peak, by_category(profile.peak)
    parts = [(found[name] / GIB, {"facecolor": colour}) for name, colour in drawing.CATEGORY_COLOURS.items()]
    bars.draw_bar(panel, y, [(width, style) for width, style in parts if width], BAR_INCHES / longest)
    panel.plot(peak.reserved_bytes / GIB, y, clip_on=False, **RESERVED)
    if profile.work.out_of_memory:
        bars.write_right(panel, y, f"{size(peak.allocated_bytes)}\nout of memory", drawing.FAILURE_COLOUR)
    else:
        where = f"\nin {drawing.inert(peak.phase, 16)}" if peak.phase else ""
        bars.write_right(panel, y, f"{size(peak.allocated_bytes)}{where}")
