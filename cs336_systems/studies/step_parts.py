"""Parts of a profiled step on the roofline: FLOPs and least bytes in closed form, time from the profile.

Least bytes: inputs read once and results written once. A part that moves more bytes stays below the roof; a part whose
inputs are still in a cache can be above it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import AttentionPart, StepProfile
from cs336_systems.config import RunConfig
from cs336_systems.costs.accounting import (
    FP8_LAYERS,
    SOFTMAX_BACKWARD_FLOPS,
    SOFTMAX_FORWARD_FLOPS,
    Component,
    ComponentBytes,
    ComponentFlops,
    component_bytes,
    component_flops,
    optimizer_work,
)
from cs336_systems.costs.shards import FP32_BYTES
from cs336_systems.ranges import Range
from cs336_systems.studies.ceilings_records import FACTOR_BYTES, ProductPrecision

LINEAR = (Component.QKV, Component.OUTPUT, Component.FFN, Component.HEAD)
SCORES_AND_VALUES = (Component.SCORES, Component.VALUES)
PASSES = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)
NORM_FLOPS = {LaunchPhase.FORWARD: 4, LaunchPhase.BACKWARD: 9}
"""FLOPs of RMSNorm for each element. Forward: square, add, multiply by the root, multiply by the gain. Backward:
multiply by the gain and by x, add, two products and a difference for x; two products and a sum for the gain."""
NORM_TENSORS = {LaunchPhase.FORWARD: 2, LaunchPhase.BACKWARD: 3}
"""Tensors like the residual stream, in fp32, that a norm moves: x in, result out; x and gradient in, gradient out."""
SOFTMAX_FLOPS = {LaunchPhase.FORWARD: SOFTMAX_FORWARD_FLOPS, LaunchPhase.BACKWARD: SOFTMAX_BACKWARD_FLOPS}
SOFTMAX_TENSORS = {LaunchPhase.FORWARD: 2, LaunchPhase.BACKWARD: 3}
"""Tensors like the scores that softmax moves: scores in, weights out; weights and gradient in, gradient out."""
FUSED, ALL_KERNELS = "fused attention", "all kernels"
"""Name of the part of fused attention, and ending of the names of parts that count all kernels of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One part of a step in one phase; all quantities are per step."""

    name: str
    phase: LaunchPhase
    precision: ProductPrecision
    """Precision of the measured ceiling that limits the part."""
    flops: float
    moved_bytes: float
    """The least bytes that the part must move."""
    time_s: float
    """Time of the part's kernels."""
    causal_flops: float | None = None
    """FLOPs with attention counted as causal; None for all parts but fused attention."""

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
    """A few words for the run."""
    parts: tuple[StepPart, ...]
    mixed: tuple[str, ...] = ()
    """Names of parts that are left out because they multiply in fp8 and in bf16, and so have no single roof."""


def step_parts(profile: StepProfile, config: RunConfig) -> StepParts:
    """The parts that the profile of this run tells apart.

    Raises ValueError for a model of the user's own, whose FLOPs are not known, and for a profile without steps.
    """
    if profile.num_steps < 1:
        raise ValueError(f"{profile.source} holds no steps")
    parts, mixed = [], []
    for name, phase, components, total_s in (*_products(profile), *_modules(profile)):
        precision = _precision(config, components)
        if precision is not None:
            flops, causal, moved = (
                _of_phase(found, phase, components)
                for found in (component_flops(config), component_flops(config, causal=True), component_bytes(config))
            )
            part = _part(name, phase, precision, flops, moved, total_s)
            parts.append(replace(part, causal_flops=causal) if name == FUSED else part)
        elif total_s > 0:
            mixed.append(name)
    parts += _elementwise(profile, config)
    per_step = (replace(part, time_s=part.time_s / profile.num_steps) for part in parts if part.time_s > 0)
    return StepParts(label=config.unprofiled.label, parts=tuple(per_step), mixed=tuple(dict.fromkeys(mixed)))


def _part(
    name: str, phase: LaunchPhase, precision: ProductPrecision, flops: float, moved_bytes: float, total_s: float
) -> StepPart:
    """The part with its time over all steps."""
    return StepPart(
        name=name, phase=phase, precision=precision, flops=flops, moved_bytes=moved_bytes, time_s=total_s
    )  # fmt: skip


