"""Parts of a profiled step on the roofline: FLOPs and least bytes in closed form, time from the profile.

Least bytes: what goes in is read once and what comes out is written once; whatever else a part moves keeps it below the
roof. A part whose data is still in a cache can be above it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cs336_systems.accounting import (
    SOFTMAX_BACKWARD_FLOPS,
    SOFTMAX_FORWARD_FLOPS,
    Component,
    component_flops,
    forward_work,
    optimizer_work,
)
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import AttentionPart, StepProfile
from cs336_systems.config import RunConfig
from cs336_systems.ranges import Range
from cs336_systems.report.ceilings.tables import GIGA, MIB, TERA, Fields, percent, ratio, scaled
from cs336_systems.report.formats import Column, Heading, make_table, significant
from cs336_systems.report.listing import Listing, csv_of
from cs336_systems.studies.ceilings_records import FACTOR_BYTES, FP32_BYTES, CeilingsStudy, ProductPrecision

LINEAR = (Component.QKV, Component.OUTPUT, Component.FFN, Component.HEAD)
SCORES_AND_VALUES = (Component.SCORES, Component.VALUES)
PASSES = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)
NORM_FLOPS = {LaunchPhase.FORWARD: 4, LaunchPhase.BACKWARD: 9}
"""RMSNorm, each element. Forward: square, add, times the root, times the gain. Backward: times the gain, times x, add,
two products and a difference for x; two products and a sum for the gain."""
NORM_TENSORS = {LaunchPhase.FORWARD: 2, LaunchPhase.BACKWARD: 3}
"""The residual stream, which is in fp32, in and out; backward reads x and a gradient and writes a gradient."""
SOFTMAX_FLOPS = {LaunchPhase.FORWARD: SOFTMAX_FORWARD_FLOPS, LaunchPhase.BACKWARD: SOFTMAX_BACKWARD_FLOPS}
SOFTMAX_TENSORS = {LaunchPhase.FORWARD: 2, LaunchPhase.BACKWARD: 3}
"""Scores in, weights out; backward reads weights and their gradient and writes that of the scores."""
FUSED, ALL_KERNELS = "fused attention", "all kernels"
"""A name of a part, and how others end."""
ABOVE = 1.005
"""Of the roof: from this share on more than 100 % stands in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One part of a step in one phase; all quantities are per step."""

    name: str
    phase: LaunchPhase
    precision: ProductPrecision
    """Whose ceiling applies."""
    flops: float
    moved_bytes: float
    """The least that the part has to move."""
    time_s: float
    """Of its kernels."""
    causal_flops: float | None = None
    """With attention counted as causal; of a part whose kernel leaves the masked half out."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.moved_bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of the step of one run."""

    label: str
    """The run, in a few words."""
    parts: tuple[StepPart, ...]


def step_parts(profile: StepProfile, config: RunConfig) -> StepParts:
    """The parts that the profile of this run tells apart.

    Raises ValueError for a model of the user's own, whose FLOPs nobody knows, and for a profile without steps.
    """
    if profile.num_steps < 1:
        raise ValueError(f"{profile.source} holds no steps")
    sums = [*_products(profile), *_modules(profile)]
    found = [_product_part(config, name, parts, phase, total_s) for name, parts, phase, total_s in sums]
    found += [*_softmax(profile, config), *_norms(profile, config), *_optimizer(profile, config)]
    per_step = (replace(part, time_s=part.time_s / profile.num_steps) for part in found if part.time_s > 0)
    return StepParts(label=config.unprofiled.label, parts=tuple(per_step))


_Sum = tuple[str, tuple[Component, ...], LaunchPhase, float]
"""Name, what of the model it computes, and its time over all steps."""


def _products(profile: StepProfile) -> Iterator[_Sum]:
    """Matrix products alone, without the kernels around them; all together where they cannot be told apart."""
    for row in profile.products:
        if row.phase in PASSES and row.unknown:
            yield (
                "all products",
                (*LINEAR, *SCORES_AND_VALUES),
                row.phase,
                row.linear_s + row.attention_s + row.unknown_s,
            )
        elif row.phase in PASSES:
            yield "linear layers, products alone", LINEAR, row.phase, row.linear_s
    for times in profile.attention:
        if times.part is not AttentionPart.SOFTMAX:
            yield f"{times.part}, products alone", (Component(times.part),), times.phase, times.product_s
    for kind in profile.classes:
        if kind.kind is KernelClass.ATTENTION and kind.phase in PASSES:
            yield FUSED, SCORES_AND_VALUES, kind.phase, kind.total_s


