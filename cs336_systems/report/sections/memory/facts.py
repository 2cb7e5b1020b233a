"""Numbers that tables, sentences and pictures of a `MemoryProfile` share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from cs336_systems.analysis.memory.profile import (
    BlockMemory,
    Category,
    LikeAllocations,
    MemoryProfile,
    Moment,
    PhaseMemory,
    SavedTensor,
)

Key = TypeVar("Key")

START = "start"
"""Phase of the moment at which a step begins."""


def fields_of(part: PhaseMemory | Moment | LikeAllocations | SavedTensor) -> dict[str, Any]:
    """The fields of a part of a profile by name: most are columns of tables."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


def by_category(moment: Moment, *, requested: bool = False) -> dict[Category, int]:
    """Bytes of each category at the moment, in blocks or as `requested`; 0 for one of which there is nothing."""
    found = dict.fromkeys(Category, 0)
    for row in moment.categories:
        found[row.category] += row.requested_bytes if requested else row.num_bytes
    return found


def bytes_of(moment: Moment, category: Category) -> int:
    """How much of the category there was at the moment."""
    return by_category(moment)[category]


def fragmentation_bytes(profile: MemoryProfile) -> int:
    """What the allocator held at the peak and no block used: its cache, and the rests between blocks."""
    return profile.peak.reserved_bytes - profile.peak.allocated_bytes


def difference_bytes(moment: Moment, *, requested: bool = False) -> int | None:
    """What the snapshot has more than the allocator counted, in blocks or as `requested`; None if it did not count."""
    if requested:
        counted = moment.counted_requested_bytes
        return None if counted is None else moment.requested_bytes - counted
    return None if moment.counted_bytes is None else moment.allocated_bytes - moment.counted_bytes


def peaks_by(phases: Iterable[PhaseMemory], key: Callable[[PhaseMemory], Key]) -> dict[Key, int]:
    """The most that was allocated in all phases of one key, in the order of the first of each."""
    peaks: dict[Key, int] = {}
    for phase in phases:
        peaks[key(phase)] = max(peaks.get(key(phase), 0), phase.peak_bytes)
    return peaks


def typical(blocks: Sequence[BlockMemory]) -> BlockMemory:
    """The first block that saves the median, the lower of the middle two; raise ValueError for no blocks."""
    if not blocks:
        raise ValueError("a typical block needs at least one block, got none")
    middle = sorted(block.saved_bytes for block in blocks)[(len(blocks) - 1) // 2]
    return next(block for block in blocks if block.saved_bytes == middle)
