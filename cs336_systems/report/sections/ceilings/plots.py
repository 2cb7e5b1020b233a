"""Pictures of a study of ceilings: product rates over size, memory and all-reduce rates over bytes."""

import math
from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from cs336_systems.costs.hardware import find_device
from cs336_systems.report.columns import Row
from cs336_systems.report.numbers import GIGA, MIB, TERA
from cs336_systems.report.plots import drawing
from cs336_systems.report.sections.ceilings.tables import (
    product_rows,
    promised_flops,
    reduction_rows,
    stream_rows,
    timed,
)
from cs336_systems.report.sections.study import promised_bandwidth
from cs336_systems.studies.ceilings_records import PADDED, CeilingsStudy, ProductPrecision, Stream

COLOURS = {ProductPrecision(name): colour for name, colour in drawing.PRECISION_COLOURS.items()} | {
    ProductPrecision.FP8: "#009E73"
}
MARKERS = dict(zip(ProductPrecision, drawing.MARKERS, strict=False))
STREAM_COLOURS = {Stream.COPY: "#0072B2", Stream.READ: "#E69F00", Stream.ADAMW: "#009E73"}
STREAM_MARKERS = dict(zip(Stream, drawing.MARKERS, strict=False))
FAR_BELOW = 0.5
"""Share of the median layer's rate at a precision below which a layer is named in the picture."""


def ceilings_pictures(study: CeilingsStudy) -> dict[str, Figure | None]:
    """The pictures by name; None where there is no time to draw."""
    return {"products": draw_products(study), "bandwidth": draw_bandwidth(study), "all_reduce": draw_reductions(study)}


def draw_products(study: CeilingsStudy) -> Figure | None:
    """Rates of square products joined by lines, those of layers beside them at the square of as many FLOPs."""
    rows = timed(product_rows(study))
    if not rows:
        return None
    figure = drawing.new_figure(7.6, 5.4, "Rate of matrix products over their size", study.device_name)
    panel = figure.subplots()
    sides = [shape.rows for shape in study.grid.shapes if shape.is_square]
    _label(panel, sides, "side of the square product of as many FLOPs", "rate (TFLOP/s)")
    panel.set_yscale("log")
    spec, handles = find_device(study.device_name), []
    for precision in dict.fromkeys(study.grid.precisions):
        own = [row for row in rows if row["precision"] is precision]
        look: dict[str, Any] = {"color": COLOURS[precision], "marker": MARKERS[precision], "linewidth": 1.6}
        squares = sorted((row for row in own if row["is_square"]), key=lambda row: row["cube_side"])
        plot_rows(panel, squares, "cube_side", "tflops_per_s", **look)
        layers = [row for row in own if not row["is_square"]]
        plot_rows(panel, layers, "cube_side", "tflops_per_s", **look | {"linestyle": "none", "mfc": "white"})
        if own:
            handles.append(Line2D([], [], label=str(precision), markersize=5, **look))
        if own and (promised := promised_flops(spec, precision)) is not None:
            panel.axhline(promised / TERA, color=COLOURS[precision], linestyle=":", linewidth=1, alpha=0.6)
    name_slow_layers(panel, rows, "cube_side")
    if any(not shape.is_square for shape in study.grid.shapes):
        handles.append(Line2D([], [], label="a layer's", color="#777777", marker="o", mfc="white", linestyle="none"))
    if spec is not None:
        handles.append(data_sheet_handle())
    show_decades(panel.yaxis)
    drawing.legend_below(figure, handles, 4)
    return figure


def plot_rows(panel: Axes, rows: Sequence[Row], x: str, y: str, **look: Any) -> list[Line2D]:  # noqa: ANN401 (matplotlib's)
    """Draw the values by two keys."""
    return panel.plot([row[x] for row in rows], [row[y] for row in rows], markersize=5, **look)


