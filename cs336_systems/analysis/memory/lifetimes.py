"""The allocator's events on one device in columns, and when each block or segment of memory existed.

A moment is a number of events that have happened: 0 is before the first event. Memory exists at moment m if
start < m <= end.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, Mask
from cs336_systems.text import counted

NO_STACK = 0
"""Number of the empty stack, for events and blocks without a recorded stack."""


class Frame(NamedTuple):
    """One call of a stack."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]
"""The innermost call first."""


class Action(IntEnum):
    """What the allocator did. An event's size is what the program asked for; that of a segment is what CUDA gave."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    """The memory may be used again; this follows the request at once, unless other streams use it too."""
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    """A part of an expandable segment got memory."""
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8


class BlockState(IntEnum):
    """Whether a block was in use when the snapshot was taken."""

    ACTIVE_ALLOCATED = 0
    ACTIVE_PENDING_FREE = 1
    """Freed by the program, but another stream may still use it."""
    INACTIVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Events(Columns):
    """What one device's allocator did, in order."""

    action: Ints
    """A value of `Action`."""
    address: Ints
    """For `OOM` the free bytes of the device; for `SNAPSHOT` 0."""
    num_bytes: Ints
    """For `OOM` the request, rounded up by the allocator; for `SNAPSHOT` the size of all active blocks."""
    stream: Ints
    time_us: Ints
    """Microseconds since 1970."""
    stack: Ints
    """Number of the stack of the call that allocated or freed, or NO_STACK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments(Columns):
    """Memory that the allocator had from CUDA when the snapshot was taken."""

    address: Ints
    num_bytes: Ints
    stream: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Columns):
    """The parts of the segments when the snapshot was taken, in use or free."""

    segment: Ints
    """Row of its segment."""
    address: Ints
    num_bytes: Ints
    requested_bytes: Ints
    """The last request that the block served."""
    state: Ints
    """A value of `BlockState`."""
    stack: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device in a snapshot."""

    device: int
    events: Events
    segments: Segments
    blocks: Blocks


