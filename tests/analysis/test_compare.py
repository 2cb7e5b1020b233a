import math

import numpy as np
import pytest
import scipy.stats

from cs336_systems.analysis.compare import Comparison, Verdict, compare, interleave, process_means
from cs336_systems.config import SIZES, Phase, RunConfig
from cs336_systems.record import Measurement, RunRecord, Status


def simulate(generator, truth, order, *, noise=0.003, drift=0.0) -> list[list[float]]:
    """Process means of each configuration when the processes run in `order`, drifting steadily from first to last."""
    times: list[list[float]] = [[] for _ in truth]
    for position, (config, _) in enumerate(order):
        trend = 1 + drift * position / (len(order) - 1)
        times[config].append(truth[config] * trend * (1 + noise * generator.standard_normal()))
    return times


@pytest.mark.parametrize("repeats", [2, 3, 5, 10])
def test_comparing_a_with_a_says_cannot_tell(repeats) -> None:
    generator = np.random.default_rng(repeats)
    trials = 2000
    told = 0
    for _ in range(trials):
        a, b = simulate(generator, [0.1, 0.1], interleave(2, repeats))
        told += compare(a, b, least_effect=0).verdict is not Verdict.CANNOT_TELL
    assert told / trials <= 0.02


@pytest.mark.parametrize(("truth", "verdict"), [(0.097, Verdict.FASTER), (0.103, Verdict.SLOWER)])
def test_a_real_effect_is_found(truth, verdict) -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        a, b = simulate(generator, [0.1, truth], interleave(2, 5))
        comparison = compare(a, b)
        assert comparison.verdict is verdict
        assert comparison.ratio == pytest.approx(truth / 0.1, rel=0.01)


@pytest.mark.parametrize(("num_a", "num_b"), [(3, 3), (5, 5), (3, 9)])
def test_p_value_and_interval_are_welchs_of_scipy(num_a, num_b) -> None:
    generator = np.random.default_rng(num_a)
    a = generator.lognormal(-2, 0.01, size=num_a)
    b = generator.lognormal(-2, 0.05, size=num_b)
    expected = scipy.stats.ttest_ind(np.log(b), np.log(a), equal_var=False)
    interval = np.exp(expected.confidence_interval(0.99))
    comparison = compare(a.tolist(), b.tolist())
    assert comparison.p_value == pytest.approx(expected.pvalue)
    assert (comparison.low, comparison.high) == pytest.approx(tuple(interval))


def test_swapping_a_and_b_inverts_the_answer() -> None:
    a, b = [0.100, 0.101, 0.102], [0.110, 0.111, 0.113]
    there, back = compare(a, b), compare(b, a)
    assert there.verdict is Verdict.SLOWER
    assert back.verdict is Verdict.FASTER
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low == pytest.approx(1 / back.high)


def test_drift_fools_blocks_of_processes_but_not_interleaved_ones() -> None:
    blocks = [(config, repeat) for config in range(2) for repeat in range(6)]
    generator = np.random.default_rng(0)
    for _ in range(200):
        blocked = compare(*simulate(generator, [0.1, 0.1], blocks, noise=0.001, drift=0.05))
        interleaved = compare(*simulate(generator, [0.1, 0.1], interleave(2, 6), noise=0.001, drift=0.05))
        assert blocked.verdict is Verdict.SLOWER
        assert interleaved.verdict is Verdict.CANNOT_TELL
        assert interleaved.ratio == pytest.approx(1, abs=0.003)


def test_a_difference_that_is_sure_but_too_small_is_not_told() -> None:
    a, b = [0.1, 0.10001, 0.10002], [0.1003, 0.10031, 0.10032]
    assert compare(a, b, least_effect=0).verdict is Verdict.SLOWER
    comparison = compare(a, b)
    assert comparison.verdict is Verdict.CANNOT_TELL
    assert "below 0.5 %" in comparison.sentence


def comparison(ratio: float, low: float, high: float) -> Comparison:
    return Comparison(
        ratio=ratio, low=low, high=high, confidence=0.99, least_effect=0.005, p_value=0.001, num_a=5, num_b=6
    )


@pytest.mark.parametrize(
    ("interval", "sentence"),
    [
        (
            (0.97, 0.96, 0.98),
            "B is faster than A: -3.00 % step time, 99 % interval -4.00 % to -2.00 %, 5 and 6 processes.",
        ),
        (
            (1.03, 1.001, 1.06),
            "B is slower than A: +3.00 % step time, 99 % interval +0.10 % to +6.00 %, 5 and 6 processes.",
        ),
        (
            (1.001, 0.98, 1.02),
            "Cannot tell B from A: +0.10 % step time, 99 % interval -2.00 % to +2.00 %, 5 and 6 processes; "
            "if the difference matters, run more repeats.",
        ),
        (
            (1.002, 1.001, 1.003),
            "Cannot tell B from A, and any difference is below 0.5 %: "
            "+0.20 % step time, 99 % interval +0.10 % to +0.30 %, 5 and 6 processes.",
        ),
    ],
)
def test_the_sentence_says_the_verdict_and_its_numbers(interval, sentence) -> None:
    assert comparison(*interval).sentence == sentence