def _precision(config: RunConfig, components: Sequence[Component]) -> ProductPrecision | None:
    """Precision of the products of these parts; None for two: fp8 leaves the head and attention in bf16."""
    in_fp8 = {config.fp8 and part in FP8_LAYERS for part in components}
    if len(in_fp8) > 1:
        return None
    return ProductPrecision.FP8 if True in in_fp8 else ProductPrecision(config.precision)


Kernels = tuple[str, LaunchPhase, Sequence[Component], float]
"""Kernels that compute some parts of the model in one phase: their name, and their time over all steps (seconds)."""


def _products(profile: StepProfile) -> Iterator[Kernels]:
    """Matrix products alone, without the kernels around them; all together where they cannot be told apart."""
    for row in profile.products:
        if row.phase in PASSES and row.unknown:
            total_s = row.linear_s + row.attention_s + row.unknown_s
            yield "all products", row.phase, (*LINEAR, *SCORES_AND_VALUES), total_s
        elif row.phase in PASSES:
            yield "linear layers, products alone", row.phase, LINEAR, row.linear_s
    for times in profile.attention:
        if times.part is not AttentionPart.SOFTMAX:
            yield f"{times.part}, products alone", times.phase, (Component(times.part),), times.product_s
    for kind in profile.classes:
        if kind.kind is KernelClass.ATTENTION and kind.phase in PASSES:
            yield FUSED, kind.phase, SCORES_AND_VALUES, kind.total_s


def _modules(profile: StepProfile) -> Iterator[Kernels]:
    """Linear layers with all kernels of their module: casts, activation, RoPE."""
    for phase in PASSES:
        yield f"feed-forward, {ALL_KERNELS}", phase, (Component.FFN,), _module_s(profile, Range.FFN, phase)
        yield f"head, {ALL_KERNELS}", phase, (Component.HEAD,), _module_s(profile, Range.LM_HEAD, phase)
    if profile.attention:  # scores, softmax and values then have ranges of their own, so only projections are left
        total_s = _module_s(profile, Range.ATTENTION, LaunchPhase.FORWARD)
        yield f"projections, {ALL_KERNELS}", LaunchPhase.FORWARD, (Component.QKV, Component.OUTPUT), total_s


def _module_s(profile: StepProfile, last: Range, phase: LaunchPhase) -> float:
    """Kernels over all steps of the modules whose innermost range is `last`."""
    return sum(row.total_s for row in profile.modules if row.phase is phase and row.path and row.path[-1] == last)


def _of_phase(
    parts: Iterable[ComponentFlops | ComponentBytes], phase: LaunchPhase, components: Sequence[Component]
) -> int:
    """FLOPs or bytes of the components in the phase; those of backward include recomputation."""
    found = [part for part in parts if part.component in components]
    return sum(part.forward if phase is LaunchPhase.FORWARD else part.backward + part.recomputed for part in found)


def _elementwise(profile: StepProfile, config: RunConfig) -> Iterator[StepPart]:
    """Softmax, norms and AdamW, in fp32.

    Softmax moves bytes in the type of the matmuls, the least that its kernel could read and write. Norms are counted as
    RMSNorm; with checkpoints, backward includes the two norms per block that it recomputes. AdamW is one pass over
    parameters, gradients and moments.
    """
    model, fp32 = config.model, ProductPrecision.FP32
    weights = model.num_layers * config.batch_size * model.num_heads * model.context_length**2
    size = FACTOR_BYTES[ProductPrecision(config.precision)]
    for row in profile.attention:
        if row.part is AttentionPart.SOFTMAX and row.phase in PASSES:
            flops, moved = SOFTMAX_FLOPS[row.phase] * weights, SOFTMAX_TENSORS[row.phase] * size * weights
            yield _part("softmax", row.phase, fp32, flops, moved, row.total_s)
    elements, in_blocks = config.batch_size * model.context_length * model.d_model, 2 * model.num_layers
    for phase in PASSES:
        again = in_blocks if phase is LaunchPhase.BACKWARD and config.checkpoint_blocks else 0
        flops, tensors = (
            (in_blocks + 1) * counts[phase] + again * counts[LaunchPhase.FORWARD]
            for counts in (NORM_FLOPS, NORM_TENSORS)
        )
        moved, total_s = tensors * FP32_BYTES * elements, _module_s(profile, Range.NORM, phase)
        yield _part("norms", phase, fp32, flops * elements, moved, total_s)
    update = optimizer_work(config)
    for times in profile.phases:
        if times.phase is LaunchPhase.OPTIMIZER:
            yield _part("optimizer", times.phase, fp32, update.flops, update.moved_bytes, sum(times.kernel_s))
