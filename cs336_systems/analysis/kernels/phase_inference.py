"""Phases and steps of a trace without ranges of phases: backward is what autograd launched."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from ..columns import NO_ROWS, Ints, Mask, joined
from .phase_plan import (
    MarkedWindows,
    PhasePlan,
    PhaseWindows,
    backward_bursts,
    ordered,
    outermost,
    rows_named,
    step_times,
    windows_of,
)
from .phase_ranges import PhaseRanges, advice
from .phases import CODES, PHASES, LaunchPhase, PhaseSource
from .trace import MAX_TIME_NS, Trace

_OF_TRAINING = re.compile(r"backward|bwd|[dw]grad|multi_tensor_apply|adam(?!ard)|nll_loss", re.I)
"""Part of the names of kernels that only training runs."""
ALL_FORWARD = "No kernel is of backward or an optimizer, so all is forward."
FROM_BACKWARD = (
    "So backward is what autograd launched, forward the time before it with the loss, and the "
    "optimizer what follows, with zero_grad."
)


def plan_from_backward(trace: Trace, names: PhaseRanges) -> PhasePlan:
    """The phases and steps where no range is of forward or backward.

    Before backward comes forward, with the loss; from its end until the optimizer's range ends, or
    else the step, is the optimizer, as is zero_grad. Steps have ranges of the program or of
    torch.profiler, or end with PyTorch's optimizers, or begin with the model's ranges. Where
    nothing is of backward or an optimizer, steps with ranges are forward alone.
    """
    ranges = trace.ranges
    rows = rows_named(trace, names.step, names.of_torch)
    if not len(rows):
        launching = trace.kernels.thread[trace.kernels.is_launched]
        rows = np.flatnonzero(ranges.is_nested & np.isin(ranges.thread, launching))
    if not len(rows):
        return _no_plan(trace, names, NO_ROWS, NO_ROWS)
    main = int(ranges.thread[rows[ranges.start_ns[rows].argmin()]])
    optimizers = _optimizers(trace, names, main)
    backwards = windows_of(LaunchPhase.BACKWARD, *backward_bursts(trace, main))
    steps = around = outermost(ranges, rows_named(trace, names.step))
    if len(steps):
        start, end = ranges.start_ns[steps], ranges.end_ns[steps]
    elif len(optimizers):
        start, end = _between_optimizers(trace, optimizers, backwards.start_ns, main)
    else:
        of_main = rows[ranges.thread[rows] == main]
        is_around = _is_around_steps(trace, names, of_main, backwards.start_ns)
        start, end = _between_backwards(trace, of_main[~is_around], backwards.start_ns)
        around = of_main[is_around]
    fixed = ordered(joined(optimizers, backwards))
    is_inference = len(steps) > 0 and not len(fixed) and not _is_of_training(trace)
    if not (len(backwards) and len(start)) and not is_inference:
        return _no_plan(trace, names, start, end)
    reason = ALL_FORWARD if is_inference else FROM_BACKWARD
    return PhasePlan(
        source=PhaseSource.THREADS,
        windows=_windows_of_steps(fixed, start, end, len(optimizers) > 0),
        steps=step_times(trace, names, start, end),
        around_steps=around,
        notes=(f"There are no ranges of forward and backward. {reason}",),
    )


def _is_of_training(trace: Trace) -> bool:
    """Whether a kernel is one that only training runs, or may be: a CUDA graph may hold a step."""
    kernels = trace.kernels
    if kernels.is_in_graph[kernels.is_launched].any():
        return True
    used = np.unique(kernels.name[kernels.is_launched]).tolist()
    return any(_OF_TRAINING.search(trace.strings[name]) for name in used)


def _optimizers(trace: Trace, names: PhaseRanges, main: int) -> MarkedWindows:
    """PyTorch's own ranges around the optimizer on the main thread."""
    ranges = trace.ranges
    rows = rows_named(trace, names.of_torch)
    rows = outermost(ranges, rows[ranges.thread[rows] == main])
    return MarkedWindows(
        start_ns=ranges.start_ns[rows],
        end_ns=ranges.end_ns[rows],
        phase=np.full(len(rows), CODES[LaunchPhase.OPTIMIZER], dtype=np.int8),
        is_zero_grad=np.isin(ranges.name[rows], names.zero_grad),
    )


_Window = tuple[int, int, LaunchPhase]
"""Start, end and phase."""


def _windows_of_steps(
    fixed: MarkedWindows, start: Ints, end: Ints, has_optimizer: bool
) -> PhaseWindows:
    """The windows of all steps, from the `fixed` ones: backward, and PyTorch's optimizers."""
    columns = zip(
        fixed.start_ns.tolist(),
        fixed.end_ns.tolist(),
        [PHASES[code] for code in fixed.phase],
        strict=True,
    )
    rows = list(columns)
    low, high = np.searchsorted(fixed.start_ns, start), np.searchsorted(fixed.start_ns, end)
    windows: list[_Window] = []
    for first, last, begin, behind in zip(start.tolist(), end.tolist(), low, high, strict=True):
        of_step = rows[begin:behind]
        is_zero_grad = fixed.is_zero_grad[begin:behind].tolist()
        windows += _windows_of_step(of_step, is_zero_grad, first, last, has_optimizer)
    kept = [row for row in windows if row[1] > row[0] and row[2] is not LaunchPhase.UNATTRIBUTED]
    return PhaseWindows(
        start_ns=np.array([start for start, _, _ in kept], dtype=np.int64),
        end_ns=np.array([end for _, end, _ in kept], dtype=np.int64),
        phase=np.array([CODES[phase] for _, _, phase in kept], dtype=np.int8),
    )


