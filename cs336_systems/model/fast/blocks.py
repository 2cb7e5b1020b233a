"""The reference's layers and blocks, computed from low-precision copies of their weights, in fewer
kernels.

Each module replaces one of the reference: it has the same parameters under the same names, which
are the masters, but computes with the copies. Layers that read the same tensor are packed into one
matmul: q, k and v; w1 and w3. A layer may defer an addition to the kernel that reads its result:
its bias, or its branch's sum with the residual stream.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...ranges import Range
from ..annotate import annotate
from ..transformer import (
    NORM_EPS,
    Block,
    Embedding,
    GeluMLP,
    LayerNorm,
    Linear,
    LMHead,
    Mask,
    RMSNorm,
    Rotations,
    SelfAttention,
    SwiGLU,
    naive_attention,
    to_autocast_dtype,
)
from .fp8 import Largest, Tag
from .fused_blocks import add_norm, bias_gelu, lookup, norm
from .packed import cut_heads, feed_forward, packed_attention, rope_heads, swiglu
from .weights import Copies, CopyMaker

ResidualStream = Float[Tensor, "batch seq d_model"]
Projected = Float[Tensor, "batch seq thrice_d_model"]
Hidden = Float[Tensor, "tokens d_hidden"]
checkpointed: Callable[..., Any] = partial(
    checkpoint, use_reentrant=False, preserve_rng_state=False
)
"""Calls a function whose results backward computes again; nothing in a block is random."""

# Constructors below call nn.Module's instead of the base class's, which would allocate parameters.


class CopiedLinear(Linear):
    """x W^T from a copy of W, plus a bias, which with fused blocks the next kernel adds."""

    def __init__(self, linear: Linear, maker: CopyMaker) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self.copies = maker.copies(linear)
        self._defers = maker.settings.fused_blocks
        self.deferred_bias: Tensor | None = None
        """Left to the kernel that reads the result; None if added already or absent."""
        if self._defers:
            self.deferred_bias = self.copies.bias
            self.copies = self.copies._replace(bias=None)

    def tagged(
        self, x: Float[Tensor, "... d_in"], largest: Largest | None = None
    ) -> tuple[Float[Tensor, "... d_out"], Tag | None]:
        """x times the transposed copy, plus the bias unless it is deferred; and, in fp8 with fused
        blocks, the result's tag (fp8.py). `largest` has the magnitudes of x, if known.
        """
        return self.copies.matmul(x, largest, tags=self._defers)


class PackedAttention(SelfAttention):
    """Attention that computes q, k and v by one matmul, side by side."""

    output_proj: CopiedLinear

    def __init__(self, attention: SelfAttention, maker: CopyMaker) -> None:
        nn.Module.__init__(self)
        self.num_heads, self._packs = attention.num_heads, maker.settings.packed_attention
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        self.q_proj, self.k_proj, self.v_proj = parts
        self.packed = maker.copies(*parts)
        self.output_proj = CopiedLinear(attention.output_proj, maker)

    def forward(  # type: ignore[override]
        self,
        x: ResidualStream,
        rotations: Rotations | None,
        mask: Mask | None,
        largest: Largest | None = None,
    ) -> tuple[ResidualStream, Tag | None]:
        """The output projection's result, and its tag; `largest` has magnitudes of x, if known."""
        with annotate(self.range):
            return self.output_proj.tagged(self.values(*self.project(x, largest), rotations, mask))

    def project(
        self, x: ResidualStream, largest: Largest | None = None
    ) -> tuple[Projected, Tag | None]:
        """Queries, keys and values of all heads, side by side, and a tag; `values` computes their
        bias's gradient.
        """
        bias = None if self.packed.bias is None else self.packed.bias.detach()
        packed = self.packed._replace(bias=bias)
        return packed.matmul(to_autocast_dtype(x), largest, tags=True)

    def values(
        self, projected: Projected, tag: Tag | None, rotations: Rotations | None, mask: Mask | None
    ) -> ResidualStream:
        """Outputs of all heads, side by side, from what `project` returned.

        Attention is PyTorch's, causal, or naive attention if a `mask` is given; with rotations, q
        and k are rotated by RoPE first.
        """
        if self._packs:
            return packed_attention(projected, self.num_heads, rotations, self.packed.bias, tag)
        if rotations is not None:
            heads = rope_heads(projected, rotations, tag)
        else:
            assert self.packed.bias is not None, "attention without biases has rotations"
            heads = cut_heads(projected, self.packed.bias, self.num_heads, tag)
        q, k, v = (part.transpose(1, 2) for part in heads)  # heads before positions
        if mask is None:
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            result = naive_attention(q, k, v, mask)
        return result.transpose(1, 2).flatten(2)


