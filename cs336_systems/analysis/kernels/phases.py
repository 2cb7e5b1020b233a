"""Phases and steps of a process over time, from its ranges or else from the threads that launched kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Columns, Ints, Mask, joined
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, Nesting, Ranges, Trace
from cs336_systems.ranges import PhaseNames

Codes = NDArray[np.int8]
"""Phases as indices into `PHASES`."""


class LaunchPhase(StrEnum):
    """The part of a step in which a kernel was launched; each kernel has exactly one."""

    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    """Only where the loss stands beside forward; a `loss` range inside `forward` is part of forward."""
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    """Between backward and the optimizer, where ranks average gradients or wait until that is done."""
    OPTIMIZER = "optimizer"
    UNATTRIBUTED = "unattributed"


PHASES = tuple(LaunchPhase)
CODES = {phase: code for code, phase in enumerate(PHASES)}


class PhaseSource(StrEnum):
    """The evidence for the phases of a process."""

    RANGES = "ranges"
    THREADS = "threads"
    NOTHING = "nothing"


def phase_of_name(names: PhaseNames) -> Mapping[str, LaunchPhase]:
    """The phase for each name of a range around one."""
    return {getattr(names, phase): phase for phase in PHASES if phase is not LaunchPhase.UNATTRIBUTED}


class RangeNameError(ValueError):
    """The file has no range of the name that the caller gave for a phase, or two phases have one name."""


def check_names(trace: Trace, names: PhaseNames) -> None:
    """Raise RangeNameError for a name of two phases, and for one that the caller chose and no range of the trace has.

    Default names need not occur, since a file may have no ranges at all.
    """
    given = [getattr(names, field.name) for field in fields(PhaseNames)]
    if len(set(given)) < len(given):
        raise RangeNameError(f"each phase needs a range name of its own, got {', '.join(given)}")
    there = [trace.strings[name] for name in np.unique(trace.ranges.name)]
    usual = PhaseNames()
    for field in fields(PhaseNames):
        name = getattr(names, field.name)
        if name not in there and name != getattr(usual, field.name):
            found = ", ".join(there[:MAX_LISTED]) + (", ..." if len(there) > MAX_LISTED else "") or "none"
            raise RangeNameError(
                f"no range has the name {name!r} that was given for {field.name}; the names are: {found}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows(Columns):
    """Times of phases on the host. A launch on any thread of the process belongs to the window that contains it."""

    process: Ints
    start_ns: Ints
    end_ns: Ints
    phase: Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(Columns):
    """The steps of all processes, each process in order."""

    process: Ints
    start_ns: Ints
    end_ns: Ints
    is_warmup: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The phases and steps of one process."""

    source: PhaseSource
    windows: Windows
    steps: Steps
    around_steps: Ints
    """Ranges that contain whole phases, and so are not ranges of modules."""
    notes: tuple[str, ...] = ()


MAX_LISTED = 12
"""Most names of ranges that an error lists."""
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
NO_WINDOWS = Windows(process=NO_ROWS, start_ns=NO_ROWS, end_ns=NO_ROWS, phase=np.zeros(0, dtype=np.int8))
NO_STEPS = Steps(process=NO_ROWS, start_ns=NO_ROWS, end_ns=NO_ROWS, is_warmup=np.zeros(0, dtype=np.bool_))


def phase_plan(trace: Trace, process: int, rows: Ints, launched: Ints, names: PhaseNames) -> PhasePlan:
    """Find the phases and steps of a process; `rows` are its ranges and `launched` its kernels with a known launch."""
    ranges = trace.ranges
    of_phase = _named(trace, rows, names.forward, names.backward, names.optimizer)
    if len(of_phase):
        main = ranges.thread[of_phase[ranges.start_ns[of_phase].argmin()]]
        of_main = rows[(ranges.thread[rows] == main) | ~ranges.is_nested[rows]]
        return _plan_from_ranges(trace, process, of_main, names)
    return _plan_from_threads(trace, process, rows[ranges.is_nested[rows]], launched, names)


