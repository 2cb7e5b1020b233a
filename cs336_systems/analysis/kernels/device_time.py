"""The time of each phase on the device, and how long the device was busy.

A phase ends on the device when the last kernel or copy launched before its end on the host has run,
or when the host leaves the phase, if that is later. A CUDA event that the host records as it leaves
the phase shows the same time.

Collectives run on streams of their own, for which an event of the main stream does not wait. Where
a later phase of the step, `communication`, makes the main stream wait for them, a phase ends
without those that it leaves running.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..columns import NO_ROWS, Ints, Mask, chosen, joined
from .attribution import HostWindows, Jobs, Selection
from .calls import ApiCallKind
from .collectives import NO_COLLECTIVE
from .host_calls import Host
from .phases import CODES, Codes, LaunchPhase
from .steps import StepTimes
from .trace import MAX_TIME_NS, DeviceWork, Times, Union

_UNATTRIBUTED = np.int8(CODES[LaunchPhase.UNATTRIBUTED])
UNSEEN_NS = 200_000
"""Shortest time of a wait without work of the device that shows work that the file does not have;
a driver's own part of a wait takes some ten microseconds.
"""
QUEUE_NS = 15_000
"""Longest time from the end of a launch to the start of its kernel on an idle device, with what
clocks of host and device differ.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps(Times):
    """Each step on the device: from when the host begins its first phase, or the device has
    finished earlier work, to when the host's step or its last job ends, the later of both each.
    """

    origin_ns: Ints
    """From where times within the step count: the host's start, or the device's where it still
    ran earlier work.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWindows(Times):
    """Start and end of each phase on the host and on the device. On the device, each phase begins
    where the last ended.

    Work that a step launches after its last phase, or without any phase, is in a window of the
    phase `unattributed`.
    """

    step: Ints
    phase: Codes
    host_start_ns: Ints
    host_end_ns: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The jobs of one device, and the times when it was busy."""

    rows: Ints
    """Rows of `Jobs`, whose times are the union's intervals."""
    union: Union


