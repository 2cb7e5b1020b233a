"""A simulation of PyTorch's CUDA caching allocator: allocated and reserved bytes for a sequence
of requests.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from math import inf

MIB = 2**20
ROUND_BYTES = 512
"""Sizes of blocks are multiples of this (kMinBlockSize)."""
SMALL_BYTES = MIB
"""Requests up to this size come from segments of 2 MiB; a larger block is only split if more
than this remains.
"""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segments for requests below MIN_OWN_SEGMENT_BYTES (kLargeBuffer)."""
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""Requests from this size on get a segment of their own size, in steps of 2 MiB (kMinLargeAlloc,
kRoundLarge).
"""

ADDRESS_BITS = 48
ADDRESS_MASK = 2**ADDRESS_BITS - 1
"""Addresses are below this number of ROUND_BYTES, 128 PiB: segments of a step that fits no GPU
get addresses too.
"""
UNITS_OF_PAGE = SMALL_SEGMENT_BYTES // ROUND_BYTES + 1
AREA_PAGES = 16
"""Pages of 2 MiB of which the driver reserves a multiple at once."""


class OutOfMemoryError(Exception):
    """The simulated device has no room for the segment that a request needs."""


class Addresses:
    """The addresses that the driver gives to segments, in units of ROUND_BYTES.

    As seen on an H200: it reserves areas of 32 MiB or multiples, each below the ones before, and
    puts a segment into the lowest gap that is large enough. After each 2 MiB of the driver's there
    is a unit that nothing has here, so that no segments are neighbours.
    """

    def __init__(self) -> None:
        self._lowest = ADDRESS_MASK // UNITS_OF_PAGE
        """Where the areas begin, in pages of 2 MiB."""
        self._gaps: list[tuple[int, int]] = []
        """Where each gap begins, and the pages of it."""

    def take(self, size_bytes: int) -> int:
        """Where a segment of this size is put, which is a multiple of 2 MiB."""
        pages = size_bytes // SMALL_SEGMENT_BYTES
        for gap in self._gaps:
            begin, free = gap
            if free >= pages:
                self._gaps.remove(gap)
                break
        else:
            free = round_up(pages, AREA_PAGES)
            begin = self._lowest = self._lowest - free
        if free > pages:
            insort(self._gaps, (begin + pages, free - pages))
        return begin * UNITS_OF_PAGE

    def give_back(self, address: int, size_bytes: int) -> None:
        """Take back a segment, whose addresses are a gap now."""
        insort(self._gaps, (address // UNITS_OF_PAGE, size_bytes // SMALL_SEGMENT_BYTES))


class CachingAllocator:
    """Places tensors as PyTorch does with default settings: best fit, blocks split and merged, free
    segments kept.

    Follows c10/cuda/CUDACachingAllocator.cpp (torch 2.11) without expandable segments. Of two free
    blocks of one size, the one at the lower address is taken, so the driver's addresses matter
    (`Addresses`).
    """

    def __init__(self, capacity_bytes: float = inf) -> None:
        """Start with nothing reserved; the driver can provide `capacity_bytes`."""
        self.capacity_bytes = capacity_bytes
        """Bytes that the driver can provide."""
        self.reserved_bytes = 0
        self.addresses: list[int] = []
        """Of the block of each tensor by its handle, in units of ROUND_BYTES, as are all addresses
        and sizes below.

        Segments are apart, so that their blocks are no neighbours.
        """
        self._tails: list[int] = []
        """Where these blocks end."""
        self._free_beside: list[list[int]] = []
        """The free blocks of the pool that each of these blocks is of."""
        self._pools: dict[tuple[bool, str], list[int]] = {}
        """Free blocks as numbers, size before address, so that the first that is large enough is
        the best fit.
        """
        self._ends: dict[int, int] = {}
        """Where each free block ends, by its address."""
        self._starts: dict[int, int] = {}
        """Where each free block begins, by its end."""
        self._segments: dict[int, int] = {}
        """Where each segment ends, by its address."""
        self._driver = Addresses()

    def replay(
        self,
        events: Iterable[int],
        kinds: Sequence[int],
        requests: Sequence[tuple[int, str]],
        pool: str = "",
    ) -> None:
        """Allocate each tensor whose handle is among the events, and free it at the complement of
        the handle (~handle).

        A tensor's kind is the place of its bytes and its stream in `requests`. Tensors of different
        pools never share a segment. Raises OutOfMemoryError.
        """
        pools = [self._request(num_bytes, pool + stream) for num_bytes, stream in requests]
        addresses, tails, starts, ends = self.addresses, self._tails, self._starts, self._ends
        free_beside = self._free_beside
        for event in events:
            if event >= 0:
                free, wanted, key, least_rest = pools[kinds[event]]
                place = bisect_left(free, key)
                if place < len(free):
                    address = free.pop(place) & ADDRESS_MASK
                    end = ends.pop(address)
                else:
                    address, end = self._new_segment(wanted)
                begin = address + wanted
                rest = end - begin
                if rest >= least_rest:
                    starts[end], ends[begin] = begin, end
                    insort(free, rest << ADDRESS_BITS | begin)
                    end = begin
                else:
                    starts.pop(end, None)
                addresses.append(address)
                tails.append(end)
                free_beside.append(free)
            else:
                handle = ~event
                free, address, end = free_beside[handle], addresses[handle], tails[handle]
                if (before := starts.pop(address, None)) is not None:
                    del ends[before]
                    del free[bisect_left(free, (address - before) << ADDRESS_BITS | before)]
                    address = before
                if (after := ends.pop(end, None)) is not None:
                    del free[bisect_left(free, (after - end) << ADDRESS_BITS | end)]
                    end = after
                starts[end], ends[address] = address, end
                insort(free, (end - address) << ADDRESS_BITS | address)

    @property
    def sizes_bytes(self) -> list[int]:
        """Bytes of the block of each tensor, by the tensor's handle. A block is larger than asked
        for if the remainder is too small to be split off.
        """
        return [
            ROUND_BYTES * (end - address)
            for address, end in zip(self.addresses, self._tails, strict=True)
        ]

    def _request(self, size_bytes: int, stream: str) -> tuple[list[int], int, int, int]:
        """For a request of so many bytes: the free blocks that may serve it, its rounded size, the
        key in their order from which on blocks are large enough, and the smallest remainder that is
        split off.
        """
        is_small = size_bytes <= SMALL_BYTES
        least_rest = 1 if is_small else SMALL_BYTES // ROUND_BYTES + 1
        free, wanted = self._pools.setdefault((is_small, stream), []), -(-size_bytes // ROUND_BYTES)
        return free, wanted, wanted << ADDRESS_BITS, least_rest

    def _new_segment(self, size: int) -> tuple[int, int]:
        """Where a segment for a request begins and ends; raise OutOfMemoryError if it does not
        fit the device.
        """
        segment_bytes = segment_size(size * ROUND_BYTES)
        if self.reserved_bytes + segment_bytes > self.capacity_bytes:
            self.release_free_segments()
        if self.reserved_bytes + segment_bytes > self.capacity_bytes:
            raise OutOfMemoryError
        self.reserved_bytes += segment_bytes
        address = self._driver.take(segment_bytes)
        self._segments[address] = end = address + segment_bytes // ROUND_BYTES
        return address, end

    def release_free_segments(self) -> None:
        """Return all wholly free segments to the driver, as PyTorch does before it raises an
        out-of-memory error, and before it captures a CUDA graph.
        """
        for free in self._pools.values():
            for block in [*free]:
                address, size = block & ADDRESS_MASK, block >> ADDRESS_BITS
                if self._segments.get(address) == address + size:
                    free.remove(block)
                    del self._segments[address], self._starts[self._ends.pop(address)]
                    self.reserved_bytes -= ROUND_BYTES * size
                    self._driver.give_back(address, ROUND_BYTES * size)


def round_up(size_bytes: int, step_bytes: int) -> int:
    """The smallest multiple of `step_bytes` that is at least `size_bytes`."""
    return -(-size_bytes // step_bytes) * step_bytes


def segment_size(size_bytes: int) -> int:
    """Bytes that the allocator requests from the driver if it has no free block for a request of
    this size.
    """
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size_bytes, 2 * MIB)
