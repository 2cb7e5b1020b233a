"""Phases and steps over time, from ranges or else from the threads that launched kernels."""

import re
import shlex
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from ...ranges import PhaseNames
from ..columns import Columns, Ints, Mask
from .trace import MAX_TIME_NS, GroupNesting, Nesting, Ranges, Trace

Codes = NDArray[np.int8]
"""Phases as indices into `PHASES`."""


class LaunchPhase(StrEnum):
    """The part of a step in which a kernel was launched; each kernel has exactly one."""

    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    """Only where the loss stands beside forward; a `loss` range inside `forward` is part of
    forward.
    """
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    """Between backward and the optimizer, where ranks average gradients or wait until that is
    done.
    """
    OPTIMIZER = "optimizer"
    UNATTRIBUTED = "unattributed"


PHASES = tuple(LaunchPhase)
CODES = {phase: code for code, phase in enumerate(PHASES)}


class PhaseSource(StrEnum):
    """The evidence for the phases."""

    RANGES = "ranges"
    THREADS = "threads"
    NOTHING = "nothing"


class RangeNameError(ValueError):
    """The file has no range of the name that the caller gave for a phase, or two phases have one
    name.
    """


_TORCH_OPTIMIZER, _TORCH_ZERO_GRAD, _TORCH_STEP = (
    "Optimizer.step#*",
    "Optimizer.zero_grad#*",
    "ProfilerStep#*",
)
"""Ranges that PyTorch and torch.profiler write by themselves around a step of an optimizer and
of the profiler.
"""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The names of a trace's ranges, as indices into its strings, that stand for phases and
    steps.
    """

    phases: Mapping[LaunchPhase, Ints]
    of_torch: Ints
    """PyTorch's own ranges around the optimizer, unless the program has a range of its own
    there.
    """
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
    """Find the ranges that these names and patterns mean, in upper or lower case, or else
    PyTorch's own.
    """
    there = np.unique(trace.ranges.name)
    texts = [(int(index), trace.strings[index]) for index in there]

    def ids(*patterns: str) -> Ints:
        found = [
            index for index, text in texts if any(_means(pattern, text) for pattern in patterns)
        ]
        return np.array(found, dtype=np.int64)

    phases: dict[LaunchPhase, Ints] = {
        phase: ids(getattr(names, phase))
        for phase in PHASES
        if phase is not LaunchPhase.UNATTRIBUTED
    }
    has_own = len(phases[LaunchPhase.OPTIMIZER]) > 0
    return Known(
        phases=phases,
        of_torch=NO_ROWS if has_own else ids(_TORCH_OPTIMIZER, _TORCH_ZERO_GRAD),
        zero_grad=NO_ROWS if has_own else ids(_TORCH_ZERO_GRAD),
        step=own
        if len(own := ids(names.step)) or names.step != PhaseNames().step
        else ids(_TORCH_STEP),
        warmup=ids(names.warmup),
        measure=ids(names.measure),
    )


def check_names(trace: Trace, names: PhaseNames) -> None:
    """Raise RangeNameError for a name of two phases, and for one that the caller chose and no range
    of the trace has.

    Default names need not occur, since a file may have no ranges at all.
    """
    given = {field.name: getattr(names, field.name) for field in fields(PhaseNames)}
    if len({name.casefold() for name in given.values()}) < len(given):
        raise RangeNameError(
            f"each phase needs a range name of its own, got {', '.join(given.values())}"
        )
    there = [trace.strings[name] for name in np.unique(trace.ranges.name)]
    for field, name in given.items():
        if not any(_means(name, text) for text in there) and name != getattr(PhaseNames(), field):
            found = _listed(_by_time(trace))
            raise RangeNameError(
                f"no range has the name {name!r} that was given for {field}; the names are: {found}"
            )


def _by_time(trace: Trace) -> list[str]:
    """Names of the ranges, the longest total time first; numbers at their ends are a star."""
    ranges = trace.ranges
    used, index = np.unique(ranges.name, return_inverse=True)
    time_ns = np.bincount(index, ranges.end_ns - ranges.start_ns, minlength=len(used))
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


def _advice(trace: Trace) -> str:
    """Which ranges there are, and the flags that would make phases of those whose names look
    like phases.
    """
    if not len(trace.ranges):
        return "record with ranges around the phases"
    names = _by_time(trace)
    flags: dict[str, str] = {}
    for field, pattern in _LIKELY.items():
        likely = [name for name in names if pattern.search(name) and name not in flags.values()]
        if likely:
            flags[field] = likely[0]
    proposed = " ".join(f"--{field} {shlex.quote(name)}" for field, name in flags.items())
    return f"the ranges are, most time first: {_listed(names)}" + (
        f"; try {proposed}" if proposed else ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows(Columns):
    """Times of phases on the host. A launch on any thread belongs to the window that contains
    it.
    """

    start_ns: Ints
    end_ns: Ints
    phase: Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(Columns):
    """The steps in order."""

    start_ns: Ints
    end_ns: Ints
    is_warmup: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The phases and steps of a trace."""

    source: PhaseSource
    windows: Windows
    steps: Steps
    around_steps: Ints
    """Ranges that contain whole phases, and so are not ranges of modules."""
    notes: tuple[str, ...] = ()


