"""Replays the events of one device: which allocations there were, how large they are, and what the
allocator had reserved at each moment.

The allocator rounds requests up to 512 bytes and takes the beginning of a free block. The remainder
stays free, unless it is at most 1 MiB of a block for large requests: then the request gets the
whole block, up to the next block in use or the segment's end.

A recording begins while the program runs and may have lost its oldest events. So it is read from
its end: memory that is allocated when the snapshot is taken, but was not allocated by an event,
existed before the recording.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...costs.allocator import ROUND_BYTES, SMALL_BYTES
from ...text import counted
from ..columns import Ints, Mask, joined
from .lifetimes import BEFORE, NONE, LifetimeReader, Lifetimes, always, nearest
from .profile import PoolMemory
from .snapshot import NOT_RECORDED, Action, BlockState, DeviceMemory

LAST_ADDRESS = np.iinfo(np.int64).max
"""An address above all others."""
MIN_DOUBTFUL = 0.01
"""Smallest share of the events whose contradictions put all sums in doubt."""


def rounded_requests(requested_bytes: Ints) -> Ints:
    """Requests rounded up as the allocator does by default."""
    return np.maximum(-(-requested_bytes // ROUND_BYTES), 1) * ROUND_BYTES


def may_be_larger(requested_bytes: Ints, settings: Mapping[str, Any]) -> Mask:
    """Whether the blocks may be larger than the rounded requests."""
    is_large: Mask = rounded_requests(requested_bytes) > SMALL_BYTES
    return is_large & (settings.get("expandable_segments") is not True)


def block_sizes(blocks: Lifetimes, segments: Lifetimes, settings: Mapping[str, Any]) -> Ints:
    """The bytes of each block, from the request in `blocks` and from what followed it in memory
    when it was allocated.

    What followed a block that was allocated before the recording is not known; the first moment is
    used instead.
    """
    sizes = rounded_requests(blocks.num_bytes)
    rows = np.flatnonzero(may_be_larger(blocks.num_bytes, settings))
    end = blocks.address[rows] + sizes[rows]
    moment = np.maximum(blocks.start[rows], 0)
    largest = settings.get("max_split_size", -1)
    is_whole = sizes[rows] >= (largest if largest >= 0 else LAST_ADDRESS)
    limit = np.where(is_whole, LAST_ADDRESS - 1, end + SMALL_BYTES)
    behind = np.full(len(rows), LAST_ADDRESS)
    segment_end = segments.address + segments.num_bytes
    for memory, boundary in ((blocks, blocks.address), (segments, segment_end)):
        row = nearest(boundary, memory.start, memory.end, end, limit, moment)
        behind = np.minimum(behind, np.append(boundary, LAST_ADDRESS)[row])  # NONE is the last
    sizes[rows] += np.where(behind < LAST_ADDRESS, behind - end, 0)
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
    segment: Ints
    """For each allocation the row of its segment; NONE if that was gone at the end, so that its
    pool is not known.
    """
    segment_of_event: Ints
    """The row of the segment that an event allocated, mapped or unmapped; NONE for a segment that
    was gone at the end, and for other events.
    """
    segment_changes: Ints
    """By how many bytes of what this segment had at the end; 0 for NONE."""
    are_sizes_known: bool
    """False if the size of some block was inferred and may be wrong."""
    notes: tuple[str, ...]
    """Sentences about sizes that are not known, and about events and segments that do not fit
    together.
    """
    lacks_segments: bool = False
    """Blocks lie outside of the file's segments, so `reserved_bytes` is a lower bound."""
    doubts: tuple[str, ...] = ()
    """The notes that put all sums in doubt."""

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

    @property
    def is_private(self) -> Mask:
        """For each allocation, whether it lies in a private pool."""
        return np.append(self.memory.segments.pool, 0)[self.segment] > 0

    @cached_property
    def private_bytes(self) -> Ints:
        """The part of `reserved_bytes` that private pools had, at each moment."""
        segments = self.memory.segments
        is_private = np.append(segments.pool > 0, False)
        change = self.segment_changes * is_private[self.segment_of_event]
        return _backwards(int(segments.num_bytes[segments.pool > 0].sum()), change)

    def pools_at(self, moment: int) -> tuple[PoolMemory, ...]:
        """What was reserved and in use at the moment, by pool and kind of segment."""
        segments, rows = self.memory.segments, self.allocations
        reserved = np.append(segments.num_bytes, 0)
        later = self.segment_of_event[moment:]
        np.subtract.at(reserved, later, self.segment_changes[moment:])
        # the last is for all segments that are not known
        reserved[NONE] = self.reserved_bytes[moment] - reserved[:NONE].sum()
        used = np.zeros_like(reserved)
        is_there = (rows.start < moment) & (moment <= rows.end)
        np.add.at(used, self.segment[is_there], rows.num_bytes[is_there])
        columns = segments.pool, segments.is_small, segments.is_expandable
        kinds = [*zip(*(column.tolist() for column in columns), strict=True), (None, None, None)]
        sums: dict[tuple[int | None, bool | None, bool | None], Ints] = {}
        for kind, amounts in zip(kinds, np.stack((reserved, used), axis=1), strict=True):
            sums[kind] = sums.get(kind, np.zeros(2, dtype=np.int64)) + amounts
        return tuple(
            PoolMemory(pool, is_small, is_expandable, *amounts.tolist())
            for (pool, is_small, is_expandable), amounts in sums.items()
            if amounts.any()
        )

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
        was_there, is_kept = start == BEFORE, end != BEFORE
        is_freed = is_kept & (end < num_events)
        change[0] = values[was_there & is_kept].sum()
        change[start[~was_there] + 1] = values[~was_there]
        # indices are unique: an event ends at most one allocation
        change[end[is_freed] + 1] -= values[is_freed]
        return np.cumsum(change)

    @property
    def is_held_throughout(self) -> Mask:
        """For each allocation, whether it existed before the first event and after the last."""
        rows = self.allocations
        is_held: Mask = (rows.start == BEFORE) & (rows.end == len(self.memory.events))
        return is_held

    @property
    def num_held_with_stack(self) -> int:
        """Number of blocks held throughout that have a stack: the event that allocated them was
        recorded, but lost.
        """
        has_stack = self.allocations.stack > NOT_RECORDED
        return int(np.count_nonzero(self.is_held_throughout & has_stack))

    @property
    def failed_requests(self) -> list[int]:
        """Events at which the allocator was out of memory."""
        return np.flatnonzero(self.memory.events.action == Action.OOM).tolist()


