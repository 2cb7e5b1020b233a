"""Notes of the process that recorded a snapshot, which are kept beside it.

They name tensors of the snapshot and moments among its events. A clock would be too coarse, because
blocks are reused within microseconds. So a moment is a `Position`, the numbers of allocations and
frees that the allocator has counted, which lies between two known events of the snapshot.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from ...files import MEMORY_NOTES, read_json, write_atomically
from ...record import Count
from ..columns import ProfileError

NOTES_FORMAT_VERSION = 1
MAX_NOTES_BYTES = 256 * 2**20


class SightingKind(StrEnum):
    """What a block of memory holds, as the live process saw it; of several, the first in this
    order counts.
    """

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
    """The end of a phase, or the start of a step. Bytes are the allocator's own counts at that
    moment.
    """

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

    kind: SightingKind
    name: str
    """The parameter's name; for a saved activation the ranges around the operator that saved it,
    joined by ` > `.
    """
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
    """What the driver counted as used at the end; more than was reserved, by the CUDA context,
    libraries and other processes.
    """
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
        path,
        MemoryNotes,
        MEMORY_NOTES,
        version=NOTES_FORMAT_VERSION,
        error=ProfileError,
        max_bytes=MAX_NOTES_BYTES,
    )


START = "start"
"""Name of the mark at the start of a step."""
