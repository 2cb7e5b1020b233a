"""Phases and steps over time, from the ranges of the program or of PyTorch."""

from dataclasses import dataclass

import numpy as np

from ..columns import NO_ROWS, Columns, Ints, Mask, chosen, joined
from .phase_ranges import PhaseRanges
from .phases import CODES, Codes, LaunchPhase, PhaseSource
from .trace import MAX_TIME_NS, GroupNesting, Nesting, Ranges, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWindows(Columns):
    """Times of phases on the host. A launch on any thread belongs to the window that contains
    it.
    """

    start_ns: Ints
    end_ns: Ints
    phase: Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes(Columns):
    """The steps in order, on the host."""

    start_ns: Ints
    end_ns: Ints
    is_warmup: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The phases and steps of a trace."""

    source: PhaseSource
    windows: PhaseWindows
    steps: StepTimes
    around_steps: Ints
    """Ranges that contain whole phases, and so are not ranges of modules."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedWindows(PhaseWindows):
    """Windows of which is known which are around `zero_grad` only."""

    is_zero_grad: Mask


def windows_of(phase: LaunchPhase, start_ns: Ints, end_ns: Ints) -> MarkedWindows:
    """Windows of one phase, none around `zero_grad`."""
    return MarkedWindows(
        start_ns=start_ns,
        end_ns=end_ns,
        phase=np.full(len(start_ns), CODES[phase], dtype=np.int8),
        is_zero_grad=np.zeros(len(start_ns), dtype=np.bool_),
    )


def ordered(windows: MarkedWindows) -> MarkedWindows:
    """The windows in order of their start."""
    return chosen(windows, np.argsort(windows.start_ns, kind="stable"))


def plan_from_ranges(trace: Trace, names: PhaseRanges) -> PhasePlan | None:
    """The phases where a range is of forward, backward or the optimizer; None where none is.

    The windows are the outermost phase ranges of the main thread; in a step, the time before
    forward is data. PyTorch's own ranges are the optimizer, and beside them, or with nodes of
    autograd in the file, autograd's launches are backward, where the program has no range of it.
    """
    ranges = trace.ranges
    telling = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER)
    rows = rows_named(trace, *(names.phases[phase] for phase in telling))
    if not len(rows):
        return None
    main = int(ranges.thread[rows[ranges.start_ns[rows].argmin()]])
    is_main = (ranges.thread == main) | ~ranges.is_nested
    windows = _range_windows(trace, names, is_main)
    is_around = _num_starts_within(windows, ranges) > 0
    is_backward = windows.phase == CODES[LaunchPhase.BACKWARD]
    if (len(names.of_torch) or len(trace.nodes)) and not is_backward.any():
        start, end = backward_bursts(trace, main)
        is_apart = np.searchsorted(windows.start_ns, start, "right") == np.searchsorted(
            windows.end_ns, start, "right"
        )
        backward = windows_of(LaunchPhase.BACKWARD, start[is_apart], end[is_apart])
        windows = ordered(joined(windows, backward))
    steps = rows_named(trace, names.step)
    steps = outermost(ranges, steps[is_main[steps]])
    if len(steps):
        start, end = ranges.start_ns[steps], ranges.end_ns[steps]
        first = np.append(windows.start_ns, MAX_TIME_NS)[np.searchsorted(windows.start_ns, start)]
        has_data = first < end
        data = windows_of(LaunchPhase.DATA, start[has_data], first[has_data])
        windows = joined(windows, data)
    else:
        start, end = _steps_between(windows)
    return PhasePlan(
        source=PhaseSource.RANGES,
        windows=windows,
        steps=step_times(trace, names, start, end),
        around_steps=np.flatnonzero(is_main & is_around),
    )


def _range_windows(trace: Trace, names: PhaseRanges, is_main: Mask) -> MarkedWindows:
    """The outermost ranges of phases among the chosen ranges, in order."""
    ranges = trace.ranges
    code_of = np.full(len(trace.strings), -1, dtype=np.int8)
    for phase, of_phase in names.phases.items():
        code_of[of_phase] = CODES[phase]
    code_of[names.of_torch] = CODES[LaunchPhase.OPTIMIZER]
    rows = outermost(ranges, np.flatnonzero((code_of[ranges.name] >= 0) & is_main))
    return MarkedWindows(
        start_ns=ranges.start_ns[rows],
        end_ns=ranges.end_ns[rows],
        phase=code_of[ranges.name[rows]],
        is_zero_grad=np.isin(ranges.name[rows], names.zero_grad),
    )


