"""Charts of a study of ceilings: rates over size or bytes, and the roofline."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.report.columns import Row
from cs336_systems.report.plots.charts import (
    GREY,
    MARKERS,
    PRECISION_COLOURS,
    Axis,
    Chart,
    Curve,
    Line,
    Panel,
    Point,
    Reference,
    curves_of,
    doubling,
)
from cs336_systems.report.sections.study import promised_bandwidth
from cs336_systems.report.words import GIGA, MIB, TERA
from cs336_systems.studies.ceilings_records import CeilingsStudy, ProductPrecision, Stream

COLOURS = {ProductPrecision(name): colour for name, colour in PRECISION_COLOURS.items()} | {
    ProductPrecision.FP8: "#009E73"
}
MARKS = dict(zip(ProductPrecision, MARKERS, strict=False))
RATE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
DATA_SHEET = "data sheet"
STEPS = 2.0
"""Factor of room to the left and the right of the outermost point or ridge."""


def product_chart(study: CeilingsStudy, rows: Sequence[Row]) -> list[Chart]:
    """Rates of square products joined by lines, those of layers beside them at the square of as many FLOPs."""
    if not rows:
        return []
    promises, curves, references = _promises(rows), [], []
    for precision in dict.fromkeys(study.grid.precisions):
        colour, marker = COLOURS[precision], MARKS[precision]
        own = sorted((row for row in rows if row["precision"] is precision), key=lambda row: row["cube_side"])
        for is_square in (True, False):
            line = _points([row for row in own if row["is_square"] is is_square], "cube_side", str(precision))
            looks: dict[str, Any] = {"dash": "-"} if is_square else {"dash": "", "is_hollow": True, "label": ""}
            curves += [Curve(line=line, colour=colour, marker=marker, **looks)] if line.points else []
        if precision in promises:
            references.append(Reference(value=promises[precision], colour=colour, dash=":", name=DATA_SHEET))
    if any(not shape.is_square for shape in study.grid.shapes):
        curves.append(Curve(line=Line(name="a layer's", points=()), colour=GREY, marker="o", dash="", is_hollow=True))
    sides = [shape.rows for shape in study.grid.shapes if shape.is_square]
    every = [row["cube_side"] for row in rows]
    panel = Panel(
        x=doubling(sides or every, "side of the square product of as many FLOPs", others=every),
        y=Axis(label="rate (TFLOP/s)", is_log=True), curves=curves, references=references,
    )  # fmt: skip
    return [_chart("products", "Rate of matrix products over their size", study, [panel], 4)]


def _promises(rows: Sequence[Row]) -> dict[ProductPrecision, float]:
    """TFLOP/s that the data sheet promises, by the precisions of these products that it lists."""
    return {row["precision"]: row["data_sheet"] for row in rows if row["data_sheet"] is not None}


def _chart(name: str, title: str, study: CeilingsStudy, panels: Sequence[Panel], legend: int) -> Chart:
    size = (7.1, 4.0) if len(panels) == 1 else (4.5 * len(panels), 4.0)
    return Chart(name=name, title=title, settings=study.device_name, panels=panels, size=size, legend=legend)


def _points(rows: Sequence[Row], x: str, name: str, y: str = "tflops_per_s") -> Line:
    """The values by two keys."""
    return Line(name=name, points=tuple(Point(x=float(row[x]), value=row[y]) for row in rows))


def bandwidth_chart(study: CeilingsStudy, rows: Sequence[Row]) -> list[Chart]:
    """Rates of passes over memory; a line stands where the last cache is full."""
    if not rows:
        return []
    lines = [_points([row for row in rows if row["stream"] is own], "moved_mib", str(own), "gb_per_s")
             for own in Stream]  # fmt: skip
    references = []
    if (promised := promised_bandwidth(study.device_name)) is not None:
        references.append(Reference(value=promised / GIGA, colour=GREY, dash=":", name=DATA_SHEET))
    if study.cache_bytes:
        name = "size of the last cache"
        references.append(Reference(value=study.cache_bytes / MIB, colour="#BBBBBB", name=name, is_upright=True))
    panel = Panel(
        x=doubling([row["moved_mib"] for row in rows], "read plus written (MiB)"),
        y=Axis(label="rate (GB/s)", from_zero=True),
        curves=curves_of(lines, RATE_COLOURS), references=references,
    )  # fmt: skip
    return [_chart("bandwidth", "Rate of passes over memory", study, [panel], 5)]


def collective_chart(study: CeilingsStudy, rows: Sequence[Row]) -> list[Chart]:
    """Bus bandwidth of collectives over the size of the tensor, a panel for each number of processes."""
    panels = []
    for ranks in dict.fromkeys(row["world_size"] for row in rows):
        own = [row for row in rows if row["world_size"] == ranks]
        lines = [
            _points([row for row in own if row["collective"] == kind], "tensor_mib", kind, "bus_gb_per_s")
            for kind in dict.fromkeys(row["collective"] for row in own)
        ]
        panels.append(Panel(
            x=doubling([row["tensor_mib"] for row in own], f"tensor (MiB), {ranks} processes"),
            y=Axis(label="bus bandwidth (GB/s)", from_zero=True), curves=curves_of(lines, RATE_COLOURS),
        ))  # fmt: skip
    return [_chart("collectives", "Rate of collectives", study, panels, 4)] if panels else []


def roofline_chart(study: CeilingsStudy, products: Sequence[Row]) -> list[Chart]:
    """Rate over intensity, both logarithmic; none where no roof is known.

    Lines: measured copies and products; dotted and paler: the data sheet. Dots: the products of the study.
    """
    bandwidth, ceilings = study.bandwidth(), study.product_ceilings
    if bandwidth is None or not ceilings:
        return []
    places = [row["flops_per_byte"] for row in products] + [ceiling / bandwidth for ceiling in ceilings.values()]
    span = min(places) / STEPS, max(places) * STEPS
    measured = [
        Curve(
            line=_points([row for row in products if row["precision"] is precision], "flops_per_byte", precision),
            colour=COLOURS[precision], marker=".", dash="", opacity=0.45, label="",
        )
        for precision in ceilings
    ]  # fmt: skip
    named = Curve(line=Line(name="products measured", points=()), colour=GREY, marker=".", dash="")
    promises = {name: rate * TERA for name, rate in _promises(products).items()}
    promised = promised_bandwidth(study.device_name)
    roofs = [*_roofs(span, bandwidth, ceilings)]
    if promised is not None and promises:
        roofs += _roofs(span, promised, promises, DATA_SHEET)
        roofs.append(Curve(line=Line(name=DATA_SHEET, points=()), colour=GREY, width=1.2, dash=":"))
    panel = Panel(
        x=Axis(label="intensity (FLOP/byte)", is_log=True, limits=span),
        y=Axis(label="rate (TFLOP/s)", is_log=True), curves=[*roofs, *measured, named],
    )  # fmt: skip
    return [Chart(name="roofline", title="Roofline", settings=study.device_name, panels=[panel], size=(8.5, 5.2),
                  legend=4)]  # fmt: skip


def _roofs(
    span: tuple[float, float], bandwidth: float, ceilings: Mapping[ProductPrecision, float], source: str = "measured"
) -> Iterator[Curve]:
    """Memory's slope up to the highest ceiling, and each ceiling from where it meets the slope."""
    left, right = span
    highest = max(ceilings.values()) / bandwidth
    slope = [(x, bandwidth * x) for x in (left, max(left, min(highest, right)))]
    yield _roof("copy", GREY, slope, source)
    for precision, ceiling in ceilings.items():
        begin = min(max(left, ceiling / bandwidth), right)
        yield _roof(str(precision), COLOURS[precision], [(begin, ceiling), (right, ceiling)], source)


def _roof(name: str, colour: str, ends: Sequence[tuple[float, float]], source: str) -> Curve:
    points = tuple(Point(x=x, value=rate / TERA) for x, rate in ends)
    line = Line(name=name, points=points)
    if source == DATA_SHEET:
        return Curve(line=line, colour=colour, width=1.2, dash=":", opacity=0.6, label="")
    return Curve(line=line, colour=colour, width=1.8)