def _outermost(ranges: Ranges, rows: Ints) -> Ints:
    """The ranges among `rows` that are inside no other, in order of their start."""
    outer = rows[Nesting(ranges.start_ns[rows], ranges.end_ns[rows]).parent < 0]
    return outer[np.argsort(ranges.start_ns[outer], kind="stable")]


def _named(trace: Trace, rows: Ints, *names: str) -> Ints:
    return rows[np.isin(trace.ranges.name[rows], trace.string_ids(*names))]


def _plan_from_ranges(trace: Trace, process: int, rows: Ints, names: PhaseNames) -> PhasePlan:
    """The windows are the outermost phase ranges of the main thread; in a step, the time before forward is data."""
    ranges = trace.ranges
    phases = _outermost(ranges, _named(trace, rows, *phase_of_name(names)))
    codes = {string: CODES[phase] for string, phase in phase_of_name(names).items()}
    label = np.array([codes[trace.strings[name]] for name in ranges.name[phases].tolist()], dtype=np.int8)
    start, end = ranges.start_ns[phases], ranges.end_ns[phases]
    opened_inside = np.searchsorted(start, ranges.end_ns[rows]) - np.searchsorted(start, ranges.start_ns[rows], "right")
    is_forward = label == CODES[LaunchPhase.FORWARD]

    steps = _outermost(ranges, _named(trace, rows, names.step))
    if len(steps):
        step_start, step_end = ranges.start_ns[steps], ranges.end_ns[steps]
        first = np.append(start, MAX_TIME_NS)[np.searchsorted(start, step_start)]
        has_data = first < step_end
        start, end = np.append(start, step_start[has_data]), np.append(end, first[has_data])
        label = np.append(label, np.full(int(has_data.sum()), CODES[LaunchPhase.DATA], dtype=np.int8))
    else:
        step_start, step_end = _steps_between(start, end, is_forward, label == CODES[LaunchPhase.OPTIMIZER])
    return PhasePlan(
        source=PhaseSource.RANGES,
        windows=Windows(process=np.full(len(start), process), start_ns=start, end_ns=end, phase=label),
        steps=_steps(trace, process, rows, names, step_start, step_end),
        around_steps=rows[opened_inside > 0],
    )


def _steps_between(start: Ints, end: Ints, is_forward: Mask, is_optimizer: Mask) -> tuple[Ints, Ints]:
    """Steps from a sequence of phases: a step begins with the first forward after an optimizer.

    Without any optimizer, a step begins with each forward.
    """
    forward = np.flatnonzero(is_forward)
    if is_optimizer.any():
        done = np.cumsum(is_optimizer)[forward]
        forward = forward[np.diff(done, prepend=-1) > 0]
    if not len(forward):
        return NO_ROWS, NO_ROWS
    last = np.append(forward[1:], len(start)) - 1
    return start[forward], np.maximum.accumulate(end)[last]


def _steps(trace: Trace, process: int, rows: Ints, names: PhaseNames, start: Ints, end: Ints) -> Steps:
    """The steps of a process with these times; warm-up are those in its range, and those outside of `measure`."""
    ranges = trace.ranges

    def inside(name: str) -> Mask:
        found = _outermost(ranges, _named(trace, rows, name))
        return Nesting(ranges.start_ns[found], ranges.end_ns[found]).at(start) >= 0

    measured = inside(names.measure)
    is_warmup = inside(names.warmup) | (~measured & measured.any())
    return Steps(process=np.full(len(start), process), start_ns=start, end_ns=end, is_warmup=is_warmup)


