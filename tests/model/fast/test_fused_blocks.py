"""Residual addition with norm, bias with GELU, and the embedding, against PyTorch's operators
and autograd.
"""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cs336.model.fast import fused_blocks, packed
from cs336.model.fast.fp8 import scale_of
from cs336.model.transformer import rope_rotations
from tests.operators import check_operator
from tests.rounding import of_chain, of_walk

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTHS = [37, 768, 8200]
EPS = 1e-5
TYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]
"""Of the stream and of the branch."""


def made(*shape, seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()


def is_close(result, expected):
    """To the rounding of the type of `found`, the oracle being in fp64; a norm's backward has
    three sums over a row.
    """
    assert result is not None
    assert expected is not None
    narrow = result.dtype is not torch.float32
    tolerance = of_chain(result.dtype, 2) if narrow else of_walk(torch.float32, 3 * max(WIDTHS))
    return torch.allclose(
        result.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
    )


def add_norm_of_parts(stream, branch, branch_bias, gain, bias):
    total = stream + branch if branch_bias is None else stream + (branch + branch_bias)
    if bias is None:
        return total, F.rms_norm(total, gain.shape, gain, EPS)
    return total, F.layer_norm(total, gain.shape, gain, bias, EPS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reads_sum", [True, False])
@pytest.mark.parametrize("has_biases", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_add_norm(types, width, has_biases, reads_sum, device):
    stream_type, branch_type = types
    vectors = [(branch_type, True), (torch.float32, False), (torch.float32, True)]
    given = [made(2, 5, width, seed=n, dtype=dtype, device=device) for n, dtype in enumerate(types)]
    given += [
        made(width, seed=2 + n, dtype=d, device=device)
        for n, (d, is_bias) in enumerate(vectors)
        if has_biases or not is_bias
    ]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    of_stream = made(2, 5, width, seed=7, dtype=stream_type, device=device).detach()
    of_norm = made(2, 5, width, seed=8, dtype=branch_type, device=device).detach()

    def with_gaps(tensors):
        if has_biases:
            return list(tensors)
        stream, branch, gain = tensors
        return [stream, branch, None, gain, None]

    total, normed, _ = fused_blocks.add_norm(*with_gaps(given), EPS)
    expected_total, expected_normed = add_norm_of_parts(*with_gaps(wide))
    assert (total.dtype, normed.dtype) == types
    assert is_close(total, expected_total)
    if stream_type is torch.float32:
        assert is_close(normed, expected_normed)
    outputs, gradients = (
        ([total, normed], [of_stream, of_norm]) if reads_sum else ([normed], [of_norm])
    )
    torch.autograd.backward(outputs, gradients)
    # where the sum was rounded, what follows is of the rounded one
    rounded = total.detach().double().requires_grad_()
    again = add_norm_of_parts(rounded, torch.zeros_like(rounded), None, *with_gaps(wide)[3:])[1]
    torch.autograd.backward(
        [rounded * 1, again] if reads_sum else [again], [g.double() for g in gradients]
    )
    assert is_close(normed, again)
    assert is_close(given[0].grad, rounded.grad)
    assert is_close(given[1].grad, rounded.grad)
    if has_biases:
        assert is_close(given[2].grad, rounded.grad.sum((0, 1)))
        assert is_close(given[4].grad, wide[4].grad)
    assert is_close(given[3 if has_biases else 2].grad, wide[3 if has_biases else 2].grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [8, 3072])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_gelu(dtype, width, device):
    x, gradient = (made(3, 7, width, seed=n, dtype=dtype, device=device) for n in range(2))
    bias = made(width, seed=2, dtype=dtype, device=device)
    wide, wide_bias = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    result, _ = fused_blocks.bias_gelu(x, bias)
    expected = F.gelu(wide + wide_bias, approximate="tanh")
    result.backward(gradient.detach())
    expected.backward(gradient.detach().double())
    assert is_close(result, expected)
    assert is_close(x.grad, wide.grad)
    assert is_close(bias.grad, wide_bias.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab", "width"), [(11, 5), (1000, 1600)])
def test_rows_of_the_embedding_and_their_gradients(vocab, width, device):
    """Of tokens that come often, once and not at all. Gradients are whole numbers, so that their
    order is all one.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab - 2, (4, 64), generator=generator)
    gradient = torch.randint(-9, 9, (4, 64, width), generator=generator).float().to(device)
    ours, theirs = (torch.randn(vocab, width, device=device, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        theirs.copy_(ours)
    tokens = tokens.to(device)
    result, expected = fused_blocks.lookup(ours, tokens), F.embedding(tokens, theirs)
    assert torch.equal(result, expected)
    result.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(ours.grad, theirs.grad)
    assert not ours.grad[-1].any(), "no token names the last row"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2047, 16_384])
def test_sums_over_many_rows(rows, device):
    """More rows than programs, and fewer: none is left out, none counted twice. Of ones, so that
    sums are exact.
    """
    # which is its own norm
    stream = torch.tensor([1.0, -1.0] * 12, device=device).repeat(rows, 1).requires_grad_()
    branch = torch.zeros(rows, 24, device=device, requires_grad=True)
    vectors = [torch.zeros(24, device=device, requires_grad=True) for _ in range(3)]
    total, normed, _ = fused_blocks.add_norm(
        stream, branch, vectors[0], vectors[1], vectors[2], 0.0
    )
    (total.sum() + normed.sum()).backward()
    hidden, bias = (
        torch.zeros(shape, device=device, requires_grad=True) for shape in ((rows, 24), (24,))
    )
    fused_blocks.bias_gelu(hidden, bias)[0].sum().backward()
    expected = {
        "branch bias": [1.0, 1.0],
        "gain": [1.0, -1.0],
        "bias": [1.0, 1.0],
        "GELU's bias": [0.5, 0.5],
    }
    for vector, shares in zip((*vectors, bias), expected.values(), strict=True):
        assert vector.grad.tolist() == [share * rows for share in shares] * 12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_spoilt", [False, True])
def test_nan_in_the_first_row_reaches_the_units(is_spoilt, device):
    """Of so many rows that a program reads several: on a GPU, not in Triton's interpreter, a
    maximum may drop NaN.
    """
    x, gradient, stream = (
        made(4096, 48, seed=n, dtype=torch.bfloat16, device=device).detach() for n in range(3)
    )
    gain, bias, tag = (
        torch.ones(48, device=device),
        torch.zeros(48, device=device),
        torch.zeros(1, device=device),
    )
    total, _, statistics, _ = fused_blocks._add_norm(
        stream, x, None, gain, bias, EPS, x.dtype, None, False
    )
    if is_spoilt:
        x[0, 0] = gradient[0, 0] = math.nan
    heads = gradient.view(1, -1, 3, 2, 8).unbind(2)
    rotations = rope_rotations(4096, 8, 10_000.0).to(device)
    swiglu_gradient = gradient[:, :24]
    units = {
        "norm": scale_of(
            fused_blocks._add_norm(stream, x, None, gain, bias, EPS, x.dtype, tag, True)[3]
        ),
        "norm's backward": fused_blocks._add_norm_backward(
            None, gradient, total, statistics, gain, True, None, True
        )[4],
        "GELU": scale_of(fused_blocks._bias_gelu(x, bias, tag)[1]),
        "GELU's backward": fused_blocks._bias_gelu_backward(stream, bias, gradient, True)[2],
        "heads' backward": packed._cut_heads_backward(*heads, torch.bfloat16, True)[2],
        "RoPE's backward": scale_of(packed._rope_heads_backward(*heads, rotations, True)[1]),
        "SwiGLU": scale_of(packed._swiglu(x, tag)[1]),
        "SwiGLU's backward": scale_of(packed._swiglu_backward(stream, swiglu_gradient, True)[1]),
    }
    assert [name for name, unit in units.items() if unit.isfinite().item() is is_spoilt] == []


@pytest.mark.parametrize("device", DEVICES)
def test_pytorch_finds_the_operators_well_made(device):
    """Their schemas, shapes without data, and gradients, by PyTorch's own checks."""
    stream, branch = (made(2, 4, 24, seed=n, dtype=torch.float32, device=device) for n in range(2))
    vectors = [made(24, seed=n, dtype=torch.float32, device=device) for n in range(3)]
    tag = torch.zeros(1, device=device, requires_grad=True)
    check_operator(fused_blocks._add_norm, stream, branch, *vectors, EPS, branch.dtype, None, False)
    check_operator(
        fused_blocks._add_norm, stream, branch, None, vectors[0], None, EPS, branch.dtype, tag, True
    )
    check_operator(
        fused_blocks._add_norm, stream, None, None, *vectors[:2], EPS, torch.bfloat16, None, False
    )
    check_operator(fused_blocks._bias_gelu, stream, vectors[0], None)
    check_operator(fused_blocks._bias_gelu, stream, vectors[0], tag)
    table = made(7, 3, seed=0, dtype=torch.float32, device=device)
    check_operator(fused_blocks.lookup, table, torch.arange(6, device=device).view(2, 3))


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_lie_row_after_row(device):
    """A kernel would take it for what does."""
    stream, branch = (
        made(4, 2, 24, seed=n, dtype=torch.float32, device=device).transpose(0, 1) for n in range(2)
    )
    vectors = [
        made(48, seed=n, dtype=torch.float32, device=device)[::2].detach().requires_grad_()
        for n in range(3)
    ]
    stream, branch = (tensor.detach().requires_grad_() for tensor in (stream, branch))
    check_operator(fused_blocks._add_norm, stream, branch, *vectors, EPS, branch.dtype, None, False)
    check_operator(fused_blocks._bias_gelu, stream, vectors[0], None)
    total, statistics = stream.detach(), torch.stack((torch.ones(8), torch.zeros(8))).to(device)
    gradient = torch.ones_like(total)
    given = (None, gradient, total, statistics, vectors[1].detach(), True, None, True)
    dense = tuple(tensor.contiguous() if isinstance(tensor, Tensor) else tensor for tensor in given)
    for result, expected in zip(
        fused_blocks._add_norm_backward(*given),
        fused_blocks._add_norm_backward(*dense),
        strict=True,
    ):
        torch.testing.assert_close(result, expected)
