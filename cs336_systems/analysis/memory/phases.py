"""The phases of a recording: stretches of its events between the marks in the notes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...config import Phase
from ..columns import Ints
from .notes import START, Mark, MemoryNotes, Position
from .snapshot import Action, AllocatorEvents

UNKNOWN_STEP = -1
NO_MOMENT = -1
"""Moment of a position that lies before the first event or contradicts the events."""
_NEXT_PHASE = {
    START: Phase.FORWARD,
    Phase.DATA: Phase.FORWARD,
    Phase.FORWARD: Phase.BACKWARD,
    Phase.BACKWARD: Phase.OPTIMIZER,
}


def moments_of(positions: Sequence[Position], events: AllocatorEvents, end: Position) -> Ints:
    """For each position the first moment at which the allocator's counts were those of the
    position; NO_MOMENT if none.

    The counts go backwards from `end`, the position of the last event, because the first events may
    be lost.
    """
    allocations = np.append(0, np.cumsum(events.action == Action.ALLOC))
    allocations += max(end.allocations - int(allocations[-1]), 0)
    frees = np.append(0, np.cumsum(events.action == Action.FREE_REQUESTED))
    frees += max(end.frees - int(frees[-1]), 0)
    wanted_allocations = np.array([position.allocations for position in positions], dtype=np.int64)
    wanted_frees = np.array([position.frees for position in positions], dtype=np.int64)
    moment = np.searchsorted(allocations, wanted_allocations)
    moment = np.maximum(moment, np.searchsorted(frees, wanted_frees))
    moment = np.minimum(moment, len(events))
    is_there = (allocations[moment] == wanted_allocations) & (frees[moment] == wanted_frees)
    return np.where(is_there, moment, NO_MOMENT)


def times_s(events: AllocatorEvents, moments: Ints) -> NDArray[np.float64]:
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


def find_phases(events: AllocatorEvents, notes: MemoryNotes, last_oom: int) -> PhaseStretches:
    """The phases between the marks; a phase in which event `last_oom` ran out of memory lasts
    until the end.
    """
    moments = moments_of([mark.position for mark in notes.marks], events, notes.end)
    is_there = moments != NO_MOMENT
    marks = tuple(notes.marks[index] for index in np.flatnonzero(is_there))
    moments = moments[is_there]
    names, steps = [], []
    for mark in marks:
        is_start = mark.name == START
        names.append("" if is_start else mark.name)
        steps.append(UNKNOWN_STEP if is_start else mark.step)
    name, step = "", UNKNOWN_STEP
    if marks and last_oom >= moments[-1] and marks[-1].name in _NEXT_PHASE:
        name, step = _NEXT_PHASE[marks[-1].name].value, marks[-1].step
    return PhaseStretches(marks=marks, moments=moments, names=(*names, name), steps=(*steps, step))


def notes_on_positions(
    phases: PhaseStretches, notes: MemoryNotes, events: AllocatorEvents
) -> Iterator[str]:
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