def name_slow_layers(panel: Axes, rows: Sequence[Row], x: str) -> None:
    """Name, to the right of their points, the layers that are far below the others of their precision.

    Precisions that have the same value by the key `x`, which is along the axis, share a name.
    """
    layers = [row for row in rows if not row["is_square"]]
    padded = {row["name"].removesuffix(PADDED) for row in layers if row["name"].endswith(PADDED)}
    rates: dict[tuple[str, float], list[float]] = {}
    for precision in dict.fromkeys(row["precision"] for row in layers):
        own = [row for row in layers if row["precision"] is precision]
        typical = median(row["tflops_per_s"] for row in own)
        for row in own:
            if row["tflops_per_s"] < FAR_BELOW * typical:
                rates.setdefault((row["name"], row[x]), []).append(row["tflops_per_s"])
    for (name, place), found in rates.items():
        words = f"{name}, not padded" if name in padded else name
        panel.annotate(
            drawing.inert(words), (place, geometric_mean(found)), (8, 0), textcoords="offset points", va="center",
            fontsize=8, color="#555555", zorder=5,
        )  # fmt: skip


def draw_bandwidth(study: CeilingsStudy) -> Figure | None:
    """Rates of passes over memory; a line stands where the last cache is full."""
    rows = timed(stream_rows(study))
    if not rows:
        return None
    figure = drawing.new_figure(7.2, 4.8, "Rate of passes over memory", study.device_name)
    panel = figure.subplots()
    _label(panel, [row["moved_mib"] for row in rows], "read plus written (MiB)", "rate (GB/s)")
    handles = []
    for stream in Stream:
        own = [row for row in rows if row["stream"] is stream]
        look = {"color": STREAM_COLOURS[stream], "marker": STREAM_MARKERS[stream], "linewidth": 1.6, "label": stream}
        handles += plot_rows(panel, own, "moved_mib", "gb_per_s", **look)
    if (promised := promised_bandwidth(study.device_name)) is not None:
        panel.axhline(promised / GIGA, color="#777777", linestyle=":", linewidth=1.2)
        handles.append(data_sheet_handle())
    if study.cache_bytes:
        cache_mib, label = study.cache_bytes / MIB, "size of the last cache"
        handles.append(panel.axvline(cache_mib, color="#BBBBBB", linestyle="--", linewidth=1.2, label=label))
    panel.set_ylim(bottom=0)
    drawing.legend_below(figure, handles, 5)
    return figure


def draw_reductions(study: CeilingsStudy) -> Figure | None:
    """Bus bandwidth of all-reduces over the size of the tensor."""
    rows = timed(reduction_rows(study))
    if not rows:
        return None
    title = f"All-reduce among {study.grid.world_size} processes"
    figure = drawing.new_figure(7.2, 4.4, title, study.device_name)
    panel = figure.subplots()
    _label(panel, [row["tensor_mib"] for row in rows], "tensor (MiB)", "bus bandwidth (GB/s)")
    plot_rows(panel, rows, "tensor_mib", "bus_gb_per_s", color="#0072B2", marker="o", linewidth=1.6)
    panel.set_ylim(bottom=0)
    return figure


def _label(panel: Axes, sizes: Iterable[float], x: str, y: str) -> None:
    """Sizes along a horizontal axis that doubles, and what the axes are."""
    drawing.style(panel)
    drawing.doubling_axis(panel, sizes)
    panel.set_xlabel(x, fontsize=9)
    panel.set_ylabel(y, fontsize=9)


def show_decades(axis: Axis) -> None:
    """Name the powers of ten that a logarithmic axis shows, without an exponent, and more where it shows few."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    steps = (1,) if decades >= 2 else (1, 2, 5) if decades >= 0.7 else range(1, 10)
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = [tick for power in powers for step in steps if low <= (tick := step * 10.0**power) <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def data_sheet_handle() -> Line2D:
    """What the data sheet's lines look like."""
    return Line2D([], [], color="#777777", linestyle=":", linewidth=1.2, label="data sheet")
