"""The operations after a block's packed matmuls, one kernel each way: attention, splitting and
rotating heads, SwiGLU.

The gradient of a packed matmul's result is assembled from parts. torch.compile does that with a
mask for each part, and reads all parts for each, which takes 4 to 7 times the time that the memory
traffic needs. Here each part is read once and written once, and the same kernel sums the gradient
of a bias.

In packed attention, queries, keys and values stay where one matmul has written them, side by side.
FlashAttention 4 (attention_kernel.py) reads them there, and in forward cuDNN where it is faster.
RoPE rotates them there, and backward writes their gradients side by side too, so that nothing is
copied between matmul and attention.

The feed-forward network can have its activation inside of the matmuls (feed_forward_kernel.py).
Forward computes GELU or SwiGLU and its slopes while the first matmul's result is still in
registers, and backward multiplies by the slopes within the matmul that computes the gradient of the
activation. So the activation has no kernels of its own, its gradient is never written, and its
slopes are kept instead of its input, which is as large.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from ..transformer import Rotations, rotate_pairs
from .fp8 import Largest, Tag, keep_tagged, magnitudes, scale_if, scale_of
from .operators import operator

Heads = Float[Tensor, "batch seq heads d_head"]
PART = 1024
"""Columns of a row in one program of the kernels of SwiGLU and RoPE, which measure each part."""


def cut_heads(
    packed: Float[Tensor, "batch seq thrice_d_model"],
    bias: Float[Tensor, " thrice_d_model"],
    num_heads: int,
    tag: Tag | None = None,
) -> tuple[Heads, Heads, Heads]:
    """The heads of q, k and v, as views of `packed`, to which `bias` has been added without a
    gradient.

    Backward computes the gradient of `bias`, and the scale that is the tag's gradient (fp8.py).
    """
    assert bias.shape == packed.shape[-1:]
    heads = _CutHeads.apply(packed, bias, num_heads, tag)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], heads)


class _CutHeads(torch.autograd.Function):
    """An autograd function, because the results of a custom operator cannot be views."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, bias: Tensor, num_heads: int, tag: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.bias_type, ctx.is_tagged = bias.dtype, tag is not None
        return parts_of(packed, num_heads)

    @staticmethod
    def backward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, None, Tensor | None]:
        """The heads' gradients stand side by side in that of `packed`."""
        of_packed, of_bias, scale = _cut_heads_backward(q, k, v, ctx.bias_type, ctx.is_tagged)
        return of_packed, of_bias, None, scale if ctx.is_tagged else None


