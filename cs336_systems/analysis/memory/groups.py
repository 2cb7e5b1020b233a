"""Replays the events of one device: which allocations there were and when, what each holds, and
groups of like ones.

A moment is a number of events that have happened: 0 is before the first event. Memory exists at
moment m if start < m <= end.

The allocator rounds requests up to 512 bytes and takes the beginning of a free block. The remainder
stays free, unless it is at most 1 MiB of a block for large requests: then the request gets the
whole block, up to the next block in use or the segment's end.

A recording begins while the program runs and may have lost its oldest events. So it is read from
its end: memory that is allocated when the snapshot is taken, but was not allocated by an event,
existed before the recording.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from functools import cached_property
from itertools import chain, takewhile
from typing import Any

import numpy as np

from ...config import Phase
from ...ranges import block_range
from ...text import counted
from ..columns import Columns, Ints, Mask, chosen, joined
from .profile import (
    CATEGORIES,
    CODES,
    MIN_LATER,
    BlockMemory,
    Category,
    CategoryBytes,
    Kind,
    LikeAllocations,
    Phases,
    Place,
    SavedTensor,
    Sighting,
    block_of_parameter,
    block_of_ranges,
    like_name,
    short_name,
    within_block,
)
from .snapshot import NO_STACK, Action, BlockState, DeviceMemory, Events, Frame, Stack

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
    found = np.full(len(wanted), NONE)
    rows = np.flatnonzero(moments >= 0)
    step = np.where(limit >= wanted, 1, -1)
    at = np.where(
        step > 0,
        np.searchsorted(addresses, wanted),
        np.searchsorted(addresses, wanted, side="right") - 1,
    )
    for _ in range(MAX_ADDRESSES):
        rows = rows[(at[rows] >= 0) & (at[rows] < len(addresses))]
        rows = rows[step[rows] * (addresses[at[rows]] - limit[rows]) <= 0]
        if not len(rows):
            break
        # at the address, by the moment
        last = np.searchsorted(key, at[rows] * span + moments[rows], side="right") - 1
        exists = (last >= first[at[rows]]) & (end[order[last]] >= moments[rows])
        found[rows[exists]] = order[last[exists]]
        rows = rows[~exists]
        at[rows] += step[rows]
    return found


class LifetimeReader:
    """Finds the lifetimes in the events: at each address, each allocation and the frees that
    follow it.
    """

    def __init__(
        self, events: Events, allocate: Action, free: Action, request_free: Action | None = None
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
        is_first = np.append(True, address[1:] != address[:-1])[: len(address)] | (
            self._action == allocate
        )
        self._first = np.flatnonzero(is_first)
        self._life = np.cumsum(is_first) - 1
        self._address = address[self._first]
        self._is_followed = np.append(self._address[1:] == self._address[:-1], False)[
            : len(self._first)
        ]
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
        """The events that request the free and that complete it."""
        never, end = self._num_events, self._event_of(self._free)
        requested = end if self._request_free is None else self._event_of(self._request_free)
        if not self._has(self._free):
            end = requested.copy()
        elif self._request_free is not None and self._has(self._request_free):
            is_early = requested > end
            requested[is_early & (start == BEFORE)] = BEFORE
            self._count(is_early & (start != BEFORE))
        is_lost = self._is_followed & (end == never)
        self._count(is_lost)
        end[is_lost] = np.append(start[1:], never)[is_lost]
        return np.minimum(requested, end), end

    def _event_of(self, action: Action) -> Ints:
        """In each life the first event with this action; the number of all events if there is
        none.
        """
        rows = np.flatnonzero(self._action == action)
        is_second = np.append(False, self._life[rows][1:] == self._life[rows][:-1])[: len(rows)]
        self._count(is_second)
        found = np.full(len(self._first), self._num_events, dtype=np.int64)
        found[self._life[rows[~is_second]]] = self._event[rows[~is_second]]
        return found

    def _has(self, action: Action) -> bool:
        return bool((self._action == action).any())

    def _count(self, is_so: Mask) -> None:
        self.num_contradictions += int(np.count_nonzero(is_so))


ROUNDING_BYTES = 512
SMALL_BYTES = 2**20
"""Requests up to this size come from small segments, where a rest of 512 bytes is already split
off.
"""
NO_LIMIT = np.iinfo(np.int64).max
"""An address above all others."""


def rounded(requested_bytes: Ints) -> Ints:
    """Requests rounded up as the allocator does by default."""
    return np.maximum(-(-requested_bytes // ROUNDING_BYTES), 1) * ROUNDING_BYTES


def may_be_larger(requested_bytes: Ints, settings: Mapping[str, Any]) -> Mask:
    """Whether the blocks may be larger than the rounded requests."""
    is_large: Mask = rounded(requested_bytes) > SMALL_BYTES
    return is_large & (settings.get("expandable_segments") is not True)


def block_sizes(blocks: Lifetimes, segments: Lifetimes, settings: Mapping[str, Any]) -> Ints:
    """The bytes of each block, from the request in `blocks` and from what followed it in memory
    when it was allocated.

    What followed a block that was allocated before the recording is not known; the first moment is
    used instead.
    """
    sizes = rounded(blocks.num_bytes)
    rows = np.flatnonzero(may_be_larger(blocks.num_bytes, settings))
    end = blocks.address[rows] + sizes[rows]
    moment = np.maximum(blocks.start[rows], 0)
    largest = settings.get("max_split_size", -1)
    is_whole = sizes[rows] >= (largest if largest >= 0 else NO_LIMIT)
    limit = np.where(is_whole, NO_LIMIT - 1, end + SMALL_BYTES)
    behind = np.full(len(rows), NO_LIMIT)
    for memory, boundary in (
        (blocks, blocks.address),
        (segments, segments.address + segments.num_bytes),
    ):
        found = nearest(boundary, memory.start, memory.end, end, limit, moment)
        behind = np.minimum(behind, np.append(boundary, NO_LIMIT)[found])  # NONE is the last
    sizes[rows] += np.where(behind < NO_LIMIT, behind - end, 0)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations(Lifetimes):
    """Blocks of memory that were in use at some moment; `num_bytes` is what the allocator set
    aside for each.
    """

    requested_bytes: Ints


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What one device's memory was used for during the recording."""

    memory: DeviceMemory
    allocations: Allocations
    """First the allocations that events made or freed, by address; then those held throughout
    the recording.
    """
    reserved_bytes: Ints
    """Bytes that the allocator had reserved from CUDA, at each moment."""
    is_private: Mask
    """For each allocation, whether it lies in a private pool, as CUDA graphs have."""
    private_bytes: Ints
    """The part of `reserved_bytes` that private pools had, at each moment."""
    are_sizes_known: bool
    """False if the size of some block was inferred and may be wrong."""
    notes: tuple[str, ...]
    """Sentences about sizes that are not known, and about events and segments that do not fit
    together.
    """

    @cached_property
    def allocated_bytes(self) -> Ints:
        """Bytes of the program's blocks at each moment, as `torch.cuda.memory_allocated` returns
        them.
        """
        return self.curve(self.allocations.num_bytes, self.allocations.free_requested)

    @cached_property
    def requested_bytes(self) -> Ints:
        """Requested bytes of the blocks in use, at each moment: exact even if `num_bytes` was
        inferred.
        """
        return self.curve(self.allocations.requested_bytes, self.allocations.end)

    @cached_property
    def idle_private_bytes(self) -> Ints:
        """Bytes that private pools had reserved and that were in no block, at each moment."""
        rows = self.allocations
        in_blocks = self.curve(np.where(self.is_private, rows.num_bytes, 0), rows.end)
        free: Ints = np.clip(
            self.private_bytes - in_blocks, 0, self.reserved_bytes - self.allocated_bytes
        )
        return free

    def curve(self, values: Ints, end: Ints) -> Ints:
        """At each moment the sum of a value over the allocations with start < moment <= end."""
        start, num_events = self.allocations.start, len(self.memory.events)
        change = np.zeros(num_events + 1, dtype=np.int64)
        was_there, is_freed = start == BEFORE, (end != BEFORE) & (end < num_events)
        change[0] = values[was_there & (end != BEFORE)].sum()
        change[start[~was_there] + 1] = values[~was_there]
        # indices are unique: an event ends at most one allocation
        change[end[is_freed] + 1] -= values[is_freed]
        return np.cumsum(change)

    @property
    def is_held_throughout(self) -> Mask:
        """For each allocation, whether it existed before the first event and after the last."""
        is_held: Mask = (self.allocations.start == BEFORE) & (
            self.allocations.end == len(self.memory.events)
        )
        return is_held

    @property
    def num_held_with_stack(self) -> int:
        """Number of blocks held throughout that have a stack: the event that allocated them was
        recorded, but lost.
        """
        return int(np.count_nonzero(self.is_held_throughout & (self.allocations.stack != NO_STACK)))

    @property
    def failed_requests(self) -> list[int]:
        """Events at which the allocator was out of memory."""
        return np.flatnonzero(self.memory.events.action == Action.OOM).tolist()


