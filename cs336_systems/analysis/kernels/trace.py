"""The events of a profile as tables, the same for nsys and torch.profiler, and look-ups among their
times.

`explain.py` chooses the reader of a file, which makes a `Trace`; nothing else depends on the file's
format.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..columns import NO_ROWS, Columns, Ints, Mask, chosen, groups, joined, spread
from ..memory.profile import Place

_DRIVERS_OWN = re.compile(
    r"mem(?:set|cpy)(?:\dD)?(?:8|16|32|64|128)(?:_\w{1,40})?|__amd_rocclr_(?:copy|fill)\w{1,40}",
    re.ASCII,
)
"""Names of the kernels by which the drivers of CUDA and ROCm fill or copy memory."""

Scalar = TypeVar("Scalar", bound=np.generic)
NOWHERE = -1
"""Process of a range that a profiler marked, and the program did not."""
ALL = slice(None)
MAX_TIME_NS = 2**61
"""Largest absolute time (seventy years), so that the difference of two times fits 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a file says of a collective beside its kernel."""

    group: str = ""
    """Name of the process group."""
    ranks: str = ""
    """The group's ranks, in the profiler's words; groups of different ranks may have one name."""
    description: str = ""
    size: int | None = None
    """Number of the group's ranks."""
    num_bytes: int | None = None
    """Bytes of the whole tensor: of all ranks' parts together, if each rank has a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times(Columns):
    """Stretches of time, each with its start and without its end."""

    start_ns: Ints
    end_ns: Ints

    @property
    def duration_ns(self) -> Ints:
        return self.end_ns - self.start_ns

    def at(self, time: Ints) -> Ints:
        """The row of the innermost stretch around each time, -1 for none."""
        return Nesting(self.start_ns, self.end_ns).at(time)

    def union(self, rows: Ints | Mask | slice = ALL) -> "Union":
        """All stretches of these rows together."""
        return Union(self.start_ns[rows], self.end_ns[rows])

    def number_of(self, time: Ints) -> Ints:
        """How many of these times lie in each stretch."""
        ordered = np.sort(time)
        begun = np.searchsorted(ordered, self.start_ns)
        return np.searchsorted(ordered, self.end_ns) - begun

    def cover(self, time: Ints) -> Mask:
        """Whether each time lies in one of the stretches."""
        return self.union().within(time, time + 1) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Events(Times):
    """What threads of the host did."""

    name: Ints
    process: Ints
    thread: Ints

    def by_thread(self, rows: Ints | slice = ALL) -> "GroupNesting":
        """The nesting of these events on their threads, numbered as the rows are."""
        return GroupNesting(self.thread[rows], self.start_ns[rows], self.end_ns[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork(Events):
    """Kernels, or copies and fills, that a device ran, with the thread that launched each."""

    device: Ints
    stream: Ints
    is_launched: Mask
    """Whether the trace has the launch; `launch_ns` and `thread` are valid only then."""
    launch_ns: Ints
    call: Ints
    """Row of the launching call in `Trace.api_calls`; -1 for none, as of an operator of the
    host.
    """
    is_in_graph: Mask
    """Launched by a CUDA graph."""
    mark: Ints
    """Row in `Trace.ranges` of the module that PyTorch marked in a CUDA graph (`mark_kernels`);
    -1 for none.
    """
    message: Ints
    """Index into the trace's messages: what a collective exchanged; -1 where the file does not say
    it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges(Events):
    """Named ranges of time, which the program marked; one that is still open ends with the
    trace.
    """

    is_nested: Mask
    """Pushed and popped on one thread; other ranges may start and end on any thread of the
    process.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes(Events):
    """Times in which a thread ran a node of autograd's backward."""

    forward: Ints
    """Row in `Trace.operators` of the operator whose gradient the node computes; -1 where the file
    does not show it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators(Events):
    """Calls of operators by the host: those that launched something themselves, and those of
    forward whose gradients are computed.
    """

    is_recorded: Mask
    """Whether autograd recorded at the call, as it does not in evaluation."""
    shape: Ints
    """Index into the strings of the call's dimensions, types and values, as a JSON list of the
    profiler's three lists.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCalls(Events):
    """Calls of the device's runtime and driver by the host."""

    correlation: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples(Times):
    """Values of a device's counters, each the mean over a short time."""

    counter: Ints
    """Index into the trace's strings: its name."""
    device: Ints
    value: Ints
    """Percent of the highest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvents(Columns):
    """Allocations of memory from the driver, and frees of it."""

    kind: Ints
    """Index into the trace's strings: memory of the device, pinned memory of the host."""
    device: Ints
    time_ns: Ints
    size: Ints
    """Bytes, negative where they are freed."""


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
    nodes: Nodes = field(default_factory=Nodes.empty)
    """Nodes of backward; none in a file that does not show them."""
    operators: Operators = field(default_factory=Operators.empty)
    frames: Events = field(default_factory=Events.empty)
    """Functions of Python that ran, without those of libraries."""
    calls_of_modules: Ranges | None = None
    """Calls of the model's modules, which torch.profiler records beside the program's ranges."""
    has_operators: bool = False
    """The file shows the host's operators, and so all nodes of backward."""
    rank: int | None = None
    """The process's rank, if the file names it."""
    world_size: int | None = None
    """How many ranks the run had, if the file names it."""
    is_of_host: bool = False
    """No device was traced: the `kernels` are operators of the host, without the time of
    operators inside them.
    """
    lacks_device: bool = False
    """The host's operators launched work of a device, which is not in the file."""
    notes: tuple[str, ...] = ()
    """Sentences about what the file lacks."""
    library_calls: Events = field(default_factory=Events.empty)
    """Calls of cuBLAS, cuDNN and the operating system."""
    messages: tuple[Message, ...] = ()
    """Distinct messages of collectives."""
    samples: Samples = field(default_factory=Samples.empty)
    memory: MemoryEvents = field(default_factory=MemoryEvents.empty)
    places: tuple[Place, ...] = ()
    """Distinct lines of Python."""
    call_place: Ints = field(default_factory=NO_ROWS.copy)
    """Index into `places` for each of `api_calls`, -1 where none is known; empty if the file has no
    stacks.
    """

    def named(self, events: Events, test: Callable[[str], object]) -> Mask:
        """Whether the name of each event passes the test."""
        return of_names(events.name, self.strings, lambda name: bool(test(name)), np.bool_)


