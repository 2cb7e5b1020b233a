"""The steps of a trace: ranges around them, or what repeats, with what tells steps of one kind from
those of another.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...text import counted
from ..columns import NO_ROWS, Ints, Mask, chosen, joined
from .classes import OF_BACKWARD, OF_OPTIMIZER
from .phase_plan import (
    MarkedWindows,
    around_windows,
    main_thread,
    marked_windows,
    outermost,
    rows_named,
    shows_no_training,
    windows_of,
    with_forward,
)
from .phase_ranges import PhaseRanges, advice
from .phases import LaunchPhase, PhaseSource
from .step_profile import StepLabel
from .trace import MAX_TIME_NS, Times, Trace
from .without_gradients import computed_without_gradients

_NUMBER = re.compile(r"\d+")
MIN_PERIODS = 3
"""Fewest repetitions that make a period of kernels."""
MIN_KERNELS = 4
"""Fewest kernels of a period: fewer repeat in any program."""
MIN_ALIKE = 0.9
"""Smallest share of a kernel's launches that must follow each other at the period's distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes(Times):
    """The steps in order, on the host."""

    is_warmup: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The phases and steps of a trace."""

    source: PhaseSource
    windows: MarkedWindows
    steps: StepTimes
    steps_from: str
    """What showed the steps, in words; empty if there are none."""
    labels: tuple[StepLabel, ...]
    """One for each step."""
    passes_per_step: int | None
    """Passes of backward in each step of the optimizer, if all have the same number."""
    around_steps: Ints
    """Ranges that contain whole phases, and so are not ranges of modules."""
    main: int | None
    """The thread whose launches are forward where no range says so; None if ranges do."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Start and end of steps on the host, and what showed them."""

    start_ns: Ints
    end_ns: Ints
    shown_by: str
    names: tuple[int, ...] = ()
    """The name of each step's range; empty where no ranges are steps."""


_NO_STEPS = _Steps(start_ns=NO_ROWS, end_ns=NO_ROWS, shown_by="")


def plan_of(trace: Trace, names: PhaseRanges) -> PhasePlan:
    """The phases and steps of the trace, as far as something in it shows them."""
    main = main_thread(trace, names)
    windows = windows_of(LaunchPhase.UNATTRIBUTED, NO_ROWS, NO_ROWS)
    around = NO_ROWS
    if main is not None:
        windows = marked_windows(trace, names, main)
        around = around_windows(trace, windows, main)
    telling = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER)
    is_named = any(len(names.phases[phase]) for phase in telling)
    steps = _find_steps(trace, names, windows, main, around)
    around = np.append(around, rows_named(trace, names.step, names.warmup, names.measure))
    notes: list[str] = []
    has_forward = bool(windows.among(LaunchPhase.FORWARD).any())
    if not has_forward:
        is_inference = bool(names.labels) or shows_no_training(trace, names)
        if main is not None:
            apart = computed_without_gradients(trace, windows, main)
            bounds = steps.start_ns, steps.end_ns
            windows = with_forward(
                trace, joined(windows, apart), bounds, main, around, is_inference=is_inference
            )
            notes += _note_of_apart(apart)
        notes += _note(trace, windows, is_inference, is_named)
    times = _step_times(trace, names, steps.start_ns, steps.end_ns)
    labels = _labels(trace, times, steps.names, names, windows)
    if len(labels) != len(times):
        labels = (StepLabel(),) * len(times)
    unnamed = PhaseSource.THREADS if len(windows) else PhaseSource.NOTHING
    return PhasePlan(
        source=PhaseSource.RANGES if is_named else unnamed,
        windows=windows,
        steps=times,
        steps_from=steps.shown_by,
        labels=labels,
        passes_per_step=_passes_per_step(windows),
        around_steps=around,
        main=None if has_forward else main,
        notes=tuple(notes),
    )


