"""Pictures of a study of ceilings: product rates over size, memory and all-reduce rates over bytes."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import geometric_mean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from cs336_systems.costs.hardware import find_device
from cs336_systems.report.numbers import GIGA, MIB, TERA
from cs336_systems.report.plots import drawing
from cs336_systems.report.sections.ceilings.tables import promised_flops
from cs336_systems.report.sections.study import promised_bandwidth
from cs336_systems.studies.ceilings_records import PADDED, CeilingsStudy, ProductCell, ProductPrecision, Stream

COLOURS = {ProductPrecision(name): colour for name, colour in drawing.PRECISION_COLOURS.items()} | {
    ProductPrecision.FP8: "#009E73"
}
MARKERS = dict(zip(ProductPrecision, drawing.MARKERS, strict=False))
STREAM_COLOURS = {Stream.COPY: "#0072B2", Stream.READ: "#E69F00", Stream.ADAMW: "#009E73"}
STREAM_MARKERS = dict(zip(Stream, drawing.MARKERS, strict=False))
DATA_SHEET = "data sheet"
FAR_BELOW = 0.5
"""Of the median layer's rate at a precision: a layer that is slower is named in the picture."""


def ceilings_pictures(study: CeilingsStudy) -> dict[str, Figure | None]:
    """The pictures by name; None where there is no time to draw."""
    return {"products": draw_products(study), "bandwidth": draw_bandwidth(study), "all_reduce": draw_reductions(study)}


def draw_products(study: CeilingsStudy) -> Figure | None:
    """Rates of square products joined by lines, those of layers beside them at the square of as many FLOPs."""
    if not any(cell.flops_per_s for cell in study.products):
        return None
    figure = drawing.new_figure(7.6, 5.4, "Rate of matrix products over their size", study.device_name)
    panel = figure.subplots()
    sides = [shape.rows for shape in study.grid.shapes if shape.is_square]
    _label(panel, sides, "side of the square product of as many FLOPs", "rate (TFLOP/s)")
    panel.set_yscale("log")
    spec, handles = find_device(study.device_name), []
    for precision in dict.fromkeys(study.grid.precisions):
        cells = [cell for cell in study.products_of(precision) if cell.flops_per_s is not None]
        look: dict[str, Any] = {
            "color": COLOURS[precision],
            "marker": MARKERS[precision],
            "markersize": 5,
            "linewidth": 1.6,
        }
        squares = sorted((cell for cell in cells if cell.shape.is_square), key=lambda cell: cell.shape.rows)
        panel.plot(*_places(squares), **look)
        panel.plot(
            *_places([c for c in cells if not c.shape.is_square]), **look | {"linestyle": "none", "mfc": "white"}
        )
        if cells:
            handles.append(Line2D([], [], label=str(precision), **look))
        if cells and (promised := promised_flops(spec, precision)) is not None:
            panel.axhline(promised / TERA, color=COLOURS[precision], linestyle=":", linewidth=1, alpha=0.6)
    name_slow_layers(panel, study, lambda cell: cell.shape.cube_side)
    if any(not cell.shape.is_square for cell in study.products):
        handles.append(Line2D([], [], label="a layer's", color="#777777", marker="o", mfc="white", linestyle="none"))
    if spec is not None:
        handles.append(_data_sheet_handle())
    show_decades(panel.yaxis)
    drawing.legend_below(figure, handles, 4)
    return figure


def _places(cells: Sequence[ProductCell]) -> tuple[list[float], list[float]]:
    return [cell.shape.cube_side for cell in cells], [(cell.flops_per_s or 0.0) / TERA for cell in cells]


def name_slow_layers(panel: Axes, study: CeilingsStudy, place: Callable[[ProductCell], float]) -> None:
    """Name, to the right of their points, the layers that are far below the others of their precision.

    `place` says where a product stands along the x axis; precisions that stand at the same place share a name.
    """
    padded = {cell.shape.name.removesuffix(PADDED) for cell in study.products if cell.shape.name.endswith(PADDED)}
    rates: dict[tuple[str, float], list[float]] = {}
    for cell in _slow_layers(study):
        rates.setdefault((cell.shape.name, place(cell)), []).append((cell.flops_per_s or 0.0) / TERA)
    for (name, x), found in rates.items():
        words = f"{name}, not padded" if name in padded else name
        panel.annotate(
            drawing.inert(words), (x, geometric_mean(found)), (8, 0), textcoords="offset points", va="center",
            fontsize=8, color="#555555", zorder=5,
        )  # fmt: skip


def _slow_layers(study: CeilingsStudy) -> Iterator[ProductCell]:
    for precision in dict.fromkeys(study.grid.precisions):
        layers = [c for c in study.products_of(precision) if not c.shape.is_square and c.flops_per_s is not None]
        typical = median([cell.flops_per_s or 0.0 for cell in layers]) if layers else 0.0
        yield from (cell for cell in layers if (cell.flops_per_s or 0.0) < FAR_BELOW * typical)


def draw_bandwidth(study: CeilingsStudy) -> Figure | None:
    """Rates of passes over memory; a line stands where the last cache is full."""
    if not any(cell.bytes_per_s for cell in study.streams):
        return None
    figure = drawing.new_figure(7.2, 4.8, "Rate of passes over memory", study.device_name)
    panel = figure.subplots()
    _label(
        panel,
        [c.moved_bytes / MIB for c in study.streams if c.bytes_per_s is not None],
        "read plus written (MiB)",
        "rate (GB/s)",
    )
    handles = []
    for stream in Stream:
        cells = [cell for cell in study.streams if cell.stream is stream and cell.bytes_per_s is not None]
        x, y = [cell.moved_bytes / MIB for cell in cells], [(cell.bytes_per_s or 0.0) / GIGA for cell in cells]
        handles += panel.plot(
            x, y, label=stream, color=STREAM_COLOURS[stream], marker=STREAM_MARKERS[stream], markersize=5, linewidth=1.6
        )
    if (promised := promised_bandwidth(study.device_name)) is not None:
        panel.axhline(promised / GIGA, color="#777777", linestyle=":", linewidth=1.2)
        handles.append(_data_sheet_handle())
    if study.cache_bytes:
        label = "size of the last cache"
        handles.append(
            panel.axvline(study.cache_bytes / MIB, color="#BBBBBB", linestyle="--", linewidth=1.2, label=label)
        )
    panel.set_ylim(bottom=0)
    drawing.legend_below(figure, handles, 5)
    return figure


def draw_reductions(study: CeilingsStudy) -> Figure | None:
    """Bus bandwidth of all-reduces over the size of the tensor."""
    cells = [cell for cell in study.reductions if cell.bus_bytes_per_s is not None]
    if not cells:
        return None
    title = f"All-reduce among {study.grid.world_size} processes"
    figure = drawing.new_figure(7.2, 4.4, title, study.device_name)
    panel = figure.subplots()
    _label(panel, [cell.num_bytes / MIB for cell in cells], "tensor (MiB)", "bus bandwidth (GB/s)")
    x, y = [cell.num_bytes / MIB for cell in cells], [(cell.bus_bytes_per_s or 0.0) / GIGA for cell in cells]
    panel.plot(x, y, color="#0072B2", marker="o", markersize=5, linewidth=1.6)
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


def _data_sheet_handle() -> Line2D:
    return Line2D([], [], color="#777777", linestyle=":", linewidth=1.2, label=DATA_SHEET)
