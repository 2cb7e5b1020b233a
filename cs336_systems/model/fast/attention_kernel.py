"""FlashAttention 4 (github.com/Dao-AILab/flash-attention, flash_attn/cute) on queries, keys and
values side by side.

Its functions for autograd allocate a gradient for each of the three; those below, which they call,
take the three parts of one tensor. They are not documented, so the package's version is fixed
(pyproject.toml).
"""

import os

import torch
from torch import Tensor

from . import packed_kernel
from .compiled_ahead import keep_kernels
from .packages import without_compiler
from .packed import parts_of

# The package reads these when it is imported. Without them each process compiles its kernels anew;
# what it keeps has its own version and those of its compilers in its place.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
keep_kernels("packed_attention")

with without_compiler():
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

SHORT, LONG = 512, 2048
"""Contexts up to and from which FlashAttention 4 is faster than cuDNN in forward with heads of 64.

On an H100 cuDNN took 1.0 to 1.3 times as long with contexts of 128 to 512, 0.87 to 0.95 times with
1024, 1.16 to 1.24 times from 2048 to 16,384, and 1.02 to 1.14 times with heads of 128. In backward
it took 1.14 to 1.57 times as long with all of them.
"""
TILE = 128, 128
"""Queries and keys of a tile in forward with contexts below LONG; with heads of 64 the package's
own takes longer.
"""


def attend(packed: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """The kernel of `_attend` in packed.py."""
    q, k, v = parts_of(packed, num_heads)
    batch, seq, _, d_head = q.shape
    if d_head == 64 and SHORT < seq < LONG:
        heads = (part.transpose(1, 2) for part in (q, k, v))
        values, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, 0.0, True
        )
        return values.transpose(1, 2).flatten(2).contiguous(), lse.view(batch, num_heads, seq)
    tile = TILE if seq < LONG else None
    values, lse, *_ = _flash_attn_fwd(q, k, v, causal=True, tile_mn=tile, return_lse=True)
    return values.flatten(2), lse


def attend_backward(
    gradient: Tensor,
    packed: Tensor,
    values: Tensor,
    lse: Tensor,
    rotations: Tensor | None,
    num_heads: int,
    bias_type: torch.dtype | None,
    measures: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `_attend_backward` in packed.py."""
    result = torch.empty_like(packed)
    dq, dk, dv = parts_of(result, num_heads)
    values = values.contiguous().unflatten(-1, (num_heads, -1))
    of_values = gradient.contiguous().unflatten(-1, (num_heads, -1))
    q, k, v = parts_of(packed, num_heads)
    _flash_attn_bwd(q, k, v, values, of_values, lse, causal=True, dq=dq, dk=dk, dv=dv)
    if rotations is not None:
        scale = packed_kernel.rotate_back(result, rotations, measures)
        return result, lse.new_empty(0), scale
    assert bias_type is not None, "attention without rotations has biases"
    return result, *packed_kernel.packed_bias_backward(
        result, gradient, bias_type, measures=measures
    )