def _find_steps(
    trace: Trace, names: PhaseRanges, windows: MarkedWindows, main: int | None, around: Ints
) -> _Steps:
    """The steps by the best evidence that the file has: ranges around them, the optimizer at their
    ends, forward or the model's ranges at their beginnings, the period of the kernels.
    """
    ranges = trace.ranges
    rows = rows_named(trace, names.step)
    rows = outermost(ranges, rows[(ranges.thread[rows] == main) | ~ranges.is_nested[rows]])
    if len(rows):
        return _by_ranges(trace, rows)
    if main is None:
        return _by_period(trace, names)
    is_forward = windows.among(LaunchPhase.FORWARD)
    backward = windows.start_ns[windows.among(LaunchPhase.BACKWARD)]
    if (is_forward & ~windows.is_piece).any():
        start, end = _between_forwards(windows)
        shown_by = (
            "forward and the optimizer" if windows.is_update.any() else "the ranges of forward"
        )
    elif windows.is_update.any():
        start, end = _between_optimizers(trace, windows, backward, main)
        shown_by = "the ends of the optimizer"
    else:
        rows = np.flatnonzero((ranges.thread == main) & ranges.is_nested)
        model = np.setdiff1d(rows, np.append(around, rows_named(trace, names.structure)))
        # of pieces of backward, a step has many
        is_whole = windows.among(LaunchPhase.BACKWARD) & ~windows.is_piece
        start, end = _between_backwards(trace, model, windows.start_ns[is_whole])
        shown_by = "the model's ranges after a backward"
    if not len(start):
        return _by_period(trace, names)
    return _Steps(start_ns=start, end_ns=end, shown_by=shown_by)


def _by_ranges(trace: Trace, rows: Ints) -> _Steps:
    """The steps that these rows of the trace's ranges are around."""
    ranges = trace.ranges
    of_steps = tuple(ranges.name[rows].tolist())
    patterns = Counter(_NUMBER.sub("*", trace.strings[name]) for name in of_steps)
    [(usual_pattern, _)] = patterns.most_common(1)
    return _Steps(
        start_ns=ranges.start_ns[rows],
        end_ns=ranges.end_ns[rows],
        shown_by=f"the ranges {usual_pattern}",
        names=of_steps,
    )


def _between_forwards(windows: MarkedWindows) -> tuple[Ints, Ints]:
    """Start and end of steps in a sequence of phases: a step begins with the first forward after
    an optimizer, or with data or a `zero_grad` just before that forward.

    Without any optimizer, each forward begins a step.
    """
    is_optimizer = windows.is_update
    forward = np.flatnonzero(windows.among(LaunchPhase.FORWARD))
    if is_optimizer.any():
        num_before = np.cumsum(is_optimizer)[forward]
        forward = forward[np.diff(num_before, prepend=-1) > 0]
    before = windows.is_zero_grad | windows.among(LaunchPhase.DATA)
    first = forward.copy()
    for _ in range(2):
        first = first - (before[first - 1] & (first > 0))
    last = np.append(first[1:], len(windows)) - 1
    return windows.start_ns[first], np.maximum.accumulate(windows.end_ns)[last]


def _between_optimizers(
    trace: Trace, windows: MarkedWindows, backward: Ints, main: int
) -> tuple[Ints, Ints]:
    """Start and end of the steps, of which each ends with an optimizer and begins where the one
    before it ended.

    `backward` is when each backward starts. Where several optimizers follow one backward, the step
    ends with the last of them. The first step begins with the last data or zero_grad before its
    backward. Without them it begins at a launch of the main thread, chosen so that as many launches
    lie before its backward as in the second step, since the making of the model is not a part of
    it; a single step begins at the first launch.
    """
    start, end = windows.start_ns[windows.is_update], windows.end_ns[windows.is_update]
    if len(backward):
        # an optimizer ends a step if another backward starts before the next optimizer
        num_backwards = np.searchsorted(backward, start)
        end = end[np.append(num_backwards[1:] > num_backwards[:-1], True)[: len(end)]]
    first_backward = backward[0] if len(backward) else start[0]
    is_first = windows.is_zero_grad | windows.among(LaunchPhase.DATA)
    begins = windows.start_ns[is_first & (windows.start_ns < first_backward)]
    work = trace.kernels
    launches = np.sort(work.launch_ns[work.is_launched & (work.thread == main)])
    if len(begins):
        first = begins[-1]
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


