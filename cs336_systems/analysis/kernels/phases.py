"""Phases and steps of a process over time, from its ranges or else from the threads that launched kernels."""

import re
import shlex
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Columns, Ints, Mask, chosen, joined
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, GroupNesting, Nesting, Ranges, Trace
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


class RangeNameError(ValueError):
    """The file has no range of the name that the caller gave for a phase, or two phases have one name."""


_TORCH_OPTIMIZER, _TORCH_ZERO_GRAD, _TORCH_STEP = "Optimizer.step#*", "Optimizer.zero_grad#*", "ProfilerStep#*"
"""Ranges that PyTorch and torch.profiler write by themselves around a step of an optimizer and of the profiler."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The names of a trace's ranges, as indices into its strings, that stand for phases and steps."""

    phases: Mapping[LaunchPhase, Ints]
    of_torch: Ints
    """PyTorch's own ranges around the optimizer, unless the program has a range of its own there."""
    zero_grad: Ints
    """Those of them around `zero_grad`, which begin a step as often as they end it."""
    step: Ints
    warmup: Ints
    measure: Ints

    @property
    def structure(self) -> Ints:
        """Ranges that are no modules: phases but the loss, steps, and what is around them."""
        phases = [ids for phase, ids in self.phases.items() if phase is not LaunchPhase.LOSS]
        return np.concatenate([*phases, self.step, self.warmup, self.measure])


def _means(pattern: str, text: str) -> bool:
    """Whether the name or pattern means this text, in upper or lower case."""
    return text.casefold() == pattern.casefold() or fnmatchcase(text.casefold(), pattern.casefold())


def known_names(trace: Trace, names: PhaseNames) -> Known:
    """Find the ranges that these names and patterns mean, in upper or lower case, or else PyTorch's own."""
    there = np.unique(trace.ranges.name)
    texts = [(int(index), trace.strings[index]) for index in there]

    def ids(*patterns: str) -> Ints:
        found = [index for index, text in texts if any(_means(pattern, text) for pattern in patterns)]
        return np.array(found, dtype=np.int64)

    phases: dict[LaunchPhase, Ints] = {
        phase: ids(getattr(names, phase)) for phase in PHASES if phase is not LaunchPhase.UNATTRIBUTED
    }
    has_own = len(phases[LaunchPhase.OPTIMIZER]) > 0
    return Known(
        phases=phases,
        of_torch=NO_ROWS if has_own else ids(_TORCH_OPTIMIZER, _TORCH_ZERO_GRAD),
        zero_grad=NO_ROWS if has_own else ids(_TORCH_ZERO_GRAD),
        step=own if len(own := ids(names.step)) or names.step != PhaseNames().step else ids(_TORCH_STEP),
        warmup=ids(names.warmup),
        measure=ids(names.measure),
    )


def check_names(trace: Trace, names: PhaseNames) -> None:
    """Raise RangeNameError for a name of two phases, and for one that the caller chose and no range of the trace has.

    Default names need not occur, since a file may have no ranges at all.
    """
    given = {field.name: getattr(names, field.name) for field in fields(PhaseNames)}
    if len({name.casefold() for name in given.values()}) < len(given):
        raise RangeNameError(f"each phase needs a range name of its own, got {', '.join(given.values())}")
    there = [trace.strings[name] for name in np.unique(trace.ranges.name)]
    for field, name in given.items():
        if not any(_means(name, text) for text in there) and name != getattr(PhaseNames(), field):
            found = _listed(_by_time(trace, np.arange(len(trace.ranges))))
            raise RangeNameError(f"no range has the name {name!r} that was given for {field}; the names are: {found}")


def _by_time(trace: Trace, rows: Ints) -> list[str]:
    """Names of the ranges, the longest total time first; numbers at their ends are a star."""
    ranges = trace.ranges
    used, index = np.unique(ranges.name[rows], return_inverse=True)
    time_ns = np.bincount(index, ranges.end_ns[rows] - ranges.start_ns[rows], minlength=len(used))
    longest = np.argsort(-time_ns, kind="stable")
    return list(dict.fromkeys(_NUMBER.sub("*", trace.strings[used[row]]) for row in longest))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "") or "none"


