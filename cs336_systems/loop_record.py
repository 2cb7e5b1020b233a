"""What was seen of a watched loop besides the times of its phases."""

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """What can make a step of a loop, with the time before it, longer than others.

    The order is from the innermost: a garbage collection may be part of an evaluation.
    """

    COLLECTION = "garbage collection"
    SAVING = "torch.save"
    DATA = "waiting for data"
    COMPILATION = "compilation"
    EVALUATION = "evaluation"
    ALLOCATOR = "allocation on the GPU"
    CLOCK = "lower clock"
    TOKENS = "more tokens"
    RANK = "a later rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """What was seen of one cause in one step and the time before it."""

    cause: Cause
    seconds: float | None = None
    """None where it was seen that it happened, but not how long it took."""
    count: int = 1
    details: tuple[str, ...] = ()
    """What else was seen: what was compiled for, the number of segments, the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStep:
    """A measured step that, with the time before it, lies beyond the spread of the others."""

    number: int
    """Its position among the measured steps of the record, from 0."""
    excess_s: float
    """How much longer than usual it took."""
    where: str
    """The phase that took more than usual by most, or "between steps"."""
    backward_s: float = 0.0
    """How much longer than usual its backward took, in which ranks wait for each other."""
    pauses: tuple[Pause, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """What PyTorch's allocator has given out on the GPU at the end of steps, where it rises."""

    bytes_per_step: float
    since_step: int
    """The measured step, from 0, from which it rises."""
    to_step: int
    """The last measured step at which it was read."""
    holders: tuple[str, ...] = ()
    """What was alive about as often as there were steps; empty where nothing was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRank:
    """One of several ranks of a loop."""

    rank: int
    world_size: int
    run: str = ""
    """The same for all ranks of the loop; empty if it was not learnt."""
    own_s: float | None = None
    """Median time of a step, with the time before it, outside of backward and the optimizer, where
    the rank waits for no other one. None where that is not seen, as with FSDP, which waits in
    forward too.
    """
    first_step: int = 0
    """How many measured steps of the loop came before those that are described here."""
    late_steps: tuple[SlowStep, ...] = ()
    """The steps whose time, counted as for `own_s`, lies beyond the spread of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFlops:
    """FLOPs of the matmuls, convolutions and attentions of a mean step; a multiply-add is two."""

    per_step: float
    """Of the model: a forward pass and a backward pass for each that was seen."""
    recomputed_per_step: float
    """What backward computes again in addition, between checkpoints and in fused attention."""
    modules_with_hooks: int = 0
    """Modules whose forward hooks, put there by others, are left out: they may compute, too."""


CACHED = "free blocks of PyTorch's allocator"
"""A category of memory that no tensor holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Memory of the device that one category of tensors held in one part of a model."""

    category: str
    module: str = ""
    """Path of the part, with a star for the number in a list; empty where it is of no part."""
    held_bytes: int
    count: int
    """Number of storages; 0 where only their sum is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The largest batch whose steps fit, by a trace of the model."""

    batch_size: int
    """0 if not even one sample fits."""
    is_checkpointed: bool
    """Whether every block of the model is put into torch.utils.checkpoint."""
    peak_bytes: int
    """Largest sum of tensors in these steps."""
    reserved_bytes: int
    """What PyTorch's allocator would take from the driver for them, if it had more room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Why memory did not suffice for a step, which ended with torch.OutOfMemoryError. None and
    empty are what was not seen.
    """

    step: int
    """The step, from 0 for the first measured one; negative in the warm-up."""
    doing: str
    """Forward, backward, optimizer or other."""
    requested_bytes: int | None = None
    line: str = ""
    """The innermost line that is not PyTorch's."""
    called_at: str = ""
    """The line of the loop."""
    module: str = ""
    """Path of the innermost module that ran; in backward, of the one whose gradient was next."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    room_bytes: int | None = None
    """What PyTorch's allocator may have on this device in all, beside what others hold."""
    others_bytes: int | None = None
    """What other programs and the CUDA context hold."""
    holders: tuple[Holder, ...] = ()
    """The largest first; their sum is `reserved_bytes` where that is known."""
    batch_size: int | None = None
    fits: tuple[Fit, ...] = ()
    traced_batches: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = ()
    """What the trace takes for granted, because it was not seen."""
    not_foretold: str = ""
    """Why there is nothing in `fits`, or nothing with checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRecord:
    """What was seen of a watched loop, kept in its record; None or empty is what was not seen.

    Tuples have an entry for each measured step, in order.
    """

    tokens: tuple[int, ...] = ()
    """Tokens that reached the model's embedding in the forward passes of a step."""
    context_lengths: tuple[int, int] | None = None
    """The least and the greatest length of a sequence in a forward pass."""
    padding_tokens: int | None = None
    """How many of `masked_tokens` are padding, by the masks that the model was given."""
    masked_tokens: int | None = None
    """Tokens of the steps whose padding was counted; of a GPU, these are few."""
    flops: LoopFlops | None = None
    not_traced: str = ""
    """Why `flops` is not known."""
    between_data_s: tuple[float, ...] = ()
    """How much of the time before each step (`RunRecord.between_s`) waited for data."""
    slow_steps: tuple[SlowStep, ...] = ()
    growth: MemoryGrowth | None = None
    """None where memory does not rise, and on a CPU, where it is not seen."""
    syncs_per_update: int | None = None
    """How many forward passes of each update, or more, had their gradients averaged over the ranks
    by DistributedDataParallel; None where that was not seen.
    """
    rank: LoopRank | None = None
    """The rank of this record; None for one process."""
    other_ranks: tuple[LoopRank, ...] = ()
    """What the other ranks have written; readers add it."""
    out_of_memory: OutOfMemory | None = None
    """The last step for which memory did not suffice."""