class CopiedFeedForward(nn.Module):
    """The feed-forward network. SwiGLU applies w1 and w3 by one matmul; fused activations are
    computed within matmuls.

    With fused blocks, GELU's kernel adds the bias of w1, and the next norm that of w2.
    """

    range: str = Range.FFN

    def __init__(self, ffn: SwiGLU | GeluMLP, maker: CopyMaker) -> None:
        super().__init__()
        self._fuses = maker.settings.fused_activations
        self._is_gated = isinstance(ffn, SwiGLU)
        self.deferred_bias: Tensor | None = None
        """Bias of w1 that `activate` adds."""
        self.w1: Linear = ffn.w1
        if isinstance(ffn, GeluMLP):
            self.w1 = copied = CopiedLinear(ffn.w1, maker)
            self.first, self.deferred_bias = copied.copies, copied.deferred_bias
        self.w2 = CopiedLinear(ffn.w2, maker)
        if isinstance(ffn, SwiGLU):
            self.w3 = ffn.w3
            self.first = maker.copies(ffn.w1, ffn.w3)

    def forward(
        self, x: Float[Tensor, "... d_model"], largest: Largest | None = None
    ) -> tuple[Float[Tensor, "... d_model"], Tag | None]:
        """Output of the last matmul, and its tag; `largest` has magnitudes of x, if known."""
        with annotate(self.range):
            if self._fuses:
                return feed_forward(
                    x, self.first.weight, self.deferred_bias, self.w2.copies.weight
                ), None
            return self.w2.tagged(*self.activate(*self.expand(x, largest)))

    def expand(
        self, x: Float[Tensor, "... d_model"], largest: Largest | None
    ) -> tuple[Float[Tensor, "... d_hidden"], Tag | None]:
        """The result of w1 and its tag; for SwiGLU those of w1 and w3, side by side."""
        if self._is_gated:
            return self.first.matmul(to_autocast_dtype(x), largest, tags=True)
        return cast("CopiedLinear", self.w1).tagged(x, largest)

    def activate(
        self, hidden: Float[Tensor, "... d_hidden"], tag: Tag | None
    ) -> tuple[Float[Tensor, "... d_ff"], Largest | None]:
        """Input of w2, from what `expand` returned, and with a tag its largest magnitudes."""
        if self._is_gated:
            return swiglu(hidden, tag)
        if self.deferred_bias is None:
            return F.gelu(hidden, approximate="tanh"), None
        return bias_gelu(hidden, self.deferred_bias, tag)


class CopiedBlock(Block):
    """The reference's block, computed from copies."""

    attn: PackedAttention
    ffn: CopiedFeedForward  # type: ignore[assignment]

    def __init__(self, block: Block, maker: CopyMaker) -> None:
        nn.Module.__init__(self)
        self.range = block.range
        self.ln1 = block.ln1
        self.attn = PackedAttention(block.attn, maker)
        self.ln2 = block.ln2
        self.ffn = CopiedFeedForward(block.ffn, maker)

    def forward(
        self, x: ResidualStream, rotations: Rotations | None, mask: Mask | None
    ) -> ResidualStream:
        x = x + self.attn(self.ln1(x), rotations, mask)[0]
        output: Tensor = x + self.ffn(self.ln2(x))[0]
        return output


class Deferred(NamedTuple):
    """A residual addition that is left to the next norm, whose kernel adds the branch, and the bias
    if there is one, to the stream before it normalises the sum.
    """

    stream: ResidualStream
    branch: ResidualStream
    bias: Float[Tensor, " d_model"] | None
    tag: Tag | None = None
    """Tag of the branch's last matmul, if that is in fp8 and a norm reads the branch (fp8.py)."""


