"""A simulation of PyTorch's CUDA caching allocator: allocated and reserved bytes for a sequence of requests."""

from bisect import bisect_left, insort
from dataclasses import dataclass

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
    before: "Block | None" = None
    after: "Block | None" = None
    used: bool = False


class CachingAllocator:
    """The pools of each stream with default settings: best fit, blocks split and merged, free segments kept.

    Follows c10/cuda/CUDACachingAllocator.cpp (torch 2.11) without expandable segments. Addresses grow with time here,
    so of two free blocks of one size the one in the older segment is taken; the driver may order them differently.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        """Bytes that the driver can provide; None means no limit."""
        self.reserved_bytes = 0
        self._pools: dict[tuple[bool, str], Pool] = {}
        self._next_address = 0

    def pool(self, size_bytes: int, stream: str = "") -> "Pool":
        """The pool that serves requests of this size on this stream."""
        small = size_bytes <= SMALL_BYTES
        return self._pools.setdefault((small, stream), Pool(self, ROUND_BYTES if small else SMALL_BYTES + 1))

    def new_segment(self, size_bytes: int) -> Block:
        """A segment for a request of this size; raise OutOfMemoryError if it does not fit the device."""
        segment_bytes = segment_size(size_bytes)
        if self._lacks(segment_bytes):
            for pool in self._pools.values():
                self.reserved_bytes -= pool.release_free_segments()
            if self._lacks(segment_bytes):
                raise OutOfMemoryError(
                    f"{segment_bytes} bytes asked of a device of {self.capacity_bytes}, of which {self.reserved_bytes} "
                    "are reserved"
                )
        self.reserved_bytes += segment_bytes
        block = Block(self._next_address, segment_bytes)
        self._next_address += segment_bytes
        return block

    def _lacks(self, segment_bytes: int) -> bool:
        return self.capacity_bytes is not None and self.reserved_bytes + segment_bytes > self.capacity_bytes


class Pool:
    """Segments for small or for large requests on one stream."""

    def __init__(self, allocator: CachingAllocator, least_rest_bytes: int) -> None:
        self._allocator = allocator
        self._least_rest_bytes = least_rest_bytes
        """A smaller remainder is not split off."""
        self._free: list[tuple[int, int, Block]] = []
        """Free blocks by size and address, so that the first one that is large enough is the best fit."""

    def allocate(self, size_bytes: int) -> Block:
        """Allocate a block of at least `size_bytes`, a multiple of ROUND_BYTES.

        It is larger if the remainder is too small to be split off.
        """
        free = self._free
        index = bisect_left(free, (size_bytes,))
        block = free.pop(index)[2] if index < len(free) else self._allocator.new_segment(size_bytes)
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes >= self._least_rest_bytes:
            rest = Block(block.address + size_bytes, rest_bytes, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size_bytes = rest, size_bytes
            insort(free, (rest_bytes, rest.address, rest))
        block.used = True
        return block

    def free(self, block: Block) -> None:
        """Take back a block of this pool, and merge it with free neighbours."""
        block.used = False
        if (before := block.before) is not None and not before.used:
            self._remove(before)
            block.address, block.size_bytes = before.address, block.size_bytes + before.size_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if (after := block.after) is not None and not after.used:
            self._remove(after)
            block.size_bytes += after.size_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        insort(self._free, (block.size_bytes, block.address, block))

    def release_free_segments(self) -> int:
        """Return all wholly free segments to the driver, as PyTorch does before it raises an out-of-memory error.

        Returns their bytes.
        """
        whole = [block for *_, block in self._free if block.before is None and block.after is None]
        for block in whole:
            self._remove(block)
        return sum(block.size_bytes for block in whole)

    def _remove(self, block: Block) -> None:
        """Take a free block out of the list."""
        del self._free[bisect_left(self._free, (block.size_bytes, block.address))]


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
