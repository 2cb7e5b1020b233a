"""The operations after a block's packed matmuls, one kernel each way: splitting and rotating heads, SwiGLU's gate.

The gradient of a packed matmul's result is assembled from parts. torch.compile does that with a mask for each part, and
reads all parts for each, which takes 4 to 7 times the time that the memory traffic needs. Here each part is read once
and written once, and the same kernel sums the gradient of a bias. On a CPU PyTorch's operators compute the same.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from cs336_systems.model.attention import rotate_pairs
from cs336_systems.model.fast.fp8 import Tag, own_unit

Heads = Float[Tensor, "batch seq heads d_head"]


def swiglu(packed: Float[Tensor, "... twice_d_ff"]) -> Float[Tensor, "... d_ff"]:
    """silu(gate) x up, whose factors are packed side by side; on a GPU computed in fp32 and rounded once."""
    return cast(Tensor, _swiglu(packed))


def rope_heads(
    packed: Float[Tensor, "batch seq thrice_d_model"], rotations: Float[Tensor, "seq pairs 2"]
) -> tuple[Heads, Heads, Heads]:
    """The heads of q, k and v, which are packed side by side; q and k rotated by RoPE.

    Raises ValueError if the number of positions is not that of the tokens.
    """
    if packed.shape[1] != len(rotations):
        raise ValueError(f"needed rotations of {packed.shape[1]} positions, got {len(rotations)}")
    return cast(tuple[Tensor, Tensor, Tensor], _rope_heads(packed, rotations))


def cut_heads(
    packed: Float[Tensor, "batch seq thrice_d_model"],
    bias: Float[Tensor, " thrice_d_model"],
    num_heads: int,
    tag: Tag | None = None,
) -> tuple[Heads, Heads, Heads]:
    """The heads of q, k and v, as views of `packed`, to which `bias` has been added already, without a gradient.

    Backward of this function computes the gradient of `bias`, and the unit that is the tag's gradient (fp8.py).

    Raises ValueError for a bias of another width.
    """
    if bias.shape != packed.shape[-1:]:
        raise ValueError(f"needed a bias of {packed.shape[-1]} elements, got {tuple(bias.shape)}")
    heads: tuple[Tensor, Tensor, Tensor] = _CutHeads.apply(packed, bias, num_heads, tag)  # type: ignore[no-untyped-call]
    return heads


class _CutHeads(torch.autograd.Function):
    """An autograd function, because the results of a custom operator cannot be views."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        packed: Tensor,
        bias: Tensor,
        num_heads: int,
        tag: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.bias_type, ctx.is_tagged = bias.dtype, tag is not None
        q, k, v = packed.unflatten(-1, (3, num_heads, -1)).unbind(2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:  # noqa: ANN401
        of_packed, of_bias, unit = _cut_heads_backward(q, k, v, ctx.bias_type, ctx.is_tagged)
        return of_packed, of_bias, None, unit if ctx.is_tagged else None


# no shapes are declared below, because PyTorch reads the schema of an operator from its types


@torch.library.custom_op("cs336_systems::swiglu", mutates_args=())
def _swiglu(packed: Tensor) -> Tensor:
    if packed.is_cuda:
        from cs336_systems.model.fast import packed_kernel  # Triton, which only comes with PyTorch for GPUs

        return packed_kernel.swiglu(packed)
    gate, up = packed.contiguous().chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.library.custom_op("cs336_systems::swiglu_backward", mutates_args=())
def _swiglu_backward(packed: Tensor, gradient: Tensor) -> Tensor:
    if packed.is_cuda:
        from cs336_systems.model.fast import packed_kernel

        return packed_kernel.swiglu_backward(packed, gradient)
    gate, up = packed.contiguous().chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)), dim=-1)


@torch.library.custom_op("cs336_systems::rope_heads", mutates_args=())
def _rope_heads(packed: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if packed.is_cuda:
        from cs336_systems.model.fast import packed_kernel

        return packed_kernel.rope_heads(packed, rotations)
    q, k, v = packed.unflatten(-1, (3, -1, 2 * rotations.shape[1])).unbind(2)
    return rotate_pairs(q, rotations), rotate_pairs(k, rotations), v.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("cs336_systems::rope_heads_backward", mutates_args=())
def _rope_heads_backward(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor) -> Tensor:
    if q.is_cuda:
        from cs336_systems.model.fast import packed_kernel

        return packed_kernel.rope_heads_backward(q, k, v, rotations)
    back = rotations * rotations.new_tensor((1, -1))
    turned = (rotate_pairs(part.contiguous(), back) for part in (q, k))
    return torch.stack((*turned, v), dim=2).flatten(2)


@torch.library.custom_op("cs336_systems::cut_heads_backward", mutates_args=())
def _cut_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, bias_type: torch.dtype, measures: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `packed` and `bias`, and the unit of `packed`'s gradient, which is empty unless `measures`."""
    if q.is_cuda:
        from cs336_systems.model.fast import packed_kernel

        return packed_kernel.cut_heads_backward(q, k, v, bias_type, measures=measures)
    packed = torch.stack((q, k, v), dim=2).flatten(2)
    return packed, packed.float().sum(dim=(0, 1)).to(bias_type), own_unit(packed, measures)


@_swiglu.register_fake
def _(packed: Tensor) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], packed.shape[-1] // 2)


@_swiglu_backward.register_fake
def _(packed: Tensor, gradient: Tensor) -> Tensor:
    del gradient
    return packed.new_empty(*packed.shape)


@_rope_heads.register_fake
def _(packed: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_head = 2 * rotations.shape[1]
    shape = (*packed.shape[:2], packed.shape[-1] // (3 * d_head), d_head)
    return packed.new_empty(shape), packed.new_empty(shape), packed.new_empty(shape)


@_rope_heads_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor) -> Tensor:
    del k, v, rotations
    return q.new_empty(*q.shape[:2], 3 * q.shape[2] * q.shape[3])


@_cut_heads_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias_type: torch.dtype, measures: bool) -> tuple[Tensor, Tensor, Tensor]:
    del k, v
    width = 3 * q.shape[2] * q.shape[3]
    unit = q.new_empty(int(measures), dtype=torch.float32)
    return q.new_empty(*q.shape[:2], width), q.new_empty(width, dtype=bias_type), unit


def _keep_swiglu(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ANN401
    del output
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
    (packed,) = ctx.saved_tensors
    return cast(Tensor, _swiglu_backward(packed, gradient))


def _keep_rope_heads(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ANN401
    del output
    ctx.save_for_backward(inputs[1])


def _differentiate_rope_heads(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
    (rotations,) = ctx.saved_tensors
    return cast(Tensor, _rope_heads_backward(q, k, v, rotations)), None


_swiglu.register_autograd(_differentiate_swiglu, setup_context=_keep_swiglu)
_rope_heads.register_autograd(_differentiate_rope_heads, setup_context=_keep_rope_heads)
