"""What follows the joint products of a block, one kernel each way: heads cut apart and turned, and the gate of SwiGLU.

The gradient of a joint product is put together from parts. torch.compile does so with a mask for each part, and reads
every part again for the others: 4 to 7 times as long as the bytes take. Here each part is read once, and written where
it belongs, and the gradient of a bias is gathered on the way. On a CPU the same is computed by PyTorch.
"""

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from cs336_systems.model.rope import rotate_pairs

Heads = Float[Tensor, "batch seq heads d_head"]


def swiglu(joint: Float[Tensor, "... twice_d_ff"]) -> Float[Tensor, "... d_ff"]:
    """silu(gate) x up, of which `joint` is made; on a GPU computed in fp32 and rounded once."""
    return cast(Tensor, _swiglu(joint))


def rope_heads(
    joint: Float[Tensor, "batch seq thrice_d_model"], rotations: Float[Tensor, "seq pairs 2"]
) -> tuple[Heads, Heads, Heads]:
    """The heads of q, k and v, of which `joint` is made; q and k turned by the angles of their positions (RoPE).

    Raises ValueError where there are other positions than tokens.
    """
    if joint.shape[1] != len(rotations):
        raise ValueError(f"needed rotations of {joint.shape[1]} positions, got {len(rotations)}")
    return cast(tuple[Tensor, Tensor, Tensor], _rope_heads(joint, rotations))


def cut_heads(
    joint: Float[Tensor, "batch seq thrice_d_model"], bias: Float[Tensor, " thrice_d_model"], num_heads: int
) -> tuple[Heads, Heads, Heads]:
    """The heads of q, k and v, views of `joint`, which has the bias in it as a constant: here that gets its gradient.

    Raises ValueError for a bias of another width.
    """
    if bias.shape != joint.shape[-1:]:
        raise ValueError(f"needed a bias of {joint.shape[-1]} elements, got {tuple(bias.shape)}")
    heads: tuple[Tensor, Tensor, Tensor] = _CutHeads.apply(joint, bias, num_heads)  # type: ignore[no-untyped-call]
    return heads


class _Context(Protocol):
    """What forward leaves for backward."""

    bias_type: torch.dtype


class _CutHeads(torch.autograd.Function):
    """No operator, whose results could not be views."""

    @staticmethod
    def forward(ctx: _Context, joint: Tensor, bias: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.bias_type = bias.dtype
        q, k, v = joint.unflatten(-1, (3, num_heads, -1)).unbind(2)
        return q, k, v

    @staticmethod
    def backward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_cut_heads_backward(q, k, v, ctx.bias_type), None


# below, plain tensors: a schema is read from the types


@torch.library.custom_op("cs336_systems::swiglu", mutates_args=())
def _swiglu(joint: Tensor) -> Tensor:
    if joint.is_cuda:
        from cs336_systems.model.fast import joint_kernel  # Triton, which only comes with PyTorch for GPUs

        return joint_kernel.swiglu(joint)
    gate, up = joint.contiguous().chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.library.custom_op("cs336_systems::swiglu_backward", mutates_args=())
def _swiglu_backward(joint: Tensor, gradient: Tensor) -> Tensor:
    if joint.is_cuda:
        from cs336_systems.model.fast import joint_kernel

        return joint_kernel.swiglu_backward(joint, gradient)
    gate, up = joint.contiguous().chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)), dim=-1)


@torch.library.custom_op("cs336_systems::rope_heads", mutates_args=())
def _rope_heads(joint: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if joint.is_cuda:
        from cs336_systems.model.fast import joint_kernel

        return joint_kernel.rope_heads(joint, rotations)
    q, k, v = joint.unflatten(-1, (3, -1, 2 * rotations.shape[1])).unbind(2)
    return rotate_pairs(q, rotations), rotate_pairs(k, rotations), v.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("cs336_systems::rope_heads_backward", mutates_args=())
def _rope_heads_backward(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor) -> Tensor:
    if q.is_cuda:
        from cs336_systems.model.fast import joint_kernel

        return joint_kernel.rope_heads_backward(q, k, v, rotations)
    back = rotations * rotations.new_tensor((1, -1))
    turned = (rotate_pairs(part.contiguous(), back) for part in (q, k))
    return torch.stack((*turned, v), dim=2).flatten(2)


@torch.library.custom_op("cs336_systems::cut_heads_backward", mutates_args=())
def _cut_heads_backward(q: Tensor, k: Tensor, v: Tensor, bias_type: torch.dtype) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        from cs336_systems.model.fast import joint_kernel

        return joint_kernel.cut_heads_backward(q, k, v, bias_type)
    joint = torch.stack((q, k, v), dim=2).flatten(2)
    return joint, joint.float().sum(dim=(0, 1)).to(bias_type)


@_swiglu.register_fake
def _(joint: Tensor) -> Tensor:
    return joint.new_empty(*joint.shape[:-1], joint.shape[-1] // 2)


@_swiglu_backward.register_fake
def _(joint: Tensor, gradient: Tensor) -> Tensor:
    del gradient
    return joint.new_empty(*joint.shape)


@_rope_heads.register_fake
def _(joint: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d_head = 2 * rotations.shape[1]
    shape = (*joint.shape[:2], joint.shape[-1] // (3 * d_head), d_head)
    return joint.new_empty(shape), joint.new_empty(shape), joint.new_empty(shape)


@_rope_heads_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor) -> Tensor:
    del k, v, rotations
    return q.new_empty(*q.shape[:2], 3 * q.shape[2] * q.shape[3])


@_cut_heads_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias_type: torch.dtype) -> tuple[Tensor, Tensor]:
    del k, v
    width = 3 * q.shape[2] * q.shape[3]
    return q.new_empty(*q.shape[:2], width), q.new_empty(width, dtype=bias_type)


def _keep_swiglu(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ANN401
    del output
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
    (joint,) = ctx.saved_tensors
    return cast(Tensor, _swiglu_backward(joint, gradient))


def _keep_rope_heads(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ANN401
    del output
    ctx.save_for_backward(inputs[1])


def _differentiate_rope_heads(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
    (rotations,) = ctx.saved_tensors
    return cast(Tensor, _rope_heads_backward(q, k, v, rotations)), None


_swiglu.register_autograd(_differentiate_swiglu, setup_context=_keep_swiglu)
_rope_heads.register_autograd(_differentiate_rope_heads, setup_context=_keep_rope_heads)
