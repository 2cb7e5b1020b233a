"""What each block of memory holds: seen by the live process, or inferred from when the block was in use."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, Mask
from cs336_systems.analysis.memory.allocations import Allocations, Replay
from cs336_systems.analysis.memory.device_memory import Action
from cs336_systems.analysis.memory.lifetimes import NONE, nearest
from cs336_systems.analysis.memory.notes import Kind, Sighting
from cs336_systems.analysis.memory.profile import MIN_LATER, Category, CategoryBytes

CATEGORIES = tuple(Category)
CODES = {category: code for code, category in enumerate(CATEGORIES)}
NOT_SIGHTED = NONE
_PRECEDENCE = {kind: rank for rank, kind in enumerate(
    (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER_STATE, Kind.GRADIENT, Kind.AUTOCAST_COPY, Kind.GATHERED, Kind.SAVED)
)}  # fmt: skip


class MemoryAttributionError(AssertionError):
    """The categories do not add up to the allocated bytes, which is a defect of this analysis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents(Columns):
    """What each allocation of a replay holds."""

    category: Ints
    """Index into CATEGORIES."""
    sighting: Ints
    """Index of the sighting that decided the category, or NOT_SIGHTED."""


def resolve(allocations: Allocations, sightings: Sequence[Sighting], moments: Ints) -> Ints:
    """For each sighting, the row of the allocation that contained its address at its moment, or NOT_SIGHTED."""
    wanted = np.array([sighting.address for sighting in sightings], dtype=np.int64)
    found = nearest(
        allocations.address, allocations.start, allocations.free_requested, wanted, np.zeros_like(wanted), moments
    )
    ends = np.append(allocations.address + allocations.num_bytes, 0)  # NONE is the last
    return np.where(ends[found] > wanted, found, NOT_SIGHTED)


def categorise(replay: Replay, sightings: Sequence[Sighting], row_of: Ints, *, has_notes: bool = True) -> Contents:
    """The contents of all allocations. Of several sightings of one, the kind decides; of the same kind, the first.

    Without notes there are no sightings, and the category follows from how long each allocation existed.
    """
    rows = replay.allocations
    passing = np.where(_is_for_later(replay) & (not has_notes), CODES[Category.LATER], CODES[Category.TEMPORARY])
    category = np.where(replay.is_held_throughout, CODES[Category.HELD], passing)
    sighted = np.full(len(rows), NOT_SIGHTED, dtype=np.int64)
    rank = np.array([_PRECEDENCE[sighting.kind] for sighting in sightings], dtype=np.int64)
    order = np.argsort(rank, kind="stable")[::-1]  # of several sightings of a row, the deciding one is written last
    order = order[row_of[order] != NOT_SIGHTED]
    sighted[row_of[order]] = order
    category[row_of[order]] = [CODES[_category_of(sightings[index].kind)] for index in order.tolist()]
    return Contents(category=category, sighting=sighted)


def _category_of(kind: Kind) -> Category:
    return Category.PARAMETERS if kind is Kind.GATHERED else Category(kind)


def _is_for_later(replay: Replay) -> Mask:
    """For each allocation, whether MIN_LATER or more others were made before the program freed it."""
    rows = replay.allocations
    made = np.append(0, np.cumsum(replay.memory.events.action == Action.ALLOC))
    is_later: Mask = made[np.maximum(rows.free_requested, 0)] - made[rows.start + 1] >= MIN_LATER
    return is_later


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSums:
    """Sums over the allocated blocks: a row for each of CATEGORIES, a column for each moment."""

    moments: Ints
    num_bytes: Ints
    requested_bytes: Ints
    counts: Ints

    def at(self, moment: int) -> tuple[CategoryBytes, ...]:
        """The categories that have blocks at one of the moments."""
        column = int(np.searchsorted(self.moments, moment))
        sums = (self.num_bytes, self.requested_bytes, self.counts)
        cells = zip(CATEGORIES, *(table[:, column].tolist() for table in sums), strict=True)
        return tuple(
            CategoryBytes(category=category, num_bytes=num_bytes, requested_bytes=requested_bytes, count=count)
            for category, num_bytes, requested_bytes, count in cells
            if count
        )


def live_sums(replay: Replay, contents: Contents, moments: Ints) -> LiveSums:
    """The sums at the sorted `moments`; raise MemoryAttributionError unless they add up to the allocated bytes."""
    rows = replay.allocations
    first = np.searchsorted(moments, rows.start, side="right")
    behind = np.searchsorted(moments, rows.free_requested, side="right")
    num_bytes, requested_bytes, counts = (
        _sums(contents.category, values, first, behind, len(moments))
        for values in (rows.num_bytes, rows.requested_bytes, np.ones(len(rows), dtype=np.int64))
    )
    sums = LiveSums(moments=moments, num_bytes=num_bytes, requested_bytes=requested_bytes, counts=counts)
    missed = sums.num_bytes.sum(axis=0) - replay.allocated_bytes[moments]
    if missed.any():
        where = int(np.flatnonzero(missed)[0])
        raise MemoryAttributionError(
            f"at moment {moments[where]} the categories hold {sums.num_bytes[:, where].sum()} bytes of "
            f"{replay.allocated_bytes[moments[where]]}"
        )
    return sums


def _sums(code: Ints, values: Ints, first: Ints, behind: Ints, num_moments: int) -> Ints:
    """The sum of the values by category; each value counts from column `first` to the one before column `behind`."""
    change = np.zeros((len(CATEGORIES), num_moments + 1), dtype=np.int64)
    is_there = first < behind
    np.add.at(change, (code[is_there], first[is_there]), values[is_there])
    np.subtract.at(change, (code[is_there], behind[is_there]), values[is_there])
    return np.cumsum(change, axis=1)[:, :-1]