def _between_backwards(trace: Trace, model: Ints, backward: Ints) -> tuple[Ints, Ints]:
    """Start and end of the steps that begin with the model's ranges.

    A step begins with the first range after a backward that the first forward opened too. Ranges
    that are open only before the first backward, such as those of the model's initialisation, begin
    none.
    """
    if not len(model) or not len(backward):
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


def _by_period(trace: Trace, names: PhaseRanges) -> _Steps:
    """The steps of a program that launches the same kernels again and again, from the launch of
    each period's first kernel to that of the next; none where nothing repeats as a whole, or where
    a range says what to measure.
    """
    if len(names.measure):
        return _NO_STEPS
    kernels = trace.kernels
    if not kernels.is_launched.all():
        return _NO_STEPS
    rows = np.lexsort((kernels.start_ns, kernels.launch_ns))
    period = find_period(kernels.name[rows])
    if period is None:
        return _NO_STEPS
    launch = kernels.launch_ns[rows]
    # a step begins where the host pauses longest between two launches, on average
    pause = np.diff(launch, prepend=launch[0])
    count = len(launch) // period
    of_place = pause[: count * period].reshape(count, period)[1:].mean(axis=0)
    start = launch[int(of_place.argmax()) :: period]
    start = start[np.append(True, np.diff(start) > 0)]
    return _Steps(start_ns=start[:-1], end_ns=start[1:], shown_by=f"{period} kernels that repeat")


def find_period(names: Ints) -> int | None:
    """The smallest distance at which a sequence of names repeats: MIN_ALIKE of the occurrences of
    each name are followed by the same name at this distance.

    None if there is no such distance, or a name occurs less than MIN_PERIODS times: what repeats
    besides may be layers.
    """
    used, index, counts = np.unique(names, return_inverse=True, return_counts=True)
    if not len(used) or counts.min() < MIN_PERIODS:
        return None
    # a whole period has the rarest name too, so its distances are all that need be tried
    places = np.flatnonzero(index == counts.argmin())
    distances = Counter(np.diff(places).tolist())
    likely = [int(distance) for distance, _ in distances.most_common(3)]
    for period in sorted(length for length in likely if length >= MIN_KERNELS):
        is_alike = index[:-period] == index[period:]
        alike = np.bincount(index[:-period], is_alike, len(used))
        tried = np.bincount(index[:-period], minlength=len(used))
        if (alike >= MIN_ALIKE * tried).all() and len(names) >= MIN_PERIODS * period:
            return period
    return None


def _labels(
    trace: Trace,
    steps: StepTimes,
    of_steps: tuple[int, ...],
    names: PhaseRanges,
    windows: MarkedWindows,
) -> tuple[StepLabel, ...]:
    """What tells the steps of one kind from those of another, or nothing if all are alike;
    `of_steps` has the name of each step's range.
    """
    if names.labels:
        return tuple(names.labels.get(name, StepLabel()) for name in of_steps)
    if not of_steps:
        return ()  # steps that something else shows than ranges may be parts of one
    is_backward = windows.among(LaunchPhase.BACKWARD)
    is_forward = windows.among(LaunchPhase.FORWARD)
    has_optimizer = steps.number_of(windows.start_ns[windows.is_update]) > 0
    has_backward = steps.number_of(windows.start_ns[is_backward]) > 0
    has_forward = steps.number_of(windows.start_ns[is_forward]) > 0
    # what was launched in no phase may be a backward that nothing shows
    launch = trace.kernels.launch_ns[trace.kernels.is_launched]
    in_no_phase = steps.number_of(launch[~windows.cover(launch)]) > 0
    is_forward_only = has_forward & ~in_no_phase & has_backward.any()
    kinds = np.select(
        [has_optimizer, has_backward, is_forward_only],
        ["with the optimizer", "without the optimizer", "forward only"],
        "",
    ).tolist()
    if len(set(kinds)) < 2:
        kinds = [""] * len(kinds)
    return tuple(StepLabel(kind=kind) for kind in kinds)


