"""A verdict from one or two processes: seldom wrong for A against A, and it finds a difference of a fifth."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from cs336_systems.analysis.compare import Verdict, compare
from cs336_systems.analysis.few_processes import compare_processes, least_difference
from cs336_systems.config import Phase, Profiler
from cs336_systems.record import Measurement, load_records
from tests.committed import committed_runs


def simulate(generator, truth_s, num_processes, cv, num_steps=10) -> list[Measurement]:
    """Processes whose means deviate as docs/METHOD.md says: by 2 %, and by twice the deviation of their steps.

    The time at which they are measured adds 0.5 % to all.
    """
    found = []
    truth_s *= math.exp(0.005 * generator.standard_normal())
    for _ in range(num_processes):
        mean_s = truth_s * math.exp(math.hypot(0.02, 2 * cv) * generator.standard_normal())
        scatter = generator.standard_normal(num_steps)
        scatter = (scatter - scatter.mean()) * cv
        found.append(Measurement(Phase.STEP, tuple((mean_s * (1 + scatter)).tolist())))
    return found


@pytest.mark.parametrize(("num_a", "num_b"), [(1, 1), (2, 2), (1, 5)])
@pytest.mark.parametrize("cv", [0.0002, 0.003, 0.02])
def test_a_against_a_is_told_apart_in_one_of_a_hundred_at_most(num_a, num_b, cv) -> None:
    generator = np.random.default_rng(num_a + 10 * num_b)
    trials = 500
    pairs = ((simulate(generator, 0.1, num_a, cv), simulate(generator, 0.1, num_b, cv)) for _ in range(trials))
    told = sum(compare_processes(*pair).verdict is not Verdict.CANNOT_TELL for pair in pairs)
    assert told <= scipy.stats.binom.ppf(0.999, trials, 0.01)


@pytest.mark.parametrize(("truth_s", "verdict"), [(0.08, Verdict.FASTER), (0.125, Verdict.SLOWER)])
def test_a_difference_of_a_fifth_is_found(truth_s, verdict) -> None:
    generator = np.random.default_rng(0)
    found = [compare_processes(simulate(generator, 0.1, 1, 0.003), simulate(generator, truth_s, 1, 0.003))
             for _ in range(200)]  # fmt: skip
    assert sum(each.verdict is verdict for each in found) >= 198
    assert {each.verdict for each in found} <= {verdict, Verdict.CANNOT_TELL}


def test_without_any_scatter_the_interval_is_that_of_the_assumed_deviations() -> None:
    found = compare_processes([Measurement(Phase.STEP, (0.1, 0.1))], [Measurement(Phase.STEP, (0.2, 0.2))])
    half_width = scipy.stats.norm.ppf(0.995) * math.sqrt(2 * (0.005**2 + 0.02**2))
    assert least_difference() == pytest.approx(math.exp(half_width) - 1)
    assert (found.low, found.ratio, found.high) == pytest.approx(
        (2 * math.exp(-half_width), 2, 2 * math.exp(half_width))
    )


def test_where_the_steps_scatter_much_the_interval_is_that_of_welch() -> None:
    """Against 40 % of scatter 2 % is nothing, and then the formula is Welch's with a deviation that is doubled."""
    a = Measurement(Phase.STEP, tuple(0.1 * (1 + 0.4 * sign) for sign in (-1, 1) * 3))
    b = Measurement(Phase.STEP, tuple(0.1 * (1 + 0.8 * sign) for sign in (-1, 1) * 2))
    found = compare_processes([a], [b])
    deviations = [2 * np.std(each.times_s, ddof=1) / np.mean(each.times_s) for each in (a, b)]
    variances = [deviation**2 for deviation in deviations]
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / 5 + variances[1] ** 2 / 3)
    half_width = scipy.stats.t.ppf(0.995, freedom) * math.sqrt(sum(variances))
    assert math.log(found.high / found.ratio) == pytest.approx(half_width, rel=0.01)


def test_three_processes_of_each_side_are_compared_by_their_means_alone() -> None:
    generator = np.random.default_rng(1)
    a, b = simulate(generator, 0.1, 3, 0.02), simulate(generator, 0.12, 4, 0.02)
    means = [[each.mean_s for each in side] for side in (a, b)]
    assert compare_processes(a, b, are_alternate=True) == compare(*means)
    assert compare_processes(a, b) == compare(*means, between=0.005)


def test_a_single_step_tells_nothing_of_the_scatter() -> None:
    found = compare_processes([Measurement(Phase.STEP, (0.1,))], [Measurement(Phase.STEP, (0.2, 0.2))])
    assert (found.ratio, found.low, found.verdict) == (pytest.approx(2), None, Verdict.CANNOT_TELL)


def test_swapping_the_sides_inverts_the_interval() -> None:
    generator = np.random.default_rng(2)
    a, b = simulate(generator, 0.1, 1, 0.01), simulate(generator, 0.2, 2, 0.003)
    there, back = compare_processes(a, b), compare_processes(b, a)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))


@pytest.mark.parametrize("times_s", [(), (0.0, 0.0)])
def test_times_are_positive(times_s) -> None:
    side = [Measurement(Phase.STEP, times_s)] if times_s else []
    with pytest.raises(ValueError, match="B needs mean step times that are positive"):
        compare_processes([Measurement(Phase.STEP, (0.1, 0.1))], side)


def test_no_two_published_processes_of_one_configuration_are_told_apart() -> None:
    alike: dict[object, list[Measurement]] = {}
    for path in committed_runs():
        for record in load_records(path)[0]:
            measured = record.measurement(Phase.STEP)
            if record.environment and measured and measured.cv and record.config.profiler is Profiler.NONE:
                key = record.config.configuration, record.environment.identity
                alike.setdefault(key, []).append(measured)
    pairs = [pair for same in alike.values() for pair in itertools.combinations(same, 2)]
    assert len(pairs) > 300
    assert {compare_processes([a], [b]).verdict for a, b in pairs} == {Verdict.CANNOT_TELL}
