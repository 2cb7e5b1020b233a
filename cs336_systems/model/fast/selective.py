"""Selective activation checkpoints (Korthikanti et al. 2022): backward recomputes what is large but quick to compute.

For long sequences attention takes most of the time of a block and least of its memory, so it is not recomputed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cs336_systems.model.annotate import annotate
from cs336_systems.model.attention import Rotations
from cs336_systems.model.fast.blocks import Deferred, DeferredBlock
from cs336_systems.model.fast.fp8 import Tag
from cs336_systems.model.fast.fused_blocks import norm
from cs336_systems.model.fast.weights import CopyMaker
from cs336_systems.model.transformer import Block, Mask
from cs336_systems.ranges import Range

Stream = Float[Tensor, "batch seq d_model"]
Hidden = Float[Tensor, "tokens d_hidden"]
_checkpoint: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class SelectiveBlock(DeferredBlock):
    """A block that saves for backward one residual stream, q, k, v, and what fused attention saves.

    Backward recomputes the rest: norms, the output projection, and the feed-forward network except its last matmul,
    because recomputation stops as soon as it has all tensors that backward needs. A block that `keeps_hidden` also
    saves the result of the feed-forward network's first matmul, and does not recompute it.
    """

    def __init__(self, block: Block, maker: CopyMaker, *, keeps_hidden: bool, packs: bool = False) -> None:
        super().__init__(block, maker, packs=packs)
        self._keeps_hidden = keeps_hidden

    def forward(self, x: Deferred, rotations: Rotations | None, mask: Mask | None) -> Deferred:
        """The residual stream after attention, and the feed-forward network's branch; attention is causal."""
        del mask
        stream = x.stream + x.branch
        stream = stream if x.bias is None else stream + x.bias
        projected, tag = _checkpoint(self._project, stream)
        with annotate(self.attn.range):
            values = self.attn.values(projected, tag, rotations, None)
        if self._keeps_hidden:
            stream, hidden, tag = _checkpoint(self._expand, stream, values)
            branch = _checkpoint(self._contract, hidden, tag).view_as(stream)
        else:
            stream, branch = _checkpoint(self._after_attention, stream, values)
        return Deferred(stream, branch, self.ffn.w2.deferred_bias)

    def _project(self, stream: Stream) -> tuple[Float[Tensor, "batch seq thrice_d_model"], Tag | None]:
        """q, k and v side by side."""
        with annotate(Range.FORWARD), self._own_range():
            with annotate(self.ln1.range):
                dtype = self.attn.output_proj.copies.weight.dtype
                normed = norm(stream, self.ln1.weight, self.ln1.bias, self.ln1.eps, dtype)
            with annotate(self.attn.range):
                return self.attn.project(normed)

    def _after_attention(self, stream: Stream, values: Stream) -> tuple[Stream, Stream]:
        """The residual stream after attention, and the feed-forward network's branch."""
        stream, hidden, tag = self._expand(stream, values)
        return stream, self._contract(hidden, tag).view_as(stream)

    def _expand(self, stream: Stream, values: Stream) -> tuple[Stream, Hidden, Tag | None]:
        """The residual stream after attention, and the result of the feed-forward network's first matmul.

        That result has one row per token and is not a view, because the compiler saves no views.
        """
        with annotate(Range.FORWARD), self._own_range():
            with annotate(self.attn.range):
                branch, tag = self.attn.output_proj.tagged(values)
            stream, normed, largest = self.ln2(Deferred(stream, branch, self.attn.output_proj.deferred_bias, tag))
            with annotate(self.ffn.range):
                return stream, *self.ffn.expand(normed.flatten(0, 1), largest)

    def _contract(self, hidden: Hidden, tag: Tag | None) -> Float[Tensor, "tokens d_model"]:
        """The feed-forward network's branch; it has no tag, since a plain addition reads it."""
        with annotate(Range.FORWARD), self._own_range(), annotate(self.ffn.range):
            branch: Tensor = self.ffn.w2(*self.ffn.activate(hidden, tag))
            return branch

    def _own_range(self) -> AbstractContextManager[None]:
        """The block's range; in backward it is inside a range named forward, which marks recomputation.

        A compiled block opens no range and must not read the range's name, or each block would be compiled on its own.
        """
        return nullcontext() if torch.compiler.is_compiling() else annotate(self.range)
