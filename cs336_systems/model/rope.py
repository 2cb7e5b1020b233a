"""Rotary position embeddings: pairs of features of queries and keys, rotated by angles that grow with the position."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

Rotations = Float[Tensor, "seq pairs 2"]
"""Cosine and sine of the angle by which RoPE rotates each pair of features at each position."""


def rope_rotations(context_length: int, d_head: int, theta: float) -> Float[Tensor, "context_length pairs 2"]:
    """Cosine and sine of position x theta^(-2 pair / d_head), in fp32 (Su et al. 2021, eq. 15)."""
    frequencies = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def rotate_pairs(
    x: Float[Tensor, "batch seq heads d_head"], rotations: Rotations
) -> Float[Tensor, "batch seq heads d_head"]:
    """Rotate each pair of features (2i, 2i + 1) by the angle of its position, in fp32 for any type of `x`."""
    pairs = rearrange(x.float(), "batch seq heads (pairs two) -> batch seq heads pairs two", two=2)
    rotations = rotations.unsqueeze(1)
    if torch.compiler.is_compiling():  # Inductor generates no code for complex numbers, and fuses these
        (even, odd), (cos, sin) = pairs.unbind(-1), rotations.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:  # one kernel
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotations))
    return rotated.flatten(-2).to(x.dtype)
