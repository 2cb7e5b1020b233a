"""The section of the roofline: the rate of each part of a profiled step, and its roof by the measured ceilings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.config import Phase
from cs336_systems.costs.hardware import find_device
from cs336_systems.report.columns import Row, column, three_digits
from cs336_systems.report.plots import charts
from cs336_systems.report.plots.charts import GREY, MARKERS, Axis, Chart, Curve, Line, Panel, Point
from cs336_systems.report.section import Section, make_table
from cs336_systems.report.sections.ceilings.plots import COLOURS, DATA_SHEET, points_of, slow_layers
from cs336_systems.report.sections.ceilings.tables import product_rows, promised_flops, timed
from cs336_systems.report.sections.study import promised_bandwidth
from cs336_systems.report.words import MIB, TERA, ratio
from cs336_systems.studies.ceilings_records import CeilingsStudy, ProductPrecision
from cs336_systems.studies.step_parts import ALL_KERNELS, StepPart, StepParts

COLUMNS = (
    column("part", about="Which part of the step it is."), column("phase"), column("flops"), column("least_mib"),
    column("flops_per_byte", drop_order=5), column("time_ms"), column("tflops_per_s", drop_order=2, derived=False),
    column("roof_tflops_per_s"), column("roof_share"), column("limit"),
)  # fmt: skip
ABOVE = 1.005
"""Smallest share of the roof that the table shows as more than 100 %."""
PHASE_COLOURS = {phase: charts.PHASE_COLOURS[Phase(phase)] for phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD,
                                                                          LaunchPhase.OPTIMIZER)}  # fmt: skip
STEPS = 2.0
"""Factor of room to the left and the right of the outermost point or ridge."""


def parts_section(study: CeilingsStudy, parts: StepParts | None) -> Section:
    """A table with a row for each part of the step; empty without parts."""
    if parts is None:
        return Section(name="roofline")
    rows = [_values(study, parts.label, part) for part in parts.parts]
    title = f"Parts of a step on the roofline: {parts.label}, {study.device_name}"
    table = make_table(title, COLUMNS, rows, _notes(rows, parts.mixed))
    return Section(name="roofline", tables=(table,), rows=rows)


def _values(study: CeilingsStudy, run: str, part: StepPart) -> Row:
    highest, ceiling = roof(study, part), study.product_ceiling(part.precision)
    return {
        "run": run, "device_name": study.device_name, "part": part.name, "phase": part.phase,
        "precision": part.precision, "flops": part.flops, "causal_flops": part.causal_flops,
        "least_mib": part.moved_bytes / MIB, "flops_per_byte": part.intensity, "time_ms": part.time_s * 1e3,
        "tflops_per_s": part.flops_per_s / TERA, "roof_tflops_per_s": ratio(highest, TERA),
        "roof_share": ratio(part.flops_per_s, highest),
        "limit": "" if highest is None else "arithmetic" if highest == ceiling else "memory",
        "causal_roof_share": causal_roof_share(study, part),
    }  # fmt: skip


def _notes(rows: Sequence[Row], mixed: Sequence[str]) -> Iterator[str]:
    """Notes on what the columns mean, and on the exceptions that occur in the table."""
    yield (
        "Per step, time of the kernels alone. least: what goes in read once, what comes out written once. roof: the "
        "measured product rate, or the measured copy bandwidth times the intensity where that is less."
    )
    if any(row["part"].endswith(ALL_KERNELS) for row in rows):
        yield "All kernels: the FLOPs and bytes are the products', the time is that of everything in the module."
    if any(row["precision"] is ProductPrecision.FP8 for row in rows):
        yield "Linear layers of the blocks: on the roof of fp8, factors in fp8 and results in bf16, without the casts."
    if mixed:
        yield (
            f"Left out: {', '.join(mixed)}. The profile does not tell the time of fp8's products from that of "
            "bf16's in them, and each kind has a roof of its own."
        )
    if fused := [row for row in rows if row["causal_flops"] is not None]:
        shares = {row["phase"]: row["causal_roof_share"] for row in fused if row["causal_roof_share"] is not None}
        texts = [f"{phase} {three_digits(100 * share)} %" for phase, share in shares.items()]
        reached = f"; counted as causal it reaches of its roof: {', '.join(texts)}" if texts else ""
        yield (
            "Fused attention: the work is that of attention in full, of which a causal kernel computes about half"
            f"{reached}."
        )
    limits = {row["limit"] for row in rows if (row["roof_share"] or 0.0) >= ABOVE}
    if "memory" in limits:
        yield "Above 100 % where memory is the limit: what it read was still in a cache."
    if "arithmetic" in limits:
        yield "Above 100 % where arithmetic is the limit: no product that was measured for the ceilings is as fast."


def causal_roof_share(study: CeilingsStudy, part: StepPart) -> float | None:
    """Share of the roof with attention counted as causal; None for other parts, and if a ceiling is unknown.

    Half of the FLOPs give half of the share, or more: fewer FLOPs per byte also lower the roof if memory sets it.
    """
    if part.causal_flops is None:
        return None
    causal = replace(part, flops=part.causal_flops)
    return ratio(causal.flops_per_s, roof(study, causal))


def roof(study: CeilingsStudy, part: StepPart) -> float | None:
    """FLOP/s that the measured ceilings allow the part."""
    return study.roof(part.precision, part.intensity)


def roofline_chart(study: CeilingsStudy, parts: StepParts | None = None) -> list[Chart]:
    """Rate over intensity, both logarithmic; none where no roof is known.

    Lines: measured copies and products; dotted and paler: the data sheet. Dots: the products of the study.
    """
    bandwidth, ceilings = study.bandwidth(), study.product_ceilings
    if bandwidth is None or not ceilings:
        return []
    shown = parts.parts if parts else ()
    products = timed(product_rows(study))
    places = [row["flops_per_byte"] for row in products] + [part.intensity for part in shown]
    places += [ceiling / bandwidth for ceiling in ceilings.values()]
    span = min(places) / STEPS, max(places) * STEPS
    measured = [
        Curve(
            line=points_of([row for row in products if row["precision"] is precision], "flops_per_byte", precision),
            colour=COLOURS[precision], marker=".", dash="", opacity=0.45, label="",
        )
        for precision in ceilings
    ]  # fmt: skip
    named = Curve(line=Line(name="products measured", points=()), colour=GREY, marker=".", dash="")
    panel = Panel(
        x=Axis(label="intensity (FLOP/byte)", is_log=True, limits=span),
        y=Axis(label="rate (TFLOP/s)", is_log=True),
        curves=[*_roofs(span, bandwidth, ceilings), *_promises(span, study), *measured, named, *_parts(shown)],
        notes=slow_layers(products, "flops_per_byte"),
    )
    settings = ", ".join(filter(None, [study.device_name, parts.label if parts else ""]))
    return [Chart(name="roofline", title="Roofline", settings=settings, panels=[panel], size=(8.5, 5.2),
                  legend=3 if shown else 4)]  # fmt: skip


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


def _promises(span: tuple[float, float], study: CeilingsStudy) -> Iterator[Curve]:
    """The roofs by the data sheet, for the precisions that it lists, dotted and paler."""
    spec, bandwidth = find_device(study.device_name), promised_bandwidth(study.device_name)
    found = {precision: promised_flops(spec, precision) for precision in study.product_ceilings}
    promised = {precision: peak for precision, peak in found.items() if peak is not None}
    if bandwidth is not None and promised:
        yield from _roofs(span, bandwidth, promised, DATA_SHEET)
        yield Curve(line=Line(name=DATA_SHEET, points=()), colour=GREY, width=1.2, dash=":")


def _parts(parts: Sequence[StepPart]) -> Iterator[Curve]:
    """A mark for each part, its colour that of the phase; what the marks mean.

    A mark in backward is a ring, so that forward's mark shows inside it where both are at the same place.
    """
    names = list(dict.fromkeys(part.name for part in parts))
    marks = {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(names)}
    for phase in dict.fromkeys(part.phase for part in parts):
        yield _mark(Line(name=f"in {phase}", points=()), phase, "s")
    for name in names:
        yield Curve(line=Line(name=name, points=()), colour="#555555", marker=marks[name], dash="")
    for part in parts:
        point = Point(x=part.intensity, value=part.flops_per_s / TERA)
        yield _mark(Line(name=part.name, points=(point,)), part.phase, marks[part.name])


def _mark(line: Line, phase: LaunchPhase, marker: str) -> Curve:
    is_hollow = phase is LaunchPhase.BACKWARD
    return Curve(line=line, colour=PHASE_COLOURS[phase], marker=marker, dash="", size=10 if is_hollow else 8,
                 is_hollow=is_hollow, label="" if line.points else None)  # fmt: skip
