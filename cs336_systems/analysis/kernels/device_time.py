"""The time of each phase on the device, how long it was busy, why it was idle, and what in a trace
cannot be.

A phase ends on the device when the last kernel or copy launched before its end on the host has run,
or when the host leaves the phase, if that is later. A CUDA event that the host records as it leaves
the phase shows the same time.

Collectives run on streams of their own, for which an event of the main stream does not wait. Where
a later phase of the step, `communication`, makes the main stream wait for them, a phase ends
without those that it leaves running.

The first of these rules that holds gives the cause of an idle time of a device within a step.
`next` is the kernel or copy that ends the idle time.

1. Nothing follows in the step: END_OF_STEP. 2. The host is not the cause: BETWEEN_KERNELS. The call
that launched `next` had returned before the idle time began, or
   had launched earlier work too (a CUDA graph), or the device took the larger part of the idle time
   to begin `next`. A launch needs LAUNCH_LATENCY_S to reach an idle device. In the other rules the
   device waited for the host until the call that launched `next`.
3. For more than half of that wait the host made no CUDA call, in pauses longer than HOST_PAUSE_S:
HOST_PAUSE. 4. When the idle time began, the host was in a call that waits for the device, or had
left one less than WAIT_SLACK_S
   before, and that call was over when `next` was launched: HOST_WAITED. The start of a step is
   exempt from this rule.
5. Otherwise: LATE_LAUNCH.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..columns import Columns, Ints, Mask, chosen, groups, joined
from .attribution import HostWindows, Jobs, Selection, frame_of, phase_at, totals
from .calls import TO_HOST, ApiCallKind, call_name
from .collectives import NO_COLLECTIVE
from .modules import RangeParts
from .phases import CODES, PHASES, Codes, LaunchPhase, Steps
from .short_names import short_name
from .step_profile import CopyTimes, Gap, HostCalls, IdleCause, IdleTimes
from .trace import MAX_TIME_NS, DeviceWork, Nesting, Strings, Trace, Union, of_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls(Columns):
    """The CUDA calls of a trace."""

    name: Ints
    """Index into `Host.names`."""
    thread: Ints
    start_ns: Ints
    end_ns: Ints
    is_launch: Mask
    is_kernel: Mask
    """The call launches a kernel or a CUDA graph."""
    is_wait: Mask
    """The call makes the host wait for the device: a synchronisation, or a copy to the host
    followed by one.

    PyTorch does this for `.item()`, whose copy itself may take until the device has reached it.
    """
    is_of_copy: Mask
    """The call waits for a copy to the host only."""


class Host:
    """Looks up CUDA calls."""

    def __init__(self, trace: Trace) -> None:
        api = trace.api_calls
        called = Strings()
        names = of_names(api.name, trace.strings, lambda name: called.id(call_name(name)), np.int64)
        self.names = called.all
        launches, waits, kernels = (
            call.among(api.name, trace.strings)
            for call in (ApiCallKind.LAUNCH, ApiCallKind.WAIT, ApiCallKind.KERNELS)
        )
        copies, their_waits = _copies_awaited(trace, launches, waits)
        of_copy = waits & launches
        of_copy[copies] = of_copy[their_waits] = waits[copies] = True
        self.calls = Calls(
            name=names,
            thread=api.thread,
            start_ns=api.start_ns,
            end_ns=api.start_ns + api.duration_ns,
            is_launch=launches,
            is_kernel=kernels,
            is_wait=waits,
            is_of_copy=of_copy,
        )

    def returned(self, call: Ints, launch_ns: Ints) -> Ints:
        """When each launching call returned; its start if the call waits itself or is not in the
        trace.
        """
        end = np.where(self.calls.is_wait, self.calls.start_ns, self.calls.end_ns)
        returned: Ints = np.where(call < 0, launch_ns, np.append(end, 0)[call])
        return returned

    def longest_call(self, start_ns: int, end_ns: int) -> str:
        """The function in which the host spent most of the interval, on any thread; empty if
        there is none.
        """
        calls = self.calls
        rows = np.flatnonzero((calls.start_ns < end_ns) & (calls.end_ns > start_ns))
        time = np.minimum(calls.end_ns[rows], end_ns) - np.maximum(calls.start_ns[rows], start_ns)
        total = np.bincount(calls.name[rows], time, minlength=1)
        return self.names[int(total.argmax())] if len(rows) else ""


def _copies_awaited(trace: Trace, launches: Mask, waits: Mask) -> tuple[Ints, Ints]:
    """Copies to the host whose thread waits before it launches anything else, and the calls that
    wait.
    """
    api, copies = trace.api_calls, trace.copies
    to_host = [index for index, name in enumerate(trace.strings) if TO_HOST.search(name)]
    is_copy = np.isin(np.arange(len(api)), copies.call[np.isin(copies.name, to_host)])
    # of two calls with one start the longer comes first: a profiler may show a call around its own
    by_thread = np.lexsort((-api.duration_ns, api.start_ns, api.thread))
    by_thread = by_thread[(launches | waits)[by_thread]]
    call, following = by_thread[:-1], by_thread[1:]
    is_awaited = is_copy[call] & waits[following] & (api.thread[call] == api.thread[following])
    return call[is_awaited], following[is_awaited]


def host_calls(host: Host, selection: Selection) -> tuple[HostCalls, ...]:
    """Calls by function, phase and whether they wait, the longest total first.

    A call that waits after the last kernel launch of a step is in no phase, since it belongs to the
    benchmark's clock or to the next batch. A copy to the host, and the wait for it, stay in their
    phase.
    """
    calls = host.calls
    phase = phase_at(selection.windows, calls.start_ns)
    step = Nesting(selection.steps.start_ns, selection.steps.end_ns).at(calls.start_ns)
    last = np.full(len(selection.steps) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, step[calls.is_kernel], calls.start_ns[calls.is_kernel])
    is_of_end = calls.is_wait & ~calls.is_of_copy & (calls.start_ns > last[step])
    phase[is_of_end] = CODES[LaunchPhase.UNATTRIBUTED]
    placed = frame_of(calls).assign(phase=phase, step=step)
    return tuple(
        HostCalls(
            name=host.names[row.name],
            phase=PHASES[row.phase],
            count=row.count,
            total_s=row.total_ns / 1e9,
            is_launch=row.is_launch,
            is_wait=row.is_wait,
        )
        for row in totals(placed[step >= 0], "name", "phase", "is_wait", "is_launch")
    )


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps(Columns):
    """Start and end of each step on the device."""

    start_ns: Ints
    """When the host begins the first phase, or when the device has finished earlier work, if
    that is later.
    """
    end_ns: Ints
    """When the host's step ends, or when its last job ends, if that is later."""
    origin_ns: Ints
    """From where times within the step count: the host's start, or the device's where it still
    ran earlier work.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWindows(Columns):
    """Start and end of each phase on the host and on the device. On the device, each phase begins
    where the last ended.

    Work that a step launches after its last phase, or without any phase, is in a window of the
    phase `unattributed`.
    """

    step: Ints
    phase: Codes
    host_start_ns: Ints
    host_end_ns: Ints
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The jobs of one device, and the times when it was busy."""

    rows: Ints
    """Rows of `Jobs`, whose times are the union's intervals."""
    union: Union


