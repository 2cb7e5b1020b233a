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
from cs336_systems.model.fast.weights import CopyMaker
from cs336_systems.model.rope import Rotations
from cs336_systems.model.transformer import Block, Mask
from cs336_systems.ranges import Range

Stream = Float[Tensor, "batch seq d_model"]
Hidden = Float[Tensor, "tokens d_hidden"]
_checkpoint: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class SelectiveBlock(DeferredBlock):
    """A block that saves for backward the residual stream once, q, k, v, and what fused attention saves.

    Backward computes the rest again: norms, the output projection, and the feed-forward network but for its last
    matmul, because a checkpoint stops where the last of what it dropped is there again. A block that `keeps_hidden`
    saves the result of the first matmul of the feed-forward network too, and does not compute that again.
    """

    def __init__(self, block: Block, maker: CopyMaker, *, keeps_hidden: bool) -> None:
        super().__init__(block, maker)
        self._keeps_hidden = keeps_hidden

    def forward(self, x: Deferred, rotations: Rotations | None, mask: Mask | None) -> Deferred:
        """The residual stream, and what the block has to add to it; attention is causal, without a mask."""
        del mask
        stream = x.stream + x.branch
        stream = stream if x.bias is None else stream + x.bias
        projected = _checkpoint(self._project, stream)
        with annotate(self.attn.range):
            q, k, v = self.attn.cut(projected, rotations)
            values = _attend(q, k, v)
        if self._keeps_hidden:
            stream, hidden = _checkpoint(self._expand, stream, values)
            branch = _checkpoint(self._contract, hidden).view_as(stream)
        else:
            stream, branch = _checkpoint(self._after_attention, stream, values)
        return Deferred(stream, branch, self.ffn.w2.deferred_bias)

    def _project(self, stream: Stream) -> Float[Tensor, "batch seq thrice_d_model"]:
        """q, k and v side by side."""
        with annotate(Range.FORWARD), self._own_range():
            with annotate(self.ln1.range):
                dtype = self.attn.output_proj.copies.weight.dtype
                normed = norm(stream, self.ln1.weight, self.ln1.bias, self.ln1.eps, dtype)
            with annotate(self.attn.range):
                return self.attn.project(normed)

    def _after_attention(self, stream: Stream, values: Stream) -> tuple[Stream, Stream]:
        """The residual stream after attention, and what the feed-forward network has to add to it."""
        stream, hidden = self._expand(stream, values)
        return stream, self._contract(hidden).view_as(stream)

    def _expand(self, stream: Stream, values: Stream) -> tuple[Stream, Hidden]:
        """The residual stream after attention, and the result of the feed-forward network's first matmul.

        That has one row for each token, and is no view, because the compiler saves no views.
        """
        with annotate(Range.FORWARD), self._own_range():
            with annotate(self.attn.range):
                branch = self.attn.output_proj(values)
            stream, normed = self.ln2(Deferred(stream, branch, self.attn.output_proj.deferred_bias))
            with annotate(self.ffn.range):
                return stream, self.ffn.expand(normed.flatten(0, 1))

    def _contract(self, hidden: Hidden) -> Float[Tensor, "tokens d_model"]:
        """What the feed-forward network has to add to the residual stream."""
        with annotate(Range.FORWARD), self._own_range(), annotate(self.ffn.range):
            return self.ffn.contract(hidden)

    def _own_range(self) -> AbstractContextManager[None]:
        """The block's range. In backward it is inside of one named forward, which tells that this is recomputed.

        A compiled block has none, and must not read its name, or each block would be compiled on its own.
        """
        return nullcontext() if torch.compiler.is_compiling() else annotate(self.range)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "batch seq d_model"]:
    """Causal attention of heads given as (batch, seq, heads, d_head)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # heads before positions
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
