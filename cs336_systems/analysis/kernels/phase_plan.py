"""Phases over time, each from something in the file that shows it.

A range shows a phase by its name. Without ranges of backward, the nodes of autograd show it, or, in
a file of training without operators, that another thread launches than the program's own.
Without ranges of the optimizer, its kernels show it. Without ranges of forward, it is the time of a
step before backward; a step of a file that would show backward, and does not, is forward alone.
What nothing shows is in no phase.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from ..columns import NO_ROWS, Ints, Mask, chosen, joined, runs
from .calls import TO_DEVICE, ApiCallKind
from .classes import OF_BACKWARD, OF_OPTIMIZER, OF_TRAINING, KernelClass, classify_kernel
from .phase_ranges import PhaseRanges
from .phases import CODES, Codes, LaunchPhase
from .trace import MAX_TIME_NS, DeviceWork, Holes, Nesting, Ranges, Times, Trace

COMPUTING = (KernelClass.MATMUL, KernelClass.CONVOLUTION, KernelClass.ATTENTION)
_FILL = re.compile(r"fill|zero|memset", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWindows(Times):
    """Times of phases on the host. A launch on any thread belongs to the innermost window that
    contains it.
    """

    phase: Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedWindows(PhaseWindows):
    """Windows of which is known which are around `zero_grad` only, and which are one module's part
    of a pass.
    """

    is_zero_grad: Mask
    is_piece: Mask

    def among(self, phase: LaunchPhase) -> Mask:
        """Whether each window is of the phase."""
        is_among: Mask = self.phase == CODES[phase]
        return is_among

    @property
    def is_update(self) -> Mask:
        """Whether each window is one of the optimizer that is not around `zero_grad` only."""
        return self.among(LaunchPhase.OPTIMIZER) & ~self.is_zero_grad


def windows_of(phase: LaunchPhase, start_ns: Ints, end_ns: Ints) -> MarkedWindows:
    """Windows of one phase, none around `zero_grad` and none a part of a pass."""
    nothing = np.zeros(len(start_ns), dtype=np.bool_)
    return MarkedWindows(
        start_ns=start_ns,
        end_ns=end_ns,
        phase=np.full(len(start_ns), CODES[phase], dtype=np.int8),
        is_zero_grad=nothing,
        is_piece=nothing,
    )


def _ordered(windows: MarkedWindows) -> MarkedWindows:
    """The windows in order of their start; of two with one start, the longer first."""
    return chosen(windows, np.lexsort((-windows.end_ns, windows.start_ns)))


def rows_named(trace: Trace, *names: Ints) -> Ints:
    """The ranges that have one of the names."""
    return np.flatnonzero(np.isin(trace.ranges.name, np.concatenate(names)))


def outermost(ranges: Ranges, rows: Ints) -> Ints:
    """The ranges among `rows` that are inside no other, in order of their start."""
    outer = rows[Nesting(ranges.start_ns[rows], ranges.end_ns[rows]).parent < 0]
    return outer[np.argsort(ranges.start_ns[outer], kind="stable")]


def main_thread(trace: Trace, names: PhaseRanges) -> int | None:
    """The thread of the program: that of its first phase, else of its first step or optimizer, else
    of the first range whose thread launches; without ranges, the one that launches an optimizer's
    kernels, or the only one that launches none of backward. None if nothing tells it.
    """
    ranges = trace.ranges
    telling = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER)
    rows = rows_named(trace, *(names.phases[phase] for phase in telling))
    if not len(rows):
        rows = rows_named(trace, names.step, names.of_torch)
    if not len(rows):
        launching = trace.kernels.thread[trace.kernels.is_launched]
        rows = np.flatnonzero(ranges.is_nested & np.isin(ranges.thread, launching))
    if not len(rows):
        return _main_by_kernels(trace)
    return int(ranges.thread[rows[ranges.start_ns[rows].argmin()]])


def _main_by_kernels(trace: Trace) -> int | None:
    """The thread that launches an optimizer's kernels, else the only one that launches outside of
    autograd's nodes, or, of two or more, no kernel of backward; None if nothing tells it.
    """
    kernels = launched_alone(trace)
    of_optimizer = kernels.thread[trace.named(kernels, OF_OPTIMIZER.search)]
    if len(np.unique(of_optimizer)) == 1:
        return int(of_optimizer[0])
    if len(trace.nodes):
        within = trace.nodes.by_thread().at(kernels.thread, kernels.launch_ns)
        outside = np.unique(kernels.thread[within < 0])
        return int(outside[0]) if len(outside) == 1 else None
    of_backward = kernels.thread[trace.named(kernels, OF_BACKWARD.search)]
    others = np.setdiff1d(kernels.thread, of_backward)
    return int(others[0]) if len(of_backward) and len(others) == 1 else None


def launched_alone(trace: Trace) -> DeviceWork:
    """The kernels that calls of their own launched: a graph may be of a whole step, so its kernels
    tell nothing of the thread that launches it.
    """
    return chosen(trace.kernels, trace.kernels.is_launched & ~trace.kernels.is_in_graph)


def marked_windows(trace: Trace, names: PhaseRanges, main: int) -> MarkedWindows:
    """The windows that ranges, autograd or an optimizer's kernels show, in order."""
    windows = _range_windows(trace, names, main)
    is_optimizer = windows.among(LaunchPhase.OPTIMIZER)
    has_backward = windows.among(LaunchPhase.BACKWARD).any()
    if is_optimizer.any() or not has_backward:
        is_training = bool(is_optimizer.any()) or has_kernels_of_training(trace)
        if has_backward:
            # beside ranges of backward, a thread alone does not show that a closure runs it
            is_training = bool(trace.named(trace.kernels, OF_BACKWARD.search).any())
        start, end = backward_bursts(trace, main, is_training=is_training)
        # a closure runs backward within the optimizer's range; elsewhere ranges decide
        is_shown = chosen(windows, ~is_optimizer).cover(start)
        if has_backward:
            is_shown |= ~chosen(windows, is_optimizer).cover(start)
        backward = windows_of(LaunchPhase.BACKWARD, start[~is_shown], end[~is_shown])
        windows = _ordered(joined(windows, backward))
    windows = _without_closures(windows)
    if not windows.among(LaunchPhase.OPTIMIZER).any():
        windows = _ordered(joined(windows, _optimizers_by_kernels(trace, windows, main)))
    return windows


