"""The feed-forward network with its activation inside of the matmuls.

Forward computes GELU or SwiGLU and its slopes while the first matmul's result is still in registers, and backward
multiplies by the slopes within the matmul that computes the gradient of the activation. So the activation has no
kernels of its own, its gradient is never written, and instead of its input, which is as large, its slopes are kept. On
a GPU QuACK's matmuls do this (feed_forward_kernel.py), on a CPU PyTorch's operators compute the same.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from cs336_systems.model.fast.operators import operator


def feed_forward(
    x: Float[Tensor, "batch seq d_model"],
    first: Float[Tensor, "expanded d_model"],
    bias: Float[Tensor, " d_ff"] | None,
    second: Float[Tensor, "d_model d_ff"],
) -> Float[Tensor, "batch seq d_model"]:
    """act(x first^T + bias) second^T: GELU in its tanh approximation with a bias, SwiGLU without one.

    For SwiGLU `first` has the rows of the gate and then as many of its other factor; for GELU it has `d_ff` rows.
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
        own = gradient.flatten(0, -2)
        of_second = own.t() @ hidden
        of_expanded, of_bias = _contract_backward(own, second, slopes, ctx.bias_type)
        of_x = (of_expanded @ first).view(*gradient.shape[:-1], first.shape[1])
        return of_x, of_expanded.t() @ rows, None if ctx.bias_type is None else of_bias, of_second


@operator("feed_forward_kernel.expand")
def _expand(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Slopes of the activation of x weight^T + bias, and the activation.

    The slopes of SwiGLU are those along its gate and then those along its other factor.
    """
    expanded = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if bias is not None:
        hidden = F.gelu(expanded, approximate="tanh")
        slopes = torch.ops.aten.gelu_backward(torch.ones_like(expanded), expanded, approximate="tanh")
    else:
        gate, up = expanded.chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        slopes = torch.cat((torch.ops.aten.silu_backward(up, gate), F.silu(gate)), dim=-1)
    return slopes.to(x.dtype), hidden.to(x.dtype)


@operator("feed_forward_kernel.contract_backward")
def _contract_backward(
    gradient: Tensor, weight: Tensor, slopes: Tensor, bias_type: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The gradient of what `_expand` activates, from that of the activation times weight^T; and of its bias, or empty.

    `bias_type` is the type of the bias, or None without a bias.
    """
    own = gradient.float() @ weight.float()
    result = own.repeat(1, slopes.shape[1] // own.shape[1]) * slopes.float()
    of_bias = own.new_empty(0) if bias_type is None else result.sum(dim=0).to(bias_type)
    return result.to(slopes.dtype), of_bias
