"""The napkin's closed forms against exact fractions, the lecture's answers, and the account of a step."""

from dataclasses import replace
from fractions import Fraction

import pytest

from cs336_systems.config import SIZES, Precision
from cs336_systems.costs.accounting import count_parameters, forward_flops, mfu
from cs336_systems.costs.hardware import find_device
from cs336_systems.costs.napkin import largest_model, rule_of_thumb_flops, training_days

H100 = "NVIDIA H100 80GB HBM3"


def test_the_lecture_trains_70_billion_parameters_in_about_144_days() -> None:
    """CS336, lecture 2: 15e12 tokens on 1024 H100 at an MFU of 0.5."""
    device = find_device(H100)
    assert device is not None
    days = training_days(
        parameters=70e9, tokens=15e12, peak_flops_per_s=device.peak_flops_per_s[Precision.BF16], count=1024, mfu=0.5
    )
    assert days == pytest.approx(144, abs=0.5)


def test_the_lecture_fits_40_billion_parameters_on_eight_gpus() -> None:
    """CS336, lecture 2: 80 GB each, AdamW in fp32."""
    assert largest_model(memory_bytes=80e9, count=8) == 40e9


@pytest.mark.parametrize(
    ("parameters", "tokens", "peak", "count", "mfu_percent"),
    [(1, 1, 1, 1, 100), (124_439_808, 3 * 10**11, 312 * 10**12, 8, 37), (7 * 10**10, 2 * 10**12, 10**15, 2048, 41)],
)
def test_days_are_the_exact_fraction(parameters: int, tokens: int, peak: int, count: int, mfu_percent: int) -> None:
    """A token a parameter is a multiply-add in forward and two in backward, and a day has 24 x 60 x 60 s."""
    exact = Fraction(2 * (1 + 2) * parameters * tokens * 100, count * peak * mfu_percent * 24 * 60 * 60)
    days = training_days(
        parameters=parameters, tokens=tokens, peak_flops_per_s=peak, count=count, mfu=mfu_percent / 100
    )
    assert days == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("bytes_per_parameter", [0.5, 2, 12, 16, 18])
def test_the_largest_model_fills_the_memory_and_one_more_parameter_does_not_fit(bytes_per_parameter: float) -> None:
    memory_bytes, count = 80 * 10**9, 3
    parameters = int(largest_model(memory_bytes=memory_bytes, count=count, bytes_per_parameter=bytes_per_parameter))
    assert parameters * bytes_per_parameter <= count * memory_bytes < (parameters + 1) * bytes_per_parameter


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("size", ["small", "2.7B", "gpt2-xl"])
def test_the_rule_of_thumb_is_the_account_of_a_model_whose_context_is_one_token(size: str, backward: bool) -> None:
    """There attention costs next to nothing, and what multiplies are all parameters but embedding, norms and biases."""
    model = replace(SIZES[size], context_length=1)
    exact = sum(forward_flops(model, 64).values()) * (3 if backward else 1)
    looked_up = 0 if model.arch == "gpt2" else model.vocab_size * model.d_model
    rule = rule_of_thumb_flops(count_parameters(model) - looked_up, 64, backward=backward)
    assert exact / rule == pytest.approx(1, rel=2e-3)


def test_training_at_the_mfu_of_a_measured_step_takes_as_long_as_its_steps() -> None:
    """If 6 N T were a step's FLOPs, the days would be the number of steps times the time of one."""
    device = find_device(H100)
    assert device is not None
    parameters, tokens_per_step, step_s, num_steps = 10**9, 2**16, 0.8, 250_000
    reached = mfu(rule_of_thumb_flops(parameters, tokens_per_step) / step_s, H100, Precision.BF16)
    assert reached is not None
    days = training_days(
        parameters=parameters,
        tokens=num_steps * tokens_per_step,
        peak_flops_per_s=device.peak_flops_per_s[Precision.BF16],
        count=1,
        mfu=reached,
    )
    assert days == pytest.approx(num_steps * step_s / 86_400)