def _passes_per_step(windows: MarkedWindows) -> int | None:
    """How many backwards lie between two optimizers, if it is the same number each time."""
    optimizers = windows.end_ns[windows.is_update]
    backward = windows.start_ns[windows.among(LaunchPhase.BACKWARD) & ~windows.is_piece]
    if len(optimizers) < 2 or not len(backward):
        return None
    passes = np.diff(np.searchsorted(backward, optimizers))
    passes = passes[passes > 0]
    if not len(passes) or (passes != passes[0]).any():
        return None
    return int(passes[0])


def _note_of_apart(apart: MarkedWindows) -> Iterator[str]:
    """What is told of launches that autograd did not record."""
    if len(apart):
        yield (
            f"Before backward, {counted(len(apart), 'time')}, the program launched work while "
            "autograd did not record, as for an evaluation, a teacher or an update that is written "
            "out: that is no forward of a training step, and in no phase."
        )


def _note(
    trace: Trace, windows: MarkedWindows, is_inference: bool, is_named: bool
) -> Iterator[str]:
    """What shows the phases of a file without ranges of forward."""
    has_backward = windows.among(LaunchPhase.BACKWARD).any()
    if not len(windows):
        if trace.kernels.is_launched.any():
            yield (
                "The phases are not seen: no range is named as a phase, and nothing shows where "
                f"backward or an optimizer begins{_told_by_names(trace)}; {advice(trace)}."
            )
    elif is_inference and not has_backward:
        yield (
            "No range, operator or kernel is of backward or an optimizer: what a step launches "
            "counts as forward, whatever it computes."
        )
    elif has_backward and not is_named:
        optimizer = "No optimizer was seen."
        if windows.among(LaunchPhase.OPTIMIZER).any():
            optimizer = "The optimizer is what its own ranges or kernels show."
        forward = ", and forward the time before it with the loss"
        if not windows.among(LaunchPhase.FORWARD).any():
            forward = "; without steps it is not known where forward begins"
        yield (
            "There are no ranges of forward and backward. So backward is what autograd launched"
            f"{forward}. {optimizer}"
        )
        if not trace.operators.is_recorded.any():
            yield (
                "The file does not tell whether autograd recorded: an evaluation before a backward "
                "counts as forward."
            )


def _told_by_names(trace: Trace) -> str:
    """How many kernels are of backward or an optimizer by their names, which a program that is not
    PyTorch's launches among others that do not tell.
    """
    patterns = {"backward": OF_BACKWARD, "an optimizer": OF_OPTIMIZER}
    counts = {
        phase: int(trace.named(trace.kernels, pattern.search).sum())
        for phase, pattern in patterns.items()
    }
    told = [f"{count} of {phase}" for phase, count in counts.items() if count]
    if not told:
        return ""
    return f", though of {len(trace.kernels)} kernels {' and '.join(told)} are so by their names"


def _step_times(trace: Trace, names: PhaseRanges, start_ns: Ints, end_ns: Ints) -> StepTimes:
    """The steps with these times; warm-up are those in its range, and those outside of `measure`.

    Without any step, each range `measure` counts as one.
    """
    ranges = trace.ranges

    def is_inside(around: Ints) -> Mask:
        rows = outermost(ranges, rows_named(trace, around))
        return chosen(ranges, rows).at(start_ns) >= 0

    if not len(start_ns):
        measures = outermost(ranges, rows_named(trace, names.measure))
        start_ns, end_ns = ranges.start_ns[measures], ranges.end_ns[measures]
    is_measured = is_inside(names.measure)
    is_warmup = is_inside(names.warmup) | (~is_measured & is_measured.any())
    return StepTimes(start_ns=start_ns, end_ns=end_ns, is_warmup=is_warmup)