def replay(memory: DeviceMemory, settings: Mapping[str, Any]) -> Replay:
    """Combine the events and the segments of a device; `settings` are those of the snapshot."""
    reader = LifetimeReader(
        memory.events, Action.ALLOC, Action.FREE_COMPLETED, Action.FREE_REQUESTED
    )
    recorded = reader.lifetimes()
    held, notes_on_held = _held_throughout(memory, recorded)
    lifetimes = joined(recorded, held)
    notes_on_sizes = tuple(_notes_on_sizes(lifetimes, len(memory.events), settings))
    columns = {field.name: getattr(lifetimes, field.name) for field in fields(Lifetimes)}
    segments = _segments(memory)
    columns["num_bytes"] = _num_bytes(memory, lifetimes, segments, settings)
    allocations = Allocations(**columns, requested_bytes=lifetimes.num_bytes)
    is_private, private_bytes = _in_private_pools(memory, segments, allocations)
    found = Replay(
        memory=memory,
        allocations=allocations,
        reserved_bytes=_reserved(memory),
        is_private=is_private,
        private_bytes=private_bytes,
        are_sizes_known=not notes_on_sizes,
        notes=(*notes_on_held, *notes_on_sizes),
    )
    if reader.num_contradictions:
        note = (
            f"Events contradict each other {counted(reader.num_contradictions, 'time')}: some "
            "are lost or damaged."
        )
        found = replace(found, notes=(note, *found.notes))
    in_blocks = found.curve(allocations.num_bytes, allocations.end)
    if (missing := int((in_blocks - found.reserved_bytes).max())) > 0:
        note = (
            f"Segments are missing in the file: blocks take up to {missing:,} bytes more than "
            "were reserved."
        )
        found = replace(
            found,
            reserved_bytes=np.maximum(found.reserved_bytes, in_blocks),
            notes=(*found.notes, note),
        )
    return found


