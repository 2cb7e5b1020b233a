"""Explained profiles as plotly's data and layout: memory over time."""

from collections.abc import Sequence

from markupsafe import Markup

from cs336_systems.analysis.memory.profile import MemoryProfile
from cs336_systems.report.page.figures import Spec, text
from cs336_systems.report.plots import palette
from cs336_systems.report.sections.memory.words import by_category, size, unit_for

PHASES = ("#9BA3AD", "#C3C9D0")
"""Phases beside each other alternate between these, behind the memory over time."""

LEAST_SHARE = 0.1
"""Percent of a peak; smaller shares are written as less than this."""


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

    totals = [sum(values) for values in zip(*timeline.num_bytes, strict=True)]
    highest = totals.index(max(totals))
    peaked = {
        "x": highest, "y": max(totals) / unit.num_bytes, "ax": 0, "ay": -24,
        "xanchor": ("left", "center", "right")[3 * highest // len(x)],  # within the picture
        "text": text(f"peak {size(peak.allocated_bytes)}{f', in {peak.phase}' if peak.phase else ''}"),
    }  # fmt: skip
    phases = [(place(phase.begin_s), place(phase.end_s), f"{phase.phase} {phase.step}") for phase in profile.phases]
    shapes = [
        {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": begin, "x1": end, "layer": "below",
         "line": {"width": 0}, "fillcolor": PHASES[index % 2], "opacity": 0.25}
        for index, (begin, end, _) in enumerate(phases)
    ]  # fmt: skip
    ticks = {
        "tickvals": [(begin + end) / 2 for begin, end, _ in phases],
        "ticktext": [text(name) for *_, name in phases],
    }
    layout = {
        "hovermode": "x unified", "shapes": shapes, "annotations": [peaked],
        "xaxis": {"title": {"text": "allocations and frees, in order"}, "showgrid": False,
                  "autotickangles": [0, 90]} | (ticks if phases else {"showticklabels": False}),
        "yaxis": {"title": {"text": f"memory ({unit.name})"},
                  "range": [0, 1.15 * max(*totals, *timeline.reserved_bytes) / unit.num_bytes]},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def peak_parts(profile: MemoryProfile) -> list[tuple[str, str, str]]:
    """What holds the peak, the largest first, and the whole: category, size and share."""
    peak = profile.peak
    parts = sorted(by_category(peak).items(), key=lambda part: -part[1])
    rows = [(str(category), held) for category, held in parts if held] + [("peak", peak.allocated_bytes)]
    return [(text(name), size(held), _share(held, peak.allocated_bytes)) for name, held in rows]


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole if whole else 0
    return f"{percent:.1f} %" if percent >= LEAST_SHARE else f"< {LEAST_SHARE} %"
