"""What PyTorch's allocator did on one device, and what it has, in columns."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cs336_systems.analysis.columns import Columns, Ints

NO_STACK = 0
"""Number of the empty stack: none was recorded."""


class Frame(NamedTuple):
    """One call of a stack."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]
"""The innermost call first."""


class Action(IntEnum):
    """What the allocator did. Sizes are what the program asked for, and of segments what CUDA gave."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    """The memory may be used again: at once, unless other streams used it too."""
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    """Of an expandable segment, a part got memory."""
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8


class BlockState(IntEnum):
    """What a block is used for when the snapshot is taken."""

    ACTIVE_ALLOCATED = 0
    ACTIVE_PENDING_FREE = 1
    """Freed, but perhaps still in use by another stream."""
    INACTIVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Events(Columns):
    """What one device's allocator did, one after the other."""

    action: Ints
    """Of `Action`."""
    address: Ints
    """For `OOM`, the bytes that were free on the device; for `SNAPSHOT` 0."""
    num_bytes: Ints
    """For `OOM`, what was asked for, rounded up by the allocator; for `SNAPSHOT`, what was active, in whole blocks."""
    stream: Ints
    time_us: Ints
    """Since 1970."""
    stack: Ints
    """Number of the call's stack, or NO_STACK. A free has the stack of the call that freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments(Columns):
    """Memory that the allocator has from CUDA when the snapshot is taken."""

    address: Ints
    num_bytes: Ints
    stream: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Columns):
    """The parts of the segments."""

    segment: Ints
    address: Ints
    num_bytes: Ints
    requested_bytes: Ints
    """What was asked for, last time."""
    state: Ints
    """Of `BlockState`."""
    stack: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device in a snapshot."""

    device: int
    events: Events
    segments: Segments
    blocks: Blocks