def with_copies_apart(trace: Trace) -> Trace:
    """The trace, with kernels of the CUDA driver that copy or fill memory moved from the kernels to
    the copies.

    torch.profiler shows copies and fills in CUDA graphs as such kernels.
    """
    is_copy = trace.named(trace.kernels, _DRIVERS_OWN.fullmatch)
    if not is_copy.any():
        return trace
    copies = joined(trace.copies, chosen(trace.kernels, is_copy))
    return replace(trace, kernels=chosen(trace.kernels, ~is_copy), copies=copies)


_OF_CALL = re.compile(r", (?:op_id|seq|sizes|input_op_ids) = .*", re.DOTALL)


def without_call(text: str) -> str:
    """The name of a range without the call's number and shapes, which PyTorch's emit_nvtx puts
    behind the name of an operator.
    """
    return _OF_CALL.sub("", text)


def check_times(start: Ints, end: Ints, what: str) -> None:
    """Raise ValueError for times out of range and for negative durations."""
    for times in (start, end):
        # Python's whole numbers, since the absolute value of the least does not fit 64 bits
        worst = max(int(times.min(initial=0)), int(times.max(initial=0)), key=abs)
        if abs(worst) > MAX_TIME_NS:
            raise ValueError(f"{what} need times within {MAX_TIME_NS} ns of zero, got {worst}")
    length = end - start
    if length.min(initial=0) < 0:
        row = int(length.argmin())
        raise ValueError(
            f"{what} must end after they start, got start {start[row]} and end {end[row]} in row "
            f"{row}"
        )
    total = length.sum(dtype=np.float64)
    if total > MAX_TIME_NS:
        raise ValueError(f"{what} last {total:.3g} ns together, more than {MAX_TIME_NS}")


def of_names(
    names: Ints, strings: Sequence[str], value: Callable[[str], object], kind: type[Scalar]
) -> NDArray[Scalar]:
    """The value of each name's string, found once for each distinct name, as an array of this
    kind.
    """
    used, index = np.unique(names, return_inverse=True)
    values: NDArray[Scalar] = np.array([value(strings[name]) for name in used.tolist()], dtype=kind)
    return values[index]