def _in_private_pools(
    memory: DeviceMemory, segments: Lifetimes, allocations: Lifetimes
) -> tuple[Mask, Ints]:
    """Which allocations lie in segments of private pools, and the bytes of these segments at each
    moment.

    The pool of a segment is known if it was still there at the end; an expandable one counts with
    its size then.
    """
    never = len(memory.events)
    is_private_segment = np.isin(
        segments.address, memory.segments.address[memory.segments.pool > 0]
    )
    own = chosen(segments, is_private_segment & (segments.end == never))
    own = chosen(own, np.argsort(own.address, kind="stable"))
    at = np.searchsorted(own.address, allocations.address, side="right") - 1
    # -1 is the last
    ends, starts = np.append(own.address + own.num_bytes, 0), np.append(own.start, never)
    is_private: Mask = (allocations.address < ends[at]) & (allocations.end > starts[at])
    change = np.bincount(own.start + 1, weights=own.num_bytes, minlength=never + 1).astype(np.int64)
    return is_private, np.cumsum(change)


def _num_bytes(
    memory: DeviceMemory, lifetimes: Lifetimes, segments: Lifetimes, settings: Mapping[str, Any]
) -> Ints:
    """The sizes of the blocks: known for those still in use, and inferred from the requests for
    the others.
    """
    num_bytes = block_sizes(lifetimes, segments, settings)
    used = np.flatnonzero(memory.blocks.state != BlockState.INACTIVE)
    used = used[np.argsort(memory.blocks.address[used], kind="stable")]
    address = memory.blocks.address[used]
    place = np.searchsorted(address, lifetimes.address)
    is_known = (lifetimes.end == len(memory.events)) & (
        np.append(address, -1)[place] == lifetimes.address
    )
    num_bytes[is_known] = memory.blocks.num_bytes[used[place[is_known]]]
    return num_bytes


def _segments(memory: DeviceMemory) -> Lifetimes:
    """All segments of the recording, except expandable ones, whose end moves."""
    recorded = LifetimeReader(memory.events, Action.SEGMENT_ALLOC, Action.SEGMENT_FREE).lifetimes()
    segments, never = memory.segments, len(memory.events)
    rows = np.flatnonzero(~np.isin(segments.address, recorded.address[recorded.end == never]))
    return joined(
        recorded,
        always(segments.address[rows], segments.num_bytes[rows], segments.stream[rows], never),
    )


