"""The events of a profile as tables, the same for nsys and torch.profiler.

`reading.py` chooses the reader of a file, which makes a `Trace`; nothing else depends on the file's format.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, Mask, chosen, joined

_DRIVERS_OWN = re.compile(r"mem(?:set|cpy)(?:\dD)?(?:8|16|32|64|128)(?:_\w{1,40})?", re.ASCII)
"""Names of the CUDA driver's kernels that fill or copy memory."""

MAX_TIME_NS = 2**61
"""Largest absolute time (seventy years), so that the difference of two times fits 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork(Columns):
    """Kernels, or copies and fills, that a device ran."""

    name: Ints
    process: Ints
    device: Ints
    stream: Ints
    start_ns: Ints
    duration_ns: Ints
    is_launched: Mask
    """Whether the trace has the launch; `launch_ns` and `thread` are valid only then."""
    launch_ns: Ints
    thread: Ints
    is_in_graph: Mask
    """Launched by a CUDA graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges(Columns):
    """Named ranges of time, which the program marked."""

    name: Ints
    process: Ints
    thread: Ints
    start_ns: Ints
    end_ns: Ints
    """End of the range; the end of the trace for a range that is still open."""
    is_open: Mask
    is_nested: Mask
    """Pushed and popped on one thread; other ranges may start and end on any thread of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCalls(Columns):
    """Calls of the CUDA runtime and driver by the host."""

    name: Ints
    process: Ints
    thread: Ints
    start_ns: Ints
    duration_ns: Ints
    correlation: Ints


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One profile, independent of the profiler.

    Times are nanoseconds on one clock. A thread's number is unique among all processes.
    """

    strings: tuple[str, ...]
    """Distinct strings; every `name` column holds indices into them."""
    kernels: DeviceWork
    copies: DeviceWork
    ranges: Ranges
    api_calls: ApiCalls
    device_names: tuple[str, ...] = ()
    """Distinct names of the devices; empty if the profile has none."""
    is_of_host: bool = False
    """No device was traced: the `kernels` are operators of the host, without the time of operators inside them."""
    notes: tuple[str, ...] = ()
    """Sentences about what the file lacks."""

    def __post_init__(self) -> None:
        if len(self._ids) < len(self.strings):
            raise ValueError(f"strings must be distinct, got {len(self.strings)} of which {len(self._ids)} differ")

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {string: index for index, string in enumerate(self.strings)}

    def string_ids(self, *names: str) -> Ints:
        """Indices of the `names` that occur in the trace."""
        return np.array([self._ids[name] for name in names if name in self._ids], dtype=np.int64)


def with_copies_apart(trace: Trace) -> Trace:
    """The trace, with kernels of the CUDA driver that copy or fill memory moved from the kernels to the copies.

    torch.profiler shows copies and fills in CUDA graphs as such kernels.
    """
    names = [index for index, name in enumerate(trace.strings) if _DRIVERS_OWN.fullmatch(name)]
    is_copy = np.isin(trace.kernels.name, names)
    if not is_copy.any():
        return trace
    copies = joined(trace.copies, chosen(trace.kernels, is_copy))
    return replace(trace, kernels=chosen(trace.kernels, ~is_copy), copies=copies)


def durations(start: Ints, end: Ints, what: str) -> Ints:
    """End minus start; raise ValueError for times out of range and for negative durations."""
    for times in (start, end):
        if len(times) and not -MAX_TIME_NS <= int(times.min()) <= int(times.max()) <= MAX_TIME_NS:
            worst = max(int(times.max()), int(times.min()), key=abs)
            raise ValueError(f"{what} need times within {MAX_TIME_NS} ns of zero, got {worst}")
    length = end - start
    if len(length) and length.min() < 0:
        row = int(length.argmin())
        raise ValueError(f"{what} must end after they start, got start {start[row]} and end {end[row]} in row {row}")
    if length.sum(dtype=np.float64) > MAX_TIME_NS:
        raise ValueError(f"{what} last {length.sum(dtype=np.float64):.3g} ns together, more than {MAX_TIME_NS}")
    return length
