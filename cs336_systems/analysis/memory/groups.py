"""What each allocation holds, groups of like allocations, and what each block of the model holds."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.memory.allocations import BEFORE, NONE, Allocations, Replay, nearest
from cs336_systems.analysis.memory.lifetimes import codes_without_notes
from cs336_systems.analysis.memory.notes import (
    Kind,
    Phases,
    Sighting,
    block_of_parameter,
    block_of_ranges,
    like_name,
    short_name,
    within_block,
)
from cs336_systems.analysis.memory.profile import (
    CATEGORIES,
    CODES,
    BlockMemory,
    Category,
    CategoryBytes,
    LikeAllocations,
    Place,
    SavedTensor,
)
from cs336_systems.analysis.memory.snapshot import Stack
from cs336_systems.config import Phase
from cs336_systems.ranges import block_range

NOT_SIGHTED = NONE
_PRECEDENCE = {kind: rank for rank, kind in enumerate(Kind)}


class MemoryAttributionError(AssertionError):
    """The categories do not add up to the allocated bytes, which is a defect of this analysis."""


def resolve(allocations: Allocations, sightings: Sequence[Sighting], moments: Ints) -> Ints:
    """For each sighting, the row of the allocation that contained its address at its moment, or NOT_SIGHTED."""
    wanted = np.array([sighting.address for sighting in sightings], dtype=np.int64)
    found = nearest(
        allocations.address, allocations.start, allocations.free_requested, wanted, np.zeros_like(wanted), moments
    )
    ends = np.append(allocations.address + allocations.num_bytes, 0)  # NONE is the last
    return np.where(ends[found] > wanted, found, NOT_SIGHTED)


def categorise(
    replay: Replay, sightings: Sequence[Sighting], row_of: Ints, without_notes: Sequence[Stack] = ()
) -> tuple[Ints, Ints]:
    """For each allocation the code of its category, and the sighting that decided it or NOT_SIGHTED.

    Of several sightings of one allocation, the kind decides; of the same kind, the first.
    Without notes there are no sightings: the category follows from the lifetimes and from the stacks, given for that.
    """
    rows = replay.allocations
    category = np.where(replay.is_held_throughout, CODES[Category.HELD], CODES[Category.TEMPORARY])
    if without_notes:
        category = codes_without_notes(replay, without_notes)
    category[replay.is_private] = CODES[Category.POOL]
    sighted = np.full(len(rows), NOT_SIGHTED, dtype=np.int64)
    rank = np.array([_PRECEDENCE[sighting.kind] for sighting in sightings], dtype=np.int64)
    order = np.argsort(rank, kind="stable")[::-1]  # of several sightings of a row, the deciding one is written last
    order = order[row_of[order] != NOT_SIGHTED]
    sighted[row_of[order]] = order
    code_of = {kind: CODES[Category.PARAMETERS if kind is Kind.GATHERED else Category(kind)] for kind in Kind}
    category[row_of[order]] = [code_of[sightings[index].kind] for index in order.tolist()]
    return category, sighted


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


def live_sums(replay: Replay, category: Ints, moments: Ints) -> LiveSums:
    """The sums at the sorted `moments`; raise MemoryAttributionError unless they add up to the allocated bytes."""
    rows = replay.allocations
    first = np.searchsorted(moments, rows.start, side="right")
    behind = np.searchsorted(moments, rows.free_requested, side="right")
    num_bytes, requested_bytes, counts = (
        _sums(category, values, first, behind, len(moments))
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


MAX_PLACES = 6
NUM_PARTS = 2
"""Parts of a file's path that are kept; the others say more about the machine than about the program."""
_TORCH = re.compile(r"(?:^|[/\\](?:site|dist)-packages[/\\])torch[/\\]")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]")