def on_device(
    jobs: Jobs, selection: Selection, host: Host, *, is_of_host: bool
) -> tuple[DeviceSteps, DeviceWindows]:
    """Times of steps and phases on the device; if the jobs are operators of the host, times on
    the host.
    """
    steps, windows = selection.steps, _with_rest(selection.windows, selection.steps)
    is_first, is_rest = (
        np.diff(windows.step, prepend=-1) > 0,
        np.diff(windows.step, append=len(steps)) > 0,
    )
    launched = np.zeros(0, dtype=np.int64) if is_of_host else np.flatnonzero(jobs.is_launched)
    all_finished, others_finished = (
        Completion(jobs, rows)
        for rows in (launched, launched[jobs.collective[launched] == NO_COLLECTIVE])
    )
    leaves_collectives, ends = _is_before_wait(windows, steps, host), windows.end_ns
    finished = np.where(leaves_collectives, others_finished(ends), all_finished(ends))
    begin = windows.start_ns[is_first]
    begin = np.maximum(begin, all_finished(begin))
    # after the last phase, which lasts only as long as there is work
    is_after = is_rest & ~is_first
    ends = np.maximum(np.where(is_after, finished, ends), finished)
    end = np.maximum(pd.Series(ends).groupby(windows.step).cummax().to_numpy(), begin[windows.step])
    start = np.where(is_first, begin[windows.step], np.append(0, end[:-1]))
    found = DeviceWindows(
        step=windows.step,
        phase=windows.phase,
        host_start_ns=windows.start_ns,
        host_end_ns=windows.end_ns,
        start_ns=start,
        end_ns=end,
    )
    is_ahead = begin > windows.start_ns[is_first]
    spans = DeviceSteps(
        start_ns=begin,
        end_ns=np.maximum(end[is_rest], steps.end_ns),
        origin_ns=np.where(is_ahead, begin, steps.start_ns),
    )
    return spans, chosen(found, ~is_after | (end > start))