BEFORE = -1
"""In place of an event's number: the event happened before the recording."""
NONE = -1
"""In place of a row: there is no such memory."""
MAX_ADDRESSES = 4096
"""Most addresses that `nearest` looks at for one wanted address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes(Columns):
    """Memory that events allocated or freed, sorted by address and then by time."""

    address: Ints
    num_bytes: Ints
    """As in the events: of an allocation the requested bytes, of a segment its size."""
    stream: Ints
    start: Ints
    """Number of the event that allocated the memory, or BEFORE."""
    free_requested: Ints
    """Number of the event with which the program freed the memory, or BEFORE; the number of events if it did not."""
    end: Ints
    """Number of the event after which the memory could be reused; the number of events if there is none."""
    stack: Ints
    """Stack of the event that allocated the memory."""


def always(address: Ints, num_bytes: Ints, stream: Ints, num_events: int) -> Lifetimes:
    """Memory that existed during the whole recording."""
    never = np.full(len(address), num_events)
    return Lifetimes(
        address=address,
        num_bytes=num_bytes,
        stream=stream,
        start=np.full(len(address), BEFORE),
        free_requested=never,
        end=never,
        stack=np.full(len(address), NO_STACK),
    )


def nearest(address: Ints, start: Ints, end: Ints, wanted: Ints, limit: Ints, moments: Ints) -> Ints:
    """For each wanted address and moment, the row of the nearest memory that exists then, or NONE.

    The search goes from the wanted address up or down to the limit, and gives up after MAX_ADDRESSES addresses. Nothing
    exists at negative moments.
    """
    order = np.lexsort((start, address))
    addresses, first, index = np.unique(address[order], return_index=True, return_inverse=True)
    span = max(start.max(initial=0), moments.max(initial=0)) + 2
    key = index * span + start[order] - BEFORE
    found = np.full(len(wanted), NONE)
    rows = np.flatnonzero(moments >= 0)
    step = np.where(limit >= wanted, 1, -1)
    at = np.where(step > 0, np.searchsorted(addresses, wanted), np.searchsorted(addresses, wanted, side="right") - 1)
    for _ in range(MAX_ADDRESSES):
        rows = rows[(at[rows] >= 0) & (at[rows] < len(addresses))]
        rows = rows[step[rows] * (addresses[at[rows]] - limit[rows]) <= 0]
        if not len(rows):
            break
        last = np.searchsorted(key, at[rows] * span + moments[rows], side="right") - 1  # at the address, by the moment
        exists = (last >= first[at[rows]]) & (end[order[last]] >= moments[rows])
        found[rows[exists]] = order[last[exists]]
        rows = rows[~exists]
        at[rows] += step[rows]
    return found


class LifetimeReader:
    """Finds the lifetimes in the events: at each address, each allocation and the frees that follow it."""

    def __init__(self, events: Events, allocate: Action, free: Action, request_free: Action | None = None) -> None:
        """The actions that begin and end a lifetime; `request_free` is the first of two, if a free takes two events."""
        self._events, self._num_events = events, len(events)
        self._allocate, self._request_free, self._free = allocate, request_free, free
        actions = [action for action in (allocate, request_free, free) if action is not None]
        rows = np.flatnonzero(np.isin(events.action, actions))
        self._event = rows[np.argsort(events.address[rows], kind="stable")]
        self._action = events.action[self._event]
        address = events.address[self._event]
        is_first = np.append(True, address[1:] != address[:-1])[: len(address)] | (self._action == allocate)
        self._first = np.flatnonzero(is_first)
        self._life = np.cumsum(is_first) - 1
        self._address = address[self._first]
        self._is_followed = np.append(self._address[1:] == self._address[:-1], False)[: len(self._first)]
        self._contradictions: Counter[str] = Counter()

    def lifetimes(self) -> Lifetimes:
        """All memory that an event allocated or freed."""
        events = self._events
        first = self._event[self._first]
        start = np.where(self._action[self._first] == self._allocate, first, BEFORE)
        requested, end = self._ends(start)
        sizes = events.num_bytes[self._event]
        self._count("freed with another size than it was allocated with", sizes != sizes[self._first][self._life])
        return Lifetimes(
            address=self._address,
            num_bytes=events.num_bytes[first],
            stream=events.stream[first],
            start=start,
            free_requested=requested,
            end=end,
            stack=np.where(start == BEFORE, NO_STACK, events.stack[first]),
        )

    def _ends(self, start: Ints) -> tuple[Ints, Ints]:
        """The events that request the free and that complete it."""
        never, end = self._num_events, self._event_of(self._free)
        requested = end if self._request_free is None else self._event_of(self._request_free)
        if not self._has(self._free):
            end = requested.copy()
        elif self._request_free is not None and self._has(self._request_free):
            is_early = requested > end
            requested[is_early & (start == BEFORE)] = BEFORE
            self._count("freed before the program gave it back", is_early & (start != BEFORE))
        is_lost = self._is_followed & (end == never)
        self._count("allocated while it was in use", is_lost)
        end[is_lost] = np.append(start[1:], never)[is_lost]
        return np.minimum(requested, end), end

    def _event_of(self, action: Action) -> Ints:
        """In each life the first event with this action; the number of all events if there is none."""
        rows = np.flatnonzero(self._action == action)
        is_second = np.append(False, self._life[rows][1:] == self._life[rows][:-1])[: len(rows)]
        self._count("freed twice", is_second)
        found = np.full(len(self._first), self._num_events, dtype=np.int64)
        found[self._life[rows[~is_second]]] = self._event[rows[~is_second]]
        return found

    def _has(self, action: Action) -> bool:
        return bool((self._action == action).any())

    def _count(self, what: str, is_so: Mask) -> None:
        self._contradictions[what] += int(np.count_nonzero(is_so))

    def notes(self) -> Iterator[str]:
        """What was found wrong with the events."""
        if self._request_free is not None and self._has(self._request_free) and not self._has(self._free):
            yield "No completed frees were recorded: memory counts as free as soon as the program gives it back."
        for what, count in self._contradictions.items():
            if count:
                yield f"Events contradict each other: {counted(count, 'time')} memory is {what}."