def _held_throughout(memory: DeviceMemory, recorded: Lifetimes) -> tuple[Lifetimes, list[str]]:
    """The blocks that no event allocated or freed, and sentences about events and segments that
    do not fit.
    """
    blocks, never, notes = memory.blocks, len(memory.events), []
    is_left, is_used = recorded.end == never, blocks.state != BlockState.INACTIVE
    is_gone = is_left & ~np.isin(recorded.address, blocks.address[is_used])
    is_unrecorded = is_used & ~np.isin(blocks.address, recorded.address[is_left])
    is_late = is_unrecorded & _overlap(blocks.address, blocks.num_bytes, recorded)
    gone, late = int(recorded.num_bytes[is_gone].sum()), int(blocks.requested_bytes[is_late].sum())
    if gone or late:
        notes.append(
            f"The snapshot was taken after recording had ended: {counted(gone, 'byte')} had gone "
            f"since, and {counted(late, 'byte')} had come, which are left out."
        )
    rows = np.flatnonzero(is_unrecorded & ~is_late)
    stream = memory.segments.stream[blocks.segment[rows]]
    held = always(blocks.address[rows], blocks.requested_bytes[rows], stream, never)
    requested = np.where(blocks.state[rows] == BlockState.ACTIVE_PENDING_FREE, BEFORE, never)
    return replace(held, free_requested=requested, stack=blocks.stack[rows]), notes


def _overlap(address: Ints, num_bytes: Ints, recorded: Lifetimes) -> Mask:
    """Whether any recorded allocation ever had a part of each range of addresses."""
    ends = np.append(0, np.maximum.accumulate(recorded.address + recorded.num_bytes))
    num_below = np.searchsorted(recorded.address, address)
    num_before_end = np.searchsorted(recorded.address, address + np.maximum(num_bytes, 1))
    is_overlapped: Mask = (ends[num_below] > address) | (num_before_end > num_below)
    return is_overlapped


def _reserved(memory: DeviceMemory) -> Ints:
    """Bytes that the allocator had from CUDA at each moment, counted backwards from those at the
    end.
    """
    sign = np.zeros(len(Action), dtype=np.int64)
    sign[[Action.SEGMENT_ALLOC, Action.SEGMENT_MAP]] = 1
    sign[[Action.SEGMENT_FREE, Action.SEGMENT_UNMAP]] = -1
    change = sign[memory.events.action] * memory.events.num_bytes
    at_end = memory.segments.num_bytes.sum() - change.sum()
    return np.append(at_end, at_end + np.cumsum(change))


def _notes_on_sizes(lifetimes: Lifetimes, never: int, settings: Mapping[str, Any]) -> Iterator[str]:
    is_guessed = (
        (lifetimes.start == BEFORE)
        & (lifetimes.end < never)
        & may_be_larger(lifetimes.num_bytes, settings)
    )
    is_rounded = any(
        value not in (0, 1) for value in settings.get("roundup_power2_divisions", {}).values()
    )
    if is_rounded or (num := int(np.count_nonzero(is_guessed))):
        of = (
            "all blocks (roundup_power2_divisions)"
            if is_rounded
            else counted(num, "large block") + " from before"
        )
        yield (
            f"Freed in the recording, of a size that the file does not say: {of}. Requested "
            "bytes are exact."
        )


NOT_SIGHTED = NONE
_PRECEDENCE = {kind: rank for rank, kind in enumerate(Kind)}


class MemoryAttributionError(AssertionError):
    """The categories do not add up to the allocated bytes, which is a defect of this analysis."""


def resolve(allocations: Allocations, sightings: Sequence[Sighting], moments: Ints) -> Ints:
    """For each sighting, the row of the allocation that contained its address at its moment, or
    NOT_SIGHTED.
    """
    wanted = np.array([sighting.address for sighting in sightings], dtype=np.int64)
    found = nearest(
        allocations.address,
        allocations.start,
        allocations.free_requested,
        wanted,
        np.zeros_like(wanted),
        moments,
    )
    ends = np.append(allocations.address + allocations.num_bytes, 0)  # NONE is the last
    return np.where(ends[found] > wanted, found, NOT_SIGHTED)


def categorise(
    replay: Replay, sightings: Sequence[Sighting], row_of: Ints, without_notes: Sequence[Stack] = ()
) -> tuple[Ints, Ints]:
    """For each allocation the code of its category, and the sighting that decided it or
    NOT_SIGHTED.

    Of several sightings of one allocation, the kind decides; of the same kind, the first. Without
    notes there are no sightings: the category follows from the lifetimes and from the stacks, given
    for that.
    """
    rows = replay.allocations
    category = np.where(replay.is_held_throughout, CODES[Category.HELD], CODES[Category.TEMPORARY])
    if without_notes:
        category = codes_without_notes(replay, without_notes)
    category[replay.is_private] = CODES[Category.POOL]
    sighted = np.full(len(rows), NOT_SIGHTED, dtype=np.int64)
    rank = np.array([_PRECEDENCE[sighting.kind] for sighting in sightings], dtype=np.int64)
    # of several sightings of a row, the deciding one is written last
    order = np.argsort(rank, kind="stable")[::-1]
    order = order[row_of[order] != NOT_SIGHTED]
    sighted[row_of[order]] = order
    code_of = {
        kind: CODES[Category.PARAMETERS if kind is Kind.GATHERED else Category(kind)]
        for kind in Kind
    }
    category[row_of[order]] = [code_of[sightings[index].kind] for index in order.tolist()]
    return category, sighted


