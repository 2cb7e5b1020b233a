"""The profile of a memory snapshot, of which all its tables are made.

Bytes are those of the allocator's blocks, as `torch.cuda.memory_allocated` counts them, unless a
field says otherwise. So the categories of any moment add up to what the allocator itself counted
then. Requested bytes are what the program asked for, the sizes of its tensors: the allocator rounds
a request up to 512 bytes, and up to 1 MiB more may be left in the block because the allocator does
not split it off. Times are seconds since the first event.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ...files import MEMORY_PROFILE, encode_json, read_json, write_atomically
from ...record import Count
from ..columns import ProfileError

MEMORY_FORMAT_VERSION = 2
MAX_PROFILE_BYTES = 256 * 2**20
MIN_LATER = 32
"""A tensor that stays while this many others are allocated is held for later, not for the next few
operators.

Measured on the reference model: xl without a graph holds nothing for more than 31 allocations (the
residual stream around a block); 2.7B with a graph holds 99 % of its activations for more.
"""


class Category(StrEnum):
    """What a block of memory holds."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    AUTOCAST_COPIES = "autocast copies"
    SAVED = "saved activations"
    """What autograd saves for backward, and what a checkpoint computes again in backward."""
    TEMPORARY = "temporary"
    """Blocks allocated or freed in the recording that belong to no other category."""
    HELD = "held throughout"
    """Blocks that existed before the recording and after it, and are not known to belong to
    another category.
    """
    LATER = "held until later"
    """Only without notes, as the two that follow: blocks allocated and freed in the recording that
    stayed while MIN_LATER or more others were allocated, as the activations do that autograd saves
    for backward.
    """
    EARLIER = "from before"
    """Blocks that existed before the recording and were freed in it."""
    KEPT = "kept at the end"
    """Blocks allocated in the recording that still existed at its end."""
    POOL = "private pools"
    """Blocks of unknown use in pools of their own, such as those of CUDA graphs."""


