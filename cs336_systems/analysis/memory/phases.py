"""The phases of a recording: stretches of its events between the marks in the notes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...config import Phase
from ..columns import Ints
from .notes import START, Mark, MemoryNotes, Position
from .snapshot import Action, Events

UNKNOWN_STEP = -1
NO_MOMENT = -1
"""Moment of a position that lies before the first event or contradicts the events."""
_NEXT_PHASE = {
    START: Phase.FORWARD,
    Phase.DATA: Phase.FORWARD,
    Phase.FORWARD: Phase.BACKWARD,
    Phase.BACKWARD: Phase.OPTIMIZER,
}


def moments_of(positions: Sequence[Position], events: Events, end: Position) -> Ints:
    """For each position the first moment at which the allocator's counts were those of the
    position; NO_MOMENT if none.

    The counts go backwards from `end`, the position of the last event, because the first events may
    be lost.
    """
    allocations, frees = (
        np.append(0, np.cumsum(events.action == action))
        for action in (Action.ALLOC, Action.FREE_REQUESTED)
    )
    allocations += max(end.allocations - int(allocations[-1]), 0)
    frees += max(end.frees - int(frees[-1]), 0)
    wanted = (
        np.array([(p.allocations, p.frees) for p in positions], dtype=np.int64).reshape(-1, 2).T
    )
    found = np.maximum(np.searchsorted(allocations, wanted[0]), np.searchsorted(frees, wanted[1]))
    inside = np.minimum(found, len(events))
    return np.where(
        (allocations[inside] == wanted[0]) & (frees[inside] == wanted[1]), inside, NO_MOMENT
    )


def times_s(events: Events, moments: Ints) -> NDArray[np.float64]:
    """Time of the last event before each moment, since the first event."""
    time_us = events.time_us
    if not len(time_us):
        return np.zeros(moments.shape)
    since_first_us: Ints = time_us[np.maximum(moments - 1, 0)] - time_us[0]
    return since_first_us / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStretches:
    """Stretches of events: one before all marks, one between each mark and the next, and one
    after the last mark.
    """

    marks: tuple[Mark, ...]
    """The marks that lie within the events."""
    moments: Ints
    """The moment of each mark."""
    names: tuple[str, ...]
    """The phase of each stretch; empty outside of all steps."""
    steps: tuple[int, ...]
    """The step of each stretch; UNKNOWN_STEP outside of all steps."""

    def at(self, event: Ints) -> Ints:
        """The stretch in which each event happened."""
        return np.searchsorted(self.moments, event, side="right")


NO_PHASES = PhaseStretches(
    marks=(), moments=np.zeros(0, dtype=np.int64), names=("",), steps=(UNKNOWN_STEP,)
)


def find_phases(events: Events, notes: MemoryNotes, last_oom: int) -> PhaseStretches:
    """The phases between the marks; a phase in which event `last_oom` ran out of memory lasts
    until the end.
    """
    moments = moments_of([mark.position for mark in notes.marks], events, notes.end)
    is_found = moments != NO_MOMENT
    marks = tuple(mark for mark, found in zip(notes.marks, is_found, strict=True) if found)
    moments = moments[is_found]
    names = ["" if mark.name == START else mark.name for mark in marks]
    steps = [UNKNOWN_STEP if mark.name == START else mark.step for mark in marks]
    is_unfinished = bool(marks) and last_oom >= moments[-1] and marks[-1].name in _NEXT_PHASE
    return PhaseStretches(
        marks=marks,
        moments=moments,
        names=(*names, _NEXT_PHASE[marks[-1].name].value if is_unfinished else ""),
        steps=(*steps, marks[-1].step if is_unfinished else UNKNOWN_STEP),
    )


def notes_on_positions(phases: PhaseStretches, notes: MemoryNotes, events: Events) -> Iterator[str]:
    """Sentences about notes that do not fit the events."""
    counted = notes.end.allocations - notes.start.allocations
    recorded = int(np.count_nonzero(events.action == Action.ALLOC))
    if recorded < counted:
        yield (
            f"Not in the file: {counted - recorded:,} of {counted:,} allocations. Its oldest "
            "events were dropped (max_entries), and phases are placed by counting from its end."
        )
    if lost := len(notes.marks) - len(phases.marks):
        yield (
            f"Left out: {lost} of {len(notes.marks)} marks of phases, which have no place in "
            "the events."
        )