def replay_device(memory: DeviceMemory, settings: Mapping[str, Any]) -> Replay:
    """Combine the events and the segments of a device; `settings` are those of the snapshot."""
    reader = LifetimeReader(
        memory.events, Action.ALLOC, Action.FREE_COMPLETED, Action.FREE_REQUESTED
    )
    recorded = reader.lifetimes()
    held, notes_on_held = _held_throughout(memory, recorded)
    lifetimes = joined(recorded, held)
    notes_on_sizes = _notes_on_sizes(lifetimes, len(memory.events), settings)
    columns = lifetimes.by_name()
    segments = _segments(memory)
    columns["num_bytes"] = _num_bytes(memory, lifetimes, segments, settings)
    allocations = Allocations(**columns, requested_bytes=lifetimes.num_bytes)
    segment_of_event, segment_changes = _segment_of_event(memory)
    replay = Replay(
        memory=memory,
        allocations=allocations,
        reserved_bytes=_backwards(int(memory.segments.num_bytes.sum()), _changes(memory)),
        segment=_segment_of(memory, segments, allocations),
        segment_of_event=segment_of_event,
        segment_changes=segment_changes,
        are_sizes_known=not notes_on_sizes,
        notes=(*notes_on_held, *notes_on_sizes),
    )
    notes = list(replay.notes)
    if reader.num_contradictions:
        times = counted(reader.num_contradictions, "time")
        text = f"Events contradict each other {times}: some are lost or damaged."
        notes.insert(0, text)
        if reader.num_contradictions >= MIN_DOUBTFUL * len(memory.events):
            replay = replace(replay, doubts=(text,))
    in_blocks = replay.curve(allocations.num_bytes, allocations.end)
    lacking = _lacking_segments(replay, in_blocks)
    return replace(
        replay,
        reserved_bytes=np.maximum(replay.reserved_bytes, in_blocks),
        notes=(*notes, *lacking),
        lacks_segments=bool(lacking),
    )


def _lacking_segments(replay: Replay, in_blocks: Ints) -> list[str]:
    """What shows that segments are missing in the file; `in_blocks` are bytes at each moment."""
    missing = int((in_blocks - replay.reserved_bytes).max())
    if missing > 0:
        return [
            f"Segments are missing in the file: blocks take up to {missing:,} bytes more than "
            "were reserved."
        ]
    is_at_end = replay.allocations.end == len(replay.memory.events)
    num_outside = int((is_at_end & (replay.segment == NONE)).sum())
    if num_outside:
        blocks = counted(num_outside, "block")
        return [f"Segments are missing in the file: {blocks} in use at the end lie in none."]
    return []


def _segment_at(memory: DeviceMemory, address: Ints) -> Ints:
    """The row of the segment that had each address at the end, or NONE."""
    segments = memory.segments
    order = np.argsort(segments.address, kind="stable")
    below = np.searchsorted(segments.address[order], address, side="right") - 1
    row = np.append(order, NONE)[below]
    end = np.append(segments.address + segments.num_bytes, 0)
    return np.where(address < end[row], row, NONE)