def _modules(profile: StepProfile) -> Iterator[_Sum]:
    """Linear layers with all kernels of their module: casts, activation, RoPE."""
    for phase in PASSES:
        yield f"feed-forward, {ALL_KERNELS}", (Component.FFN,), phase, _module_s(profile, Range.FFN, phase)
        yield f"head, {ALL_KERNELS}", (Component.HEAD,), phase, _module_s(profile, Range.LM_HEAD, phase)
    if profile.attention:  # its parts have ranges of their own in forward: what is left are the projections
        total_s = _module_s(profile, Range.ATTENTION, LaunchPhase.FORWARD)
        yield f"projections, {ALL_KERNELS}", (Component.QKV, Component.OUTPUT), LaunchPhase.FORWARD, total_s


def _module_s(profile: StepProfile, last: Range, phase: LaunchPhase) -> float:
    """Kernels over all steps of the modules whose innermost range is `last`."""
    return sum(row.total_s for row in profile.modules if row.phase is phase and row.path and row.path[-1] == last)


def _product_part(
    config: RunConfig, name: str, components: Sequence[Component], phase: LaunchPhase, total_s: float
) -> StepPart:
    """Backward has two products for each of forward, of the same three matrices, and what it computes again."""
    moved_bytes = sum(work.moved_bytes for work in forward_work(config) if work.name in components)
    in_forward = phase is LaunchPhase.FORWARD
    return StepPart(
        name=name,
        phase=phase,
        precision=ProductPrecision(config.precision),
        flops=_flops(config, components, phase),
        moved_bytes=moved_bytes * (1 if in_forward else 3 if config.checkpoint_blocks else 2),
        time_s=total_s,
        causal_flops=_flops(config, components, phase, causal=True) if name == FUSED else None,
    )


def _flops(config: RunConfig, components: Sequence[Component], phase: LaunchPhase, *, causal: bool = False) -> int:
    found = [part for part in component_flops(config, causal=causal) if part.component in components]
    return sum(part.forward if phase is LaunchPhase.FORWARD else part.backward + part.recomputed for part in found)


def _softmax(profile: StepProfile, config: RunConfig) -> Iterator[StepPart]:
    """Attention's softmax; in the type of the products, which is what a kernel of its own could read and write."""
    model = config.model
    weights = model.num_layers * config.batch_size * model.num_heads * model.context_length**2
    for row in profile.attention:
        if row.part is AttentionPart.SOFTMAX and row.phase in PASSES:
            yield StepPart(
                name="softmax",
                phase=row.phase,
                precision=ProductPrecision.FP32,
                flops=SOFTMAX_FLOPS[row.phase] * weights,
                moved_bytes=SOFTMAX_TENSORS[row.phase] * FACTOR_BYTES[ProductPrecision(config.precision)] * weights,
                time_s=row.total_s,
            )


def _norms(profile: StepProfile, config: RunConfig) -> Iterator[StepPart]:
    """All norms, counted as RMSNorm."""
    model = config.model
    elements = (2 * model.num_layers + 1) * config.batch_size * model.context_length * model.d_model
    for phase in PASSES:
        yield StepPart(
            name="norms",
            phase=phase,
            precision=ProductPrecision.FP32,
            flops=NORM_FLOPS[phase] * elements,
            moved_bytes=NORM_TENSORS[phase] * FP32_BYTES * elements,
            time_s=_module_s(profile, Range.NORM, phase),
        )


def _optimizer(profile: StepProfile, config: RunConfig) -> Iterator[StepPart]:
    """AdamW, whose least bytes are those of one pass over everything."""
    work = optimizer_work(config.model)
    for row in profile.phases:
        if row.phase is LaunchPhase.OPTIMIZER:
            yield StepPart(
                name="optimizer",
                phase=row.phase,
                precision=ProductPrecision.FP32,
                flops=work.flops,
                moved_bytes=work.moved_bytes,
                time_s=sum(row.kernel_s),
            )


