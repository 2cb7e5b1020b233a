"""What only the live process knows of its memory, and no snapshot holds: which address was what, and when phases were.

Times would not do: blocks are reused within microseconds. So a moment is a `Position`, the number of allocations and
frees that the allocator has counted, which finds one place between two events of the snapshot exactly.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.files import write_atomically
from cs336_systems.record import Count

NOTES_FORMAT_VERSION = 1
MAX_NOTES_BYTES = 256 * 2**20


class Kind(StrEnum):
    """What a sighted block of memory holds."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    GRADIENT = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    AUTOCAST_COPY = "autocast copies"
    SAVED = "saved activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A moment in the life of one device's allocator."""

    allocations: Count
    """Made so far, since the process began."""
    frees: Count
    """Asked for so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A phase ended (the first mark of a step: the step began). Bytes are the allocator's own counts at that moment."""

    step: Count
    name: str
    """The phase that ended, or `start`."""
    position: Position
    allocated_bytes: Count
    requested_bytes: Count
    """What was asked for; the allocator rounds it up."""
    reserved_bytes: Count
    peak_allocated_bytes: Count
    """Since the first measured step began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """At this moment, this is what lay at this address."""

    kind: Kind
    name: str
    """Of the parameter; of a saved activation, the ranges around the operator that saved it, joined by ` > `."""
    address: Count
    num_bytes: Count
    """Of the whole storage."""
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
    """By PyTorch, at the end."""
    used_on_device_bytes: Count
    """By everybody, at the end, as the driver counts: what is more than reserved is the CUDA context, libraries and
    other processes."""
    format_version: int = NOTES_FORMAT_VERSION


def notes_path(snapshot: Path) -> Path:
    """Where the notes of a snapshot are."""
    return snapshot.with_suffix(".notes.json")


def write_notes(notes: MemoryNotes, path: Path) -> None:
    """Write the notes as JSON."""
    write_atomically(path, msgspec.json.encode(notes) + b"\n")


def read_notes(path: Path) -> MemoryNotes:
    """The notes at `path`; raise ProfileError where there are none."""
    try:
        if (size := path.stat().st_size) > MAX_NOTES_BYTES:
            raise ProfileError(path, f"{size} bytes are more than notes on a snapshot ever have ({MAX_NOTES_BYTES})")
        return msgspec.json.decode(path.read_bytes(), type=MemoryNotes)
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProfileError(path, f"no notes on a memory snapshot: {error}") from error
