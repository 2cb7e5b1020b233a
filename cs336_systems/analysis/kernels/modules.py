"""Sums over kernels: by module, class and name, and over the parts of attention in forward."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...config import RunConfig
from ...costs.accounting import attention_forward_flops
from ...ranges import Range
from ..columns import Ints
from .attribution import Attribution, by_phase, totals
from .classes import MAX_NAME, KernelClass, classify_kernel
from .kineto_operators import MODULE_CALL
from .phases import CODES, PHASES, Codes, LaunchPhase
from .short_names import short_name
from .step_profile import AttentionPart, AttentionTimes, ClassTimes, KernelTimes, ModuleTimes
from .trace import of_names

ATTENTION_PARTS = tuple(AttentionPart)
NO_PART = -1
PART_NAMES = (
    (Range.SCORES, "computing attention scores", "attention scores"),
    (Range.SOFTMAX, "computing softmax", "softmax"),
    (Range.VALUES, "final matmul", "matmul"),
)
"""Names of the ranges around each part of attention, in upper or lower case.

They are this project's, those of the course's handout, and those of a published solution. As
`softmax` and `matmul` may occur elsewhere, ranges count only where scores, softmax and values
follow each other inside one range.
"""
_PART_OF: dict[str, int] = {}
for _part, _names in enumerate(PART_NAMES):
    _PART_OF |= dict.fromkeys(_names, _part)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeParts:
    """The module path and the part of attention of each range; the last element of each column
    means no range.
    """

    path: Ints
    """Index into `paths`."""
    paths: tuple[tuple[int, str], ...]
    """For each path, the path around it and its last name; path 0 is empty."""
    part: Codes
    """Index into ATTENTION_PARTS of the part of attention that the range is or that it is in;
    NO_PART for none.
    """
    part_range: Ints
    """The range that is that part of attention; -1 for none."""

    def names(self, path: int) -> tuple[str, ...]:
        """The names of a path, the outermost first."""
        names = []
        while path > 0:
            path, name = self.paths[path]
            names.append(name)
        return tuple(reversed(names))


def range_parts(attribution: Attribution) -> RangeParts:
    """Find the parts of all ranges, from the outermost to the innermost, in time linear in their
    number.
    """
    ranges, strings = attribution.trace.ranges, attribution.trace.strings
    part = _attention_ranges(attribution)
    of_part = np.where(part == NO_PART, -1, np.arange(len(part)))
    part_range = [*of_part.tolist(), -1]
    path = [0] * len(part_range)
    numbers: dict[tuple[int, int], int] = {}
    paths = [(0, "")]
    name_of, parent_of = ranges.name.tolist(), attribution.parent.tolist()
    for index in np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist():
        outer = parent_of[index]  # -1 for none, which indexes the last element
        key = path[outer], name_of[index]
        if outer >= 0 and name_of[outer] == name_of[index]:  # autograd names its nodes twice
            path[index] = path[outer]
        elif key in numbers:
            path[index] = numbers[key]
        else:
            path[index] = numbers[key] = len(paths)
            paths.append((path[outer], strings[name_of[index]].removeprefix(MODULE_CALL)))
        if part_range[index] < 0:
            part_range[index] = part_range[outer]
    return RangeParts(
        path=np.array(path, dtype=np.int64),
        paths=tuple(paths),
        part=np.append(part, np.int8(NO_PART))[part_range],
        part_range=np.array(part_range, dtype=np.int64),
    )


def _attention_ranges(attribution: Attribution) -> Codes:
    """The part that each range is: scores, the softmax that follows them inside the same range,
    then the values.
    """
    ranges, strings = attribution.trace.ranges, attribution.trace.strings
    label = of_names(
        ranges.name, strings, lambda name: _PART_OF.get(name.casefold(), NO_PART), np.int8
    )
    rows = np.flatnonzero((label != NO_PART) & ranges.is_nested)
    thread, parent = ranges.thread, attribution.parent
    rows = rows[np.lexsort((ranges.start_ns[rows], parent[rows], thread[rows]))]
    label, thread, parent = label[rows], thread[rows], parent[rows]
    is_sibling = (np.diff(thread, prepend=-1) == 0) & (np.diff(parent, prepend=-2) == 0)
    previous = np.append(np.int8(NO_PART), label)[:-1]
    is_softmax = (label == 1) & (previous == 0) & is_sibling
    is_values = (label == 2) & is_sibling & np.append(False, is_softmax)[:-1]
    is_part = (label == 0) | is_softmax | is_values
    parts = np.full(len(ranges), NO_PART, dtype=np.int8)
    parts[rows[is_part]] = label[is_part]
    return parts


def module_times(kernels: pd.DataFrame, parts: RangeParts) -> tuple[ModuleTimes, ...]:
    """Kernels by module path and phase, the longest first."""
    with_paths = kernels.assign(path=parts.path[kernels["module"]])
    return tuple(totals(with_paths, ModuleTimes, path=parts.names, phase=PHASES.__getitem__))


CLASSES = tuple(KernelClass)


def kernel_classes(names: Ints, strings: Sequence[str]) -> Codes:
    """The class of each kernel, as an index into `CLASSES`."""
    return of_names(names, strings, lambda name: CLASSES.index(classify_kernel(name)), np.int8)


def kernel_times(
    kernels: pd.DataFrame, strings: Sequence[str], *, lost_times: bool
) -> tuple[KernelTimes, ...]:
    """Times of each kernel in the whole step, then in each phase; the longest total first.

    If `lost_times`, a kernel that lasts no time is one whose time the profiler lost: it counts, and
    is in no average.
    """
    if lost_times:
        duration = kernels["duration_ns"]
        kernels = kernels.assign(duration_ns=duration.where(duration > 0))
    rows = list(_kernel_times(kernels, strings, None))
    for phase, in_phase in by_phase(kernels):
        rows += _kernel_times(in_phase, strings, phase)
    return tuple(rows)


def _kernel_times(
    kernels: pd.DataFrame, strings: Sequence[str], phase: LaunchPhase | None
) -> Iterator[KernelTimes]:
    by_name = kernels.groupby("name")["duration_ns"]
    frame = by_name.agg(["count", "sum", "mean", "median", "min", "max", "std"])
    frame = frame.assign(size=by_name.size()).fillna(0)
    rows: Iterable[Any] = frame.sort_values("sum", ascending=False, kind="stable").itertuples()
    for row in rows:
        name = strings[row.Index]
        yield KernelTimes(
            name=name[:MAX_NAME],
            short_name=short_name(name),
            kind=classify_kernel(name),
            phase=phase,
            count=row.size,
            total_s=row.sum / 1e9,
            mean_s=row.mean / 1e9,
            median_s=row.median / 1e9,
            min_s=row.min / 1e9,
            max_s=row.max / 1e9,
            stdev_s=None if row.count < 2 else row.std / 1e9,
        )


def class_times(kernels: pd.DataFrame) -> tuple[ClassTimes, ...]:
    """Times of each class in each phase where it occurs; by phase, the longest first."""
    times = totals(kernels, ClassTimes, phase=PHASES.__getitem__, kind=CLASSES.__getitem__)
    return tuple(sorted(times, key=lambda row: CODES[row.phase]))


# helpers that sum the parts of a matmul or apply its epilogue, and PyTorch's operators that call
# another one
_NO_MATMUL = re.compile(
    r"split_?K_?reduce|execute_split_k_kernel|cutlass::reduction|cublasLt::epilogue"
    r"|^aten::(?:matmul|linear|linear_backward|einsum)$",
    re.IGNORECASE,
)


def is_matmul_itself(name: str) -> bool:
    """Whether the kernel of this name is a matmul itself, not a helper of one."""
    return classify_kernel(name) is KernelClass.MATMUL and _NO_MATMUL.search(name) is None


def attention_times(
    kernels: pd.DataFrame, parts: RangeParts, strings: Sequence[str], config: RunConfig | None
) -> tuple[AttentionTimes, ...]:
    """The parts of attention in forward, with their FLOPs if the run's configuration is known."""
    forward = kernels[kernels["phase"] == CODES[LaunchPhase.FORWARD]]
    part_of = parts.part[forward["module"]]
    scores = forward["module"][part_of == ATTENTION_PARTS.index(AttentionPart.SCORES)]
    num_scores = len(np.unique(parts.part_range[scores]))
    flops = {} if config is None else _flops(config, num_scores)
    is_matmul = of_names(forward["name"].to_numpy(), strings, is_matmul_itself, np.bool_)
    rows = []
    for code, part in enumerate(ATTENTION_PARTS):
        time_ns = forward["duration_ns"][part_of == code]
        if not len(time_ns):
            continue
        matmul_ns = time_ns[is_matmul[part_of == code]]
        row = AttentionTimes(
            part=part,
            phase=LaunchPhase.FORWARD,
            count=len(time_ns),
            total_s=int(time_ns.sum()) / 1e9,
            product_count=len(matmul_ns),
            product_s=int(matmul_ns.sum()) / 1e9,
            flops=flops.get(part),
        )
        rows.append(row)
    return tuple(rows)


def _flops(config: RunConfig, num_scores: int) -> dict[AttentionPart, int]:
    """FLOPs of all passes in the steps; empty if they are not known, as of another model than the
    traced one.

    The number of passes is that of ranges around scores over that of layers.
    """
    passes, rest = divmod(num_scores, config.model.num_layers)
    if rest:
        return {}
    flops = attention_forward_flops(config.model, config.batch_size)
    return {part: passes * flops[part] for part in ATTENTION_PARTS}
