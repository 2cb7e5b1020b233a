"""What packed matmuls and those with activations replace, written out and differentiated by
autograd.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from cs336.model.fast import packed
from cs336.model.fast.packages import FLASH_4, QUACK, is_installed
from cs336.model.fast.packed import _contract_backward, _expand, feed_forward
from cs336.model.transformer import rope_rotations, rotate_pairs
from tests.operators import check_operator
from tests.rounding import of_chain, of_sum

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLASH_4_NEEDED = pytest.mark.skipif(
    not is_installed(FLASH_4)
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs FlashAttention 4 and a Hopper GPU",
)
FLASH_DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, FLASH_4_NEEDED])]
FLASH_SHAPES = [
    (2, 48, 3, 64),
    (2, 129, 2, 96),
    (2, 512, 2, 128),
    (1, 1024, 2, 64),
    (1, 777, 2, 64),
]
"""Batch, tokens, heads, width of a head; also contexts that the kernels' tiles of 128 do not
divide.
"""
SHAPES = [(2, 5, 3, 8), (1, 3, 25, 64), (2, 16, 4, 80)]
"""Batch, tokens, heads, width of a head."""


def made(*shape, dtype, device):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()


def written_out(qkv, heads, rotations):
    """Every score, its mask and its softmax, in the type of `qkv`."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if rotations is not None:
        turn = torch.view_as_complex(rotations.double())
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
            ).flatten(-2)
            for x in (q, k)
        )
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=qkv.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def swiglu_of_parts(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def heads_of_parts(x, rotations):
    q, k, v = (part.unflatten(-1, (-1, 2 * rotations.shape[1])) for part in x.chunk(3, dim=-1))
    return rotate_pairs(q, rotations), rotate_pairs(k, rotations), v


def is_close(result, expected, dtype):
    """To rounding: in bf16 of both results at the end, in fp32 of the 16 operations of SwiGLU's
    backward or fewer.
    """
    tolerance = of_chain(dtype, 16 if dtype is torch.float32 else 2)
    rounded = expected.to(dtype).float()
    return torch.allclose(result.float(), rounded, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [8, 24, 1024, 1600, 6400])
def test_swiglu(width, device):
    """In bf16 on a GPU alone: there the kernel rounds once, PyTorch after each operation."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = made(3, 7, 2 * width, dtype=dtype, device=device)
    gradient = made(3, 7, width, dtype=dtype, device=device).detach()
    wide = x.detach().float().requires_grad_()
    result, expected = packed.swiglu(x)[0], swiglu_of_parts(wide)
    result.backward(gradient)
    expected.backward(gradient.float())
    assert is_close(result, expected, dtype)
    assert is_close(x.grad, wide.grad, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads(shape, dtype, device):
    """Their gradients as attention returns them, heads before tokens."""
    batch, seq, heads, d_head = shape
    rotations = rope_rotations(seq, d_head, 10_000.0).to(device)
    x = made(batch, seq, 3 * heads * d_head, dtype=dtype, device=device)
    wide = x.detach().float().requires_grad_()
    result, expected = packed.rope_heads(x, rotations, None), heads_of_parts(wide, rotations)
    gradients = (
        made(3, batch, heads, seq, d_head, dtype=dtype, device=device)
        .detach()
        .transpose(2, 3)
        .unbind()
    )
    torch.autograd.backward(result, gradients)
    torch.autograd.backward(expected, [gradient.float() for gradient in gradients])
    assert all(is_close(part, other, dtype) for part, other in zip(result, expected, strict=True))
    assert is_close(x.grad, wide.grad, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_with_a_bias(shape, dtype, device):
    """The gradient of a bias that the matmul has added is that of a bias that autograd adds."""
    batch, seq, heads, d_head = shape
    width = 3 * heads * d_head
    packed_heads, bias = (
        made(*size, dtype=dtype, device=device) for size in ((batch, seq, width), (width,))
    )
    wide, wide_bias = (tensor.detach().double().requires_grad_() for tensor in (packed_heads, bias))
    result = packed.cut_heads(packed_heads + bias.detach(), bias, heads)
    expected = [part.unflatten(-1, (heads, d_head)) for part in (wide + wide_bias).chunk(3, dim=-1)]
    gradients = (
        made(3, batch, heads, seq, d_head, dtype=dtype, device=device)
        .detach()
        .transpose(2, 3)
        .unbind()
    )
    torch.autograd.backward(result, gradients)
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    assert all(
        torch.equal(part, (packed_heads + bias).view(batch, seq, 3, heads, d_head)[:, :, index])
        for index, part in enumerate(result)
    )
    assert torch.equal(packed_heads.grad.double(), wide.grad)
    assert bias.grad.dtype is dtype
    of_sums = of_sum(torch.float32, batch * seq) * wide.grad.abs().sum((0, 1))
    allowed = of_chain(dtype, 2) * wide_bias.grad.abs() + of_sums
    assert ((bias.grad.double() - wide_bias.grad).abs() <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2047, 16_384])
def test_a_bias_gets_the_gradients_of_all_rows(rows, device):
    """None left out, none counted twice. Of small integers, so that sums are exact."""
    packed_heads, bias = (
        torch.zeros(shape, device=device, requires_grad=True) for shape in ((1, rows, 72), (72,))
    )
    q, k, v = packed.cut_heads(packed_heads, bias, 3)
    (q.sum() + 2 * k.sum() + 3 * v.sum()).backward()
    assert bias.grad.tolist() == [share * rows for share in (1.0, 2.0, 3.0) for _ in range(24)]


@pytest.mark.parametrize("device", DEVICES)
def test_pytorch_finds_the_operators_well_made(device):
    """Their schemas, shapes without data, and gradients, by PyTorch's own checks."""
    x = made(2, 4, 48, dtype=torch.float32, device=device)
    rotations = rope_rotations(4, 8, 10_000.0).to(device)
    for tag in (None, torch.zeros(1, device=device, requires_grad=True)):
        check_operator(packed._swiglu, x, tag)
        check_operator(packed.rope_heads, x, rotations, tag)
    parts = x.detach().view(2, 4, 3, 2, 8).unbind(2)
    check_operator(packed._cut_heads_backward, *parts, torch.bfloat16, True)


# Attention of q, k and v side by side


@pytest.mark.parametrize("device", FLASH_DEVICES)
@pytest.mark.parametrize("has_rope", [True, False])
@pytest.mark.parametrize("shape", FLASH_SHAPES, ids=str)
def test_attention_and_its_gradients_are_those_of_fp64(shape, has_rope, device):
    """With RoPE there is no bias, and with a bias no RoPE, as in the two architectures."""
    batch, seq, heads, d_head = shape
    width = 3 * heads * d_head
    qkv, bias = (
        made(batch, seq, width, dtype=torch.bfloat16, device=device),
        None if has_rope else made(width, dtype=torch.bfloat16, device=device),
    )
    rotations = rope_rotations(seq, d_head, 10_000.0).to(device) if has_rope else None
    wide = qkv.detach().double().requires_grad_()
    wanted = written_out(wide, heads, rotations)
    # a copy, because it is written to
    result = packed.packed_attention(qkv.clone(), heads, rotations, bias)
    gradient = made(batch, seq, heads * d_head, dtype=torch.bfloat16, device=device).detach()
    result.backward(gradient)
    wanted.backward(gradient.double())
    assert qkv.grad.shape == wide.grad.shape
    pairs = [
        (result, wanted),
        *zip(qkv.grad.chunk(3, dim=-1), wide.grad.chunk(3, dim=-1), strict=True),
    ]
    if bias is not None:
        of_q, (of_k, exact_of_k), of_v = zip(
            bias.grad.chunk(3), wide.grad.sum((0, 1)).chunk(3), strict=True
        )
        pairs += [of_q, of_v]
        # softmax does not see the keys' bias
        assert not of_k.any()
        assert exact_of_k.norm() < 1e-12 * of_q[1].norm()
    for one, exact in pairs:
        assert one.dtype is torch.bfloat16
        # of rotated inputs, weights and results, and in backward of the gradients of scores and
        # inputs
        assert (one.double() - exact).norm() < of_chain(torch.bfloat16, 5) * exact.norm()


@pytest.mark.parametrize("device", FLASH_DEVICES)
def test_the_gradient_of_attention_s_bias_sums_over_all_rows(device):
    """Whatever the weights of a query are, they sum to 1: the gradient of each element is 1 from
    every query.
    """
    qkv, bias = torch.zeros(3, 300, 3 * 64), torch.zeros(3 * 64)
    qkv, bias = (tensor.to(device, torch.bfloat16).requires_grad_() for tensor in (qkv, bias))
    packed.packed_attention(qkv.clone(), 1, None, bias).backward(torch.ones(3, 300, 64).to(qkv))
    assert (
        bias.grad.tolist()
        == [0.0] * 128 + [pytest.approx(900, rel=of_chain(torch.bfloat16, 2))] * 64
    )


@pytest.mark.parametrize("device", FLASH_DEVICES)
def test_attention_compiles_whole(device):
    rotations = rope_rotations(32, 64, 10_000.0).to(device)
    weight, bias = (
        made(3 * 128, 64, dtype=torch.bfloat16, device=device),
        made(3 * 128, dtype=torch.bfloat16, device=device),
    )

    def both(x):
        rotated = packed.packed_attention(F.linear(x, weight), 2, rotations)
        return rotated + packed.packed_attention(F.linear(x, weight, bias.detach()), 2, None, bias)

    x = made(2, 32, 64, dtype=torch.bfloat16, device=device)
    leaves = x, weight, bias
    gradient = made(2, 32, 128, dtype=torch.bfloat16, device=device).detach()
    result, compiled = both(x), torch.compile(both, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(compiled, result)
    gradients = torch.autograd.grad(compiled, leaves, gradient)
    expected = torch.autograd.grad(result, leaves, gradient)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("device", FLASH_DEVICES)
def test_pytorch_finds_attention_well_made(device):
    qkv, rotations = (
        made(2, 16, 3 * 128, dtype=torch.bfloat16, device=device).detach(),
        rope_rotations(16, 64, 10_000.0).to(device),
    )
    check_operator(packed._rotate, qkv, rotations)
    check_operator(packed._attend, qkv, 2)
    values, lse = packed._attend(qkv, 2)
    kinds = (rotations, None, False), (rotations, None, True), (None, torch.bfloat16, True)
    for turn, bias_type, measures in kinds:
        gradient = made(2, 16, 128, dtype=torch.bfloat16, device=device).detach()
        check_operator(
            packed._attend_backward, gradient, qkv, values, lse, turn, 2, bias_type, measures
        )


QUACK_NEEDED = pytest.mark.skipif(
    not is_installed(QUACK)
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs QuACK and a Hopper GPU",
)
QUACK_DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, QUACK_NEEDED])]
OF_TILES = [
    pytest.param(64, d_ff, tokens, marks=pytest.mark.gpu)
    for d_ff, tokens in ((640, 4096), (384, 4000))
]


