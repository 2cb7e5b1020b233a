"""Linear layers in fp8, of which tensor cores from Ada and Hopper on multiply twice as much in a second as of bf16.

Each tensor is divided by one unit, so that it fills the range of the type. The unit is found anew in every step, on the
device, from the largest element: nothing is remembered from step to step, and the host waits for nothing.
"""

from typing import Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from cs336_systems.config import FP8_MULTIPLE

DTYPE = torch.float8_e4m3fn
"""Of all factors: 3 bits of mantissa, and a range of 2^18.

Gradients have it too, though others give them e5m2 for its range (2 bits, 2^32): on a CPU that took the gradients of
all weights further from those of fp32, by 4 to 57 %, also where the parts of a packed matmul have gradients
fifty times apart (q_proj and v_proj), where elements are lognormal with sigma 3, and where one token has 10^4 times the
gradient of the others.
"""
TINY = 1e-30
"""Below it the largest element is taken for this, as the zeros of a tensor of zeros have no unit."""


def fp8_linear(
    x: Float[Tensor, "... d_in"], weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None = None
) -> Float[Tensor, "... d_out"]:
    """x W^T, plus a bias, with factors in fp8 and the result in the weight's type; backward's two products alike.

    Where d_in, d_out or the number of rows of x is no multiple of 16, the layer stays in the weight's type. What
    backward reads of x and of the weight is kept in fp8: half the bytes of bf16, and cast only once.
    """
    x = x.to(weight.dtype)
    rows = x.flatten(0, -2)
    if any(size % FP8_MULTIPLE for size in (*rows.shape, len(weight))):
        return F.linear(x, weight, bias)
    result: Tensor = _Fp8Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return cast(Tensor, result.unflatten(0, x.shape[:-1]))


class _Context(Protocol):
    """What forward leaves for backward."""

    has_bias: bool
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x8, x_unit = _cast(x)
        weight8, weight_unit = _cast(weight)
        ctx.save_for_backward(x8, x_unit, weight8, weight_unit)
        ctx.has_bias = bias is not None
        # fast: partial sums keep fewer bits than fp32's. Gradients are sums over all tokens, and get them in full
        return _matmul(x8, weight8.t(), x_unit, weight_unit, x.dtype, bias, use_fast_accum=True)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x8, x_unit, weight8, weight_unit = ctx.saved_tensors
        gradient8, unit = _cast(gradient)
        of_x = _matmul(gradient8, _by_columns(weight8), unit, weight_unit, gradient.dtype)
        of_weight = _matmul(_by_columns(gradient8).t(), _by_columns(x8), unit, x_unit, gradient.dtype)
        return of_x, of_weight, gradient.sum(dim=0) if ctx.has_bias else None


def _matmul(
    a: Tensor,
    b: Tensor,
    a_unit: Tensor,
    b_unit: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """a b, of factors in fp8, times both units, plus a bias, in `dtype`.

    On a CPU the same factors are multiplied in fp32. PyTorch's own product in fp8 depends on the processor there: on
    some it overflows to NaN, or takes a thousand times as long.
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b, a_unit, b_unit, bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum)
    result = (a.float() @ b.float()) * (a_unit * b_unit)
    return (result if bias is None else result + bias).to(dtype)


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in fp8, by rows, and the unit to multiply it by again, in fp32. Where anything is not finite, all is NaN."""
    # first of each row: that much the compiler finds while it makes the row, as a norm does
    largest = x.abs().amax(dim=1).amax().float()
    unit = largest.clamp(min=TINY) / torch.finfo(DTYPE).max
    # the largest may miss the end of the range by a rounding: only 3 % further on it would be no number any more
    return (x.float() * unit.reciprocal()).to(DTYPE).contiguous(), unit


def _by_columns(matrix: Tensor) -> Tensor:
    """The same matrix, each column contiguous: Hopper multiplies fp8 along what is contiguous in both factors."""
    return matrix.t().contiguous().t()
