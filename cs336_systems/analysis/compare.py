"""Whether B is faster than A: a verdict from fresh processes of each side, and which configurations belong together.

The interval is Welch's, on the logarithms of the processes' means, so that the effect is relative and swapping A and B
inverts the ratio. Sides that were not measured alternately share TIME_DEVIATION, which more processes do not reduce.

A side of one or two processes does not show how much processes scatter, and the steps of one process resemble each
other. Then the mean of a process is assumed to have three independent deviations: TIME_DEVIATION, PROCESS_DEVIATION,
and STEP_FACTOR times the standard deviation of its steps. They are large enough that no two processes of one
configuration in data/published are told apart (docs/METHOD.md).
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec

from cs336_systems.analysis.statistics import FEWEST, standard_error
from cs336_systems.config import Phase, Profiler
from cs336_systems.record import Measurement, RunRecord, Status
from cs336_systems.text import LONGEST_PART, shortened

CONFIDENCE = 0.99
"""Confidence of the interval of a ratio."""
LEAST_EFFECT = 0.005
"""Smallest relative difference that matters."""
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
    num_a: int
    num_b: int

    @property
    def verdict(self) -> Verdict:
        """CANNOT_TELL without an interval, when it includes 1, or when all of it is within LEAST_EFFECT of 1."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high or self.is_within_least_effect:
            return Verdict.CANNOT_TELL
        return Verdict.FASTER if self.ratio < 1 else Verdict.SLOWER

    @property
    def is_within_least_effect(self) -> bool:
        """Whether the difference is surely too small to matter."""
        return all(end is not None and abs(end - 1) <= LEAST_EFFECT for end in (self.low, self.high))

    @property
    def least_shown(self) -> float | None:
        """Relative difference of step times below which these processes show none; None without an interval."""
        return None if self.low is None or self.high is None else math.sqrt(self.high / self.low) - 1


def compare_processes(a: Sequence[Measurement], b: Sequence[Measurement], *, are_alternate: bool = False) -> Comparison:
    """Compare B with A, each at least one process, by the times of the same phase in each process.

    There is no interval if a side has fewer than FEWEST processes, and one of them measured only one step.
    """
    means_a, means_b = ([measured.mean_s for measured in side] for side in (a, b))
    if min(len(a), len(b)) >= FEWEST:
        return compare(means_a, means_b, between=0.0 if are_alternate else TIME_DEVIATION)
    known = sum(TIME_DEVIATION**2 + PROCESS_DEVIATION**2 / len(side) for side in (a, b))
    spreads = [(measured.cv, len(side), len(measured.times_s) - 1) for side in (a, b) for measured in side]
    estimated = [((STEP_FACTOR * cv / count) ** 2, freedom) for cv, count, freedom in spreads if cv is not None]
    return _comparison(means_a, means_b, known, estimated if len(estimated) == len(spreads) else None)


def compare(
    a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE, between: float = 0.0
) -> Comparison:
    """Compare B with A by their process means in seconds alone; without an interval for fewer than FEWEST of a side.

    `between` is the relative standard deviation between times of measurement; 0 if A and B were measured alternately.
    """
    estimated = None
    if min(len(a), len(b)) >= FEWEST:
        estimated = [(standard_error([*map(math.log, side)]) ** 2, len(side) - 1) for side in (a, b)]
    return _comparison(a, b, 2 * between**2, estimated, confidence)