def _num_starts_within(windows: PhaseWindows, ranges: Ranges) -> Ints:
    """How many windows begin within each range, after its own beginning."""
    until_end = np.searchsorted(windows.start_ns, ranges.end_ns)
    return until_end - np.searchsorted(windows.start_ns, ranges.start_ns, "right")


def rows_named(trace: Trace, *names: Ints) -> Ints:
    """The ranges that have one of the names."""
    return np.flatnonzero(np.isin(trace.ranges.name, np.concatenate(names)))


def outermost(ranges: Ranges, rows: Ints) -> Ints:
    """The ranges among `rows` that are inside no other, in order of their start."""
    outer = rows[Nesting(ranges.start_ns[rows], ranges.end_ns[rows]).parent < 0]
    return outer[np.argsort(ranges.start_ns[outer], kind="stable")]


def backward_bursts(trace: Trace, main: int) -> tuple[Ints, Ints]:
    """Start and end of each backward: its launches between two of the thread `main`."""
    launched = np.flatnonzero(trace.kernels.is_launched)
    is_backward = _is_backward(trace, launched, main)
    is_kept = is_backward | (trace.kernels.thread[launched] == main)
    time, is_backward = trace.kernels.launch_ns[launched[is_kept]], is_backward[is_kept]
    order = np.argsort(time, kind="stable")
    change = np.diff(is_backward[order].astype(np.int8), prepend=0, append=0)
    time = time[order]
    return time[change[:-1] > 0], time[change[1:] < 0] + 1


def _is_backward(trace: Trace, launched: Ints, main: int) -> Mask:
    """Whether backward launched each kernel: a node of autograd did, or else any thread but the
    main one.
    """
    nodes = trace.nodes
    thread, time = trace.kernels.thread[launched], trace.kernels.launch_ns[launched]
    is_of_other: Mask = thread != main
    if not len(nodes) and not trace.has_operators:
        return is_of_other
    inside = GroupNesting(nodes.thread, nodes.start_ns, nodes.end_ns).at(thread, time) >= 0
    return inside | (is_of_other & np.isin(thread, nodes.thread))


def _steps_between(windows: MarkedWindows) -> tuple[Ints, Ints]:
    """Start and end of steps in a sequence of phases: a step begins with the first forward after
    an optimizer, or with a `zero_grad` just before that forward.

    Without any optimizer, each forward begins a step.
    """
    is_zero_grad = windows.is_zero_grad
    is_optimizer = (windows.phase == CODES[LaunchPhase.OPTIMIZER]) & ~is_zero_grad
    forward = np.flatnonzero(windows.phase == CODES[LaunchPhase.FORWARD])
    if is_optimizer.any():
        num_before = np.cumsum(is_optimizer)[forward]
        forward = forward[np.diff(num_before, prepend=-1) > 0]
    if not len(forward):
        return NO_ROWS, NO_ROWS
    first = forward - (is_zero_grad[forward - 1] & (forward > 0))
    last = np.append(first[1:], len(windows)) - 1
    return windows.start_ns[first], np.maximum.accumulate(windows.end_ns)[last]


def step_times(trace: Trace, names: PhaseRanges, start_ns: Ints, end_ns: Ints) -> StepTimes:
    """The steps with these times; warm-up are those in its range, and those outside of `measure`.

    Without any step, each range `measure` counts as one.
    """
    ranges = trace.ranges

    def is_inside(around: Ints) -> Mask:
        rows = outermost(ranges, rows_named(trace, around))
        return Nesting(ranges.start_ns[rows], ranges.end_ns[rows]).at(start_ns) >= 0

    if not len(start_ns):
        measures = outermost(ranges, rows_named(trace, names.measure))
        start_ns, end_ns = ranges.start_ns[measures], ranges.end_ns[measures]
    is_measured = is_inside(names.measure)
    is_warmup = is_inside(names.warmup) | (~is_measured & is_measured.any())
    return StepTimes(start_ns=start_ns, end_ns=end_ns, is_warmup=is_warmup)
