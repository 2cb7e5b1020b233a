"""The kernels of a step beside what the step's tape says that they compute and move.

A tape has a step's operations in the order of their launches. Matmuls and fused attention are known
by their kernels' names, so that the i-th of a phase on the device is the i-th of that phase on the
tape, also where a CUDA graph hides which operator launched it. What lies between two of them, such
as norms, activations and casts, is taken together: the kernels that ran there, and the bytes that
the tape's operations there move.

Kernels of several streams may run at once. Each moment of the device counts once: for a kernel that
computes before one that communicates, and for the one that began first of those that are alike.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...costs.tape import MATMULS_OF, Form, Operation
from ..columns import Ints, Mask
from .attribution import by_phase
from .classes import KernelClass, classify_kernel
from .modules import is_matmul_itself
from .phases import LaunchPhase
from .short_names import short_name
from .step_profile import LedgerTimes, Part
from .trace import Union

_LAYOUT = re.compile(r"^nvjet_\w*_(TN|NN|NT)[NT]$")
"""How names of cuBLAS's kernels for Hopper end: which factors, and the result, are transposed."""
_FORMS = {"TN": Form.FORWARD, "NN": Form.INPUT, "NT": Form.WEIGHT}
WINDOW = 3
"""Among so many matmuls of the tape the next one on the device is looked for: the compiler swaps
the gradients of a layer's input and weight.
"""


class _Row(NamedTuple):
    """What rows of the ledger differ in."""

    phase: LaunchPhase
    part: Part
    names: tuple[str, ...]
    form: Form | None = None
    sides: tuple[int, int, int] = (0, 0, 0)
    batch: int = 1
    element_bytes: int | None = None
    bytes: int | None = None


@dataclass(slots=True)
class _Kernels:
    """Kernels that follow each other on the device: those of one matmul, or what lies between."""

    part: Part
    form: Form | None = None
    """Of a matmul whose name tells it."""
    names: dict[str, None] = field(default_factory=dict)
    count: int = 0
    time_ns: int = 0
    counted_ns: int = 0
    """The part of `time_ns` that counts for these kernels."""

    def add(self, name: str, time_ns: int, counted_ns: int) -> None:
        """Take one more kernel."""
        self.names[name] = None
        self.count += 1
        self.time_ns += time_ns
        self.counted_ns += counted_ns


@dataclass(slots=True)
class _Sums:
    """Sums of one row of the ledger."""

    calls: int = 0
    count: int = 0
    time_ns: int = 0
    counted_ns: int = 0

    def add(self, kernels: _Kernels) -> None:
        """Add kernels that ran one after the other."""
        self.calls += 1
        self.count += kernels.count
        self.time_ns += kernels.time_ns
        self.counted_ns += kernels.counted_ns


def ledger_times(
    kernels: pd.DataFrame, strings: Sequence[str], operations: Mapping[str, Sequence[Operation]]
) -> tuple[LedgerTimes, ...]:
    """All `kernels` of the steps by what they do, the longest first.

    `operations` are those of one step by phase. In a phase whose matmuls and attention are others
    on the device than on the tape, kernels stand by their names alone.
    """
    kernels = kernels.assign(counted_ns=_counted_ns(kernels, strings))
    sums: defaultdict[_Row, _Sums] = defaultdict(_Sums)
    for phase, in_phase in by_phase(kernels):
        known = operations.get(phase.value, ())
        for _, of_step in in_phase.groupby("step"):
            for row, found in _rows_of_step(phase, of_step, strings, known):
                sums[row].add(found)
    ordered = sorted(sums.items(), key=lambda item: -item[1].time_ns)
    return tuple(_ledger_times(row, total) for row, total in ordered)


def _counted_ns(kernels: pd.DataFrame, strings: Sequence[str]) -> Ints:
    """How much of each kernel's time counts for it."""
    start = kernels["start_ns"].to_numpy(dtype=np.int64)
    end = start + kernels["duration_ns"].to_numpy(dtype=np.int64)
    names = kernels["name"].to_numpy()
    present = np.unique(names).tolist()
    sends = [name for name in present if _part_of(strings[name]) is Part.COMMUNICATION]
    is_sent = np.isin(names, sends)
    counted = _first_alone(start, end, ~is_sent)
    sent = _first_alone(start, end, is_sent)
    computing = Union(start[~is_sent], end[~is_sent])
    hidden = computing.within(end - sent, end)
    return np.where(is_sent, sent - hidden, counted)


def _first_alone(start: Ints, end: Ints, chosen: Mask) -> Ints:
    """For each of the chosen intervals, the length of its end that none of those covers which began
    before it; 0 for all others.
    """
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(start[rows], kind="stable")]
    reached = np.maximum.accumulate(end[rows])
    since = np.maximum(start[rows], np.append(start[rows][:1], reached[:-1]))
    alone = np.zeros(len(start), dtype=np.int64)
    alone[rows] = np.maximum(end[rows] - since, 0)
    return alone


