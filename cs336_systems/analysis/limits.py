"""Limits of what a run may take, for a script or a test that is to fail beyond them.

The verdict is on the interval of a mean, so that a limit within it is not exceeded: it cannot be
told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..config import Phase
from ..record import RunRecord
from .loop_times import LoopTimes
from .statistics import steady_interval


class OverBudgetError(RuntimeError):
    """A run took more than it was allowed to, or did less than it had to."""


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        """The interval in another unit."""
        return Interval(*(number * factor for number in self))


LEAST = ("mfu", "tokens_per_s")
"""Limits that a run must reach; the others are the most that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run says about one of its limits."""

    name: str
    limit: float
    seen: Interval | None
    """None where it is not known, as after too few steps."""

    @property
    def is_kept(self) -> bool | None:
        """Whether the interval lies wholly on the right side; None if that cannot be told."""
        if self.seen is None:
            return None
        _, low, high = self.seen
        if low <= self.limit <= high and low < high:
            return None
        return low >= self.limit if self.name in LEAST else high <= self.limit

    def __str__(self) -> str:
        if self.seen is None:
            return f"{self.name} is not known"
        value, low, high = (f"{number:.4g}" for number in self.seen)
        bound = "at least" if self.name in LEAST else "at most"
        return f"{self.name} is {value} ({low} to {high}), needed {bound} {self.limit:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run may take at most, and what it must do at least; None is not limited."""

    step_ms: float | None = None
    """Longest mean step."""
    peak_gib: float | None = None
    """Most memory that is allocated at any time."""
    mfu: float | None = None
    """Least model FLOPs over the peak of the data sheet, as a share of 1."""
    tokens_per_s: float | None = None
    """Least rate; of a loop, with what lies between its steps."""
    saved_gib: float | None = None
    """Most memory that forward passes of a traced step keep for backward."""
    flops: float | None = None
    """Most FLOPs of a traced step."""
    operations: float | None = None
    """Most operations that a traced step dispatches."""

    def __post_init__(self) -> None:
        for name, limit in self.given().items():
            if not limit > 0:
                raise ValueError(f"budget: {name} must be above 0, got {limit}")

    def given(self) -> dict[str, float]:
        """The limits that there are."""
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def verdicts(self, seen: Mapping[str, Interval | None]) -> list[Verdict]:
        """The verdict on each limit, of what was seen by name."""
        return [
            Verdict(name=name, limit=limit, seen=seen.get(name))
            for name, limit in self.given().items()
        ]


def verdicts(record: RunRecord, limits: Limits, mfu: float | None = None) -> list[Verdict]:
    """The verdict on each limit; `mfu` is that of the record's mean step, if it is known."""
    step = mean_interval_of_steps(_times_s(record))
    seen: dict[str, Interval | None] = {
        "step_ms": step and step.scaled(1e3),
        "peak_gib": _peak_gib(record),
        "mfu": _rate(mfu, step),
        "tokens_per_s": _tokens_per_s(record),
    }
    return limits.verdicts(seen)


def check(told: Sequence[Verdict]) -> None:
    """Raise OverBudgetError if a limit is not kept; one that cannot be told is no failure."""
    broken = [str(verdict) for verdict in told if verdict.is_kept is False]
    if broken:
        raise OverBudgetError(f"over budget: {'; '.join(broken)}")


def mean_interval_of_steps(values: Sequence[float]) -> Interval | None:
    """The mean and its interval, in which steps that resemble each other count less; None for
    fewer than 10.
    """
    half = steady_interval(values)
    if half is None:
        return None
    mean = sum(values) / len(values)
    return Interval(mean, mean * (1 - half), mean * (1 + half))


def exactly(value: float) -> Interval:
    """A value that is known without an error."""
    return Interval(value, value, value)


def _times_s(record: RunRecord) -> tuple[float, ...]:
    step = record.measurement(Phase.STEP)
    return step.times_s if step else ()


def _peak_gib(record: RunRecord) -> Interval | None:
    """The peak, which is known exactly."""
    if record.memory is None:
        return None
    return exactly(record.memory.peak_allocated_bytes / 2**30)


def _rate(value: float | None, step: Interval | None) -> Interval | None:
    """A rate over the mean step, whose interval follows from that of the step."""
    if value is None or step is None:
        return None
    return Interval(value, value * step.value / step.high, value * step.value / step.low)


def _tokens_per_s(record: RunRecord) -> Interval | None:
    """Tokens over the time of the loop.

    The interval of a ratio of sums is that of the mean of its linear part (the delta method): of a
    step, its tokens less what the rate gives in its time.
    """
    times_s = _times_s(record)
    if record.loop is None:
        tokens = record.subject.tokens_per_step
        step = mean_interval_of_steps(times_s)
        return _rate(tokens / step.value if tokens and step else None, step)
    rate, counts = LoopTimes(record).tokens_per_s, record.seen.tokens if record.seen else ()
    if rate is None or len(counts) != len(times_s):
        return None
    # the first step may have none before it
    between_s = [0.0] * (len(times_s) - len(record.between_s)) + [*record.between_s]
    loop_s = [sum(pair) for pair in zip(times_s, between_s, strict=True)]
    mean_s = sum(loop_s) / len(loop_s)
    parts = zip(counts, loop_s, strict=True)
    rates = [rate + (count - rate * time_s) / mean_s for count, time_s in parts]
    return mean_interval_of_steps(rates)
