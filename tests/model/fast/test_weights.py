"""Weights kept twice: the same training as autocast's, and the same checkpoints as the plain model's."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cs336_systems.config import Arch, Attention, Device, Mode, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336_systems.measure.clock import HostClock
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.fast.master_adamw import MasterAdamW
from cs336_systems.model.fast.model import FastLM
from cs336_systems.model.fast.weights import Weight
from cs336_systems.model.transformer import TransformerLM

MODEL = ModelConfig(vocab_size=37, context_length=16, d_model=32, d_ff=48, num_layers=2, num_heads=4)
MODELS = {"cs336": MODEL, "gpt2": replace(MODEL, arch=Arch.GPT2), "sdpa": replace(MODEL, attention=Attention.SDPA)}
AUTOCAST = RunConfig(
    size="custom", model=MODEL, batch_size=3, precision=Precision.BF16, optimizer=OptimizerKind.FUSED,
    learning_rate=2e-4,
)  # fmt: skip


def make(name: str, seed: int = 0) -> TransformerLM:
    torch.manual_seed(seed)
    return TransformerLM(MODELS[name])


def fast(model: TransformerLM) -> FastLM:
    """The model computed from copies of its weights."""
    return FastLM(model, replace(AUTOCAST, model=model.config, cast_once=True))


def trained(config: RunConfig, model: nn.Module, steps: int) -> tuple[TrainingStep, list[float]]:
    step = TrainingStep(config, model)
    return step, [step(HostClock())[1].item() for _ in range(steps)]


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_autocast_and_pytorch_s_fused_adamw_do(name: str) -> None:
    """The oracle casts every weight in every step, and its optimizer knows nothing of copies."""
    config, model = replace(AUTOCAST, model=MODELS[name]), make(name)
    oracle = copy.deepcopy(model)
    step, losses = trained(replace(config, cast_once=True), model, 6)
    _, expected = trained(config, oracle, 6)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] < losses[0]
    mine, theirs = step.model.state_dict(), oracle.state_dict()
    for key in theirs:
        if key.endswith("k_proj.bias"):  # whose gradient is 0 but for rounding: it moves all scores of a row alike
            continue
        # a gradient that is nearly nothing may have either sign, and AdamW's step then is a whole one
        away = (mine[key] - theirs[key]).abs() / config.learning_rate
        assert away.max() < 7
        assert (away > 0.1).float().mean() < 0.2, key


def test_matmuls_read_rounded_weights_and_the_embedding_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What F.linear and F.embedding are given, in a real forward pass."""
    model = make("cs336")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    computed = fast(model)
    weights = computed.weights
    read: list[Tensor] = []
    linear, embedding = F.linear, F.embedding
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: read.append(weight) or linear(x, weight, bias))
    monkeypatch.setattr(F, "embedding", lambda x, weight: read.append(weight) or embedding(x, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed(torch.arange(16).view(1, 16))
    expected = [before["token_embeddings.weight"]]
    for layer in ("layers.0", "layers.1"):
        packed = (
            ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            ("attn.output_proj",),
            ("ffn.w1", "ffn.w3"),
            ("ffn.w2",),
        )
        expected += [torch.cat([before[f"{layer}.{name}.weight"] for name in names]).bfloat16() for names in packed]
    expected.append(before["lm_head.weight"].bfloat16())
    assert [tensor.dtype for tensor in read] == [tensor.dtype for tensor in expected]
    assert all(torch.equal(found, wanted) for found, wanted in zip(read, expected, strict=True))
    assert len(weights) == len(before)
    assert are_copies(weights)


def test_layers_whose_weights_would_not_be_aligned_in_a_packed_one_stay_apart() -> None:
    torch.manual_seed(0)
    odd = ModelConfig(vocab_size=37, context_length=16, d_model=6, d_ff=9, num_layers=1, num_heads=1)
    reference = TransformerLM(odd)
    model = fast(copy.deepcopy(reference))
    (block,) = model.layers
    assert block.attn.packed is block.ffn.packed is None
    tokens = torch.arange(16).view(1, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(tokens), reference(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_those_of_the_plain_model(name: str) -> None:
    plain, other = make(name, seed=1), fast(make(name, seed=2))
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    weights = other.weights
    other.load_state_dict(plain.state_dict())
    assert are_copies(weights)
    saved = other.state_dict()
    assert list(saved) == list(expected)
    assert all(torch.equal(saved[key], expected[key]) for key in expected)
    make(name, seed=3).load_state_dict(saved)


def test_a_checkpoint_of_another_shape_is_refused_as_always() -> None:
    model = fast(make("cs336"))
    wrong = {**model.state_dict(), "lm_head.weight": torch.zeros(3, 3)}
    before = model.state_dict()["lm_head.weight"].clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for lm_head.weight"):
        model.load_state_dict(wrong)
    assert torch.equal(model.state_dict()["lm_head.weight"], before)


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_checkpoint_gives_the_reference_s_logits(name: str) -> None:
    reference = make(name, seed=4)
    step = TrainingStep(replace(AUTOCAST, model=MODELS[name], cast_once=True, pad_vocabulary=64), make(name, seed=5))
    step.model.load_state_dict(reference.state_dict())
    tokens = torch.randint(37, (2, 16), generator=torch.Generator().manual_seed(1))
    expected, found = reference(tokens), step.logits(tokens)
    assert found.shape == expected.shape
    assert (found - expected).norm() / expected.norm() < 0.02


def test_a_tied_weight_learns_from_both_of_its_uses() -> None:
    """Gradients of the embedding and of the head add up: against autograd on one fp32 weight."""
    oracle = make("gpt2")
    model = fast(copy.deepcopy(oracle))
    tied = next(weight for weight in model.weights if weight.master is model.token_embeddings.weight)
    assert model.lm_head.copies is not None
    assert tied.copy is not None
    assert tied.copy.leaf is model.lm_head.copies[0]
    tokens = torch.arange(16).view(1, 16)
    for each in (model, oracle):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            each(tokens).float().square().mean().backward()
    assert len(tied.gradients()) == 2
    total = sum(gradient.float() for gradient in tied.gradients())
    torch.testing.assert_close(total, oracle.token_embeddings.weight.grad, rtol=0.02, atol=1e-4)


def test_gradients_are_dropped_everywhere() -> None:
    step = TrainingStep(replace(AUTOCAST, cast_once=True), make("cs336"))
    step.backward(step.forward(step.batches()))
    assert all(len(weight.gradients()) == 1 for weight in step.model.weights)
    assert isinstance(step.optimizer, MasterAdamW)
    step.optimizer.zero_grad()
    assert not any(weight.gradients() for weight in step.model.weights)


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.TRAIN])
def test_other_modes_cast_once_too(mode: Mode) -> None:
    config = replace(AUTOCAST, mode=mode, optimizer=OptimizerKind.ADAMW)
    model = make("cs336")
    _, expected = trained(config, copy.deepcopy(model), 2)
    step, losses = trained(replace(config, cast_once=True), model, 2)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert step.model.lm_head.copies[0].dtype is torch.bfloat16
    assert not any(weight.gradients() for weight in step.model.weights)


def test_a_state_is_refused_whose_count_of_steps_would_be_lost() -> None:
    optimizer = MasterAdamW(fast(make("cs336")).weights)
    with pytest.raises(RuntimeError, match="make it anew"):
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_on_a_gpu_does_what_the_formula_on_a_cpu_does(name: str) -> None:
    """The same gradients to both: three steps, then every master, moment and copy."""
    model = make(name)
    on_gpu = copy.deepcopy(model).cuda()
    optimizers = []
    for each in (model, on_gpu):
        weights = fast(each).weights
        optimizers.append((MasterAdamW(weights, lr=0.01, weight_decay=0.1), weights))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for one, other in zip(leaves(optimizers[0][1]), leaves(optimizers[1][1]), strict=True):
            one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)
            other.grad = one.grad.cuda()
        for optimizer, _ in optimizers:
            optimizer.step()
    (_, expected), (_, found) = optimizers
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.master.detach().cpu(), one.master.detach(), rtol=1e-5, atol=1e-6)
    assert are_copies(found)
    for one, other in zip(optimizers[0][0].state.values(), optimizers[1][0].state.values(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(other[moment].cpu(), one[moment], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("element", [0, -1])
def test_nan_in_a_gradient_reaches_the_largest_magnitude_of_its_weight_alone(element: int, device: str) -> None:
    """A GPU's maximum may drop NaN. The kernel masks the last elements of w2's copy, and none of q_proj's."""
    model = make("cs336").to(device)
    weights = FastLM(model, replace(AUTOCAST, cast_once=True, fp8=True)).weights
    for leaf in leaves(weights):
        leaf.grad = torch.ones_like(leaf)
    spoilt = model.layers[0].attn.q_proj.weight, model.layers[1].ffn.w2.weight
    for weight in weights:
        if any(weight.master is each for each in spoilt):
            weight.gradients()[0].view(-1)[element] = math.nan
    MasterAdamW(weights).step()
    kept = [weight for weight in weights if weight.largest is not None]
    assert len(kept) == 7 * MODEL.num_layers
    for weight in kept:
        assert weight.largest is not None
        assert weight.largest.isfinite().item() is not any(weight.master is each for each in spoilt)


def are_copies(weights: tuple[Weight, ...]) -> bool:
    """Whether all copies are their masters, rounded."""
    copied = [(weight.copy.values, weight.master) for weight in weights if weight.copy is not None]
    return bool(copied) and all(torch.equal(copy, master.bfloat16().view(-1)) for copy, master in copied)


def leaves(weights: tuple[Weight, ...]) -> list[Tensor]:
    """All tensors that gather gradients, once each; a tied weight's master among them."""
    places = [place for weight in weights for place in (weight.copy, weight.read) if place is not None]
    return list({id(place.leaf): place.leaf for place in places}.values())


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    "settings", [{}, {"cast_once": True}, {"mode": Mode.FORWARD_BACKWARD}, {"mode": Mode.INFERENCE}]
)
def test_a_replayed_graph_trains_as_the_step_itself_does(settings: dict[str, object]) -> None:
    """Ten steps: three as they are, the fourth captured. Phases are timed inside of the graph."""
    config = replace(AUTOCAST, device=Device.CUDA, **settings)  # type: ignore[arg-type]
    model = make("cs336").cuda()
    _, expected = trained_on_gpu(config, copy.deepcopy(model), 10)
    step, losses = trained_on_gpu(replace(config, cuda_graph=True), model, 10)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert step.graph is not None
    assert step.graph.peak_bytes


def trained_on_gpu(config: RunConfig, model: nn.Module, steps: int) -> tuple[TrainingStep, list[float]]:
    from cs336_systems.measure.clock import make_clock

    step, clock, losses = TrainingStep(config, model), make_clock(config), []
    for _ in range(steps):
        times, loss = step(clock)
        losses.append(loss.item())
        assert tuple(times.phases_s) == config.phases
        assert 0.5 * times.step_s < sum(times.phases_s.values()) <= 1.01 * times.step_s or times.step_s < 2e-3
    return step, losses