def oracle(x, first, bias, second):
    """The same, written out; in the type of its arguments."""
    before = F.linear(x, first, bias)
    if bias is not None:
        return F.linear(F.gelu(before, approximate="tanh"), second)
    gate, up = before.chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, second)


def arguments(device, d_model, d_ff, tokens, gelu):
    torch.manual_seed(0)
    made = [
        torch.randn(2, tokens, d_model),
        torch.randn(d_ff if gelu else 2 * d_ff, d_model) / d_model**0.5,
        torch.randn(d_ff) if gelu else None,
        torch.randn(d_model, d_ff) / d_ff**0.5,
    ]
    low = [tensor if tensor is None else tensor.to(device, torch.bfloat16) for tensor in made]
    return [tensor if tensor is None else tensor.requires_grad_() for tensor in low]


@pytest.mark.parametrize("device", QUACK_DEVICES)
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize(
    ("d_model", "d_ff", "tokens"), [(64, 256, 32), (72, 200, 77), (256, 1024, 300), *OF_TILES]
)
def test_feed_forward_and_its_gradients_are_those_of_fp64(device, gelu, d_model, d_ff, tokens):
    """With the last two the GPU's tiles have 160 and 192 columns, else 128; a CPU has no tiles."""
    low = arguments(device, d_model, d_ff, tokens, gelu)
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in low]
    result, wanted = feed_forward(*low), oracle(*wide)
    gradient = torch.randn_like(result)
    result.backward(gradient)
    wanted.backward(gradient.double())
    pairs = [
        (result, wanted),
        *((a.grad, b.grad) for a, b in zip(low, wide, strict=True) if a is not None),
    ]
    for actual, exact in pairs:
        assert actual.dtype is torch.bfloat16
        assert actual.shape == exact.shape
        # of what comes before the activation, of what comes after it, and of the result
        assert (actual.double() - exact).norm() < of_chain(torch.bfloat16, 3) * exact.norm()