def _range_windows(trace: Trace, names: PhaseRanges, main: int) -> MarkedWindows:
    """The outermost ranges of phases on the main thread, or on none, in order; and forward and
    backward within a range of the optimizer.
    """
    ranges = trace.ranges
    code_of = np.full(len(trace.strings), -1, dtype=np.int8)
    code_of[names.of_torch] = CODES[LaunchPhase.OPTIMIZER]
    for phase, of_phase in names.phases.items():
        code_of[of_phase] = CODES[phase]
    is_main = (ranges.thread == main) | ~ranges.is_nested
    rows = np.flatnonzero((code_of[ranges.name] >= 0) & is_main)
    is_optimizer = code_of[ranges.name[rows]] == CODES[LaunchPhase.OPTIMIZER]
    kept = np.append(outermost(ranges, rows[is_optimizer]), outermost(ranges, rows[~is_optimizer]))
    rows = kept[_is_outside_others(ranges, kept, code_of)]
    windows = MarkedWindows(
        start_ns=ranges.start_ns[rows],
        end_ns=ranges.end_ns[rows],
        phase=code_of[ranges.name[rows]],
        is_zero_grad=np.isin(ranges.name[rows], names.zero_grad),
        is_piece=np.isin(ranges.name[rows], names.pieces),
    )
    return _ordered(windows)


def _is_outside_others(ranges: Ranges, rows: Ints, code_of: Codes) -> Mask:
    """Whether each of these ranges is in no other, or only in one of the optimizer."""
    parent = Nesting(ranges.start_ns[rows], ranges.end_ns[rows]).parent
    around = np.append(code_of[ranges.name[rows]], np.int8(CODES[LaunchPhase.OPTIMIZER]))[parent]
    is_outside: Mask = around == CODES[LaunchPhase.OPTIMIZER]
    return is_outside


def _without_closures(windows: MarkedWindows) -> MarkedWindows:
    """The windows, where the optimizer's begin only after the last backward within them: before it,
    a closure made the gradients.
    """
    is_optimizer = windows.among(LaunchPhase.OPTIMIZER)
    is_backward = windows.among(LaunchPhase.BACKWARD)
    start, end = windows.start_ns[is_backward], windows.end_ns[is_backward]
    last = np.append(np.maximum.accumulate(end), 0)[np.searchsorted(start, windows.end_ns) - 1]
    begins = np.where(is_optimizer & (last > windows.start_ns), last, windows.start_ns)
    return _ordered(replace(windows, start_ns=np.minimum(begins, windows.end_ns)))


def backward_bursts(trace: Trace, main: int, *, is_training: bool) -> tuple[Ints, Ints]:
    """Start and end of each backward: its launches between two of the thread `main`."""
    launched = np.flatnonzero(trace.kernels.is_launched)
    is_backward = _is_backward(trace, launched, main, is_training=is_training)
    is_kept = is_backward | (trace.kernels.thread[launched] == main)
    time, is_backward = trace.kernels.launch_ns[launched[is_kept]], is_backward[is_kept]
    order = np.argsort(time, kind="stable")
    change = np.diff(is_backward[order].astype(np.int8), prepend=0, append=0)
    time = time[order]
    return time[change[:-1] > 0], time[change[1:] < 0] + 1


