"""Numbers of a `MemoryProfile` that tables, sentences and pictures share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from cs336_systems.analysis.memory.profile import BlockMemory, Category, MemoryProfile, Moment, PhaseMemory

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Key = TypeVar("Key")

START = "start"
"""Name of the phase of a moment at which a step begins."""


def fields_of(part: "DataclassInstance") -> dict[str, Any]:
    """The fields of a part of a profile by name, which is also the key of a column."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


def by_category(moment: Moment, *, requested: bool = False) -> dict[Category, int]:
    """Bytes of each category at the moment, counted in blocks or as `requested`; 0 for an absent category."""
    found = dict.fromkeys(Category, 0)
    for row in moment.categories:
        found[row.category] += row.requested_bytes if requested else row.num_bytes
    return found


def bytes_of(moment: Moment, category: Category) -> int:
    """Bytes of the category at the moment, counted in blocks."""
    return by_category(moment)[category]


def fragmentation_bytes(profile: MemoryProfile) -> int:
    """Bytes that were reserved at the peak and in no block: the allocator's cache, and rests between blocks."""
    return profile.peak.reserved_bytes - profile.peak.allocated_bytes


def difference_bytes(moment: Moment, *, requested: bool = False) -> int | None:
    """Bytes by which the snapshot exceeds the allocator's count, in blocks or as `requested`; None if not counted."""
    if requested:
        counted = moment.counted_requested_bytes
        return None if counted is None else moment.requested_bytes - counted
    return None if moment.counted_bytes is None else moment.allocated_bytes - moment.counted_bytes


def peaks_by(phases: Iterable[PhaseMemory], key: Callable[[PhaseMemory], Key]) -> dict[Key, int]:
    """The highest peak among the phases of each key, in the order in which the keys first appear."""
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
