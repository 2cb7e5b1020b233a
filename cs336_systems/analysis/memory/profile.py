"""Where the memory of the recorded steps went: all that is kept of one snapshot, and all that its tables are made of.

Bytes are those of the allocator's blocks, as `torch.cuda.memory_allocated` counts them, unless said otherwise. So the
categories of any moment add up to what the allocator itself said then. Requested bytes are what the program asked for,
the sizes of its tensors: a block is rounded up to 512 bytes, and may hold a rest of up to a MiB that is not split off.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.files import MEMORY_PROFILE, encode_json, read_json, write_atomically
from cs336_systems.record import Count

MEMORY_FORMAT_VERSION = 2
MAX_PROFILE_BYTES = 256 * 2**20


MIN_LATER = 32
"""Allocations made while a tensor stays, if it is not for the next few operators alone.

Of transformers written out, xl without a graph keeps nothing for more than 31, the residual stream around a block; 2.7B
with a graph keeps 99 % of its activations for more.
"""


class Category(StrEnum):
    """What a block of memory holds."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    AUTOCAST_COPIES = "autocast copies"
    SAVED = "saved activations"
    """By autograd, for backward; what a checkpoint computes again in backward too."""
    TEMPORARY = "temporary"
    """What came or went in the recording and is none of the others."""
    HELD = "held throughout"
    """There before the recording and after it, and not known to be any of the others."""
    LATER = "held until later"
    """Came or went in the recording, which has no notes beside it, and stayed while MIN_LATER or more others were
    allocated: what a program keeps for later, as autograd keeps activations for backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryBytes:
    """How much of one category there was."""

    category: Category
    num_bytes: Count
    requested_bytes: Count
    count: Count
    """Blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory at one moment; `categories` add up to `allocated_bytes`."""

    step: int
    """From 0; -1 where the snapshot knows no steps."""
    phase: str
    """The phase that has just ended here, or in which it is; `start` at the start of a step, empty where unknown."""
    time_s: float
    """Since the first event."""
    allocated_bytes: Count
    reserved_bytes: int
    categories: tuple[CategoryBytes, ...]
    counted_bytes: Count | None
    """What the allocator itself said it had allocated, at the boundary of a phase; None elsewhere."""
    counted_requested_bytes: Count | None
    """What it said it had been asked for, then; what another stream may still use is among it."""

    @property
    def requested_bytes(self) -> int:
        """What was asked for of all that was allocated."""
        return sum(category.requested_bytes for category in self.categories)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """One phase of one step, from the boundary before it to its own; no point of it is left out."""

    step: int
    phase: str
    begin_s: float
    """Since the first event, as all times."""
    end_s: float
    begin_bytes: Count
    peak_bytes: Count
    """Allocated at most."""
    peak_s: float
    """The first time that so much was."""
    end_bytes: Count
    is_finished: bool
    """Whether the phase came to its end; else memory ran out in it, and its end is the request that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of code on the stack of an allocation."""

    file: str
    """The last two parts of its path: the others tell of one machine."""
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeAllocations:
    """Allocations of one requested size, category, name and place, together."""

    num_bytes: Count
    """Of the largest of their blocks."""
    requested_bytes: Count
    """Of each."""
    count: Count
    count_at_peak: Count
    bytes_at_peak: Count
    """Of all blocks that were there at the peak."""
    category: Category
    name: str
    """Of the parameter, or the ranges around the operator that saved it; empty where unknown. Block numbers are as they
    are where all are of one block, a star where they are of several."""
    shape: tuple[int, ...]
    """Empty where unknown, or not the same of all; so is `dtype`."""
    dtype: str
    phase: str
    """In which it was allocated; empty where unknown."""
    explanation: str
    """The formula that gives the bytes, such as `batch x heads x T x T x 4`, and what that is; each of several that it
    may be; empty for none."""
    places: tuple[Place, ...]
    """The innermost first, as far out as all have the same, outside of PyTorch, and of all installed packages where
    something is left then; empty where there is no stack, as in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One contributor to what a block of the model saves for backward."""

    name: str
    """Ranges within the block around the operator that saved it."""
    shape: tuple[int, ...]
    dtype: str
    num_bytes: Count
    explanation: str
    is_recomputed: bool
    """Made in backward, by a checkpoint that computes the block again: it is not kept from forward on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """One block of the model, in one step. Its bytes are requested ones: exactly those of the tensors."""

    name: str
    saved_bytes: Count
    """Saved for backward by what runs in the block, each storage once."""
    saved: tuple[SavedTensor, ...]
    """The largest first."""
    parameter_bytes: Count
    gradient_bytes: Count

    @property
    def recomputed_bytes(self) -> int:
        """Of `saved_bytes`, what is there only while backward computes the block again."""
        return sum(tensor.num_bytes for tensor in self.saved if tensor.is_recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What was allocated by category over time, in at most some thousand points: each is the peak of its interval."""

    time_s: tuple[float, ...]
    categories: tuple[Category, ...]
    """From the bottom of the picture up: what stays first."""
    num_bytes: tuple[tuple[Count, ...], ...]
    """One row per category."""
    reserved_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """Memory that the allocator could not give, and when that was."""

    requested_bytes: Count
    """As the allocator rounded it."""
    free_bytes: Count
    """On the device."""
    allocated_bytes: Count
    reserved_bytes: int
    step: int
    """-1 where the snapshot knows no steps."""
    phase: str
    """Empty where unknown."""
    time_s: float
    """Since the first event."""
    event: Count
    """Events of the recording before it."""
    places: tuple[Place, ...]
    """As those of an allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorWork:
    """What the allocator had to do with the device over the recording."""

    allocations: Count
    events: Count
    """Of all kinds."""
    segments_allocated: Count
    segments_freed: Count
    out_of_memory: Count
    """Requests that failed."""
    first_failure: FailedRequest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """One snapshot of one device, explained."""

    source: str
    device: int
    num_steps: Count
    """0 where the snapshot knows no steps."""
    num_allocations: Count
    """In use at some time of the recording, those held throughout not counted."""
    held_bytes: Count
    """Throughout."""
    peak: Moment
    """`phase` is the one in which it is."""
    peak_requested_bytes: Count
    """At most asked for at a time: what PyTorch's viewer draws, which knows blocks by what was asked for."""
    peak_recorded_bytes: Count
    """At most, if what was held throughout counts with its blocks, and what was recorded with what was asked for: the
    sizes of the events on top of what the allocator counted before them."""
    peak_reserved_bytes: int
    boundaries: tuple[Moment, ...]
    phases: tuple[PhaseMemory, ...]
    """Between the boundaries, and one that ran out of memory behind the last."""
    largest: tuple[LikeAllocations, ...]
    """By bytes of each: the first some dozens, of `num_allocations`, and all others of the last size among them."""
    at_peak: tuple[LikeAllocations, ...]
    """What the peak consists of, by bytes together."""
    blocks: tuple[BlockMemory, ...]
    """Of the first step that saved anything; empty where nothing tells which block saved what."""
    timeline: Timeline
    work: AllocatorWork
    outside_bytes: int | None
    """Used on the device at the end and not reserved by PyTorch: the CUDA context, libraries, other processes."""
    residual_stream_bytes: Count | None
    """One tensor of batch x T x d_model in fp32; None where the model is not known."""
    notes: tuple[str, ...]
    format_version: int = MEMORY_FORMAT_VERSION

    @property
    def rounding_bytes_at_peak(self) -> int:
        """By which the blocks at the peak are larger than what was asked for; part of what was allocated then."""
        return self.peak.allocated_bytes - self.peak.requested_bytes


def encode_memory_profile(profile: MemoryProfile) -> bytes:
    """The profile as indented JSON."""
    return encode_json(profile, indent=1)


def write_memory_profile(profile: MemoryProfile, path: Path) -> None:
    """Write the profile as JSON."""
    write_atomically(path, encode_memory_profile(profile))


def read_memory_profile(path: Path) -> MemoryProfile:
    """The profile at `path`; raise ProfileError where there is none."""
    profile = read_json(
        path, MemoryProfile, MEMORY_PROFILE,
        version=MEMORY_FORMAT_VERSION,
        error=ProfileError,
        max_bytes=MAX_PROFILE_BYTES,
        if_older="requested bytes are not in it; explain the snapshot again (cs336 memory SNAPSHOT --output DIR)",
    )  # fmt: skip
    if wrong := next(_contradictions(profile), None):
        raise ProfileError(path, f"not a whole memory profile: {wrong}; explain the snapshot again")
    return profile


def _contradictions(profile: MemoryProfile) -> Iterator[str]:
    """What cannot be, of a file that was changed by hand."""
    for moment in (profile.peak, *profile.boundaries):
        if (total := sum(row.num_bytes for row in moment.categories)) != moment.allocated_bytes:
            yield (
                f"at {moment.time_s:.6f} s the categories add up to {total} bytes, "
                f"needed all {moment.allocated_bytes} that are allocated"
            )
    timeline, points = profile.timeline, len(profile.timeline.time_s)
    rows = (timeline.reserved_bytes, *timeline.num_bytes)
    if not points or any(len(row) != points for row in rows) or len(timeline.num_bytes) != len(timeline.categories):
        yield "its timeline needs points, and at each of them the bytes of every category and those reserved"
