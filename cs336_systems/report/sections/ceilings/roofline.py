"""The section of the roofline: the rate of each part of a profiled step, and its roof by the measured ceilings."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cs336_systems.report.columns import Row, column, three_digits
from cs336_systems.report.numbers import MIB, TERA, ratio
from cs336_systems.report.section import Section
from cs336_systems.report.table import make_table
from cs336_systems.studies.ceilings_records import CeilingsStudy, ProductPrecision
from cs336_systems.studies.step_parts import ALL_KERNELS, StepPart, StepParts

COLUMNS = (
    column("part", about="Which part of the step it is."), column("phase"), column("flops"), column("least_mib"),
    column("flops_per_byte", drop_order=5), column("time_ms"), column("tflops_per_s", drop_order=2, derived=False),
    column("roof_tflops_per_s"), column("roof_share"), column("limit"),
)  # fmt: skip
ABOVE = 1.005
"""Smallest share of the roof that the table shows as more than 100 %."""


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