def _ledger_times(row: _Row, total: _Sums) -> LedgerTimes:
    """A row with its sums."""
    calls = total.calls
    return LedgerTimes(
        phase=row.phase,
        part=row.part,
        names=row.names,
        form=row.form,
        sides=row.sides,
        batch=row.batch,
        element_bytes=row.element_bytes,
        calls=calls,
        count=total.count,
        total_s=total.time_ns / 1e9,
        beside_others_s=(total.time_ns - total.counted_ns) / 1e9,
        flops=None if row.form is None else calls * _flops(row),
        bytes=None if row.bytes is None else calls * row.bytes,
    )


def _flops(row: _Row) -> int:
    """FLOPs of one call; of causal attention only those of pairs that its mask leaves."""
    rows, inner, columns = row.sides
    multiplications = row.batch * rows * inner * columns
    if row.form not in MATMULS_OF:
        return 2 * multiplications
    # two FLOPs for each pair, half of which are left
    return MATMULS_OF[row.form] * multiplications * (columns + 1) // columns


def _rows_of_step(
    phase: LaunchPhase, kernels: pd.DataFrame, strings: Sequence[str], known: Sequence[Operation]
) -> Iterator[tuple[_Row, _Kernels]]:
    """The rows of one phase of one step, each with kernels that follow each other."""
    seen = _on_device(kernels, strings)
    expected = _on_tape(known)
    kinds_seen = [_kind(part) for part in seen if _is_anchor(part)]
    kinds_known = [_kind_of(operation) for operation, _ in expected if operation is not None]
    if not known or kinds_seen != kinds_known:
        for part in seen:
            yield _Row(phase, part.part, tuple(part.names)), part
        return
    left = [pair for pair in expected if pair[0] is not None]
    moved_bytes = expected[0][1]
    for part in seen:
        if part.part is Part.COMMUNICATION:
            yield _Row(phase, part.part, tuple(part.names)), part
        elif not _is_anchor(part):
            yield _Row(phase, part.part, tuple(part.names), bytes=moved_bytes), part
            moved_bytes = 0
        else:
            operation, moved_bytes = left.pop(_next(part, left))
            yield _of_operation(phase, part, operation), part


def _of_operation(phase: LaunchPhase, part: _Kernels, operation: Operation | None) -> _Row:
    """The row of a matmul or of fused attention."""
    assert operation is not None
    return _Row(
        phase,
        part.part,
        tuple(part.names),
        operation.form,
        operation.sides,
        operation.batch,
        operation.element_bytes,
        operation.moved_bytes,
    )


def _is_anchor(part: _Kernels) -> bool:
    return part.part in (Part.MATMUL, Part.ATTENTION)


def _kind(part: _Kernels) -> bool:
    return part.part is Part.ATTENTION


def _kind_of(operation: Operation) -> bool:
    return operation.form in MATMULS_OF


def _next(part: _Kernels, left: Sequence[tuple[Operation | None, int]]) -> int:
    """Which of the operations that are `left` these kernels are: the first of the next few whose
    form the name tells, else the first.
    """
    if part.form is None:
        return 0
    for place, (operation, _) in enumerate(left[:WINDOW]):
        assert operation is not None
        if operation.form in MATMULS_OF or operation.element_bytes == 1:
            break  # in fp8 all factors are laid out as in forward
        if operation.form is part.form:
            return place
    return 0


def _on_tape(known: Sequence[Operation]) -> list[tuple[Operation | None, int]]:
    """Each matmul and attention with the bytes that are moved between it and the next one; first
    those before all, with None.
    """
    pairs: list[tuple[Operation | None, int]] = [(None, 0)]
    for operation in known:
        if operation.is_matmul:
            pairs.append((operation, 0))
            continue
        before, moved_bytes = pairs[-1]
        pairs[-1] = before, moved_bytes + operation.launches * operation.moved_bytes
    return pairs


def _on_device(kernels: pd.DataFrame, strings: Sequence[str]) -> list[_Kernels]:
    """The kernels in the order in which they began, cut before and after each matmul and
    attention; a helper of a matmul belongs to the matmul before it.
    """
    parts: list[_Kernels] = []
    anchor: _Kernels | None = None
    ordered = kernels.sort_values("start_ns", kind="stable")
    columns = ("name", "duration_ns", "counted_ns")
    rows: Any = zip(*(ordered[column].tolist() for column in columns), strict=True)
    for number, *times_ns in rows:
        name = strings[number]
        part = _part_of(name)
        if part is Part.MATMUL and not is_matmul_itself(name) and anchor is not None:
            anchor.add(short_name(name), *times_ns)
            continue
        if part is Part.ATTENTION and anchor is not None and anchor.part is part:
            # its kernels have others between them, such as fills
            anchor.add(short_name(name), *times_ns)
            continue
        if part in (Part.MATMUL, Part.ATTENTION):
            layout = _LAYOUT.search(name)
            form = None if layout is None else _FORMS[layout[1]]
            anchor = _Kernels(part, form)
            parts.append(anchor)
        elif not parts or parts[-1].part is not part:
            parts.append(_Kernels(part))
        parts[-1].add(short_name(name), *times_ns)
    return parts


def _part_of(name: str) -> Part:
    """What a kernel of this name is in the ledger."""
    match classify_kernel(name):
        case KernelClass.MATMUL:
            return Part.MATMUL
        case KernelClass.ATTENTION:
            return Part.ATTENTION
        case KernelClass.COMMUNICATION:
            return Part.COMMUNICATION
    return Part.BETWEEN
