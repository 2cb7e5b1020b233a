"""Statistics of a few repeated times: the interval of a mean, serial correlation, outliers."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

FEWEST = 3
"""Fewest values for an interval of their mean: the one difference between two values says little
about the scatter.
"""
UPPER = (1 + 0.95) / 2
"""Quantile at which a 95 % interval ends."""
ROUNDING = 1e-12
"""Difference of two times, or of their logarithms, that rounding may explain."""
MIN_CORRELATED = 10
"""Fewest values whose correlation is known well enough."""


def summary(times_s: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation (None for a single time), minimum and maximum of these
    times, in seconds.
    """
    stdev_s = statistics.stdev(times_s) if len(times_s) > 1 else None
    mean_s, median_s = statistics.fmean(times_s), statistics.median(times_s)
    return {
        "mean_s": mean_s,
        "median_s": median_s,
        "stdev_s": stdev_s,
        "min_s": min(times_s),
        "max_s": max(times_s),
    }


def summaries(times_s: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | None]]:
    """The summary of each of these that has times, by name, as all answers in JSON have it."""
    return {name: summary(times) for name, times in times_s.items() if times}


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean (Student's t), in the unit of `values`; None for fewer than FEWEST
    values and for equal ones, which show no scatter.

    Valid for independent values: means of fresh processes, not the steps of one process, which
    resemble each other.
    """
    error = standard_error(values)
    if error is None:
        return None
    from scipy.special import stdtrit  # slow to import, and few commands need it

    mean = statistics.fmean(values)
    half_width = float(stdtrit(len(values) - 1, UPPER)) * error
    return mean - half_width, mean + half_width


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None where they do not show it: for fewer
    than FEWEST of them, and for values that are equal but for rounding.
    """
    if len(values) < FEWEST:
        return None
    least, most = min(values), max(values)
    if math.isclose(least, most, rel_tol=ROUNDING, abs_tol=ROUNDING):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def quotient_stdev(quotient: float, *cvs: float | None) -> float | None:
    """Standard deviation of a quotient of independent values, each with this coefficient of
    variation, to first order.

    None if one of these is unknown.
    """
    known = [cv for cv in cvs if cv is not None]
    return quotient * math.hypot(*known) if len(known) == len(cvs) else None


def lag1_autocorrelation(values: Sequence[float]) -> float | None:
    """Correlation of each value with the next, in [-1, 1]; None for fewer than 3 values or when all
    are equal.

    The usual estimator (Box and Jenkins): one mean, one variance; its expectation without any
    correlation is -1/n.
    """
    if len(values) < 3 or min(values) == max(values):
        return None
    mean = statistics.fmean(values)
    deviations = [value - mean for value in values]
    lagged = math.fsum(a * b for a, b in itertools.pairwise(deviations))
    return lagged / math.fsum(d * d for d in deviations)


def steady_interval(values: Sequence[float]) -> float | None:
    """Half the 95 % interval of the mean, relative to it, of values of which each may resemble the
    last.

    With lag-1 autocorrelation r > 0, n values are worth n (1 - r) / (1 + r) independent ones. None
    for fewer than 10 values, from which r is not known.
    """
    if len(values) < MIN_CORRELATED:
        return None
    from scipy.special import stdtrit  # slow to import, and few commands need it

    r = max(lag1_autocorrelation(values) or 0.0, 0.0)
    worth = max(len(values) * (1 - r) / (1 + r), 2.0)
    error = statistics.stdev(values) / math.sqrt(worth)
    return float(stdtrit(worth - 1, UPPER)) * error / statistics.fmean(values)


def slope(values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope per position and its standard error, of at least 3 values."""
    line = statistics.linear_regression(range(len(values)), values)
    squares = math.fsum(
        (value - line.intercept - line.slope * i) ** 2 for i, value in enumerate(values)
    )
    # sum of squared deviations of 0, 1, ..., n - 1
    spread = len(values) * (len(values) ** 2 - 1) / 12
    return line.slope, math.sqrt(squares / (len(values) - 2) / spread)


def outliers(values: Sequence[float], alpha: float) -> list[int]:
    """Positions of outliers among normal values, in order, by the generalized extreme studentized
    deviate test.

    Of samples without outliers, about a share `alpha` has one, from about 10 values on (Rosner
    1983). Fewer than half of the values can be outliers; fewer than 3 values have none. The time
    grows as that of sorting: the farthest value is the least or the greatest that is left, and the
    sums of the others follow by a subtraction, exact in integers.
    """
    scaled = _integers(values)
    rising = sorted(range(len(values)), key=scaled.__getitem__)
    # equal values keep their order
    falling = sorted(range(len(values)), key=scaled.__getitem__, reverse=True)
    total, squares = sum(scaled), sum(value * value for value in scaled)
    removed, deviations = list[int](), list[float]()
    num_low = 0
    while len(removed) < (len(values) - 1) // 2:
        n, num_high = len(values) - len(removed), len(removed) - num_low
        least, greatest = rising[num_low], falling[num_high]
        if scaled[least] == scaled[greatest]:
            break
        is_low = 2 * total > n * (scaled[least] + scaled[greatest])
        farthest = least if is_low else greatest
        num_low += is_low
        value = scaled[farthest]
        # that of the values is this divided by n * n * (n - 1)
        variance = (n * squares - total * total) * n
        deviations.append(math.sqrt((n * value - total) ** 2 * (n - 1) / variance))
        removed.append(farthest)
        total -= value
        squares -= value * value
    return sorted(removed[: _num_far(deviations, len(values), alpha)])


def _num_far(deviations: Sequence[float], num_values: int, alpha: float) -> int:
    """How many of the values removed first are outliers: all up to the last whose deviation, in
    standard deviations of the values left with it, is over its bound (Rosner 1983).
    """
    if not deviations:
        return 0
    import numpy as np
    from scipy.special import stdtrit  # slow to import, and two values need none

    left = num_values - np.arange(len(deviations))
    t = stdtrit(left - 2, 1 - alpha / (2 * left))
    is_far = np.array(deviations) > (left - 1) * t / np.sqrt(left * (left - 2 + t * t))
    return int(np.flatnonzero(is_far)[-1]) + 1 if is_far.any() else 0


def _integers(values: Sequence[float]) -> list[int]:
    """The values in the largest unit of which each of them is a whole number; a float is a
    fraction of a power of 2.
    """
    ratios = [value.as_integer_ratio() for value in values]
    unit = max((denominator for _, denominator in ratios), default=1)
    return [numerator * (unit // denominator) for numerator, denominator in ratios]
