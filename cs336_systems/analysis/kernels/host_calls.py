"""The calls of CUDA by the host: which launch, which wait, and how long they took."""

import re
from dataclasses import dataclass

import numpy as np

from ..columns import Ints, Mask
from .attribution import Selection, frame_of, phase_at, totals
from .calls import TO_DEVICE, TO_HOST, ApiCallKind, call_name
from .phases import CODES, PHASES, Codes, LaunchPhase
from .step_profile import Awaited, HostCalls
from .trace import Strings, Times, Trace, of_names

_AWAITED = tuple(Awaited)
_TO_HOST = _AWAITED.index(Awaited.TO_HOST)
_PINNED = re.compile(r"pinned", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCalls(Times):
    """The CUDA calls of a trace."""

    name: Ints
    """Index into `Host.names`."""
    thread: Ints
    is_launch: Mask
    is_kernel: Mask
    """The call launches a kernel or a CUDA graph."""
    is_wait: Mask
    """The call makes the host wait for the device: a synchronisation, or a copy to the host
    followed by one.

    PyTorch does this for `.item()`, whose copy itself may take until the device has reached it.
    """
    awaited: Codes
    """Index into `_AWAITED` for calls that wait for a copy only."""


class Host:
    """Looks up the CUDA calls of the host."""

    def __init__(self, trace: Trace) -> None:
        api = trace.api_calls
        names = Strings()
        name = of_names(api.name, trace.strings, lambda text: names.id(call_name(text)), np.int64)
        self.names = names.all
        is_launch = trace.named(api, ApiCallKind.LAUNCH.is_done_by)
        is_wait = trace.named(api, ApiCallKind.WAIT.is_done_by)
        awaited = _awaited_copies(trace, is_launch, is_wait)
        is_wait |= awaited == _TO_HOST
        self.calls = CudaCalls(
            name=name,
            thread=api.thread,
            start_ns=api.start_ns,
            end_ns=api.end_ns,
            is_launch=is_launch,
            is_kernel=trace.named(api, ApiCallKind.KERNELS.is_done_by),
            is_wait=is_wait,
            awaited=awaited,
        )

    def does(self, kind: ApiCallKind) -> Mask:
        """Whether each call does this."""
        return of_names(self.calls.name, self.names, kind.is_done_by, np.bool_)

    def returned(self, call: Ints, launch_ns: Ints) -> Ints:
        """When each launching call returned; its start if the call waits itself or is not in the
        trace.
        """
        end = np.where(self.calls.is_wait, self.calls.start_ns, self.calls.end_ns)
        return np.where(call < 0, launch_ns, np.append(end, 0)[call])

    def longest_call(self, start_ns: int, end_ns: int) -> str:
        """The function in which the host spent most of the interval, on any thread; empty if
        there is none.
        """
        calls = self.calls
        rows = np.flatnonzero((calls.start_ns < end_ns) & (calls.end_ns > start_ns))
        time = np.minimum(calls.end_ns[rows], end_ns) - np.maximum(calls.start_ns[rows], start_ns)
        if not len(rows):
            return ""
        return self.names[int(np.bincount(calls.name[rows], time).argmax())]


def _direction(name: str) -> int:
    """Where a copy of this name goes, as an index into `_AWAITED`."""
    if TO_HOST.search(name):
        return _TO_HOST
    if TO_DEVICE.search(name) and not _PINNED.search(name):
        return _AWAITED.index(Awaited.TO_DEVICE)
    return 0


def _awaited_copies(trace: Trace, launches: Mask, waits: Mask) -> Codes:
    """The copy that each call waits for: its own, or that which its thread launched just before. A
    copy to the host whose thread waits before it launches anything else waits too.
    """
    api, copies = trace.api_calls, trace.copies
    copied = np.zeros(len(api) + 1, dtype=np.int8)  # the last is for copies without a call
    copied[copies.call] = of_names(copies.name, trace.strings, _direction, np.int8)
    copied = copied[:-1]
    awaited = np.where(waits, copied, np.int8(0))
    # of two calls with one start the longer comes first: a profiler may show a call around its own
    by_thread = np.lexsort((-api.duration_ns, api.start_ns, api.thread))
    by_thread = by_thread[(launches | waits)[by_thread]]
    call, following = by_thread[:-1], by_thread[1:]
    is_awaited = waits[following] & (api.thread[call] == api.thread[following])
    call, following = call[is_awaited], following[is_awaited]
    awaited[following] = np.maximum(awaited[following], copied[call])
    to_host = call[copied[call] == _TO_HOST]
    awaited[to_host] = _TO_HOST
    return awaited


def host_calls(host: Host, selection: Selection) -> tuple[HostCalls, ...]:
    """Calls by function, phase and whether they wait, the longest total first.

    A call that waits after the last kernel launch of a step is in no phase, since it belongs to the
    benchmark's clock or to the next batch. A copy to the host, and the wait for it, stay in their
    phase.
    """
    calls = host.calls
    phase = phase_at(selection.windows, calls.start_ns)
    step = selection.steps.at(calls.start_ns)
    last = np.full(len(selection.steps) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, step[calls.is_kernel], calls.start_ns[calls.is_kernel])
    is_of_copy = (calls.awaited == _TO_HOST) | (calls.is_wait & calls.is_launch)
    is_of_end = calls.is_wait & ~is_of_copy & (calls.start_ns > last[step])
    phase[is_of_end] = CODES[LaunchPhase.UNATTRIBUTED]
    placed = frame_of(calls).assign(phase=phase)[step >= 0]
    name_of, phase_of = host.names.__getitem__, PHASES.__getitem__
    meanings = {"name": name_of, "phase": phase_of, "awaited": _AWAITED.__getitem__}
    return tuple(totals(placed, HostCalls, **meanings, is_wait=bool, is_launch=bool))
