"""PyTorch's CUDA caching allocator, simulated: what it hands out and holds for a sequence of requests, to the byte."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
ROUND_BYTES = 512
"""Every block is a multiple of this (kMinBlockSize)."""
SMALL_BYTES = MIB
"""Requests up to this come from segments of 2 MiB; larger blocks are not split to leave this or less (kSmallSize)."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segments for requests below MIN_OWN_SEGMENT_BYTES (kLargeBuffer)."""
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size, in steps of 2 MiB (kMinLargeAlloc, kRoundLarge)."""


class OutOfMemoryError(Exception):
    """The simulated device has no room for the segment that a request needs."""


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """A part of a segment, in use or free; neighbours of the same segment are linked."""

    address: int
    size_bytes: int
    small: bool
    used: bool = False
    before: "Block | None" = field(default=None, repr=False)
    after: "Block | None" = field(default=None, repr=False)

    @property
    def order(self) -> tuple[int, int]:
        """The free block that is first in this order, and large enough, is taken: the best fit."""
        return self.size_bytes, self.address


class CachingAllocator:
    """One stream's pools with the default settings: best fit, blocks split and merged, segments kept when free.

    Follows c10/cuda/CUDACachingAllocator.cpp (torch 2.11) without expandable segments. Addresses grow with time,
    so where two free blocks have one size the older segment's is taken; the driver may order them otherwise.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        """What the driver has to give; None is no limit."""
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._free: dict[bool, list[tuple[tuple[int, int], Block]]] = {True: [], False: []}
        self._next_address = 0

    def allocate(self, size_bytes: int) -> Block:
        """A block of at least `size_bytes` (more where the rest is too small to split off); raise OutOfMemoryError."""
        size_bytes = round_up(size_bytes, ROUND_BYTES)
        small = size_bytes <= SMALL_BYTES
        free = self._free[small]
        index = bisect_left(free, ((size_bytes, -1),))
        block = free.pop(index)[1] if index < len(free) else self._new_segment(size_bytes, small)
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes >= ROUND_BYTES if small else rest_bytes > SMALL_BYTES:
            self._split(block, size_bytes)
        block.used = True
        self.allocated_bytes += block.size_bytes
        return block

    def free(self, block: Block) -> None:
        """Give the block back to its pool, merged with free neighbours."""
        block.used = False
        self.allocated_bytes -= block.size_bytes
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
        self._insert(block)

    def _new_segment(self, size_bytes: int, small: bool) -> Block:
        segment_bytes = segment_size(size_bytes)
        if self._lacks(segment_bytes):
            self._release_free_segments()
            if self._lacks(segment_bytes):
                raise OutOfMemoryError(
                    f"{segment_bytes} bytes asked of a device of {self.capacity_bytes}, of which {self.reserved_bytes} "
                    f"are reserved and {self.allocated_bytes} allocated"
                )
        self.reserved_bytes += segment_bytes
        block = Block(address=self._next_address, size_bytes=segment_bytes, small=small)
        self._next_address += segment_bytes
        return block

    def _lacks(self, segment_bytes: int) -> bool:
        return self.capacity_bytes is not None and self.reserved_bytes + segment_bytes > self.capacity_bytes

    def _release_free_segments(self) -> None:
        """Give back to the driver every segment that nobody uses a part of, as PyTorch does before it gives up."""
        for free in self._free.values():
            whole = [block for _, block in free if block.before is None and block.after is None]
            self.reserved_bytes -= sum(block.size_bytes for block in whole)
            for block in whole:
                self._remove(block)

    def _split(self, block: Block, size_bytes: int) -> None:
        rest = Block(
            address=block.address + size_bytes,
            size_bytes=block.size_bytes - size_bytes,
            small=block.small,
            before=block,
            after=block.after,
        )
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size_bytes = rest, size_bytes
        self._insert(rest)

    def _insert(self, block: Block) -> None:
        insort(self._free[block.small], (block.order, block))

    def _remove(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.order,))]


def round_up(size_bytes: int, step_bytes: int) -> int:
    """The least multiple of `step_bytes` that is no less than `size_bytes`."""
    return -(-size_bytes // step_bytes) * step_bytes


def segment_size(size_bytes: int) -> int:
    """Bytes that the allocator asks of the driver when it has no free block for a request."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size_bytes, 2 * MIB)
