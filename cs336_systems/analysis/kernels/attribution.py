"""The phase, step and module of each kernel, the steps that a profile covers, and sums over kernels.

A kernel runs later than the Python code that launched it, and autograd launches backward's kernels from its own thread.
So a kernel belongs to the phase in which it was launched, whatever thread of the process launched it, and to the module
whose range was innermost on the launching thread at that time. Hooks launch collectives while some module's range is
open: a collective belongs to no module, but to the range around a gather or scatter of parameters, if there is one.

The tables of a profile are sums over one long frame, with a row for each kernel and copy of the trace. Times are whole
nanoseconds, so that sums are exact.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import Columns, Ints, Mask, chosen, groups
from cs336_systems.analysis.kernels.classes import NO_COLLECTIVE, collective_codes
from cs336_systems.analysis.kernels.phases import (
    CODES,
    NO_ROWS,
    PHASES,
    Codes,
    LaunchPhase,
    PhaseNames,
    PhasePlan,
    PhaseSource,
    phase_plan,
)
from cs336_systems.analysis.kernels.trace import DeviceWork, Nesting, Ranges, Trace

_SHARDS = re.compile(r"(?:gather|wait|scatter) |FSDP::")
"""Beginning of the names of ranges around a gather of a unit's parameters, a wait for it, or a scatter of gradients.

The last one is PyTorch's fully_shard.
"""
_OF_LIBRARY = re.compile(r"nccl|gloo:")
"""Beginning of the names of ranges that PyTorch (nccl:all_reduce) and NCCL (ncclAllReduce) put around a collective."""


class AttributionError(AssertionError):
    """The parts do not add up to the whole, which is a bug of this program, not a fault of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Columns):
    """Phase, step and module of each row of a `DeviceWork`."""

    phase: Codes
    step: Ints
    """Index into `Steps`, -1 outside of every step."""
    module: Ints
    """Index into the trace's ranges, -1 outside of every module's range."""
    is_recomputed: Mask
    """Launched by a forward range inside backward, so it recomputes a part of forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(Columns):
    """The steps of all processes, each process in order."""

    process: Ints
    start_ns: Ints
    end_ns: Ints
    is_warmup: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The phase, step and module of every kernel and copy of a trace."""

    trace: Trace
    kernels: Placement
    copies: Placement
    steps: Steps
    parent: Ints
    """For each range of the trace, the innermost module's range around it on its thread; -1 for none.

    A forward range inside backward, a gather and a scatter have no parent, and so begin a path of their own.
    """
    plans: Mapping[int, PhasePlan]
    """The phases and steps of each process that has kernels or copies, by process id."""
    notes: tuple[str, ...]

    @property
    def sources(self) -> Mapping[int, PhaseSource]:
        """The evidence for the phases of each process."""
        return {process: plan.source for process, plan in self.plans.items()}

    def module_path(self, index: int) -> tuple[str, ...]:
        """Names of the ranges around and including range `index`, outermost first."""
        path = []
        while index >= 0:
            path.append(self.trace.strings[self.trace.ranges.name[index]])
            index = int(self.parent[index])
        return tuple(reversed(path))


def attribute(trace: Trace, names: PhaseNames | None = None) -> Attribution:
    """Find the phase, step and module of every kernel and copy; raise AttributionError unless they add up."""
    names = PhaseNames() if names is None else names
    plans = dict(_plans(trace, names))
    modules = _Modules(trace, names, plans)
    steps, first_step = _join_steps(plans)
    placements = [
        _place(work, collective_codes(work.name, trace.strings), plans, first_step, modules)
        for work in (trace.kernels, trace.copies)
    ]
    for work, placement in zip((trace.kernels, trace.copies), placements, strict=True):
        check_sums(work, placement)
    notes = dict.fromkeys(note for plan in plans.values() for note in plan.notes)
    return Attribution(
        trace=trace,
        kernels=placements[0],
        copies=placements[1],
        steps=steps,
        parent=modules.parent,
        plans=plans,
        notes=(*trace.notes, *notes, *_what_is_missing(trace)),
    )