def _windows_of_step(
    fixed: Sequence[_Window],
    is_zero_grad: Sequence[bool],
    first: int,
    last: int,
    has_optimizer: bool,
) -> Iterator[_Window]:
    """The fixed windows of the step from `first` to `last`, and what lies between them."""
    backwards = [start for start, _, phase in fixed if phase is LaunchPhase.BACKWARD]
    last_backward = max(backwards, default=first)
    following, time = LaunchPhase.FORWARD, first
    for (start, end, phase), is_zero in zip(fixed, is_zero_grad, strict=True):
        yield time, start, LaunchPhase.FORWARD if start <= last_backward else following
        yield start, end, phase
        time = max(time, end)
        if phase is LaunchPhase.BACKWARD:
            following = LaunchPhase.OPTIMIZER
        elif not is_zero:  # after the optimizer, nothing is of a phase until the next step
            following = LaunchPhase.UNATTRIBUTED
    if following is LaunchPhase.FORWARD or not has_optimizer:
        yield time, last, following


def _between_optimizers(
    trace: Trace, optimizers: MarkedWindows, backward: Ints, main: int
) -> tuple[Ints, Ints]:
    """Start and end of the steps, of which each ends with an optimizer and begins where the one
    before it ended.

    `backward` is when each backward starts. Where several optimizers follow one backward, the step
    ends with the last of them. The first step begins with the last zero_grad before its backward.
    Without a zero_grad it begins at a launch of the main thread, chosen so that as many launches
    lie before its backward as in the second step, since the making of the model is not a part of
    it; a single step begins at the first launch.
    """
    is_zero_grad = optimizers.is_zero_grad
    start, end = optimizers.start_ns[~is_zero_grad], optimizers.end_ns[~is_zero_grad]
    if len(backward):
        # an optimizer ends a step if another backward starts before the next optimizer
        num_backwards = np.searchsorted(backward, start)
        end = end[np.append(num_backwards[1:] > num_backwards[:-1], True)[: len(end)]]
    if not len(end):
        return NO_ROWS, NO_ROWS
    first_backward = backward[0] if len(backward) else start[0]
    zero_grads = optimizers.start_ns[is_zero_grad & (optimizers.start_ns < first_backward)]
    work = trace.kernels
    launches = np.sort(work.launch_ns[work.is_launched & (work.thread == main)])
    if len(zero_grads):
        first = zero_grads[-1]
    elif len(launches):
        num_before = num_of_step = np.searchsorted(launches, first_backward)
        if len(end) > 1 and len(backward) > 1:
            second_backward = backward[np.searchsorted(backward, end[0])]
            num_of_step = np.searchsorted(launches, second_backward)
            num_of_step -= np.searchsorted(launches, end[0])
        first = launches[max(num_before - num_of_step, 0)]
    else:
        first = start[0]
    return np.append(first, end[:-1]), end


def _is_around_steps(trace: Trace, names: PhaseRanges, rows: Ints, backward: Ints) -> Mask:
    """Whether each of these ranges is around whole steps.

    Forward has ended when backward begins, so no range of the model spans a launch of backward.
    """
    start, end = trace.ranges.start_ns[rows], trace.ranges.end_ns[rows]
    spans_backward = np.searchsorted(backward, end) > np.searchsorted(backward, start)
    return spans_backward | np.isin(rows, rows_named(trace, names.warmup, names.measure))


def _between_backwards(trace: Trace, model: Ints, backward: Ints) -> tuple[Ints, Ints]:
    """Start and end of the steps that begin with the model's ranges.

    A step begins with the first range after a backward that the first forward opened too. Ranges
    that are open only before the first backward, such as those of the model's initialisation, begin
    none.
    """
    if not len(model):
        return NO_ROWS, NO_ROWS
    ranges = trace.ranges
    model = model[np.argsort(ranges.start_ns[model], kind="stable")]
    name, start = ranges.name[model], ranges.start_ns[model]
    num_backwards = np.searchsorted(backward, start)
    is_first = num_backwards == num_backwards[0]
    of_forward = np.intersect1d(name[is_first], name[~is_first])
    is_forward = np.isin(name, of_forward if len(of_forward) else name[is_first])
    _, first = np.unique(num_backwards[is_forward], return_index=True)
    start = start[is_forward][first]
    return start, np.append(start[1:], MAX_TIME_NS)


def _no_plan(trace: Trace, names: PhaseRanges, start: Ints, end: Ints) -> PhasePlan:
    """A plan without phases, with steps if these are known, as around a CUDA graph of a whole
    step.
    """
    note = (
        "The phases are unknown: no range is named as a phase, and no thread has ranges while "
        f"another one launches backward; {advice(trace)}."
    )
    return PhasePlan(
        source=PhaseSource.NOTHING,
        windows=windows_of(LaunchPhase.UNATTRIBUTED, NO_ROWS, NO_ROWS),
        steps=step_times(trace, names, start, end),
        around_steps=rows_named(trace, names.step, names.warmup, names.measure),
        notes=(note,) if trace.kernels.is_launched.any() else (),
    )