MAX_LISTED = 12
"""Most names of ranges that an error lists."""
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
NO_WINDOWS = Windows(start_ns=NO_ROWS, end_ns=NO_ROWS, phase=np.zeros(0, dtype=np.int8))


def phase_plan(trace: Trace, known: Known) -> PhasePlan:
    """Find the phases and steps of a trace of one process."""
    ranges, phases, launched = trace.ranges, known.phases, np.flatnonzero(trace.kernels.is_launched)
    of_phase = _named(
        trace,
        *(phases[p] for p in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER)),
    )
    if not len(of_phase):
        return _plan_from_backward(trace, launched, known)
    main = ranges.thread[of_phase[ranges.start_ns[of_phase].argmin()]]
    return _plan_from_ranges(trace, (ranges.thread == main) | ~ranges.is_nested, launched, known)


def _outermost(ranges: Ranges, rows: Ints) -> Ints:
    """The ranges among `rows` that are inside no other, in order of their start."""
    outer = rows[Nesting(ranges.start_ns[rows], ranges.end_ns[rows]).parent < 0]
    return outer[np.argsort(ranges.start_ns[outer], kind="stable")]


def _named(trace: Trace, *names: Ints) -> Ints:
    return np.flatnonzero(np.isin(trace.ranges.name, np.concatenate(names)))


def _is_backward(trace: Trace, launched: Ints, main: int) -> Mask:
    """Whether backward launched each kernel: a node of autograd did, or else any thread but the
    main one.
    """
    work, nodes = trace.kernels, trace.nodes
    thread, time = work.thread[launched], work.launch_ns[launched]
    if not (len(nodes) or trace.has_operators):
        of_others: Mask = thread != main
        return of_others
    inside = GroupNesting(nodes.thread, nodes.start_ns, nodes.end_ns).at(thread, time) >= 0
    found: Mask = inside | (np.isin(thread, nodes.thread) & (thread != main))
    return found


def _bursts(trace: Trace, launched: Ints, main: int) -> tuple[Ints, Ints]:
    """Start and end of each backward: its launches between two of the main thread."""
    is_backward = _is_backward(trace, launched, main)
    is_kept = is_backward | (trace.kernels.thread[launched] == main)
    time, is_backward = trace.kernels.launch_ns[launched[is_kept]], is_backward[is_kept]
    order = np.argsort(time, kind="stable")
    time, change = time[order], np.diff(np.concatenate([[0], is_backward[order], [0]]))
    return time[change[:-1] > 0], time[change[1:] < 0] + 1


