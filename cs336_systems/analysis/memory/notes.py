"""Notes beside a snapshot, the names of tensors in them, and where their moments are among its events.

A clock would be too coarse, because blocks are reused within microseconds. So a moment is a `Position`, the numbers of
allocations and frees that the allocator has counted, which lies between two known events of the snapshot.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Ints, ProfileError
from cs336_systems.analysis.memory.snapshot import Action, Events
from cs336_systems.config import Phase
from cs336_systems.files import MEMORY_NOTES, read_json, write_atomically
from cs336_systems.ranges import Range
from cs336_systems.record import Count

NOTES_FORMAT_VERSION = 1
MAX_NOTES_BYTES = 256 * 2**20


class Kind(StrEnum):
    """What a block of memory holds, as the live process saw it; of several, the first in this order counts."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENT = "gradients"
    AUTOCAST_COPY = "autocast copies"
    GATHERED = "gathered parameters"
    """Whole parameters of a unit of a fully sharded model, while they are gathered."""
    SAVED = "saved activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A moment, by what one device's allocator has counted since the process began."""

    allocations: Count
    frees: Count
    """Requested frees; some may not be completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The end of a phase, or the start of a step. Bytes are the allocator's own counts at that moment."""

    step: Count
    name: str
    """The phase that ended, or `start`."""
    position: Position
    allocated_bytes: Count
    requested_bytes: Count
    """What the program asked for; the allocator rounds it up."""
    reserved_bytes: Count
    peak_allocated_bytes: Count
    """The most since the first measured step began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What lay at an address at a moment."""

    kind: Kind
    name: str
    """The parameter's name; for a saved activation the ranges around the operator that saved it, joined by ` > `."""
    address: Count
    num_bytes: Count
    """Size of the whole storage."""
    shape: tuple[int, ...]
    dtype: str
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNotes:
    """The notes beside one snapshot."""

    device: int
    start: Position
    """When recording began."""
    end: Position
    """When the snapshot was taken."""
    marks: tuple[Mark, ...]
    sightings: tuple[Sighting, ...]
    reserved_bytes: Count
    """What PyTorch had reserved at the end."""
    used_on_device_bytes: Count
    """What the driver counted as used at the end; more than was reserved, by the CUDA context, libraries and other
    processes."""
    format_version: int = NOTES_FORMAT_VERSION


def notes_path(snapshot: Path) -> Path:
    """The file with the notes on a snapshot."""
    return snapshot.with_suffix(".notes.json")


def write_notes(notes: MemoryNotes, path: Path) -> None:
    """Write the notes as JSON."""
    write_atomically(path, msgspec.json.encode(notes) + b"\n")


def read_notes(path: Path) -> MemoryNotes:
    """The notes at `path`; raise ProfileError if the file has none."""
    return read_json(
        path, MemoryNotes, MEMORY_NOTES,
        version=NOTES_FORMAT_VERSION,
        error=ProfileError,
        max_bytes=MAX_NOTES_BYTES,
    )  # fmt: skip


SEPARATOR = " > "
_AROUND = frozenset({Range.WARMUP, Range.MEASURE, Range.STEP, Range.FORWARD, Range.BACKWARD})
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\s|$)")
_BLOCK = re.compile(r"^block\.(\d+|\*)$")


def short_name(sighting: Sighting) -> str:
    """The name without the ranges around the whole model."""
    if sighting.kind is not Kind.SAVED:
        return sighting.name
    return SEPARATOR.join(part for part in sighting.name.split(SEPARATOR) if part not in _AROUND)


def like_name(name: str) -> str:
    """The name with a star in place of block numbers, so that like tensors of all blocks have the same name."""
    return _NUMBER.sub("*", name)


def block_of_ranges(name: str) -> int | None:
    """The number of the block whose range is among the ranges; None if there is none."""
    for part in name.split(SEPARATOR):
        if (found := _BLOCK.match(part)) and found.group(1) != "*":
            return int(found.group(1))
    return None


def block_of_parameter(name: str) -> int | None:
    """The number of the block that a parameter belongs to, the first number in its name; None if it has none."""
    return int(found.group()) if (found := _NUMBER.search(name)) else None


def within_block(name: str) -> str:
    """The ranges within the block, empty for the block itself; the whole name outside of blocks."""
    parts = name.split(SEPARATOR)
    inner = [index + 1 for index, part in enumerate(parts) if _BLOCK.match(part)]
    return SEPARATOR.join(parts[inner[0] :]) if inner else name


START = "start"
UNKNOWN_STEP = -1
NOWHERE = -1
"""Moment of a position that lies before the first event or contradicts the events."""
_NEXT_PHASE = {
    START: Phase.FORWARD,
    Phase.DATA: Phase.FORWARD,
    Phase.FORWARD: Phase.BACKWARD,
    Phase.BACKWARD: Phase.OPTIMIZER,
}


def moments_of(positions: Sequence[Position], events: Events, end: Position) -> Ints:
    """For each position the first moment at which the allocator's counts were those of the position; NOWHERE if none.

    The counts go backwards from `end`, the position of the last event, because the first events may be lost.
    """
    allocations, frees = (
        np.append(0, np.cumsum(events.action == action)) for action in (Action.ALLOC, Action.FREE_REQUESTED)
    )
    allocations += max(end.allocations - int(allocations[-1]), 0)
    frees += max(end.frees - int(frees[-1]), 0)
    wanted = np.array([(p.allocations, p.frees) for p in positions], dtype=np.int64).reshape(-1, 2).T
    found = np.maximum(np.searchsorted(allocations, wanted[0]), np.searchsorted(frees, wanted[1]))
    inside = np.minimum(found, len(events))
    return np.where((allocations[inside] == wanted[0]) & (frees[inside] == wanted[1]), inside, NOWHERE)


def times_s(events: Events, moments: Ints) -> NDArray[np.float64]:
    """Time of the last event before each moment, since the first event."""
    time_us = events.time_us
    if not len(time_us):
        return np.zeros(moments.shape)
    since_first_us: Ints = time_us[np.maximum(moments - 1, 0)] - time_us[0]
    return since_first_us / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Stretches of events: one before all marks, one between each mark and the next, and one after the last mark."""

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


NO_PHASES = Phases(marks=(), moments=np.zeros(0, dtype=np.int64), names=("",), steps=(UNKNOWN_STEP,))


def find_phases(events: Events, notes: MemoryNotes, last_oom: int) -> Phases:
    """The phases between the marks; a phase in which event `last_oom` ran out of memory lasts until the end."""
    moments = moments_of([mark.position for mark in notes.marks], events, notes.end)
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
    """Sentences about notes that do not fit the events."""
    counted = notes.end.allocations - notes.start.allocations
    recorded = int(np.count_nonzero(events.action == Action.ALLOC))
    if recorded < counted:
        yield (
            f"Not in the file: {counted - recorded:,} of {counted:,} allocations. Its oldest events were dropped "
            "(max_entries), and phases are placed by counting from its end."
        )
    if lost := len(notes.marks) - len(phases.marks):
        yield f"Left out: {lost} of {len(notes.marks)} marks of phases, which have no place in the events."
