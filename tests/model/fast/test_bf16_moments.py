"""AdamW's moments in bf16: rounded at random, beside weights in fp32."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from cs336_systems.config import Mode, RunConfig
from cs336_systems.measure.clock import HostClock
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.fast.master_adamw import MasterAdamW, rounded_at_random
from cs336_systems.model.fast.weights import whole
from tests.model.fast.rounding import assert_rounded_at_random
from tests.model.fast.test_weights import AUTOCAST, make

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MOMENTS = ("exp_avg", "exp_avg_sq")
IN_BF16 = replace(AUTOCAST, cast_once=True, bf16_moments=True)


def stepped(gradient: float, steps: int, device: str, *, beta2: float = 0.95, size: int = 2**16) -> MasterAdamW:
    """The optimizer of `size` parameters, all of them 1, after so many steps with this gradient."""
    parameter = nn.Parameter(torch.ones(size, device=device))
    optimizer = MasterAdamW([whole(parameter)], betas=(0.9, beta2), moments=torch.bfloat16)
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("device", DEVICES)
def test_moments_are_one_of_their_neighbours_and_on_average_right(device: str) -> None:
    [state] = stepped(-0.7, 1, device).state.values()
    for name, exact in zip(MOMENTS, (0.1 * -0.7, 0.05 * 0.7**2), strict=True):
        assert state[name].dtype is torch.bfloat16
        assert_rounded_at_random(state[name].float().cpu(), exact)


def test_the_two_moments_are_not_rounded_by_the_same_noise() -> None:
    """Which elements are rounded up is uncorrelated, to five standard deviations."""
    [state] = stepped(-0.7, 1, "cpu").state.values()
    up = torch.stack([state[name].abs() > state[name].abs().min() for name in MOMENTS]).float()
    assert abs(torch.corrcoef(up)[0, 1].item()) < 5 / 2**8  # of 2^16 elements


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_moment_grows_by_changes_too_small_to_round_to(device: str) -> None:
    """By (1 - beta2) of what it lacks: rounded to the nearest, it would stay where that is half a step of bf16."""
    gradient, beta2, steps = 0.5, 0.999, 1500
    [state] = stepped(gradient, steps, device, beta2=beta2, size=4096).state.values()
    exact = (1 - beta2**steps) * gradient**2
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(exact, rel=2e-3)
    nearest = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(steps):
        nearest = (beta2 * nearest.float() + (1 - beta2) * gradient**2).bfloat16()
    assert nearest.item() < 0.7 * exact


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_so(device: str) -> None:
    for gradient, is_kept in ((torch.inf, torch.isinf), (torch.nan, torch.isnan)):
        [state] = stepped(gradient, 1, device, size=1030).state.values()
        assert all(is_kept(state[name]).all() for name in MOMENTS)


@pytest.mark.parametrize("device", DEVICES)
def test_what_bf16_can_hold_is_left_alone(device: str) -> None:
    """Zero above all: an embedding's row that no token used has moments of 0."""
    [state] = stepped(0.0, 3, device, size=1030).state.values()
    assert not any(state[name].any() for name in MOMENTS)
    values = torch.tensor([1.0, -0.4375, 2.0**-130, -torch.inf])
    assert torch.equal(rounded_at_random(values, torch.Generator()).float(), values)


@pytest.mark.parametrize("name", ["cs336", "gpt2"])
def test_it_trains_as_with_moments_in_fp32(name: str) -> None:
    """The weights that are updated stay in fp32, and the update is computed before the moments are rounded."""
    model = make(name)
    config = replace(IN_BF16, model=model.config)
    plain = replace(config, bf16_moments=False)
    found, expected = (losses_of(each, copy.deepcopy(model)) for each in (config, plain))
    assert found[:2] == pytest.approx(expected[:2], rel=1e-6)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[-1] < found[0]


def losses_of(config: RunConfig, model: nn.Module) -> list[float]:
    step = TrainingStep(config, model)
    return [step(HostClock())[1].item() for _ in range(8)]


def test_they_need_an_optimizer_that_casts_once() -> None:
    with pytest.raises(ValueError, match="--cast-once"):
        replace(IN_BF16, cast_once=False)
    with pytest.raises(ValueError, match="--mode train"):
        replace(IN_BF16, mode=Mode.FORWARD)