class Nesting:
    """Looks up the innermost interval at a time: of those that contain it, the one that started
    last.

    An interval contains its start but not its end. Intervals may cross; of two with one start the
    shorter is inner.
    """

    __slots__ = ("_owner", "_time", "parent")

    def __init__(self, start: Ints, end: Ints) -> None:
        self.parent: Ints = np.full(len(start), -1, dtype=np.int64)
        order = np.lexsort((-end, start))
        if (end[order][:-1] <= start[order][1:]).all():  # as most are, and the loop below is slow
            self._time: Ints = np.stack([start[order], end[order]], axis=1).ravel()
            self._owner: Ints = np.append(np.stack([order, np.full_like(order, -1)], axis=1), -1)
            return
        starts, ends, parent = start.tolist(), end.tolist(), self.parent
        times, owners, stack = [], [], list[int]()

        def close_until(now: int | None) -> None:
            while stack and (now is None or ends[stack[-1]] <= now):
                time = ends[stack.pop()]
                while stack and ends[stack[-1]] <= time:
                    stack.pop()
                times.append(time)
                owners.append(stack[-1] if stack else -1)

        for index in order.tolist():
            close_until(starts[index])
            if stack:
                parent[index] = stack[-1]
            stack.append(index)
            times.append(starts[index])
            owners.append(index)
        close_until(None)
        self._time = np.array(times, dtype=np.int64)
        # before the first time: the last element
        self._owner = np.array([*owners, -1], dtype=np.int64)

    def at(self, time: Ints) -> Ints:
        """Index of the innermost interval at each time, -1 for none."""
        return self._owner[np.searchsorted(self._time, time, side="right") - 1]


class GroupNesting:
    """The nesting of intervals that belong to groups, such as threads: intervals nest only within
    their group.
    """

    def __init__(self, group: Ints, start: Ints, end: Ints) -> None:
        self.parent: Ints = np.full(len(group), -1, dtype=np.int64)
        """For each interval, the index of the innermost interval of its group around it, -1 for
        none.
        """
        self._by_group: dict[int, tuple[Ints, Nesting]] = {}
        for number, rows in groups(group):
            # `nesting` numbers the group's intervals from 0, and `row_of` has their rows; its last
            # element leaves -1, for none, as it is
            nesting, row_of = Nesting(start[rows], end[rows]), np.append(rows, -1)
            self.parent[rows] = row_of[nesting.parent]
            self._by_group[number] = row_of, nesting

    def at(self, group: Ints, time: Ints) -> Ints:
        """For each pair of a group and a time, the index of the innermost interval of that group
        at that time, -1 for none.
        """
        innermost: Ints = np.full(len(group), -1, dtype=np.int64)
        for number, rows in groups(group):
            if number in self._by_group:
                row_of, nesting = self._by_group[number]
                innermost[rows] = row_of[nesting.at(time[rows])]
        return innermost


def forward_of(trace: Trace, thread: Ints, time: Ints) -> tuple[Ints, Ints]:
    """The node of backward that each launch is in, and the row in `Trace.operators` of that node's
    operator of forward; -1 for none.
    """
    node = trace.nodes.by_thread().at(thread, time)
    return node, np.append(trace.nodes.forward, -1)[node]


class Strings:
    """The trace's table of strings, which gives each string an index when it first occurs."""

    def __init__(self, of_file: Mapping[int, str] | None = None) -> None:
        """`of_file` is the file's own table: its strings by the numbers that its rows have in
        their place. None for a file whose rows have the strings themselves.
        """
        self._of_file = {} if of_file is None else of_file
        self._ids: dict[str, int] = {}
        """The index of each string in this table, in the order in which they first occurred."""

    def id(self, text: str) -> int:
        """The string's index in this table."""
        return self._ids.setdefault(text, len(self._ids))

    def ids(self, texts: Iterable[str]) -> Ints:
        """The strings' indices in this table."""
        ids = self._ids  # without `id`, since a trace may have millions of names
        return np.array([ids.setdefault(text, len(ids)) for text in texts], dtype=np.int64)

    def column(self, keys: Ints, known: Mapping[int, str] | None = None, unknown: str = "") -> Ints:
        """Indices in this table for the file's numbers, looked up in `known` or, by default, in
        the file's strings.
        """
        known = self._of_file if known is None else known
        unique, inverse = np.unique(keys, return_inverse=True)
        return self.ids(known.get(key, unknown) for key in unique.tolist())[inverse]

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self._ids)


