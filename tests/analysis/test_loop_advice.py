"""Advice for a watched loop: never a benchmark's, and about the phase that grows."""

import random

import pytest

from cs336.analysis.loop_advice import between_verdict, growth_advice, loop_warnings
from cs336.config import Phase
from cs336.record import Measurement, WarningCode

STEPS = 60
OF_BENCHMARKS = ("--warmup-steps", "--measured-steps", "close other programs")


def measurements(growth, *, spike=0.0):
    """Three phases of 10 ms with a noise of 1 %; each has its growth over all steps."""
    generator = random.Random(0)
    phases = []
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        times_s = []
        for number in range(STEPS):
            mean_s = 0.01 * (1 + growth.get(phase, 0.0) * number / STEPS)
            times_s.append(generator.gauss(mean_s, 1e-4))
        phases.append(Measurement(phase, tuple(times_s)))
    whole = [sum(times_s) for times_s in zip(*(phase.times_s for phase in phases), strict=True)]
    whole[STEPS // 2] += spike
    return (*phases, Measurement(Phase.STEP, tuple(whole)))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER])
def test_the_phase_that_grows_is_named(phase):
    warnings = {w.code: w.message for w in loop_warnings(measurements({phase: 1.32}), {})}
    message = warnings[WarningCode.DRIFT]
    assert f"growth is in {phase}" in message
    assert not any(advice in text for advice in OF_BENCHMARKS for text in warnings.values())


def test_growth_of_all_phases_alike_is_of_none():
    grown = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER), 1.0)
    assert "growth is in" not in growth_advice(measurements(grown))


def test_no_advice_of_a_benchmark_for_a_slow_step():
    warnings = loop_warnings(measurements({}, spike=1.0), {})
    assert {warning.code for warning in warnings} == {WarningCode.UNSTABLE, WarningCode.OUTLIERS}
    for warning in warnings:
        assert not any(advice in warning.message for advice in OF_BENCHMARKS)


@pytest.mark.parametrize(("between_s", "is_told"), [(0.030, True), (0.001, False)])
def test_time_between_steps_is_a_verdict(between_s, is_told):
    assert (between_verdict(0.0277, between_s) is not None) is is_told
