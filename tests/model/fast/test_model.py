"""The fast model's checkpoints and its padded vocabulary, against the reference whose parameters
it has.
"""

import copy
import functools
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch

from cs336.config import Arch, Attention, Device, ModelConfig, RunConfig, SdpaBackend
from cs336.measure.clock import HostClock
from cs336.model.fast import cross_entropy
from cs336.model.fast.model import FastLM, check_device
from cs336.model.fast.packages import IMPORTED_BY
from cs336.model.transformer import TransformerLM
from tests.model.fast.steps import COPIED, drawn_step, loss_and_gradients, of_losses, roundings
from tests.operators import Calls
from tests.rounding import of_sum, of_walk

MODEL = ModelConfig(vocab_size=11, context_length=8, d_model=8, d_ff=12, num_layers=3, num_heads=2)
FUSED = replace(COPIED, fused_blocks=True)
CHECKPOINTS = {"checkpoint_blocks": 1}
SHORTCUTS = {
    "fused blocks": (COPIED, {"fused_blocks": True}),
    "fused blocks, checkpoints": (replace(COPIED, checkpoint_blocks=2), {"fused_blocks": True}),
    "activations within matmuls": (FUSED, {"fused_activations": True}),
    "packed attention": (FUSED, {"packed_attention": True}),
    "packed attention, checkpoints": (replace(FUSED, **CHECKPOINTS), {"packed_attention": True}),
    "packed attention, selective": (
        replace(FUSED, **CHECKPOINTS, selective_checkpoints=True),
        {"packed_attention": True},
    ),
    "embedding in bf16": (FUSED, {"bf16_embedding": True}),
    "stream in bf16": (FUSED, {"bf16_stream": True}),
    "stream in bf16, checkpoints": (
        replace(FUSED, **CHECKPOINTS, selective_checkpoints=True),
        {"bf16_stream": True},
    ),
    "stream in bf16, fp8": (replace(FUSED, fp8=True), {"bf16_stream": True}),
    "packed attention, fp8": (replace(FUSED, fp8=True), {"packed_attention": True}),
}
"""Steps, and the setting that computes them otherwise."""
OPERATORS = {
    "fused_blocks": "add_norm",
    "fused_activations": "expand",
    "bf16_embedding": "add_norm",
    "bf16_stream": "add_norm",
    "packed_attention": "attend",
}


@pytest.mark.parametrize("name", SHORTCUTS)
@pytest.mark.parametrize("arch", Arch)
def test_a_shortcut_is_the_same_function(arch, name):
    """To the rounding of bf16, gradients and loss; the gradient of the keys' biases is nothing
    but rounding.
    """
    config, changes = SHORTCUTS[name]
    config = replace(config, model=replace(config.model, arch=arch))
    _, expected = loss_and_gradients(config)
    with Calls() as calls:
        _, result = loss_and_gradients(replace(config, **changes))
    assert calls.counts[OPERATORS[next(iter(changes))]] >= config.model.num_layers
    assert set(result) == set(expected)
    allowed = of_walk(torch.bfloat16, 2 * roundings(config.model))
    if config.fp8:
        # a change by a unit of bf16 moves few roundings to fp8, by the ratio of the units, but each
        # by fp8's
        allowed = (allowed * of_walk(torch.float8_e4m3fn, 2 * roundings(config.model))) ** 0.5
    for parameter, gradient in expected.items():
        if not parameter.endswith("k_proj.bias"):
            assert (result[parameter] - gradient).norm() < allowed * gradient.norm(), parameter


PADDED = replace(COPIED, pad_vocabulary=8)
ALIKE = {
    "fused loss": (replace(PADDED, cast_once=False), {"fused_loss": True}),
    "fused loss of copies": (PADDED, {"fused_loss": True}),
    "fused loss in parts": (replace(FUSED, pad_vocabulary=8, fused_loss=True), {"loss_chunks": 3}),
    "fused blocks": (COPIED, {"fused_blocks": True}),
    "fp8": (PADDED, {"fp8": True}),
    "fp8, checkpoints": (replace(COPIED, checkpoint_blocks=2), {"fp8": True}),
    "split masters": (COPIED, {"split_masters": True}),
    "split masters, fused": (replace(FUSED, fused_loss=True), {"split_masters": True}),
    "split masters, checkpoints": (replace(COPIED, checkpoint_blocks=1), {"split_masters": True}),
    "moments in bf16": (COPIED, {"bf16_moments": True}),
    "embedding in bf16": (FUSED, {"bf16_embedding": True}),
    "stream in bf16": (FUSED, {"bf16_stream": True}),
}
"""Steps, and the setting that computes them otherwise."""


