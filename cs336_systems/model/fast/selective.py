"""Selective activation checkpoints (Korthikanti et al. 2022): backward recomputes what is large for its time.

For long sequences attention takes most of the time of a block and least of its memory, so it is not recomputed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cs336_systems.model.annotate import annotate
from cs336_systems.model.fast.blocks import Deferred, DeferredBlock
from cs336_systems.model.fast.fused_blocks import norm
from cs336_systems.model.rope import Rotations
from cs336_systems.model.transformer import Mask
from cs336_systems.ranges import Range

_checkpoint: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class SelectiveBlock(DeferredBlock):
    """A block that saves for backward the residual stream once, q, k, v, and what fused attention saves.

    Backward computes the rest again: norms, the output projection, and the feed-forward network but for its last
    matmul, because a checkpoint stops where the last of what it dropped is there again.
    """

    def forward(self, x: Deferred, rotations: Rotations | None, mask: Mask | None) -> Deferred:
        """The residual stream, and what the block has to add to it; attention is causal, without a mask."""
        del mask
        stream = x.stream + x.branch
        stream = stream if x.bias is None else stream + x.bias
        projected = _checkpoint(self._project, stream)
        with annotate(self.attn.range):
            q, k, v = self.attn.cut(projected, rotations)
            values = _attend(q, k, v)
        stream, branch = _checkpoint(self._after_attention, stream, values)
        return Deferred(stream, branch, self.ffn.w2.deferred_bias)

    def _project(self, stream: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq thrice_d_model"]:
        """q, k and v side by side."""
        with annotate(Range.FORWARD), self._own_range():
            with annotate(self.ln1.range):
                dtype = self.attn.output_proj.copies.weight.dtype
                normed = norm(stream, self.ln1.weight, self.ln1.bias, self.ln1.eps, dtype)
            with annotate(self.attn.range):
                return self.attn.project(normed)

    def _after_attention(
        self, stream: Float[Tensor, "batch seq d_model"], values: Float[Tensor, "batch seq d_model"]
    ) -> tuple[Float[Tensor, "batch seq d_model"], Float[Tensor, "batch seq d_model"]]:
        """The residual stream after attention, and what the feed-forward network has to add to it."""
        with annotate(Range.FORWARD), self._own_range():
            with annotate(self.attn.range):
                branch = self.attn.output_proj(values)
            stream, normed = self.ln2(Deferred(stream, branch, self.attn.output_proj.deferred_bias))
            return stream, self.ffn(normed)

    def _own_range(self) -> AbstractContextManager[None]:
        """The block's range. In backward it is inside of one named forward, which tells that this is recomputed.

        A compiled block has none, and must not read its name, or each block would be compiled on its own.
        """
        return nullcontext() if torch.compiler.is_compiling() else annotate(self.range)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "batch seq d_model"]:
    """Causal attention of heads given as (batch, seq, heads, d_head)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # heads before positions
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
