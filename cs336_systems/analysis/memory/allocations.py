"""Replays the events of one device: which allocations there were, from when to when, and what that adds up to.

A recording begins in the middle of a program's life, and may have lost its oldest events. So it is read from its end:
what is allocated when the snapshot is taken, and was not allocated in the recording, was there before it.

A moment is a number of events that have happened: 0 is before the first of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, Mask
from cs336_systems.analysis.memory.block_sizes import block_sizes, may_be_larger, rounds_to_powers
from cs336_systems.analysis.memory.device_memory import NO_STACK, Action, BlockState, DeviceMemory
from cs336_systems.analysis.memory.lifetimes import BEFORE, LifetimeReader, Lifetimes
from cs336_systems.analysis.memory.snapshot import Setting
from cs336_systems.text import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations(Columns):
    """Blocks of memory that were in use at some time of the recording; in use at moment m if start < m <= end."""

    address: Ints
    num_bytes: Ints
    """What the allocator set aside."""
    requested_bytes: Ints
    """What was asked for."""
    stream: Ints
    start: Ints
    """The event that allocated it, or BEFORE."""
    free_requested: Ints
    """The event with which the program gave it back, or BEFORE; the number of events if that was never."""
    end: Ints
    """The event from which on it could be used again; the number of events if that was never."""
    stack: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The allocator could not serve a request."""

    moment: int
    requested_bytes: int
    """Rounded up by the allocator."""
    free_bytes: int
    """On the device."""
    stack: int
    time_us: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The life of one device's memory while it was recorded."""

    memory: DeviceMemory
    allocations: Allocations
    """First those that events tell of, by address, then those that were held throughout."""
    reserved_bytes: Ints
    """Had from CUDA, at each moment."""
    notes: tuple[str, ...]
    """What does not fit together, in sentences."""

    @cached_property
    def allocated_bytes(self) -> Ints:
        """At each moment the blocks that the program has: what `torch.cuda.memory_allocated` gives."""
        return self.curve(self.allocations.num_bytes, self.allocations.free_requested)

    @cached_property
    def active_bytes(self) -> Ints:
        """At each moment the blocks in use, those included that the program gave back and another stream may use."""
        return self.curve(self.allocations.num_bytes, self.allocations.end)

    @cached_property
    def requested_bytes(self) -> Ints:
        """What was asked for of those: exact where `num_bytes` is a conclusion."""
        return self.curve(self.allocations.requested_bytes, self.allocations.end)

    @cached_property
    def recorded_bytes(self) -> Ints:
        """The blocks that were held throughout, and what was asked for of the others in use."""
        rows = self.allocations
        return self.curve(np.where(self.is_held_throughout, rows.num_bytes, rows.requested_bytes), rows.end)

    def curve(self, values: Ints, end: Ints) -> Ints:
        """At each moment the sum of a value over the allocations that began before it and do not end before it."""
        start, num_events = self.allocations.start, len(self.memory.events)
        change = np.zeros(num_events + 1, dtype=np.int64)
        was_there, is_freed = start == BEFORE, (end != BEFORE) & (end < num_events)
        change[0] = values[was_there & (end != BEFORE)].sum()
        change[start[~was_there] + 1] = values[~was_there]
        change[end[is_freed] + 1] -= values[is_freed]  # an event ends one allocation at most, and may begin another
        return np.cumsum(change)

    @cached_property
    def peak(self) -> int:
        """The first moment at which most is in use."""
        return int(self.active_bytes.argmax())

    def in_use(self, moment: int) -> Ints:
        """The rows of `allocations` in use at a moment, the largest first."""
        rows = self.allocations
        found = np.flatnonzero((rows.start < moment) & (moment <= rows.end))
        return found[np.argsort(-rows.num_bytes[found], kind="stable")]

    @property
    def is_held_throughout(self) -> Mask:
        """Of each allocation, whether it was there before the first event and after the last."""
        is_held: Mask = (self.allocations.start == BEFORE) & (self.allocations.end == len(self.memory.events))
        return is_held

    @property
    def num_held_with_stack(self) -> int:
        """Blocks held throughout whose allocation was recorded all the same, in events that are not there."""
        return int(np.count_nonzero(self.is_held_throughout & (self.allocations.stack != NO_STACK)))

    @property
    def out_of_memory(self) -> tuple[OutOfMemory, ...]:
        events = self.memory.events
        return tuple(
            OutOfMemory(
                moment=row,
                requested_bytes=int(events.num_bytes[row]),
                free_bytes=int(events.address[row]),
                stack=int(events.stack[row]),
                time_us=int(events.time_us[row]),
            )
            for row in np.flatnonzero(events.action == Action.OOM).tolist()
        )