_NUMBER = re.compile(r"(?<=[\s#_:-])\d+$")
_LIKELY = {
    "forward": re.compile(r"forward|fwd", re.I),
    "backward": re.compile(r"backward|bwd", re.I),
    "optimizer": re.compile(r"optim|\bopt\b|opt_step|adam|sgd", re.I),
    "step": re.compile(r"step|iter|batch", re.I),
}
"""What the names of others' ranges around phases look like."""


def _advice(trace: Trace, rows: Ints) -> str:
    """Which ranges there are, and the flags that would make phases of those whose names look like phases."""
    if not len(rows):
        return "record with ranges around the phases"
    names = _by_time(trace, rows)
    flags: dict[str, str] = {}
    for field, pattern in _LIKELY.items():
        likely = [name for name in names if pattern.search(name) and name not in flags.values()]
        if likely:
            flags[field] = likely[0]
    proposed = " ".join(f"--{field} {shlex.quote(name)}" for field, name in flags.items())
    return f"the ranges are, most time first: {_listed(names)}" + (f"; try {proposed}" if proposed else "")


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


def phase_plan(trace: Trace, process: int, rows: Ints, launched: Ints, known: Known) -> PhasePlan:
    """Find the phases and steps of a process; `rows` are its ranges and `launched` its kernels with a known launch."""
    ranges, phases = trace.ranges, known.phases
    of_phase = _named(
        trace, rows, *(phases[p] for p in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER))
    )
    if len(of_phase):
        main = ranges.thread[of_phase[ranges.start_ns[of_phase].argmin()]]
        of_main = rows[(ranges.thread[rows] == main) | ~ranges.is_nested[rows]]
        return _plan_from_ranges(trace, process, of_main, launched, known)
    if len(_named(trace, rows, known.step, known.of_torch)):
        return _plan_of_steps(trace, process, rows, launched, known)
    return _plan_from_threads(trace, process, rows, launched, known)


def _outermost(ranges: Ranges, rows: Ints) -> Ints:
    """The ranges among `rows` that are inside no other, in order of their start."""
    outer = rows[Nesting(ranges.start_ns[rows], ranges.end_ns[rows]).parent < 0]
    return outer[np.argsort(ranges.start_ns[outer], kind="stable")]


def _named(trace: Trace, rows: Ints, *names: Ints) -> Ints:
    return rows[np.isin(trace.ranges.name[rows], np.concatenate(names))]


def _is_backward(trace: Trace, process: int, launched: Ints, main: int) -> Mask:
    """Whether backward launched each kernel: a node of autograd did, or else any thread but the main one."""
    work, nodes = trace.kernels, chosen(trace.nodes, trace.nodes.process == process)
    thread, time = work.thread[launched], work.launch_ns[launched]
    if not (len(nodes) or trace.has_operators):
        of_others: Mask = thread != main
        return of_others
    inside = GroupNesting(nodes.thread, nodes.start_ns, nodes.end_ns).at(thread, time) >= 0
    found: Mask = inside | (np.isin(thread, nodes.thread) & (thread != main))
    return found


def _bursts(trace: Trace, process: int, launched: Ints, main: int) -> tuple[Ints, Ints]:
    """Start and end of each backward: its launches between two of the main thread."""
    is_backward = _is_backward(trace, process, launched, main)
    is_kept = is_backward | (trace.kernels.thread[launched] == main)
    time, is_backward = trace.kernels.launch_ns[launched[is_kept]], is_backward[is_kept]
    order = np.argsort(time, kind="stable")
    time, change = time[order], np.diff(np.concatenate([[0], is_backward[order], [0]]))
    return time[change[:-1] > 0], time[change[1:] < 0] + 1


