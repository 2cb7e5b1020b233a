"""From when to when each block or segment of memory was there, by the events that begin and end it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, Mask
from cs336_systems.analysis.memory.device_memory import NO_STACK, Action, Events
from cs336_systems.text import counted

BEFORE = -1
"""The event that is not in the recording, because it came earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes(Columns):
    """Memory that was there at moment m if start < m <= end. A moment is a number of events that have happened."""

    address: Ints
    """Rows are sorted by it, and then by time."""
    num_bytes: Ints
    """As the events have it: of an allocation what was asked for, of a segment its size."""
    stream: Ints
    start: Ints
    """The event that allocated it, or BEFORE."""
    free_requested: Ints
    """The event with which the program gave it back, or BEFORE; the number of events if that was never."""
    end: Ints
    """The event from which on it could be used again; the number of events if that was never."""
    stack: Ints
    """Of the event that allocated it."""


class LifetimeReader:
    """Finds lifetimes: at each address, what lies between one event that allocates and the next."""

    def __init__(self, events: Events, allocate: Action, free: Action, give_back: Action | None = None) -> None:
        """Where it takes two events to free, `give_back` is the first."""
        self._events, self._num_events = events, len(events)
        self._allocate, self._give_back, self._free = allocate, give_back, free
        actions = [action for action in (allocate, give_back, free) if action is not None]
        rows = np.flatnonzero(np.isin(events.action, actions))
        self._event = rows[np.argsort(events.address[rows], kind="stable")]
        self._action = events.action[self._event]
        address = events.address[self._event]
        is_new = np.append(True, address[1:] != address[:-1])[: len(address)]
        self._first = np.flatnonzero(is_new | (self._action == allocate))
        self._life = np.cumsum(is_new | (self._action == allocate)) - 1
        self._address = address[self._first]
        self._is_followed = np.append(self._address[1:] == self._address[:-1], False)[: len(self._first)]
        self._contradictions: Counter[str] = Counter()

    def lifetimes(self) -> Lifetimes:
        """All of which an event tells."""
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
        never, end = self._num_events, self._event_of(self._free)
        requested = end if self._give_back is None else self._event_of(self._give_back)
        if not self._has(self._free):
            end = requested.copy()
        elif self._give_back is not None and self._has(self._give_back):
            is_early = requested > end
            requested[is_early & (start == BEFORE)] = BEFORE
            self._count("freed before the program gave it back", is_early & (start != BEFORE))
        is_lost = self._is_followed & (end == never)
        self._count("allocated while it was in use", is_lost)
        end[is_lost] = np.append(start[1:], never)[is_lost]
        return np.minimum(requested, end), end

    def _event_of(self, action: Action) -> Ints:
        """In each life the first event with this action; the number of events where there is none."""
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
        if self._give_back is not None and self._has(self._give_back) and not self._has(self._free):
            yield "No completed frees were recorded: memory counts as free as soon as the program gives it back."
        for what, count in self._contradictions.items():
            if count:
                yield f"Events contradict each other: {counted(count, 'time')} memory is {what}."