class Launches:
    """Finds calls by process and correlation id; of calls with the same ids, the first."""

    def __init__(self, calls: ApiCalls) -> None:
        self._processes = np.unique(calls.process)
        key = self._key(calls.process, calls.correlation)
        order = np.lexsort((calls.start_ns, key))
        self._key_sorted, self._order, self._calls = key[order], order, calls

    def _key(self, process: Ints, correlation: Ints) -> Ints:
        """Process and correlation id in one number; -1 for invalid ids. CUPTI counts ids from 1
        in 32 bits.
        """
        at = np.searchsorted(self._processes, process)
        is_known = np.append(self._processes, -1)[at] == process
        is_valid = is_known & (correlation > 0) & (correlation < 2**32)
        return np.where(is_valid, (at << 32) | correlation, -1)

    def columns(self, process: Ints, correlation: Ints) -> dict[str, Any]:
        """The columns of `DeviceWork` about the launch, for pairs of ids."""
        key = self._key(process, correlation)
        at = np.searchsorted(self._key_sorted, key)
        is_launched = (np.append(self._key_sorted, -1)[at] == key) & (key >= 0)
        call = np.where(is_launched, np.append(self._order, -1)[at], -1)
        return {
            "is_launched": is_launched,
            "launch_ns": np.append(self._calls.start_ns, 0)[call],
            "thread": np.append(self._calls.thread, 0)[call],
            "call": call,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Holes(Times):
    """The times within windows at which no interval is open."""

    window: Ints
    """Index of the window."""
    before: Ints
    """Index of an interval that ended at the start; -1 where the window begins there or later."""
    after: Ints
    """Index of an interval that starts at the end; -1 where the window ends there or earlier."""


class Union:
    """The union of many intervals, which may overlap, as disjoint stretches in order."""

    __slots__ = ("_before", "_first", "_last", "end", "start")

    def __init__(self, start: Ints, end: Ints) -> None:
        order = np.argsort(start, kind="stable")
        starts, ends = start[order], end[order]
        reached = np.maximum.accumulate(ends)
        opens = np.ones(len(order), dtype=np.bool_)
        opens[1:] = starts[1:] > reached[:-1]
        first = np.flatnonzero(opens)
        last = np.append(first[1:], len(order))[: len(first)] - 1
        self.start: Ints = starts[first]
        self.end: Ints = reached[last]
        length = self.end - self.start
        # the length of all stretches before each; a time before all stretches reads the 0 in front
        self._before: Ints = np.append(0, np.cumsum(length) - length)
        self._first: Ints = order[first]
        # the interval that ended last in each stretch is the last one that raised the running
        # maximum
        raised = np.append(True, reached[1:] > reached[:-1])[: len(order)]
        at = np.maximum.accumulate(np.where(raised, np.arange(len(order)), 0))
        self._last: Ints = order[at[last]]

    def until(self, time: Ints) -> Ints:
        """For each time, how long at least one interval was open before it."""
        at = np.searchsorted(self.start, time, side="right")
        start, end = (np.append(-MAX_TIME_NS, bounds)[at] for bounds in (self.start, self.end))
        return self._before[at] + np.where(at > 0, np.minimum(time, end) - start, 0)

    def within(self, start: Ints, end: Ints) -> Ints:
        """How long at least one interval is open in each window."""
        return self.until(end) - self.until(start)

    def holes(self, start: Ints, end: Ints) -> Holes:
        """The parts of each window that the union does not cover, by window and then by time.

        An empty window has none. At the edge of a window, a part may be only a piece of a hole.
        """
        # hole i lies before stretch i; the last hole follows the last stretch
        hole_start = np.append(-MAX_TIME_NS, self.end)
        hole_end = np.append(self.start, MAX_TIME_NS)
        # a window has the holes from the first that ends after the window's start to the last that
        # starts before the window's end
        first = np.searchsorted(hole_end, start, side="right")
        count = np.where(end > start, np.searchsorted(hole_start, end) - first, 0)
        # one row for each pair of a window and a hole in it
        window, place_in_window = spread(count)
        hole = first[window] + place_in_window
        before = np.where(hole_start[hole] > start[window], np.append(-1, self._last)[hole], -1)
        after = np.where(hole_end[hole] < end[window], np.append(self._first, -1)[hole], -1)
        return Holes(
            window=window,
            start_ns=np.maximum(hole_start[hole], start[window]),
            end_ns=np.minimum(hole_end[hole], end[window]),
            before=before,
            after=after,
        )
