"""Linear layers in fp8, in which tensor cores from Ada and Hopper on compute twice as fast as in
bf16.

Each tensor is divided by one scale, so that it fills the range of the type. The scale is computed
in every step, on the device, from the largest magnitude, so no state is kept between steps and the
host never waits.

Finding the largest magnitude costs one more read of the tensor, unless the kernel that writes the
tensor finds it too. In forward such a kernel returns it beside the tensor. In backward autograd
passes on gradients only, so a layer returns a tag beside its result: an element whose gradient is,
by agreement, the scale of the result's gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .operators import operator

DTYPE = torch.float8_e4m3fn
"""Type of all factors: 3 bits of mantissa, and a range of 2^18.

Others use e5m2 (2 bits, range 2^32) for gradients. Measured on a CPU, e5m2 makes the error of all
weights' gradients against fp32 larger by 4 to 57 %, also where the parts of a packed matmul have
gradients fifty times apart (q_proj and v_proj), where elements are lognormal with sigma 3, and
where one token has 10^4 times the gradient of the others.
"""
TINY = 1e-30
"""Lower bound on the largest element, so that a tensor of zeros has a scale too."""
MAX = torch.finfo(DTYPE).max
"""The largest number of the type."""

Largest = Float[Tensor, " parts"]
"""fp32 magnitudes whose maximum is a tensor's largest; not finite if an element is not."""
Fp8Scale = Float[Tensor, ""]
"""The scale in fp32 that a tensor is divided by."""
Tag = Float[Tensor, "1"]
"""Dummy second output of a layer in fp8. Its value is never read; in backward, its gradient carries
the scale of the gradient of the layer's result.
"""


def fp8_linear(
    x: Float[Tensor, "... d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
    largest: Largest | None = None,
    weight_scale: Fp8Scale | None = None,
    *,
    tags: bool = False,
) -> tuple[Float[Tensor, "... d_out"], Tag | None]:
    """x W^T, plus a bias, with factors in fp8 and the result in the weight's type; backward's two
    matmuls likewise.

    `largest` has magnitudes of x, and `weight_scale` is the weight's; None if not known. d_in,
    d_out and the number of rows of x must be multiples of 16 on a GPU, as the configuration sees
    to. x and the weight are saved for backward in fp8: half the bytes of bf16, and cast only once.

    With `tags` the second result is a tag, for the only operation that reads the first: its
    backward returns, as the tag's gradient, the scale of the result's gradient, which this layer
    computes otherwise.
    """
    x = x.to(weight.dtype)
    rows = x.flatten(0, -2)
    result, tag = _Fp8Linear.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, largest, weight_scale, tags, torch.is_grad_enabled()
    )
    return result.unflatten(0, x.shape[:-1]), tag if tags else None


def scale_of(largest: Largest) -> Fp8Scale:
    """The fp8 scale of a tensor whose largest magnitude is the largest of these."""
    return _scales(largest.amax())


def _scales(largest: Tensor) -> Tensor:
    """Scales of tensors with these largest magnitudes."""
    return largest.float().clamp(min=TINY) / MAX


def scale_if(x: Float[Tensor, "... columns"], is_wanted: bool) -> Float[Tensor, " one"]:
    """The fp8 scale of x as one element; an empty tensor unless `is_wanted`."""
    if not is_wanted:
        return x.new_empty(0, dtype=torch.float32)
    return scale_of(x.abs()).view(1)


def magnitudes(x: Float[Tensor, "... columns"], parts: int) -> Largest:
    """The largest magnitude of x, repeated `parts` times."""
    if not parts:
        return x.new_empty(0, dtype=torch.float32)
    return x.abs().amax().float().repeat(parts)


