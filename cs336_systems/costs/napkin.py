"""Napkin mathematics (CS336, lecture 2): how long training takes and how large a model fits.

All arguments are positive and finite.
"""

FORWARD_FLOPS = 2
"""Forward FLOPs for each parameter and token: one multiply-add."""
TRAINING_FLOPS = 6
"""FLOPs of a step for each parameter and token: backward has two matmuls for each one of forward."""
SECONDS_PER_DAY = 86_400


def rule_of_thumb_flops(parameters: float, tokens: float, *, backward: bool = True) -> float:
    """6 N T, or 2 N T for forward alone: every parameter multiplies every token, and nothing else is counted."""
    return (TRAINING_FLOPS if backward else FORWARD_FLOPS) * parameters * tokens


def training_days(*, parameters: float, tokens: float, peak_flops_per_s: float, count: int, mfu: float) -> float:
    """Days until `count` devices have trained on `tokens` tokens, each at the share `mfu` of its peak."""
    flops_per_s = count * peak_flops_per_s * mfu
    return rule_of_thumb_flops(parameters, tokens) / flops_per_s / SECONDS_PER_DAY


def largest_model(*, memory_bytes: float, count: int, bytes_per_parameter: float = 16) -> float:
    """Number of parameters whose state fills `count` devices of `memory_bytes` each, with no room for activations.

    16 bytes are AdamW in fp32: parameter, gradient and two moments. The state is sharded: no device holds a copy.
    """
    return count * memory_bytes / bytes_per_parameter
