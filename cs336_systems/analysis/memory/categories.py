"""The category of each allocation, from the notes or else from lifetimes and stacks, and sums over
the categories.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..columns import Ints, Mask
from .lifetimes import BEFORE, NONE, nearest
from .notes import Sighting, SightingKind
from .profile import CATEGORIES, CATEGORY_CODES, MIN_LATER, Category, CategoryBytes
from .replay import Allocations, Replay
from .snapshot import NOT_RECORDED, Action
from .stacks import Callers

NOT_SIGHTED = NONE
_PRECEDENCE = {kind: rank for rank, kind in enumerate(SightingKind)}


class MemoryAttributionError(AssertionError):
    """The categories do not add up to the allocated bytes, which is a defect of this analysis."""


def resolve(allocations: Allocations, sightings: Sequence[Sighting], moments: Ints) -> Ints:
    """For each sighting, the row of the allocation that contained its address at its moment, or
    NOT_SIGHTED.
    """
    wanted = np.array([sighting.address for sighting in sightings], dtype=np.int64)
    start, end = allocations.start, allocations.free_requested
    limit = np.zeros_like(wanted)
    below = nearest(allocations.address, start, end, wanted, limit, moments)
    ends = np.append(allocations.address + allocations.num_bytes, 0)  # NONE is the last
    return np.where(ends[below] > wanted, below, NOT_SIGHTED)


def categorise(
    replay: Replay, sightings: Sequence[Sighting], row_of: Ints, callers: Callers | None
) -> tuple[Ints, Ints]:
    """For each allocation the code of its category, and the sighting that decided it or
    NOT_SIGHTED.

    Of several sightings of one allocation, the kind decides; of the same kind, the first. Without
    notes there are no sightings: the category follows from the lifetimes and from the callers,
    given for that.
    """
    category = _codes_without_notes(replay, callers)
    category[replay.is_private] = CATEGORY_CODES[Category.POOL]
    deciding = np.full(len(category), NOT_SIGHTED, dtype=np.int64)
    rank = np.array([_PRECEDENCE[sighting.kind] for sighting in sightings], dtype=np.int64)
    # of several sightings of a row, the deciding one is written last
    order = np.argsort(rank, kind="stable")[::-1]
    order = order[row_of[order] != NOT_SIGHTED]
    deciding[row_of[order]] = order
    codes = [CATEGORY_CODES[_category(sightings[index].kind)] for index in order]
    category[row_of[order]] = codes
    return category, deciding


def _category(kind: SightingKind) -> Category:
    """The category of memory that a sighting implies; gathered parameters count as parameters."""
    return Category.PARAMETERS if kind is SightingKind.GATHERED else Category(kind)


MIN_BETWEEN = 4
"""Allocations outside of optimizers from which on a step has ended; a thread that loads data
makes fewer meanwhile.
"""


def _codes_without_notes(replay: Replay, callers: Callers | None) -> Ints:
    """The code of each allocation's category, as far as lifetimes and stacks tell.

    Known for certain is whether memory was there before the recording and at its end. The stacks
    tell what an optimizer made, and what autograd made in its own threads, which have no Python
    code of the program. Without stacks, all is temporary that was not held throughout.
    """
    if callers is None:
        held, temporary = CATEGORY_CODES[Category.HELD], CATEGORY_CODES[Category.TEMPORARY]
        return np.where(replay.is_held_throughout, held, temporary)
    category = _codes_by_lifetime(replay)
    category[_is_gradient(replay, callers)] = CATEGORY_CODES[Category.GRADIENTS]
    category[_is_optimizer_state(replay, callers)] = CATEGORY_CODES[Category.OPTIMIZER_STATE]
    return category


def _num_meanwhile(replay: Replay, is_counted: Mask) -> Ints:
    """How many of the counted events happened while each allocation was there."""
    rows = replay.allocations
    num_before: Ints = np.append(0, np.cumsum(is_counted))
    return num_before[np.maximum(rows.free_requested, 0)] - num_before[rows.start + 1]


def _codes_by_lifetime(replay: Replay) -> Ints:
    """The code of each allocation's category by when it was there alone."""
    rows, events = replay.allocations, replay.memory.events
    is_of = {
        Category.HELD: replay.is_held_throughout,
        Category.EARLIER: rows.start == BEFORE,
        Category.KEPT: rows.free_requested == len(events),
        Category.LATER: _num_meanwhile(replay, events.action == Action.ALLOC) >= MIN_LATER,
    }
    codes = [CATEGORY_CODES[category] for category in is_of]
    return np.select([*is_of.values()], codes, default=CATEGORY_CODES[Category.TEMPORARY])