def parts_of(packed: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v in `packed` (batch, seq, 3 d_model): (batch, seq, heads, d_head)."""
    q, k, v = packed.unflatten(-1, (3, num_heads, -1)).unbind(2)
    return q, k, v


def swiglu(
    packed: Float[Tensor, "... twice_d_ff"], tag: Tag | None = None
) -> tuple[Float[Tensor, "... d_ff"], Largest | None]:
    """silu(gate) x up, whose factors are the halves of the last axis of `packed`; on a GPU computed
    in fp32 and rounded once.

    With a `tag`, that of `packed` (fp8.py), the last result has the first one's largest magnitudes.
    """
    result, largest = _swiglu(packed, tag)
    return result, None if tag is None else largest


@operator("packed_kernel.swiglu")
def _swiglu(packed: Tensor, tag: Tensor | None) -> tuple[Tensor, Tensor]:
    """`swiglu`, with a magnitude for each PART of a row; without a tag there are none."""
    gate, up = packed.contiguous().chunk(2, dim=-1)
    result = F.silu(gate) * up
    return result, magnitudes(result, num_parts(result, tag is not None))


def num_parts(x: Float[Tensor, "... columns"], measures: bool) -> int:
    """How many magnitudes of x there are, one for each PART of a row; 0 unless it `measures`."""
    width = x.shape[-1]
    return x.numel() // width * -(-width // PART) if measures else 0


@operator("packed_kernel.swiglu_backward")
def _swiglu_backward(packed: Tensor, gradient: Tensor, measures: bool) -> tuple[Tensor, Tensor]:
    """Gradient of `packed` from that of the result, and its magnitudes; none unless `measures`."""
    gate, up = packed.contiguous().chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    result = torch.cat((of_gate, gradient * F.silu(gate)), dim=-1)
    return result, magnitudes(result, num_parts(gradient, measures))


@operator("packed_kernel.rope_heads")
def rope_heads(
    packed: Tensor, rotations: Tensor, tag: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of q, k and v, which are side by side in `packed`; q and k are rotated by RoPE.

    Backward computes the scale that is the gradient of the `tag` of `packed` (fp8.py).
    """
    del tag
    q, k, v = packed.unflatten(-1, (3, -1, 2 * rotations.shape[1])).unbind(2)
    return (
        rotate_pairs(q, rotations),
        rotate_pairs(k, rotations),
        v.clone(memory_format=torch.contiguous_format),
    )


@operator("packed_kernel.rope_heads_backward")
def _rope_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, rotations: Tensor, measures: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of `packed` from those of the heads, and its magnitudes; none unless `measures`."""
    back = rotations * rotations.new_tensor((1, -1))
    turned = (rotate_pairs(part.contiguous(), back) for part in (q, k))
    packed = torch.stack((*turned, v), dim=2).flatten(2)
    return packed, magnitudes(packed, num_parts(q.flatten(2), measures))


@operator("packed_kernel.cut_heads_backward")
def _cut_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, bias_type: torch.dtype, measures: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `packed` and of its bias, and the fp8 scale of the former if it `measures`."""
    packed = torch.stack((q, k, v), dim=2).flatten(2)
    return packed, packed.float().sum(dim=(0, 1)).to(bias_type), scale_if(packed, measures)


def _differentiate_swiglu(
    ctx: Any, gradient: Tensor, _largest: None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the arguments of `_swiglu`."""
    of_packed, largest = _swiglu_backward(*ctx.saved_tensors, gradient, ctx.is_tagged)
    return of_packed, scale_of(largest).view(1) if ctx.is_tagged else None


def _keep_rotations(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: object) -> None:
    """Save for backward what `_differentiate_rope_heads` needs."""
    del output
    _, rotations, tag = inputs
    ctx.save_for_backward(rotations)
    ctx.is_tagged = tag is not None


def _differentiate_rope_heads(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, None, Tensor | None]:
    """Gradients of the arguments of `rope_heads`."""
    of_packed, largest = _rope_heads_backward(q, k, v, *ctx.saved_tensors, ctx.is_tagged)
    return of_packed, None, scale_of(largest).view(1) if ctx.is_tagged else None


_swiglu.register_autograd(_differentiate_swiglu, setup_context=keep_tagged)
rope_heads.register_autograd(_differentiate_rope_heads, setup_context=_keep_rotations)


def packed_attention(
    packed: Float[Tensor, "batch seq thrice_d_model"],
    num_heads: int,
    rotations: Rotations | None,
    bias: Float[Tensor, " thrice_d_model"] | None = None,
    tag: Tag | None = None,
) -> Float[Tensor, "batch seq d_model"]:
    """Outputs of all heads, side by side, of the q, k and v in `packed`; with `rotations` its q and
    k are overwritten.

    A `bias` has been added to `packed` already, without a gradient; backward computes its gradient,
    and the scale that is the gradient of the tag (fp8.py). It needs two facts: a query's weights
    sum to 1, and a bias of k changes no weight. After a rotation it does: with `rotations` there
    may be no bias.
    """
    assert rotations is None or (bias is None and packed.shape[1] == len(rotations))
    assert bias is None or bias.shape == packed.shape[-1:]
    arguments = packed, num_heads, rotations, bias, tag
    return cast(Tensor, _PackedAttention.apply(*arguments))  # type: ignore[no-untyped-call]


class _PackedAttention(torch.autograd.Function):
    """An autograd function: a custom operator with a gradient may not write to its arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        num_heads: int,
        rotations: Tensor | None,
        bias: Tensor | None,
        tag: Tensor | None,
    ) -> Tensor:
        if rotations is not None:
            _rotate(packed, rotations)
        values, lse = _attend(packed, num_heads)
        ctx.save_for_backward(packed, values, lse, rotations)
        ctx.num_heads, ctx.is_tagged = num_heads, tag is not None
        ctx.bias_type = None if bias is None else bias.dtype
        return cast(Tensor, values)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, Tensor | None, Tensor | None]:
        packed, values, lse, rotations = ctx.saved_tensors
        of_packed, of_bias, scale = _attend_backward(
            gradient, packed, values, lse, rotations, ctx.num_heads, ctx.bias_type, ctx.is_tagged
        )
        of_tag = scale if ctx.is_tagged else None
        return of_packed, None, None, None if ctx.bias_type is None else of_bias, of_tag


@operator("packed_kernel.rotate", mutates=("packed",))
def _rotate(packed: Tensor, rotations: Tensor) -> None:
    """Rotate q and k by RoPE, in place, within `packed` (batch, seq, 3 d_model)."""
    q_and_k = packed.unflatten(-1, (3, -1, 2 * rotations.shape[1]))[:, :, :2]
    q_and_k.copy_(rotate_pairs(q_and_k.flatten(2, 3), rotations).view_as(q_and_k))