def times_on_device(
    jobs: Jobs, selection: Selection, host: Host, *, is_of_host: bool
) -> tuple[DeviceSteps, DeviceWindows]:
    """When each step and each phase began and ended on the device, in ns of the trace's clock.

    `jobs` is what the device ran, `selection` has the chosen steps and their phases as the host ran
    them, which launches ahead of the device. On the device a phase ends when the last job that was
    launched before its end on the host is done, at the earliest when the host's phase ends; the
    next begins there. The first phase of a step begins when the device is done with what was
    launched before. Phases before one that waits for collectives end without these.

    If `is_of_host`, the jobs are operators of a CPU, whose times are those of the host.
    """
    steps = selection.steps
    # time of a step in no phase is a window too, so that the windows follow each other
    windows = _with_rest(selection.windows, steps)
    is_first = np.diff(windows.step, prepend=-1) > 0
    is_rest = np.diff(windows.step, append=len(steps)) > 0
    launched = NO_ROWS if is_of_host else np.flatnonzero(jobs.is_launched)
    all_finished = Completion(jobs, launched)
    others_finished = Completion(jobs, launched[jobs.collective[launched] == NO_COLLECTIVE])
    begin = windows.start_ns[is_first]  # of each step
    # a whole trace begins with the first event of the device
    if not is_of_host and not selection.is_whole_trace:
        seen_from = int(steps.start_ns[0]) + unseen_ns(jobs, selection, host)
        begin = np.maximum(np.maximum(begin, all_finished(begin)), seen_from)
    host_end = windows.end_ns
    leaves_collectives = _is_before_wait(windows, steps, host)
    finished = np.where(leaves_collectives, others_finished(host_end), all_finished(host_end))
    end = np.maximum(_latest(np.maximum(host_end, finished), windows.step), begin[windows.step])
    start = np.where(is_first, begin[windows.step], np.append(0, end[:-1]))
    on_device = DeviceWindows(
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
    return spans, chosen(on_device, (windows.phase != _UNATTRIBUTED) | (end > start))


def unseen_ns(jobs: Jobs, selection: Selection, host: Host) -> int:
    """How long the first step lasts on the host before the file has what the device ran."""
    if selection.is_whole_trace:
        return 0
    begin, end = selection.steps.start_ns[0], selection.steps.end_ns[0]
    return max(_seen_from(jobs, host, int(end)) - int(begin), 0)


def _latest(end: Ints, step: Ints) -> Ints:
    """The latest of the ends so far in each step: a later phase ends no earlier, though its jobs
    may be done before those of the phase before it.
    """
    return pd.Series(end).groupby(step).cummax().to_numpy()


def _with_rest(windows: HostWindows, steps: StepTimes) -> HostWindows:
    """The windows, and the times of each step before, between and after them, the last of which is
    the whole of a step without phases.
    """
    is_first = np.diff(windows.step, prepend=-1) > 0
    reached = _latest(windows.end_ns, windows.step)
    since = np.where(is_first, steps.start_ns[windows.step], np.append(0, reached[:-1]))
    between = HostWindows(
        step=windows.step,
        phase=np.full(len(windows), _UNATTRIBUTED),
        start_ns=since,
        end_ns=windows.start_ns,
    )
    last_end = steps.start_ns.copy()
    last_end[windows.step] = reached  # the last assignment stays
    rest = HostWindows(
        step=np.arange(len(steps)),
        phase=np.full(len(steps), _UNATTRIBUTED),
        start_ns=last_end,
        end_ns=np.maximum(last_end, steps.end_ns),
    )
    both = joined(chosen(between, since < windows.start_ns), windows, rest)
    # `rest` is the last of its step, also where it lasts no time
    is_rest = np.arange(len(both)) >= len(both) - len(rest)
    return chosen(both, np.lexsort((both.end_ns, both.start_ns, is_rest, both.step)))


def _is_before_wait(windows: HostWindows, steps: StepTimes, host: Host) -> Mask:
    """Whether a phase `communication` that waits for collectives comes after each window in its
    step.
    """
    calls = host.calls
    waits = windows.number_of(calls.start_ns[host.does(ApiCallKind.STREAM_WAIT)]) > 0
    waits &= windows.phase == CODES[LaunchPhase.COMMUNICATION]
    last = np.full(len(steps), -1, dtype=np.int64)
    last[windows.step[waits]] = np.flatnonzero(waits)  # the last assignment stays
    return np.arange(len(windows)) < last[windows.step]


def _seen_from(jobs: Jobs, host: Host, first_end_ns: int) -> int:
    """From when on the file has what the device ran: before, it ran work of which the file shows
    only that something waited for it. Long ago, if nothing shows such work.

    The first job had waited in its queue, or the host had waited for the device in the first step,
    which ends at `first_end_ns`, while the device ran nothing that is in the file.
    """
    if not len(jobs):
        return -MAX_TIME_NS
    return max(_queued_until(jobs, host), _waited_until(jobs, host, first_end_ns))


def _queued_until(jobs: Jobs, host: Host) -> int:
    """When the first job began, if it had waited in its queue; long ago, if it had not.

    A host that had waited for the whole device before it launched the job knew its queue to be
    empty.
    """
    first = jobs.start_ns.argmin()
    call, launch = jobs.call[first], jobs.launch_ns[first]
    calls = host.calls
    waits = host.does(ApiCallKind.WAIT_FOR_DEVICE)
    has_waited = (waits & (calls.end_ns <= launch)).any()
    returned = host.returned(np.array([call]), np.array([launch]))[0]
    is_queued = jobs.is_launched[first] and jobs.start_ns[first] > returned + QUEUE_NS
    return int(jobs.start_ns[first]) if is_queued and not has_waited else -MAX_TIME_NS


def _waited_until(jobs: Jobs, host: Host, first_end_ns: int) -> int:
    """The end of the last call that waited for the device in the first step, before half of its
    jobs, while the device ran nothing of the file for most of it; long ago, if there is none.

    A wait returns when the device has finished, so that a device without work ends it at once.
    """
    calls = host.calls
    of_first = jobs.start_ns[jobs.step == 0]
    until = min(first_end_ns, int(np.median(of_first))) if len(of_first) else -MAX_TIME_NS
    is_early = calls.is_wait & (calls.end_ns < until)
    start, end = calls.start_ns[is_early], calls.end_ns[is_early]
    unseen = end - start - jobs.union().within(start, end)
    is_long = (unseen > UNSEEN_NS) & (2 * unseen > end - start)
    return int(end[is_long].max(initial=-MAX_TIME_NS))


class Completion:
    """Looks up when the device has finished all of some work that was launched before a given
    time.
    """

    def __init__(self, work: DeviceWork, rows: Ints) -> None:
        rows = rows[np.argsort(work.launch_ns[rows], kind="stable")]
        self._launch = work.launch_ns[rows]
        self._end = np.append(-MAX_TIME_NS, np.maximum.accumulate(work.end_ns[rows]))

    def __call__(self, time: Ints) -> Ints:
        return self._end[np.searchsorted(self._launch, time)]


def busy_ns(
    devices: Sequence[Busy], spans: DeviceSteps, windows: DeviceWindows
) -> tuple[NDArray[np.float64], Ints]:
    """Busy time in each window, as the mean over the devices that its step used; and the number
    of these devices.
    """
    total = np.zeros(len(windows), dtype=np.int64)
    count = np.zeros(len(spans), dtype=np.int64)
    for busy in devices:
        count += busy.union.within(spans.start_ns, spans.end_ns) > 0
        total += busy.union.within(windows.start_ns, windows.end_ns)
    return total / np.maximum(count, 1)[windows.step], count


def alone_ns(jobs: Jobs, rows: Ints, others: Ints, windows: Times) -> Ints:
    """How long some of these jobs, and none of the others, run in each window on the device."""
    either = np.append(rows, others)
    bounds = windows.start_ns, windows.end_ns
    return jobs.union(either).within(*bounds) - jobs.union(others).within(*bounds)
