"""Napkin mathematics: how long training takes and how large a model fits, from a handful of numbers (CS336, lecture 2).

All arguments are positive and finite.
"""

FORWARD_FLOPS = 2
"""For each parameter and token: one multiply-add."""
TRAINING_FLOPS = 6
"""Forward, and backward's two products for each of forward's: the gradient of the input and that of the weight."""
SECONDS_PER_DAY = 86_400


def rule_of_thumb_flops(parameters: float, tokens: float, *, backward: bool = True) -> float:
    """6 N T, or 2 N T for forward alone: as if every parameter multiplied every token, and nothing else happened."""
    return (TRAINING_FLOPS if backward else FORWARD_FLOPS) * parameters * tokens


def training_days(*, parameters: float, tokens: float, peak_flops_per_s: float, count: int, mfu: float) -> float:
    """Days until `count` devices have trained on so many tokens, at the share `mfu` of each one's promised peak."""
    flops_per_s = count * peak_flops_per_s * mfu
    return rule_of_thumb_flops(parameters, tokens) / flops_per_s / SECONDS_PER_DAY


def largest_model(*, memory_bytes: float, count: int, bytes_per_parameter: float = 16) -> float:
    """Parameters that fill `count` devices of `memory_bytes` each, with no room for activations.

    16 bytes are AdamW's in fp32: parameter, gradient and two moments. Nothing is held twice: the state is sharded.
    """
    return count * memory_bytes / bytes_per_parameter