def check_sums(work: DeviceWork, placement: Placement) -> None:
    """Raise AttributionError unless each row has one phase, and the phases' times add up to the nanosecond."""
    if len(placement) != len(work):
        raise AttributionError(f"{len(work)} rows went in, {len(placement)} came out")
    count = np.bincount(placement.phase, minlength=len(PHASES))
    time_ns = np.zeros(len(PHASES), dtype=np.int64)
    np.add.at(time_ns, placement.phase, work.duration_ns)
    if count.sum() != len(work) or time_ns.sum() != work.duration_ns.sum():
        raise AttributionError(
            f"phases hold {count.sum()} rows and {time_ns.sum()} ns of {len(work)} rows and {work.duration_ns.sum()} ns"
        )


def _plans(trace: Trace, names: PhaseNames) -> Iterator[tuple[int, PhasePlan]]:
    """The plan of each process that has kernels or copies."""
    ranges = dict(groups(trace.ranges.process))
    is_launched = np.flatnonzero(trace.kernels.is_launched)
    launched = dict(groups(trace.kernels.process[is_launched]))
    for process in np.union1d(trace.kernels.process, trace.copies.process).tolist():
        rows, kernels = ranges.get(process, NO_ROWS), launched.get(process, NO_ROWS)
        yield process, phase_plan(trace, process, rows, is_launched[kernels], names)


class _Modules:
    """Looks up the innermost range of a module on each thread. Ranges of phases, of steps and around them do not count.

    A forward range inside backward counts as a module, so that recomputed work has a name of its own.
    """

    def __init__(self, trace: Trace, names: PhaseNames, plans: Mapping[int, PhasePlan]) -> None:
        ranges = trace.ranges
        is_module = ranges.is_nested.copy()
        phases = [name for name, phase in names.phases.items() if phase is not LaunchPhase.LOSS]
        structure = [*phases, names.step, names.warmup, names.measure]
        is_module &= ~np.isin(ranges.name, trace.string_ids(*structure))
        for plan in plans.values():
            is_module[plan.around_steps] = False
        forward = np.flatnonzero(ranges.is_nested & np.isin(ranges.name, trace.string_ids(names.forward)))
        again = _in_backward(ranges, forward, plans)
        is_module[again] = True
        is_module[_beginning(trace, _OF_LIBRARY)] = False
        shards = np.flatnonzero(_beginning(trace, _SHARDS) & is_module)
        rows = np.flatnonzero(is_module)
        self.parent: Ints = np.full(len(ranges), -1, dtype=np.int64)
        self._modules = dict(self._timelines(ranges, rows))
        self._forwards = dict(self._timelines(ranges, forward))
        for row_of, timeline in self._modules.values():
            self.parent[row_of[:-1]] = row_of[timeline.parent]
        self.parent[again] = self.parent[shards] = -1
        self._is_shards: Mask = np.append(_beginning(trace, _SHARDS), False)

    @staticmethod
    def _timelines(ranges: Ranges, rows: Ints) -> Iterator[tuple[int, tuple[Ints, Nesting]]]:
        for thread, own in groups(ranges.thread[rows]):
            on_thread = rows[own]
            timeline = Nesting(ranges.start_ns[on_thread], ranges.end_ns[on_thread])
            yield thread, (np.append(on_thread, -1), timeline)

    def at(self, thread: Ints, time: Ints) -> tuple[Ints, Mask]:
        """The innermost module range of each launch, and whether the launch is inside a forward range of its thread."""
        module = np.full(len(thread), -1, dtype=np.int64)
        is_forward = np.zeros(len(thread), dtype=np.bool_)
        for number, rows in groups(thread):
            if number in self._modules:
                row_of, timeline = self._modules[number]
                module[rows] = row_of[timeline.at(time[rows])]
            if number in self._forwards:
                is_forward[rows] = self._forwards[number][1].at(time[rows]) >= 0
        return module, is_forward

    def without_collectives(self, module: Ints, collective: Codes) -> Ints:
        """The modules, but none for collectives unless their module is a gather or a scatter."""
        kept: Ints = np.where((collective == NO_COLLECTIVE) | self._is_shards[module], module, -1)
        return kept