def parts_listing(study: CeilingsStudy, parts: StepParts | None) -> Listing:
    """The parts beside the roof that the measured ceilings are for them; empty without parts."""
    rows = parts.parts if parts else ()
    columns: list[Column[StepPart]] = [
        Column(Heading("part", numeric=False), lambda part: part.name),
        Column(Heading("phase", numeric=False), lambda part: part.phase),
        Column(Heading("work", "GFLOP"), lambda part: significant(part.flops / GIGA)),
        Column(Heading("least", "MiB", spare=1), lambda part: significant(part.moved_bytes / MIB)),
        Column(Heading("intensity", "FLOP/byte"), lambda part: significant(part.intensity, 3)),
        Column(Heading("time", "ms"), lambda part: significant(part.time_s * 1e3)),
        Column(Heading("rate", "TFLOP/s"), lambda part: scaled(part.flops_per_s, TERA)),
        Column(Heading("roof", "TFLOP/s"), lambda part: scaled(roof(study, part), TERA)),
        Column(Heading("of roof", "%"), lambda part: percent(part.flops_per_s, roof(study, part))),
        Column(Heading("limit", numeric=False), lambda part: limit(study, part)),
    ]
    fields: Fields = {
        "run": lambda _: parts.label if parts else None,
        "device_name": lambda _: study.device_name,
        "part": lambda part: part.name,
        "phase": lambda part: part.phase,
        "precision": lambda part: part.precision,
        "flops": lambda part: part.flops,
        "causal_flops": lambda part: part.causal_flops,
        "least_mib": lambda part: part.moved_bytes / MIB,
        "flops_per_byte": lambda part: part.intensity,
        "time_ms": lambda part: part.time_s * 1e3,
        "tflops_per_s": lambda part: part.flops_per_s / TERA,
        "roof_tflops_per_s": lambda part: ratio(roof(study, part), TERA),
        "roof_share": lambda part: ratio(part.flops_per_s, roof(study, part)),
        "limit": lambda part: limit(study, part),
        "causal_roof_share": lambda part: causal_roof_share(study, part),
    }
    if parts is None:
        return Listing(name="roofline", tables=(), csv="")
    title = f"Parts of a step on the roofline: {parts.label}, {study.device_name}"
    table = make_table(title, columns, rows, _notes(study, rows))
    return Listing(name="roofline", tables=(table,), csv=csv_of(fields, rows))


def _notes(study: CeilingsStudy, rows: Sequence[StepPart]) -> Iterator[str]:
    """What the columns mean, and of the exceptions those that are in the table."""
    yield (
        "Per step, time of the kernels alone. least: what goes in read once, what comes out written once. roof: the "
        "measured product rate, or the measured copy bandwidth times the intensity where that is less."
    )
    if any(part.name.endswith(ALL_KERNELS) for part in rows):
        yield "All kernels: the FLOPs and bytes are the products', the time is that of everything in the module."
    yield from _causal_note(study, [part for part in rows if part.causal_flops is not None])
    if any((ratio(part.flops_per_s, roof(study, part)) or 0.0) >= ABOVE for part in rows):
        yield "Above 100 %: what it read was still in a cache."


def _causal_note(study: CeilingsStudy, rows: Sequence[StepPart]) -> Iterator[str]:
    """The other way to count fused attention."""
    shares = {part.phase: causal_roof_share(study, part) for part in rows}
    texts = [f"{phase} {significant(100 * share, 3)} %" for phase, share in shares.items() if share is not None]
    if rows:
        reached = f"; counted as causal it reaches of its roof: {', '.join(texts)}" if texts else ""
        yield (
            "Fused attention: the work is that of attention in full, of which a causal kernel computes about half"
            f"{reached}."
        )


def causal_roof_share(study: CeilingsStudy, part: StepPart) -> float | None:
    """Share of the roof with attention counted as causal; None for other parts, and where a ceiling is not known.

    It is half, or more: with fewer FLOPs for each byte the roof is lower too where memory sets it.
    """
    if part.causal_flops is None:
        return None
    causal = replace(part, flops=part.causal_flops)
    return ratio(causal.flops_per_s, roof(study, causal))


def roof(study: CeilingsStudy, part: StepPart) -> float | None:
    """FLOP/s that the measured ceilings allow the part."""
    return study.roof(part.precision, part.intensity)


def limit(study: CeilingsStudy, part: StepPart) -> str:
    """What sets the roof; empty where a ceiling is not known."""
    found, ceiling = roof(study, part), study.product_ceiling(part.precision)
    return "" if found is None else "arithmetic" if found == ceiling else "memory"
