"""Kernels by module and by class, and which matmuls belong to linear layers and which to attention."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Ints, Mask, groups
from cs336_systems.analysis.kernels.attribution import Attribution, by_phase, totals
from cs336_systems.analysis.kernels.classes import MAX_NAME, KernelClass, classify_kernel, short_name
from cs336_systems.analysis.kernels.phases import CODES, PHASES, Codes, LaunchPhase
from cs336_systems.analysis.kernels.step_profile import (
    AttentionPart,
    AttentionTimes,
    ClassTimes,
    KernelTimes,
    MatmulCounts,
    ModuleTimes,
)
from cs336_systems.analysis.kernels.trace import of_names
from cs336_systems.config import ModelConfig
from cs336_systems.costs.accounting import AttentionFlops, attention_backward_flops, attention_forward_flops
from cs336_systems.ranges import Range

PARTS = tuple(AttentionPart)
NO_PART = -1
PartCodes = NDArray[np.int8]
"""Indices into `PARTS`, NO_PART for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """Names that the ranges around the parts of attention may have, in upper or lower case.

    They are this project's, those of the course's handout, and those of a published solution. As `softmax` and `matmul`
    may occur elsewhere, ranges count only where scores, softmax and values follow each other inside one range.
    """

    scores: tuple[str, ...] = (Range.SCORES, "computing attention scores", "attention scores")
    softmax: tuple[str, ...] = (Range.SOFTMAX, "computing softmax", "softmax")
    values: tuple[str, ...] = (Range.VALUES, "final matmul", "matmul")

    def __post_init__(self) -> None:
        names = [name.casefold() for name in (*self.scores, *self.softmax, *self.values)]
        if len(set(names)) < len(names):
            raise ValueError(f"each part of attention needs range names of its own, got {', '.join(names)}")

    def part(self, name: str) -> int:
        """Index into `PARTS` of the part that a range of this name may be; NO_PART for none."""
        accepted = (self.scores, self.softmax, self.values)
        found = (part for part, names in enumerate(accepted) if name.casefold() in map(str.casefold, names))
        return next(found, NO_PART)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeParts:
    """The module path and the part of attention of each range; the last element of each column means no range."""

    path: Ints
    """Index into `paths`."""
    paths: tuple[tuple[int, str], ...]
    """For each path, the path around it and its last name; path 0 is empty."""
    part: PartCodes
    """The part of attention that the range is, or that it is inside."""
    part_range: Ints
    """The range that is that part of attention; -1 for none."""
    in_attention: Mask
    """Inside a range with the name of attention's own range; in backward attention has no other range."""

    def names(self, path: int) -> tuple[str, ...]:
        """The names of a path, the outermost first."""
        names = []
        while path > 0:
            path, name = self.paths[path]
            names.append(name)
        return tuple(reversed(names))


def range_parts(attribution: Attribution, names: AttentionNames) -> RangeParts:
    """Find the parts of all ranges, from the outermost to the innermost, in time linear in their number."""
    ranges, strings, parent = attribution.trace.ranges, attribution.trace.strings, attribution.parent
    own = _attention_ranges(attribution, names)
    around = parent[own == PARTS.index(AttentionPart.SCORES)]
    attention_names = np.unique(ranges.name[around[around >= 0]])
    is_attention = np.append(np.isin(ranges.name, attention_names), False).tolist()
    part_range = np.append(np.where(own == NO_PART, -1, np.arange(len(own))), -1).tolist()
    path = [0] * len(part_range)
    known: dict[tuple[int, int], int] = {}
    paths = [(0, "")]
    name_of, parent_of = ranges.name.tolist(), parent.tolist()
    for index in np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist():
        outer = parent_of[index]  # -1 for none, which indexes the last element
        key = path[outer], name_of[index]
        if outer >= 0 and name_of[outer] == name_of[index]:  # autograd names its nodes twice
            path[index] = path[outer]
        else:
            if key not in known:
                known[key] = len(paths)
                paths.append((path[outer], strings[name_of[index]]))
            path[index] = known[key]
        if part_range[index] < 0:
            part_range[index] = part_range[outer]
        is_attention[index] |= is_attention[outer]
    return RangeParts(
        path=np.array(path, dtype=np.int64),
        paths=tuple(paths),
        part=np.append(own, np.int8(NO_PART))[part_range],
        part_range=np.array(part_range, dtype=np.int64),
        in_attention=np.array(is_attention, dtype=np.bool_),
    )


