"""What each allocation holds, groups of like allocations, and what each block of the model holds."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, takewhile

import numpy as np

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.memory.allocations import BEFORE, NONE, Allocations, Replay, nearest
from cs336_systems.analysis.memory.profile import (
    CATEGORIES,
    CODES,
    MIN_LATER,
    BlockMemory,
    Category,
    CategoryBytes,
    Kind,
    LikeAllocations,
    Phases,
    Place,
    SavedTensor,
    Sighting,
    block_of_parameter,
    block_of_ranges,
    like_name,
    short_name,
    within_block,
)
from cs336_systems.analysis.memory.snapshot import NO_STACK, Action, Frame, Stack
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


MIN_BETWEEN = 4
"""Allocations outside of optimizers from which on a step has ended; a thread that loads data makes fewer meanwhile."""
_TORCH_OPTIM = re.compile(r"(?:^|[/\\])torch[/\\]optim[/\\](lr_scheduler|swa_utils)?")
_OPTIMIZER = re.compile(
    r"(?<![a-z])(?:optims?|optimi[sz]ers?|optimi[sz]ation|lion|lamb|lars|soap|stage)(?![a-z])"
    r"|adam|adagrad|adadelta|adafactor|rmsprop|sgd|lbfgs|muon|shampoo|sophia|prodigy"
)
"""Parts of the names of files and classes of optimizers; `stage3.py` is that of DeepSpeed's ZeRO."""
_FOLDERS = re.compile(r"[/\\](?:optims?|optimizers?)[/\\][^/\\]*$")
_UPDATE = re.compile(r"(?:^|_)(?:step|update|init|state|states)(?:_|$)")
_CALLED_BY_STEP = frozenset({"forward", "backward", "closure", "training_step", "zero_grad", "_call_impl"})
"""Functions that are no part of an optimizer even if its step calls them, as it calls a closure."""
_ENGINE = re.compile(r"[/\\]torch[/\\](?:autograd|_functorch|_inductor)[/\\]")


class _Call(Enum):
    """What a frame says of its stack."""

    OPTIMIZER = auto()
    INNER = auto()
    """A function that is no part of an optimizer even if its step calls it."""
    ZERO_GRAD = auto()


def _call_of(frame: Frame) -> _Call | None:
    """Judge it by its folder in PyTorch, or by how its function and its file or class are named; None says nothing."""
    name, _, function = frame.name.rpartition(".")
    if function in _CALLED_BY_STEP:
        return _Call.ZERO_GRAD if function == "zero_grad" else _Call.INNER
    if of_torch := _TORCH_OPTIM.search(frame.filename):
        return None if of_torch[1] else _Call.OPTIMIZER
    file = re.split(r"[/\\]", frame.filename)[-1]
    is_named = _OPTIMIZER.search(f"{file} {name}".lower()) or _FOLDERS.search(frame.filename)
    return _Call.OPTIMIZER if is_named and _UPDATE.search(function) else None


@dataclass(frozen=True, slots=True)
class Makers:
    """What each stack of a snapshot says of who called."""

    is_optimizer: Mask
    """An optimizer's step, or the making of its state, is on it, and no call of the model within."""
    is_autograd: Mask
    """It begins in PyTorch's engine of backward, whose threads run no other Python code, and not in a program."""
    clears: Mask
    """`zero_grad` is on it."""


def makers_of(stacks: Sequence[Stack]) -> Makers:
    """Judge each stack; every different frame is looked at once."""
    call_of = {frame: _call_of(frame) for frame in {*chain.from_iterable(stacks)}}
    told = [[call for frame in stack if (call := call_of[frame])] for stack in stacks]
    outermost = [next((f.filename for f in reversed(stack) if f.filename.endswith(".py")), "") for stack in stacks]
    return Makers(
        is_optimizer=np.array([calls[:1] == [_Call.OPTIMIZER] for calls in told], dtype=np.bool_),
        is_autograd=np.array([not file or bool(_ENGINE.search(file)) for file in outermost], dtype=np.bool_),
        clears=np.array([_Call.ZERO_GRAD in calls for calls in told], dtype=np.bool_),
    )


def by_lifetime(replay: Replay) -> Ints:
    """The code of each allocation's category by when it was there alone."""
    rows, events = replay.allocations, replay.memory.events
    made = np.append(0, np.cumsum(events.action == Action.ALLOC))
    is_old, is_kept = rows.start == BEFORE, rows.free_requested == len(events)
    is_long = made[np.maximum(rows.free_requested, 0)] - made[rows.start + 1] >= MIN_LATER
    choices = (Category.HELD, Category.EARLIER, Category.KEPT, Category.LATER)
    return np.select(
        [replay.is_held_throughout, is_old, is_kept, is_long], [CODES[choice] for choice in choices],
        default=CODES[Category.TEMPORARY],
    )  # fmt: skip


def optimizer_state(replay: Replay, makers: Makers) -> Mask:
    """Allocations that a step of an optimizer made and left, and earlier ones of the same size that it replaced."""
    rows, events, is_optimizer = replay.allocations, replay.memory.events, makers.is_optimizer
    is_made = events.action == Action.ALLOC
    others = np.append(0, np.cumsum(is_made & ~is_optimizer[events.stack]))
    between = others[np.maximum(rows.free_requested, 0)] - others[rows.start + 1]
    is_left = (rows.free_requested == len(events)) | (between >= MIN_BETWEEN)
    is_state: Mask = is_optimizer[rows.stack] & is_left  # blocks from before the recording may have their stack too
    # a free without a stack belongs to the step that allocated last
    last_made = np.maximum.accumulate(np.where(is_made, np.arange(len(events)), 0)) if len(events) else events.stack
    stack_of_free = np.where(events.stack == NO_STACK, events.stack[last_made], events.stack)
    old = np.flatnonzero((rows.start == BEFORE) & (rows.free_requested >= 0) & (rows.free_requested < len(events)))
    is_replaced = is_optimizer[stack_of_free[rows.free_requested[old]]]
    is_replaced &= np.isin(rows.requested_bytes[old], rows.requested_bytes[is_state])
    is_state[old[is_replaced]] = True
    return is_state


def gradients(replay: Replay, makers: Makers) -> Mask:
    """Allocations by autograd that were there while an optimizer worked, or that `zero_grad` freed.

    None if no stack has Python code: then it was not recorded.
    """
    rows, events = replay.allocations, replay.memory.events
    if makers.is_autograd[events.stack].all():
        return np.zeros(len(rows), dtype=np.bool_)
    steps = np.append(0, np.cumsum(makers.is_optimizer[events.stack]))
    was_there = steps[np.maximum(rows.free_requested, 0)] - steps[rows.start + 1] > 0
    is_cleared = np.append(makers.clears[events.stack], False)[rows.free_requested]
    is_gradient: Mask = (rows.start != BEFORE) & makers.is_autograd[rows.stack] & (was_there | is_cleared)
    return is_gradient


def codes_without_notes(replay: Replay, stacks: Sequence[Stack]) -> Ints:
    """The code of each allocation's category, as far as lifetimes and stacks tell.

    Known for certain is whether memory was there before the recording and at its end. The stacks tell what an optimizer
    made, and what autograd made in its own threads, which have no Python code of the program.
    """
    found, makers = by_lifetime(replay), makers_of(stacks)
    found[gradients(replay, makers)] = CODES[Category.GRADIENTS]
    found[optimizer_state(replay, makers)] = CODES[Category.OPTIMIZER_STATE]
    return found


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
