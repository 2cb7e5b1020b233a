"""Whether B is faster than A: a verdict from the means of fresh processes, measured in the order A B B A."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cs336_systems.analysis.statistics import FEWEST, standard_error
from cs336_systems.config import Phase
from cs336_systems.record import RunRecord, Status

ENOUGH = 5
"""Number of processes of each side from which on a verdict is reliable."""
CONFIDENCE = 0.99
"""Confidence of the interval of a ratio."""
LEAST_EFFECT = 0.005
"""Smallest relative difference that matters."""
WIDE = 2.0
"""Intervals that reach beyond this factor are written as factors, others in percent."""


class Verdict(StrEnum):
    """What can be said of B's step time relative to A's."""

    FASTER = "faster"
    SLOWER = "slower"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """B's step time over A's, its confidence interval, and the verdict."""

    ratio: float
    """Geometric mean of B's times over that of A's: below 1, B is faster."""
    low: float | None
    high: float | None
    """Confidence interval of the ratio; None if there are too few processes or steps for one."""
    confidence: float
    least_effect: float
    """Smallest relative difference that matters."""
    p_value: float | None
    """Two-sided p value of Welch's t test on the logarithms; None where a side has fewer than FEWEST processes."""
    num_a: int
    num_b: int

    @property
    def verdict(self) -> Verdict:
        """CANNOT_TELL without an interval, when it includes 1, or when all of it is within `least_effect` of 1."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return Verdict.CANNOT_TELL
        if self._is_within_least_effect(self.low, self.high):
            return Verdict.CANNOT_TELL
        return Verdict.FASTER if self.ratio < 1 else Verdict.SLOWER

    def _is_within_least_effect(self, low: float, high: float) -> bool:
        return abs(low - 1) <= self.least_effect and abs(high - 1) <= self.least_effect

    @property
    def sentence(self) -> str:
        """The verdict in plain English, with the numbers it rests on."""
        processes = f"{self.num_a} and {self.num_b} processes"
        if self.low is None or self.high is None:
            return (
                f"Cannot tell B from A: {_percent(self.ratio)} step time by geometric means, {processes}. Two "
                f"processes of a side are too few: a verdict needs {FEWEST}, and {ENOUGH} to be relied on "
                f"(--repeats {ENOUGH})."
            )
        interval = f"{self.confidence * 100:g} % interval {_interval(self.low, self.high)}"
        numbers = f"{_percent(self.ratio)} step time, {interval}, {processes}"
        if self.verdict is not Verdict.CANNOT_TELL:
            return f"B is {self.verdict} than A: {numbers}."
        if self._is_within_least_effect(self.low, self.high):
            return f"Cannot tell B from A, and any difference is below {self.least_effect * 100:g} %: {numbers}."
        return f"Cannot tell B from A: {numbers}; if the difference matters, run more repeats."


def _interval(low: float, high: float) -> str:
    if low >= 1 / WIDE and high <= WIDE:
        return f"{_percent(low)} to {_percent(high)}"
    return f"{low:.2g} to {high:.2g} times A's"


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.2f} %"


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    least_effect: float = LEAST_EFFECT,
    between: float = 0.0,
) -> Comparison:
    """Compare B with A by their process means in seconds, at least 2 of each.

    `between` is the relative standard deviation between times of measurement, which all processes of a side share and
    more processes do not reduce; 0 if A and B were measured alternately.

    Welch's t interval on the logarithms, so that the effect is relative and swapping A and B inverts the ratio. There
    is no interval if a side has fewer than FEWEST.
    """
    _check(a, b, confidence, least_effect)
    logs_a, logs_b = [math.log(value) for value in a], [math.log(value) for value in b]
    difference = statistics.fmean(logs_b) - statistics.fmean(logs_a)
    half_width, p_value = None, None
    if min(len(a), len(b)) >= FEWEST:
        half_width, p_value = _welch(logs_a, logs_b, difference, confidence, between)
    return comparison_of(
        difference, half_width, (len(a), len(b)), confidence=confidence, least_effect=least_effect, p_value=p_value
    )


def comparison_of(
    difference: float,
    half_width: float | None,
    counts: tuple[int, int],
    *,
    confidence: float = CONFIDENCE,
    least_effect: float = LEAST_EFFECT,
    p_value: float | None = None,
) -> Comparison:
    """The comparison that follows from B's mean logarithm less A's and half the width of that difference's interval.

    `counts` are the numbers of processes of A and of B.
    """
    return Comparison(
        ratio=_exp(difference),
        low=None if half_width is None else _exp(difference - half_width),
        high=None if half_width is None else _exp(difference + half_width),
        confidence=confidence,
        least_effect=least_effect,
        p_value=p_value,
        num_a=counts[0],
        num_b=counts[1],
    )


def _welch(
    a: Sequence[float], b: Sequence[float], difference: float, confidence: float, between: float
) -> tuple[float, float]:
    """Half the width of the interval of the difference of the means, and the two-sided p value."""
    from scipy.special import stdtr, stdtrit  # slow to import, and few commands need it

    variance_a, variance_b = standard_error(a) ** 2, standard_error(b) ** 2
    error = math.sqrt(variance_a + variance_b + 2 * between**2)
    if error == 0:
        return 0.0, float(difference == 0)
    share_a, share_b = variance_a / error**2, variance_b / error**2
    inverse = share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1)
    freedom = 1 / max(inverse, 1e-6)  # from there on Student's t is the normal distribution
    return float(stdtrit(freedom, (1 + confidence) / 2)) * error, 2 * float(stdtr(freedom, -abs(difference) / error))


def _exp(logarithm: float) -> float:
    """The ratio whose logarithm this is, as far as a float holds it."""
    return math.exp(min(logarithm, 700))  # two processes 10x apart give an interval beyond what a float holds


def _check(a: Sequence[float], b: Sequence[float], confidence: float, least_effect: float) -> None:
    for name, values in (("A", a), ("B", b)):
        if len(values) < 2:
            raise ValueError(
                f"a verdict needs at least {FEWEST} process means of {name}, got {len(values)}: run more repeats; "
                f"{ENOUGH} are better"
            )
        if not all(0 < value < math.inf for value in values):
            raise ValueError(f"process means of {name} must be positive and finite seconds, got {list(values)}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    if not 0 <= least_effect < 1:
        raise ValueError(f"least_effect must be at least 0 and below 1, got {least_effect}")


def interleave(num_configs: int, repeats: int) -> list[tuple[int, int]]:
    """Order of (configuration, repeat): A B, then B A, then A B, ... so that a steady drift affects all equally.

    The drift cancels exactly if `repeats` is even; with an odd number, the drift of one repeat remains.
    """
    forward = range(num_configs)
    return [
        (config, repeat)
        for repeat in range(repeats)
        for config in (forward if repeat % 2 == 0 else reversed(forward))
    ]  # fmt: skip


def process_means(records: Iterable[RunRecord], phase: Phase = Phase.STEP) -> list[float]:
    """Mean time in seconds of `phase` in each record that ended well and has that phase."""
    measurements = (record.measurement(phase) for record in records if record.status is Status.OK)
    return [measurement.mean_s for measurement in measurements if measurement is not None]
