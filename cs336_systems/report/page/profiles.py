"""Explained profiles as plotly's data and layout: a step's kernels by class, and memory over time."""

from collections.abc import Sequence

from markupsafe import Markup

from cs336_systems.analysis.kernels.step_profile import StepProfile
from cs336_systems.analysis.memory.profile import MemoryProfile
from cs336_systems.report.page.figures import Spec, text
from cs336_systems.report.plots import drawing
from cs336_systems.report.sections.kernels.plots import COPIES, IDLE, time_bars
from cs336_systems.report.sections.memory.facts import by_category
from cs336_systems.report.sections.memory.words import size, unit_for

PHASES = ("#9BA3AD", "#C3C9D0")
"""Phases beside each other alternate between these, behind the memory over time."""


def classes_picture(profile: StepProfile) -> Spec:
    """A bar for each phase: its kernels by class, copies, and the time in which the device was idle."""
    *phases, _ = time_bars(profile)
    names = [text(bar.row["phase"]) for bar in phases]
    colours = {
        **{str(kind): colour for kind, colour in drawing.CLASS_COLOURS.items()},
        COPIES: "#FFFFFF",
        IDLE: "#FFFFFF",
    }
    shapes = {COPIES: "x", IDLE: "/"}
    data = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": names,
            "x": [bar.parts_ms.get(name) for bar in phases],
            "marker": {"color": colour, "line": {"width": 0.5, "color": "#888888"},
                       "pattern": {"shape": shapes.get(name, ""), "fgcolor": "#888888"}},
            "hovertemplate": Markup("{}: %{{x:.4~g}} ms<extra></extra>").format(name),
        }
        for name, colour in colours.items()
        if any(name in bar.parts_ms for bar in phases)
    ]  # fmt: skip
    layout = {"barmode": "stack", "xaxis": {"title": {"text": "time per step (ms)"}},
              "yaxis": {"autorange": "reversed"}}  # fmt: skip
    return {"data": data, "layout": layout}


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
            "y": scaled(values), "line": {"width": 0, "shape": "hv"}, "fillcolor": drawing.CATEGORY_COLOURS[category],
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


def peaks_picture(labels: Sequence[str], profiles: Sequence[MemoryProfile]) -> Spec:
    """A bar for each run: what its peak consists of."""
    peaks = [by_category(profile.peak) for profile in profiles]
    unit = unit_for(max(profile.peak.allocated_bytes for profile in profiles))
    data = [
        {
            "type": "bar", "orientation": "h", "name": str(category), "y": [text(label) for label in labels],
            "x": [peak[category] / unit.num_bytes for peak in peaks], "marker": {"color": colour},
            "hovertemplate": Markup("{}: %{{x:.4~g}} {}<extra></extra>").format(category, unit.name),
        }
        for category, colour in drawing.CATEGORY_COLOURS.items()
        if any(peak.get(category) for peak in peaks)
    ]  # fmt: skip
    layout = {"barmode": "stack", "xaxis": {"title": {"text": f"peak of memory ({unit.name})"}},
              "yaxis": {"autorange": "reversed"}}  # fmt: skip
    return {"data": data, "layout": layout}