def _plan_from_ranges(trace: Trace, process: int, rows: Ints, launched: Ints, known: Known) -> PhasePlan:
    """The windows are the outermost phase ranges of the main thread; in a step, the time before forward is data.

    PyTorch's own ranges are the optimizer, and beside them, or with nodes of autograd in the file, autograd's launches
    are backward, where the program has no range of it.
    """
    ranges = trace.ranges
    codes = {int(name): CODES[phase] for phase, ids in known.phases.items() for name in ids}
    codes |= dict.fromkeys(known.of_torch.tolist(), CODES[LaunchPhase.OPTIMIZER])
    phases = _outermost(ranges, _named(trace, rows, np.array(list(codes), dtype=np.int64)))
    label = np.array([codes[name] for name in ranges.name[phases].tolist()], dtype=np.int8)
    start, end = ranges.start_ns[phases], ranges.end_ns[phases]
    opened_inside = np.searchsorted(start, ranges.end_ns[rows]) - np.searchsorted(start, ranges.start_ns[rows], "right")
    around = rows[opened_inside > 0]
    is_zero_grad = np.isin(ranges.name[phases], known.zero_grad)
    shows_backward = len(known.of_torch) > 0 or bool((trace.nodes.process == process).any())
    if shows_backward and not (label == CODES[LaunchPhase.BACKWARD]).any():
        begun, ended = _bursts(trace, process, launched, int(ranges.thread[rows[0]]))
        is_apart = np.searchsorted(start, begun, "right") == np.searchsorted(end, begun, "right")
        start, end = np.append(start, begun[is_apart]), np.append(end, ended[is_apart])
        label = np.append(label, np.full(int(is_apart.sum()), CODES[LaunchPhase.BACKWARD], dtype=np.int8))
        is_zero_grad = np.append(is_zero_grad, np.zeros(int(is_apart.sum()), dtype=np.bool_))
        order = np.argsort(start, kind="stable")
        start, end, label, is_zero_grad = start[order], end[order], label[order], is_zero_grad[order]

    steps = _outermost(ranges, _named(trace, rows, known.step))
    if len(steps):
        step_start, step_end = ranges.start_ns[steps], ranges.end_ns[steps]
        first = np.append(start, MAX_TIME_NS)[np.searchsorted(start, step_start)]
        has_data = first < step_end
        start, end = np.append(start, step_start[has_data]), np.append(end, first[has_data])
        label = np.append(label, np.full(int(has_data.sum()), CODES[LaunchPhase.DATA], dtype=np.int8))
    else:
        is_optimizer = (label == CODES[LaunchPhase.OPTIMIZER]) & ~is_zero_grad
        step_start, step_end = _steps_between(
            start, end, label == CODES[LaunchPhase.FORWARD], is_optimizer, is_zero_grad
        )
    return PhasePlan(
        source=PhaseSource.RANGES,
        windows=Windows(process=np.full(len(start), process), start_ns=start, end_ns=end, phase=label),
        steps=_steps(trace, process, rows, known, step_start, step_end),
        around_steps=around,
    )


def _steps_between(
    start: Ints, end: Ints, is_forward: Mask, is_optimizer: Mask, is_zero_grad: Mask
) -> tuple[Ints, Ints]:
    """Steps from a sequence of phases: a step begins with the first forward after an optimizer, or zero_grad before it.

    Without any optimizer, a step begins with each forward.
    """
    forward = np.flatnonzero(is_forward)
    if is_optimizer.any():
        done = np.cumsum(is_optimizer)[forward]
        forward = forward[np.diff(done, prepend=-1) > 0]
    if not len(forward):
        return NO_ROWS, NO_ROWS
    forward = forward - (is_zero_grad[forward - 1] & (forward > 0))
    last = np.append(forward[1:], len(start)) - 1
    return start[forward], np.maximum.accumulate(end)[last]


def _steps(trace: Trace, process: int, rows: Ints, known: Known, start: Ints, end: Ints) -> Steps:
    """The steps of a process with these times; warm-up are those in its range, and those outside of `measure`.

    Without any step, each range `measure` counts as one.
    """
    ranges = trace.ranges

    def inside(names: Ints) -> Mask:
        found = _outermost(ranges, _named(trace, rows, names))
        return Nesting(ranges.start_ns[found], ranges.end_ns[found]).at(start) >= 0

    if not len(start):
        measures = _outermost(ranges, _named(trace, rows, known.measure))
        start, end = ranges.start_ns[measures], ranges.end_ns[measures]
    measured = inside(known.measure)
    is_warmup = inside(known.warmup) | (~measured & measured.any())
    return Steps(process=np.full(len(start), process), start_ns=start, end_ns=end, is_warmup=is_warmup)