def _comparison(
    a: Sequence[float],
    b: Sequence[float],
    known: float,
    estimated: Sequence[tuple[float, int]] | None,
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compare means in seconds, whose mean logarithms have these variances; None gives no interval."""
    for name, means in (("A", a), ("B", b)):
        if not means or not all(0 < mean_s < math.inf for mean_s in means):
            raise ValueError(f"{name} needs mean step times that are positive and finite seconds, got {list(means)}")
    difference = statistics.fmean(map(math.log, b)) - statistics.fmean(map(math.log, a))
    low = high = None
    if estimated is not None:
        half_width = _half_width(known, estimated, confidence)
        low, high = _exp(difference - half_width), _exp(difference + half_width)
    return Comparison(ratio=_exp(difference), low=low, high=high, num_a=len(a), num_b=len(b))


def _half_width(known: float, estimated: Sequence[tuple[float, int]], confidence: float) -> float:
    """Half the width of the interval of a difference, by Welch and Satterthwaite.

    `known` is the variance that is taken as known; `estimated` are variances with their degrees of freedom.
    """
    from scipy.special import stdtrit  # slow to import, and few commands need it

    variance = known + sum(own for own, _ in estimated)
    if not variance:
        return 0.0
    share = sum((own / variance) ** 2 / freedom for own, freedom in estimated)
    freedom = min(1 / share, MAX_FREEDOM) if share else MAX_FREEDOM
    return float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)


def _exp(logarithm: float) -> float:
    """The ratio whose logarithm this is, as far as a float holds it."""
    return math.exp(min(logarithm, 700))  # two processes 10x apart give an interval beyond what a float holds


def interleave(num_configs: int, repeats: int) -> list[tuple[int, int]]:
    """The order A B B A A B ... as pairs of configuration and repeat, in which a steady drift does not favour a side.

    The drift cancels exactly if `repeats` is even; with an odd number, the drift of one repeat remains.
    """
    forward = range(num_configs)
    return [
        (config, repeat)
        for repeat in range(repeats)
        for config in (forward if repeat % 2 == 0 else reversed(forward))
    ]  # fmt: skip


def measured_steps(records: Iterable[RunRecord]) -> list[Measurement]:
    """The step times of each record that ended well."""
    found = (record.measurement(Phase.STEP) for record in records if record.status is Status.OK)
    return [measured for measured in found if measured is not None]


Settings: TypeAlias = Mapping[str, Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Which rows of two sweeps belong together, by their indices."""

    pairs: tuple[tuple[int, int], ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    differing: tuple[str, ...]
    """Settings in which the sweeps differ as wholes; rows are matched by all others."""


def match(a: Sequence[Settings], b: Sequence[Settings]) -> Matching:
    """Match the rows of two sweeps by all settings except those in which the sweeps differ as wholes.

    All configurations of a sweep are different. The sweeps differ as wholes in a setting if they share no value of it,
    so that one configuration matches any other. If a side would have a configuration twice without these settings, only
    those with a single value on each side are left out.
    """
    names = list(a[0] if a else ())
    values = {name: ({row[name] for row in a}, {row[name] for row in b}) for name in names}
    apart = [name for name, (of_a, of_b) in values.items() if of_a.isdisjoint(of_b)]
    single = [name for name in apart if all(len(own) == 1 for own in values[name])]
    for differing in (apart, single):
        by = [name for name in names if name not in differing]
        keys_a, keys_b = ([tuple(row[name] for name in by) for row in side] for side in (a, b))
        if len({*keys_a}) == len(a) and len({*keys_b}) == len(b):
            break
    place = {key: index for index, key in enumerate(keys_b)}
    return Matching(
        pairs=tuple((index, place[key]) for index, key in enumerate(keys_a) if key in place),
        only_a=tuple(index for index, key in enumerate(keys_a) if key not in place),
        only_b=tuple(index for index, key in enumerate(keys_b) if key not in {*keys_a}),
        differing=tuple(differing),
    )


def without_profiled(side: Sequence[RunRecord]) -> Sequence[RunRecord]:
    """The runs without a profiler, whose times count; all of them where there are no others."""
    return [record for record in side if record.config.profiler is Profiler.NONE] or side


def refuse_unlike(sides: Sequence[Sequence[RunRecord]], allow_mixed: bool) -> None:
    """Raise ValueError, in one line, for times under a profiler and, unless allowed, for unlike conditions."""
    for name, side in zip("AB", sides, strict=True):
        if any(record.config.profiler is not Profiler.NONE for record in side):
            raise ValueError(f"{name} has times under a profiler, which makes a run slower; compare runs without one")
    if allow_mixed:
        return
    if apart := _conditions_apart(record for side in sides for record in side):
        raise ValueError(
            f"the records come from different hardware or software ({apart}); compare them with --allow-mixed"
        )
    if any(map(_has_changed_inputs, sides)):
        raise ValueError(
            "the records of one side come from different versions of a model's source or of a token file; "
            "compare them with --allow-mixed"
        )


def _conditions_apart(records: Iterable[RunRecord]) -> str:
    """In what the conditions of the records differ: `driver 580 and 590`; empty where they do not."""
    found: dict[str, set[str]] = {}
    for identity in {record.environment.identity for record in records if record.environment}:
        for name, value in msgspec.to_builtins(identity).items():
            found.setdefault(name, set()).add(shortened(str(value), LONGEST_PART))
    words = (f"{name.replace('_', ' ')} {' and '.join(sorted(own))}" for name, own in found.items() if len(own) > 1)
    return ", ".join(words)


def _has_changed_inputs(side: Sequence[RunRecord]) -> bool:
    """Whether records of one side come from different versions of a model's source or of a token file."""
    states = {(found.name, found.state) for record in side for found in record.inputs}
    of_configurations = {(record.config.configuration, record.inputs) for record in side}
    return any(len(found) > len({name for name, _ in found}) for found in (states, of_configurations))