class AddNorm(nn.Module):
    """Adds what was deferred to the residual stream. Returns the stream, its norm and, if an fp8
    matmul reads that, its largest magnitudes.
    """

    range: str = Range.NORM

    def __init__(self, norm: RMSNorm | LayerNorm, *, feeds_fp8: bool = False) -> None:
        super().__init__()
        self.weight = norm.weight
        self.bias: nn.Parameter | None = getattr(norm, "bias", None)
        self._feeds_fp8 = feeds_fp8

    def forward(self, x: Deferred) -> tuple[ResidualStream, ResidualStream, Largest | None]:
        stream, branch, branch_bias, tag = x
        with annotate(self.range):
            return add_norm(
                stream,
                branch,
                branch_bias,
                self.weight,
                self.bias,
                NORM_EPS,
                tag,
                measures=self._feeds_fp8,
            )


class DeferredBlock(CopiedBlock):
    """The reference's block, computed from copies; it defers each residual addition to a norm."""

    ln1: AddNorm  # type: ignore[assignment]
    ln2: AddNorm  # type: ignore[assignment]

    def __init__(self, block: Block, maker: CopyMaker) -> None:
        super().__init__(block, maker)
        self.ln1 = AddNorm(block.ln1, feeds_fp8=maker.settings.fp8)
        self.ln2 = AddNorm(block.ln2, feeds_fp8=maker.settings.fp8)

    def forward(  # type: ignore[override]
        self, x: Deferred, rotations: Rotations | None, mask: Mask | None
    ) -> Deferred:
        """The residual stream after attention, and the branch that is still to be added."""
        stream, normed, largest = self.ln1(x)
        branch, tag = self.attn(normed, rotations, mask, largest)
        stream, normed, largest = self.ln2(
            Deferred(stream, branch, self.attn.output_proj.deferred_bias, tag)
        )
        branch, tag = self.ffn(normed, largest)
        return Deferred(stream, branch, self.ffn.w2.deferred_bias, tag)


