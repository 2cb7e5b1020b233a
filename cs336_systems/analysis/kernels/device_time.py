"""The time of each phase on the device, and how long the device was busy in it.

A phase ends on the device when the last kernel or copy launched before its end on the host has run, or when the host
leaves the phase, if that is later. A CUDA event that the host records as it leaves the phase shows the same time.

Collectives run on streams of their own, for which an event of the main stream does not wait. Where a later phase of the
step, `communication`, makes the main stream wait for them, a phase ends without those that it leaves running.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Columns, Ints, Mask, groups, joined
from cs336_systems.analysis.kernels.attribution import Attribution
from cs336_systems.analysis.kernels.collectives import NO_COLLECTIVE, collective_codes
from cs336_systems.analysis.kernels.host_calls import Host
from cs336_systems.analysis.kernels.phases import CODES, NO_ROWS, Codes, LaunchPhase
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS
from cs336_systems.analysis.kernels.union import Union
from cs336_systems.analysis.kernels.windows import HostSteps, HostWindows, Selection

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs(Columns):
    """The kernels of a trace, followed by its copies; processes and steps are numbered as in a `Selection`."""

    name: Ints
    process: Ints
    device: Ints
    stream: Ints
    thread: Ints
    launch_ns: Ints
    is_launched: Mask
    start_ns: Ints
    end_ns: Ints
    phase: Codes
    step: Ints
    module: Ints
    is_recomputed: Mask
    is_copy: Mask
    collective: Codes
    """Index into `COLLECTIVES`, NO_COLLECTIVE for what is no kernel of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps(Columns):
    """Start and end of each step on the device."""

    start_ns: Ints
    """When the host begins the first phase, or when the device has finished earlier work, if that is later."""
    end_ns: Ints
    """When the host's step ends, or when its last job ends, if that is later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWindows(Columns):
    """Start and end of each phase on the host and on the device. On the device, each phase begins where the last ended.

    Work that a step launches after its last phase, or without any phase, is in a window of the phase `unattributed`.
    """

    step: Ints
    phase: Codes
    host_start_ns: Ints
    host_end_ns: Ints
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The times when one process kept one device busy."""

    process: int
    rows: Ints
    """Rows of `Jobs`, whose times are the union's intervals."""
    union: Union


def join_jobs(attribution: Attribution, selection: Selection) -> Jobs:
    """All kernels and copies of the trace."""
    work = joined(attribution.trace.kernels, attribution.trace.copies)
    placed = joined(attribution.kernels, attribution.copies)
    return Jobs(
        name=work.name,
        process=selection.process_of(work.process),
        device=work.device,
        stream=work.stream,
        thread=work.thread,
        launch_ns=work.launch_ns,
        is_launched=work.is_launched,
        start_ns=work.start_ns,
        end_ns=work.start_ns + work.duration_ns,
        phase=placed.phase,
        step=selection.step_of(placed.step),
        module=placed.module,
        is_recomputed=placed.is_recomputed,
        is_copy=np.arange(len(work)) >= len(attribution.kernels),
        collective=collective_codes(work.name, attribution.trace.strings),
    )


