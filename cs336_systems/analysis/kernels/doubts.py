"""What cannot be in a trace: events with wrong times, and events that the profiler lost."""

import numpy as np

from cs336_systems.analysis.columns import chosen, groups, joined
from cs336_systems.analysis.kernels.classes import Call
from cs336_systems.analysis.kernels.device_time import SLACK_NS, Completion
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, DeviceWork, Trace, Union

MIN_DOUBTFUL = 0.01
"""Smallest share of the kernels, or of the launches, that makes what is said of the whole doubtful."""


def doubts(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sentences about what cannot be, with how often: those that put all times in doubt, then those that do not."""
    found = {} if trace.is_of_host else _counts(trace)
    told = [(count, f"{count} {text}") for text, count in found.items() if count]
    least = MIN_DOUBTFUL * max(len(trace.kernels), 1)
    return tuple(text for count, text in told if count >= least), tuple(text for count, text in told if count < least)


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
        f"kernels and copies begin and end while another one of their stream runs {others}": covered,
        "calls that wait for the device return before its work ends: some times are too long": _after_wait(trace, work),
        f"of {len(trace.api_calls)} calls launched a kernel that is not in the file: events were lost": lost,
    }


def _covered(work: DeviceWork) -> tuple[int, int]:
    """How many jobs lie within another of their stream, and within how many; a graph's branches share a stream."""
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
    waits = chosen(trace.api_calls, Call.WAIT_FOR_DEVICE.among(trace.api_calls.name, trace.strings))
    finished = Completion(work, np.flatnonzero(work.is_launched))(waits.start_ns)
    return int((finished > waits.start_ns + waits.duration_ns + SLACK_NS).sum())


def _lost_launches(trace: Trace) -> int:
    """How many calls launched a kernel that is not in the file; calls while a graph is captured launch none."""
    api, (launch, begin, end) = trace.api_calls, (Call.ONE_KERNEL, Call.BEGIN_CAPTURE, Call.END_CAPTURE)
    is_lost = launch.among(api.name, trace.strings)
    begins, ends = (np.sort(api.start_ns[edge.among(api.name, trace.strings)]) for edge in (begin, end))
    captures = Union(begins, np.append(ends, MAX_TIME_NS)[np.searchsorted(ends, begins)])
    is_lost &= captures.within(api.start_ns, api.start_ns + 1) == 0
    launched = np.concatenate([trace.kernels.call, trace.copies.call])
    is_lost[launched[launched >= 0]] = False
    return int(is_lost.sum())