CATEGORIES = tuple(Category)
CATEGORY_CODES = {category: code for code, category in enumerate(CATEGORIES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryBytes:
    """How much memory one category had at a moment."""

    category: Category
    num_bytes: Count
    requested_bytes: Count
    count: Count
    """Number of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory at one moment; `categories` add up to `allocated_bytes`."""

    step: int
    """Counted from 0; -1 if the snapshot has no notes on steps."""
    phase: str
    """At a boundary the phase that ends there, or `start`; at a peak the phase it lies in. Empty
    if unknown.
    """
    time_s: float | None
    """None if the file has no times, as those of PyTorch until 2.1."""
    allocated_bytes: Count
    reserved_bytes: int
    categories: tuple[CategoryBytes, ...]
    counted_bytes: Count | None
    """At a boundary, the allocated bytes that the allocator itself counted; None elsewhere."""
    counted_requested_bytes: Count | None
    """At a boundary, the requested bytes that it counted, freed blocks that another stream may
    still use included.
    """
    ranges: str = ""
    """Ranges of `record_function` that were open then, the outermost first, joined by ` > `; empty
    if the file has none.
    """

    @property
    def requested_bytes(self) -> int:
        """The requested bytes of all allocated blocks."""
        return sum(category.requested_bytes for category in self.categories)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """One phase of one step, from the boundary before it to its own, or to the request for which
    memory ran out.
    """

    step: int
    phase: str
    begin_s: float | None
    end_s: float | None
    """None if the file has no times; `begin_s` likewise."""
    peak_bytes: Count
    """The most that was allocated at any moment of the phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of code on the stack of an allocation."""

    file: str
    """The last two parts of its path; the others say more about the machine than about the
    program.
    """
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeAllocations:
    """Allocations with the same requested size, category, name, phase and place, counted
    together.
    """

    num_bytes: Count
    """Size of the largest of their blocks."""
    requested_bytes: Count
    """Requested bytes of each allocation."""
    count: Count
    count_at_peak: Count
    bytes_at_peak: Count
    """Size of all their blocks that were allocated at the peak."""
    category: Category
    name: str
    """The parameter's name, the ranges around the operator that saved the tensor, or without notes
    the `user_metadata` that the program had set; empty if unknown. A star stands for the number of
    the model's block if the allocations belong to several blocks.
    """
    shape: tuple[int, ...]
    """Empty if unknown or not the same for all; `dtype` likewise."""
    dtype: str
    phase: str
    """The phase in which they were allocated; empty if unknown."""
    places: tuple[Place, ...]
    """The calls that all stacks share, the innermost first. Calls in PyTorch are left out, and so
    are those in installed packages unless nothing else is left. Empty if there is no stack, as in
    backward.
    """
    module: str = ""
    """Class of the innermost module whose `forward` all stacks share; empty if the stacks name
    functions without their classes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One of the tensors that a block of the model saves for backward."""

    name: str
    """The ranges within the block around the operator that saved it."""
    shape: tuple[int, ...]
    dtype: str
    num_bytes: Count
    is_recomputed: bool
    """Whether a checkpoint allocated it in backward, when it computed the block again, instead
    of keeping it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """One block of the model in one step. All bytes are requested bytes, the exact sizes of the
    tensors.
    """

    name: str
    saved_bytes: Count
    """What operators in the block save for backward, each storage once."""
    saved: tuple[SavedTensor, ...]
    """The largest first."""
    parameter_bytes: Count
    gradient_bytes: Count

    @property
    def recomputed_bytes(self) -> int:
        """The part of `saved_bytes` that exists only while backward computes the block again."""
        return sum(tensor.num_bytes for tensor in self.saved if tensor.is_recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What was allocated by category over time; each of at most some thousand points is the peak
    of its interval.
    """

    time_s: tuple[float, ...]
    """Empty if the file has no times."""
    categories: tuple[Category, ...]
    """From the bottom of the picture to the top: what stays is at the bottom."""
    num_bytes: tuple[tuple[Count, ...], ...]
    """One row for each category."""
    reserved_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What the allocator had reserved at a moment in segments of one kind of one pool."""

    pool: int | None
    """0 for the memory that all code shares, another number for each private pool; None, as the
    two below, for segments that were gone when the snapshot was taken.
    """
    is_small: bool | None
    """Whether the segments serve requests of at most 1 MiB."""
    is_expandable: bool | None
    reserved_bytes: int
    used_bytes: int
    """The part that was in blocks."""

    @property
    def idle_private_bytes(self) -> int:
        """The part of a private pool that was in no block."""
        return max(self.reserved_bytes - self.used_bytes, 0) if self.pool else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDevice:
    """A device of the snapshot that the profile does not explain."""

    device: int
    peak_bytes: Count
    out_of_memory: Count
    """Number of requests that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that the allocator could not serve."""

    requested_bytes: Count
    """Rounded up by the allocator."""
    free_bytes: Count
    """Free on the device at that moment."""
    allocated_bytes: Count
    reserved_bytes: int
    step: int
    """-1 if the snapshot has no notes on steps."""
    phase: str
    """Empty if unknown."""
    time_s: float | None
    """None if the file has no times."""
    event: Count
    """Number of events before it."""
    places: tuple[Place, ...]
    """The calls that made the request, chosen as those of `LikeAllocations`."""
    pools: tuple[PoolMemory, ...] = ()
    """What was reserved then; they add up to `reserved_bytes`."""
    ranges: str = ""
    """As in `Moment`."""
    module: str = ""
    """As in `LikeAllocations`."""

    @property
    def idle_private_bytes(self) -> int:
        """Reserved then in private pools, in no block."""
        return sum(pool.idle_private_bytes for pool in self.pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorWork:
    """What the allocator did during the recording."""

    events: Count
    segments_allocated: Count
    segments_freed: Count
    out_of_memory: Count
    """Number of requests that failed."""
    first_failure: FailedRequest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """One snapshot of one device, explained."""

    source: str
    device: int
    num_steps: Count
    """0 if the snapshot has no notes on steps."""
    held_bytes: Count
    """Blocks held throughout the recording."""
    peak: Moment
    peak_requested_bytes: Count
    """The most requested bytes in use at any moment. PyTorch's viewer draws this, because it
    knows only requests.
    """
    peak_reserved_bytes: int
    boundaries: tuple[Moment, ...]
    phases: tuple[PhaseMemory, ...]
    """The phases between the boundaries, and behind the last boundary the phase that ran out of
    memory, if any did.
    """
    largest: tuple[LikeAllocations, ...]
    """The groups with the largest allocations, without those held throughout: some dozens."""
    at_peak: tuple[LikeAllocations, ...]
    """All groups at the peak, those first that take most memory together."""
    blocks: tuple[BlockMemory, ...]
    """In the first step that saved anything; empty if no notes say which block saved what."""
    timeline: Timeline
    work: AllocatorWork
    outside_bytes: int | None
    """Used on the device at the end but not reserved by PyTorch: the CUDA context, libraries,
    other processes.
    """
    notes: tuple[str, ...]
    private_bytes: Count = 0
    """Reserved at the peak in private pools, as CUDA graphs have: only their own allocations use
    it.
    """
    idle_private_bytes: Count = 0
    """The part of `private_bytes` that is in no block at the peak; a graph that is replayed uses
    it all the same.
    """
    is_expandable: bool = False
    """Whether the allocator had expandable segments already."""
    lacks_segments: bool = False
    """Segments are missing in the file, so reserved bytes are a lower bound; so is the peak, as of
    blocks from before the recording only the segments tell.
    """
    doubts: tuple[str, ...] = ()
    """Sentences on what cannot be in so many events that no sum is sure."""
    other_devices: tuple[OtherDevice, ...] = ()
    format_version: int = MEMORY_FORMAT_VERSION

    @property
    def rounding_bytes_at_peak(self) -> int:
        """How much larger the blocks at the peak are than their requests."""
        return self.peak.allocated_bytes - self.peak.requested_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes that were reserved at the peak, not for private pools, and in no block: cache,
        and rests of blocks.
        """
        return max(
            self.peak.reserved_bytes - self.peak.allocated_bytes - self.idle_private_bytes, 0
        )

    @property
    def has_notes(self) -> bool:
        """Whether the recording process said what blocks held."""
        return self.outside_bytes is not None


def encode_memory_profile(profile: MemoryProfile) -> bytes:
    """The profile as indented JSON."""
    return encode_json(profile, indent=1)


def write_memory_profile(profile: MemoryProfile, path: Path) -> None:
    """Write the profile as JSON."""
    write_atomically(path, encode_memory_profile(profile))


def read_memory_profile(path: Path) -> MemoryProfile:
    """The profile at `path`; raise ProfileError if the file has none."""
    return read_json(
        path,
        MemoryProfile,
        MEMORY_PROFILE,
        version=MEMORY_FORMAT_VERSION,
        error=ProfileError,
        max_bytes=MAX_PROFILE_BYTES,
        if_older=(
            "requested bytes are not in it; explain the snapshot again (cs336 memory SNAPSHOT "
            "--output DIR)"
        ),
    )
