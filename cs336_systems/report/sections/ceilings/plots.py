"""Charts of a study of ceilings: product rates over size, rates of memory and of collectives over bytes."""

from collections.abc import Sequence
from statistics import geometric_mean, median

from cs336_systems.costs.hardware import find_device
from cs336_systems.report.columns import Row
from cs336_systems.report.plots.charts import (
    GREY,
    MARKERS,
    PRECISION_COLOURS,
    Axis,
    Chart,
    Curve,
    Line,
    Note,
    Panel,
    Point,
    Reference,
    curves_of,
    doubling,
)
from cs336_systems.report.sections.ceilings.tables import (
    collective_rows,
    product_rows,
    promised_flops,
    stream_rows,
    timed,
)
from cs336_systems.report.sections.study import promised_bandwidth
from cs336_systems.report.words import GIGA, MIB, TERA
from cs336_systems.studies.ceilings_records import PADDED, CeilingsStudy, ProductPrecision, Stream

COLOURS = {ProductPrecision(name): colour for name, colour in PRECISION_COLOURS.items()} | {
    ProductPrecision.FP8: "#009E73"
}
MARKS = dict(zip(ProductPrecision, MARKERS, strict=False))
STREAM_COLOURS = {Stream.COPY: "#0072B2", Stream.READ: "#E69F00", Stream.ADAMW: "#009E73"}
COLLECTIVE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
FAR_BELOW = 0.5
"""Share of the median layer's rate at a precision below which a layer is named in the picture."""
DATA_SHEET = "data sheet"


def product_chart(study: CeilingsStudy) -> list[Chart]:
    """Rates of square products joined by lines, those of layers beside them at the square of as many FLOPs."""
    rows = timed(product_rows(study))
    if not rows:
        return []
    spec, curves, references = find_device(study.device_name), [], []
    for precision in dict.fromkeys(study.grid.precisions):
        colour, marker = COLOURS[precision], MARKS[precision]
        own = sorted((row for row in rows if row["precision"] is precision), key=lambda row: row["cube_side"])
        for is_square in (True, False):
            line = points_of([row for row in own if row["is_square"] is is_square], "cube_side", str(precision))
            looks = {"dash": "-"} if is_square else {"dash": "", "is_hollow": True, "label": ""}
            curves += [Curve(line=line, colour=colour, marker=marker, **looks)] if line.points else []
        if own and (promised := promised_flops(spec, precision)) is not None:
            references.append(Reference(value=promised / TERA, colour=colour, dash=":", name=DATA_SHEET))
    if any(not shape.is_square for shape in study.grid.shapes):
        curves.append(Curve(line=Line(name="a layer's", points=()), colour=GREY, marker="o", dash="", is_hollow=True))
    sides = [shape.rows for shape in study.grid.shapes if shape.is_square]
    every = [row["cube_side"] for row in rows]
    panel = Panel(
        x=doubling(sides or every, "side of the square product of as many FLOPs", others=every),
        y=Axis(label="rate (TFLOP/s)", is_log=True),
        curves=curves,
        references=references,
        notes=slow_layers(rows, "cube_side"),
    )
    return [_chart("products", "Rate of matrix products over their size", study, panel, 4)]


def _chart(name: str, title: str, study: CeilingsStudy, panel: Panel, legend: int) -> Chart:
    return Chart(name=name, title=title, settings=study.device_name, panels=[panel], size=(7.1, 4.0), legend=legend)


def points_of(rows: Sequence[Row], x: str, name: str, y: str = "tflops_per_s") -> Line:
    """The values by two keys; the point of a layer is named after the layer."""
    return Line(
        name=name,
        points=tuple(Point(x=float(row[x]), value=row[y]) for row in rows),
    )


def slow_layers(rows: Sequence[Row], x: str) -> list[Note]:
    """Names of the layers that are far below the others of their precision.

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
    return [
        Note(x=place, y=geometric_mean(found), words=f"{name}, not padded" if name in padded else name)
        for (name, place), found in rates.items()
    ]


def bandwidth_chart(study: CeilingsStudy) -> list[Chart]:
    """Rates of passes over memory; a line stands where the last cache is full."""
    rows = timed(stream_rows(study))
    if not rows:
        return []
    lines = [
        points_of([row for row in rows if row["stream"] is own], "moved_mib", str(own), "gb_per_s") for own in Stream
    ]
    references = []
    if (promised := promised_bandwidth(study.device_name)) is not None:
        references.append(Reference(value=promised / GIGA, colour=GREY, dash=":", name=DATA_SHEET))
    if study.cache_bytes:
        name = "size of the last cache"
        references.append(Reference(value=study.cache_bytes / MIB, colour="#BBBBBB", name=name, is_upright=True))
    panel = Panel(
        x=doubling([row["moved_mib"] for row in rows], "read plus written (MiB)"),
        y=Axis(label="rate (GB/s)", from_zero=True),
        curves=curves_of(lines, STREAM_COLOURS.values()),
        references=references,
    )
    return [_chart("bandwidth", "Rate of passes over memory", study, panel, 5)]


def collective_chart(study: CeilingsStudy) -> list[Chart]:
    """Bus bandwidth of collectives over the size of the tensor, a panel for each number of processes."""
    rows = timed(collective_rows(study))
    if not rows:
        return []
    panels = []
    for ranks in dict.fromkeys(row["world_size"] for row in rows):
        own = [row for row in rows if row["world_size"] == ranks]
        kinds = dict.fromkeys(row["collective"] for row in own)
        lines = [
            points_of([row for row in own if row["collective"] == kind], "tensor_mib", kind, "bus_gb_per_s")
            for kind in kinds
        ]
        panels.append(Panel(
            x=doubling([row["tensor_mib"] for row in own], f"tensor (MiB), {ranks} processes"),
            y=Axis(label="bus bandwidth (GB/s)", from_zero=True),
            curves=curves_of(lines, COLLECTIVE_COLOURS),
        ))  # fmt: skip
    size = (7.1, 4.0) if len(panels) == 1 else (4.5 * len(panels), 4.0)
    return [Chart(name="collectives", title="Rate of collectives", settings=study.device_name, panels=panels,
                  size=size, legend=4)]  # fmt: skip