MIN_BETWEEN = 4
"""Allocations outside of optimizers from which on a step has ended; a thread that loads data
makes fewer meanwhile.
"""
_TORCH_OPTIM = re.compile(r"(?:^|[/\\])torch[/\\]optim[/\\](lr_scheduler|swa_utils)?")
_OPTIMIZER = re.compile(
    r"(?<![a-z])(?:optims?|optimi[sz]ers?|optimi[sz]ation|lion|lamb|lars|soap|stage)(?![a-z])"
    r"|adam|adagrad|adadelta|adafactor|rmsprop|sgd|lbfgs|muon|shampoo|sophia|prodigy"
)
"""Parts of the names of files and classes of optimizers; `stage3.py` is that of DeepSpeed's
ZeRO.
"""
_FOLDERS = re.compile(r"[/\\](?:optims?|optimizers?)[/\\][^/\\]*$")
_UPDATE = re.compile(r"(?:^|_)(?:step|update|init|state|states)(?:_|$)")
_CALLED_BY_STEP = frozenset(
    {"forward", "backward", "closure", "training_step", "zero_grad", "_call_impl"}
)
"""Functions that are no part of an optimizer even if its step calls them, as it calls a closure."""
_ENGINE = re.compile(r"[/\\]torch[/\\](?:autograd|_functorch|_inductor)[/\\]")


class _Call(Enum):
    """What a frame says of its stack."""

    OPTIMIZER = auto()
    INNER = auto()
    """A function that is no part of an optimizer even if its step calls it."""
    ZERO_GRAD = auto()


def _call_of(frame: Frame) -> _Call | None:
    """Judge it by its folder in PyTorch, or by how its function and its file or class are named;
    None says nothing.
    """
    name, _, function = frame.name.rpartition(".")
    if function in _CALLED_BY_STEP:
        return _Call.ZERO_GRAD if function == "zero_grad" else _Call.INNER
    if of_torch := _TORCH_OPTIM.search(frame.filename):
        return None if of_torch[1] else _Call.OPTIMIZER
    file = re.split(r"[/\\]", frame.filename)[-1]
    is_named = _OPTIMIZER.search(f"{file} {name}".lower()) or _FOLDERS.search(frame.filename)
    return _Call.OPTIMIZER if is_named and _UPDATE.search(function) else None


@dataclass(frozen=True, slots=True)
class Makers:
    """What each stack of a snapshot says of who called."""

    is_optimizer: Mask
    """An optimizer's step, or the making of its state, is on it, and no call of the model
    within.
    """
    is_autograd: Mask
    """It begins in PyTorch's engine of backward, whose threads run no other Python code, and not
    in a program.
    """
    clears: Mask
    """`zero_grad` is on it."""


def makers_of(stacks: Sequence[Stack]) -> Makers:
    """Judge each stack; every different frame is looked at once."""
    call_of = {frame: _call_of(frame) for frame in {*chain.from_iterable(stacks)}}
    told = [[call for frame in stack if (call := call_of[frame])] for stack in stacks]
    outermost = [
        next((f.filename for f in reversed(stack) if f.filename.endswith(".py")), "")
        for stack in stacks
    ]
    return Makers(
        is_optimizer=np.array([calls[:1] == [_Call.OPTIMIZER] for calls in told], dtype=np.bool_),
        is_autograd=np.array(
            [not file or bool(_ENGINE.search(file)) for file in outermost], dtype=np.bool_
        ),
        clears=np.array([_Call.ZERO_GRAD in calls for calls in told], dtype=np.bool_),
    )


def by_lifetime(replay: Replay) -> Ints:
    """The code of each allocation's category by when it was there alone."""
    rows, events = replay.allocations, replay.memory.events
    made = np.append(0, np.cumsum(events.action == Action.ALLOC))
    is_old, is_kept = rows.start == BEFORE, rows.free_requested == len(events)
    is_long = made[np.maximum(rows.free_requested, 0)] - made[rows.start + 1] >= MIN_LATER
    choices = (Category.HELD, Category.EARLIER, Category.KEPT, Category.LATER)
    return np.select(
        [replay.is_held_throughout, is_old, is_kept, is_long],
        [CODES[choice] for choice in choices],
        default=CODES[Category.TEMPORARY],
    )