def _plan_from_threads(trace: Trace, process: int, rows: Ints, launched: Ints, names: PhaseNames) -> PhasePlan:
    """The windows from the launching threads: backward is what a thread without the model's ranges launched.

    On the main thread, forward lasts from the first of the model's ranges to the last, and loss from there until
    backward begins. After backward comes the optimizer, until a range opens that the first forward opened too.
    """
    ranges, kernels = trace.ranges, trace.kernels
    all_rows = rows
    rows = rows[np.isin(ranges.thread[rows], kernels.thread[launched])]
    if not len(rows):
        return _no_plan(trace, process, all_rows, names, bool(len(launched)))
    main = ranges.thread[rows[ranges.start_ns[rows].argmin()]]
    rows = rows[ranges.thread[rows] == main]
    backward = np.sort(kernels.launch_ns[launched[kernels.thread[launched] != main]])
    # forward has ended when backward begins, so no range of the model spans a launch of backward
    is_around = np.searchsorted(backward, ranges.end_ns[rows]) > np.searchsorted(backward, ranges.start_ns[rows])
    is_around |= np.isin(rows, _named(trace, rows, names.step, names.warmup, names.measure))
    model = rows[~is_around]
    model = model[np.argsort(ranges.start_ns[model], kind="stable")]
    if not len(backward) or not len(model):
        return _no_plan(trace, process, all_rows, names, True)

    # a burst is what backward launched between two of the model's ranges
    opened_before = np.searchsorted(ranges.start_ns[model], backward, side="right")
    first = np.flatnonzero(np.diff(opened_before, prepend=-1))
    burst_start, burst_end = backward[first], backward[np.append(first[1:], len(backward)) - 1] + 1

    gap = np.searchsorted(burst_start, ranges.start_ns[model])  # number of bursts before each of the model's ranges
    is_forward = np.isin(ranges.name[model], np.unique(ranges.name[model[gap == gap[0]]]))
    forward, gap = model[is_forward], gap[is_forward]
    gap, first = np.unique(gap, return_index=True)
    start, end = ranges.start_ns[forward[first]], np.maximum.reduceat(ranges.end_ns[forward], first)

    has_backward = gap < len(burst_start)
    next_start = np.append(start, MAX_TIME_NS)[np.searchsorted(start, burst_end)]
    windows = {
        LaunchPhase.FORWARD: (start, end),
        LaunchPhase.LOSS: (end[has_backward], burst_start[gap[has_backward]]),
        LaunchPhase.BACKWARD: (burst_start, burst_end),
        LaunchPhase.OPTIMIZER: (burst_end, next_start),
    }
    parts = [
        Windows(process=np.full(len(begun), process), start_ns=begun, end_ns=ended,
                phase=np.full(len(begun), CODES[phase], dtype=np.int8))
        for phase, (begun, ended) in windows.items()
    ]  # fmt: skip
    return PhasePlan(
        source=PhaseSource.THREADS,
        windows=joined(NO_WINDOWS, *parts),
        steps=_steps(trace, process, rows, names, start, np.append(start[1:], MAX_TIME_NS)),
        around_steps=rows[is_around],
        notes=(
            f"Process {process} has no range named {names.forward}, {names.backward} or {names.optimizer}. So backward "
            "is what other threads than the main one launched, forward the main thread's ranges before it, loss what "
            "lies between (with the fill that starts backward), optimizer the rest until the next forward (with "
            "zero_grad and the making of the next batch).",
        ),
    )


def _no_plan(trace: Trace, process: int, rows: Ints, names: PhaseNames, has_kernels: bool) -> PhasePlan:
    """A plan without phases, with steps if these have ranges, as around a CUDA graph of a whole step."""
    ranges = trace.ranges
    steps = _outermost(ranges, _named(trace, rows, names.step))
    note = (
        f"The phases of process {process} are unknown: no range is named {names.forward}, {names.backward} or "
        f"{names.optimizer}, and no thread has ranges while another one launches backward. "
        "Give the names of the ranges around the phases, or record with such ranges."
    )
    return PhasePlan(
        source=PhaseSource.NOTHING,
        windows=NO_WINDOWS,
        steps=_steps(trace, process, rows, names, ranges.start_ns[steps], ranges.end_ns[steps]),
        around_steps=_named(trace, rows, names.warmup, names.measure),
        notes=(note,) if has_kernels else (),
    )