def keep_tagged(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save for backward the inputs of an operator but the last, a tag, and whether there is one;
    the operator's second result are magnitudes of its first.
    """
    *saved, tag = inputs
    ctx.save_for_backward(*saved)
    ctx.is_tagged = tag is not None
    ctx.mark_non_differentiable(output[1])


class KeptScale(NamedTuple):
    """The scale of a tensor that is kept from step to step, and the magnitudes that give it."""

    largest: Largest
    scale: Fp8Scale


def update_scales(kept: Sequence[KeptScale]) -> None:
    """Compute the scales of all these tensors, with as many magnitudes each, in few launches."""
    with torch.no_grad():
        scales = _scales(torch.stack([tensor.largest for tensor in kept]).amax(dim=1))
        torch._foreach_copy_([tensor.scale for tensor in kept], [*scales.unbind()])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        largest: Tensor | None,
        weight_scale: Tensor | None,
        reads_tag: bool,
        is_grad_enabled: bool,  # at the call; inside this method it never is
    ) -> tuple[Tensor, Tensor]:
        x_scale = scale_of(_largest_of_rows(x) if largest is None else largest)
        weight_scale = scale_of(_largest_of_rows(weight)) if weight_scale is None else weight_scale
        has_backward = is_grad_enabled and any(ctx.needs_input_grad)
        x8, x8_transpose = _fp8_casts(x, x_scale, has_backward)
        weight8, weight8_transpose = _fp8_casts(weight, weight_scale, has_backward)
        ctx.save_for_backward(x8_transpose, x_scale, weight8_transpose, weight_scale)
        ctx.has_bias, ctx.reads_tag = bias is not None, reads_tag
        # fast: partial sums keep fewer bits than fp32. Gradients are sums over all tokens and use
        # full accumulation
        result = _matmul(x8, weight8.t(), x_scale, weight_scale, x.dtype, bias, use_fast_accum=True)
        return result, x.new_empty(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
        """With `reads_tag`, `scale`, the tag's gradient, is the fp8 scale of `gradient`."""
        x8_transpose, x_scale, weight8_transpose, weight_scale = ctx.saved_tensors
        scale = scale.view(()) if ctx.reads_tag else scale_of(_largest_of_rows(gradient))
        gradient8, gradient8_transpose = _fp8_casts(gradient, scale, True)
        of_x = _matmul(gradient8, weight8_transpose.t(), scale, weight_scale, gradient.dtype)
        of_weight = _matmul(gradient8_transpose, x8_transpose.t(), scale, x_scale, gradient.dtype)
        of_bias = gradient.sum(dim=0) if ctx.has_bias else None
        return of_x, of_weight, of_bias, None, None, None, None


def _matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """a b, of factors in fp8, times both scales, plus a bias, in `dtype`.

    On a CPU the same factors are multiplied in fp32: PyTorch's own fp8 matmul overflows to NaN on
    some processors, and takes a thousand times as long on others.
    """
    if a.is_cuda:
        return torch._scaled_mm(
            a, b, a_scale, b_scale, bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum
        )
    result = (a.float() @ b.float()) * (a_scale * b_scale)
    return (result if bias is None else result + bias).to(dtype)


def _largest_of_rows(x: Tensor) -> Tensor:
    """Largest magnitude of each row of a matrix, which `scale_of` reduces to one scale.

    The compiler fuses that of a row with the kernel that writes the row, such as a norm.
    """
    return x.abs().amax(dim=1)


@operator("fused_blocks_kernel.casts")
def _fp8_casts(x: Tensor, scale: Tensor, transposes: bool) -> tuple[Tensor, Tensor]:
    """A matrix in fp8, and its transpose, which is empty unless `transposes`; both row-major.

    Hopper's fp8 matmul needs the inner axis contiguous in both factors. If any element is not
    finite, the scale is not, and all products with x become NaN.
    """
    # rounding may put the largest element slightly above MAX, but the cast gives NaN only from 3 %
    # above MAX on
    result = (x.float() * scale.reciprocal()).to(DTYPE).contiguous()
    return result, result.t().contiguous() if transposes else result.new_empty(0, 0)
