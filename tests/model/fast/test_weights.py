"""Weights kept twice, masters that are split, and moments in bf16: the same training as
autocast's.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from cs336.config import (
    Arch,
    Attention,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Precision,
    RunConfig,
)
from cs336.measure.clock import HostClock
from cs336.measure.step import TrainingStep
from cs336.model.fast.master_adamw import MasterAdamW, Storage
from cs336.model.fast.model import FastLM
from cs336.model.fast.weights import joined_values, split_values, whole
from cs336.model.transformer import TransformerLM
from tests.model.fast.steps import OF_AN_UPDATE, of_losses, roundings, with_smooth_updates
from tests.rounding import of_chain, of_walk

MODEL = ModelConfig(
    vocab_size=37, context_length=16, d_model=32, d_ff=48, num_layers=2, num_heads=4
)
MODELS = {
    "cs336": MODEL,
    "gpt2": replace(MODEL, arch=Arch.GPT2),
    "sdpa": replace(MODEL, attention=Attention.SDPA),
}
AUTOCAST = RunConfig(
    size="custom",
    model=MODEL,
    batch_size=3,
    precision=Precision.BF16,
    optimizer=OptimizerKind.FUSED,
    learning_rate=2e-4,
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MOMENTS = ("exp_avg", "exp_avg_sq")


def make(name, seed=0):
    torch.manual_seed(seed)
    return TransformerLM(MODELS[name])


def fast(model):
    """The model computed from copies of its weights."""
    return FastLM(model, replace(AUTOCAST, model=model.config, cast_once=True))


def masters(model):
    """The weights by the names of their parameters, split ones made whole."""
    return {weight.name: weight.values().clone() for weight in model.weights}


def trained(config, model, steps=8):
    step = TrainingStep(config, model)
    if step.optimizer is not None:
        with_smooth_updates(step)
    return step, [step(HostClock())[1].item() for _ in range(steps)]


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_autocast_and_pytorch_s_fused_adamw_do(name):
    """The oracle casts every weight in every step, and its optimizer knows nothing of copies."""
    config, model = replace(AUTOCAST, model=MODELS[name]), make(name)
    oracle = copy.deepcopy(model)
    step, losses = trained(replace(config, cast_once=True), model, 6)
    _, expected = trained(config, oracle, 6)
    assert losses == pytest.approx(expected, abs=of_losses(config))
    assert losses[-1] < losses[0]
    mine, theirs, start = masters(step.model), oracle.state_dict(), make(name).state_dict()
    for key in mine:
        # whose gradient is 0 but for rounding: it moves all scores of a row alike
        if key.endswith("k_proj.bias"):
            continue
        update = theirs[key] - start[key]
        away = of_chain(torch.float32, 6) * theirs[key].norm()  # an update adds to the master once
        away += of_walk(torch.bfloat16, 2 * roundings(config.model)) * update.norm()
        assert (mine[key] - theirs[key]).norm() < away, key


def test_a_tied_weight_learns_from_both_of_its_uses():
    """Gradients of the embedding and of the head add up: against autograd on one fp32 weight."""
    oracle = make("gpt2")
    model = fast(copy.deepcopy(oracle))
    tied = next(
        weight for weight in model.weights if weight.master is model.token_embeddings.weight
    )
    assert model.lm_head.copies is not None
    assert tied.copy is not None
    assert tied.copy.leaf is model.lm_head.copies[0]
    tokens = torch.arange(16).view(1, 16)
    for module in (model, oracle):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(tokens).float().square().mean().backward()
    assert len(tied.gradients()) == 2
    total = sum(gradient.float() for gradient in tied.gradients())
    torch.testing.assert_close(total, oracle.token_embeddings.weight.grad, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.TRAIN])
def test_other_modes_cast_once_too(mode):
    config = replace(AUTOCAST, mode=mode, optimizer=OptimizerKind.ADAMW)
    model = make("cs336")
    _, expected = trained(config, copy.deepcopy(model), 2)
    step, losses = trained(replace(config, cast_once=True), model, 2)
    assert losses == pytest.approx(expected, abs=of_losses(config))
    assert step.model.lm_head.copies[0].dtype is torch.bfloat16
    assert not any(weight.gradients() for weight in step.model.weights)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_on_a_gpu_does_what_the_formula_on_a_cpu_does(name):
    """The same gradients to both: three steps, then every master, moment and copy."""
    model = make(name)
    on_gpu = copy.deepcopy(model).cuda()
    optimizers = []
    for module in (model, on_gpu):
        weights = fast(module).weights
        optimizers.append((MasterAdamW(weights, lr=0.01, weight_decay=0.1), weights))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for one, other in zip(leaves(optimizers[0][1]), leaves(optimizers[1][1]), strict=True):
            one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)
            other.grad = one.grad.cuda()
        for optimizer, _ in optimizers:
            optimizer.step()
    (_, expected), (_, result) = optimizers
    for one, other in zip(expected, result, strict=True):
        torch.testing.assert_close(
            other.master.detach().cpu(), one.master.detach(), rtol=1e-5, atol=1e-6
        )
    assert are_copies(result)
    for one, other in zip(
        optimizers[0][0].state.values(), optimizers[1][0].state.values(), strict=True
    ):
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(other[moment].cpu(), one[moment], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("element", [0, -1])
def test_nan_in_a_gradient_reaches_the_largest_magnitude_of_its_weight_alone(element, device):
    """A GPU's maximum may drop NaN. The kernel masks the last elements of w2's copy, and none of
    q_proj's.
    """
    model = make("cs336").to(device)
    weights = FastLM(model, replace(AUTOCAST, cast_once=True, fp8=True)).weights
    for leaf in leaves(weights):
        leaf.grad = torch.ones_like(leaf)
    spoilt = model.layers[0].attn.q_proj.weight, model.layers[1].ffn.w2.weight
    for weight in weights:
        if any(weight.master is master for master in spoilt):
            weight.gradients()[0].view(-1)[element] = math.nan
    MasterAdamW(weights).step()
    kept = [weight for weight in weights if weight.largest is not None]
    assert len(kept) == 7 * MODEL.num_layers
    for weight in kept:
        assert weight.largest is not None
        is_spoilt = any(weight.master is master for master in spoilt)
        assert weight.largest.isfinite().item() is not is_spoilt


def are_copies(weights):
    """Whether all copies are their masters, rounded."""
    copied = [(weight.copy.values, weight.master) for weight in weights if weight.copy is not None]
    return bool(copied) and all(
        torch.equal(copy, master.bfloat16().view(-1)) for copy, master in copied
    )


def leaves(weights):
    """All tensors that gather gradients, once each; a tied weight's master among them."""
    places = [
        place for weight in weights for place in (weight.copy, weight.read) if place is not None
    ]
    return list({id(place.leaf): place.leaf for place in places}.values())


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    "settings", [{}, {"cast_once": True}, {"mode": Mode.FORWARD_BACKWARD}, {"mode": Mode.INFERENCE}]
)
def test_a_replayed_graph_trains_as_the_step_itself_does(settings):
    """Ten steps: three as they are, the fourth captured. Phases are timed inside of the graph."""
    config = replace(AUTOCAST, device=Device.CUDA, **settings)
    model = make("cs336").cuda()
    _, expected = trained_on_gpu(config, copy.deepcopy(model), 10)
    step, losses = trained_on_gpu(replace(config, cuda_graph=True), model, 10)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert step.graph is not None
    assert step.graph.peak_bytes