def on_device(jobs: Jobs, selection: Selection, host: Host, *, is_of_host: bool) -> tuple[DeviceSteps, DeviceWindows]:
    """Times of steps and phases on the device; if the jobs are operators of the host, times on the host."""
    steps, windows = selection.steps, selection.windows
    launched = NO_ROWS if is_of_host else np.flatnonzero(jobs.is_launched)
    by_process = {process: launched[rows] for process, rows in groups(jobs.process[launched])}
    leaves_collectives = _is_before_wait(windows, selection.steps, host)
    first, is_first = _first_windows(windows, len(steps))
    begin = np.append(windows.start_ns, 0)[first]
    begin = np.where(first < 0, steps.start_ns, begin)
    finished = np.empty(len(windows), dtype=np.int64)
    done, before = np.empty_like(begin), np.empty_like(begin)
    for process, in_process in groups(steps.process):
        own = by_process.get(process, NO_ROWS)
        finished_at = _Completion(jobs, own)
        others_finished_at = _Completion(jobs, own[jobs.collective[own] == NO_COLLECTIVE])
        in_windows = np.flatnonzero(steps.process[windows.step] == process)
        ends = windows.end_ns[in_windows]
        finished[in_windows] = np.where(leaves_collectives[in_windows], others_finished_at(ends), finished_at(ends))
        done[in_process], before[in_process] = finished_at(steps.end_ns[in_process]), finished_at(begin[in_process])
    begin = np.maximum(begin, before)
    end = _running_maximum(np.maximum(windows.end_ns, finished), windows.step, begin)
    start = np.where(is_first, begin[windows.step], np.append(0, end[:-1]))

    # the time after the last phase, or the whole of a step without phases
    phases_end, host_end = begin.copy(), steps.start_ns.copy()
    phases_end[windows.step], host_end[windows.step] = end, windows.end_ns  # the last assignment stays
    whole = np.maximum(done, np.maximum(phases_end, steps.end_ns))
    rest_end = np.where(first < 0, whole, np.maximum(phases_end, done))
    rest = np.flatnonzero((rest_end > phases_end) | (first < 0))
    order = np.argsort(np.concatenate((windows.step, rest)), kind="stable")
    unattributed = np.full(len(rest), CODES[LaunchPhase.UNATTRIBUTED], dtype=np.int8)
    return DeviceSteps(start_ns=begin, end_ns=whole), DeviceWindows(
        step=np.concatenate((windows.step, rest))[order],
        phase=np.concatenate((windows.phase, unattributed))[order],
        host_start_ns=np.concatenate((windows.start_ns, host_end[rest]))[order],
        host_end_ns=np.concatenate((windows.end_ns, np.maximum(host_end, steps.end_ns)[rest]))[order],
        start_ns=np.concatenate((start, phases_end[rest]))[order],
        end_ns=np.concatenate((end, rest_end[rest]))[order],
    )


def _is_before_wait(windows: HostWindows, steps: HostSteps, host: Host) -> Mask:
    """Whether a phase `communication` that waits for collectives comes after each window in its step."""
    waits = np.zeros(len(windows), dtype=np.bool_)
    for process, rows in groups(steps.process[windows.step]):
        time = host.stream_waits(process)
        waits[rows] = np.searchsorted(time, windows.end_ns[rows]) > np.searchsorted(time, windows.start_ns[rows])
    waits &= windows.phase == CODES[LaunchPhase.COMMUNICATION]
    last = np.full(len(steps), -1, dtype=np.int64)
    last[windows.step[waits]] = np.flatnonzero(waits)  # the last assignment stays
    before: Mask = np.arange(len(windows)) < last[windows.step]
    return before


class _Completion:
    """Looks up when the device has finished all work that a process launched before a given time."""

    def __init__(self, jobs: Jobs, rows: Ints) -> None:
        rows = rows[np.argsort(jobs.launch_ns[rows], kind="stable")]
        self._launch = jobs.launch_ns[rows]
        self._end = np.append(-MAX_TIME_NS, np.maximum.accumulate(jobs.end_ns[rows]))

    def __call__(self, time: Ints) -> Ints:
        finished: Ints = self._end[np.searchsorted(self._launch, time)]
        return finished


def _first_windows(windows: HostWindows, num_steps: int) -> tuple[Ints, Mask]:
    """The first window of each step (-1 for none), and whether each window is the first of its step."""
    is_first = np.diff(windows.step, prepend=-1) > 0
    first = np.full(num_steps, -1, dtype=np.int64)
    first[windows.step[is_first]] = np.flatnonzero(is_first)
    return first, is_first


def _running_maximum(times: Ints, step: Ints, least: Ints) -> Ints:
    """Running maximum of the times within each step, starting from the step's `least`."""
    highest: Ints = pd.Series(times).groupby(step).cummax().to_numpy()
    return np.maximum(highest, least[step])


def busy_devices(jobs: Jobs) -> Iterator[Busy]:
    """Yield the busy times of each process on each device."""
    for process, in_process in groups(jobs.process):
        for _, in_device in groups(jobs.device[in_process]):
            rows = in_process[in_device]
            yield Busy(process=process, rows=rows, union=Union(jobs.start_ns[rows], jobs.end_ns[rows]))


def busy_ns(devices: list[Busy], steps: HostSteps, spans: DeviceSteps, windows: DeviceWindows) -> tuple[Floats, Ints]:
    """Busy time in each window, as the mean over the devices that its step used; and the number of these devices."""
    total, count = np.zeros(len(windows), dtype=np.int64), np.zeros(len(steps), dtype=np.int64)
    for busy in devices:
        mine = steps.process == busy.process
        count += mine & (busy.union.until(spans.end_ns) > busy.union.until(spans.start_ns))
        total += mine[windows.step] * (busy.union.until(windows.end_ns) - busy.union.until(windows.start_ns))
    return total / np.maximum(count, 1)[windows.step], count
