import math
from fractions import Fraction
from time import process_time

import numpy as np
import pytest
import scipy.stats

from cs336.analysis.statistics import (
    lag1_autocorrelation,
    mean_interval,
    outliers,
    quotient_stdev,
    slope,
    steady_interval,
)
from cs336.analysis.warnings import timing_warnings


@pytest.mark.parametrize("n", [3, 4, 10, 100])
def test_mean_interval_is_students(n: int) -> None:
    values = np.random.default_rng(n).lognormal(size=n)
    expected = scipy.stats.t.interval(0.95, n - 1, values.mean(), scipy.stats.sem(values))
    assert mean_interval(values.tolist()) == pytest.approx(expected)


def test_it_takes_three_values_to_have_an_interval() -> None:
    """Of two, Student's t with one degree of freedom would make 6.4 times the difference: 1 and
    2 from -4.9 to 7.9.
    """
    assert [mean_interval(values) for values in ([], [1.0], [1.0, 2.0], [2.0, 2.0])] == [None] * 4
    assert mean_interval([2.0, 2.0, 2.0]) is None, "equal values show no scatter"


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_interval_of_steps_that_resemble_each_other_covers_the_truth(
    correlation: float,
) -> None:
    """Of 300 processes of 100 steps; Student's t alone covers it in about 74 % of those with a
    correlation of 0.5.
    """
    times = 0.01 * correlated_steps(np.random.default_rng(0), 1, 300, 100, correlation)[0]
    half = [steady_interval(steps.tolist()) * steps.mean() for steps in times]
    assert np.mean(np.abs(times.mean(axis=1) - 1) <= half) == pytest.approx(0.945, abs=0.035)
    assert steady_interval([1.0] * 9) is None


def correlated_steps(
    generator, trials: int, processes: int, steps: int, correlation: float = 0.8
) -> np.ndarray:
    """Step times of mean 100 and variance 1, each correlated with the one before it in its
    process.
    """
    times = generator.standard_normal((trials, processes, steps))
    times[..., 1:] *= math.sqrt(1 - correlation**2)
    for step in range(1, steps):
        times[..., step] += correlation * times[..., step - 1]
    return 100 + times


def test_lag1_autocorrelation_of_known_series() -> None:
    assert lag1_autocorrelation([1, -1] * 50) == pytest.approx(-0.99)
    assert lag1_autocorrelation([0] * 50 + [1] * 50) == pytest.approx(0.97)
    # (0.75 - 0.25 + 0.75) / 5, by hand
    assert lag1_autocorrelation([1, 2, 3, 4]) == pytest.approx(0.25)
    assert lag1_autocorrelation([5.0] * 10) is None
    assert lag1_autocorrelation([1.0, 2.0]) is None


def test_slope_is_that_of_scipy() -> None:
    values = np.random.default_rng(0).normal(size=12).tolist()
    expected = scipy.stats.linregress(range(12), values)
    assert slope(values) == pytest.approx((expected.slope, expected.stderr))


@pytest.mark.parametrize("n", [3, 5, 10, 20, 50])
def test_noise_has_outliers_in_fewer_than_one_of_a_hundred_samples(n) -> None:
    samples = np.random.default_rng(n).normal(1, 0.03, (1500, n))
    assert sum(bool(outliers(sample.tolist(), 0.005)) for sample in samples) / len(samples) < 0.0125


def outliers_by_definition(values: list[float], alpha: float) -> list[int]:
    """Rosner's test, step by step: every mean and every deviation anew, in fractions."""
    left, removed, num_found = dict(enumerate(map(Fraction, values))), [], 0
    while len(removed) < (len(values) - 1) // 2 and len({*left.values()}) > 1:
        n, mean = len(left), sum(left.values()) / len(left)
        variance = sum((value - mean) ** 2 for value in left.values()) / (n - 1)
        farthest = max(left, key=lambda i: (abs(left[i] - mean), left[i], -i))
        t = scipy.stats.t.ppf(1 - alpha / (2 * n), n - 2)
        deviation = math.sqrt((left.pop(farthest) - mean) ** 2 / variance)
        removed.append(farthest)
        if deviation > (n - 1) * t / math.sqrt(n * (n - 2 + t**2)):
            num_found = len(removed)
    return sorted(removed[:num_found])


def test_outliers_are_those_of_the_definition_on_drawn_series() -> None:
    """Ties, spikes of many sizes on both sides, steps, and spikes that dwarf all other
    differences.
    """
    generator, num_with_outliers = np.random.default_rng(0), 0
    for _ in range(300):
        n = int(generator.integers(0, 40))
        series = generator.normal(1, 10.0 ** generator.integers(-9, 0), n)
        is_spike = generator.random(n) < generator.choice([0, 0.1, 0.4])
        series[is_spike] += generator.choice([-1, 1], is_spike.sum()) * 10.0 ** generator.uniform(
            -6, 12
        )
        values = series.round(int(generator.choice([1, 3, 15]))).tolist()
        expected = outliers_by_definition(values, 0.005)
        num_with_outliers += bool(expected)
        assert outliers(values, 0.005) == expected, values
    assert num_with_outliers > 60


def test_judging_a_long_run_takes_seconds() -> None:
    """200,000 steps, half of them far from the others: a look at all steps for each outlier
    would take hours.
    """
    times_s = np.exp(np.random.default_rng(0).standard_cauchy(200_000).clip(-20, 20)).tolist()
    started = process_time()
    assert len(timing_warnings(times_s)) >= 2
    assert process_time() - started < 60


@pytest.mark.parametrize("n", [10, 50])
def test_a_value_ten_standard_deviations_out_is_found(n) -> None:
    samples = np.random.default_rng(n).normal(1, 0.03, (200, n))
    samples[:, n // 2] += 0.3
    assert np.mean([n // 2 in outliers(sample.tolist(), 0.005) for sample in samples]) > 0.95


def test_the_deviation_of_a_quotient_is_that_of_many_drawn_ones() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(6, 0.18, size=200_000), generator.normal(2, 0.08, size=200_000)
    assert quotient_stdev(3, 0.03, 0.04) == pytest.approx(float(np.std(a / b)), rel=0.02)
    assert quotient_stdev(3, 0.03, None) is None
