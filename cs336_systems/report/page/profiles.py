"""Explained profiles as plotly's data and layout: memory over time."""

from collections.abc import Sequence

from markupsafe import Markup

from cs336_systems.analysis.memory.profile import MemoryProfile
from cs336_systems.report.page.figures import Spec, text
from cs336_systems.report.plots import palette
from cs336_systems.report.sections.memory.facts import by_category
from cs336_systems.report.sections.memory.words import size, unit_for

PHASES = ("#9BA3AD", "#C3C9D0")
"""Phases beside each other alternate between these, behind the memory over time."""


def memory_picture(profile: MemoryProfile) -> Spec | None:
    """What was allocated over time by category, what was reserved, the phases and the peak; None without a timeline."""
    timeline, peak = profile.timeline, profile.peak
    if not timeline.time_s:
        return None
    unit = unit_for(max(peak.allocated_bytes, *timeline.reserved_bytes))
    x = list(range(len(timeline.time_s)))
    times = [f"{time_s * 1e3:.2f} ms" for time_s in timeline.time_s]

    def scaled(values: Sequence[int]) -> list[float]:
        return [round(value / unit.num_bytes, 4) for value in values]

    data: list[Spec] = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "memory", "name": str(category), "x": x,
            "y": scaled(values), "line": {"width": 0, "shape": "hv"}, "fillcolor": palette.CATEGORY_COLOURS[category],
            "hovertemplate": Markup("{}: %{{y:.4~g}} {}<extra></extra>").format(category, unit.name),
        }
        for category, values in zip(timeline.categories, timeline.num_bytes, strict=True)
        if any(values)
    ]  # fmt: skip
    data.append(
        {
            "type": "scatter", "mode": "lines", "name": "reserved", "x": x, "y": scaled(timeline.reserved_bytes),
            "line": {"dash": "dash", "shape": "hv", "color": "#888888", "width": 1.2}, "text": times,
            "hovertemplate": Markup("reserved: %{{y:.4~g}} {}, at %{{text}}<extra></extra>").format(unit.name),
        }
    )  # fmt: skip

    def place(time_s: float) -> int:
        return next((index for index, at_s in enumerate(timeline.time_s) if at_s >= time_s), len(x) - 1)

    holds = [f"{category}: {size(held)}" for category, held in by_category(peak).items() if held]
    totals = [sum(values) for values in zip(*timeline.num_bytes, strict=True)]
    annotations = [
        {
            "x": totals.index(max(totals)), "y": max(totals) / unit.num_bytes, "ax": 0, "ay": -24,
            "text": text(f"peak {size(peak.allocated_bytes)}{f', in {peak.phase}' if peak.phase else ''}"),
            "hovertext": Markup("<br>").join(holds),
        }
    ]  # fmt: skip
    shapes = []
    for index, phase in enumerate(profile.phases):
        begin, end = place(phase.begin_s), place(phase.end_s)
        shapes.append({"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": begin, "x1": end, "layer": "below",
                       "line": {"width": 0}, "fillcolor": PHASES[index % 2], "opacity": 0.25})  # fmt: skip
        annotations.append({"x": (begin + end) / 2, "y": 1.0, "yref": "paper", "yanchor": "top", "showarrow": False,
                            "text": text(f"{phase.phase} {phase.step}")})  # fmt: skip
    layout = {
        "hovermode": "x unified", "shapes": shapes, "annotations": annotations,
        "xaxis": {"title": {"text": "all allocations and frees, equally far apart"}, "showticklabels": False},
        "yaxis": {"title": {"text": f"memory ({unit.name})"}, "rangemode": "tozero"},
    }  # fmt: skip
    return {"data": data, "layout": layout}
