"""The operations between matmuls, one kernel each way: residual addition with norm, bias with GELU,
the embedding.

A branch is added to the residual stream by the next norm's kernel. torch.compile, used block by
block, cannot fuse the two if that norm is in the next block, and sums the gradients of gains and
biases in separate kernels. The sum keeps the stream's type, fp32 under autocast. Stream and branch
have the same gradient, which is written once for each of their types.

PyTorch's backward of an embedding sorts the tokens, or gives each row to one thread block, and
takes 3 to 6 times the time that its memory traffic needs. Here each token's gradient is added to
its row in one pass, those of equal tokens in no fixed order, as cuDNN's attention adds the
gradients of queries.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from .fp8 import Largest, Tag, keep_tagged, magnitudes, scale_if
from .operators import operator

GELU_PART = 2, 512
"""Rows and columns of a tile of GELU's result, of which the kernel finds the largest magnitude."""


def add_norm(
    stream: Float[Tensor, "... d_model"],
    branch: Float[Tensor, "... d_model"],
    branch_bias: Float[Tensor, " d_model"] | None,
    gain: Float[Tensor, " d_model"],
    bias: Float[Tensor, " d_model"] | None,
    eps: float,
    tag: Tag | None = None,
    *,
    measures: bool = False,
) -> tuple[Float[Tensor, "... d_model"], Float[Tensor, "... d_model"], Largest | None]:
    """stream + branch + branch_bias in the type of `stream`, and the norm of this sum in the type
    of `branch`.

    The norm is LayerNorm with a `bias` and RMSNorm without, computed in fp32. With `measures`, the
    last result has the norm's largest magnitudes. `tag` is the branch's (fp8.py).
    """
    assert stream.shape == branch.shape
    total, normed, _, largest = _add_norm(
        stream, branch, branch_bias, gain, bias, eps, branch.dtype, tag, measures
    )
    return total, normed, largest if measures else None


def norm(
    x: Float[Tensor, "... d_model"],
    gain: Float[Tensor, " d_model"],
    bias: Float[Tensor, " d_model"] | None,
    eps: float,
    dtype: torch.dtype,
) -> Float[Tensor, "... d_model"]:
    """The norm of x alone, as `add_norm` computes it, in `dtype`."""
    normed: Tensor = _add_norm(x, None, None, gain, bias, eps, dtype, None, False)[1]
    return normed


def bias_gelu(
    x: Float[Tensor, "... d_ff"], bias: Float[Tensor, " d_ff"], tag: Tag | None = None
) -> tuple[Float[Tensor, "... d_ff"], Largest | None]:
    """GELU of x + bias in its tanh approximation (Hendrycks and Gimpel 2016), computed in fp32 and
    rounded once.

    With a `tag`, that of x (fp8.py), the last result has the first one's largest magnitudes.
    """
    assert bias.shape == x.shape[-1:]
    result, largest = _bias_gelu(x, bias, tag)
    return result, None if tag is None else largest


