"""The phase, step and module of each kernel, the steps that a profile covers, and sums over
kernels.

A kernel runs later than the Python code that launched it, and autograd launches backward's kernels
from its own thread. So a kernel belongs to the phase in which it was launched, by whatever thread,
and to the module whose range was innermost on the launching thread at that time. Hooks launch
collectives while some module's range is open: a collective belongs to no module, but to the range
around a gather or scatter of parameters, if there is one.

The tables of a profile are sums over one long frame, with a row for each kernel and copy of the
trace. Times are whole nanoseconds, so that sums are exact.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...ranges import PhaseNames
from ..columns import NO_ROWS, Ints, Mask, chosen, joined
from .calls import ApiCallKind, lost_launches
from .collectives import NO_COLLECTIVE, OF_LIBRARY, collective_codes, with_collectives_named
from .phase_plan import PhaseWindows
from .phase_ranges import PhaseRanges, phase_ranges
from .phases import CODES, PHASES, Codes, LaunchPhase
from .step_profile import StepLabel
from .steps import PhasePlan, StepTimes, plan_of
from .trace import MAX_TIME_NS, DeviceWork, Times, Trace, forward_of

Made = TypeVar("Made")
_SHARDS = re.compile(r"(?:gather|wait|scatter) |FSDP::")
"""Beginning of the names of ranges around a gather of a unit's parameters, a wait for it, or a
scatter of gradients.

The last one is PyTorch's fully_shard.
"""
MIN_LOST = 2
"""Fewest launches at an edge of the file that make a step a cut one; one may be lost anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs(DeviceWork):
    """The kernels of a trace, followed by its copies, each with its place."""

    is_copy: Mask
    collective: Codes
    """Index into `COLLECTIVES`, NO_COLLECTIVE for what is no kernel of a collective."""
    phase: Codes
    step: Ints
    """Index into the steps, -1 outside of every step."""
    module: Ints
    """Index into the trace's ranges, -1 outside of every module's range."""
    is_recomputed: Mask
    """Launched by a forward range inside backward, so it recomputes a part of forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The phase, step and module of every kernel and copy of a trace of one process."""

    trace: Trace
    jobs: Jobs
    plan: PhasePlan
    parent: Ints
    """For each range of the trace, the innermost module's range around it on its thread; -1 for
    none.

    A forward range inside backward, a gather and a scatter have no parent, and so begin a path of
    their own.
    """
    notes: tuple[str, ...]


def attribute(trace: Trace, phases: PhaseNames | None = None) -> Attribution:
    """Find the phase, step and module of every kernel and copy."""
    trace = with_collectives_named(trace)
    names = phase_ranges(trace, phases or PhaseNames())
    plan = plan_of(trace, names)
    if trace.calls_of_modules is not None:
        # behind the program's ranges, of which the plan has the numbers
        ranges = joined(trace.ranges, trace.calls_of_modules)
        trace = replace(trace, ranges=ranges, calls_of_modules=None)
    modules = _Modules(trace, names, plan)
    return Attribution(
        trace=trace,
        jobs=_placed(trace, plan, modules),
        plan=plan,
        parent=modules.parent,
        notes=(*trace.notes, *plan.notes, *_what_is_missing(trace)),
    )


def phase_at(windows: PhaseWindows, time: Ints) -> Codes:
    """The phase of the host at each time."""
    labels = np.append(windows.phase, np.int8(CODES[LaunchPhase.UNATTRIBUTED]))
    return labels[windows.at(time)]


class _Modules:
    """Looks up the innermost range of a module on each thread. Ranges of phases, of steps and
    around them do not count.

    A forward range inside backward counts as a module, so that recomputed work has a name of its
    own.
    """

    def __init__(self, trace: Trace, names: PhaseRanges, plan: PhasePlan) -> None:
        ranges = trace.ranges
        is_module = ranges.is_nested & ~np.isin(ranges.name, names.structure)
        is_module[plan.around_steps] = False
        is_forward = np.isin(ranges.name, names.phases[LaunchPhase.FORWARD])
        forward = np.flatnonzero(ranges.is_nested & is_forward)
        again = forward[_is_backward(phase_at(plan.windows, ranges.start_ns[forward]))]
        is_module[again] = True
        is_module[trace.named(ranges, OF_LIBRARY.match)] = False
        is_shards = trace.named(ranges, _SHARDS.match)
        self._rows = np.flatnonzero(is_module)
        self._modules = ranges.by_thread(self._rows)
        self._forwards = ranges.by_thread(forward)
        self.parent: Ints = np.full(len(ranges), -1, dtype=np.int64)
        self.parent[self._rows] = np.append(self._rows, -1)[self._modules.parent]
        self.parent[again] = self.parent[is_shards & is_module] = -1
        self.is_shards: Mask = np.append(is_shards, False)
        """Whether each range is a gather or a scatter; the last element means no range."""

    def at(self, thread: Ints, time: Ints) -> Ints:
        """The innermost module range of each launch."""
        return np.append(self._rows, -1)[self._modules.at(thread, time)]

    def is_forward(self, thread: Ints, time: Ints) -> Mask:
        """Whether each launch is inside a forward range of its thread."""
        return self._forwards.at(thread, time) >= 0