def places_of(stack: Stack) -> tuple[Place, ...]:
    """The innermost calls in Python code outside of PyTorch; those in other packages only if there are no others."""
    of_python = [frame for frame in stack if frame.filename.endswith(".py") and not _TORCH.search(frame.filename)]
    own = [frame for frame in of_python if not _INSTALLED.search(frame.filename)] or of_python
    return tuple(
        Place(file="/".join(re.split(r"[/\\]", frame.filename)[-NUM_PARTS:]), line=frame.line, function=frame.name)
        for frame in own[:MAX_PLACES]
    )


@dataclass(frozen=True, kw_only=True)
class Known:
    """All that is known of the allocations of one snapshot."""

    replay: Replay
    stacks: Sequence[Stack]
    category: Ints
    """For each allocation, an index into CATEGORIES."""
    sighting: Ints
    """Index of the sighting that decided the category, or NOT_SIGHTED."""
    sightings: Sequence[Sighting]
    phases: Phases


class Groups:
    """The allocations of a snapshot in groups of like ones."""

    def __init__(self, known: Known) -> None:
        self._known = known
        rows, sighting = known.replay.allocations, known.sighting
        used, self._stack_of_row = np.unique(rows.stack, return_inverse=True)
        self._places = [places_of(known.stacks[number]) for number in used.tolist()]
        self._names = [short_name(sighting) for sighting in known.sightings]
        self._phase_names = ("", *known.phases.names)
        self._phase_of_row = np.where(rows.start == BEFORE, 0, known.phases.at(rows.start) + 1)
        columns = np.stack([
            rows.requested_bytes,
            known.category,
            _numbered([like_name(name) for name in self._names], sighting),
            _numbered(self._phase_names, self._phase_of_row),
            _numbered([places[:1] for places in self._places], self._stack_of_row),
        ])  # fmt: skip
        order = np.lexsort(columns[::-1])
        is_new = np.append(True, (np.diff(columns[:, order]) != 0).any(axis=0))[: len(rows)]
        self._first = order[is_new]
        """The first allocation of each group."""
        self._group = np.empty(len(rows), dtype=np.int64)
        self._group[order] = np.cumsum(is_new) - 1
        self._members = np.split(order, np.flatnonzero(is_new)[1:])

    def largest(self, chosen: Mask, live: Mask, limit: int) -> tuple[LikeAllocations, ...]:
        """At most `limit` groups of the chosen allocations, the largest first; `live` are those at the peak."""
        counts = np.bincount(self._group[chosen], minlength=len(self._first))
        order = np.lexsort((-counts, -self._known.replay.allocations.requested_bytes[self._first]))
        return tuple(self._row(group, live) for group in order[counts[order] > 0][:limit].tolist())

    def at_peak(self, live: Mask) -> tuple[LikeAllocations, ...]:
        """The groups that have live allocations, those first that take most memory."""
        num_bytes = np.zeros(len(self._first), dtype=np.int64)
        np.add.at(num_bytes, self._group[live], self._known.replay.allocations.num_bytes[live])
        order = np.argsort(-num_bytes, kind="stable")
        return tuple(self._row(group, live) for group in order[num_bytes[order] > 0].tolist())

    def _row(self, group: int, live: Mask) -> LikeAllocations:
        known, first, members = self._known, int(self._first[group]), self._members[group]
        rows, at_peak = known.replay.allocations, members[live[members]]
        indices = [index for index in known.sighting[members].tolist() if index != NOT_SIGHTED]
        shapes, dtypes = ({getattr(known.sightings[i], name) for i in indices} for name in ("shape", "dtype"))
        names = {self._names[index] for index in indices}
        name = like_name(names.pop()) if len(names) > 1 else "".join(names)
        return LikeAllocations(
            num_bytes=int(rows.num_bytes[members].max()),
            requested_bytes=int(rows.requested_bytes[first]),
            count=len(members),
            count_at_peak=len(at_peak),
            bytes_at_peak=int(rows.num_bytes[at_peak].sum()),
            category=CATEGORIES[known.category[first]],
            name=name,
            shape=shapes.pop() if len(shapes) == 1 else (),
            dtype=dtypes.pop() if len(dtypes) == 1 else "",
            phase=self._phase_names[self._phase_of_row[first]],
            places=_common([self._places[stack] for stack in np.unique(self._stack_of_row[members]).tolist()]),
        )