def _segment_of(memory: DeviceMemory, segments: Lifetimes, allocations: Lifetimes) -> Ints:
    """The row of the segment of each allocation, or NONE.

    A segment is known if it was still there at the end. What was freed before it came lay in
    another one at its address.
    """
    row = _segment_at(memory, allocations.address)
    is_left = segments.end == len(memory.events)
    order = np.argsort(segments.address[is_left], kind="stable")
    starts = np.full(len(memory.segments) + 1, BEFORE)
    left, start = segments.address[is_left][order], segments.start[is_left][order]
    if len(left):
        place = np.minimum(np.searchsorted(left, memory.segments.address), len(left) - 1)
        starts[:NONE] = np.where(left[place] == memory.segments.address, start[place], BEFORE)
    return np.where(allocations.end > starts[row], row, NONE)


def _segment_of_event(memory: DeviceMemory) -> tuple[Ints, Ints]:
    """The row of the segment whose memory each event changed, or NONE, and by how many of the bytes
    that the segment had at the end.

    Addresses of an expandable segment stay its own. Those of another are used again by later ones,
    so only the event that allocated the last is known to be of it.
    """
    events = memory.events
    reader = LifetimeReader(events, Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)
    recorded = reader.lifetimes()
    is_known = np.isin(events.action, [Action.SEGMENT_MAP, Action.SEGMENT_UNMAP])
    is_known[recorded.start[(recorded.end == len(events)) & (recorded.start != BEFORE)]] = True
    rows = np.full(len(events), NONE)
    first, num_bytes = events.address[is_known], events.num_bytes[is_known]
    row = _segment_at(memory, first)
    row = np.where(row == NONE, _segment_at(memory, first + num_bytes - 1), row)
    start = np.append(memory.segments.address, 0)[row]
    end = start + np.append(memory.segments.num_bytes, 0)[row]
    common = np.minimum(first + num_bytes, end) - np.maximum(first, start)
    rows[is_known] = row
    changes = np.zeros(len(events), dtype=np.int64)
    changes[is_known] = np.where(row == NONE, 0, common * np.sign(_changes(memory)[is_known]))
    return rows, changes


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
    is_used = np.append(address, -1)[place] == lifetimes.address
    is_known = is_used & (lifetimes.end == len(memory.events))
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
    # recorded memory that was freed between the end of the recording and the snapshot
    is_gone = is_left & ~np.isin(recorded.address, blocks.address[is_used])
    is_unrecorded = is_used & ~np.isin(blocks.address, recorded.address[is_left])
    # recorded memory was at these addresses once, so the block is from after the recording
    is_late = is_unrecorded & _overlap(blocks.address, blocks.num_bytes, recorded)
    gone, late = int(recorded.num_bytes[is_gone].sum()), int(blocks.requested_bytes[is_late].sum())
    if gone or late:
        notes.append(
            f"At the end {counted(gone, 'byte')} had gone that the recording has, and "
            f"{counted(late, 'byte')} had come that it does not have, which are left out: "
            "recording ended before the snapshot, or a part is lost."
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
    return (ends[num_below] > address) | (num_before_end > num_below)


def _changes(memory: DeviceMemory) -> Ints:
    """By how many bytes each event changed what the allocator had from CUDA."""
    sign = np.zeros(len(Action), dtype=np.int64)
    sign[[Action.SEGMENT_ALLOC, Action.SEGMENT_MAP]] = 1
    sign[[Action.SEGMENT_FREE, Action.SEGMENT_UNMAP]] = -1
    return sign[memory.events.action] * memory.events.num_bytes


def _backwards(at_end: int, changes: Ints) -> Ints:
    """The sum at each moment, from that at the end and from how each event changed it."""
    at_start = at_end - changes.sum()
    return np.append(at_start, at_start + np.cumsum(changes))


def _notes_on_sizes(lifetimes: Lifetimes, never: int, settings: Mapping[str, Any]) -> list[str]:
    """A sentence about blocks whose size is inferred and may be wrong, if there are any."""
    is_early = (lifetimes.start == BEFORE) & (lifetimes.end < never)
    num_large = int((is_early & may_be_larger(lifetimes.num_bytes, settings)).sum())
    divisions = settings.get("roundup_power2_divisions", {}).values()
    if any(value not in (0, 1) for value in divisions):
        blocks = "all blocks (roundup_power2_divisions)"
    elif num_large:
        blocks = f"{counted(num_large, 'large block')} from before"
    else:
        return []
    return [
        f"Freed in the recording, of a size that the file does not say: {blocks}. Requested bytes "
        "are exact."
    ]