@operator("attention_kernel.attend")
def _attend(packed: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Outputs of all heads, side by side, and the log-sum-exp of each query's scores, in fp32."""
    q, k, v = (part.transpose(1, 2) for part in parts_of(packed, num_heads))
    values, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return values.transpose(1, 2).flatten(2).contiguous(), lse.contiguous()


@operator("attention_kernel.attend_backward")
def _attend_backward(
    gradient: Tensor,
    packed: Tensor,
    values: Tensor,
    lse: Tensor,
    rotations: Tensor | None,
    num_heads: int,
    bias_type: torch.dtype | None,
    measures: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `packed` before RoPE and of its bias, and the fp8 scale of the former.

    `gradient` is that of the outputs `values`, and `lse` the logarithm that `_attend` returned. The
    bias's gradient is empty if `bias_type` is None; the scale is empty unless `measures`.
    """
    heads = [part.unflatten(-1, (num_heads, -1)) for part in (gradient, values)]
    heads += parts_of(packed, num_heads)
    of_values, by_head, q, k, v = (part.transpose(1, 2) for part in heads)
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        of_values, q, k, v, by_head, lse, 0.0, True
    )
    of_packed = torch.stack([part.transpose(1, 2) for part in parts], dim=2).flatten(2)
    if rotations is not None:
        _rotate(of_packed, rotations * rotations.new_tensor((1, -1)))
    if bias_type is None:
        return of_packed, lse.new_empty(0), scale_if(of_packed, measures)
    of_q = of_packed.chunk(3, dim=-1)[0].float().sum(dim=(0, 1))
    of_v = gradient.float().sum(dim=(0, 1))
    of_bias = torch.cat((of_q, torch.zeros_like(of_q), of_v)).to(bias_type)
    return of_packed, of_bias, scale_if(of_packed, measures)


def feed_forward(
    x: Float[Tensor, "batch seq d_model"],
    first: Float[Tensor, "expanded d_model"],
    bias: Float[Tensor, " d_ff"] | None,
    second: Float[Tensor, "d_model d_ff"],
) -> Float[Tensor, "batch seq d_model"]:
    """act(x first^T + bias) second^T: GELU in its tanh approximation with a bias, SwiGLU without
    one.

    For SwiGLU `first` has `d_ff` rows of the gate and then as many of its other factor.
    """
    assert len(first) == (2 if bias is None else 1) * second.shape[1]
    return cast(Tensor, _FeedForward.apply(x, first, bias, second))  # type: ignore[no-untyped-call]


class _FeedForward(torch.autograd.Function):
    """An autograd function, so that the compiler sees all matmuls but those with the activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, bias: Tensor | None, second: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        slopes, hidden = _expand(rows, first, bias)
        ctx.save_for_backward(rows, first, second, slopes, hidden)
        ctx.bias_type = None if bias is None else bias.dtype
        return F.linear(hidden, second).view(*x.shape[:-1], len(second))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        rows, first, second, slopes, hidden = ctx.saved_tensors
        of_rows = gradient.flatten(0, -2)
        of_second = of_rows.t() @ hidden
        of_expanded, of_bias = _contract_backward(of_rows, second, slopes, ctx.bias_type)
        of_x = (of_expanded @ first).view(*gradient.shape[:-1], first.shape[1])
        return of_x, of_expanded.t() @ rows, None if ctx.bias_type is None else of_bias, of_second


@operator("feed_forward_kernel.expand")
def _expand(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Derivative of the activation at x weight^T + bias, and the activation itself: GELU with a
    bias, SwiGLU without.

    The derivatives of SwiGLU along the gate and along the other factor are side by side.
    """
    expanded = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if bias is not None:
        hidden = F.gelu(expanded, approximate="tanh")
        slopes = torch.ops.aten.gelu_backward(
            torch.ones_like(expanded), expanded, approximate="tanh"
        )
    else:
        gate, up = expanded.chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        slopes = torch.cat((torch.ops.aten.silu_backward(up, gate), F.silu(gate)), dim=-1)
    return slopes.to(x.dtype), hidden.to(x.dtype)


@operator("feed_forward_kernel.contract_backward")
def _contract_backward(
    gradient: Tensor, weight: Tensor, slopes: Tensor, bias_type: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Gradient of the preactivation that `_expand` computes, and of its bias, which is empty if
    `bias_type` is None.

    `gradient` is that of the second matmul's result, `weight` the second matmul's, and `slopes` the
    derivative of the activation.
    """
    of_hidden = gradient.float() @ weight.float()
    result = of_hidden.repeat(1, slopes.shape[1] // of_hidden.shape[1]) * slopes.float()
    of_bias = of_hidden.new_empty(0) if bias_type is None else result.sum(dim=0).to(bias_type)
    return result.to(slopes.dtype), of_bias
