"""A simulation of PyTorch's CUDA caching allocator: allocated and reserved bytes for a sequence of requests."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

MIB = 2**20
ROUND_BYTES = 512
"""Sizes of blocks are multiples of this (kMinBlockSize)."""
SMALL_BYTES = MIB
"""Requests up to this size come from segments of 2 MiB; a larger block is only split if more than this remains."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segments for requests below MIN_OWN_SEGMENT_BYTES (kLargeBuffer)."""
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""Requests from this size on get a segment of their own size, in steps of 2 MiB (kMinLargeAlloc, kRoundLarge)."""


class OutOfMemoryError(Exception):
    """The simulated device has no room for the segment that a request needs."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, in use or free, linked to its neighbours in the segment."""

    address: int
    size_bytes: int
    pool: "Pool" = field(repr=False)
    """Where it is kept while it is free."""
    before: "Block | None" = field(default=None, repr=False)
    after: "Block | None" = field(default=None, repr=False)
    used: bool = False


Pool: TypeAlias = list[tuple[int, int, Block]]
"""Free blocks by size and address, so that the first one that is large enough is the best fit."""


class CachingAllocator:
    """The pools of each stream with default settings: best fit, blocks split and merged, free segments kept.

    Follows c10/cuda/CUDACachingAllocator.cpp (torch 2.11) without expandable segments. Addresses grow with time here,
    so of two free blocks of one size the one in the older segment is taken; the driver may order them differently.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        """Bytes that the driver can provide; None means no limit."""
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._free: defaultdict[tuple[bool, str], Pool] = defaultdict(list)
        self._next_address = 0

    def allocate(self, size_bytes: int, stream: str = "") -> Block:
        """Allocate a block of at least `size_bytes`; raise OutOfMemoryError if no segment for it fits the device.

        The block is larger if the remainder is too small to be split off.
        """
        size_bytes = -(-size_bytes // ROUND_BYTES) * ROUND_BYTES
        small = size_bytes <= SMALL_BYTES
        pool = self._free[small, stream]
        index = bisect_left(pool, (size_bytes,))
        block = pool.pop(index)[2] if index < len(pool) else self._new_segment(size_bytes, pool)
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes >= ROUND_BYTES if small else rest_bytes > SMALL_BYTES:
            self._split(block, size_bytes)
        block.used = True
        self.allocated_bytes += block.size_bytes
        return block

    def free(self, block: Block) -> None:
        """Return the block to its pool, merged with free neighbours."""
        block.used = False
        self.allocated_bytes -= block.size_bytes
        if (before := block.before) is not None and not before.used:
            _remove(before)
            block.address, block.size_bytes = before.address, block.size_bytes + before.size_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if (after := block.after) is not None and not after.used:
            _remove(after)
            block.size_bytes += after.size_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        insort(block.pool, (block.size_bytes, block.address, block))

    def _new_segment(self, size_bytes: int, pool: Pool) -> Block:
        segment_bytes = segment_size(size_bytes)
        if self._lacks(segment_bytes):
            self._release_free_segments()
            if self._lacks(segment_bytes):
                raise OutOfMemoryError(
                    f"{segment_bytes} bytes asked of a device of {self.capacity_bytes}, of which {self.reserved_bytes} "
                    f"are reserved and {self.allocated_bytes} allocated"
                )
        self.reserved_bytes += segment_bytes
        block = Block(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        return block

    def _lacks(self, segment_bytes: int) -> bool:
        return self.capacity_bytes is not None and self.reserved_bytes + segment_bytes > self.capacity_bytes

    def _release_free_segments(self) -> None:
        """Return all wholly free segments to the driver, as PyTorch does before it raises an out-of-memory error."""
        for free in self._free.values():
            whole = [block for *_, block in free if block.before is None and block.after is None]
            self.reserved_bytes -= sum(block.size_bytes for block in whole)
            for block in whole:
                _remove(block)

    def _split(self, block: Block, size_bytes: int) -> None:
        address, rest_bytes = block.address + size_bytes, block.size_bytes - size_bytes
        rest = Block(address, rest_bytes, block.pool, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size_bytes = rest, size_bytes
        insort(block.pool, (rest_bytes, address, rest))


def _remove(block: Block) -> None:
    """Take a free block out of its pool."""
    del block.pool[bisect_left(block.pool, (block.size_bytes, block.address))]


def round_up(size_bytes: int, step_bytes: int) -> int:
    """The smallest multiple of `step_bytes` that is at least `size_bytes`."""
    return -(-size_bytes // step_bytes) * step_bytes


def segment_size(size_bytes: int) -> int:
    """Bytes that the allocator requests from the driver if it has no free block for a request of this size."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size_bytes, 2 * MIB)