def replay(memory: DeviceMemory, settings: Mapping[str, Setting]) -> Replay:
    """What the events and the segments of a device tell together; `settings` are those of the snapshot."""
    reader = LifetimeReader(memory.events, Action.ALLOC, Action.FREE_COMPLETED, Action.FREE_REQUESTED)
    recorded = reader.lifetimes()
    held = _Held(memory, recorded)
    lifetimes = _joined(recorded, held.lifetimes())
    reserved = _reserved(memory)
    return Replay(
        memory=memory,
        allocations=Allocations(
            requested_bytes=lifetimes.num_bytes,
            **{
                name: getattr(lifetimes, name)
                for name in ("address", "stream", "start", "free_requested", "end", "stack")
            },
            num_bytes=_num_bytes(memory, lifetimes, settings),
        ),
        reserved_bytes=reserved,
        notes=(
            *reader.notes(),
            *held.notes(),
            *_notes_on_sizes(lifetimes, len(memory.events), settings),
            *_notes_on_reserved(reserved),
        ),
    )


def _joined(*parts: Lifetimes) -> Lifetimes:
    return Lifetimes(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Lifetimes)}
    )


def _num_bytes(memory: DeviceMemory, lifetimes: Lifetimes, settings: Mapping[str, Setting]) -> Ints:
    """The blocks' sizes: those that are still there are known, the others follow from the requests."""
    num_bytes = block_sizes(lifetimes, _segments(memory), settings)
    blocks, num_events = memory.blocks, len(memory.events)
    order = np.argsort(blocks.address)
    place = np.searchsorted(blocks.address[order], lifetimes.address)
    row = np.append(order, -1)[place]
    is_known = (
        (lifetimes.end == num_events)
        & (np.append(blocks.address, -1)[row] == lifetimes.address)
        & (np.append(blocks.state, BlockState.INACTIVE)[row] != BlockState.INACTIVE)
    )
    num_bytes[is_known] = blocks.num_bytes[row[is_known]]
    return num_bytes


def _segments(memory: DeviceMemory) -> Lifetimes:
    """The segments that were there at some time of the recording; without expandable ones, which have no fixed end."""
    recorded = LifetimeReader(memory.events, Action.SEGMENT_ALLOC, Action.SEGMENT_FREE).lifetimes()
    segments, never = memory.segments, len(memory.events)
    rows = np.flatnonzero(~np.isin(segments.address, recorded.address[recorded.end == never]))
    return _joined(
        recorded, _throughout(segments.address[rows], segments.num_bytes[rows], segments.stream[rows], never)
    )


def _throughout(address: Ints, num_bytes: Ints, stream: Ints, never: int) -> Lifetimes:
    """Memory that was there all the time."""
    return Lifetimes(
        address=address,
        num_bytes=num_bytes,
        stream=stream,
        start=np.full(len(address), BEFORE),
        free_requested=np.full(len(address), never),
        end=np.full(len(address), never),
        stack=np.full(len(address), NO_STACK),
    )


