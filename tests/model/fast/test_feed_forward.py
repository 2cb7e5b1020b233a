"""GELU and SwiGLU within the matmuls of the feed-forward network, against the network written out."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from cs336_systems.model.fast.choose import QUACK, is_installed
from cs336_systems.model.fast.packed import _contract_backward, _expand, feed_forward
from tests.operators import check_operator

QUACK_NEEDED = pytest.mark.skipif(
    not is_installed(QUACK) or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs QuACK and a Hopper GPU",
)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, QUACK_NEEDED])]


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
    return [None if each is None else each.to(device, torch.bfloat16).requires_grad_() for each in made]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize(
    ("d_model", "d_ff", "tokens"),
    [(64, 256, 32), (72, 200, 77), (256, 1024, 300), (64, 640, 4096), (64, 384, 4000)],
)
def test_result_and_gradients_are_those_of_fp64(device, gelu, d_model, d_ff, tokens):
    """With the last two the GPU's tiles have 160 and 192 columns, else 128."""
    low = arguments(device, d_model, d_ff, tokens, gelu)
    wide = [None if each is None else each.detach().double().requires_grad_() for each in low]
    result, wanted = feed_forward(*low), oracle(*wide)
    gradient = torch.randn_like(result)
    result.backward(gradient)
    wanted.backward(gradient.double())
    pairs = [(result, wanted), *((a.grad, b.grad) for a, b in zip(low, wide, strict=True) if a is not None)]
    for found, exact in pairs:
        assert found.dtype is torch.bfloat16
        assert found.shape == exact.shape
        # a chain of three roundings to 8 bits; the cast of the result alone loses 2e-3
        assert (found.double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_the_bias_gradient_sums_over_all_rows(device):
    x, first, bias, second = arguments(device, 64, 128, 300, gelu=True)
    with torch.no_grad():
        # GELU's slope is 1 far above 0, and every row of the gradient times `second` is 1
        first.zero_(), bias.fill_(20.0), second.fill_(1 / 64)
    feed_forward(x, first, bias, second).backward(torch.ones_like(x))
    assert bias.grad.tolist() == [600.0] * 128


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gelu", [True, False])
def test_pytorch_finds_the_operators_well_made(device, gelu):
    x, first, bias, second = (None if each is None else each.detach() for each in arguments(device, 64, 128, 16, gelu))
    rows = x.flatten(0, 1)
    check_operator(_expand, rows, first, bias)
    slopes, _ = _expand(rows, first, bias)
    for bias_type in (torch.bfloat16, torch.float32) if gelu else (None,):
        check_operator(_contract_backward, torch.ones_like(rows), second, slopes, bias_type)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gelu", [True, False])
def test_it_compiles_whole(device, gelu):
    args = arguments(device, 64, 128, 32, gelu)
    result = feed_forward(*args)
    found = torch.compile(feed_forward, backend="aot_eager", fullgraph=True)(*args)
    assert torch.equal(found, result)
    gradient = torch.randn_like(result)
    leaves = [each for each in args if each is not None]
    for one, other in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(result, leaves, gradient), strict=True
    ):
        assert torch.equal(one, other)