@functools.cache
def trained(config):
    """Losses of six steps, and by setting how often the steps did what it asks for."""
    step = drawn_step(config)
    with (
        Calls() as calls,
        mock.patch.object(cross_entropy, "_losses", wraps=cross_entropy._losses) as parts,
    ):
        losses = [step(HostClock())[1].item() for _ in range(6)]
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=config.device.value)
    return losses, {
        "fused_loss": parts.call_count,
        "loss_chunks": parts.call_count,
        "fused_blocks": calls.counts["add_norm"],
        "fp8": calls.counts["fp8_casts"],
        "bf16_embedding": sum(weight.read is None for weight in step.model.weights),
        "bf16_stream": step.model.token_embeddings(tokens).dtype is torch.bfloat16,
        "split_masters": sum(weight.remainder is not None for weight in step.model.weights),
        "bf16_moments": sum(
            state["exp_avg"].dtype is torch.bfloat16 for state in step.optimizer.state.values()
        ),
    }


@pytest.mark.parametrize("device", [Device.CPU, pytest.param(Device.CUDA, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("arch", Arch)
def test_a_shortcut_trains_alike(arch, name, device):
    config, changes = ALIKE[name]
    config = replace(config, model=replace(config.model, arch=arch), device=device)
    (expected, usual), (result, counts) = trained(config), trained(replace(config, **changes))
    (setting,) = changes
    assert counts[setting] > usual[setting]
    dtype = torch.float8_e4m3fn if setting == "fp8" else torch.bfloat16
    assert result == pytest.approx(expected, abs=of_losses(config, dtype))
    assert result[-1] < result[0]
    if setting == "bf16_moments":  # the update is computed before the moments are rounded
        assert result[:2] == pytest.approx(expected[:2], rel=of_sum(torch.float32, 48))


def gradients(model, tokens):
    model.zero_grad()
    model(tokens).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_checkpoints_change_no_gradient(arch, blocks):
    torch.manual_seed(0)
    reference = TransformerLM(replace(MODEL, arch=arch))
    settings = RunConfig(size="custom", model=reference.config, checkpoint_blocks=blocks)
    tokens = torch.randint(11, (2, 8))
    expected = gradients(reference, tokens)
    for kept, computed_again in zip(
        expected, gradients(FastLM(reference, settings), tokens), strict=True
    ):
        assert torch.equal(kept, computed_again)


def test_a_checkpoint_computes_attention_again_by_the_same_kernel():
    """PyTorch checks that what is computed again is what was there: by another kernel it would
    not be.
    """
    config = replace(MODEL, attention=Attention.SDPA, sdpa_backend=SdpaBackend.MATH)
    reference, tokens = TransformerLM(config), torch.arange(8).view(1, 8)
    expected = gradients(reference, tokens)
    result = gradients(
        FastLM(reference, RunConfig(size="custom", model=config, checkpoint_blocks=1)), tokens
    )
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("multiple", [11, 16, 100])
def test_a_padded_vocabulary_is_the_same_function(arch, multiple):
    torch.manual_seed(0)
    reference = TransformerLM(replace(MODEL, arch=arch))
    padded = FastLM(
        copy.deepcopy(reference),
        RunConfig(size="custom", model=reference.config, pad_vocabulary=multiple),
    )
    tokens = torch.randint(11, (2, 8))
    assert padded.padded_logits(tokens).shape == (2, 8, -(-11 // multiple) * multiple)
    torch.testing.assert_close(padded(tokens), reference(tokens))
    torch.testing.assert_close(gradients(padded, tokens), gradients(reference, tokens))


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("arch", Arch)
def test_it_has_the_reference_s_parameters_under_their_names(arch, attention):
    """In their order, which is that of the optimizer's state; and its tables, which no
    checkpoint has.
    """
    reference = TransformerLM(replace(MODEL, arch=arch, attention=attention))
    for changes in ({}, {"cast_once": True}, {"cast_once": True, "fused_blocks": True}):
        settings = RunConfig(
            size="custom", model=reference.config, precision="bf16", optimizer="fused", **changes
        )
        fast = FastLM(reference, settings)
        for mine, theirs in (
            (fast.named_parameters(), reference.named_parameters()),
            (fast.named_buffers(), reference.named_buffers()),
        ):
            result, expected = dict(mine), dict(theirs)
            assert list(result) == list(expected)
            assert all(result[name] is expected[name] for name in expected)


@pytest.mark.parametrize(
    ("name", "package"),
    [("fused_activations", "quack-kernels"), ("packed_attention", "flash-attn-4")],
)
def test_a_gpu_of_another_generation_and_a_package_that_fails_are_named(monkeypatch, name, package):
    """Where the model is made, as this may be another machine than that of the command; a CPU
    needs no package.
    """
    flag, device, asked = (
        f"--{name.replace('_', '-')}",
        torch.device("cuda"),
        replace(FUSED, **{name: True}),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match=rf"{flag} needs a Hopper GPU.*got NVIDIA A100 \(8.0\)"):
        check_device(asked, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, f"cs336.model.fast.{IMPORTED_BY[package]}", None)
    with pytest.raises(
        ValueError, match=rf"{flag} needs {package} \S+, which cannot be imported: .*: pip install"
    ):
        check_device(asked, device)
    check_device(asked, torch.device("cpu"))
    check_device(FUSED, device)
    seen = []
    monkeypatch.setattr("cs336.model.fast.model.check_device", lambda *given: seen.append(given))
    FastLM(TransformerLM(asked.model), asked)
    assert seen == [(asked, torch.device("cpu"))]