def optimizer_state(replay: Replay, makers: Makers) -> Mask:
    """Allocations that a step of an optimizer made and left, and earlier ones of the same size
    that it replaced.
    """
    rows, events, is_optimizer = replay.allocations, replay.memory.events, makers.is_optimizer
    is_made = events.action == Action.ALLOC
    others = np.append(0, np.cumsum(is_made & ~is_optimizer[events.stack]))
    between = others[np.maximum(rows.free_requested, 0)] - others[rows.start + 1]
    is_left = (rows.free_requested == len(events)) | (between >= MIN_BETWEEN)
    # blocks from before the recording may have their stack too
    is_state: Mask = is_optimizer[rows.stack] & is_left
    # a free without a stack belongs to the step that allocated last
    last_made = (
        np.maximum.accumulate(np.where(is_made, np.arange(len(events)), 0))
        if len(events)
        else events.stack
    )
    stack_of_free = np.where(events.stack == NO_STACK, events.stack[last_made], events.stack)
    old = np.flatnonzero(
        (rows.start == BEFORE) & (rows.free_requested >= 0) & (rows.free_requested < len(events))
    )
    is_replaced = is_optimizer[stack_of_free[rows.free_requested[old]]]
    is_replaced &= np.isin(rows.requested_bytes[old], rows.requested_bytes[is_state])
    is_state[old[is_replaced]] = True
    return is_state


def gradients(replay: Replay, makers: Makers) -> Mask:
    """Allocations by autograd that were there while an optimizer worked, or that `zero_grad` freed.

    None if no stack has Python code: then it was not recorded.
    """
    rows, events = replay.allocations, replay.memory.events
    if makers.is_autograd[events.stack].all():
        return np.zeros(len(rows), dtype=np.bool_)
    steps = np.append(0, np.cumsum(makers.is_optimizer[events.stack]))
    was_there = steps[np.maximum(rows.free_requested, 0)] - steps[rows.start + 1] > 0
    is_cleared = np.append(makers.clears[events.stack], False)[rows.free_requested]
    is_gradient: Mask = (
        (rows.start != BEFORE) & makers.is_autograd[rows.stack] & (was_there | is_cleared)
    )
    return is_gradient


def codes_without_notes(replay: Replay, stacks: Sequence[Stack]) -> Ints:
    """The code of each allocation's category, as far as lifetimes and stacks tell.

    Known for certain is whether memory was there before the recording and at its end. The stacks
    tell what an optimizer made, and what autograd made in its own threads, which have no Python
    code of the program.
    """
    found, makers = by_lifetime(replay), makers_of(stacks)
    found[gradients(replay, makers)] = CODES[Category.GRADIENTS]
    found[optimizer_state(replay, makers)] = CODES[Category.OPTIMIZER_STATE]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSums:
    """Sums over the allocated blocks: a row for each of CATEGORIES, a column for each moment."""

    moments: Ints
    num_bytes: Ints
    requested_bytes: Ints
    counts: Ints

    def at(self, moment: int) -> tuple[CategoryBytes, ...]:
        """The categories that have blocks at one of the moments."""
        column = int(np.searchsorted(self.moments, moment))
        sums = (self.num_bytes, self.requested_bytes, self.counts)
        cells = zip(CATEGORIES, *(table[:, column].tolist() for table in sums), strict=True)
        return tuple(
            CategoryBytes(
                category=category, num_bytes=num_bytes, requested_bytes=requested_bytes, count=count
            )
            for category, num_bytes, requested_bytes, count in cells
            if count
        )


def live_sums(replay: Replay, category: Ints, moments: Ints) -> LiveSums:
    """The sums at the sorted `moments`; raise MemoryAttributionError unless they add up to the
    allocated bytes.
    """
    rows = replay.allocations
    first = np.searchsorted(moments, rows.start, side="right")
    behind = np.searchsorted(moments, rows.free_requested, side="right")
    num_bytes, requested_bytes, counts = (
        _sums(category, values, first, behind, len(moments))
        for values in (rows.num_bytes, rows.requested_bytes, np.ones(len(rows), dtype=np.int64))
    )
    sums = LiveSums(
        moments=moments, num_bytes=num_bytes, requested_bytes=requested_bytes, counts=counts
    )
    missed = sums.num_bytes.sum(axis=0) - replay.allocated_bytes[moments]
    if missed.any():
        where = int(np.flatnonzero(missed)[0])
        raise MemoryAttributionError(
            f"at moment {moments[where]} the categories hold {sums.num_bytes[:, where].sum()} "
            f"bytes of {replay.allocated_bytes[moments[where]]}"
        )
    return sums