def _beginning(trace: Trace, pattern: re.Pattern[str]) -> Mask:
    """Whether each range's name begins with the pattern."""
    names = [index for index, name in enumerate(trace.strings) if pattern.match(name)]
    return np.isin(trace.ranges.name, names)


def _in_backward(ranges: Ranges, rows: Ints, plans: Mapping[int, PhasePlan]) -> Ints:
    """The ranges among `rows` that begin in backward."""
    found = [NO_ROWS]
    for process, own in groups(ranges.process[rows]):
        if process in plans:
            phase = plans[process].phase_at(ranges.start_ns[rows[own]])
            found.append(rows[own][phase == CODES[LaunchPhase.BACKWARD]])
    return np.concatenate(found)


def _join_steps(plans: Mapping[int, PhasePlan]) -> tuple[Steps, Mapping[int, int]]:
    """The steps of all processes, and the index of each process's first."""
    counts = [len(plan.step_start) for plan in plans.values()]
    first = dict(zip(plans, np.cumsum([0, *counts]).tolist(), strict=False))
    joined = Steps(
        process=np.repeat(np.array(list(plans), dtype=np.int64), counts),
        start_ns=np.concatenate([NO_ROWS, *(plan.step_start for plan in plans.values())]),
        end_ns=np.concatenate([NO_ROWS, *(plan.step_end for plan in plans.values())]),
        is_warmup=np.concatenate([np.zeros(0, dtype=np.bool_), *(plan.step_is_warmup for plan in plans.values())]),
    )
    return joined, first


def _place(
    work: DeviceWork,
    collective: Codes,
    plans: Mapping[int, PhasePlan],
    first_step: Mapping[int, int],
    modules: _Modules,
) -> Placement:
    phase = np.full(len(work), CODES[LaunchPhase.UNATTRIBUTED], dtype=np.int8)
    step = np.full(len(work), -1, dtype=np.int64)
    module = np.full(len(work), -1, dtype=np.int64)
    is_recomputed = np.zeros(len(work), dtype=np.bool_)
    launched = np.flatnonzero(work.is_launched)
    for process, own in groups(work.process[launched]):
        plan, rows = plans[process], launched[own]
        time = work.launch_ns[rows]
        phase[rows] = plan.phase_at(time)
        found = Nesting(plan.step_start, plan.step_end).at(time)
        step[rows] = np.where(found < 0, -1, found + first_step[process])
    module[launched], in_forward = modules.at(work.thread[launched], work.launch_ns[launched])
    module = modules.without_collectives(module, collective)
    is_recomputed[launched] = in_forward & (phase[launched] == CODES[LaunchPhase.BACKWARD])
    return Placement(phase=phase, step=step, module=module, is_recomputed=is_recomputed)


def _what_is_missing(trace: Trace) -> Iterator[str]:
    if missing := int((~trace.kernels.is_launched).sum()):
        yield f"{missing} of {len(trace.kernels)} kernels have no launch in the file, and no phase."
    if in_graph := int(trace.kernels.is_in_graph.sum()):
        yield (
            f"{in_graph} kernels came from CUDA graphs: they belong to the phase that launched the graph, "
            "so a graph of a whole step cannot be split."
        )