def _plan_from_ranges(trace: Trace, is_main: Mask, launched: Ints, known: Known) -> PhasePlan:
    """The windows are the outermost phase ranges of the main thread; in a step, the time before
    forward is data.

    PyTorch's own ranges are the optimizer, and beside them, or with nodes of autograd in the file,
    autograd's launches are backward, where the program has no range of it.
    """
    ranges, rows = trace.ranges, np.flatnonzero(is_main)

    def named(names: Ints) -> Ints:
        found = _named(trace, names)
        return _outermost(ranges, found[is_main[found]])

    codes = {int(name): CODES[phase] for phase, ids in known.phases.items() for name in ids}
    codes |= dict.fromkeys(known.of_torch.tolist(), CODES[LaunchPhase.OPTIMIZER])
    phases = named(np.array(list(codes), dtype=np.int64))
    label = np.array([codes[name] for name in ranges.name[phases].tolist()], dtype=np.int8)
    start, end = ranges.start_ns[phases], ranges.end_ns[phases]
    opened_inside = np.searchsorted(start, ranges.end_ns[rows]) - np.searchsorted(
        start, ranges.start_ns[rows], "right"
    )
    around = rows[opened_inside > 0]
    is_zero_grad = np.isin(ranges.name[phases], known.zero_grad)
    shows_backward = len(known.of_torch) > 0 or len(trace.nodes) > 0
    if shows_backward and not (label == CODES[LaunchPhase.BACKWARD]).any():
        begun, ended = _bursts(trace, launched, int(ranges.thread[rows[0]]))
        is_apart = np.searchsorted(start, begun, "right") == np.searchsorted(end, begun, "right")
        start, end = np.append(start, begun[is_apart]), np.append(end, ended[is_apart])
        label = np.append(
            label, np.full(int(is_apart.sum()), CODES[LaunchPhase.BACKWARD], dtype=np.int8)
        )
        is_zero_grad = np.append(is_zero_grad, np.zeros(int(is_apart.sum()), dtype=np.bool_))
        order = np.argsort(start, kind="stable")
        start, end, label, is_zero_grad = (
            start[order],
            end[order],
            label[order],
            is_zero_grad[order],
        )

    steps = named(known.step)
    if len(steps):
        step_start, step_end = ranges.start_ns[steps], ranges.end_ns[steps]
        first = np.append(start, MAX_TIME_NS)[np.searchsorted(start, step_start)]
        has_data = first < step_end
        start, end = np.append(start, step_start[has_data]), np.append(end, first[has_data])
        label = np.append(
            label, np.full(int(has_data.sum()), CODES[LaunchPhase.DATA], dtype=np.int8)
        )
    else:
        is_optimizer = (label == CODES[LaunchPhase.OPTIMIZER]) & ~is_zero_grad
        step_start, step_end = _steps_between(
            start, end, label == CODES[LaunchPhase.FORWARD], is_optimizer, is_zero_grad
        )
    return PhasePlan(
        source=PhaseSource.RANGES,
        windows=Windows(start_ns=start, end_ns=end, phase=label),
        steps=_steps(trace, known, step_start, step_end),
        around_steps=around,
    )


