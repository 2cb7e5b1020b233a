"""The embedding whose gradients are added in one pass, against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from cs336_systems.model.fast import fused_blocks as module
from cs336_systems.model.fast.fused_blocks import lookup

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab", "width"), [(11, 5), (11, 768), (1000, 1600)])
def test_rows_and_their_gradients(vocab: int, width: int, device: str) -> None:
    """Of tokens that come often, once and not at all. Gradients are whole numbers, so that their order is all one."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab - 2, (4, 64), generator=generator)
    gradient = torch.randint(-9, 9, (4, 64, width), generator=generator).float().to(device)
    ours, theirs = (torch.randn(vocab, width, device=device, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        theirs.copy_(ours)
    tokens = tokens.to(device)
    found, expected = lookup(ours, tokens), F.embedding(tokens, theirs)
    assert torch.equal(found, expected)
    found.backward(gradient)
    expected.backward(gradient)
    assert theirs.grad is not None
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    assert not ours.grad[-1].any(), "no token names the last row"


@pytest.mark.parametrize("device", DEVICES)
def test_pytorch_finds_the_operator_well_made(device: str) -> None:
    weight = torch.randn(7, 3, device=device, requires_grad=True)
    torch.library.opcheck(module._lookup, (weight, torch.arange(6, device=device).view(2, 3)))
