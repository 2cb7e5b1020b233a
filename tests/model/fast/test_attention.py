"""Attention on packed heads, against attention written out in fp64 and differentiated by autograd."""

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cs336_systems.config import Arch, Attention, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336_systems.model.fast import packed as module
from cs336_systems.model.fast.choose import FLASH_4, is_installed
from cs336_systems.model.fast.model import FastLM
from cs336_systems.model.fast.packed import packed_attention
from cs336_systems.model.transformer import TransformerLM, rope_rotations

FLASH_4_NEEDED = pytest.mark.skipif(
    not is_installed(FLASH_4) or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs FlashAttention 4 and a Hopper GPU",
)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, FLASH_4_NEEDED])]
SHAPES = [(2, 48, 3, 64), (1, 300, 5, 64), (2, 129, 2, 96), (2, 512, 2, 128), (4, 1024, 12, 64), (1, 777, 2, 64)]
"""Batch, tokens, heads, width of a head; also contexts that the kernels' tiles of 128 do not divide."""


def made(*shape: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, torch.bfloat16).requires_grad_()


def written_out(packed: Tensor, heads: int, rotations: Tensor | None) -> Tensor:
    """Every score, its mask and its softmax, in the type of `packed`."""
    q, k, v = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if rotations is not None:
        turn = torch.view_as_complex(rotations.double())
        q, k = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
            for x in (q, k)
        )
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=packed.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_rope", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_and_gradients_are_those_of_fp64(shape: tuple[int, int, int, int], has_rope: bool, device: str) -> None:
    """With RoPE there is no bias, and with a bias no RoPE, as in the two architectures."""
    batch, seq, heads, d_head = shape
    width = 3 * heads * d_head
    packed, bias = made(batch, seq, width, device=device), None if has_rope else made(width, device=device)
    rotations = rope_rotations(seq, d_head, 10_000.0).to(device) if has_rope else None
    wide = packed.detach().double().requires_grad_()
    wanted = written_out(wide, heads, rotations)
    # a copy, because it is written to
    found = packed_attention(packed.clone(), heads, rotations, bias)
    gradient = made(batch, seq, heads * d_head, device=device).detach()
    found.backward(gradient)
    wanted.backward(gradient.double())
    assert packed.grad is not None
    assert wide.grad is not None
    assert packed.grad.shape == wide.grad.shape
    pairs = [(found, wanted), *zip(packed.grad.chunk(3, dim=-1), wide.grad.chunk(3, dim=-1), strict=True)]
    if bias is not None:
        assert bias.grad is not None
        of_q, (of_k, exact_of_k), of_v = zip(bias.grad.chunk(3), wide.grad.sum((0, 1)).chunk(3), strict=True)
        pairs += [of_q, of_v]
        # softmax does not see the keys' bias
        assert not of_k.any()
        assert exact_of_k.norm() < 1e-12 * of_q[1].norm()
    for one, exact in pairs:
        assert one.dtype is torch.bfloat16
        # roundings to 8 bits of inputs, weights and results, each of which loses about 2e-3
        assert (one.double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_bias_sums_over_all_rows(device: str) -> None:
    """Whatever the weights of a query are, they sum to 1: the gradient of each element is 1 from every query."""
    packed, bias = torch.zeros(3, 300, 3 * 64), torch.zeros(3 * 64)
    packed, bias = (each.to(device, torch.bfloat16).requires_grad_() for each in (packed, bias))
    packed_attention(packed.clone(), 1, None, bias).backward(torch.ones(3, 300, 64).to(packed))
    assert bias.grad is not None
    assert bias.grad.tolist() == [0.0] * 128 + [pytest.approx(900, rel=2**-8)] * 64


@pytest.mark.parametrize("device", DEVICES)
def test_it_compiles_whole(device: str) -> None:
    rotations = rope_rotations(32, 64, 10_000.0).to(device)
    weight, bias = made(3 * 128, 64, device=device), made(3 * 128, device=device)

    def both(x: Tensor) -> Tensor:
        rotated = packed_attention(F.linear(x, weight), 2, rotations)
        return rotated + packed_attention(F.linear(x, weight, bias.detach()), 2, None, bias)

    x = made(2, 32, 64, device=device)
    leaves = x, weight, bias
    gradient = made(2, 32, 128, device=device).detach()
    result, found = both(x), torch.compile(both, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found, result)
    for one, other in zip(*(torch.autograd.grad(each, leaves, gradient) for each in (found, result)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "changes",
    [{}, {"checkpoint_blocks": 1}, {"checkpoint_blocks": 1, "selective_checkpoints": True}, {"fp8": True}],
    ids=["", "checkpoints", "selective", "fp8"],
)
@pytest.mark.parametrize("arch", Arch)
def test_the_model_is_the_same_function(monkeypatch: pytest.MonkeyPatch, arch: Arch, changes: dict[str, Any]) -> None:
    called = Mock(wraps=packed_attention)
    monkeypatch.setattr("cs336_systems.model.fast.blocks.packed_attention", called)
    model = ModelConfig(
        vocab_size=37, context_length=16, d_model=128, d_ff=64, num_layers=2, num_heads=2, arch=arch,
        attention=Attention.SDPA,
    )  # fmt: skip
    config = RunConfig(
        size="custom", model=model, batch_size=2, precision=Precision.BF16, optimizer=OptimizerKind.FUSED,
        cast_once=True, fused_blocks=True, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = TransformerLM(model)
    tokens = torch.randint(37, (2, 16))
    found = []
    for packs in (False, True):
        step = FastLM(copy.deepcopy(reference), replace(config, packed_attention=packs))
        with torch.autocast("cpu", torch.bfloat16):
            assert not called.called
            loss = F.cross_entropy(step(tokens).flatten(0, 1).float(), tokens.flatten())
        assert called.call_count == model.num_layers * packs
        loss.backward()
        found.append([loss, *(sum(weight.gradients()).float() for weight in step.weights)])
    for plain, packed in zip(*found, strict=True):
        # the gradient of the keys' bias is 0 but for rounding, because softmax does not see it
        assert (plain - packed).norm() < 2e-2 * plain.norm() + 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_pytorch_finds_the_operators_well_made(device: str) -> None:
    packed, rotations = made(2, 16, 3 * 128, device=device).detach(), rope_rotations(16, 64, 10_000.0).to(device)
    torch.library.opcheck(module._rotate, (packed, rotations))
    torch.library.opcheck(module._attend, (packed, 2))
    values, lse = module._attend(packed, 2)
    for turn, bias_type, measures in ((rotations, None, False), (None, torch.bfloat16, True)):
        arguments = made(2, 16, 128, device=device).detach(), packed, values, lse, turn, 2, bias_type, measures
        torch.library.opcheck(module._attend_backward, arguments)


def test_shapes_that_do_not_fit_are_named() -> None:
    packed = torch.zeros(2, 4, 48)
    with pytest.raises(ValueError, match="needed rotations or a bias, got both"):
        packed_attention(packed, 2, rope_rotations(4, 8, 10_000.0), torch.zeros(48))
    for wrong in (3, 5):
        with pytest.raises(ValueError, match=f"needed rotations of 4 positions, got {wrong}"):
            packed_attention(packed, 2, rope_rotations(wrong, 8, 10_000.0))
    for wrong in (16, 64):
        with pytest.raises(ValueError, match=rf"needed a bias of 48 elements, got \({wrong},\)"):
            packed_attention(packed, 2, None, torch.zeros(wrong))
    with pytest.raises(ValueError, match="needed a width of 3 parts of 5 heads, got 48"):
        packed_attention(packed, 5, None)
