"""The steps that a profile covers, and the host's phases in them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints
from cs336_systems.analysis.kernels.attribution import Attribution
from cs336_systems.analysis.kernels.phases import NO_ROWS, Codes, Plan
from cs336_systems.analysis.kernels.timeline import Timeline
from cs336_systems.analysis.kernels.trace import Trace

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


def _windows(plans: Mapping[int, Plan], steps: HostSteps, *, is_whole_trace: bool) -> HostWindows:
    """The windows that begin in a step, cut off at its end."""
    found: list[tuple[Ints, Codes, Ints, Ints]] = [(NO_ROWS, NO_CODES, NO_ROWS, NO_ROWS)]
    for index, plan in enumerate(plans.values()):
        mine = np.flatnonzero((steps.process == index) | is_whole_trace)
        step = np.append(mine, -1)[Timeline(steps.start_ns[mine], steps.end_ns[mine]).at(plan.start)]
        rows = np.flatnonzero(step >= 0)
        found.append((step[rows], plan.phase[rows], plan.start[rows], plan.end[rows]))
    step, phase, start, end = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((end, start, step))
    end = np.clip(end, start, np.maximum(start, steps.end_ns[step]))
    return HostWindows(step=step[order], phase=phase[order], start_ns=start[order], end_ns=end[order])