def _with_rest(windows: HostWindows, steps: Steps) -> HostWindows:
    """The windows, and in each step the time after the last of them, which is the whole of a
    step without phases.
    """
    last_end = steps.start_ns.copy()
    last_end[windows.step] = windows.end_ns  # the last assignment stays
    rest = HostWindows(
        step=np.arange(len(steps)),
        phase=np.full(len(steps), CODES[LaunchPhase.UNATTRIBUTED], dtype=np.int8),
        start_ns=last_end,
        end_ns=np.maximum(last_end, steps.end_ns),
    )
    both = joined(windows, rest)
    return chosen(both, np.argsort(both.step, kind="stable"))


def _is_before_wait(windows: HostWindows, steps: Steps, host: Host) -> Mask:
    """Whether a phase `communication` that waits for collectives comes after each window in its
    step.
    """
    calls = host.calls
    time = np.sort(calls.start_ns[ApiCallKind.STREAM_WAIT.among(calls.name, host.names)])
    waits = np.searchsorted(time, windows.end_ns) > np.searchsorted(time, windows.start_ns)
    waits &= windows.phase == CODES[LaunchPhase.COMMUNICATION]
    last = np.full(len(steps), -1, dtype=np.int64)
    last[windows.step[waits]] = np.flatnonzero(waits)  # the last assignment stays
    before: Mask = np.arange(len(windows)) < last[windows.step]
    return before


class Completion:
    """Looks up when the device has finished all of some work that was launched before a given
    time.
    """

    def __init__(self, work: DeviceWork, rows: Ints) -> None:
        rows = rows[np.argsort(work.launch_ns[rows], kind="stable")]
        self._launch = work.launch_ns[rows]
        self._end = np.append(-MAX_TIME_NS, np.maximum.accumulate(work.end_ns[rows]))

    def __call__(self, time: Ints) -> Ints:
        finished: Ints = self._end[np.searchsorted(self._launch, time)]
        return finished


def busy_ns(devices: list[Busy], spans: DeviceSteps, windows: DeviceWindows) -> tuple[Floats, Ints]:
    """Busy time in each window, as the mean over the devices that its step used; and the number
    of these devices.
    """
    total, count = np.zeros(len(windows), dtype=np.int64), np.zeros(len(spans), dtype=np.int64)
    for busy in devices:
        count += busy.union.within(spans.start_ns, spans.end_ns) > 0
        total += busy.union.within(windows.start_ns, windows.end_ns)
    return total / np.maximum(count, 1)[windows.step], count


