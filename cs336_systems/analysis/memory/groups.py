"""The allocations of a snapshot in groups of like ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from ..columns import Ints, Mask
from .categories import NOT_SIGHTED
from .lifetimes import BEFORE
from .names import like_name, sighting_name
from .notes import Sighting
from .phases import PhaseStretches
from .profile import CATEGORIES, LikeAllocations, Place
from .replay import Replay
from .snapshot import Stack
from .stacks import code_places


@dataclass(frozen=True, kw_only=True)
class LabelledSnapshot:
    """All that is known of the allocations of one snapshot."""

    replay: Replay
    stacks: Sequence[Stack]
    category: Ints
    """For each allocation, an index into CATEGORIES."""
    sighting: Ints
    """Index of the sighting that decided the category, or NOT_SIGHTED."""
    sightings: Sequence[Sighting]
    phases: PhaseStretches


class Groups:
    """The allocations of a snapshot in groups of like ones."""

    def __init__(self, known: LabelledSnapshot) -> None:
        self._known = known
        rows, sighting = known.replay.allocations, known.sighting
        used, self._stack_of_row = np.unique(rows.stack, return_inverse=True)
        self._places = [code_places(known.stacks[number]) for number in used.tolist()]
        self._names = [sighting_name(sighting) for sighting in known.sightings]
        self._phase_names = ("", *known.phases.names)
        self._phase_of_row = np.where(rows.start == BEFORE, 0, known.phases.at(rows.start) + 1)
        columns = np.stack(
            [
                rows.requested_bytes,
                known.category,
                _numbered([like_name(name) for name in self._names], sighting),
                _numbered(self._phase_names, self._phase_of_row),
                _numbered([places[:1] for places in self._places], self._stack_of_row),
            ]
        )
        order = np.lexsort(columns[::-1])
        is_new = np.append(True, (np.diff(columns[:, order]) != 0).any(axis=0))[: len(rows)]
        self._first = order[is_new]
        """The first allocation of each group."""
        self._group = np.empty(len(rows), dtype=np.int64)
        self._group[order] = np.cumsum(is_new) - 1
        self._members = np.split(order, np.flatnonzero(is_new)[1:])

    def largest(self, chosen: Mask, live: Mask, limit: int) -> tuple[LikeAllocations, ...]:
        """At most `limit` groups of the chosen allocations, the largest first; `live` are those
        at the peak.
        """
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
        shapes, dtypes = (
            {getattr(known.sightings[i], name) for i in indices} for name in ("shape", "dtype")
        )
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
            places=_common(
                [self._places[stack] for stack in np.unique(self._stack_of_row[members]).tolist()]
            ),
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
