"""Oracle: a brute force that knows nothing but which bytes of which segment are in use."""

import random
from typing import NamedTuple

import pytest

from cs336.costs.allocator import MIB, ROUND_BYTES, CachingAllocator, OutOfMemoryError, segment_size

REQUESTS_BYTES = (
    1,
    512,
    513,
    9 * 1024,
    300_000,
    MIB,
    MIB + 1,
    3 * MIB + 7,
    9 * MIB,
    10 * MIB,
    33 * MIB + 5,
    81_920_000,
)


PAGE_STEP = 2 * MIB + ROUND_BYTES
"""From one page of the driver to the next, so that no segments are neighbours."""


class Block(NamedTuple):
    address: int
    size_bytes: int
    handle: int
    asked_bytes: int


def allocate(allocator: CachingAllocator, size: int) -> Block:
    handle = len(allocator.addresses)
    allocator.replay([handle], [0] * (handle + 1), [(size, "")])
    return Block(
        ROUND_BYTES * allocator.addresses[handle], allocator.sizes_bytes[handle], handle, size
    )


def free(allocator: CachingAllocator, block: Block) -> None:
    allocator.replay([~block.handle], [0] * (block.handle + 1), [(block.asked_bytes, "")])


class Intervals:
    """Segments as lists of intervals in use; free gaps are found anew for every request."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, int, bool]] = []
        self.used: dict[int, int] = {}
        self.areas: list[list[bool]] = []
        """Whether each page of 2 MiB of an area is taken, of the lowest area first."""

    def allocate(self, size: int) -> tuple[int, int]:
        size = (size + 511) // 512 * 512
        small = size <= MIB
        gaps = [
            gap
            for start, length, kind in self.segments
            if kind == small
            for gap in self._gaps(start, length)
        ]
        fitting = sorted((length, start) for start, length in gaps if length >= size)
        if not fitting:
            start = PAGE_STEP * self._pages(segment_size(size) // (2 * MIB))
            self.segments.append((start, segment_size(size), small))
            fitting = [(segment_size(size), start)]
        length, start = fitting[0]
        rest = length - size
        keeps_rest = rest == 0 if small else rest <= MIB
        self.used[start] = length if keeps_rest else size
        return start, self.used[start]

    def _pages(self, wanted: int) -> int:
        """The number of the first of so many free pages, the lowest there are; pages that are
        reserved first have the highest numbers.
        """
        lowest = -sum(map(len, self.areas))
        first = lowest
        for area in self.areas:
            for place in range(len(area) - wanted + 1):
                if not any(area[place : place + wanted]):
                    area[place : place + wanted] = wanted * [True]
                    return first + place
            first += len(area)
        pages = -(-wanted // 16) * 16
        self.areas.insert(0, wanted * [True] + (pages - wanted) * [False])
        return lowest - pages

    def _gaps(self, start: int, length: int) -> list[tuple[int, int]]:
        gaps, position = [], start
        for begin in sorted(begin for begin in self.used if start <= begin < start + length):
            gaps.append((position, begin - position))
            position = begin + self.used[begin]
        return [gap for gap in (*gaps, (position, start + length - position)) if gap[1]]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_those_of_a_brute_force(seed) -> None:
    chance = random.Random(seed)
    allocator, intervals, blocks = CachingAllocator(), Intervals(), []
    offsets = set()
    for _ in range(400):
        if blocks and chance.random() < 0.48:
            block, start = blocks.pop(chance.randrange(len(blocks)))
            free(allocator, block)
            del intervals.used[start]
        else:
            size = chance.choice(REQUESTS_BYTES)
            block, (start, length) = allocate(allocator, size), intervals.allocate(size)
            offsets.add(block.address - start)
            assert block.size_bytes == length
            assert len(offsets) == 1
            blocks.append((block, start))
        assert allocator.reserved_bytes == sum(length for _, length, _ in intervals.segments)


@pytest.mark.parametrize(
    ("size_bytes", "segment_bytes"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments_have_pytorchs_sizes(size_bytes, segment_bytes) -> None:
    allocator = CachingAllocator()
    allocate(allocator, size_bytes)
    assert allocator.reserved_bytes == segment_bytes == segment_size(size_bytes)


def test_a_full_device_gives_cached_segments_back_before_it_gives_up() -> None:
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    free(allocator, allocate(allocator, 40 * MIB))
    held = allocate(allocator, 44 * MIB)
    assert allocator.reserved_bytes == 44 * MIB
    with pytest.raises(OutOfMemoryError):
        allocate(allocator, 22 * MIB)
    free(allocator, held)
    assert allocate(allocator, 64 * MIB).size_bytes == 64 * MIB


def test_a_segment_in_use_in_part_is_not_given_back() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    first, second = allocate(allocator, 2 * MIB), allocate(allocator, 8 * MIB)
    free(allocator, second)
    with pytest.raises(OutOfMemoryError):
        allocate(allocator, 30 * MIB)
    free(allocator, first)
    allocate(allocator, 30 * MIB)
    assert allocator.reserved_bytes == 30 * MIB


@pytest.mark.parametrize("seed", range(10))
def test_pools_share_no_segment_and_each_block_goes_back_to_its_own(seed: int) -> None:
    """Segments are apart, so that blocks are of one segment if nothing lies between them but other
    blocks. What is free of a pool is given to no other.
    """
    chance = random.Random(seed)
    allocator = CachingAllocator()
    live: dict[int, str] = {}
    for _ in range(600):
        if live and chance.random() < 0.45:
            handle = chance.choice([*live])
            del live[handle]
            # whatever pool the events are replayed for
            allocator.replay([~handle], [0] * (handle + 1), [(1, chance.choice(["", "graphs"]))])
        else:
            pool, size = chance.choice(["", "graphs"]), chance.choice(REQUESTS_BYTES)
            handle = len(allocator.addresses)
            allocator.replay([handle], [0] * (handle + 1), [(size, "")], pool)
            live[handle] = pool
        pools: dict[int, set[str]] = {}
        for handle, pool in live.items():
            address = allocator.addresses[handle]
            segment = max(start for start in allocator._segments if start <= address)
            pools.setdefault(segment, set()).add(pool)
        assert all(len(of_segment) == 1 for of_segment in pools.values())
    for handle in live:
        allocator.replay([~handle], [0] * (handle + 1), [(1, "")])
    allocator.release_free_segments()
    assert allocator.reserved_bytes == 0, "each block went back to where its neighbours are"