def _steps_between(
    start: Ints, end: Ints, is_forward: Mask, is_optimizer: Mask, is_zero_grad: Mask
) -> tuple[Ints, Ints]:
    """Steps from a sequence of phases: a step begins with the first forward after an optimizer, or
    zero_grad before it.

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


def _steps(trace: Trace, known: Known, start: Ints, end: Ints) -> Steps:
    """The steps with these times; warm-up are those in its range, and those outside of `measure`.

    Without any step, each range `measure` counts as one.
    """
    ranges = trace.ranges

    def inside(names: Ints) -> Mask:
        found = _outermost(ranges, _named(trace, names))
        return Nesting(ranges.start_ns[found], ranges.end_ns[found]).at(start) >= 0

    if not len(start):
        measures = _outermost(ranges, _named(trace, known.measure))
        start, end = ranges.start_ns[measures], ranges.end_ns[measures]
    measured = inside(known.measure)
    is_warmup = inside(known.warmup) | (~measured & measured.any())
    return Steps(start_ns=start, end_ns=end, is_warmup=is_warmup)


def _plan_from_backward(trace: Trace, launched: Ints, known: Known) -> PhasePlan:
    """The windows where no range is of forward or backward: backward is what autograd launched.

    Before it comes forward, with the loss; from its end until the optimizer's range ends, or else
    the step, is the optimizer, as is zero_grad. Steps have ranges of the program or of
    torch.profiler, or end with PyTorch's optimizers, or begin with the model's ranges. Where
    nothing is of backward or an optimizer, steps with ranges are forward alone.
    """
    ranges, kernels = trace.ranges, trace.kernels
    rows = _named(trace, known.step, known.of_torch)
    if not len(rows):
        rows = np.flatnonzero(ranges.is_nested & np.isin(ranges.thread, kernels.thread[launched]))
    if not len(rows):
        return _no_plan(trace, known, NO_ROWS, NO_ROWS)
    main = int(ranges.thread[rows[ranges.start_ns[rows].argmin()]])
    of_torch = _named(trace, known.of_torch)
    of_torch = _outermost(ranges, of_torch[ranges.thread[of_torch] == main])
    is_zero_grad = np.isin(ranges.name[of_torch], known.zero_grad)
    begun, ended = _bursts(trace, launched, main)
    steps = around = _outermost(ranges, _named(trace, known.step))
    if len(steps):
        start, end = ranges.start_ns[steps], ranges.end_ns[steps]
    elif len(of_torch):
        start, end = _between_optimizers(trace, of_torch, is_zero_grad, begun, launched, main)
    else:
        start, end, around = _between_backwards(
            trace, rows[ranges.thread[rows] == main], begun, known
        )
    names = {trace.strings[name] for name in np.unique(kernels.name[launched]).tolist()}
    is_inference = len(steps) > 0 and not (
        len(begun) or len(of_torch) or any(map(_OF_TRAINING.search, names))
    )
    # a graph may hold a whole step of training
    is_inference &= not kernels.is_in_graph[launched].any()
    if not (len(begun) and len(start)) and not is_inference:
        return _no_plan(trace, known, start, end)

    # what has a known phase: backward, and the optimizer's own ranges
    fixed = sorted(
        [
            *(
                (int(a), int(b), LaunchPhase.BACKWARD, False)
                for a, b in zip(begun, ended, strict=True)
            ),
            *(
                (
                    int(ranges.start_ns[row]),
                    int(ranges.end_ns[row]),
                    LaunchPhase.OPTIMIZER,
                    bool(zero),
                )
                for row, zero in zip(of_torch, is_zero_grad, strict=True)
            ),
        ]
    )
    starts = [row[0] for row in fixed]
    windows: list[tuple[int, int, LaunchPhase]] = []
    for first, last in zip(start.tolist(), end.tolist(), strict=True):
        own = fixed[bisect_left(starts, first) : bisect_left(starts, last)]
        before, at = LaunchPhase.FORWARD, first
        last_backward = max(
            (row[0] for row in own if row[2] is LaunchPhase.BACKWARD), default=first
        )
        for begins, ends, phase, is_zero in own:
            between = LaunchPhase.FORWARD if begins <= last_backward else before
            windows += [(at, begins, between), (begins, ends, phase)]
            at = max(at, ends)
            if not is_zero:  # after the optimizer, nothing is of a phase until the next step
                before = (
                    LaunchPhase.OPTIMIZER
                    if phase is LaunchPhase.BACKWARD
                    else LaunchPhase.UNATTRIBUTED
                )
        is_done = before is LaunchPhase.UNATTRIBUTED or (
            before is LaunchPhase.OPTIMIZER and len(of_torch)
        )
        windows += [] if is_done else [(at, last, before)]
    kept = [row for row in windows if row[1] > row[0] and row[2] is not LaunchPhase.UNATTRIBUTED]
    return PhasePlan(
        source=PhaseSource.THREADS,
        windows=Windows(
            start_ns=np.array([row[0] for row in kept], dtype=np.int64),
            end_ns=np.array([row[1] for row in kept], dtype=np.int64),
            phase=np.array([CODES[row[2]] for row in kept], dtype=np.int8),
        ),
        steps=_steps(trace, known, start, end),
        around_steps=around,
        notes=(
            "There are no ranges of forward and backward. "
            + (
                "No kernel is of backward or an optimizer, so all is forward."
                if is_inference
                else "So backward is what autograd launched, forward the time before it with the "
                "loss, and the optimizer what follows, with zero_grad."
            ),
        ),
    )


_OF_TRAINING = re.compile(r"backward|bwd|[dw]grad|multi_tensor_apply|adam(?!ard)|nll_loss", re.I)
"""Part of the names of kernels that only training runs."""


def _between_optimizers(
    trace: Trace, of_torch: Ints, is_zero_grad: Mask, backward: Ints, launched: Ints, main: int
) -> tuple[Ints, Ints]:
    """Start and end of the steps that end with an optimizer; several optimizers after one backward
    are of one step.

    The first begins with zero_grad, or with as many launches of the main thread before its backward
    as the second has, so that the making of the model is not a part of it.
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
    first = (
        int(before[-1])
        if len(before)
        else int(time[max(num_before - count, 0)])
        if len(time)
        else int(start[0])
    )
    return np.append(first, end[:-1]), end


