"""The operations after packed matmuls, against the layers with a matmul for each part, differentiated by autograd."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cs336_systems.model.fast import packed
from cs336_systems.model.transformer import rope_rotations, rotate_pairs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(2, 5, 3, 8), (1, 3, 25, 64), (2, 16, 4, 80), (4, 512, 12, 64)]
"""Batch, tokens, heads, width of a head."""


def made(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()


def swiglu_of_parts(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def heads_of_parts(x: Tensor, rotations: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (part.unflatten(-1, (-1, 2 * rotations.shape[1])) for part in x.chunk(3, dim=-1))
    return rotate_pairs(q, rotations), rotate_pairs(k, rotations), v


def is_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """To rounding; in bf16 the oracle, which computes in fp32, is rounded at the end."""
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    return torch.allclose(found.float(), expected.to(dtype).float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [8, 24, 1024, 1600, 6400])
def test_swiglu(width: int, device: str) -> None:
    """In bf16 on a GPU alone: there the kernel rounds once, PyTorch after each operation."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = made(3, 7, 2 * width, dtype=dtype, device=device)
    gradient = made(3, 7, width, dtype=dtype, device=device).detach()
    wide = x.detach().float().requires_grad_()
    found, expected = packed.swiglu(x), swiglu_of_parts(wide)
    found.backward(gradient)
    expected.backward(gradient.float())
    assert x.grad is not None
    assert wide.grad is not None
    assert is_close(found, expected, dtype)
    assert is_close(x.grad, wide.grad, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """Their gradients as attention returns them, heads before tokens."""
    batch, seq, heads, d_head = shape
    rotations = rope_rotations(seq, d_head, 10_000.0).to(device)
    x = made(batch, seq, 3 * heads * d_head, dtype=dtype, device=device)
    wide = x.detach().float().requires_grad_()
    found, expected = packed.rope_heads(x, rotations), heads_of_parts(wide, rotations)
    gradients = made(3, batch, heads, seq, d_head, dtype=dtype, device=device).detach().transpose(2, 3).unbind()
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(expected, [gradient.float() for gradient in gradients])
    assert x.grad is not None
    assert wide.grad is not None
    assert all(is_close(part, other, dtype) for part, other in zip(found, expected, strict=True))
    assert is_close(x.grad, wide.grad, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_with_a_bias(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """The gradient of a bias that the matmul has added is that of a bias that autograd adds."""
    batch, seq, heads, d_head = shape
    width = 3 * heads * d_head
    packed_heads, bias = (made(*size, dtype=dtype, device=device) for size in ((batch, seq, width), (width,)))
    wide, wide_bias = (each.detach().double().requires_grad_() for each in (packed_heads, bias))
    found = packed.cut_heads(packed_heads + bias.detach(), bias, heads)
    expected = [part.unflatten(-1, (heads, d_head)) for part in (wide + wide_bias).chunk(3, dim=-1)]
    gradients = made(3, batch, heads, seq, d_head, dtype=dtype, device=device).detach().transpose(2, 3).unbind()
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    assert all(torch.equal(part, (packed_heads + bias).view(batch, seq, 3, heads, d_head)[:, :, index])
               for index, part in enumerate(found))  # fmt: skip
    assert packed_heads.grad is not None
    assert bias.grad is not None
    assert wide.grad is not None
    assert wide_bias.grad is not None
    assert torch.equal(packed_heads.grad.double(), wide.grad)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    assert bias.grad.dtype is dtype
    torch.testing.assert_close(
        bias.grad.double(), wide_bias.grad, rtol=tolerance, atol=tolerance * (batch * seq) ** 0.5
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2047, 16_384])
def test_a_bias_gets_the_gradients_of_all_rows(rows: int, device: str) -> None:
    """None left out, none counted twice. Of small integers, so that sums are exact."""
    packed_heads, bias = (torch.zeros(shape, device=device, requires_grad=True) for shape in ((1, rows, 72), (72,)))
    q, k, v = packed.cut_heads(packed_heads, bias, 3)
    (q.sum() + 2 * k.sum() + 3 * v.sum()).backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [share * rows for share in (1.0, 2.0, 3.0) for _ in range(24)]


@pytest.mark.parametrize("device", DEVICES)
def test_pytorch_finds_the_operators_well_made(device: str) -> None:
    """Their schemas, shapes without data, and gradients, by PyTorch's own checks."""
    x = made(2, 4, 48, dtype=torch.float32, device=device)
    torch.library.opcheck(packed._swiglu, (x,))
    torch.library.opcheck(packed._rope_heads, (x, rope_rotations(4, 8, 10_000.0).to(device)))
    parts = x.detach().view(2, 4, 3, 2, 8).unbind(2)
    torch.library.opcheck(packed._cut_heads_backward, (*parts, torch.bfloat16, True))


def test_rows_that_do_not_lie_one_after_the_other() -> None:
    x = made(4, 2, 48, dtype=torch.float32, device="cpu").transpose(0, 1)
    torch.library.opcheck(packed._swiglu, (x.detach().requires_grad_(),))


def test_rotations_of_other_positions_are_refused() -> None:
    """A kernel would read beside them."""
    with pytest.raises(ValueError, match="needed rotations of 4 positions, got 3"):
        packed.rope_heads(torch.zeros(2, 4, 48), rope_rotations(3, 8, 10_000.0))


def test_a_bias_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needed a bias of 48 elements, got \(16,\)"):
        packed.cut_heads(torch.zeros(2, 4, 48), torch.zeros(16), 2)


@pytest.mark.parametrize("device", DEVICES)
def test_they_compile_without_a_break(device: str) -> None:
    def all_three(x: Tensor, rotations: Tensor, bias: Tensor) -> Tensor:
        q, k, v = packed.rope_heads(x, rotations)
        packed_heads = F.linear(torch.cat((q, k, v), dim=-1).flatten(2), torch.eye(48, device=device), bias.detach())
        q, k, v = packed.cut_heads(packed_heads, bias, 2)
        return packed.swiglu(torch.cat(((q * k).flatten(2), v.flatten(2)), dim=-1))

    x, bias = (made(*shape, dtype=torch.float32, device=device) for shape in ((2, 4, 48), (48,)))
    rotations = rope_rotations(4, 8, 10_000.0).to(device)
    expected = torch.autograd.grad(all_three(x, rotations, bias).square().sum(), (x, bias))
    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, rotations, bias).square().sum(), (x, bias))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