def _is_backward(phase: Codes) -> Mask:
    is_backward: Mask = phase == CODES[LaunchPhase.BACKWARD]
    return is_backward


def _placed(trace: Trace, plan: PhasePlan, modules: _Modules) -> Jobs:
    """All kernels and copies of the trace in their places."""
    work = joined(trace.kernels, trace.copies)
    collective = collective_codes(work.name, trace.strings)
    phase = np.full(len(work), CODES[LaunchPhase.UNATTRIBUTED], dtype=np.int8)
    step = np.full(len(work), -1, dtype=np.int64)
    module = step.copy()
    is_recomputed = np.zeros(len(work), dtype=np.bool_)
    rows = np.flatnonzero(work.is_launched)
    thread, time = work.thread[rows], work.launch_ns[rows]
    phase[rows] = phase_at(plan.windows, time)
    if plan.main is not None:
        # what another thread launches meanwhile is not shown to be forward
        is_apart = (thread != plan.main) & (phase[rows] == CODES[LaunchPhase.FORWARD])
        phase[rows[is_apart]] = CODES[LaunchPhase.UNATTRIBUTED]
    step[rows] = plan.steps.at(time)
    module[rows] = _modules_of_launches(trace, modules, thread, time)
    module[(collective != NO_COLLECTIVE) & ~modules.is_shards[module]] = -1
    is_recomputed[rows] = modules.is_forward(thread, time) & _is_backward(phase[rows])
    return Jobs(
        **work.by_name(),
        is_copy=np.arange(len(work)) >= len(trace.kernels),
        collective=collective,
        phase=phase,
        step=step,
        module=np.where(work.mark >= 0, work.mark, module),
        is_recomputed=is_recomputed,
    )


def _modules_of_launches(trace: Trace, modules: _Modules, thread: Ints, time: Ints) -> Ints:
    """The module of each launch; for one by a node of backward without a module's range within
    the node, that of the operator of forward.
    """
    module = modules.at(thread, time)
    node, forward = forward_of(trace, thread, time)
    begun = np.append(trace.ranges.start_ns, -MAX_TIME_NS)[module]
    rows = np.flatnonzero((forward >= 0) & (begun <= np.append(trace.nodes.start_ns, 0)[node]))
    operators = trace.operators
    of_forward = modules.at(operators.thread[forward[rows]], operators.start_ns[forward[rows]])
    module[rows] = np.where(of_forward >= 0, of_forward, module[rows])
    return module


