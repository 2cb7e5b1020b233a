"""The operations between a block's matmuls, one kernel each way: residual addition with norm, and bias with GELU.

The norm that reads the sum adds the branch to the residual stream. torch.compile cannot fuse these when it compiles
block by block, since that norm is in the next block, and it sums the gradients of gains and biases in separate kernels.
On a CPU PyTorch's operators compute the same. The sum keeps the stream's type, fp32 under autocast.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor


def add_norm(
    stream: Float[Tensor, "... d_model"],
    branch: Float[Tensor, "... d_model"],
    branch_bias: Float[Tensor, " d_model"] | None,
    gain: Float[Tensor, " d_model"],
    bias: Float[Tensor, " d_model"] | None,
    eps: float,
) -> tuple[Float[Tensor, "... d_model"], Float[Tensor, "... d_model"]]:
    """stream + branch + branch_bias in the type of `stream`, and the norm of that in the type of `branch`.

    The norm is LayerNorm with a `bias` and RMSNorm without, computed in fp32. Raises ValueError if shapes do not fit.
    """
    if stream.shape != branch.shape:
        raise ValueError(f"needed a branch of the stream's shape {tuple(stream.shape)}, got {tuple(branch.shape)}")
    _check_widths(stream, branch_bias, gain, bias)
    total, normed, _ = _add_norm(stream, branch, branch_bias, gain, bias, eps)
    return total, normed


def norm(
    x: Float[Tensor, "... d_model"],
    gain: Float[Tensor, " d_model"],
    bias: Float[Tensor, " d_model"] | None,
    eps: float,
    dtype: torch.dtype,
) -> Float[Tensor, "... d_model"]:
    """The norm of x alone, as `add_norm` computes it, in `dtype`; raise ValueError if shapes do not fit."""
    _check_widths(x, gain, bias)
    return cast(tuple[Tensor, Tensor], _norm(x, gain, bias, eps, dtype))[0]


def _check_widths(rows: Tensor, *vectors: Tensor | None) -> None:
    for vector in vectors:
        if vector is not None and vector.shape != rows.shape[-1:]:
            raise ValueError(f"needed vectors of {rows.shape[-1]} elements, got {tuple(vector.shape)}")


def bias_gelu(x: Float[Tensor, "... d_ff"], bias: Float[Tensor, " d_ff"]) -> Float[Tensor, "... d_ff"]:
    """GELU of x + bias in its tanh approximation (Hendrycks and Gimpel 2016), computed in fp32 and rounded once.

    Raises ValueError for a bias of another width.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"needed a bias of {x.shape[-1]} elements, got {tuple(bias.shape)}")
    return cast(Tensor, _bias_gelu(x, bias))


# no shapes are declared below, because PyTorch reads the schema of an operator from its types