def _sums(code: Ints, values: Ints, first: Ints, behind: Ints, num_moments: int) -> Ints:
    """The sum of the values by category; each value counts from column `first` to the one before
    column `behind`.
    """
    change = np.zeros((len(CATEGORIES), num_moments + 1), dtype=np.int64)
    is_there = first < behind
    np.add.at(change, (code[is_there], first[is_there]), values[is_there])
    np.subtract.at(change, (code[is_there], behind[is_there]), values[is_there])
    return np.cumsum(change, axis=1)[:, :-1]


MAX_PLACES = 6
NUM_PARTS = 2
"""Parts of a file's path that are kept; the others say more about the machine than about the
program.
"""
_TORCH = re.compile(r"(?:^|[/\\](?:site|dist)-packages[/\\])torch[/\\]")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]")


def places_of(stack: Stack) -> tuple[Place, ...]:
    """The innermost calls in Python code outside of PyTorch; those in other packages only if
    there are no others.
    """
    of_python = [
        frame
        for frame in stack
        if frame.filename.endswith(".py") and not _TORCH.search(frame.filename)
    ]
    own = [frame for frame in of_python if not _INSTALLED.search(frame.filename)] or of_python
    return tuple(
        Place(
            file="/".join(re.split(r"[/\\]", frame.filename)[-NUM_PARTS:]),
            line=frame.line,
            function=frame.name,
        )
        for frame in own[:MAX_PLACES]
    )


@dataclass(frozen=True, kw_only=True)
class Known:
    """All that is known of the allocations of one snapshot."""

    replay: Replay
    stacks: Sequence[Stack]
    category: Ints
    """For each allocation, an index into CATEGORIES."""
    sighting: Ints
    """Index of the sighting that decided the category, or NOT_SIGHTED."""
    sightings: Sequence[Sighting]
    phases: Phases


class Groups:
    """The allocations of a snapshot in groups of like ones."""

    def __init__(self, known: Known) -> None:
        self._known = known
        rows, sighting = known.replay.allocations, known.sighting
        used, self._stack_of_row = np.unique(rows.stack, return_inverse=True)
        self._places = [places_of(known.stacks[number]) for number in used.tolist()]
        self._names = [short_name(sighting) for sighting in known.sightings]
        self._phase_names = ("", *known.phases.names)
        self._phase_of_row = np.where(rows.start == BEFORE, 0, known.phases.at(rows.start) + 1)
        columns = np.stack(
            [
                rows.requested_bytes,
                known.category,
                _numbered([like_name(name) for name in self._names], sighting),
                _numbered(self._phase_names, self._phase_of_row),
                _numbered([places[:1] for places in self._places], self._stack_of_row),
            ]
        )
        order = np.lexsort(columns[::-1])
        is_new = np.append(True, (np.diff(columns[:, order]) != 0).any(axis=0))[: len(rows)]
        self._first = order[is_new]
        """The first allocation of each group."""
        self._group = np.empty(len(rows), dtype=np.int64)
        self._group[order] = np.cumsum(is_new) - 1
        self._members = np.split(order, np.flatnonzero(is_new)[1:])

    def largest(self, chosen: Mask, live: Mask, limit: int) -> tuple[LikeAllocations, ...]:
        """At most `limit` groups of the chosen allocations, the largest first; `live` are those
        at the peak.
        """
        counts = np.bincount(self._group[chosen], minlength=len(self._first))
        order = np.lexsort((-counts, -self._known.replay.allocations.requested_bytes[self._first]))
        return tuple(self._row(group, live) for group in order[counts[order] > 0][:limit].tolist())

    def at_peak(self, live: Mask) -> tuple[LikeAllocations, ...]:
        """The groups that have live allocations, those first that take most memory."""
        num_bytes = np.zeros(len(self._first), dtype=np.int64)
        np.add.at(num_bytes, self._group[live], self._known.replay.allocations.num_bytes[live])
        order = np.argsort(-num_bytes, kind="stable")
        return tuple(self._row(group, live) for group in order[num_bytes[order] > 0].tolist())

    def _row(self, group: int, live: Mask) -> LikeAllocations:
        known, first, members = self._known, int(self._first[group]), self._members[group]
        rows, at_peak = known.replay.allocations, members[live[members]]
        indices = [index for index in known.sighting[members].tolist() if index != NOT_SIGHTED]
        shapes, dtypes = (
            {getattr(known.sightings[i], name) for i in indices} for name in ("shape", "dtype")
        )
        names = {self._names[index] for index in indices}
        name = like_name(names.pop()) if len(names) > 1 else "".join(names)
        return LikeAllocations(
            num_bytes=int(rows.num_bytes[members].max()),
            requested_bytes=int(rows.requested_bytes[first]),
            count=len(members),
            count_at_peak=len(at_peak),
            bytes_at_peak=int(rows.num_bytes[at_peak].sum()),
            category=CATEGORIES[known.category[first]],
            name=name,
            shape=shapes.pop() if len(shapes) == 1 else (),
            dtype=dtypes.pop() if len(dtypes) == 1 else "",
            phase=self._phase_names[self._phase_of_row[first]],
            places=_common(
                [self._places[stack] for stack in np.unique(self._stack_of_row[members]).tolist()]
            ),
        )