class _Held:
    """What was in use throughout: blocks in use when the snapshot is taken, of which no event tells."""

    def __init__(self, memory: DeviceMemory, recorded: Lifetimes) -> None:
        self._memory, self._recorded = memory, recorded
        blocks = memory.blocks
        is_left = recorded.end == len(memory.events)
        is_used = blocks.state != BlockState.INACTIVE
        self._is_gone = is_left & ~np.isin(recorded.address, blocks.address[is_used])
        is_untold = is_used & ~np.isin(blocks.address, recorded.address[is_left])
        self._is_late = is_untold & _overlap(blocks.address, blocks.num_bytes, recorded)
        self._rows = np.flatnonzero(is_untold & ~self._is_late)

    def lifetimes(self) -> Lifetimes:
        """In the order of the blocks."""
        blocks, rows, never = self._memory.blocks, self._rows, len(self._memory.events)
        stream = self._memory.segments.stream[blocks.segment[rows]]
        found = _throughout(blocks.address[rows], blocks.requested_bytes[rows], stream, never)
        is_pending = blocks.state[rows] == BlockState.ACTIVE_PENDING_FREE
        return replace(
            found, free_requested=np.where(is_pending, BEFORE, found.free_requested), stack=blocks.stack[rows]
        )

    def notes(self) -> Iterator[str]:
        """Where the events and the segments do not fit together."""
        if num := int(np.count_nonzero(self._is_gone)):
            num_bytes = int(self._recorded.num_bytes[self._is_gone].sum())
            yield (
                f"Gone without a free: {counted(num, 'allocation')} of {counted(num_bytes, 'byte')}; recording ended "
                "before the snapshot."
            )
        if num := int(np.count_nonzero(self._is_late)):
            num_bytes = int(self._memory.blocks.requested_bytes[self._is_late].sum())
            yield (f"Left out: {counted(num, 'block')} of {counted(num_bytes, 'byte')} that came after the last event.")


def _overlap(address: Ints, num_bytes: Ints, recorded: Lifetimes) -> Mask:
    """Whether any recorded allocation, which are sorted by address, had a part of each range at any time."""
    ends = np.append(0, np.maximum.accumulate(recorded.address + recorded.num_bytes))
    num_below = np.searchsorted(recorded.address, address)
    num_before_end = np.searchsorted(recorded.address, address + np.maximum(num_bytes, 1))
    is_overlapped: Mask = (ends[num_below] > address) | (num_before_end > num_below)
    return is_overlapped


def _reserved(memory: DeviceMemory) -> Ints:
    """Bytes had from CUDA at each moment, from those at the end."""
    sign = np.zeros(len(Action), dtype=np.int64)
    sign[[Action.SEGMENT_ALLOC, Action.SEGMENT_MAP]] = 1
    sign[[Action.SEGMENT_FREE, Action.SEGMENT_UNMAP]] = -1
    change = sign[memory.events.action] * memory.events.num_bytes
    at_end = memory.segments.num_bytes.sum() - change.sum()
    return np.append(at_end, at_end + np.cumsum(change))


def _notes_on_sizes(lifetimes: Lifetimes, never: int, settings: Mapping[str, Setting]) -> Iterator[str]:
    is_guessed = (lifetimes.start == BEFORE) & (lifetimes.end < never) & may_be_larger(lifetimes.num_bytes, settings)
    if num := int(np.count_nonzero(is_guessed)):
        yield (
            f"Made before the recording and freed in it: {counted(num, 'large allocation')}. Each block may be up to "
            "1 MiB larger than shown; what was asked for is exact."
        )
    if rounds_to_powers(settings):
        yield (
            "The allocator rounds to powers of two (roundup_power2_divisions): blocks that were freed in the "
            "recording are larger than shown; what was asked for is exact."
        )


def _notes_on_reserved(reserved_bytes: Ints) -> Iterator[str]:
    if reserved_bytes.min() < 0:
        yield (
            f"More segments were given back than there were ({-reserved_bytes.min():,} bytes too many): "
            "what was reserved is not known."
        )