def alone_ns(jobs: Jobs, rows: Ints, others: Ints, windows: DeviceSteps | DeviceWindows) -> Ints:
    """How long some of these jobs, and none of the others, run in each window on the device."""
    either, without = (
        Union(jobs.start_ns[own], jobs.end_ns[own]) for own in (np.append(rows, others), others)
    )
    return either.within(windows.start_ns, windows.end_ns) - without.within(
        windows.start_ns, windows.end_ns
    )


HOST_PAUSE_S = 1e-3
"""Eager PyTorch launches something every few microseconds, and takes some hundred to prepare the
longest phase.
"""
LAUNCH_LATENCY_S = 5e-6
"""From the end of a launch call to the start of its kernel on an idle device: 2 us on an H200,
rarely more than 5.
"""
WAIT_SLACK_S = 10e-6
"""Longest time between the end of a wait and the idle time that it explains; host and device
clocks agree no better.
"""
NUM_GAPS = 20

_PAUSE_NS, _LATENCY_NS, SLACK_NS = (
    round(time * 1e9) for time in (HOST_PAUSE_S, LAUNCH_LATENCY_S, WAIT_SLACK_S)
)

CAUSES = tuple(IdleCause)
UNKNOWN_CAUSE = -1
_CODE = {cause: code for code, cause in enumerate(CAUSES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps(Columns):
    """Idle times of devices within steps."""

    step: Ints
    start_ns: Ints
    end_ns: Ints
    before: Ints
    """Row of `Jobs` that ended before the idle time; -1 at the start of a step."""
    after: Ints
    """Row of `Jobs` that ends the idle time; -1 at the end of a step."""
    phase: Codes
    cause: Codes
    """Index into `CAUSES`; UNKNOWN_CAUSE if the launch of the following job is not in the trace."""


def find_gaps(
    jobs: Jobs, devices: list[Busy], spans: DeviceSteps, selection: Selection, host: Host
) -> Gaps:
    """All idle times of the devices that a step used, with their causes, by step and start."""
    found = [_gaps_of(busy, spans) for busy in devices]
    step, start, end, before, after = (
        np.concatenate(parts) for parts in zip(*([_NO_GAPS, *found]), strict=True)
    )
    phase = np.append(jobs.phase, np.int8(0))[after]
    ends_step = after < 0
    phase[ends_step] = _last_phase(selection)[step[ends_step]]
    cause = np.full(len(step), _CODE[IdleCause.END_OF_STEP], dtype=np.int8)
    followed = ~ends_step
    following = after[followed]
    found_causes = _Causes(host)(
        jobs, start[followed], end[followed], following, before[followed] >= 0
    )
    of_launch = _starts_its_launch(jobs)[following] | ~jobs.is_launched[following]
    cause[followed] = np.where(of_launch, found_causes, _CODE[IdleCause.BETWEEN_KERNELS])
    gaps = Gaps(
        step=step, start_ns=start, end_ns=end, before=before, after=after, phase=phase, cause=cause
    )
    return chosen(gaps, np.lexsort((start, step)))


_NO_GAPS = (np.zeros(0, dtype=np.int64),) * 5


def _gaps_of(busy: Busy, spans: DeviceSteps) -> tuple[Ints, ...]:
    steps = np.flatnonzero(busy.union.within(spans.start_ns, spans.end_ns))
    holes = busy.union.holes(spans.start_ns[steps], spans.end_ns[steps])
    rows = np.append(busy.rows, -1)
    return steps[holes.window], holes.start, holes.end, rows[holes.before], rows[holes.after]


def _last_phase(selection: Selection) -> Codes:
    """The last phase of each step."""
    last = np.full(len(selection.steps), CODES[LaunchPhase.UNATTRIBUTED], dtype=np.int8)
    last[selection.windows.step] = selection.windows.phase  # the last assignment stays
    return last


class _Causes:
    """Applies rules 2 to 5 to idle times."""

    def __init__(self, host: Host) -> None:
        self._host = host
        calls = host.calls
        called = Union(calls.start_ns, calls.end_ns)
        quiet_start, quiet_end = called.end[:-1], called.start[1:]
        is_pause = quiet_end - quiet_start > _PAUSE_NS
        self._pauses = Union(quiet_start[is_pause], quiet_end[is_pause])
        waits = np.flatnonzero(calls.is_wait)
        self._waits = [
            waits[rows][np.argsort(calls.start_ns[waits[rows]], kind="stable")]
            for _, rows in groups(calls.thread[waits])
        ]

    def __call__(self, jobs: Jobs, start: Ints, end: Ints, after: Ints, was_busy: Mask) -> Codes:
        launch = jobs.launch_ns[after]
        returned = self._host.returned(jobs.call[after], launch)
        late_until = np.clip(returned + _LATENCY_NS, start, end)
        waited_until = np.clip(launch, start, end)
        pause = self._pauses.within(start, waited_until)
        in_time = (returned <= start) | (2 * (late_until - start) < end - start)
        is_pause, is_wait = (
            2 * pause > waited_until - start,
            was_busy & self._was_waiting(start, launch),
        )
        cause = np.full(len(start), _CODE[IdleCause.LATE_LAUNCH], dtype=np.int8)
        # from the last rule to the first, since an earlier rule overrides a later one
        cause[is_wait] = _CODE[IdleCause.HOST_WAITED]
        cause[is_pause] = _CODE[IdleCause.HOST_PAUSE]
        cause[in_time] = _CODE[IdleCause.BETWEEN_KERNELS]
        cause[~jobs.is_launched[after]] = UNKNOWN_CAUSE
        return cause

    def _was_waiting(self, start: Ints, launch: Ints) -> Mask:
        calls = self._host.calls
        waiting = np.zeros(len(start), dtype=np.bool_)
        # the calls of one thread, of which only the last to begin can still be open
        for rows in self._waits:
            at = np.searchsorted(calls.start_ns[rows], start, side="right")
            wait_end = np.append(-MAX_TIME_NS, np.maximum.accumulate(calls.end_ns[rows]))[at]
            waiting |= (wait_end >= start - SLACK_NS) & (wait_end <= launch)
        return waiting


def _starts_its_launch(jobs: Jobs) -> Mask:
    """Whether each row is the first job of its launch; false for the later nodes of a CUDA
    graph.
    """
    in_order = frame_of(jobs).sort_values("start_ns", kind="stable")
    is_first: Mask = ~in_order.duplicated(["launch_ns", "thread"]).sort_index().to_numpy()
    return is_first


def longest_gaps(
    gaps: Gaps, jobs: Jobs, parts: RangeParts, trace: Trace, spans: DeviceSteps, host: Host
) -> Iterator[Gap]:
    """The NUM_GAPS longest idle times with a known cause, the longest first."""
    known = np.flatnonzero(gaps.cause != UNKNOWN_CAUSE)
    length = gaps.end_ns[known] - gaps.start_ns[known]
    longest = known[np.argsort(-length, kind="stable")[:NUM_GAPS]]
    for row in map(int, longest):
        step, start, end = int(gaps.step[row]), int(gaps.start_ns[row]), int(gaps.end_ns[row])
        before, after = int(gaps.before[row]), int(gaps.after[row])
        yield Gap(
            step=step,
            start_s=(start - int(spans.origin_ns[step])) / 1e9,
            duration_s=(end - start) / 1e9,
            phase=PHASES[gaps.phase[row]],
            cause=CAUSES[gaps.cause[row]],
            before=short_name(trace.strings[jobs.name[before]]) if before >= 0 else "",
            after=short_name(trace.strings[jobs.name[after]]) if after >= 0 else "",
            module=parts.names(int(parts.path[jobs.module[after]])) if after >= 0 else (),
            host_call=host.longest_call(start, end),
        )


def idle_times(gaps: Gaps, num_devices: Ints) -> tuple[IdleTimes, ...]:
    """Idle times by phase and cause, the longest first; the mean over the devices that a step
    uses.
    """
    length = gaps.end_ns - gaps.start_ns
    known = gaps.cause != UNKNOWN_CAUSE
    weighted = frame_of(gaps).assign(duration_ns=length / num_devices[gaps.step])[known]
    each = pd.DataFrame({"phase": gaps.phase, "cause": gaps.cause, "length": length})[known]
    spread = each.groupby(["phase", "cause"])["length"]
    medians, longest = spread.median().to_dict(), spread.max().to_dict()
    return tuple(
        IdleTimes(
            phase=PHASES[row.phase],
            cause=CAUSES[row.cause],
            count=row.count,
            total_s=row.total_ns / 1e9,
            median_s=float(medians[row.phase, row.cause]) / 1e9,
            longest_s=float(longest[row.phase, row.cause]) / 1e9,
        )
        for row in totals(weighted, "phase", "cause")
    )


_DIRECTIONS = (
    (re.compile(r"memset|fill", re.I), "fill"),
    (re.compile(r"HtoD|Host-?to-?Device|H2D", re.I), "host to device"),
    (TO_HOST, "device to host"),
    (re.compile(r"DtoD|Device-?to-?Device|D2D", re.I), "device to device"),
    (re.compile(r"PtoP|Peer", re.I), "peer to peer"),
)


def copy_kind(name: str) -> str:
    """Direction and memory of a copy by the name that profilers give it: `host to device,
    pageable`.
    """
    direction = next((words for pattern, words in _DIRECTIONS if pattern.search(name)), "copy")
    memory = next((word for word in ("pageable", "pinned") if word in name.casefold()), "")
    return f"{direction}, {memory}" if memory and direction != "fill" else direction


def copy_times(
    jobs: Jobs, devices: list[Busy], num_devices: Ints, spans: DeviceSteps, strings: Sequence[str]
) -> tuple[CopyTimes, ...]:
    """Copies and fills in the steps by kind, without those that are collectives, and the time
    without a kernel.
    """
    is_one = jobs.is_copy & (jobs.step >= 0) & (jobs.collective == NO_COLLECTIVE)
    kind_of = of_names(jobs.name, strings, copy_kind, np.object_)
    found = []
    for kind in [*dict.fromkeys(kind_of[is_one]), None] if is_one.any() else ():
        is_kind = is_one if kind is None else is_one & (kind_of == kind)
        alone = np.zeros(len(spans), dtype=np.float64)
        for busy in devices:
            own, kernels = busy.rows[is_kind[busy.rows]], busy.rows[~jobs.is_copy[busy.rows]]
            alone += alone_ns(jobs, own, kernels, spans)
        total_ns = int(jobs.duration_ns[is_kind].sum())
        alone_s = float((alone / np.maximum(num_devices, 1)).sum()) / 1e9
        found.append(
            CopyTimes(kind=kind, count=int(is_kind.sum()), total_s=total_ns / 1e9, alone_s=alone_s)
        )
    return tuple(sorted(found, key=lambda times: (times.kind is None, -times.total_s)))


def idle_notes(gaps: Gaps) -> tuple[str, ...]:
    """A note on idle times whose cause is unknown, if there are any."""
    unknown = gaps.cause == UNKNOWN_CAUSE
    if not unknown.any():
        return ()
    time_s = int((gaps.end_ns - gaps.start_ns)[unknown].sum()) / 1e9
    return (
        f"{int(unknown.sum())} idle times of the device, {time_s:.3g} s together, end with a "
        "kernel or copy without a launch in the file: their cause is unknown, and they are left "
        "out.",
    )


MIN_DOUBTFUL = 0.01
"""Smallest share of the kernels, or of the launches, that makes what is said of the whole
doubtful.
"""


def doubts(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sentences about what cannot be, with how often: those that put all times in doubt, then
    those that do not.
    """
    found = {} if trace.is_of_host else _counts(trace)
    told = [(count, f"{count} {text}") for text, count in found.items() if count]
    least = MIN_DOUBTFUL * max(len(trace.kernels), 1)
    return tuple(text for count, text in told if count >= least), tuple(
        text for count, text in told if count < least
    )


def _counts(trace: Trace) -> dict[str, int]:
    """What cannot be, with the number of kernels, copies or calls of which it is said."""
    kernels, work = trace.kernels, joined(trace.kernels, trace.copies)
    early = int((work.is_launched & (work.start_ns < work.launch_ns - SLACK_NS)).sum())
    empty = int((kernels.duration_ns == 0).sum())
    lost = _lost_launches(trace) if len(kernels) else 0
    covered, covering = _covered(chosen(work, ~work.is_in_graph))
    clocks = "the clocks of host and device do not agree"
    others = f"({covering} such): the others' times are too long"
    return {
        f"kernels and copies begin before the call that launched them: {clocks}": early,
        "kernels last no time: the profiler lost their times, and averages are too short": empty,
        (
            f"kernels and copies begin and end while another one of their stream runs {others}"
        ): covered,
        (
            "calls that wait for the device return before its work ends: some times are too long"
        ): _after_wait(trace, work),
        (
            f"of {len(trace.api_calls)} calls launched a kernel that is not in the file: events "
            "were lost"
        ): lost,
    }


def _covered(work: DeviceWork) -> tuple[int, int]:
    """How many jobs lie within another of their stream, and within how many; a graph's branches
    share a stream.
    """
    end = work.end_ns
    inner = outer = 0
    for _, of_device in groups(work.device):
        for _, rows in groups(work.stream[of_device]):
            own = of_device[rows]
            own = own[np.lexsort((-end[own], work.start_ns[own]))]
            own = own[work.duration_ns[own] > 0]
            reached = np.maximum.accumulate(end[own])
            is_inner = np.append(False, end[own][1:] <= reached[:-1])[: len(own)]
            inner += int(is_inner.sum())
            outer += len(np.unique(reached[is_inner]))
    return inner, outer


def _after_wait(trace: Trace, work: DeviceWork) -> int:
    """How many waits for a whole device are over before work that was launched before them is."""
    if len(np.unique(work.device)) > 1:  # it is not known for which device a call waits
        return 0
    waits = chosen(
        trace.api_calls, ApiCallKind.WAIT_FOR_DEVICE.among(trace.api_calls.name, trace.strings)
    )
    finished = Completion(work, np.flatnonzero(work.is_launched))(waits.start_ns)
    return int((finished > waits.start_ns + waits.duration_ns + SLACK_NS).sum())


def _lost_launches(trace: Trace) -> int:
    """How many calls launched a kernel that is not in the file; calls while a graph is captured
    launch none.
    """
    api, (launch, begin, end) = (
        trace.api_calls,
        (ApiCallKind.ONE_KERNEL, ApiCallKind.BEGIN_CAPTURE, ApiCallKind.END_CAPTURE),
    )
    is_lost = launch.among(api.name, trace.strings)
    begins, ends = (
        np.sort(api.start_ns[edge.among(api.name, trace.strings)]) for edge in (begin, end)
    )
    captures = Union(begins, np.append(ends, MAX_TIME_NS)[np.searchsorted(ends, begins)])
    is_lost &= captures.within(api.start_ns, api.start_ns + 1) == 0
    launched = np.concatenate([trace.kernels.call, trace.copies.call])
    is_lost[launched[launched >= 0]] = False
    return int(is_lost.sum())