NO_CODES: Codes = np.zeros(0, dtype=np.int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSteps(Columns):
    """The profiled steps by process, in order of time."""

    process: Ints
    """Index into the trace's processes; 0 if the whole trace counts as one step."""
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWindows(Columns):
    """The host's time in each phase of the steps, by step and in order of time."""

    step: Ints
    phase: Codes
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of a trace that is profiled."""

    steps: HostSteps
    windows: HostWindows
    processes: Ints
    """Process ids as in the trace."""
    is_whole_trace: bool
    is_warmup: bool
    number: Ints
    """Index into `steps` for each of the attribution's steps, -1 for those left out; the last element is -1."""

    def step_of(self, step: Ints) -> Ints:
        """Index into `steps` for kernels or copies with these steps of the attribution; -1 for those in no step."""
        return np.zeros_like(step) if self.is_whole_trace else self.number[step]

    def process_of(self, process: Ints) -> Ints:
        """Index into `processes` for process ids of kernels, copies or calls; -1 for processes without kernels."""
        if self.is_whole_trace:
            return np.zeros_like(process)
        at = np.searchsorted(self.processes, process)
        return np.where(np.append(self.processes, -1)[at] == process, at, -1)


def select(attribution: Attribution) -> Selection:
    """Select the steps that are not warm-up; all steps if there are no others; the whole trace if it has no steps."""
    steps = attribution.steps
    processes = np.array(list(attribution.plans), dtype=np.int64)
    is_warmup = bool(steps.is_warmup.all()) and len(steps) > 0
    used = np.flatnonzero(~steps.is_warmup | is_warmup)
    number = np.full(len(steps) + 1, -1, dtype=np.int64)
    number[used] = np.arange(len(used))
    first, last = _extent(attribution.trace)
    if len(used):
        host = HostSteps(
            process=np.searchsorted(processes, steps.process[used]),
            start_ns=steps.start_ns[used],
            end_ns=np.clip(steps.end_ns[used], steps.start_ns[used], max(last, int(steps.start_ns[used].max()))),
        )
    else:
        host = HostSteps(process=np.zeros(1, np.int64), start_ns=np.array([first]), end_ns=np.array([last]))
    return Selection(
        steps=host,
        windows=_windows(attribution.plans, host, is_whole_trace=not len(used)),
        processes=processes,
        is_whole_trace=not len(used),
        is_warmup=is_warmup,
        number=number,
    )


def _extent(trace: Trace) -> tuple[int, int]:
    """Start of the trace's first event and end of its last; 0 and 0 for an empty trace."""
    host = trace.ranges
    parts = [
        (part.start_ns, part.start_ns + part.duration_ns) for part in (trace.kernels, trace.copies, trace.api_calls)
    ]
    parts = [(start, end) for start, end in (*parts, (host.start_ns, host.end_ns)) if len(start)]
    first = min((int(start.min()) for start, _ in parts), default=0)
    return first, max((int(end.max()) for _, end in parts), default=0)


def _windows(plans: Mapping[int, PhasePlan], steps: HostSteps, *, is_whole_trace: bool) -> HostWindows:
    """The windows that begin in a step, cut off at its end."""
    found: list[tuple[Ints, Codes, Ints, Ints]] = [(NO_ROWS, NO_CODES, NO_ROWS, NO_ROWS)]
    for index, plan in enumerate(plans.values()):
        mine = np.flatnonzero((steps.process == index) | is_whole_trace)
        step = np.append(mine, -1)[Nesting(steps.start_ns[mine], steps.end_ns[mine]).at(plan.start)]
        rows = np.flatnonzero(step >= 0)
        found.append((step[rows], plan.phase[rows], plan.start[rows], plan.end[rows]))
    step, phase, start, end = (np.concatenate(parts) for parts in zip(*found, strict=True))
    cut_end = np.clip(end, start, np.maximum(start, steps.end_ns[step]))
    windows = HostWindows(step=step, phase=phase, start_ns=start, end_ns=cut_end)
    return chosen(windows, np.lexsort((end, start, step)))


def frame_of(columns: Columns) -> pd.DataFrame:
    """The columns as a data frame, with one more, `duration_ns`."""
    frame = pd.DataFrame({field.name: getattr(columns, field.name) for field in fields(columns)})
    return frame.assign(duration_ns=frame["end_ns"] - frame["start_ns"])


def by_phase(frame: pd.DataFrame) -> Iterator[tuple[LaunchPhase, pd.DataFrame]]:
    """Yield each phase that has rows, and its rows."""
    for code, phase in enumerate(PHASES):
        if len(rows := frame[frame["phase"] == code]):
            yield phase, rows


def totals(frame: pd.DataFrame, *by: str) -> Iterator[Any]:
    """Yield a named tuple for each group, the longest first: its keys, the number `count` of its rows, and `total_ns`.

    Groups of equal length are in the order of their keys.
    """
    found = frame.groupby(list(by))["duration_ns"].agg(count="size", total_ns="sum").reset_index()
    yield from found.sort_values("total_ns", ascending=False, kind="stable").itertuples()