class SelectiveBlock(DeferredBlock):
    """A block with selective checkpoints (Korthikanti et al. 2022): backward recomputes what is
    large but quick.

    For long sequences attention takes most of the time of a block and least of its memory. So a
    block saves for backward one residual stream, q, k, v, and what fused attention saves; one that
    `keeps_hidden` also the result of the feed-forward network's first matmul.

    It recomputes the rest: norms, the output projection, and the feed-forward network except its
    last matmul, because recomputation stops as soon as it has all tensors that backward needs.
    """

    def __init__(self, block: Block, maker: CopyMaker, *, keeps_hidden: bool) -> None:
        super().__init__(block, maker)
        self._keeps_hidden = keeps_hidden

    def forward(  # type: ignore[override]
        self, x: Deferred, rotations: Rotations | None, mask: Mask | None
    ) -> Deferred:
        """The residual stream after attention, which is causal, and the branch to be added."""
        del mask
        stream = x.stream + x.branch
        stream = stream if x.bias is None else stream + x.bias
        projected, tag = self._projected(stream)
        with annotate(self.attn.range):
            values = self.attn.values(projected, tag, rotations, None)
        if self._keeps_hidden:
            stream, hidden, tag = checkpointed(self._expand, stream, values)
            branch = checkpointed(self._contract, hidden, tag).view_as(stream)
        else:
            stream, branch = checkpointed(self._after_attention, stream, values)
        return Deferred(stream, branch, self.ffn.w2.deferred_bias)

    def _projected(self, stream: ResidualStream) -> tuple[Projected, Tag | None]:
        """Projections q, k and v of the normed residual stream; backward computes the norm again.

        A compiled block does not compute a matmul again unless a checkpoint tells it to.
        """
        if torch.compiler.is_compiling():
            return self.attn.project(checkpointed(self._norm, stream))
        projected: tuple[Tensor, Tag | None] = checkpointed(self._project, stream)
        return projected

    def _project(self, stream: ResidualStream) -> tuple[Projected, Tag | None]:
        """Packed projections of the normed residual stream."""
        normed = self._norm(stream)
        with annotate(self.attn.range):
            return self.attn.project(normed)

    def _norm(self, stream: ResidualStream) -> ResidualStream:
        """The residual stream's norm, which attention reads."""
        with annotate(Range.FORWARD), self._own_range(), annotate(self.ln1.range):
            dtype = self.attn.output_proj.copies.weight.dtype
            return norm(stream, self.ln1.weight, self.ln1.bias, NORM_EPS, dtype)

    def _after_attention(
        self, stream: ResidualStream, values: ResidualStream
    ) -> tuple[ResidualStream, ResidualStream]:
        """The residual stream after attention, whose heads' outputs are `values`, and the
        feed-forward network's output, which the next block adds to it.
        """
        stream, hidden, tag = self._expand(stream, values)
        return stream, self._contract(hidden, tag).view_as(stream)

    def _expand(
        self, stream: ResidualStream, values: ResidualStream
    ) -> tuple[ResidualStream, Hidden, Tag | None]:
        """The residual stream after attention, whose heads' outputs are `values`; the result of the
        feed-forward network's first matmul and, in fp8, its tag.

        The matmul's result keeps one row per token. In the shape (batch, seq, d_hidden) it would be
        a view, and torch.compile saves no views for backward.
        """
        with annotate(Range.FORWARD), self._own_range():
            with annotate(self.attn.range):
                branch, tag = self.attn.output_proj.tagged(values)
            stream, normed, largest = self.ln2(
                Deferred(stream, branch, self.attn.output_proj.deferred_bias, tag)
            )
            with annotate(self.ffn.range):
                return stream, *self.ffn.expand(normed.flatten(0, 1), largest)

    def _contract(self, hidden: Hidden, tag: Tag | None) -> Float[Tensor, "tokens d_model"]:
        """Output of the feed-forward network from the result of its first matmul.

        It has no tag, since an addition reads it and not an fp8 matmul's backward.
        """
        with annotate(Range.FORWARD), self._own_range(), annotate(self.ffn.range):
            return self.ffn.w2.copies.matmul(*self.ffn.activate(hidden, tag))[0]

    def _own_range(self) -> AbstractContextManager[None]:
        """The block's range; in backward it is inside a range named forward, which marks
        recomputation.

        A compiled block must not read the range's name, or each would be compiled on its own.
        """
        return nullcontext() if torch.compiler.is_compiling() else annotate(self.range)


class FusedEmbedding(Embedding):
    """The reference's embedding, whose gradients are added to their rows in one pass."""

    def __init__(
        self, embedding: Embedding, dtype: torch.dtype, copy: Tensor | None = None
    ) -> None:
        """`dtype` is that of the residual stream. If a `copy` of the table is given, which may have
        more rows, tokens are looked up in that.
        """
        nn.Module.__init__(self)
        self.weight, self.positions = embedding.weight, embedding.positions
        self._dtype, self._copy = dtype, copy

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> ResidualStream:
        with annotate(self.range):
            table = self.weight if self._copy is None else self._copy
            x: Tensor = lookup(table, tokens)
            if self.positions is not None:
                x = x + self.positions[: tokens.shape[1]]
            return x.to(self._dtype)


class PaddedHead(nn.Module):
    """The reference's head, with rows of 0 appended to its weight, or to the copy that `maker`
    makes, until their number is a multiple of `multiple`.
    """

    range: str = Range.LM_HEAD

    def __init__(self, head: LMHead, multiple: int, maker: CopyMaker | None) -> None:
        super().__init__()
        self.weight = head.weight
        self.copies: Copies | None = None if maker is None else maker.padded(head, multiple)
        self._surplus = -len(head.weight) % multiple

    def forward(
        self,
        x: Float[Tensor, "... d_model"],
        loss_of: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits; or `loss_of(x, weight's copy)`, which needs a model with copies."""
        with annotate(self.range):
            if loss_of is not None:
                assert self.copies is not None
                return loss_of(x, self.copies.weight)
            if self.copies is not None:
                return self.copies.matmul(x)[0]
            if self._surplus:
                return F.linear(x, F.pad(to_autocast_dtype(self.weight), (0, 0, 0, self._surplus)))
            return F.linear(x, self.weight)
