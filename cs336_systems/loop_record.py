"""What was seen of a watched loop besides the times of its phases."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFlops:
    """FLOPs of the matmuls, convolutions and attentions of a mean step; a multiply-add is two."""

    per_step: float
    """Of the model: a forward pass and a backward pass for each that was seen."""
    recomputed_per_step: float
    """What backward computes again in addition, between checkpoints and in fused attention."""


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