def _is_backward(trace: Trace, launched: Ints, main: int, *, is_training: bool) -> Mask:
    """Whether backward launched each kernel: a node of autograd did, or, in a file of training
    without operators, another thread than the main one.
    """
    nodes, kernels = trace.nodes, trace.kernels
    thread, time = kernels.thread[launched], kernels.launch_ns[launched]
    is_of_other: Mask = thread != main
    if len(nodes) or trace.has_operators:
        inside = nodes.by_thread().at(thread, time) >= 0
        return inside | (is_of_other & np.isin(thread, nodes.thread))
    return np.isin(thread, _backward_threads(trace, main)) & is_training


def _backward_threads(trace: Trace, main: int) -> Ints:
    """The threads but the main one that launch kernels of backward; where none does by name, the
    other thread if there is only one, and it computes: a thread that makes batches moves values.
    """
    kernels = launched_alone(trace)
    others = np.setdiff1d(kernels.thread, [main])
    telling = kernels.thread[trace.named(kernels, OF_BACKWARD.search)]
    of_backward = np.intersect1d(others, telling)
    if len(of_backward) or len(others) > 1:
        return of_backward
    is_computing = trace.named(kernels, lambda name: classify_kernel(name) in COMPUTING)
    return np.intersect1d(others, kernels.thread[is_computing])


def has_kernels_of_training(trace: Trace) -> bool:
    """Whether a kernel of the file is one that only training runs."""
    return bool(trace.named(trace.kernels, OF_TRAINING.search).any())


def _optimizers_by_kernels(trace: Trace, windows: MarkedWindows, main: int) -> MarkedWindows:
    """After each backward, the time from the first to the last launch of an optimizer's kernel by
    the main thread.
    """
    kernels = launched_alone(trace)
    is_telling = (kernels.thread == main) & trace.named(kernels, OF_OPTIMIZER.search)
    kernels = chosen(kernels, is_telling & ~windows.cover(kernels.launch_ns))
    kernels = chosen(kernels, np.argsort(kernels.launch_ns, kind="stable"))
    # the number of windows before a launch tells which of them lie between the same two
    num_before = np.searchsorted(windows.start_ns, kernels.launch_ns, side="right")
    is_backward = np.append(windows.among(LaunchPhase.BACKWARD), False)[num_before - 1]
    is_after = is_backward & (num_before > 0)
    kernels = chosen(kernels, is_after)
    first, last = runs(num_before[is_after])
    returned = _returned(trace, kernels)
    return windows_of(LaunchPhase.OPTIMIZER, kernels.launch_ns[first], returned[last])


def _returned(trace: Trace, kernels: DeviceWork) -> Ints:
    """When the call that launched each of these kernels returned; without a call, just after the
    launch.
    """
    ends: Ints = np.append(trace.api_calls.end_ns, 0)[kernels.call]
    return np.maximum(ends, kernels.launch_ns + 1)


def shows_no_training(trace: Trace, names: PhaseRanges) -> bool:
    """Whether the file would show backward and an optimizer, and does not.

    It would if it has the host's operators or torch.profiler's steps, since PyTorch puts ranges
    around each optimizer. One thread launches all kernels, as autograd would on a thread of its
    own.
    """
    kernels = trace.kernels
    would_show = trace.has_operators or names.is_of_torch
    threads = np.unique(kernels.thread[kernels.is_launched])
    is_seen = len(names.of_torch) > 0 or len(trace.nodes) > 0 or has_kernels_of_training(trace)
    return would_show and not is_seen and len(threads) < 2


def with_forward(
    trace: Trace,
    windows: MarkedWindows,
    bounds: tuple[Ints, Ints],
    main: int,
    around: Ints,
    *,
    is_inference: bool,
) -> MarkedWindows:
    """The windows but those of no phase, and, in each step between the `bounds`, forward: what is
    in no window before the last backward, or in the whole step if it is one of inference.

    Forward begins with the first event, a launch or range of the main thread that is not one of the
    ranges `around`: what the host did before is not seen. It begins after the last launch of
    kernels that clip, unscale or update, which belong to the step before; and after the batch was
    taken, which copies to the device show too.
    """
    start_ns, end_ns = bounds
    events, updates = main_events(trace, main, around), update_launches(trace, main)
    is_backward = windows.among(LaunchPhase.BACKWARD)
    backward = windows.start_ns[is_backward]
    before = np.searchsorted(backward, end_ns)
    last = np.append(-1, backward)[before]
    until = np.where(last >= start_ns, last, end_ns if is_inference else start_ns)
    holes = windows.union().holes(start_ns, np.maximum(until, start_ns))
    last_update = np.append(updates, -MAX_TIME_NS)[np.searchsorted(updates, holes.end_ns) - 1]
    since = np.maximum(holes.start_ns, last_update + 1)
    since = np.maximum(since, _taken(windows, holes, events, batches(trace, main)))
    begins = np.append(events, MAX_TIME_NS)[np.searchsorted(events, since)]
    last_event = np.append(events, 0)[np.searchsorted(events, holes.end_ns) - 1]
    # before backward, forward lasts until it; in a step of inference nothing else ends it
    is_before = np.isin(holes.end_ns, backward)
    ends = np.where(is_before, holes.end_ns, np.minimum(last_event + 1, holes.end_ns))
    has_events = begins < holes.end_ns
    forward = windows_of(LaunchPhase.FORWARD, begins[has_events], ends[has_events])
    return _ordered(joined(chosen(windows, ~windows.among(LaunchPhase.UNATTRIBUTED)), forward))