def _common(places: Sequence[tuple[Place, ...]]) -> tuple[Place, ...]:
    """The places that several stacks share, from the innermost place on."""
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*places, strict=False))
    return tuple(column[0] for column in shared)


def _numbered(values: Sequence[str | tuple[Place, ...]], index: Ints) -> Ints:
    """For each index a number, equal if the values are equal; -1 for the index -1."""
    number_of: dict[str | tuple[Place, ...], int] = {}
    numbers = [number_of.setdefault(value, len(number_of)) for value in values]
    return np.array([*numbers, -1], dtype=np.int64)[index]


def block_memory(known: Known, row_of: Ints, moments: Ints) -> tuple[BlockMemory, ...]:
    """The blocks in the first step in which any of them saved a tensor; empty if none ever did.

    `row_of` and `moments` give the allocation and the moment of each sighting. A storage counts once, for the block
    that saved it first. Saved parameters and buffers, such as the mask, take no memory of their own and are left out.
    The input that a checkpoint keeps counts for its first block; what backward computes again, for its own block.
    """

    def of_kind(kind: Kind) -> list[int]:
        return [i for i in np.flatnonzero(row_of != NOT_SIGHTED).tolist() if known.sightings[i].kind is kind]

    saved = [
        i
        for i in of_kind(Kind.SAVED)
        if known.category[row_of[i]] == CODES[Category.SAVED] and block_of_ranges(known.sightings[i].name) is not None
    ]
    if not saved:
        return ()
    steps = np.array(known.phases.steps, dtype=np.int64)[known.phases.at(moments)]
    is_of_step = steps == steps[saved[0]]
    saved_by = _by_block(known, row_of, (i for i in saved if is_of_step[i]), block_of_ranges)
    parameters = _by_block(known, row_of, of_kind(Kind.PARAMETER), block_of_parameter)
    gradients = _by_block(known, row_of, (i for i in of_kind(Kind.GRADIENT) if is_of_step[i]), block_of_parameter)
    num_bytes = known.replay.allocations.requested_bytes
    return tuple(
        BlockMemory(
            name=block_range(block),
            saved_bytes=int(num_bytes[row_of[indices]].sum()),
            saved=_saved_tensors(known, row_of, indices),
            parameter_bytes=int(num_bytes[row_of[parameters.get(block, [])]].sum()),
            gradient_bytes=int(num_bytes[row_of[gradients.get(block, [])]].sum()),
        )
        for block, indices in sorted(saved_by.items())
    )


def _by_block(
    known: Known, row_of: Ints, indices: Iterable[int], block_of: Callable[[str], int | None]
) -> dict[int, list[int]]:
    """The sightings of each block; of several sightings of a storage the first."""
    first_of_row: dict[int, int] = {}
    for index in indices:
        first_of_row.setdefault(int(row_of[index]), index)
    by_block: dict[int, list[int]] = {}
    for index in first_of_row.values():
        if (block := block_of(known.sightings[index].name)) is not None:
            by_block.setdefault(block, []).append(index)
    return by_block


def _saved_tensors(known: Known, row_of: Ints, indices: Sequence[int]) -> tuple[SavedTensor, ...]:
    """The largest first."""
    tensors, rows, phases = [], known.replay.allocations, known.phases
    for index in indices:
        sighting, row = known.sightings[index], row_of[index]
        tensors.append(
            SavedTensor(
                name=within_block(short_name(sighting)),
                shape=sighting.shape,
                dtype=sighting.dtype,
                num_bytes=int(rows.requested_bytes[row]),
                is_recomputed=phases.names[int(phases.at(rows.start[row]))] == Phase.BACKWARD,
            )
        )
    return tuple(sorted(tensors, key=lambda tensor: -tensor.num_bytes))
