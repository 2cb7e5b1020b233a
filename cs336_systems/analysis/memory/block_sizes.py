"""Sizes of the blocks that PyTorch's allocator gave for requests; its events contain only the requested bytes.

The allocator rounds requests up to 512 bytes and takes the beginning of a free block. The remainder stays free, unless
it is at most 1 MiB of a block for large requests: then the request gets the whole block, up to the next block in use or
the segment's end.
"""

from collections.abc import Mapping

import numpy as np

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.memory.lifetimes import Lifetimes, nearest
from cs336_systems.analysis.memory.snapshot import Setting

ROUNDING_BYTES = 512
SMALL_BYTES = 2**20
"""Requests up to this size come from small segments, where a rest of 512 bytes is already split off."""
NO_LIMIT = np.iinfo(np.int64).max
"""An address above all others."""


def rounded(requested_bytes: Ints) -> Ints:
    """Requests rounded up as the allocator does by default."""
    return np.maximum(-(-requested_bytes // ROUNDING_BYTES), 1) * ROUNDING_BYTES


def rounds_to_powers(settings: Mapping[str, Setting]) -> bool:
    """Whether the allocator is set to round to powers of two, which this module does not imitate."""
    return any(name.startswith("roundup_power2_divisions.") and value not in (0, 1) for name, value in settings.items())


def may_be_larger(requested_bytes: Ints, settings: Mapping[str, Setting]) -> Mask:
    """Whether the blocks may be larger than the rounded requests."""
    is_large: Mask = rounded(requested_bytes) > SMALL_BYTES
    return is_large & (settings.get("expandable_segments") is not True)


def block_sizes(blocks: Lifetimes, segments: Lifetimes, settings: Mapping[str, Setting]) -> Ints:
    """The bytes of each block, from the request in `blocks` and from what followed it in memory when it was allocated.

    What followed a block that was allocated before the recording is not known; the first moment is used instead.
    """
    sizes = rounded(blocks.num_bytes)
    rows = np.flatnonzero(may_be_larger(blocks.num_bytes, settings))
    end = blocks.address[rows] + sizes[rows]
    moment = np.maximum(blocks.start[rows], 0)
    largest = settings.get("max_split_size", -1)
    is_whole = sizes[rows] >= (largest if isinstance(largest, int) and largest >= 0 else NO_LIMIT)
    limit = np.where(is_whole, NO_LIMIT - 1, end + SMALL_BYTES)
    behind = np.full(len(rows), NO_LIMIT)
    for memory, boundary in ((blocks, blocks.address), (segments, segments.address + segments.num_bytes)):
        found = nearest(boundary, memory.start, memory.end, end, limit, moment)
        behind = np.minimum(behind, np.append(boundary, NO_LIMIT)[found])  # NONE is the last
    sizes[rows] += np.where(behind < NO_LIMIT, behind - end, 0)
    return sizes