@operator("fused_blocks_kernel.add_norm")
def _add_norm(
    stream: Tensor,
    branch: Tensor | None,
    branch_bias: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    tag: Tensor | None,
    measures: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of stream, branch and the branch's bias; its norm in `dtype`, an RMSNorm, or a
    LayerNorm where there is a `bias`; the norm's statistics; and the magnitude of each row of the
    norm, of which there are none unless `measures`.

    Without a branch the norm is that of the stream, and the sum is empty. The statistics, which
    backward needs, are 1 / deviation of each row and, for LayerNorm, its mean.
    """
    del tag
    total, result = stream, stream.new_empty(0)
    if branch is not None:
        wide = stream.float() + branch.float()
        if branch_bias is not None:
            wide = wide + branch_bias.float()
        total = result = wide.to(stream.dtype).contiguous()
    wide = total.float().flatten(0, -2)
    means = [] if bias is None else [wide.mean(dim=-1)]
    if means:
        wide = wide - means[0].unsqueeze(-1)
    scale = (wide.square().mean(dim=-1) + eps).rsqrt()
    normed = wide * scale.unsqueeze(-1) * gain.float()
    if bias is not None:
        normed = normed + bias.float()
    normed = normed.view(total.shape).to(dtype, copy=True)
    return result, normed, torch.stack((scale, *means)), magnitudes(normed, len(scale) * measures)


@operator("fused_blocks_kernel.add_norm_backward")
def _add_norm_backward(
    stream_gradient: Tensor | None,
    gradient: Tensor,
    total: Tensor,
    statistics: Tensor,
    gain: Tensor,
    is_centred: bool,
    branch_bias_type: torch.dtype | None,
    measures: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of stream and branch, of gain and (if centred) bias as rows in fp32, and of the
    branch's bias; and the fp8 scale of the branch's gradient, which is empty unless `measures`.

    The branch's is empty if it is the same as the stream's, in the same type; that of its bias is
    empty if `branch_bias_type` is None.
    """
    scale, *means = statistics.unsqueeze(-1)
    of_normed = gradient.float().flatten(0, -2)
    wide = total.float().flatten(0, -2)
    if means:
        wide = wide - means[0]
    normed = wide * scale
    sums = [(of_normed * normed).sum(dim=0)]
    if is_centred:
        sums.append(of_normed.sum(dim=0))
    of_normed = of_normed * gain.float()
    result = of_normed - normed * (of_normed * normed).mean(dim=-1, keepdim=True)
    if is_centred:
        result = result - of_normed.mean(dim=-1, keepdim=True)
    result = result * scale
    if stream_gradient is not None:
        result = result + stream_gradient.float().flatten(0, -2)
    of_branch_bias = result.new_empty(0)
    if branch_bias_type is not None:
        of_branch_bias = result.sum(dim=0).to(branch_bias_type)
    result = result.view(total.shape)
    of_stream = result.to(total.dtype, copy=True)
    of_branch, largest = of_stream.new_empty(0), of_stream
    if total.dtype != gradient.dtype:
        of_branch = largest = result.to(gradient.dtype, copy=True)
    return of_stream, of_branch, torch.stack(sums), of_branch_bias, scale_if(largest, measures)


@operator("fused_blocks_kernel.bias_gelu")
def _bias_gelu(x: Tensor, bias: Tensor, tag: Tensor | None) -> tuple[Tensor, Tensor]:
    """`bias_gelu`, with a magnitude for each tile of GELU_PART; without a tag there are none."""
    result = F.gelu(x.float() + bias.float(), approximate="tanh").to(x.dtype).contiguous()
    return result, magnitudes(result, gelu_parts(x, tag is not None))


def gelu_parts(x: Tensor, measures: bool) -> int:
    """How many magnitudes of GELU's result there are, one a tile; 0 unless `measures`."""
    rows, columns = GELU_PART
    width = x.shape[-1]
    return -(-(x.numel() // width) // rows) * -(-width // columns) if measures else 0


@operator("fused_blocks_kernel.bias_gelu_backward")
def _bias_gelu_backward(
    x: Tensor, bias: Tensor, gradient: Tensor, measures: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of the bias from that of GELU(x + bias), computed in fp32 and rounded
    once, and the fp8 scale of the former, which is empty unless `measures`.
    """
    wide = torch.ops.aten.gelu_backward(
        gradient.float(), x.float() + bias.float(), approximate="tanh"
    )
    of_bias = wide.flatten(0, -2).sum(dim=0).to(bias.dtype)
    of_x = wide.to(x.dtype, copy=True, memory_format=torch.contiguous_format)
    return of_x, of_bias, scale_if(of_x, measures)


@operator()
def lookup(weight: Tensor, tokens: Tensor) -> Tensor:
    """The rows of `weight` that `tokens` index, by PyTorch's kernel; its backward is replaced."""
    return F.embedding(tokens, weight)


@operator("fused_blocks_kernel.lookup_backward")
def _lookup_backward(gradient: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """The gradient of the table in fp32: each token's gradient, added to its row."""
    result = gradient.new_zeros(num_rows, gradient.shape[-1], dtype=torch.float32)
    return result.index_add_(0, tokens.flatten(), gradient.flatten(0, -2).float())


def _keep_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save for backward what `_differentiate_add_norm` needs."""
    stream, branch, branch_bias, gain, bias, _, ctx.dtype, tag, _ = inputs
    total, _, statistics, largest = output
    ctx.has_branch, ctx.is_tagged = branch is not None, tag is not None
    ctx.save_for_backward(total if ctx.has_branch else stream, statistics, gain)
    ctx.branch_bias_type = None if branch_bias is None else branch_bias.dtype
    ctx.bias_type = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(statistics, largest)
    ctx.set_materialize_grads(False)  # the sum has no gradient after the last norm


def _differentiate_add_norm(
    ctx: Any,
    stream_gradient: Tensor | None,
    gradient: Tensor | None,
    _statistics: None,
    _largest: None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments of `_add_norm`, in their order."""
    total, statistics, gain = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(total, dtype=ctx.dtype)
    of_stream, of_branch, rows, of_branch_bias, scale = _add_norm_backward(
        stream_gradient,
        gradient,
        total,
        statistics,
        gain,
        ctx.bias_type is not None,
        ctx.branch_bias_type,
        ctx.is_tagged,
    )
    if not of_branch.numel():
        of_branch = of_stream
    return (
        of_stream,
        of_branch if ctx.has_branch else None,
        of_branch_bias if ctx.branch_bias_type else None,
        rows[0].to(gain.dtype),
        rows[1].to(ctx.bias_type) if ctx.bias_type else None,
        None,
        None,
        scale if ctx.is_tagged else None,
        None,
    )


def _differentiate_bias_gelu(
    ctx: Any, gradient: Tensor, _largest: None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the arguments of `_bias_gelu`, in their order."""
    of_x, of_bias, scale = _bias_gelu_backward(*ctx.saved_tensors, gradient, ctx.is_tagged)
    return of_x, of_bias, scale if ctx.is_tagged else None


def _keep_lookup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """Save for backward what `_differentiate_lookup` needs."""
    del output
    weight, tokens = inputs
    ctx.save_for_backward(tokens)
    ctx.num_rows, ctx.dtype = len(weight), weight.dtype


def _differentiate_lookup(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    """Gradients of the arguments of `lookup`, in their order."""
    (tokens,) = ctx.saved_tensors
    sums: Tensor = _lookup_backward(gradient, tokens, ctx.num_rows)
    return sums.to(ctx.dtype), None


_add_norm.register_autograd(_differentiate_add_norm, setup_context=_keep_add_norm)
_bias_gelu.register_autograd(_differentiate_bias_gelu, setup_context=keep_tagged)
lookup.register_autograd(_differentiate_lookup, setup_context=_keep_lookup)
