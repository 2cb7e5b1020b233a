"""The loss that turns logits into their own gradient, against PyTorch's on the real columns
alone.
"""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336.model.fast.cross_entropy import chunked_cross_entropy, fused_cross_entropy
from tests.rounding import of_chain, of_walk

SHAPES = [(37, 37), (37, 40), (4096, 4096), (5000, 5120), (50_257, 50_304)]
"""Vocabularies, and with their padding: less than a block of the kernel, one, several, with and
without a rest.
"""


def both(device, dtype, vocab, padded, divisor=1):
    """Losses and gradients with respect to the logits: of the fused one, then PyTorch's in fp32,
    as autocast has it. Backward begins with 3, whatever the fused one expects.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(2, 7, padded, generator=generator)).to(device, dtype)
    targets = torch.randint(vocab, (2, 7), generator=generator).to(device)
    targets[0, 0], targets[0, 1] = 0, vocab - 1
    theirs = logits[..., :vocab].clone().requires_grad_()
    expected = F.cross_entropy(theirs.float().flatten(0, 1), targets.flatten())
    (3 * expected).backward()
    mine = logits.clone().requires_grad_()
    # whose gradient is not its own: only what another operation has made is overwritten
    loss = fused_cross_entropy(mine * 1, targets, vocab, divisor)
    (3 * loss).backward()
    return loss.detach(), mine.grad, expected.detach(), theirs.grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "padded"), SHAPES)
@pytest.mark.parametrize("divisor", [1, 6])
def test_loss_and_gradient_are_pytorch_s_and_padding_has_none(
    device, dtype, vocab, padded, divisor
):
    loss, gradient, expected, expected_gradient = both(device, dtype, vocab, padded, divisor)
    assert loss.dtype is torch.float32
    of_softmax = of_walk(torch.float32, vocab)
    torch.testing.assert_close(loss, expected, rtol=of_softmax, atol=0)
    assert gradient.dtype is dtype
    # rounded before the factor of 3 and after it, and PyTorch's once; it is near 0 where a
    # probability is near 1
    tolerance, least = (
        of_chain(dtype, 3) + of_softmax,
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps,
    )
    torch.testing.assert_close(
        gradient[..., :vocab], expected_gradient, rtol=tolerance, atol=of_softmax + least
    )
    assert not gradient[..., vocab:].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("chunks", "divisor"), [(1, 1), (2, 6), (5, 1), (5, 2)])
def test_loss_in_parts_has_the_gradients_of_the_whole(device, chunks, divisor):
    """14 tokens, of which no 5 parts are alike; against PyTorch's in fp64, of the same rounded
    factors.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((2, 7, 32), (40, 32))
    )
    x = x / 32**0.5
    targets = torch.randint(37, (2, 7), generator=generator)
    ours = [tensor.to(device).requires_grad_() for tensor in (x, weight)]
    theirs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    loss = chunked_cross_entropy(*ours, targets.to(device), 37, chunks, divisor)
    (3 * loss).backward()
    logits = theirs[0] @ theirs[1].t()
    expected = F.cross_entropy(logits[..., :37].flatten(0, 1), targets.flatten())
    (3 * expected).backward()
    # the error of a logit is one of its size, and becomes a relative one of its probability
    of_logits = of_chain(torch.bfloat16, 1) * logits.abs().max().item()
    assert loss.item() == pytest.approx(expected.item(), abs=2 * of_logits)
    # of the logits' gradient, each sum, and the factor
    allowed = 2 * of_logits + of_chain(torch.bfloat16, chunks + 3)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad.dtype is torch.bfloat16
        assert (mine.grad.cpu() - other.grad).norm() < allowed * other.grad.norm()
    with torch.no_grad():
        assert chunked_cross_entropy(*ours, targets.to(device), 37, chunks).item() == loss.item()


def test_the_logits_of_one_part_are_there_at_a_time():
    """No tensor is as large as the logits of two parts."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(
                tensor.numel() for tensor in tree_leaves(result) if isinstance(tensor, Tensor)
            )
            return result

    x, weight = (
        torch.randn(1, 64, 4).bfloat16().requires_grad_(),
        torch.randn(1000, 4).bfloat16().requires_grad_(),
    )
    with Sizes():
        chunked_cross_entropy(x, weight, torch.zeros(1, 64, dtype=torch.int64), 1000, 4).backward()
    assert max(sizes) == 16 * 1000


@pytest.mark.gpu
def test_more_logits_than_32_bits_count():
    """32,768 tokens of the 8B model have 5e9 logits, and here are 2.3e9; a wrong offset would
    read zeros.
    """
    rows, vocab = 15_500, 151_936
    logits = torch.zeros(1, rows, vocab, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.zeros(1, rows, dtype=torch.long, device="cuda")
    with torch.no_grad():
        logits[0, -1, 5] = 20.0
    expected = F.cross_entropy(logits.detach()[0, -1:].float(), targets[0, -1:])
    loss = fused_cross_entropy(logits * 1, targets, vocab)
    loss.backward()
    usual = math.log(vocab)
    assert loss.item() == pytest.approx((usual * (rows - 1) + expected.item()) / rows, rel=1e-5)
    assert logits.grad[0, -1, 5].item() * rows == pytest.approx(
        1 - (vocab - 1) / (math.exp(20) + vocab - 1), rel=1e-2
    )


def test_logits_that_overflow_exponentials_have_a_finite_loss():
    logits = torch.tensor([[[1e4, -1e4, 0.0, 7.0]]])
    loss = fused_cross_entropy(logits, torch.tensor([[1]]), 3)
    assert loss.item() == 2e4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_who_reads_the_logits_or_goes_backward_again_is_refused(device):
    """Rather than given a gradient for logits, or a gradient that was scaled twice."""
    targets, logits = (
        torch.tensor([[1, 2]], device=device),
        torch.randn(1, 2, 5, device=device, requires_grad=True),
    )
    loss = 3 * fused_cross_entropy(logits * 1, targets, 5)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    read_twice = logits * 1
    squares = (read_twice**2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (fused_cross_entropy(read_twice, targets, 5) + squares).backward()