@pytest.mark.parametrize(("num_a", "num_b"), [(2, 2), (2, 9), (9, 2), (3, 3)])
def test_a_verdict_needs_an_interval_and_that_three_processes_of_each_side(num_a, num_b) -> None:
    """B takes twice as long, with next to no scatter: three processes of each tell, two do not."""
    generator = np.random.default_rng(num_b)
    sides = [scale * np.exp(generator.normal(0, 1e-3, size=size)) for scale, size in ((0.1, num_a), (0.2, num_b))]
    found = compare(*(side.tolist() for side in sides))
    assert found.ratio == pytest.approx(scipy.stats.gmean(sides[1]) / scipy.stats.gmean(sides[0]))
    is_known = min(num_a, num_b) >= 3
    assert (found.low is None, found.high is None, found.p_value is None) == (not is_known,) * 3
    assert found.verdict is (Verdict.SLOWER if is_known else Verdict.CANNOT_TELL)
    assert found.sentence.startswith("B is slower" if is_known else "Cannot tell")
    assert ("interval" in found.sentence, "--repeats 5" in found.sentence) == (is_known, not is_known)
    assert f"{num_a} and {num_b} processes" in found.sentence


def test_an_interval_beyond_twice_is_told_in_factors() -> None:
    told = [comparison(1.2, low, high).sentence for low, high in ((0.5, 2.0), (0.49, 1.5), (0.9, 2.01))]
    assert "interval -50.00 % to +100.00 %" in told[0]
    assert "interval 0.49 to 1.5 times A's" in told[1]
    assert "interval 0.9 to 2 times A's" in told[2]


@pytest.mark.parametrize(("a", "b", "which"), [([1.0], [1.0, 2.0], "A, got 1"), ([1.0, 2.0], [], "B, got 0")])
def test_too_few_processes_say_what_to_do(a, b, which) -> None:
    with pytest.raises(ValueError, match=f"at least 3 process means of {which}: run more repeats"):
        compare(a, b)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_are_positive_and_finite(bad) -> None:
    with pytest.raises(ValueError, match="of B must be positive and finite"):
        compare([1.0, 2.0], [1.0, bad])


def test_settings_are_fractions() -> None:
    with pytest.raises(ValueError, match="confidence"):
        compare([1.0, 2.0], [1.0, 2.0], confidence=99)
    with pytest.raises(ValueError, match="least_effect"):
        compare([1.0, 2.0], [1.0, 2.0], least_effect=-0.1)


def test_times_without_any_scatter() -> None:
    same = compare([1.0] * 3, [1.0] * 3)
    assert (same.verdict, same.p_value) == (Verdict.CANNOT_TELL, 1)
    assert compare([1.0] * 3, [2.0] * 3).verdict is Verdict.SLOWER


def test_wildly_different_times_have_a_finite_answer() -> None:
    assert compare([1e-300, 1e-150, 1.0], [1.0, 1e150, 1e300]).verdict is Verdict.CANNOT_TELL


def test_interleave_is_a_b_b_a() -> None:
    assert interleave(2, 4) == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2), (1, 3), (0, 3)]
    assert interleave(3, 2) == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert interleave(2, 0) == []


@pytest.mark.parametrize("repeats", [2, 4, 10])
@pytest.mark.parametrize("num_configs", [2, 3, 5])
def test_interleave_gives_every_configuration_the_same_mean_position(num_configs, repeats) -> None:
    order = interleave(num_configs, repeats)
    assert sorted(order) == [(config, repeat) for config in range(num_configs) for repeat in range(repeats)]
    positions = [[at for at, (config, _) in enumerate(order) if config == wanted] for wanted in range(num_configs)]
    assert len({sum(at) for at in positions}) == 1


def test_process_means_are_those_of_runs_that_ended_well() -> None:
    config = RunConfig(size="tiny", model=SIZES["tiny"])

    def record(status: Status, *measurements: Measurement) -> RunRecord:
        return RunRecord(config=config, status=status, started_at="2026-01-01T00:00:00Z", measurements=measurements)

    records = [
        record(Status.OK, Measurement(Phase.FORWARD, (1.0, 2.0)), Measurement(Phase.STEP, (4.0, 6.0))),
        record(Status.OOM),
        record(Status.OK, Measurement(Phase.STEP, (7.0,))),
    ]
    assert process_means(records) == [5.0, 7.0]
    assert process_means(records, Phase.FORWARD) == [1.5]


@pytest.mark.parametrize("processes", [3, 5, 10])
def test_equal_sides_measured_at_times_half_a_percent_apart_are_not_told_apart(processes) -> None:
    rng = np.random.default_rng(processes)
    told = 0
    for _ in range(400):
        a, b = (np.exp(rng.normal(0, 0.005) + rng.normal(0, 0.001, processes)).tolist() for _ in "AB")
        told += compare(a, b, between=0.005).verdict is not Verdict.CANNOT_TELL
        assert compare(a, [1.05 * value for value in b], between=0.005).low > 1
    assert told <= 0.03 * 400
