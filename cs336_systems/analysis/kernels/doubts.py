"""What a trace shows that cannot be: clocks that do not agree, lost times and events."""

import numpy as np

from ..columns import Mask, chosen, groups, joined
from .calls import ApiCallKind, lost_launches
from .device_time import Completion
from .idle import SLACK_NS
from .trace import DeviceWork, Trace

MIN_DOUBTFUL = 0.01
"""Smallest share of the kernels, or of the launches, that makes what is said of the whole
doubtful.
"""
MAX_SHORT = 0.1
"""Largest share of kernels that may last less than half a microsecond."""


def doubts(trace: Trace, is_profiled: Mask) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sentences about what cannot be, with how often: those that put all times in doubt, then
    those that do not. `is_profiled` says which of the host's calls lie in a profiled step.
    """
    grave, slight = [], []
    least = MIN_DOUBTFUL * max(len(trace.kernels), 1)
    counts = {} if trace.is_of_host else _counts(trace, is_profiled)
    for text, count in counts.items():
        if count >= least:
            grave.append(f"{count} {text}")
        elif count:
            slight.append(f"{count} {text}")
    return tuple(grave), tuple(slight)


def _counts(trace: Trace, is_profiled: Mask) -> dict[str, int]:
    """What cannot be, with the number of kernels, copies or calls of which it is said."""
    kernels, work = trace.kernels, joined(trace.kernels, trace.copies)
    is_early = work.is_launched & (work.start_ns < work.launch_ns - SLACK_NS)
    covered, covering = _covered(chosen(work, ~work.is_in_graph))
    api = trace.api_calls
    num_launches = int(trace.named(api, ApiCallKind.ONE_KERNEL.is_done_by).sum())
    without_time = kernels.duration_ns == 0
    is_lost = lost_launches(trace) & is_profiled
    return {
        "kernels and copies begin before the call that launched them: the clocks of host and "
        "device do not agree": int(is_early.sum()),
        "kernels last no time: the profiler lost their times, and averages are without them": (
            0 if is_rounded(kernels) else int(without_time.sum())
        ),
        "kernels run before others that had been launched on their stream before them: the order "
        "of kernels or launches is wrong": _out_of_order(trace, chosen(work, ~work.is_in_graph)),
        "kernels and copies begin and end while another one of their stream runs "
        f"({covering} such): the others' times are too long": covered,
        "calls that wait for the device return before its work ends: some times are too "
        "long": _early_returns(trace, work),
        f"of {num_launches} launches have no kernel in the file: events were lost": int(
            is_lost.sum()
        ),
    }


def _covered(work: DeviceWork) -> tuple[int, int]:
    """How many jobs lie within another of their stream, and within how many; a graph's branches
    share a stream.
    """
    end = work.end_ns
    inner = outer = 0
    for _, of_device in groups(work.device):
        for _, rows in groups(work.stream[of_device]):
            of_stream = of_device[rows]
            of_stream = of_stream[work.duration_ns[of_stream] > 0]
            of_stream = of_stream[np.lexsort((-end[of_stream], work.start_ns[of_stream]))]
            reached = np.maximum.accumulate(end[of_stream])
            is_inner = np.append(False, end[of_stream][1:] <= reached[:-1])[: len(of_stream)]
            inner += int(is_inner.sum())
            outer += len(np.unique(reached[is_inner]))
    return inner, outer


def is_rounded(kernels: DeviceWork) -> bool:
    """Whether the profiler wrote whole microseconds, as PyTorch 2.1 and older do: a kernel of less
    than half of one then lasts no time. Few are so short: where many last no time, it was lost.
    """
    times = np.append(kernels.start_ns, kernels.end_ns)
    num_without = int((kernels.duration_ns == 0).sum())
    is_whole = len(times) > 0 and not (times % 1000).any()
    return is_whole and num_without <= MAX_SHORT * len(kernels)


def _out_of_order(trace: Trace, work: DeviceWork) -> int:
    """How many jobs begin before another of their stream whose launch had returned before theirs
    began.
    """
    calls, count = trace.api_calls, 0
    work = chosen(work, work.is_launched)
    returned = np.where(work.call < 0, work.launch_ns, np.append(calls.end_ns, 0)[work.call])
    place = work.device * (1 + work.stream.max(initial=0)) + work.stream
    for _, of_stream in groups(place):
        in_order = of_stream[np.argsort(work.start_ns[of_stream], kind="stable")]
        # the earliest return among the launches of all later jobs
        earliest = np.minimum.accumulate(returned[in_order][::-1])[::-1]
        count += int((earliest[1:] < work.launch_ns[in_order][:-1]).sum())
    return count


def _early_returns(trace: Trace, work: DeviceWork) -> int:
    """Number of calls that wait for a whole device (cudaDeviceSynchronize) and return too early:
    before the end of kernels or copies that were launched before the call. 0 if the trace has
    several devices.
    """
    if len(np.unique(work.device)) > 1:  # it is not known for which device a call waits
        return 0
    is_wait = trace.named(trace.api_calls, ApiCallKind.WAIT_FOR_DEVICE.is_done_by)
    waits = chosen(trace.api_calls, is_wait)
    finished = Completion(work, np.flatnonzero(work.is_launched))(waits.start_ns)
    return int((finished > waits.end_ns + SLACK_NS).sum())