def trained_on_gpu(config, model, steps):
    from cs336.measure.clock import make_clock

    step, clock, losses = TrainingStep(config, model), make_clock(config), []
    for _ in range(steps):
        times, loss = step(clock)
        losses.append(loss.item())
        assert tuple(times.phases_s) == config.phases
        assert (
            0.5 * times.step_s < sum(times.phases_s.values()) <= 1.01 * times.step_s
            or times.step_s < 2e-3
        )
    return step, losses


# Split masters


def any_bits(count):
    """fp32 values with random bits: of every magnitude, subnormal and infinite ones and NaN
    among them.
    """
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(
        torch.int32
    )
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, torch.finfo(torch.float32).max, 2.0**-149, -(2.0**-130)]
    )
    return torch.cat([bits.view(torch.float32), special])


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_is_known_to_the_last_bit_from_its_halves(device):
    values = any_bits(2**18).to(device)
    narrow, remainder = split_values(values)
    assert (narrow.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    result, is_nan = joined_values(narrow, remainder), values.isnan()
    assert is_nan.any()
    assert torch.equal(result[~is_nan].view(torch.int32), values[~is_nan].view(torch.int32))
    assert result[is_nan].isnan().all()
    assert narrow[is_nan].isnan().all()


def test_a_copy_is_rounded_as_pytorch_rounds_but_for_halves():
    """PyTorch rounds a number half way between two to the even one."""
    values = any_bits(2**18)
    values = values[~values.isnan()]
    is_half = (values.view(torch.int32) & 0xFFFF) == 0x8000
    result = split_values(values)[0]
    assert torch.equal(result[~is_half], values[~is_half].bfloat16())
    halves = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 2.0**-134])
    assert split_values(halves)[0].tolist() == [1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7, 2.0**-133]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_gradients_give_the_same_masters(name, device, fp8, moments):
    """To the last bit on a CPU; on a GPU the two are different kernels."""
    model = make(name).to(device)
    models = [
        FastLM(copy.deepcopy(model), replace(AUTOCAST, cast_once=True, fp8=fp8)) for _ in range(2)
    ]
    optimizers = [
        MasterAdamW(
            trained.weights,
            lr=0.01,
            weight_decay=0.1,
            storage=Storage(moments, splits=trained is models[1]),
        )
        for trained in models
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for one, other in zip(models[0].weights, models[1].weights, strict=True):
            for place, same in ((one.copy, other.copy), (one.read, other.read)):
                if place is not None and same is not None:
                    place.leaf.grad = torch.randn(place.leaf.shape, generator=generator).to(
                        place.leaf
                    )
                    same.leaf.grad = place.leaf.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    allowed = 0 if device == "cpu" else of_chain(torch.float32, 4 * OF_AN_UPDATE)
    away = {"rtol": allowed, "atol": allowed * 0.04}  # four steps of 0.01
    expected, result = (masters(trained) for trained in models)
    torch.testing.assert_close(result, expected, **away)
    assert all(len(trained.state) == len(models[0].weights) for trained in optimizers), (
        "every weight is trained"
    )
    split = [weight for weight in models[1].weights if weight.remainder is not None]
    assert len(split) >= 7 * len(models[1].layers)
    for weight in split:
        assert weight.copy is not None
        assert torch.equal(weight.copy.values, split_values(weight.values())[0].view(-1))
        assert weight.largest is None or weight.largest == weight.copy.values.abs().max()


def test_only_what_the_model_reads_as_a_copy_is_split():
    for name in MODELS:
        model = fast(make(name))
        MasterAdamW(model.weights, Storage(splits=True))
        assert {weight.name for weight in model.weights if weight.remainder is None} == {
            key
            for key, _ in model.named_parameters()
            if key.startswith(("token_embeddings", "positions"))
            or key.split(".")[-2].startswith("ln")
        }
        for weight in model.weights:
            assert weight.master.numel() == (
                weight.shape.numel() if weight.remainder is None else 0
            )


# Moments in bf16


def assert_rounded_at_random(values, exact):
    """Each is one of the two neighbours of `exact` in bf16, and their mean is `exact`, to five
    standard deviations.
    """
    exponent = math.floor(math.log2(abs(exact)))
    step = 2.0 ** (exponent - 7)  # bf16 has 7 bits behind the leading one
    lower = math.floor(exact / step) * step
    share = exact / step - lower / step
    assert 0.05 < share < 0.95, "rounded to the nearest, this value would tell nothing"
    assert set(values.tolist()) == {lower, lower + step}
    deviation = step * math.sqrt(share * (1 - share) / values.numel())
    assert abs(values.double().mean().item() - exact) < 5 * deviation


def stepped(gradient, steps, device, *, beta2=0.95, size=2**16):
    """The optimizer of `size` parameters, all of them 1, after so many steps with this gradient."""
    parameter = nn.Parameter(torch.ones(size, device=device))
    optimizer = MasterAdamW(
        [whole("", parameter)], betas=(0.9, beta2), storage=Storage(torch.bfloat16)
    )
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("device", DEVICES)
def test_moments_are_one_of_their_neighbours_and_on_average_right(device):
    [state] = stepped(-0.7, 1, device).state.values()
    for name, exact in zip(MOMENTS, (0.1 * -0.7, 0.05 * 0.7**2), strict=True):
        assert state[name].dtype is torch.bfloat16
        assert_rounded_at_random(state[name].float().cpu(), exact)


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_moment_grows_by_changes_too_small_to_round_to(device):
    """By (1 - beta2) of what it lacks: rounded to the nearest, it would stay where that is half
    a step of bf16.
    """
    gradient, beta2, steps = 0.5, 0.999, 1500
    [state] = stepped(gradient, steps, device, beta2=beta2, size=4096).state.values()
    exact = (1 - beta2**steps) * gradient**2
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(exact, rel=2e-3)
    nearest = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(steps):
        nearest = (beta2 * nearest.float() + (1 - beta2) * gradient**2).bfloat16()
    assert nearest.item() < 0.7 * exact


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_so(device):
    for gradient, is_kept in ((torch.inf, torch.isinf), (torch.nan, torch.isnan)):
        [state] = stepped(gradient, 1, device, size=1030).state.values()
        assert all(is_kept(state[name]).all() for name in MOMENTS)
