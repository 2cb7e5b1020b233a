"""What a profiler saw, in columns. Readers make a `Trace`, and nothing beyond them knows a file format."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, Mask

_DRIVERS_OWN = re.compile(r"mem(?:set|cpy)(?:\dD)?(?:8|16|32|64|128)(?:_\w{1,40})?", re.ASCII)
"""Names of the CUDA driver's own kernels that fill or copy memory."""

MAX_TIME_NS = 2**61
"""Seventy years on either side of zero, so that differences of two times fit 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork(Columns):
    """Kernels, or copies and fills, as the device ran them."""

    name: Ints
    process: Ints
    device: Ints
    stream: Ints
    start_ns: Ints
    duration_ns: Ints
    correlation: Ints
    is_launched: Mask
    """Whether the launch was seen; `launch_ns` and `thread` mean something only there."""
    launch_ns: Ints
    thread: Ints
    is_in_graph: Mask
    """Launched by a CUDA graph: `graph` is the node, or the graph where the profiler saw only the whole of it,
    or 0 where it says neither (torch.profiler)."""
    graph: Ints
    num_bytes: Ints
    """Bytes copied or filled; 0 for kernels."""


def join(first: DeviceWork, second: DeviceWork) -> DeviceWork:
    """The rows of both, those of `first` first."""
    columns = [field.name for field in fields(DeviceWork)]
    return DeviceWork(**{name: np.concatenate((getattr(first, name), getattr(second, name))) for name in columns})


def chosen(work: DeviceWork, rows: Mask) -> DeviceWork:
    """Some of the rows."""
    return DeviceWork(**{field.name: getattr(work, field.name)[rows] for field in fields(DeviceWork)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges(Columns):
    """What the program called the time between two points of one thread."""

    name: Ints
    process: Ints
    thread: Ints
    start_ns: Ints
    end_ns: Ints
    """The end of the trace for a range that is still open there."""
    is_open: Mask
    is_nested: Mask
    """Pushed and popped on one thread; others may start and end anywhere in the process."""


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
    """One profile, whichever profiler took it.

    Times are nanoseconds on one clock. A thread's number is its own among all processes, and belongs to one of them.
    """

    strings: tuple[str, ...]
    """Every `name` column holds indices into this. Each string is there once."""
    kernels: DeviceWork
    copies: DeviceWork
    ranges: Ranges
    api_calls: ApiCalls
    device_names: tuple[str, ...] = ()
    """Of the devices that the profiler knows, each name once; empty where it does not say."""
    is_of_host: bool = False
    """No device was traced: the `kernels` are operators of the host, each with the time it spent in no other one."""
    notes: tuple[str, ...] = ()
    """What the file cannot tell, in sentences."""

    def __post_init__(self) -> None:
        if len(self._ids) < len(self.strings):
            raise ValueError(f"strings must be distinct, got {len(self.strings)} of which {len(self._ids)} differ")

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {string: index for index, string in enumerate(self.strings)}

    def string_ids(self, *names: str) -> Ints:
        """Indices of those of `names` that occur."""
        return np.array([self._ids[name] for name in names if name in self._ids], dtype=np.int64)


def with_copies_apart(trace: Trace) -> Trace:
    """The trace with fills and copies among the copies where a profiler shows them as kernels of the driver.

    torch.profiler does so for those in CUDA graphs.
    """
    names = [index for index, name in enumerate(trace.strings) if _DRIVERS_OWN.fullmatch(name)]
    is_copy = np.isin(trace.kernels.name, names)
    if not is_copy.any():
        return trace
    copies = chosen(trace.kernels, is_copy)
    return replace(trace, kernels=chosen(trace.kernels, ~is_copy), copies=join(trace.copies, copies))


def durations(start: Ints, end: Ints, what: str) -> Ints:
    """End minus start; raise ValueError where that is no time."""
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
