"""The allocations of a snapshot in groups of like ones."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

import numpy as np

from ..columns import Ints, Mask, groups
from .categories import NOT_SIGHTED
from .lifetimes import BEFORE
from .names import like_name, sighting_name
from .notes import Sighting
from .phases import PhaseStretches
from .profile import CATEGORIES, LikeAllocations, Place
from .replay import Replay
from .snapshot import Stack
from .stacks import code_places, module_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LabelledSnapshot:
    """The allocations of one snapshot, with the sightings and phases that its notes tell of."""

    replay: Replay
    stacks: Sequence[Stack]
    labels: Sequence[str]
    """For each stack what the program had set as metadata."""
    category: Ints
    """For each allocation, an index into CATEGORIES."""
    sighting: Ints
    """For each allocation, the sighting that decided the category, or NOT_SIGHTED."""
    sightings: Sequence[Sighting]
    row_of: Ints
    """For each sighting, its allocation, or NOT_SIGHTED."""
    sighted_at: Ints
    """For each sighting, its moment."""
    phases: PhaseStretches


class Groups:
    """The allocations of a snapshot in groups of like ones."""

    def __init__(self, snapshot: LabelledSnapshot) -> None:
        """Group the allocations that agree in size, category, name, phase and code; groups are
        numbered.
        """
        self._snapshot, self._rows = snapshot, snapshot.replay.allocations
        rows, phases = self._rows, snapshot.phases
        used, self._stack_of_row = np.unique(rows.stack, return_inverse=True)
        stacks = [snapshot.stacks[number] for number in used.tolist()]
        self._places = [code_places(stack) for stack in stacks]
        self._modules = [module_of(stack) for stack in stacks]
        self._labels = [snapshot.labels[number] for number in used.tolist()]
        self._names = [sighting_name(sighting) for sighting in snapshot.sightings]
        self._phase_names = ("", *phases.names)
        self._phase_of_row = np.where(rows.start == BEFORE, 0, phases.at(rows.start) + 1)
        like_names = [like_name(name) for name in self._names]
        innermost = [places[:1] for places in self._places]
        code = list(zip(innermost, self._modules, self._labels, strict=True))
        alike = (
            rows.requested_bytes,
            snapshot.category,
            _numbered(like_names, snapshot.sighting),
            _numbered(self._phase_names, self._phase_of_row),
            _numbered(code, self._stack_of_row),
        )
        _, group = np.unique(np.stack(alike), axis=1, return_inverse=True)
        self._group = group.reshape(-1)
        self._members = [members for _, members in groups(self._group)]
        self._first = np.array([members[0] for members in self._members], dtype=np.int64)

    def largest(self, chosen: Mask, live: Mask, limit: int) -> tuple[LikeAllocations, ...]:
        """At most `limit` groups of the chosen allocations, the largest first; `live` are those
        at the peak.
        """
        counts = np.bincount(self._group[chosen], minlength=len(self._first))
        order = np.lexsort((-counts, -self._rows.requested_bytes[self._first]))
        chosen_groups = order[counts[order] > 0][:limit]
        return tuple(self._like_allocations(group, live) for group in chosen_groups.tolist())

    def at_peak(self, live: Mask) -> tuple[LikeAllocations, ...]:
        """The groups that have live allocations, those first that take most memory."""
        num_bytes = np.zeros(len(self._first), dtype=np.int64)
        np.add.at(num_bytes, self._group[live], self._rows.num_bytes[live])
        order = np.argsort(-num_bytes, kind="stable")
        live_groups = order[num_bytes[order] > 0]
        return tuple(self._like_allocations(group, live) for group in live_groups.tolist())

    def _like_allocations(self, group: int, live: Mask) -> LikeAllocations:
        """Describe one group; `live` says which allocations of the snapshot exist at the peak.

        A name in which the group's tensors differ is generalised, and such a shape or type is left
        out.
        """
        snapshot, rows, members = self._snapshot, self._rows, self._members[group]
        first = members[0]
        at_peak = members[live[members]]
        stacks = np.unique(self._stack_of_row[members]).tolist()
        sighted = snapshot.sighting[members]
        indices = sighted[sighted != NOT_SIGHTED].tolist()
        sightings = [snapshot.sightings[index] for index in indices]
        names = {self._names[index] for index in indices}
        if len(names) > 1:
            names = {like_name(name) for name in names}
        shapes = {sighting.shape for sighting in sightings}
        dtypes = {sighting.dtype for sighting in sightings}
        return LikeAllocations(
            num_bytes=int(rows.num_bytes[members].max()),
            requested_bytes=int(rows.requested_bytes[first]),
            count=len(members),
            count_at_peak=len(at_peak),
            bytes_at_peak=int(rows.num_bytes[at_peak].sum()),
            category=CATEGORIES[snapshot.category[first]],
            name=_agreed(names, self._labels[stacks[0]]),
            shape=_agreed(shapes, ()),
            dtype=_agreed(dtypes, ""),
            phase=self._phase_names[self._phase_of_row[first]],
            places=_common([self._places[stack] for stack in stacks]),
            module=self._modules[stacks[0]],
        )


def _agreed(values: set[T], otherwise: T) -> T:
    """The value, if there is only one."""
    return values.pop() if len(values) == 1 else otherwise


def _common(places: Sequence[tuple[Place, ...]]) -> tuple[Place, ...]:
    """The places that several stacks share, from the innermost place on."""
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*places, strict=False))
    return tuple(column[0] for column in shared)


def _numbered(values: Sequence[Hashable], index: Ints) -> Ints:
    """For each index a number, equal if the values are equal; -1 for the index -1."""
    number_of: dict[Hashable, int] = {}
    numbers = [number_of.setdefault(value, len(number_of)) for value in values]
    return np.array([*numbers, -1], dtype=np.int64)[index]