def _attention_ranges(attribution: Attribution, names: AttentionNames) -> PartCodes:
    """The part that each range is: scores, the softmax that follows them inside the same range, then the values."""
    ranges = attribution.trace.ranges
    label = of_names(ranges.name, attribution.trace.strings, names.part, np.int8)
    rows = np.flatnonzero((label != NO_PART) & ranges.is_nested)
    rows = rows[np.lexsort((ranges.start_ns[rows], attribution.parent[rows], ranges.thread[rows]))]
    label = label[rows]
    is_sibling = np.zeros(len(rows), dtype=np.bool_)
    thread, parent = ranges.thread[rows], attribution.parent[rows]
    is_sibling[1:] = (thread[1:] == thread[:-1]) & (parent[1:] == parent[:-1])
    previous = np.append(np.int8(NO_PART), label)[:-1]
    is_scores, is_softmax = label == 0, (label == 1) & (previous == 0) & is_sibling
    is_values = (label == 2) & is_sibling & np.append(False, is_softmax)[:-1]
    accepted = is_scores | is_softmax | is_values
    own = np.full(len(ranges), NO_PART, dtype=np.int8)
    own[rows[accepted]] = label[accepted]
    return own


def module_times(kernels: pd.DataFrame, parts: RangeParts) -> tuple[ModuleTimes, ...]:
    """Kernels by module path and phase, the longest first."""
    with_paths = kernels.assign(path=parts.path[kernels["module"]])
    return tuple(
        ModuleTimes(path=parts.names(row.path), phase=PHASES[row.phase], count=row.count, total_s=row.total_ns / 1e9)
        for row in totals(with_paths, "path", "phase")
    )


CLASSES = tuple(KernelClass)


def kernel_classes(names: Ints, strings: Sequence[str]) -> Codes:
    """The class of each kernel, as an index into `CLASSES`."""
    return of_names(names, strings, lambda name: CLASSES.index(classify_kernel(name)), np.int8)


def kernel_times(kernels: pd.DataFrame, strings: Sequence[str]) -> tuple[KernelTimes, ...]:
    """Times of each kernel in the whole step, then in each phase; the longest total first."""
    rows = list(_kernel_times(kernels, strings, None))
    for phase, in_phase in by_phase(kernels):
        rows += _kernel_times(in_phase, strings, phase)
    return tuple(rows)


def _kernel_times(kernels: pd.DataFrame, strings: Sequence[str], phase: LaunchPhase | None) -> Iterator[KernelTimes]:
    found = kernels.groupby("name")["duration_ns"].agg(["count", "sum", "median", "min", "max", "std"])
    rows: Iterable[Any] = found.sort_values("sum", ascending=False, kind="stable").itertuples(name=None)
    for index, count, total_ns, *times_ns, stdev_ns in rows:
        median_s, min_s, max_s = (time / 1e9 for time in times_ns)
        yield KernelTimes(
            name=strings[index][:MAX_NAME],
            short_name=short_name(strings[index]),
            kind=classify_kernel(strings[index]),
            phase=phase,
            count=count,
            total_s=total_ns / 1e9,
            mean_s=total_ns / count / 1e9,
            median_s=median_s,
            min_s=min_s,
            max_s=max_s,
            stdev_s=None if count == 1 else stdev_ns / 1e9,
        )


def class_times(kernels: pd.DataFrame) -> tuple[ClassTimes, ...]:
    """Times of each class in each phase where it occurs; by phase, the longest first."""
    return tuple(
        ClassTimes(kind=CLASSES[row.kind], phase=PHASES[row.phase], count=row.count, total_s=row.total_ns / 1e9)
        for row in sorted(totals(kernels, "phase", "kind"), key=lambda row: row.phase)
    )


# helpers that sum the parts of a matmul or apply its epilogue, and PyTorch's operators that call another one
_NO_MATMUL = re.compile(
    r"split_?K_?reduce|execute_split_k_kernel|cutlass::reduction|cublasLt::epilogue|^aten::(?:matmul|linear|linear_backward|einsum)$",
    re.IGNORECASE,
)

