"""Causal attention whose queries, keys and values stay where one matmul has written them, side by side.

FlashAttention 4 (attention_kernel.py) reads them there, and in forward cuDNN where it is faster. RoPE rotates them
there, and backward writes their gradients side by side too, as the matmul's own backward needs them. So nothing is
copied between matmul and attention. On a CPU PyTorch's operators compute the same.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.model.attention import Rotations, rotate_pairs
from cs336_systems.model.fast.fp8 import Tag, own_unit


def packed_attention(
    packed: Float[Tensor, "batch seq thrice_d_model"],
    num_heads: int,
    rotations: Rotations | None,
    bias: Float[Tensor, " thrice_d_model"] | None = None,
    tag: Tag | None = None,
) -> Float[Tensor, "batch seq d_model"]:
    """Outputs of all heads, side by side, of the q, k and v in `packed`; with `rotations` its q and k are overwritten.

    A `bias` has been added to `packed` already, without a gradient; backward of this function computes its gradient,
    and the unit that is the gradient of the tag (fp8.py), which only comes with a bias. The bias's gradient is
    computed from two facts: a query's weights sum to 1, and a bias of k changes no weight, which is not so after a
    rotation. Raises ValueError for a bias with rotations, and if shapes do not fit.
    """
    if rotations is not None and bias is not None:
        raise ValueError("needed rotations or a bias, got both")
    if rotations is not None and packed.shape[1] != len(rotations):
        raise ValueError(f"needed rotations of {packed.shape[1]} positions, got {len(rotations)}")
    if bias is not None and bias.shape != packed.shape[-1:]:
        raise ValueError(f"needed a bias of {packed.shape[-1]} elements, got {tuple(bias.shape)}")
    if packed.shape[-1] % (3 * num_heads):
        raise ValueError(f"needed a width of 3 parts of {num_heads} heads, got {packed.shape[-1]}")
    return cast(Tensor, _PackedAttention.apply(packed, num_heads, rotations, bias, tag))  # type: ignore[no-untyped-call]


class _PackedAttention(torch.autograd.Function):
    """An autograd function, because a custom operator with a gradient may not write to its arguments."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        packed: Tensor,
        num_heads: int,
        rotations: Tensor | None,
        bias: Tensor | None,
        tag: Tensor | None,
    ) -> Tensor:
        if rotations is not None:
            _rotate(packed, rotations)
        values: Tensor
        values, lse = _attend(packed, num_heads)
        ctx.save_for_backward(packed, values, lse, rotations)
        ctx.num_heads, ctx.bias_type, ctx.is_tagged = num_heads, None if bias is None else bias.dtype, tag is not None
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor | None, Tensor | None]:  # noqa: ANN401
        packed, values, lse, rotations = ctx.saved_tensors
        of_packed, of_bias, unit = _attend_backward(
            gradient, packed, values, lse, rotations, ctx.num_heads, ctx.bias_type, ctx.is_tagged
        )
        return of_packed, None, None, None if ctx.bias_type is None else of_bias, unit if ctx.is_tagged else None


def _heads(packed: Tensor, num_heads: int) -> list[Tensor]:
    """Views of q, k and v as (batch, heads, seq, d_head)."""
    return [part.transpose(1, 2) for part in packed.unflatten(-1, (3, num_heads, -1)).unbind(2)]


# no shapes are declared below, because PyTorch reads the schema of an operator from its types


@torch.library.custom_op("cs336_systems::rotate", mutates_args=("packed",))
def _rotate(packed: Tensor, rotations: Tensor) -> None:
    """Rotate q and k."""
    if packed.is_cuda:
        from cs336_systems.model.fast import packed_kernel  # Triton, which only comes with PyTorch for GPUs

        packed_kernel.rotate(packed, rotations)
        return
    q_and_k = packed.unflatten(-1, (3, -1, 2 * rotations.shape[1]))[:, :, :2]
    q_and_k.copy_(rotate_pairs(q_and_k.flatten(2, 3), rotations).view_as(q_and_k))


@torch.library.custom_op("cs336_systems::attend", mutates_args=())
def _attend(packed: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Outputs of all heads, side by side, and the logarithm of each query's sum of exponentials, in fp32."""
    if packed.is_cuda:
        from cs336_systems.model.fast import attention_kernel  # FlashAttention 4, which takes seconds to import

        return attention_kernel.attend(packed, num_heads)
    values, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_heads(packed, num_heads), 0.0, True)
    return values.transpose(1, 2).flatten(2).contiguous(), lse.contiguous()


@torch.library.custom_op("cs336_systems::attend_backward", mutates_args=())
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
    """Gradients of `packed` before its rotation, and of its bias; and the unit of the first.

    The second is empty if `bias_type` is None, the last unless `measures`.
    """
    if packed.is_cuda:
        from cs336_systems.model.fast import attention_kernel, packed_kernel

        of_packed = attention_kernel.attend_backward(gradient, packed, values, lse, num_heads)
        if rotations is not None:
            packed_kernel.rotate(of_packed, rotations, back=True)
        if bias_type is None:
            return of_packed, lse.new_empty(0), lse.new_empty(0)
        return of_packed, *packed_kernel.packed_bias_backward(of_packed, gradient, bias_type, measures=measures)
    of_values, by_head = (each.unflatten(-1, (num_heads, -1)).transpose(1, 2) for each in (gradient, values))
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        of_values, *_heads(packed, num_heads), by_head, lse, 0.0, True
    )
    of_packed = torch.stack([part.transpose(1, 2) for part in parts], dim=2).flatten(2)
    if rotations is not None:
        _rotate(of_packed, rotations * rotations.new_tensor((1, -1)))
    if bias_type is None:
        return of_packed, lse.new_empty(0), own_unit(of_packed, measures)
    of_q, of_v = (each.float().sum(dim=(0, 1)) for each in (of_packed.chunk(3, dim=-1)[0], gradient))
    of_bias = torch.cat((of_q, torch.zeros_like(of_q), of_v)).to(bias_type)
    return of_packed, of_bias, own_unit(of_packed, measures)


@_rotate.register_fake
def _(packed: Tensor, rotations: Tensor) -> None:
    del packed, rotations


@_attend.register_fake
def _(packed: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    batch, seq, width = packed.shape
    return packed.new_empty(batch, seq, width // 3), packed.new_empty(batch, num_heads, seq, dtype=torch.float32)


@_attend_backward.register_fake
def _(
    gradient: Tensor, packed: Tensor, values: Tensor, lse: Tensor, rotations: Tensor | None, num_heads: int,
    bias_type: torch.dtype | None, measures: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del gradient, values, rotations, num_heads
    of_bias = lse.new_empty(0) if bias_type is None else lse.new_empty(packed.shape[-1], dtype=bias_type)
    return packed.new_empty(packed.shape), of_bias, lse.new_empty(int(measures))