def _between_backwards(
    trace: Trace, rows: Ints, backward: Ints, known: Known
) -> tuple[Ints, Ints, Ints]:
    """Start and end of the steps that begin with the model's ranges, and the ranges around whole
    steps.

    A step begins with the first range after a backward that the first forward opened too. Ranges
    that are open only before the first backward, such as those of the model's initialisation, begin
    none.
    """
    ranges = trace.ranges
    # forward has ended when backward begins, so no range of the model spans a launch of backward
    is_around = np.searchsorted(backward, ranges.end_ns[rows]) > np.searchsorted(
        backward, ranges.start_ns[rows]
    )
    is_around |= np.isin(rows, _named(trace, known.warmup, known.measure))
    model = rows[~is_around]
    model = model[np.argsort(ranges.start_ns[model], kind="stable")]
    if not len(model):
        return NO_ROWS, NO_ROWS, rows[is_around]
    # number of backwards before each of the model's ranges
    gap = np.searchsorted(backward, ranges.start_ns[model])
    of_forward = np.unique(ranges.name[model[gap == gap[0]]])
    again = np.intersect1d(of_forward, ranges.name[model[gap > gap[0]]])
    is_forward = np.isin(ranges.name[model], again if len(again) else of_forward)
    _, first = np.unique(gap[is_forward], return_index=True)
    start = ranges.start_ns[model[is_forward][first]]
    return start, np.append(start[1:], MAX_TIME_NS), rows[is_around]


def _no_plan(trace: Trace, known: Known, start: Ints, end: Ints) -> PhasePlan:
    """A plan without phases, with steps if these are known, as around a CUDA graph of a whole
    step.
    """
    note = (
        "The phases are unknown: no range is named as a phase, and no thread has ranges while "
        f"another one launches backward; {_advice(trace)}."
    )
    return PhasePlan(
        source=PhaseSource.NOTHING,
        windows=NO_WINDOWS,
        steps=_steps(trace, known, start, end),
        around_steps=_named(trace, known.step, known.warmup, known.measure),
        notes=(note,) if trace.kernels.is_launched.any() else (),
    )
