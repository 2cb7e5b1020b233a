"""Which matmul kernels belong to linear layers and which to attention, and the time of attention's parts."""

import re
from dataclasses import dataclass

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, Mask
from cs336_systems.analysis.kernels.attribution import Attribution, mirrored_products
from cs336_systems.analysis.kernels.classes import KernelClass, classify_kernel
from cs336_systems.analysis.kernels.kernel_times import CLASSES
from cs336_systems.analysis.kernels.parts import NO_PART, PARTS, Parts, RangeParts
from cs336_systems.analysis.kernels.phases import CODES, PHASES, Codes, LaunchPhase
from cs336_systems.analysis.kernels.step_profile import AttentionPart, AttentionTimes, ProductCounts
from cs336_systems.config import ModelConfig
from cs336_systems.costs.accounting import AttentionFlops, attention_backward_flops, attention_forward_flops

# helpers that sum the parts of a matmul or apply its epilogue, and PyTorch's operators that call another one
_NO_PRODUCT = re.compile(
    r"split_?K_?reduce|execute_split_k_kernel|cutlass::reduction|cublasLt::epilogue|^aten::(?:matmul|linear|linear_backward|einsum)$",
    re.IGNORECASE,
)

SCORES, SOFTMAX, VALUES = (PARTS.index(part) for part in AttentionPart)
LINEAR, UNKNOWN = len(PARTS), len(PARTS) + 1
"""Roles of a matmul besides the parts of attention."""
_FORWARD, _LOSS, _BACKWARD = (CODES[phase] for phase in (LaunchPhase.FORWARD, LaunchPhase.LOSS, LaunchPhase.BACKWARD))


def is_product_itself(name: str) -> bool:
    """Whether the kernel of this name is a matmul itself, not a helper of one."""
    return classify_kernel(name) is KernelClass.MATRIX_PRODUCT and _NO_PRODUCT.search(name) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles(Columns):
    """The role of each kernel of a trace in the model."""

    step: Ints
    """Index of the step in a `Selection`; -1 for kernels outside its steps."""
    phase: Codes
    duration_ns: Ints
    product: Parts
    """For matmuls LINEAR, UNKNOWN or the part of attention; NO_PART for all other kernels."""
    part: Parts
    """The part of attention whose range contains the kernel; in backward, the part that the kernel differentiates."""


def roles(attribution: Attribution, parts: RangeParts, step: Ints, kind: Codes) -> tuple[Roles, tuple[str, ...]]:
    """The roles of all kernels, whose classes are `kind`, and notes on what cannot be concluded."""
    trace, placed = attribution.trace, attribution.kernels
    phase, own_part = placed.phase, parts.part[placed.module]
    used, index = np.unique(trace.kernels.name, return_inverse=True)
    is_product = np.array([is_product_itself(trace.strings[name]) for name in used.tolist()], dtype=np.bool_)[index]
    in_forward = phase == _FORWARD
    has_parts = _steps_with(step, is_product & in_forward & (own_part == SCORES))
    has_parts &= _steps_with(step, is_product & in_forward & (own_part == VALUES))
    is_fused: Mask = _steps_with(step, in_forward & (kind == CLASSES.index(KernelClass.ATTENTION))) & ~has_parts

    product = np.full(len(step), NO_PART, dtype=np.int8)
    product[is_product] = UNKNOWN
    of_forward = np.isin(phase, (_FORWARD, _LOSS)) | placed.is_recomputed
    rest_is_linear = of_forward & (has_parts | is_fused)[step]
    rest_is_linear |= (phase == _BACKWARD) & is_fused[step]
    product[is_product & rest_is_linear] = LINEAR
    told = is_product & (own_part != NO_PART)
    product[told] = own_part[told]
    mirrored = mirrored_products(attribution, is_product)
    mirrored[own_part != NO_PART] = -1  # recomputed forward
    product[mirrored >= 0] = product[mirrored[mirrored >= 0]]

    part = np.where(in_forward, own_part, np.int8(NO_PART))
    is_mirror = (mirrored >= 0) & (product < LINEAR)
    part[is_mirror] = product[is_mirror]
    found = Roles(step=step, phase=phase, duration_ns=trace.kernels.duration_ns, product=product, part=part)
    softmax = _softmax_of_backward(attribution, parts, found, kind == CLASSES.index(KernelClass.SOFTMAX))
    part[softmax] = SOFTMAX
    return found, tuple(_notes(found))


def _steps_with(step: Ints, chosen: Mask) -> Mask:
    """Whether each step has a chosen kernel; the last element, for kernels in no step, is False."""
    has: Mask = np.zeros(int(step.max(initial=-1)) + 2, dtype=np.bool_)
    has[step[chosen & (step >= 0)]] = True
    return has