def _common(places: Sequence[tuple[Place, ...]]) -> tuple[Place, ...]:
    """The places that several stacks share, from the innermost place on."""
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*places, strict=False))
    return tuple(column[0] for column in shared)


def _numbered(values: Sequence[str | tuple[Place, ...]], index: Ints) -> Ints:
    """For each index a number, equal if the values are equal; -1 for the index -1."""
    number_of: dict[str | tuple[Place, ...], int] = {}
    numbers = [number_of.setdefault(value, len(number_of)) for value in values]
    return np.array([*numbers, -1], dtype=np.int64)[index]


def block_memory(known: Known, row_of: Ints, moments: Ints) -> tuple[BlockMemory, ...]:
    """The blocks in the first step in which any of them saved a tensor; empty if none ever did.

    `row_of` and `moments` give the allocation and the moment of each sighting. A storage counts
    once, for the block that saved it first. Saved parameters and buffers, such as the mask, take no
    memory of their own and are left out. The input that a checkpoint keeps counts for its first
    block; what backward computes again, for its own block.
    """

    def of_kind(kind: Kind) -> list[int]:
        return [
            i
            for i in np.flatnonzero(row_of != NOT_SIGHTED).tolist()
            if known.sightings[i].kind is kind
        ]

    saved = [
        i
        for i in of_kind(Kind.SAVED)
        if known.category[row_of[i]] == CODES[Category.SAVED]
        and block_of_ranges(known.sightings[i].name) is not None
    ]
    if not saved:
        return ()
    steps = np.array(known.phases.steps, dtype=np.int64)[known.phases.at(moments)]
    is_of_step = steps == steps[saved[0]]
    saved_by = _by_block(known, row_of, (i for i in saved if is_of_step[i]), block_of_ranges)
    parameters = _by_block(known, row_of, of_kind(Kind.PARAMETER), block_of_parameter)
    gradients = _by_block(
        known, row_of, (i for i in of_kind(Kind.GRADIENT) if is_of_step[i]), block_of_parameter
    )
    num_bytes = known.replay.allocations.requested_bytes
    return tuple(
        BlockMemory(
            name=block_range(block),
            saved_bytes=int(num_bytes[row_of[indices]].sum()),
            saved=_saved_tensors(known, row_of, indices),
            parameter_bytes=int(num_bytes[row_of[parameters.get(block, [])]].sum()),
            gradient_bytes=int(num_bytes[row_of[gradients.get(block, [])]].sum()),
        )
        for block, indices in sorted(saved_by.items())
    )


def _by_block(
    known: Known, row_of: Ints, indices: Iterable[int], block_of: Callable[[str], int | None]
) -> dict[int, list[int]]:
    """The sightings of each block; of several sightings of a storage the first."""
    first_of_row: dict[int, int] = {}
    for index in indices:
        first_of_row.setdefault(int(row_of[index]), index)
    by_block: dict[int, list[int]] = {}
    for index in first_of_row.values():
        if (block := block_of(known.sightings[index].name)) is not None:
            by_block.setdefault(block, []).append(index)
    return by_block


def _saved_tensors(known: Known, row_of: Ints, indices: Sequence[int]) -> tuple[SavedTensor, ...]:
    """The largest first."""
    tensors, rows, phases = [], known.replay.allocations, known.phases
    for index in indices:
        sighting, row = known.sightings[index], row_of[index]
        tensors.append(
            SavedTensor(
                name=within_block(short_name(sighting)),
                shape=sighting.shape,
                dtype=sighting.dtype,
                num_bytes=int(rows.requested_bytes[row]),
                is_recomputed=phases.names[int(phases.at(rows.start[row]))] == Phase.BACKWARD,
            )
        )
    return tuple(sorted(tensors, key=lambda tensor: -tensor.num_bytes))
