"""What the models' attention is made of: rotary position embeddings, autocast's type, and PyTorch's fused kernels."""

from contextlib import AbstractContextManager, nullcontext

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.config import SdpaBackend

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


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x, cast once to autocast's type if autocast is on. Autocast itself casts and saves a copy for each matmul."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


_BACKENDS = {
    SdpaBackend.FLASH: SDPBackend.FLASH_ATTENTION,
    SdpaBackend.CUDNN: SDPBackend.CUDNN_ATTENTION,
    SdpaBackend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    SdpaBackend.MATH: SDPBackend.MATH,
}


def attention_backend(backend: SdpaBackend) -> AbstractContextManager[object]:
    """While open, PyTorch's fused attention uses this backend alone."""
    return nullcontext() if backend is SdpaBackend.AUTO else sdpa_kernel(_BACKENDS[backend])