def _softmax_of_backward(attribution: Attribution, parts: RangeParts, roles: Roles, is_softmax: Mask) -> Mask:
    """Kernels of class softmax that differentiate attention's softmax.

    If backward has module ranges, they are those inside attention. Otherwise they are those after backward's first
    matmul, since the loss comes before it, in steps where backward has as many of them as forward.
    """
    step, placed = roles.step, attribution.kernels
    again = parts.part[placed.module] != NO_PART
    candidates = is_softmax & (step >= 0) & (roles.phase == _BACKWARD) & ~again
    in_attention: Mask = candidates & parts.in_attention[placed.module]
    if in_attention.any():
        return in_attention
    launch = attribution.trace.kernels.launch_ns
    products = np.flatnonzero((roles.product != NO_PART) & (roles.phase == _BACKWARD) & (step >= 0))
    first = np.full(int(step.max(initial=-1)) + 2, np.iinfo(np.int64).max)
    np.minimum.at(first, step[products], launch[products])
    candidates &= launch > first[step]
    of_forward = is_softmax & (roles.phase == _FORWARD) & (roles.part == SOFTMAX) & (step >= 0)
    number = np.bincount(step[candidates], minlength=len(first))
    told: Mask = candidates & (number == np.bincount(step[of_forward], minlength=len(first)))[step]
    return told


def _notes(roles: Roles) -> list[str]:
    in_step = roles.step >= 0
    in_backward = in_step & (roles.phase == _BACKWARD)
    is_softmax = roles.part == SOFTMAX
    has_softmax = bool((in_step & (roles.phase == _FORWARD) & is_softmax).any())
    if has_softmax and in_backward.any() and not (in_backward & is_softmax).any():
        return [
            "Which kernels of backward differentiate attention's softmax cannot be told: they are no softmax by name, "
            "or not as many as forward's. They are missing from attention's backward."
        ]
    return []


def product_counts(roles: Roles) -> tuple[ProductCounts, ...]:
    """Matmuls by phase, for phases that have any."""
    rows = np.flatnonzero((roles.step >= 0) & (roles.product != NO_PART))
    shape = (len(PHASES), UNKNOWN + 1)
    count, time = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    np.add.at(count, (roles.phase[rows], roles.product[rows]), 1)
    np.add.at(time, (roles.phase[rows], roles.product[rows]), roles.duration_ns[rows])
    return tuple(
        ProductCounts(
            phase=phase,
            linear=int(count[code, LINEAR]),
            linear_s=int(time[code, LINEAR]) / 1e9,
            attention=int(count[code, :LINEAR].sum()),
            attention_s=int(time[code, :LINEAR].sum()) / 1e9,
            unknown=int(count[code, UNKNOWN]),
            unknown_s=int(time[code, UNKNOWN]) / 1e9,
        )
        for code, phase in enumerate(PHASES)
        if count[code].any()
    )


def attention_times(
    roles: Roles, attribution: Attribution, parts: RangeParts, model: ModelConfig | None, batch_size: int | None
) -> tuple[tuple[AttentionTimes, ...], tuple[str, ...]]:
    """The parts of attention in forward and backward, with their FLOPs if the model is known, and notes."""
    is_scores = (roles.step >= 0) & (roles.phase == _FORWARD) & (roles.part == SCORES)
    num_scores = len(np.unique(parts.part_range[attribution.kernels.module[is_scores]]))
    flops, notes = _flops(model, batch_size, num_scores)
    rows = []
    for phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD):
        for code, part in enumerate(PARTS):
            chosen = (roles.step >= 0) & (roles.phase == CODES[phase]) & (roles.part == code)
            products = chosen & (roles.product != NO_PART)
            if chosen.any():
                row = AttentionTimes(
                    part=part,
                    phase=phase,
                    count=int(chosen.sum()),
                    total_s=int(roles.duration_ns[chosen].sum()) / 1e9,
                    product_count=int(products.sum()),
                    product_s=int(roles.duration_ns[products].sum()) / 1e9,
                    flops=flops.get((phase, part)),
                )
                rows.append(row)
    return tuple(rows), notes


def _flops(
    model: ModelConfig | None, batch_size: int | None, num_scores: int
) -> tuple[dict[tuple[LaunchPhase, AttentionPart], int], tuple[str, ...]]:
    """FLOPs of all passes in the steps. The number of passes is that of ranges around scores over that of layers."""
    if model is None or batch_size is None or not num_scores:
        return {}, ()
    if num_scores % model.num_layers:
        return {}, (
            f"The model has {model.num_layers} layers, and forward has {num_scores} ranges around attention's scores: "
            "it is another model's trace, so attention's FLOPs are not known.",
        )
    passes = num_scores // model.num_layers
    by_phase: dict[LaunchPhase, AttentionFlops] = {
        LaunchPhase.FORWARD: attention_forward_flops(model, batch_size),
        LaunchPhase.BACKWARD: attention_backward_flops(model, batch_size),
    }
    return {
        (phase, part): passes * count
        for phase, flops in by_phase.items()
        for part, count in zip(PARTS, (flops.scores, flops.softmax, flops.values), strict=True)
    }, ()