SCORES, SOFTMAX, VALUES = (PARTS.index(part) for part in AttentionPart)
LINEAR, UNKNOWN = len(PARTS), len(PARTS) + 1
"""Roles of a matmul besides the parts of attention."""
_FORWARD, _LOSS, _BACKWARD = (CODES[phase] for phase in (LaunchPhase.FORWARD, LaunchPhase.LOSS, LaunchPhase.BACKWARD))
_DIRECTIONS = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)
_NEVER_NS = np.iinfo(np.int64).max


def is_matmul_itself(name: str) -> bool:
    """Whether the kernel of this name is a matmul itself, not a helper of one."""
    return classify_kernel(name) is KernelClass.MATMUL and _NO_MATMUL.search(name) is None


def with_roles(kernels: pd.DataFrame, attribution: Attribution, parts: RangeParts) -> pd.DataFrame:
    """All kernels of the trace, with columns for their roles in the model.

    `role`: for matmuls LINEAR, UNKNOWN or the part of attention; NO_PART for all other kernels.
    `part`: the part of attention whose range contains the kernel; in backward, the part that the kernel differentiates.
    """
    strings, own_part = attribution.trace.strings, parts.part[kernels["module"]]
    is_matmul = of_names(kernels["name"].to_numpy(), strings, is_matmul_itself, np.bool_)
    phase, in_step = kernels["phase"].to_numpy(), kernels["step"].to_numpy() >= 0
    in_forward, in_attention = phase == _FORWARD, own_part != NO_PART

    def in_steps_with(chosen: Mask) -> Mask:
        """Whether each kernel is in a step that has a chosen kernel."""
        in_same_step: Mask = pd.Series(chosen).groupby(kernels["step"]).transform("any").to_numpy()
        return in_step & in_same_step

    has_parts = in_steps_with(is_matmul & in_forward & (own_part == SCORES))
    has_parts &= in_steps_with(is_matmul & in_forward & (own_part == VALUES))
    is_fused = ~has_parts & in_steps_with(in_forward & (kernels["kind"] == CLASSES.index(KernelClass.ATTENTION)))

    role = np.where(is_matmul, np.int8(UNKNOWN), np.int8(NO_PART))
    of_forward = np.isin(phase, (_FORWARD, _LOSS)) | kernels["is_recomputed"]
    role[is_matmul & ((of_forward & has_parts) | ((of_forward | (phase == _BACKWARD)) & is_fused))] = LINEAR
    role[is_matmul & in_attention] = own_part[is_matmul & in_attention]
    mirrored = mirrored_matmuls(attribution, is_matmul)
    mirrored[in_attention] = -1  # recomputed forward
    role[mirrored >= 0] = role[mirrored[mirrored >= 0]]

    part = np.where(in_forward, own_part, np.int8(NO_PART))
    is_mirror = (mirrored >= 0) & (role < LINEAR)
    part[is_mirror] = role[is_mirror]
    found = kernels.assign(role=role, part=part)
    found.loc[_softmax_of_backward(found, parts), "part"] = SOFTMAX
    return found


def mirrored_matmuls(attribution: Attribution, is_matmul: Mask) -> Ints:
    """For each matmul of backward, the row of the matmul of forward whose gradients it computes; else -1.

    Eager autograd runs its nodes in the reverse of forward's order, and the node of a matmul launches two, one for each
    factor's gradient. So the last two matmuls of backward belong to the first of forward, and so on; recomputed ones
    are left out. Steps whose backward does not have twice as many matmuls as forward get -1: a factor needs no gradient
    there, or a compiler changed the order.
    """
    mirrored = np.full(len(is_matmul), -1, dtype=np.int64)
    placement, work = attribution.kernels, attribution.trace.kernels
    matmuls = np.flatnonzero(is_matmul & (placement.step >= 0) & ~placement.is_recomputed)
    matmuls = matmuls[np.lexsort((work.start_ns[matmuls], work.launch_ns[matmuls]))]
    for _, rows in groups(placement.step[matmuls]):
        in_step = matmuls[rows]
        phase = placement.phase[in_step]
        forward, backward = in_step[phase == _FORWARD], in_step[phase == _BACKWARD]
        if len(backward) == 2 * len(forward):
            mirrored[backward] = np.repeat(forward[::-1], 2)
    return mirrored