def _taken(windows: MarkedWindows, holes: Holes, events: Ints, batches: Ints) -> Ints:
    """When the batch of the backward that follows each hole was taken, with events behind it; long
    ago where nothing shows that. What came before, such as a schedule or a log, is not forward.

    It was taken in the last range of data, and copied by the first of the sorted `batches` since
    the last backward or update. A later one may be a part of forward.
    """
    is_backward = windows.among(LaunchPhase.BACKWARD)
    backward = np.append(windows.start_ns[is_backward], MAX_TIME_NS)
    until = backward[np.searchsorted(backward, holes.end_ns)]
    is_data = windows.among(LaunchPhase.DATA)
    last = np.searchsorted(windows.start_ns[is_data], until) - 1
    of_range = np.append(windows.end_ns[is_data], -MAX_TIME_NS)[last]
    of_range[np.append(windows.start_ns[is_data], -MAX_TIME_NS)[last] < holes.end_ns] = -MAX_TIME_NS
    is_end = is_backward | windows.is_update
    ended = np.append(-MAX_TIME_NS, np.maximum.accumulate(windows.end_ns[is_end]))
    ended = ended[np.searchsorted(windows.start_ns[is_end], holes.end_ns)]
    copied = np.append(batches, MAX_TIME_NS)[np.searchsorted(batches, ended)]
    copied[(copied >= until) | (until == MAX_TIME_NS)] = -MAX_TIME_NS
    taken = np.maximum(of_range, copied)
    num_behind = np.searchsorted(events, until) - np.searchsorted(events, taken)
    return np.where(num_behind > 0, taken, -MAX_TIME_NS)


def main_events(trace: Trace, main: int, without: Ints) -> Ints:
    """When the main thread launched kernels, but for fills (as of zero_grad), and began ranges, but
    for the ranges `without`, in order.
    """
    kernels, ranges = trace.kernels, trace.ranges
    is_kept = (ranges.thread == main) & ranges.is_nested
    is_kept[without] = False
    is_launch = kernels.is_launched & (kernels.thread == main)
    is_launch &= ~trace.named(kernels, _FILL.search)
    launches = kernels.launch_ns[is_launch]
    return np.sort(np.append(launches, ranges.start_ns[is_kept]))


def update_launches(trace: Trace, main: int) -> Ints:
    """When the main thread launched kernels of optimizers and of what they need, in order."""
    kernels = launched_alone(trace)
    is_update = trace.named(kernels, lambda name: classify_kernel(name) is KernelClass.OPTIMIZER)
    return np.sort(kernels.launch_ns[is_update & (kernels.thread == main)])


def batches(trace: Trace, main: int) -> Ints:
    """When the main thread launched copies to the device; where only others do, when it let a
    stream wait, as for their copies; in order.
    """
    copies, calls = trace.copies, trace.api_calls
    is_upload = copies.is_launched & trace.named(copies, TO_DEVICE.search)
    of_main = is_upload & (copies.thread == main)
    if of_main.any() or not is_upload.any():
        return np.sort(copies.launch_ns[of_main])
    is_wait = trace.named(calls, ApiCallKind.STREAM_WAIT.is_done_by)
    return np.sort(calls.start_ns[is_wait & (calls.thread == main)])


def around_windows(trace: Trace, windows: MarkedWindows, main: int) -> Ints:
    """The ranges of the main thread in which a phase begins, which therefore are no modules."""
    ranges = trace.ranges
    start = windows.start_ns[~windows.is_piece]
    begun = np.searchsorted(start, ranges.end_ns) > np.searchsorted(
        start, ranges.start_ns, side="right"
    )
    is_main = (ranges.thread == main) | ~ranges.is_nested
    return np.flatnonzero(begun & is_main) if len(start) else NO_ROWS
