"""What cannot be in a trace: events with wrong times, and events that the profiler lost."""

from collections.abc import Iterator

import numpy as np

from cs336_systems.analysis.columns import Mask, chosen, groups, joined
from cs336_systems.analysis.kernels.attribution import Attribution
from cs336_systems.analysis.kernels.classes import is_capture, is_for_device, is_kernel_launch
from cs336_systems.analysis.kernels.device_time import WAIT_SLACK_S
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, ApiCalls, DeviceWork, Trace, Union, of_names

MIN_DOUBTFUL = 0.01
"""Smallest share of the kernels, or of the launches, that makes what is said of the whole doubtful."""
_SLACK_NS = round(WAIT_SLACK_S * 1e9)


def doubts(attribution: Attribution) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sentences about what cannot be, with how often: those that put all times in doubt, then those that do not."""
    trace = attribution.trace
    if trace.is_of_host:
        return (), ()
    found = [*_of_times(trace), *_of_launches(trace)]
    whole = max(len(trace.kernels), 1)
    grave = tuple(text for count, text in found if count >= MIN_DOUBTFUL * whole)
    return grave, tuple(text for count, text in found if count < MIN_DOUBTFUL * whole)


def _of_times(trace: Trace) -> Iterator[tuple[int, str]]:
    """Times that cannot be, each with the number of kernels and copies that have them."""
    kernels, work = trace.kernels, joined(trace.kernels, trace.copies)
    early = int((work.is_launched & (work.start_ns < work.launch_ns - _SLACK_NS)).sum())
    if early:
        yield (
            early,
            (
                f"{early} kernels and copies begin before the call that launched them: the clocks of host and device "
                "do not agree"
            ),
        )
    if empty := int((kernels.duration_ns == 0).sum()):
        yield empty, f"{empty} kernels last no time: the profiler lost their times, and averages are too short"
    covered, covering = _covered(chosen(work, ~work.is_in_graph))
    if covered:
        yield (
            covered,
            (
                f"{covered} kernels and copies begin and end while another one of their stream runs ({covering} such): "
                "the others' times are too long"
            ),
        )
    if late := _after_wait(trace, work):
        yield late, f"{late} calls that wait for the device return before its work ends: some times are too long"


def _covered(work: DeviceWork) -> tuple[int, int]:
    """How many jobs lie within another of their stream, and within how many; a graph's branches share a stream."""
    end = work.start_ns + work.duration_ns
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
    waits = chosen(trace.api_calls, of_names(trace.api_calls.name, trace.strings, is_for_device, np.bool_))
    own = chosen(work, work.is_launched)
    own = chosen(own, np.argsort(own.launch_ns, kind="stable"))
    finished = np.append(-MAX_TIME_NS, np.maximum.accumulate(own.start_ns + own.duration_ns))
    before = finished[np.searchsorted(own.launch_ns, waits.start_ns)]
    return int((before > waits.start_ns + waits.duration_ns + _SLACK_NS).sum())


def lost_launches(trace: Trace) -> Mask:
    """Whether each call launched a kernel that is not in the file; calls while a graph is captured launch none."""
    api = trace.api_calls
    launched = np.concatenate([trace.kernels.call, trace.copies.call])
    is_lost: Mask = of_names(api.name, trace.strings, is_kernel_launch, np.bool_) & ~_captured(trace, api)
    is_lost[launched[launched >= 0]] = False
    return is_lost


def _captured(trace: Trace, api: ApiCalls) -> Mask:
    edges = of_names(api.name, trace.strings, is_capture, np.int8)
    begins, ends = np.sort(api.start_ns[edges > 0]), np.sort(api.start_ns[edges < 0])
    until = np.append(ends, MAX_TIME_NS)[np.searchsorted(ends, begins)]
    union = Union(begins, until)
    inside: Mask = union.until(api.start_ns + 1) > union.until(api.start_ns)
    return inside


def _of_launches(trace: Trace) -> Iterator[tuple[int, str]]:
    if len(trace.kernels) and (lost := int(lost_launches(trace).sum())):
        yield (
            lost,
            f"{lost} of {len(trace.api_calls)} calls launched a kernel that is not in the file: events were lost",
        )
