"""What was seen of a watched loop besides the times of its phases."""

from dataclasses import dataclass


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
    between_data_s: tuple[float, ...] = ()
    """How much of the time before each step (`RunRecord.between_s`) waited for data."""
