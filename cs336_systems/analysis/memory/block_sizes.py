"""How large the blocks were that PyTorch's allocator gave for requests: its events tell only what was asked for.

It rounds requests up to 512 bytes and takes the beginning of a free block. The rest stays free, unless it is at most
1 MiB of a block for large requests: then the request gets all of it, up to the next block in use or the segment's end.
"""

from collections.abc import Mapping

import numpy as np

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.memory.lifetimes import BEFORE, Lifetimes
from cs336_systems.analysis.memory.snapshot import Setting

ROUNDING_BYTES = 512
SMALL_BYTES = 2**20
"""Requests up to this size are served from segments of their own, and split to the last 512 bytes."""
NOWHERE = np.iinfo(np.int64).max
"""An address beyond all."""
MAX_BOUNDARIES = 4096
"""At different addresses within 1 MiB, that are looked at."""


def rounded(requested_bytes: Ints) -> Ints:
    """Requests as the allocator rounds them, unless it is told to round to powers of two."""
    return np.maximum(-(-requested_bytes // ROUNDING_BYTES), 1) * ROUNDING_BYTES


def rounds_to_powers(settings: Mapping[str, Setting]) -> bool:
    """Whether the allocator was told to round to powers of two, which is not followed here."""
    return any(name.startswith("roundup_power2_divisions.") and value not in (0, 1) for name, value in settings.items())


def may_be_larger(requested_bytes: Ints, settings: Mapping[str, Setting]) -> Mask:
    """Whether the blocks may be larger than the rounded requests."""
    is_large: Mask = rounded(requested_bytes) > SMALL_BYTES
    return is_large & (settings.get("expandable_segments") is not True)


def block_sizes(blocks: Lifetimes, segments: Lifetimes, settings: Mapping[str, Setting]) -> Ints:
    """The bytes of each block, from the requests in `blocks` and what lay behind it when it was allocated.

    For what was allocated before the recording, what lay behind it then is not known, and the first moment is taken.
    """
    sizes = rounded(blocks.num_bytes)
    rows = np.flatnonzero(may_be_larger(blocks.num_bytes, settings))
    end = blocks.address[rows] + sizes[rows]
    moment = np.maximum(blocks.start[rows], 0)
    largest = settings.get("max_split_size", -1)
    is_whole = sizes[rows] >= (largest if isinstance(largest, int) and largest >= 0 else NOWHERE)
    limit = np.where(is_whole, NOWHERE - 1, end + SMALL_BYTES)
    behind = np.minimum(
        _next_in_use(blocks, blocks.address, end, limit, moment),
        _next_in_use(segments, segments.address + segments.num_bytes, end, limit, moment),
    )
    sizes[rows] += np.where(behind <= limit, behind - end, 0)
    return sizes


def _next_in_use(memory: Lifetimes, boundary: Ints, begin: Ints, limit: Ints, moment: Ints) -> Ints:
    """The first boundary from `begin` to `limit` of memory that is there at the moment; beyond the limit if none is."""
    order = np.lexsort((memory.start, boundary))
    start, end = memory.start[order], memory.end[order]
    is_new = np.append(True, np.diff(boundary[order]) > 0)[: len(order)]
    first = np.flatnonzero(is_new)
    places = boundary[order][first]
    span = max(start.max(initial=0), moment.max(initial=0)) + 2
    key = (np.cumsum(is_new) - 1) * span + start - BEFORE

    found, rows, place = limit + 1, np.arange(len(begin)), np.searchsorted(places, begin)
    for _ in range(MAX_BOUNDARIES):
        is_within = np.append(places, NOWHERE)[place] <= limit[rows]
        rows, place = rows[is_within], place[is_within]
        if not len(rows):
            break
        last = np.searchsorted(key, place * span + moment[rows], side="right") - 1  # to begin there before the moment
        is_there = (last >= first[place]) & (end[last] >= moment[rows])
        found[rows[is_there]] = places[place[is_there]]
        rows, place = rows[~is_there], place[~is_there] + 1
    return found
