"""Whether B is faster than A where a side has one or two processes, too few for an interval over processes.

The steps of one process resemble each other, so an interval over them alone would be far too narrow. Here the mean of a
process is assumed to have three independent deviations: TIME_DEVIATION, which processes of one side share,
PROCESS_DEVIATION, and STEP_FACTOR times the standard deviation of its steps. They are large enough that no two
processes of one configuration in data/published are told apart (docs/METHOD.md).
"""

import math
import statistics
from collections.abc import Sequence

from cs336_systems.analysis.compare import CONFIDENCE, Comparison, compare, comparison_of
from cs336_systems.analysis.statistics import FEWEST
from cs336_systems.record import Measurement

TIME_DEVIATION = 0.005
"""Relative standard deviation between times at which a side is measured: the machine, its clocks, its temperature."""
PROCESS_DEVIATION = 0.02
"""Relative standard deviation between processes that their steps may not show, such as that of where memory lies.

It is assumed where a side has too few processes to show it. Most machines have less, and some virtual ones 2 to 3 %.
"""
STEP_FACTOR = 2.0
"""Standard deviation between processes over that of the steps within one, where the steps scatter more."""
MAX_FREEDOM = 1e6
"""Degrees of freedom from which on Student's t is the normal distribution."""


def compare_processes(a: Sequence[Measurement], b: Sequence[Measurement], *, are_alternate: bool = False) -> Comparison:
    """Compare B with A, each at least one process, by the times of the same phase in each process.

    Uses Welch's interval over the processes if each side has FEWEST or more; otherwise the interval of this module, or
    none if a process measured only one step, because its scatter is then unknown.
    """
    means_a, means_b = ([measured.mean_s for measured in side] for side in (a, b))
    if min(len(a), len(b)) >= FEWEST:
        return compare(means_a, means_b, between=0.0 if are_alternate else TIME_DEVIATION)
    for name, means in (("A", means_a), ("B", means_b)):
        if not means or not all(0 < mean_s < math.inf for mean_s in means):
            raise ValueError(f"{name} needs mean step times that are positive and finite seconds, got {means}")
    difference = statistics.fmean(map(math.log, means_b)) - statistics.fmean(map(math.log, means_a))
    return comparison_of(difference, _half_width(a, b), (len(a), len(b)))


def _half_width(*sides: Sequence[Measurement]) -> float | None:
    """Half the width of the interval of the difference of the mean logarithms, by Welch and Satterthwaite.

    The part of the variance that is estimated from steps has their degrees of freedom; the others are taken as known.
    """
    from scipy.special import stdtrit  # slow to import, and few commands need it

    known, estimated = 0.0, []
    for side in sides:
        known += TIME_DEVIATION**2 + PROCESS_DEVIATION**2 / len(side)
        for measured in side:
            if measured.cv is None:
                return None
            estimated.append(((STEP_FACTOR * measured.cv / len(side)) ** 2, len(measured.times_s) - 1))
    variance = known + sum(own for own, _ in estimated)
    share = sum((own / variance) ** 2 / of_steps for own, of_steps in estimated)
    freedom = min(1 / share, MAX_FREEDOM) if share else MAX_FREEDOM
    quantile = float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
    return quantile * math.sqrt(variance)


def least_difference(processes: int = 1) -> float:
    """Relative difference below which sides of so few processes are not told apart, however little their steps scatter.

    Its interval is that of steps without scatter.
    """
    from scipy.special import ndtri  # slow to import, and few commands need it

    deviation = math.sqrt(2 * (TIME_DEVIATION**2 + PROCESS_DEVIATION**2 / processes))
    return math.expm1(float(ndtri((1 + CONFIDENCE) / 2)) * deviation)