def _is_optimizer_state(replay: Replay, callers: Callers) -> Mask:
    """Allocations that a step of an optimizer made and left, and earlier ones of the same size
    that it replaced.
    """
    rows, events, is_optimizer = replay.allocations, replay.memory.events, callers.is_optimizer
    is_made = events.action == Action.ALLOC
    num_others = _num_meanwhile(replay, is_made & ~is_optimizer[events.stack])
    is_left = (rows.free_requested == len(events)) | (num_others >= MIN_BETWEEN)
    # blocks from before the recording may have their stack too
    is_state: Mask = is_optimizer[rows.stack] & is_left
    # a free without a stack belongs to the step that allocated last
    last_made = np.arange(len(events))
    last_made[~is_made] = 0
    np.maximum.accumulate(last_made, out=last_made)
    stack_of_free = np.where(events.stack <= NOT_RECORDED, events.stack[last_made], events.stack)
    is_freed = (rows.free_requested >= 0) & (rows.free_requested < len(events))
    old = np.flatnonzero((rows.start == BEFORE) & is_freed)
    is_replaced = is_optimizer[stack_of_free[rows.free_requested[old]]]
    is_replaced &= np.isin(rows.requested_bytes[old], rows.requested_bytes[is_state])
    is_state[old[is_replaced]] = True
    return is_state


def _is_gradient(replay: Replay, callers: Callers) -> Mask:
    """Allocations by autograd that were there while an optimizer worked, or that `zero_grad`
    freed; none where no stack has Python code, as then it was not recorded.
    """
    rows, events = replay.allocations, replay.memory.events
    has_python = ~callers.is_autograd[events.stack] & (events.stack != NOT_RECORDED)
    is_used = _num_meanwhile(replay, callers.is_optimizer[events.stack]) > 0
    is_cleared = np.append(callers.is_zero_grad[events.stack], False)[rows.free_requested]
    is_made = (rows.start != BEFORE) & callers.is_autograd[rows.stack] & has_python.any()
    is_gradient: Mask = is_made & (is_used | is_cleared)
    return is_gradient


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
            CategoryBytes(
                category=category, num_bytes=num_bytes, requested_bytes=requested_bytes, count=count
            )
            for category, num_bytes, requested_bytes, count in cells
            if count
        )


def live_sums(replay: Replay, category: Ints, moments: Ints) -> LiveSums:
    """The sums at the sorted `moments`; raise MemoryAttributionError unless they add up to the
    allocated bytes.
    """
    rows = replay.allocations
    first = np.searchsorted(moments, rows.start, side="right")
    behind = np.searchsorted(moments, rows.free_requested, side="right")

    def sums_of(values: Ints) -> Ints:
        """The sum of the values at each moment; a value counts from `first` to before `behind`."""
        change = np.zeros((len(CATEGORIES), len(moments) + 1), dtype=np.int64)
        is_there = first < behind
        np.add.at(change, (category[is_there], first[is_there]), values[is_there])
        np.subtract.at(change, (category[is_there], behind[is_there]), values[is_there])
        return np.cumsum(change, axis=1)[:, :-1]

    sums = LiveSums(
        moments=moments,
        num_bytes=sums_of(rows.num_bytes),
        requested_bytes=sums_of(rows.requested_bytes),
        counts=sums_of(np.ones_like(rows.num_bytes)),
    )
    missed = sums.num_bytes.sum(axis=0) - replay.allocated_bytes[moments]
    if missed.any():
        where = int(np.flatnonzero(missed)[0])
        raise MemoryAttributionError(
            f"at moment {moments[where]} the categories hold {sums.num_bytes[:, where].sum()} "
            f"bytes of {replay.allocated_bytes[moments[where]]}"
        )
    return sums
