"""Budgets: what is beyond a limit fails, what the interval leaves open does not."""

import random
import statistics
from dataclasses import replace

import pytest

from cs336.analysis.limits import (
    LEAST,
    Limits,
    OverBudgetError,
    check,
    mean_interval_of_steps,
    verdicts,
)
from cs336.config import Device, Phase
from cs336.loop_record import LoopRecord
from cs336.record import Measurement, Memory, RunRecord, Status
from cs336.subject import WatchedLoop


def record_of(times_s, tokens=(), between_s=(), peak_bytes=None):
    memory = None
    if peak_bytes is not None:
        memory = Memory(
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=peak_bytes,
            segments_allocated=0,
            alloc_retries=0,
        )
    return RunRecord(
        loop=WatchedLoop(name="mine", device=Device.CPU, warmup_steps=1),
        status=Status.OK,
        started_at="2026-01-01T00:00:00+00:00",
        measurements=(Measurement(Phase.STEP, tuple(times_s)),),
        between_s=tuple(between_s),
        seen=LoopRecord(tokens=tuple(tokens)),
        memory=memory,
    )


def drawn(seed, count=200, mean_s=0.03, spread=0.1):
    generator = random.Random(seed)
    return [mean_s * (1 + spread * generator.gauss()) for _ in range(count)]


@pytest.mark.parametrize("name", ["step_ms", "mfu", "tokens_per_s", "peak_gib"])
def test_a_limit_is_kept_or_broken_or_open(name):
    times_s = drawn(1)
    record = record_of(times_s, [1000] * 200, peak_bytes=2**32)
    mean_s = statistics.fmean(times_s)
    truth = {"step_ms": 1e3 * mean_s, "mfu": 0.4, "tokens_per_s": 1000 / mean_s, "peak_gib": 4.0}
    # 200 steps with a spread of 10 % tell their mean to 1.4 %
    for factor in (0.9, 1.1):
        limits = Limits(**{name: factor * truth[name]})
        told = verdicts(record, limits, mfu=0.4)
        is_kept = (factor < 1) == (name in LEAST)
        assert [verdict.is_kept for verdict in told] == [is_kept]
        if is_kept:
            check(told)
        else:
            with pytest.raises(OverBudgetError, match=name):
                check(told)
    (told,) = verdicts(record, Limits(**{name: truth[name]}), mfu=0.4)
    assert told.is_kept is (True if name == "peak_gib" else None)
    check([told])


def test_what_is_not_known_is_no_failure():
    few = record_of([0.03] * 9)
    limits = Limits(step_ms=1, peak_gib=1, mfu=0.99, tokens_per_s=1e12)
    told = verdicts(few, limits)
    assert {verdict.is_kept for verdict in told} == {None}
    check(told)


def test_only_limits_above_zero_are_limits():
    with pytest.raises(ValueError, match="step_ms"):
        Limits(step_ms=0)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Also those of tokens per second, with steps of unequal length and what lies between them."""
    mean_tokens, s_per_token, between_s, held = 1000, 3e-5, 0.005, {"step": 0, "rate": 0}
    for seed in range(200):
        generator = random.Random(seed)
        tokens = [generator.randint(500, 1500) for _ in range(100)]
        times_s = [count * s_per_token + 0.002 * generator.random() for count in tokens]
        between = [between_s * (1 + 0.1 * generator.gauss()) for _ in tokens]
        record = record_of(times_s, tokens, between)
        (rate,) = verdicts(record, Limits(tokens_per_s=1))
        loop_s = mean_tokens * s_per_token + 0.001 + between_s
        held["rate"] += rate.seen.low <= mean_tokens / loop_s <= rate.seen.high
        interval = mean_interval_of_steps(times_s)
        held["step"] += interval.low <= mean_tokens * s_per_token + 0.001 <= interval.high
    # 95 % of 200 are 190, and three standard deviations of a binomial are 9.2
    assert all(180 <= count <= 200 for count in held.values()), held


def test_the_rate_of_a_loop_has_what_lies_between_its_steps():
    record = record_of([0.03] * 20, [300] * 20, [0.0, *[0.03] * 19])
    (told,) = verdicts(record, Limits(tokens_per_s=1))
    assert told.seen.value == pytest.approx(300 * 20 / (0.03 * 39))
    (alone,) = verdicts(replace(record, between_s=()), Limits(tokens_per_s=1))
    assert alone.seen.value == pytest.approx(300 / 0.03)
