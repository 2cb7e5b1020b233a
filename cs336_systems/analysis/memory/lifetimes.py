"""When memory existed at which address, from the allocator's events.

A moment is a number of events that have happened: 0 is before the first event. Memory exists at
moment m if start < m <= end.
"""

from dataclasses import dataclass

import numpy as np

from ..columns import Columns, Ints, Mask
from .snapshot import NO_STACK, Action, AllocatorEvents

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
    """Number of the event with which the program freed the memory, or BEFORE; the number of
    events if it did not.
    """
    end: Ints
    """Number of the event after which the memory could be reused; the number of events if there
    is none.
    """
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


def nearest(
    address: Ints, start: Ints, end: Ints, wanted: Ints, limit: Ints, moments: Ints
) -> Ints:
    """For each wanted address and moment, the row of the nearest memory that exists then, or NONE.

    The search goes from the wanted address up or down to the limit, and gives up after
    MAX_ADDRESSES addresses. Nothing exists at negative moments.
    """
    order = np.lexsort((start, address))
    addresses, first, index = np.unique(address[order], return_index=True, return_inverse=True)
    span = max(start.max(initial=0), moments.max(initial=0)) + 2
    key = index * span + start[order] - BEFORE
    nearest_row = np.full(len(wanted), NONE)
    rows = np.flatnonzero(moments >= 0)
    step = np.where(limit >= wanted, 1, -1)
    above = np.searchsorted(addresses, wanted)
    below = np.searchsorted(addresses, wanted, side="right") - 1
    at = np.where(step > 0, above, below)
    for _ in range(MAX_ADDRESSES):
        rows = rows[(at[rows] >= 0) & (at[rows] < len(addresses))]
        rows = rows[step[rows] * (addresses[at[rows]] - limit[rows]) <= 0]
        if not len(rows):
            break
        # at the address, by the moment
        last = np.searchsorted(key, at[rows] * span + moments[rows], side="right") - 1
        exists = (last >= first[at[rows]]) & (end[order[last]] >= moments[rows])
        nearest_row[rows[exists]] = order[last[exists]]
        rows = rows[~exists]
        at[rows] += step[rows]
    return nearest_row


class LifetimeReader:
    """Finds the lifetimes in the events: at each address, each allocation and the frees that
    follow it.
    """

    def __init__(
        self,
        events: AllocatorEvents,
        allocate: Action,
        free: Action,
        request_free: Action | None = None,
    ) -> None:
        """The actions that begin and end a lifetime; `request_free` is the first of two, if a
        free takes two events.
        """
        self._events, self._num_events = events, len(events)
        self._allocate, self._request_free, self._free = allocate, request_free, free
        actions = [action for action in (allocate, request_free, free) if action is not None]
        rows = np.flatnonzero(np.isin(events.action, actions))
        self._event = rows[np.argsort(events.address[rows], kind="stable")]
        self._action = events.action[self._event]
        address = events.address[self._event]
        is_first = np.diff(address, prepend=-1) != 0
        is_first |= self._action == allocate
        self._first = np.flatnonzero(is_first)
        self._life = np.cumsum(is_first) - 1
        self._address = address[self._first]
        self._is_followed = np.diff(self._address, append=-1) == 0
        self.num_contradictions = 0
        """Events that do not fit those before: freed twice or with another size, or allocated
        while in use.
        """

    def lifetimes(self) -> Lifetimes:
        """All memory that an event allocated or freed."""
        events = self._events
        first = self._event[self._first]
        start = np.where(self._action[self._first] == self._allocate, first, BEFORE)
        requested, end = self._ends(start)
        sizes = events.num_bytes[self._event]
        self._count(sizes != sizes[self._first][self._life])
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
        """For each life, the events that request the free and that complete it, as
        `free_requested` and `end` of `Lifetimes`.

        `start` is that of the lives. What contradicts itself is counted.
        """
        never, end = self._num_events, self._event_of(self._free)
        requested = end if self._request_free is None else self._event_of(self._request_free)
        if not self._has(self._free):
            # where no event completes a free, memory ends with the request
            end = requested.copy()
        elif self._request_free is not None and self._has(self._request_free):
            # a free that completes without an earlier request: of memory from before the recording
            # the request may be from before it too
            is_unrequested = requested > end
            requested[is_unrequested & (start == BEFORE)] = BEFORE
            self._count(is_unrequested & (start != BEFORE))
        # memory without a free, at an address that is allocated again, ends with that allocation
        is_lost = self._is_followed & (end == never)
        self._count(is_lost)
        end[is_lost] = np.append(start[1:], never)[is_lost]
        return np.minimum(requested, end), end

    def _event_of(self, action: Action) -> Ints:
        """In each life the first event with this action; the number of all events if there is
        none.
        """
        rows = np.flatnonzero(self._action == action)
        is_second = np.diff(self._life[rows], prepend=-1) == 0
        self._count(is_second)
        first = rows[~is_second]
        event = np.full(len(self._first), self._num_events, dtype=np.int64)
        event[self._life[first]] = self._event[first]
        return event

    def _has(self, action: Action) -> bool:
        """Whether any event has this action."""
        return bool((self._action == action).any())

    def _count(self, is_so: Mask) -> None:
        """Count the events for which the mask is true as contradictions in the snapshot."""
        self.num_contradictions += int(np.count_nonzero(is_so))
