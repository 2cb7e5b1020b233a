"""Groups of like allocations: those with the same requested size, category, name, phase and line of code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.memory.allocations import Replay
from cs336_systems.analysis.memory.categories import CATEGORIES, NOT_SIGHTED, Contents
from cs336_systems.analysis.memory.device_memory import Stack
from cs336_systems.analysis.memory.formulas import HALF_BYTES, OR, Formulas, Role, element_bytes
from cs336_systems.analysis.memory.lifetimes import BEFORE
from cs336_systems.analysis.memory.names import like_name, short_name, what_saved
from cs336_systems.analysis.memory.notes import Kind, Sighting
from cs336_systems.analysis.memory.places import places_of
from cs336_systems.analysis.memory.positions import Phases
from cs336_systems.analysis.memory.profile import Category, LikeAllocations, Place
from cs336_systems.config import Phase

_ROLE_OF_PHASE: Mapping[str, Role] = {Phase.FORWARD: Role.ACTIVATION, Phase.OPTIMIZER: Role.WEIGHT}
"""The role of tensors that a phase allocates; backward is absent because it allocates both roles."""
_BACKWARD, _OPTIMIZER_FILES = "backward", ("/optim/", "/optimizer.py")


@dataclass(frozen=True, kw_only=True)
class Known:
    """All that is known of the allocations of one snapshot."""

    replay: Replay
    stacks: Sequence[Stack]
    contents: Contents
    sightings: Sequence[Sighting]
    phases: Phases
    formulas: Formulas


class Groups:
    """The allocations of a snapshot in groups of like ones."""

    def __init__(self, known: Known) -> None:
        self._known = known
        rows, sighting = known.replay.allocations, known.contents.sighting
        used, self._stack_of_row = np.unique(rows.stack, return_inverse=True)
        self._stacks = [known.stacks[number] for number in used.tolist()]
        self._places = [places_of(stack) for stack in self._stacks]
        self._names = [short_name(sighting) for sighting in known.sightings]
        self._phase_names = ("", *known.phases.names)
        self._phase_of_row = np.where(rows.start == BEFORE, 0, known.phases.at(rows.start) + 1)
        saved = {element_bytes(sighting.dtype) for sighting in known.sightings if sighting.kind is Kind.SAVED}
        self._may_have_half = not saved or HALF_BYTES in saved
        columns = np.stack([
            rows.requested_bytes,
            known.contents.category,
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
        """The groups of the chosen allocations, the largest allocations first; `live` are the allocations at the peak.

        Returns at least `limit` groups, if there are so many, and all groups of the smallest size among these.
        """
        counts = np.bincount(self._group[chosen], minlength=len(self._first))
        sizes = self._known.replay.allocations.requested_bytes[self._first]
        order = np.lexsort((-counts, -sizes))
        order = order[counts[order] > 0]
        return tuple(self._row(group, live) for group in order[np.isin(sizes[order], sizes[order[:limit]])].tolist())

    def at_peak(self, live: Mask) -> tuple[LikeAllocations, ...]:
        """The groups that have live allocations, those first that take most memory."""
        num_bytes = np.zeros(len(self._first), dtype=np.int64)
        np.add.at(num_bytes, self._group[live], self._known.replay.allocations.num_bytes[live])
        order = np.argsort(-num_bytes, kind="stable")
        return tuple(self._row(group, live) for group in order[num_bytes[order] > 0].tolist())

    def _row(self, group: int, live: Mask) -> LikeAllocations:
        known, first, members = self._known, int(self._first[group]), self._members[group]
        rows, at_peak = known.replay.allocations, members[live[members]]
        indices = [index for index in known.contents.sighting[members].tolist() if index != NOT_SIGHTED]
        sightings = list({(s.shape, s.dtype): s for s in map(known.sightings.__getitem__, reversed(indices))}.values())
        sightings.reverse()  # the first of each shape and data type
        shapes, dtypes = {one.shape for one in sightings}, {one.dtype for one in sightings}
        names = {self._names[index] for index in indices}
        name = like_name(names.pop()) if len(names) > 1 else "".join(names)
        return LikeAllocations(
            num_bytes=int(rows.num_bytes[members].max()),
            requested_bytes=int(rows.requested_bytes[first]),
            count=len(members),
            count_at_peak=len(at_peak),
            bytes_at_peak=int(rows.num_bytes[at_peak].sum()),
            category=CATEGORIES[known.contents.category[first]],
            name=name,
            shape=shapes.pop() if len(shapes) == 1 else (),
            dtype=dtypes.pop() if len(dtypes) == 1 else "",
            phase=self._phase_names[self._phase_of_row[first]],
            explanation=self._explanation(members, sightings, name),
            places=_common([self._places[stack] for stack in np.unique(self._stack_of_row[members]).tolist()]),
        )

    def _explanation(self, members: Ints, sightings: Sequence[Sighting], name: str) -> str:
        """The formulas of all members, each once."""
        formulas = self._known.formulas
        texts = [explain_sighting(formulas, sighting, name) for sighting in sightings] or self._unsighted(members)
        return OR.join(dict.fromkeys(formula for text in texts for formula in text.split(OR) if formula))

    def _unsighted(self, members: Ints) -> list[str]:
        """Explanations of allocations without a sighting, one for each role that one of them may have."""
        known, first = self._known, int(members[0])
        rows, places = known.replay.allocations, self._places[self._stack_of_row[first]]
        requested, function = int(rows.requested_bytes[first]), places[0].function if places else ""
        _, different = np.unique(2 * self._stack_of_row[members] + (rows.start[members] == BEFORE), return_index=True)
        roles = dict.fromkeys(self._role(row) for row in members[different].tolist())
        return [known.formulas.unsighted(requested, role, function, self._may_have_half) for role in roles]

    def _role(self, row: int) -> Role | None:
        """The role of an allocation without a sighting; None if it is not known."""
        rows, contents = self._known.replay.allocations, self._known.contents
        phase = self._phase_names[self._phase_of_row[row]]
        if phase:
            return _ROLE_OF_PHASE.get(phase)
        if CATEGORIES[contents.category[row]] is Category.HELD or rows.start[row] == BEFORE:
            return Role.WEIGHT
        return _role_of_code(self._stacks[self._stack_of_row[row]])


def explain_sighting(formulas: Formulas, sighting: Sighting, name: str) -> str:
    """The formula of a sighted storage; `name` is the sighting's name as tables show it."""
    is_saved = sighting.kind is Kind.SAVED
    role = Role.ACTIVATION if is_saved else Role.WEIGHT
    return formulas.sighted(
        sighting.num_bytes, sighting.shape, sighting.dtype, role, what_saved(name) if is_saved else ""
    )


def _role_of_code(stack: Stack) -> Role | None:
    """The role of what code allocates outside of known phases; None for backward (both roles) and without a stack."""
    if not stack or any(frame.name == _BACKWARD for frame in stack):
        return None
    if any(word in frame.filename for frame in stack for word in _OPTIMIZER_FILES):
        return Role.WEIGHT
    return Role.ACTIVATION


def _common(places: Sequence[tuple[Place, ...]]) -> tuple[Place, ...]:
    """The places that several stacks share, from the innermost place on."""
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*places, strict=False))
    return tuple(column[0] for column in shared)


def _numbered(values: Sequence[str | tuple[Place, ...]], index: Ints) -> Ints:
    """For each index a number, equal if the values are equal; -1 for the index -1."""
    number_of: dict[str | tuple[Place, ...], int] = {}
    numbers = [number_of.setdefault(value, len(number_of)) for value in values]
    return np.array([*numbers, -1], dtype=np.int64)[index]