def _plan_of_steps(trace: Trace, process: int, rows: Ints, launched: Ints, known: Known) -> PhasePlan:
    """The windows of steps that have ranges, of the program, torch.profiler or PyTorch's optimizers, but no phases.

    Backward is what autograd launched; before it comes forward, with the loss; from its end until the optimizer's range
    ends is the optimizer, as is zero_grad. Where nothing is of backward or an optimizer, the steps are forward alone.
    """
    ranges = trace.ranges
    marks = _named(trace, rows, known.step, known.of_torch)
    main = int(ranges.thread[marks[ranges.start_ns[marks].argmin()]])
    of_torch = _outermost(ranges, _named(trace, rows[ranges.thread[rows] == main], known.of_torch))
    is_zero_grad = np.isin(ranges.name[of_torch], known.zero_grad)
    begun, ended = _bursts(trace, process, launched, main)
    steps = _outermost(ranges, _named(trace, rows, known.step))
    if len(steps):
        start, end = ranges.start_ns[steps], ranges.end_ns[steps]
    else:
        start, end = _between_optimizers(trace, of_torch, is_zero_grad, begun, launched, main)
    names = {trace.strings[name] for name in np.unique(trace.kernels.name[launched]).tolist()}
    is_inference = not (len(begun) or len(of_torch) or any(map(_OF_TRAINING.search, names)))
    is_inference &= not trace.kernels.is_in_graph[launched].any()  # a graph may hold a whole step of training
    if not (len(begun) or is_inference):
        return _no_plan(trace, process, rows, known, bool(len(launched)), start, end)

    # what has a known phase: backward, and the optimizer's own ranges
    fixed = sorted([
        *((int(a), int(b), LaunchPhase.BACKWARD, False) for a, b in zip(begun, ended, strict=True)),
        *((int(ranges.start_ns[row]), int(ranges.end_ns[row]), LaunchPhase.OPTIMIZER, bool(zero))
          for row, zero in zip(of_torch, is_zero_grad, strict=True)),
    ])  # fmt: skip
    starts = [row[0] for row in fixed]
    windows: list[tuple[int, int, LaunchPhase]] = []
    for first, last in zip(start.tolist(), end.tolist(), strict=True):
        own = fixed[bisect_left(starts, first) : bisect_left(starts, last)]
        before, at = LaunchPhase.FORWARD, first
        last_backward = max((row[0] for row in own if row[2] is LaunchPhase.BACKWARD), default=first)
        for begins, ends, phase, is_zero in own:
            between = LaunchPhase.FORWARD if begins <= last_backward else before
            windows += [(at, begins, between), (begins, ends, phase)]
            at = max(at, ends)
            if not is_zero:  # after the optimizer, nothing is of a phase until the next step
                before = LaunchPhase.OPTIMIZER if phase is LaunchPhase.BACKWARD else LaunchPhase.UNATTRIBUTED
        is_done = before is LaunchPhase.UNATTRIBUTED or (before is LaunchPhase.OPTIMIZER and len(of_torch))
        windows += [] if is_done else [(at, last, before)]
    kept = [row for row in windows if row[1] > row[0] and row[2] is not LaunchPhase.UNATTRIBUTED]
    return PhasePlan(
        source=PhaseSource.THREADS,
        windows=Windows(
            process=np.full(len(kept), process),
            start_ns=np.array([row[0] for row in kept], dtype=np.int64),
            end_ns=np.array([row[1] for row in kept], dtype=np.int64),
            phase=np.array([CODES[row[2]] for row in kept], dtype=np.int8),
        ),
        steps=_steps(trace, process, rows, known, start, end),
        around_steps=_named(trace, rows, known.step),
        notes=(
            f"Process {process} has no ranges of forward and backward. "
            + (
                "No kernel is of backward or an optimizer, so all is forward."
                if is_inference
                else "So backward is what autograd launched, forward the time before it with the loss, and the "
                "optimizer what follows, with zero_grad."
            ),
        ),
    )


_OF_TRAINING = re.compile(r"backward|bwd|[dw]grad|multi_tensor_apply|adam(?!ard)|nll_loss", re.I)
"""Part of the names of kernels that only training runs."""