def _what_is_missing(trace: Trace) -> Iterator[str]:
    """Sentences about kernels without a launch or a module of their own."""
    kernels = trace.kernels
    if missing := int((~kernels.is_launched).sum()):
        yield f"{missing} of {len(kernels)} kernels have no launch in the file, and no phase."
    in_graph, marked = int(kernels.is_in_graph.sum()), int((kernels.mark >= 0).sum())
    where = (
        "they have no module, because PyTorch marked none "
        "(torch.cuda.graph_annotations.mark_kernels)"
    )
    if marked:
        where = f"{marked} of them have a module, marked by PyTorch"
    if in_graph:
        yield (
            f"{in_graph} kernels came from CUDA graphs: they belong to the phase that launched "
            f"the graph, so a graph of a whole step cannot be split; {where}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWindows(PhaseWindows):
    """The host's time in each phase of the profiled steps, by step and in order of time."""

    step: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of a trace that is profiled."""

    steps: StepTimes
    """The profiled steps, in order of time."""
    labels: tuple[StepLabel, ...]
    """One for each of them; empty if nothing tells them apart."""
    windows: HostWindows
    is_whole_trace: bool
    is_warmup: bool
    notes: tuple[str, ...]
    """Sentences about steps that are left out, or empty."""
    number: Ints
    """Index into `steps` for each of the attribution's steps, -1 for those left out; the last
    element is -1.
    """
    is_cut: Mask
    """Whether each of the attribution's steps is left out because an edge of the file cuts it;
    the last element is False.
    """

    def contains(self, time_ns: Ints) -> Mask:
        """Whether each time of the host lies in a profiled step; True for all of a whole trace."""
        if self.is_whole_trace:
            return np.ones(len(time_ns), dtype=np.bool_)
        return self.steps.at(time_ns) >= 0

    def step_of(self, step: Ints) -> Ints:
        """Index into `steps` for kernels or copies with these steps of the attribution; -1 for
        those in no step.
        """
        return np.zeros_like(step) if self.is_whole_trace else self.number[step]


def select_steps(attribution: Attribution) -> Selection:
    """Select the steps that are not warm-up; all steps if there are no others; the whole trace if
    it has no steps.

    Steps that the profiler did not record are left out: those without any kernel or copy that
    launched some, or that lie before or after all calls of the host. A step that launched nothing
    is one, unless no kernel or copy has its launch in any step.
    """
    steps = attribution.plan.steps
    is_warmup = bool(steps.is_warmup.all()) and len(steps) > 0
    is_empty, is_recorded = _recorded(attribution)
    wanted = (~steps.is_warmup | is_warmup) & is_recorded
    is_cut = _cut_off(attribution) & wanted
    if is_cut.all() or (is_cut == wanted).all():
        is_cut = np.zeros_like(is_cut)
    used = np.flatnonzero(wanted & ~is_cut)
    number = np.full(len(steps) + 1, -1, dtype=np.int64)
    number[used] = np.arange(len(used))
    profiled = chosen(steps, used)
    if len(used):
        latest = max(_extent(attribution.trace)[1], int(profiled.start_ns.max()))
        end_ns = np.clip(profiled.end_ns, profiled.start_ns, latest)
        profiled = replace(profiled, end_ns=end_ns)
    else:
        first, last = _extent_on_device(attribution.trace)
        never = np.zeros(1, dtype=np.bool_)
        profiled = StepTimes(start_ns=np.array([first]), end_ns=np.array([last]), is_warmup=never)
    labels = tuple(attribution.plan.labels[number] for number in used)
    if all(label == StepLabel() for label in labels):
        labels = ()
    return Selection(
        steps=profiled,
        labels=labels,
        windows=_windows(attribution, profiled, is_whole_trace=not len(used)),
        is_whole_trace=not len(used),
        is_warmup=is_warmup,
        is_cut=np.append(is_cut, False),
        notes=tuple(_notes_on_steps(is_empty, is_recorded, is_cut)),
        number=number,
    )


def _recorded(attribution: Attribution) -> tuple[Mask, Mask]:
    """Whether each step has no kernel or copy, and whether the profiler recorded it."""
    steps, calls = attribution.plan.steps, attribution.trace.api_calls
    in_step = attribution.jobs.step
    is_empty = np.bincount(in_step[in_step >= 0], minlength=len(steps)) == 0
    if is_empty.all():
        # what the file has of the device is in none of them, and may be of any
        return is_empty, np.full(len(steps), len(in_step) == 0)
    if not len(calls):
        return is_empty, np.ones(len(steps), dtype=np.bool_)
    is_launching = attribution.trace.named(calls, ApiCallKind.LAUNCH.is_done_by)
    has_launched = steps.number_of(calls.start_ns[is_launching]) > 0
    first, last = calls.start_ns.min(), calls.start_ns.max()
    is_outside = (steps.end_ns <= first) | (steps.start_ns > last)
    return is_empty, ~(is_empty & (has_launched | is_outside))


def _cut_off(attribution: Attribution) -> Mask:
    """Whether an edge of the file cuts each step: the host launched MIN_LOST kernels in it before
    the first, or after the last, whose run is in the file.
    """
    steps, trace = attribution.plan.steps, attribution.trace
    launch = trace.kernels.launch_ns[trace.kernels.is_launched]
    lost = trace.api_calls.start_ns[lost_launches(trace)]
    if not len(launch) or not len(lost):
        return np.zeros(len(steps), dtype=np.bool_)
    beyond = lost[(lost < launch.min()) | (lost > launch.max())]
    in_step = steps.at(beyond)
    return np.bincount(in_step[in_step >= 0], minlength=len(steps)) >= MIN_LOST


def _notes_on_steps(is_empty: Mask, is_recorded: Mask, is_cut: Mask) -> Iterator[str]:
    count = len(is_empty)
    if count and not is_recorded.any():
        yield "No kernel or copy has its launch in a step: the file is taken as a whole."
        return
    if cut := int(is_cut.sum()):
        yield (
            f"{cut} of {count} steps lie at an edge of the file, without the kernels of some of "
            "their launches, and are left out."
        )
    if unrecorded := int((~is_recorded).sum()):
        yield f"{unrecorded} of {count} steps were not recorded by the profiler, and are left out."
    if 0 < (empty := int((is_empty & is_recorded).sum())) < count:
        yield f"{empty} of {count} steps launched no kernel: they count in all averages."


def _extent(trace: Trace) -> tuple[int, int]:
    """Start of the trace's first event and end of its last; 0 and 0 for an empty trace."""
    work, calls = joined(trace.kernels, trace.copies), trace.api_calls
    starts = np.concatenate([work.start_ns, calls.start_ns, trace.ranges.start_ns])
    ends = np.concatenate([work.end_ns, calls.end_ns, trace.ranges.end_ns])
    if not len(starts):
        return 0, 0
    return int(starts.min()), int(ends.max())


def _extent_on_device(trace: Trace) -> tuple[int, int]:
    """Start of the first kernel or copy and end of the last; those of all events if there are no
    such.
    """
    work = joined(trace.kernels, trace.copies)
    if trace.is_of_host or not len(work):
        return _extent(trace)
    return int(work.start_ns.min()), int(work.end_ns.max())


def _windows(attribution: Attribution, steps: StepTimes, *, is_whole_trace: bool) -> HostWindows:
    """The windows that begin in a step, cut off at its end; in a whole trace, all windows, or none
    if of nothing that the device ran it is known to be of one.
    """
    windows, jobs = attribution.plan.windows, attribution.jobs
    if is_whole_trace and (jobs.phase == CODES[LaunchPhase.UNATTRIBUTED]).all():
        windows = chosen(windows, NO_ROWS)
    start, end = windows.start_ns, windows.end_ns
    if is_whole_trace:
        # what was launched before the first event of the device is a part of the file too
        bounds = steps.start_ns[0], steps.end_ns[0]
        start, end = np.clip(start, *bounds), np.clip(end, *bounds)
    step = steps.at(start)
    cut_end = np.clip(end, start, np.maximum(start, np.append(steps.end_ns, 0)[step]))
    of_steps = HostWindows(step=step, phase=windows.phase, start_ns=start, end_ns=cut_end)
    order = np.lexsort((end, start, step))
    return chosen(of_steps, order[step[order] >= 0])


def frame_of(times: Times) -> pd.DataFrame:
    """The columns as a data frame, with one more, `duration_ns`."""
    return pd.DataFrame(times.by_name()).assign(duration_ns=times.duration_ns)


def by_phase(frame: pd.DataFrame) -> Iterator[tuple[LaunchPhase, pd.DataFrame]]:
    """Yield each phase that has rows, and its rows."""
    for code, phase in enumerate(PHASES):
        rows = frame[frame["phase"] == code]
        if len(rows):
            yield phase, rows


def by_step(frame: pd.DataFrame, num_steps: int) -> Iterator[tuple[LaunchPhase, dict[str, Any]]]:
    """Yield each phase that has anything, and the sums of the columns after `phase` and `step` in
    each step.

    Columns whose name ends in `_s` hold nanoseconds.
    """
    place = frame["phase"].to_numpy(np.int64) * num_steps + frame["step"]
    sums: dict[str, NDArray[Any]] = {}
    for name in frame.columns[2:]:
        values = frame[name].to_numpy(np.float64)
        sums[name] = np.bincount(place, values, len(PHASES) * num_steps).reshape(-1, num_steps)
    for code, phase in enumerate(PHASES):
        by_name: dict[str, Any] = {}
        has_any = False
        for name, by_phase_and_step in sums.items():
            in_steps = by_phase_and_step[code]
            has_any |= bool(in_steps.any())
            values = in_steps / 1e9 if name.endswith("_s") else in_steps.astype(np.int64)
            by_name[name] = tuple(values.tolist())
        if has_any:
            yield phase, by_name


def totals(
    frame: pd.DataFrame, make: Callable[..., Made], **by: Callable[[Any], object]
) -> Iterator[Made]:
    """Yield what `make` makes of each group of rows, the longest first: of its keys, the number
    `count` of its rows, and their time `total_s`. `by` says what the key in each column stands for.

    Groups of equal length are in the order of their keys.
    """
    groups = frame.groupby(list(by))["duration_ns"]
    # `agg` is slow
    rows = pd.DataFrame({"count": groups.size(), "total_s": groups.sum() / 1e9}).reset_index()
    rows = rows.sort_values("total_s", ascending=False, kind="stable")
    records: Iterable[Any] = rows.to_dict("records")
    for row in records:
        yield make(**row | {name: meaning(row[name]) for name, meaning in by.items()})