@pytest.mark.parametrize("device", QUACK_DEVICES)
def test_the_gradient_of_feed_forward_s_bias_sums_over_all_rows(device):
    x, first, bias, second = arguments(device, 64, 128, 300, gelu=True)
    with torch.no_grad():
        # GELU's slope is 1 far above 0, and every row of the gradient times `second` is 1
        first.zero_(), bias.fill_(20.0), second.fill_(1 / 64)
    feed_forward(x, first, bias, second).backward(torch.ones_like(x))
    assert bias.grad.tolist() == [600.0] * 128


@pytest.mark.parametrize("device", QUACK_DEVICES)
@pytest.mark.parametrize("gelu", [True, False])
def test_pytorch_finds_feed_forward_well_made(device, gelu):
    given = arguments(device, 64, 128, 16, gelu)
    x, first, bias, second = (tensor if tensor is None else tensor.detach() for tensor in given)
    rows = x.flatten(0, 1)
    check_operator(_expand, rows, first, bias)
    slopes, _ = _expand(rows, first, bias)
    for bias_type in (torch.bfloat16, torch.float32) if gelu else (None,):
        check_operator(_contract_backward, torch.ones_like(rows), second, slopes, bias_type)


@pytest.mark.parametrize("device", QUACK_DEVICES)
@pytest.mark.parametrize("gelu", [True, False])
def test_feed_forward_compiles_whole(device, gelu):
    args = arguments(device, 64, 128, 32, gelu)
    result = feed_forward(*args)
    compiled = torch.compile(feed_forward, backend="aot_eager", fullgraph=True)(*args)
    assert torch.equal(compiled, result)
    gradient = torch.randn_like(result)
    leaves = [leaf for leaf in args if leaf is not None]
    for one, other in zip(
        torch.autograd.grad(compiled, leaves, gradient),
        torch.autograd.grad(result, leaves, gradient),
        strict=True,
    ):
        assert torch.equal(one, other)