def _between_optimizers(
    trace: Trace, of_torch: Ints, is_zero_grad: Mask, backward: Ints, launched: Ints, main: int
) -> tuple[Ints, Ints]:
    """Start and end of the steps that end with an optimizer; several optimizers after one backward are of one step.

    The first begins with zero_grad, or with as many launches of the main thread before its backward as the second has,
    so that the making of the model is not a part of it.
    """
    ranges = trace.ranges
    rows = of_torch[~is_zero_grad]
    start, end = ranges.start_ns[rows], ranges.end_ns[rows]
    of_backward = np.searchsorted(backward, start)
    end = end[np.append(of_backward[1:] > of_backward[:-1], True)] if len(backward) else end
    if not len(end):
        return NO_ROWS, NO_ROWS
    work = trace.kernels
    time = np.sort(work.launch_ns[launched[work.thread[launched] == main]])
    first_backward = int(backward[0]) if len(backward) else int(start[0])
    zero_grads = ranges.start_ns[of_torch[is_zero_grad]]
    before = zero_grads[zero_grads < first_backward]
    num_before = int(np.searchsorted(time, first_backward))
    if len(end) > 1 and len(backward) > 1:
        second = backward[np.searchsorted(backward, end[0])]
        count = int(np.searchsorted(time, second) - np.searchsorted(time, end[0]))
    else:
        count = num_before
    first = int(before[-1]) if len(before) else int(time[max(num_before - count, 0)]) if len(time) else int(start[0])
    return np.append(first, end[:-1]), end


def _plan_from_threads(trace: Trace, process: int, all_rows: Ints, launched: Ints, known: Known) -> PhasePlan:
    """The windows from the launching threads: backward is what a thread without the model's ranges launched.

    On the main thread, forward lasts from the first of the model's ranges to the last, and loss from there until
    backward begins. After backward comes the optimizer, until a range opens that the first forward opened too. Ranges
    that are open only before the first backward, such as those of the model's initialisation, are not of forward.
    """
    ranges, kernels = trace.ranges, trace.kernels
    rows = all_rows[ranges.is_nested[all_rows] & np.isin(ranges.thread[all_rows], kernels.thread[launched])]
    if not len(rows):
        return _no_plan(trace, process, all_rows, known, bool(len(launched)))
    main = int(ranges.thread[rows[ranges.start_ns[rows].argmin()]])
    rows = rows[ranges.thread[rows] == main]
    backward = np.sort(kernels.launch_ns[launched[_is_backward(trace, process, launched, main)]])
    # forward has ended when backward begins, so no range of the model spans a launch of backward
    is_around = np.searchsorted(backward, ranges.end_ns[rows]) > np.searchsorted(backward, ranges.start_ns[rows])
    is_around |= np.isin(rows, _named(trace, rows, known.warmup, known.measure))
    model = rows[~is_around]
    model = model[np.argsort(ranges.start_ns[model], kind="stable")]
    if not len(backward) or not len(model):
        return _no_plan(trace, process, all_rows, known, True)

    # a burst is what backward launched between two of the model's ranges
    opened_before = np.searchsorted(ranges.start_ns[model], backward, side="right")
    first = np.flatnonzero(np.diff(opened_before, prepend=-1))
    burst_start, burst_end = backward[first], backward[np.append(first[1:], len(backward)) - 1] + 1

    gap = np.searchsorted(burst_start, ranges.start_ns[model])  # number of bursts before each of the model's ranges
    of_forward = np.unique(ranges.name[model[gap == gap[0]]])
    again = np.intersect1d(of_forward, ranges.name[model[gap > gap[0]]])
    is_forward = np.isin(ranges.name[model], again if len(again) else of_forward)
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
        steps=_steps(trace, process, all_rows, known, start, np.append(start[1:], MAX_TIME_NS)),
        around_steps=rows[is_around],
        notes=(
            f"Process {process} has no ranges of phases. So backward is what other threads than the main one launched, "
            "forward the main thread's ranges before it, loss what lies between (with the fill that starts backward), "
            "optimizer the rest until the next forward (with zero_grad and the making of the next batch).",
        ),
    )


def _no_plan(
    trace: Trace, process: int, rows: Ints, known: Known, has_kernels: bool, start: Ints = NO_ROWS, end: Ints = NO_ROWS
) -> PhasePlan:
    """A plan without phases, with steps if these are known, as around a CUDA graph of a whole step."""
    note = (
        f"The phases of process {process} are unknown: no range is named as a phase, and no thread has ranges while "
        f"another one launches backward; {_advice(trace, rows)}."
    )
    return PhasePlan(
        source=PhaseSource.NOTHING,
        windows=NO_WINDOWS,
        steps=_steps(trace, process, rows, known, start, end),
        around_steps=_named(trace, rows, known.step, known.warmup, known.measure),
        notes=(note,) if has_kernels else (),
    )
