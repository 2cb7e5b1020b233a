"""The roofline (Williams et al. 2009): what memory and arithmetic allow, and where the parts of a step stand below."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.costs.hardware import find_device
from cs336_systems.report.numbers import TERA
from cs336_systems.report.plots import drawing
from cs336_systems.report.sections.ceilings.plots import (
    COLOURS,
    data_sheet_handle,
    name_slow_layers,
    plot_rows,
    show_decades,
)
from cs336_systems.report.sections.ceilings.tables import product_rows, promised_flops, timed
from cs336_systems.report.sections.study import promised_bandwidth
from cs336_systems.studies.ceilings_records import CeilingsStudy, ProductPrecision
from cs336_systems.studies.step_parts import StepPart, StepParts

PHASE_COLOURS = {LaunchPhase(phase): colour for phase, colour in drawing.PHASE_COLOURS.items()}
MARKERS = "osD^vPX<>*hpd8"
SLOPE_COLOUR = "#777777"
FILLED = {"markersize": 8, "markeredgewidth": 0.8, "markeredgecolor": "white"}
HOLLOW = {"markersize": 10, "markeredgewidth": 1.6, "markerfacecolor": "none"}
"""A mark in backward is a ring, so that forward's mark shows inside it where both are at the same place."""
STEPS = 2.0
"""Factor of room to the left and the right of the outermost point or ridge."""


def draw_roofline(study: CeilingsStudy, parts: StepParts | None = None) -> Figure | None:
    """Rate over intensity, both logarithmic; None where no roof is known.

    Lines: measured copies and products; dotted and paler: the data sheet. Dots: the products of the study.
    """
    bandwidth, ceilings = study.bandwidth(), study.product_ceilings
    if bandwidth is None or not ceilings:
        return None
    shown = parts.parts if parts else ()
    settings = ", ".join(filter(None, [study.device_name, parts.label if parts else ""]))
    figure = drawing.new_figure(9.0, 6.8, "Roofline", settings)
    panel = figure.subplots()
    drawing.style(panel)
    panel.set_xscale("log")
    panel.set_yscale("log")
    products = timed(product_rows(study))
    places = [row["flops_per_byte"] for row in products] + [part.intensity for part in shown]
    places += [ceiling / bandwidth for ceiling in ceilings.values()]
    span = min(places) / STEPS, max(places) * STEPS
    handles = _draw_roofs(panel, span, bandwidth, ceilings)
    handles += _draw_promises(panel, span, study)
    for precision in ceilings:
        own = [row for row in products if row["precision"] is precision]
        plot_rows(panel, own, "flops_per_byte", "tflops_per_s", color=COLOURS[precision], linestyle="none", marker=".",
                  alpha=0.45, zorder=2.5)  # fmt: skip
    name_slow_layers(panel, products, "flops_per_byte")
    handles.append(Line2D([], [], color="#777777", linestyle="none", marker=".", label="products measured"))
    handles += _draw_parts(panel, shown)
    panel.set_xlim(span)
    panel.set_xlabel("intensity (FLOP/byte)", fontsize=9)
    panel.set_ylabel("rate (TFLOP/s)", fontsize=9)
    for axis in (panel.xaxis, panel.yaxis):
        show_decades(axis)
    drawing.legend_below(figure, handles, 3 if shown else 4)
    return figure


def _draw_roofs(
    panel: Axes,
    span: tuple[float, float],
    bandwidth: float,
    ceilings: Mapping[ProductPrecision, float],
    **look: Any,  # noqa: ANN401 (matplotlib's)
) -> list[Line2D]:
    """Memory's slope up to the highest ceiling, and each ceiling from where it meets the slope."""
    left, right = span
    look = {"linewidth": 1.8, "zorder": 2, **look}
    highest = max(ceilings.values()) / bandwidth
    x = [left, max(left, min(highest, right))]
    lines = panel.plot(x, [bandwidth * place / TERA for place in x], color=SLOPE_COLOUR, label="copy", **look)
    for precision, ceiling in ceilings.items():
        x = [min(max(left, ceiling / bandwidth), right), right]
        lines += panel.plot(x, [ceiling / TERA] * 2, color=COLOURS[precision], label=str(precision), **look)
    return lines


def _draw_promises(panel: Axes, span: tuple[float, float], study: CeilingsStudy) -> list[Line2D]:
    """The data sheet's roof at the precisions that it gives, dotted and paler."""
    spec, bandwidth = find_device(study.device_name), promised_bandwidth(study.device_name)
    found = {precision: promised_flops(spec, precision) for precision in study.product_ceilings}
    promised = {precision: peak for precision, peak in found.items() if peak is not None}
    if bandwidth is None or not promised:
        return []
    _draw_roofs(panel, span, bandwidth, promised, linewidth=1.2, linestyle=":", alpha=0.6, zorder=1.5)
    return [data_sheet_handle()]


def _draw_parts(panel: Axes, parts: Sequence[StepPart]) -> list[Line2D]:
    """A mark for each part, its colour that of the phase; what the marks mean."""
    names = list(dict.fromkeys(part.name for part in parts))
    marks = {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(names)}
    for part in parts:
        look = _look(part.phase)
        panel.plot(part.intensity, part.flops_per_s / TERA, marker=marks[part.name], zorder=4, **look)
    phases = dict.fromkeys(part.phase for part in parts)
    return [
        *(Line2D([], [], marker="s", label=f"in {phase}", **_look(phase)) for phase in phases),
        *(Line2D([], [], color="#555555", marker=marks[n], linestyle="none", label=n) for n in names),
    ]


def _look(phase: LaunchPhase) -> dict[str, Any]:
    colour = PHASE_COLOURS[phase]
    edge = {**HOLLOW, "markeredgecolor": colour} if phase is LaunchPhase.BACKWARD else FILLED
    return {"linestyle": "none", "color": colour, **edge}
