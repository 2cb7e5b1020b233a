"""What PyTorch's allocator did on one device, and which memory it has at the end, in columns."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cs336_systems.analysis.columns import Columns, Ints

NO_STACK = 0
"""Number of the empty stack, for events and blocks without a recorded stack."""


class Frame(NamedTuple):
    """One call of a stack."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]
"""The innermost call first."""


class Action(IntEnum):
    """What the allocator did. An event's size is what the program asked for; that of a segment is what CUDA gave."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    """The memory may be used again; this follows the request at once, unless other streams use it too."""
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    """A part of an expandable segment got memory."""
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8


class BlockState(IntEnum):
    """Whether a block was in use when the snapshot was taken."""

    ACTIVE_ALLOCATED = 0
    ACTIVE_PENDING_FREE = 1
    """Freed by the program, but another stream may still use it."""
    INACTIVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Events(Columns):
    """What one device's allocator did, in order."""

    action: Ints
    """A value of `Action`."""
    address: Ints
    """For `OOM` the free bytes of the device; for `SNAPSHOT` 0."""
    num_bytes: Ints
    """For `OOM` the request, rounded up by the allocator; for `SNAPSHOT` the size of all active blocks."""
    stream: Ints
    time_us: Ints
    """Microseconds since 1970."""
    stack: Ints
    """Number of the stack of the call that allocated or freed, or NO_STACK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments(Columns):
    """Memory that the allocator had from CUDA when the snapshot was taken."""

    address: Ints
    num_bytes: Ints
    stream: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Columns):
    """The parts of the segments when the snapshot was taken, in use or free."""

    segment: Ints
    """Row of its segment."""
    address: Ints
    num_bytes: Ints
    requested_bytes: Ints
    """The last request that the block served."""
    state: Ints
    """A value of `BlockState`."""
    stack: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device in a snapshot."""

    device: int
    events: Events
    segments: Segments
    blocks: Blocks