@torch.library.custom_op("cs336_systems::add_norm", mutates_args=())
def _add_norm(
    stream: Tensor, branch: Tensor, branch_bias: Tensor | None, gain: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Also returns, for backward, 1 / deviation of each row and, for LayerNorm, its mean."""
    if stream.is_cuda:
        from cs336_systems.model.fast import fused_blocks_kernel  # Triton, which only comes with PyTorch for GPUs

        return fused_blocks_kernel.add_norm(stream, branch, branch_bias, gain, bias, eps)
    total = stream.float() + branch.float()
    total = (total if branch_bias is None else total + branch_bias.float()).to(stream.dtype).contiguous()
    return total, *_normed(total, gain, bias, eps, branch.dtype)


@torch.library.custom_op("cs336_systems::rms_or_layer_norm", mutates_args=())
def _norm(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Also returns the statistics that `_add_norm` returns."""
    if x.is_cuda:
        from cs336_systems.model.fast import fused_blocks_kernel

        return fused_blocks_kernel.norm(x, gain, bias, eps, dtype)
    return _normed(x, gain, bias, eps, dtype)


def _normed(total: Tensor, gain: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = total.float().flatten(0, -2)
    means = [] if bias is None else [wide.mean(dim=-1)]
    wide = wide - means[0][:, None] if means else wide
    scale = (wide.square().mean(dim=-1) + eps).rsqrt()
    normed = wide * scale[:, None] * gain.float()
    normed = normed if bias is None else normed + bias.float()
    return normed.view(total.shape).to(dtype, copy=True), torch.stack((scale, *means))


@torch.library.custom_op("cs336_systems::add_norm_backward", mutates_args=())
def _add_norm_backward(
    stream_gradient: Tensor | None,
    gradient: Tensor,
    total: Tensor,
    statistics: Tensor,
    gain: Tensor,
    is_centred: bool,
    branch_bias_type: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of stream and branch, of gain and (if centred) bias as rows in fp32, and of the branch's bias.

    The last has its own type, and is empty without a bias.
    """
    if total.is_cuda:
        from cs336_systems.model.fast import fused_blocks_kernel

        return fused_blocks_kernel.add_norm_backward(
            stream_gradient, gradient, total, statistics, gain, is_centred=is_centred, branch_bias_type=branch_bias_type
        )
    scale, *means = statistics[:, :, None]
    own = gradient.float().flatten(0, -2)
    wide = total.float().flatten(0, -2)
    normed = (wide - means[0] if means else wide) * scale
    sums = [(own * normed).sum(dim=0)] + ([own.sum(dim=0)] if is_centred else [])
    own = own * gain.float()
    result = own - normed * (own * normed).mean(dim=-1, keepdim=True)
    result = (result - own.mean(dim=-1, keepdim=True) if is_centred else result) * scale
    result = result if stream_gradient is None else result + stream_gradient.float().flatten(0, -2)
    of_branch_bias = result.new_empty(0) if branch_bias_type is None else result.sum(dim=0).to(branch_bias_type)
    result = result.view(total.shape)
    rows = _aligned_rows(statistics, len(sums), total.shape[-1]).copy_(torch.stack(sums))
    return result.to(total.dtype, copy=True), result.to(gradient.dtype, copy=True), rows, of_branch_bias


def _aligned_rows(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Rows in fp32, each at a multiple of 16 bytes, which AdamW's kernel reads at once."""
    return like.new_empty(num_rows, -(-width // 4) * 4)[:, :width]


@torch.library.custom_op("cs336_systems::bias_gelu", mutates_args=())
def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    if x.is_cuda:
        from cs336_systems.model.fast import fused_blocks_kernel

        return fused_blocks_kernel.bias_gelu(x, bias)
    return F.gelu(x.float() + bias.float(), approximate="tanh").to(x.dtype).contiguous()


@torch.library.custom_op("cs336_systems::bias_gelu_backward", mutates_args=())
def _bias_gelu_backward(x: Tensor, bias: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from cs336_systems.model.fast import fused_blocks_kernel

        return fused_blocks_kernel.bias_gelu_backward(x, bias, gradient)
    wide = torch.ops.aten.gelu_backward(gradient.float(), x.float() + bias.float(), approximate="tanh")
    of_bias = wide.flatten(0, -2).sum(dim=0).to(bias.dtype)
    return wide.to(x.dtype, copy=True, memory_format=torch.contiguous_format), of_bias


@_add_norm.register_fake
def _(
    stream: Tensor, branch: Tensor, branch_bias: Tensor | None, gain: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    del branch_bias, gain, eps
    return stream.new_empty(stream.shape), branch.new_empty(branch.shape), _empty_statistics(stream, bias)


@_norm.register_fake
def _(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del gain, eps
    return x.new_empty(x.shape, dtype=dtype), _empty_statistics(x, bias)


def _empty_statistics(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(1 if bias is None else 2, rows.numel() // rows.shape[-1], dtype=torch.float32)


@_add_norm_backward.register_fake
def _(
    stream_gradient: Tensor | None, gradient: Tensor, total: Tensor, statistics: Tensor, gain: Tensor,
    is_centred: bool, branch_bias_type: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del stream_gradient
    width = total.shape[-1]
    of_branch_bias = gain.new_empty(0 if branch_bias_type is None else width, dtype=branch_bias_type or torch.float32)
    rows = _aligned_rows(statistics, 1 + is_centred, width)
    return total.new_empty(total.shape), gradient.new_empty(gradient.shape), rows, of_branch_bias


@_bias_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    del bias
    return x.new_empty(x.shape)


@_bias_gelu_backward.register_fake
def _(x: Tensor, bias: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    del gradient
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _keep_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ANN401
    _, branch, branch_bias, gain, bias, _ = inputs
    total, _, statistics = output
    ctx.save_for_backward(total, statistics, gain)
    ctx.types = (branch.dtype, None if branch_bias is None else branch_bias.dtype, None if bias is None else bias.dtype)
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)  # the sum has no gradient after the last norm


def _differentiate_add_norm(
    ctx: Any,  # noqa: ANN401
    stream_gradient: Tensor | None,
    gradient: Tensor | None,
    _statistics: None,
) -> tuple[Tensor | None, ...]:
    total, statistics, gain = ctx.saved_tensors
    branch_type, branch_bias_type, bias_type = ctx.types
    if gradient is None:
        gradient = torch.zeros_like(total, dtype=branch_type)
    of_stream, of_branch, rows, of_branch_bias = _add_norm_backward(
        stream_gradient, gradient, total, statistics, gain, bias_type is not None, branch_bias_type
    )
    of_bias = None if bias_type is None else rows[1].to(bias_type)
    return of_stream, of_branch, of_branch_bias if branch_bias_type else None, rows[0].to(gain.dtype), of_bias, None


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    x, gain, bias, _, _ = inputs
    statistics = output[1]
    ctx.save_for_backward(x, statistics, gain)
    ctx.bias_type = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(statistics)


def _differentiate_norm(ctx: Any, gradient: Tensor, _statistics: None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    x, statistics, gain = ctx.saved_tensors
    is_centred = ctx.bias_type is not None
    of_x, _, rows, _ = _add_norm_backward(None, gradient, x, statistics, gain, is_centred, None)
    return of_x, rows[0].to(gain.dtype), rows[1].to(ctx.bias_type) if is_centred else None, None, None


def _keep_bias_gelu(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401
    del output
    ctx.save_for_backward(*inputs)


def _differentiate_bias_gelu(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    x, bias = ctx.saved_tensors
    return cast(tuple[Tensor, Tensor], _bias_gelu_backward(x, bias, gradient))


_add_norm.register_autograd(_differentiate_add_norm, setup_context=_keep_add_norm)
_norm.register_autograd(_differentiate_norm, setup_context=_keep_norm)
_bias_gelu.register_autograd(_differentiate_bias_gelu, setup_context=_keep_bias_gelu)
