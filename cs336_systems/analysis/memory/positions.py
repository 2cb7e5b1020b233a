"""Where in the events of a snapshot lie the moments of which its notes tell."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.memory.device_memory import Action, Events
from cs336_systems.analysis.memory.notes import Mark, MemoryNotes, Position
from cs336_systems.config import Phase

START = "start"
UNKNOWN_STEP = -1
NOWHERE = -1
"""The moment of what came before the first event, or fits no place between two of them."""
_NEXT_PHASE = {
    START: Phase.FORWARD,
    Phase.DATA: Phase.FORWARD,
    Phase.FORWARD: Phase.BACKWARD,
    Phase.BACKWARD: Phase.OPTIMIZER,
}


class Positions:
    """Finds moments by counting allocations and frees backwards from the last event, for the first may be lost."""

    def __init__(self, events: Events, end: Position) -> None:
        self._allocations, self._frees = (
            np.append(0, np.cumsum(events.action == action)) for action in (Action.ALLOC, Action.FREE_REQUESTED)
        )
        self._before = Position(
            allocations=max(end.allocations - int(self._allocations[-1]), 0),
            frees=max(end.frees - int(self._frees[-1]), 0),
        )

    def moments(self, positions: Sequence[Position]) -> Ints:
        """The first moment at which the allocator had counted so much, for each position; NOWHERE where none fits."""
        allocations = np.array([p.allocations for p in positions], dtype=np.int64) - self._before.allocations
        frees = np.array([p.frees for p in positions], dtype=np.int64) - self._before.frees
        found = np.maximum(np.searchsorted(self._allocations, allocations), np.searchsorted(self._frees, frees))
        inside = np.minimum(found, len(self._allocations) - 1)
        fits = (self._allocations[inside] == allocations) & (self._frees[inside] == frees)
        return np.where(fits, inside, NOWHERE)


def times_s(events: Events, moments: Ints) -> NDArray[np.float64]:
    """Of the last event before each moment, since the first event."""
    time_us = events.time_us
    if not len(time_us):
        return np.zeros(moments.shape)
    since_first_us: Ints = time_us[np.maximum(moments - 1, 0)] - time_us[0]
    return since_first_us / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The stretches of events between one mark and the next, the first before all marks, the last behind them."""

    marks: tuple[Mark, ...]
    """Those that lie within the events."""
    moments: Ints
    """Of each mark."""
    names: tuple[str, ...]
    """Of the phase that each stretch is, one more than marks; empty outside of all steps."""
    steps: tuple[int, ...]
    """Of each stretch; UNKNOWN_STEP outside of all steps."""

    def at(self, event: Ints) -> Ints:
        """The stretch in which each event happened."""
        return np.searchsorted(self.moments, event, side="right")


NO_PHASES = Phases(marks=(), moments=np.zeros(0, dtype=np.int64), names=("",), steps=(UNKNOWN_STEP,))


def find_phases(positions: Positions, notes: MemoryNotes, last_oom: int) -> Phases:
    """The phases of the marks; a phase that ran out of memory, as event `last_oom` shows, goes on to the end."""
    moments = positions.moments([mark.position for mark in notes.marks])
    is_found = moments != NOWHERE
    marks = tuple(mark for mark, found in zip(notes.marks, is_found, strict=True) if found)
    moments = moments[is_found]
    names = ["" if mark.name == START else mark.name for mark in marks]
    steps = [UNKNOWN_STEP if mark.name == START else mark.step for mark in marks]
    is_unfinished = bool(marks) and last_oom >= moments[-1] and marks[-1].name in _NEXT_PHASE
    return Phases(
        marks=marks,
        moments=moments,
        names=(*names, _NEXT_PHASE[marks[-1].name].value if is_unfinished else ""),
        steps=(*steps, marks[-1].step if is_unfinished else UNKNOWN_STEP),
    )


def notes_on_positions(phases: Phases, notes: MemoryNotes, events: Events) -> Iterator[str]:
    """What of the notes has no place in the events, in sentences."""
    counted = notes.end.allocations - notes.start.allocations
    recorded = int(np.count_nonzero(events.action == Action.ALLOC))
    if recorded < counted:
        yield (
            f"Not in the file: {counted - recorded:,} of {counted:,} allocations. Its oldest events were dropped "
            "(max_entries), and phases are placed by counting from its end."
        )
    elif recorded > counted:
        yield (
            f"The file has {recorded:,} allocations and the notes count {counted:,}: some came before the notes began."
        )
    if lost := len(notes.marks) - len(phases.marks):
        yield f"Left out: {lost} of {len(notes.marks)} marks of phases, which have no place in the events."