def _softmax_of_backward(kernels: pd.DataFrame, parts: RangeParts) -> "pd.Series[bool]":
    """Kernels of class softmax that differentiate attention's softmax.

    If backward has module ranges, they are those inside attention. Otherwise they are those after backward's first
    matmul, since the loss comes before it, in steps where backward has as many of them as forward.
    """
    step, in_backward = kernels["step"], kernels["phase"] == _BACKWARD
    is_softmax = (kernels["kind"] == CLASSES.index(KernelClass.SOFTMAX)) & (step >= 0)
    candidates = is_softmax & in_backward & (parts.part[kernels["module"]] == NO_PART)
    in_attention: pd.Series[bool] = candidates & parts.in_attention[kernels["module"]]
    if in_attention.any():
        return in_attention
    is_matmul = in_backward & (kernels["role"] != NO_PART)
    first_matmul_ns = kernels["launch_ns"].where(is_matmul, _NEVER_NS).groupby(step).transform("min")
    candidates &= kernels["launch_ns"] > first_matmul_ns
    of_forward = is_softmax & (kernels["phase"] == _FORWARD) & (kernels["part"] == SOFTMAX)
    are_as_many = candidates.groupby(step).transform("sum") == of_forward.groupby(step).transform("sum")
    found: pd.Series[bool] = candidates & are_as_many
    return found


def matmul_counts(kernels: pd.DataFrame) -> Iterator[MatmulCounts]:
    """Matmuls by phase, for phases that have any."""
    for phase, matmuls in by_phase(kernels[kernels["role"] != NO_PART]):
        linear, unknown, attention = (
            matmuls[chosen]
            for chosen in (matmuls["role"] == LINEAR, matmuls["role"] == UNKNOWN, matmuls["role"] < LINEAR)
        )
        yield MatmulCounts(
            phase=phase,
            linear=len(linear),
            linear_s=_seconds(linear),
            attention=len(attention),
            attention_s=_seconds(attention),
            unknown=len(unknown),
            unknown_s=_seconds(unknown),
        )


def _seconds(kernels: pd.DataFrame) -> float:
    return int(kernels["duration_ns"].sum()) / 1e9


def attention_times(
    kernels: pd.DataFrame, parts: RangeParts, model: ModelConfig | None, batch_size: int | None
) -> tuple[tuple[AttentionTimes, ...], tuple[str, ...]]:
    """The parts of attention in forward and backward, with their FLOPs if the model is known, and notes."""
    by_part = {
        (phase, part): found
        for phase, in_phase in by_phase(kernels[kernels["phase"].isin((_FORWARD, _BACKWARD))])
        for code, part in enumerate(PARTS)
        if len(found := in_phase[in_phase["part"] == code])
    }
    scores = by_part.get((LaunchPhase.FORWARD, AttentionPart.SCORES), kernels[:0])
    flops = _flops(model, batch_size, len(np.unique(parts.part_range[scores["module"]])))
    rows = []
    for (phase, part), of_part in by_part.items():
        matmuls = of_part[of_part["role"] != NO_PART]
        row = AttentionTimes(
            part=part,
            phase=phase,
            count=len(of_part),
            total_s=_seconds(of_part),
            product_count=len(matmuls),
            product_s=_seconds(matmuls),
            flops=flops.get((phase, part)),
        )
        rows.append(row)
    has_softmax, has_its_backward = ((phase, AttentionPart.SOFTMAX) in by_part for phase in _DIRECTIONS)
    is_unknown = has_softmax and not has_its_backward and (kernels["phase"] == _BACKWARD).any()
    return tuple(rows), (_NO_SOFTMAX,) if is_unknown else ()


_NO_SOFTMAX = (
    "It is unknown which kernels of backward differentiate attention's softmax: none is a softmax by name, or they are "
    "not as many as in forward. They are missing from attention's backward."
)


def _flops(
    model: ModelConfig | None, batch_size: int | None, num_scores: int
) -> dict[tuple[LaunchPhase, AttentionPart], int]:
    """FLOPs of all passes in the steps; empty if they are not known, as of another model than the traced one.

    The number of passes is that of ranges around scores over that of layers.
    """
    if model is None or batch_size is None or num_scores % model.num_layers:
        return {}
    of_pass: dict[LaunchPhase, AttentionFlops] = {
        LaunchPhase.FORWARD: attention_forward_flops(model, batch_size),
        LaunchPhase.BACKWARD: attention_backward_flops(model, batch_size),
    }
    return {
        (phase, part): num_scores // model.num_layers * count
        for phase, flops in of_pass.items()
        for part, count in zip(PARTS, (flops.scores, flops.softmax, flops.values), strict=True)
    }
