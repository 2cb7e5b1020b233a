"""A verdict on two sides is seldom wrong for A against A and finds real effects; rows match by what sweeps share."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from cs336_systems.analysis.compare import (
    Verdict,
    compare,
    compare_processes,
    interleave,
    match,
    refuse_unlike,
    without_profiled,
)
from cs336_systems.config import Phase, Profiler
from cs336_systems.record import Identity, Input, Measurement, load_records
from tests.committed import committed_runs
from tests.report.making import make_config, make_record


def run_in_order(generator, truth, order, *, noise=0.003, drift=0.0) -> list[list[float]]:
    """Process means of each configuration when the processes run in `order`, drifting steadily from first to last."""
    times: list[list[float]] = [[] for _ in truth]
    for position, (config, _) in enumerate(order):
        trend = 1 + drift * position / (len(order) - 1)
        times[config].append(truth[config] * trend * (1 + noise * generator.standard_normal()))
    return times


@pytest.mark.parametrize(("num_a", "num_b"), [(3, 3), (5, 5), (3, 9), (2, 9)])
def test_the_interval_is_welchs_of_scipy_and_needs_three_means_of_each_side(num_a, num_b) -> None:
    generator = np.random.default_rng(num_a)
    a = generator.lognormal(-2, 0.01, size=num_a)
    b = generator.lognormal(-2, 0.05, size=num_b)
    found = compare(a.tolist(), b.tolist())
    assert found.ratio == pytest.approx(scipy.stats.gmean(b) / scipy.stats.gmean(a))
    expected = scipy.stats.ttest_ind(np.log(b), np.log(a), equal_var=False).confidence_interval(0.99)
    assert (found.low, found.high) == (pytest.approx(tuple(np.exp(expected))) if num_a > 2 else (None, None))


@pytest.mark.parametrize(("truth", "verdict"), [(0.097, Verdict.FASTER), (0.103, Verdict.SLOWER)])
def test_a_real_effect_is_found(truth, verdict) -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        a, b = run_in_order(generator, [0.1, truth], interleave(2, 5))
        comparison = compare(a, b)
        assert comparison.verdict is verdict
        assert comparison.ratio == pytest.approx(truth / 0.1, rel=0.01)


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
        blocked = compare(*run_in_order(generator, [0.1, 0.1], blocks, noise=0.001, drift=0.05))
        interleaved = compare(*run_in_order(generator, [0.1, 0.1], interleave(2, 6), noise=0.001, drift=0.05))
        assert blocked.verdict is Verdict.SLOWER
        assert interleaved.verdict is Verdict.CANNOT_TELL
        assert interleaved.ratio == pytest.approx(1, abs=0.003)


def test_a_difference_that_is_sure_but_too_small_is_not_told() -> None:
    a, b = [0.1, 0.10001, 0.10002], [0.1003, 0.10031, 0.10032]
    comparison = compare(a, b)
    assert comparison.low > 1
    assert comparison.verdict is Verdict.CANNOT_TELL
    assert comparison.is_within_least_effect


@pytest.mark.parametrize("repeats", [2, 4, 10])
@pytest.mark.parametrize("num_configs", [2, 3, 5])
def test_interleave_gives_every_configuration_the_same_mean_position(num_configs, repeats) -> None:
    order = interleave(num_configs, repeats)
    assert sorted(order) == [(config, repeat) for config in range(num_configs) for repeat in range(repeats)]
    positions = [[at for at, (config, _) in enumerate(order) if config == wanted] for wanted in range(num_configs)]
    assert len({sum(at) for at in positions}) == 1


@pytest.mark.parametrize("processes", [3, 5, 10])
def test_equal_sides_measured_at_times_half_a_percent_apart_are_not_told_apart(processes) -> None:
    rng = np.random.default_rng(processes)
    told = 0
    for _ in range(400):
        a, b = (np.exp(rng.normal(0, 0.005) + rng.normal(0, 0.001, processes)).tolist() for _ in "AB")
        told += compare(a, b, between=0.005).verdict is not Verdict.CANNOT_TELL
        assert compare(a, [1.05 * value for value in b], between=0.005).low > 1
    assert told <= 0.03 * 400


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
@pytest.mark.parametrize("cv", [0.0002, 0.02])
def test_a_against_a_is_told_apart_in_one_of_a_hundred_at_most(num_a, num_b, cv) -> None:
    generator = np.random.default_rng(num_a + 10 * num_b)
    trials = 300
    pairs = ((simulate(generator, 0.1, num_a, cv), simulate(generator, 0.1, num_b, cv)) for _ in range(trials))
    told = sum(compare_processes(*pair).verdict is not Verdict.CANNOT_TELL for pair in pairs)
    assert told <= scipy.stats.binom.ppf(0.999, trials, 0.01)


def test_a_single_step_tells_nothing_of_the_scatter() -> None:
    found = compare_processes([Measurement(Phase.STEP, (0.1,))], [Measurement(Phase.STEP, (0.2, 0.2))])
    assert (found.ratio, found.low, found.verdict) == (pytest.approx(2), None, Verdict.CANNOT_TELL)


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


def grid(**values):
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def names_of(found, a, b):
    """The matched rows as pairs of a size and a context, and what only one side has."""
    short = [[(row["size"], row["context"]) for row in side] for side in (a, b)]
    pairs = [(short[0][i], short[1][j]) for i, j in found.pairs]
    return pairs, [short[0][i] for i in found.only_a], [short[1][j] for j in found.only_b]


def test_sweeps_that_differ_in_precision_alone_match_row_by_row() -> None:
    a = grid(size=["small", "medium"], context=[128, 256], precision=["fp32"])
    b = grid(size=["medium", "small"], context=[256, 512], precision=["bf16"])
    found = match(a, b)
    same = [("small", 256), ("medium", 256)]
    assert found.differing == ("precision",)
    assert names_of(found, a, b) == (
        [(each, each) for each in same],
        [("small", 128), ("medium", 128)],
        [("medium", 512), ("small", 512)],
    )


def test_a_setting_with_a_value_on_both_sides_takes_part() -> None:
    a = grid(size=["small"], context=[128], precision=["fp32", "bf16"])
    b = grid(size=["small"], context=[128], precision=["bf16"])
    found = match(a, b)
    assert (found.pairs, found.only_a, found.only_b, found.differing) == (((1, 0),), (0,), (), ())


def test_a_setting_that_follows_from_others_on_one_side_is_left_out() -> None:
    """--fast chooses the compile mode by the size."""
    a = [{"size": size, "context": 128, "compile": "none"} for size in ("small", "large")]
    b = [{"size": size, "context": 128, "compile": mode} for size, mode in (("small", "default"), ("large", "max"))]
    found = match(a, b)
    assert found.differing == ("compile",)
    assert found.pairs == ((0, 0), (1, 1))


IDENTITY = {"device_name": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "code": "abc"}


@pytest.mark.parametrize("name", IDENTITY)
def test_records_of_unlike_conditions_are_refused_by_name_unless_allowed(name) -> None:
    a = make_record(make_config(), (0.1, 0.1))
    other = replace(a.environment, identity=Identity(**IDENTITY | {name: "another"}))
    sides = [a], [replace(a, environment=other)]
    with pytest.raises(ValueError, match=rf"{name.replace('_', ' ')} \S.*another.*--allow-mixed"):
        refuse_unlike(sides, allow_mixed=False)
    refuse_unlike(sides, allow_mixed=True)
    refuse_unlike(([a], [a]), allow_mixed=False)


def test_versions_of_an_input_within_a_side_are_refused_and_those_of_both_sides_are_what_is_compared() -> None:
    old, new = (
        replace(make_record(make_config("small", context), (0.1, 0.1)), inputs=(Input(name="model.py", state=state),))
        for context, state in ((128, "1"), (256, "2"))
    )
    with pytest.raises(ValueError, match="versions of a model's source"):
        refuse_unlike(([old, new], [old]), allow_mixed=False)
    refuse_unlike(([old, new], [old]), allow_mixed=True)
    refuse_unlike(([old], [new]), allow_mixed=False)


@pytest.mark.parametrize("allow_mixed", [True, False])
def test_a_profiled_time_never_stands_beside_a_plain_one(allow_mixed) -> None:
    plain = make_record(make_config(), (0.1, 0.1))
    profiled = make_record(make_config(profiler=Profiler.KINETO), (0.2, 0.2))
    assert without_profiled([plain, profiled]) == [plain]
    with pytest.raises(ValueError, match="B has times under a profiler"):
        refuse_unlike(([plain], without_profiled([profiled])), allow_mixed)
