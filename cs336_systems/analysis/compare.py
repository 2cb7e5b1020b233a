"""Whether B is faster than A: a verdict from fresh processes of each side, and which configurations
belong together.

The effect is relative, and swapping A and B inverts it: all that follows is of the logarithms of
the processes' means. Sides that were measured in turn are compared block by block: Student's t of
the blocks' differences, in which a drift between blocks cancels. Sides that were measured each at a
time of its own are compared by their means, by Welch, with SESSION_DEVIATION in addition, which
more processes do not reduce.

Where processes do not show how much they scatter, as there are fewer than FEWEST or all are equal,
the scatter is assumed: PROCESS_DEVIATION, and besides STEP_FACTOR times the standard deviation of a
process's steps, and what they do show, or those of the other side.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ..config import Mode, Phase, Profiler
from ..record import Environment, Measurement, RunRecord, Status
from ..subject import Subject
from ..text import LONGEST_PART, shortened
from .statistics import standard_error

if TYPE_CHECKING:
    from .kernels.step_profile import KernelTimes

CONFIDENCE = 0.95
"""Confidence of the interval of a ratio."""
LEAST_EFFECT = 0.005
"""Smallest relative difference that matters."""
SESSION_DEVIATION = 0.02
"""Relative standard deviation of the difference between two times at which equal sides are
measured: the card, its clocks, its temperature. In data/published the largest between two sweeps of
one card and one version is 1.6 %.
"""
PROCESS_DEVIATION = 0.05
"""Relative standard deviation between processes of one configuration, assumed where too few
processes show it.

It is about the largest in data/published: 5.2 % between two processes of one configuration on an
H200. Over all that were repeated, it is 1.5 % on H200s and 0.2 % on H100s.
"""
STEP_FACTOR = 2.0
"""Standard deviation between processes over that of the steps within one, where the steps
scatter more.
"""
ONE_PROCESS_TELLS = math.exp(
    statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(2) * PROCESS_DEVIATION
)
"""Ratio below which the times of one process each may differ by chance."""
MAX_FREEDOM = 1e6
"""Degrees of freedom from which on Student's t is the normal distribution."""


StepBlocks: TypeAlias = Mapping[int, Measurement]
"""Step times of a side's processes, by the number of the block of runs, one after the other,
that each belongs to.
"""


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
    is_in_turn: bool = False
    """Whether the interval is of differences between neighbours."""
    is_assumed: bool = False
    """Whether it is of an assumed scatter between processes."""

    @property
    def verdict(self) -> Verdict:
        """CANNOT_TELL without an interval, when it includes 1, or when all of it is within
        LEAST_EFFECT of 1.
        """
        if (
            self.low is None
            or self.high is None
            or self.low <= 1 <= self.high
            or self.is_within_least_effect
        ):
            return Verdict.CANNOT_TELL
        return Verdict.FASTER if self.ratio < 1 else Verdict.SLOWER

    @property
    def is_within_least_effect(self) -> bool:
        """Whether the difference is surely too small to matter."""
        if self.low is None or self.high is None:
            return False
        return abs(self.low - 1) <= LEAST_EFFECT and abs(self.high - 1) <= LEAST_EFFECT

    @property
    def least_shown(self) -> float | None:
        """The smallest relative difference of step times that these processes could show; None
        without an interval.
        """
        if self.low is None or self.high is None:
            return None
        return math.sqrt(self.high / self.low) - 1


def compare_in_turn(a: StepBlocks, b: StepBlocks) -> Comparison:
    """Compare B with A by the blocks, given by number, in which both were measured one after the
    other.

    Where the blocks that both have show no scatter, the sides are compared as if measured each at
    a time of its own.
    """
    blocks = a.keys() & b.keys()
    of_a = _logarithms(a[block] for block in blocks)
    of_b = _logarithms(b[block] for block in blocks)
    differences = [log_b - log_a for log_a, log_b in zip(of_a, of_b, strict=True)]
    error = standard_error(differences)
    if error is None:
        return compare_apart(a, b)
    compared = _comparison(of_a, of_b, [(error**2, len(blocks) - 1)])
    return replace(compared, is_in_turn=True)


def compare_apart(a: StepBlocks, b: StepBlocks) -> Comparison:
    """Compare B with A, each at least one process, measured each at a time of its own."""
    of_a, of_b = _logarithms(a.values()), _logarithms(b.values())
    is_assumed = False
    variances: Variances = [(SESSION_DEVIATION**2, math.inf)]
    for side, other, logarithms in ((a, b, of_a), (b, a, of_b)):
        error = standard_error(logarithms)
        if error is None:
            is_assumed = True
            variances += _assumed([*side.values()], [*other.values()])
        else:
            variances.append((error**2, len(side) - 1))
    compared = _comparison(of_a, of_b, variances)
    return replace(compared, is_assumed=is_assumed)


def are_apart(processes: Sequence[Measurement]) -> bool:
    """Whether the times of processes of one configuration differ by more than chance explains."""
    means_s = [measured.mean_s for measured in processes]
    return bool(means_s) and max(means_s) > ONE_PROCESS_TELLS * min(means_s)


def compare_launches(a: "KernelTimes", b: "KernelTimes", among: int) -> Comparison:
    """Compare the mean durations of one kernel, of `among` that are compared, in one process of
    each side.

    The interval is so wide that of all of them together one is told apart by chance as seldom as
    one alone with CONFIDENCE. As launches of one process resemble each other, their mean scatters
    STEP_FACTOR times as much as that of independent ones.
    """
    variances: Variances = [(SESSION_DEVIATION**2, math.inf)]
    for side in (a, b):
        variances.append((PROCESS_DEVIATION**2, math.inf))
        stdev_s = side.stdev_s
        of_mean = None
        if stdev_s is not None:
            of_mean = (STEP_FACTOR * stdev_s / side.mean_s) ** 2 / side.count
        variances.append((of_mean, side.count - 1))
    confidence = 1 - (1 - CONFIDENCE) / among
    return _comparison([math.log(a.mean_s)], [math.log(b.mean_s)], variances, confidence)


def _logarithms(processes: Iterable[Measurement]) -> list[float]:
    """The logarithm of the mean of each process."""
    return [math.log(measured.mean_s) for measured in processes]


Variances: TypeAlias = list[tuple[float | None, float]]
"""Parts of a variance with their degrees of freedom: infinitely many if it is assumed. None is
not known.
"""


def _assumed(side: Sequence[Measurement], other: Sequence[Measurement]) -> Variances:
    """The variance of the mean of processes that do not show their scatter, in parts: an assumed
    one between processes, what two of them show all the same (of a single one, those of the other
    side), and that of each process's steps, which is None for a single step.
    """
    variances: Variances = [(PROCESS_DEVIATION**2 / len(side), math.inf)]
    # without it two processes of which one took twice as long would have an interval of 5 %
    shown = side if len(side) > 1 else other
    if len(shown) > 1:
        seen = statistics.variance(_logarithms(shown))
        variances.append((seen / len(side), len(shown) - 1))
    for measured in side:
        of_steps = None if measured.cv is None else (STEP_FACTOR * measured.cv / len(side)) ** 2
        variances.append((of_steps, len(measured.times_s) - 1))
    return variances


def _comparison(
    a: Sequence[float], b: Sequence[float], variances: Variances, confidence: float = CONFIDENCE
) -> Comparison:
    """Compare the logarithms of means, whose difference has these variances; None among them
    gives no interval.
    """
    difference = statistics.fmean(b) - statistics.fmean(a)
    low = high = None
    known = [(variance, freedom) for variance, freedom in variances if variance is not None]
    if len(known) == len(variances):
        half_width = _half_width(known, confidence)
        low, high = _exp(difference - half_width), _exp(difference + half_width)
    return Comparison(ratio=_exp(difference), low=low, high=high, num_a=len(a), num_b=len(b))


def _half_width(variances: Sequence[tuple[float, float]], confidence: float) -> float:
    """Half the width of the confidence interval of a difference of two means with these variances,
    by Welch and Satterthwaite.
    """
    from scipy.special import stdtrit  # slow to import, and few commands need it

    total = sum(variance for variance, _ in variances)
    if not total:
        return 0.0
    share = sum((variance / total) ** 2 / freedom for variance, freedom in variances)
    freedom = min(1 / share, MAX_FREEDOM) if share else MAX_FREEDOM
    return float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(total)


def _exp(logarithm: float) -> float:
    """e to this power; powers above 700 count as 700, so that a float holds the result."""
    # two processes 10x apart give an interval beyond what a float holds
    return math.exp(min(logarithm, 700))


def interleave(num_configs: int, repeats: int) -> list[tuple[int, int]]:
    """The order A B B A A B ... as pairs of configuration and repeat, in which a steady drift does
    not favour a side.

    The drift cancels exactly if `repeats` is even; with an odd number, the drift of one repeat
    remains.
    """
    order = []
    for repeat in range(repeats):
        once = [(config, repeat) for config in range(num_configs)]
        order += once[::-1] if repeat % 2 else once
    return order


def measured_steps(records: Iterable[RunRecord], sides: int = 1) -> StepBlocks:
    """Step times, divided by the tokens of a step, of those runs of one configuration that ended
    well; by block of runs.

    A block consists of `sides` consecutive repeats: 2 if the sides of a comparison were measured
    alternately, else 1.
    """
    blocks = {}
    for record in records:
        subject, measured = record.subject, record.measurement(Phase.STEP)
        tokens = subject.tokens_per_step or 1  # a step's time where no tokens were seen
        if record.status is Status.OK and measured is not None and measured.mean_s:
            times_s = tuple(time_s / tokens for time_s in measured.times_s)
            blocks[subject.repeat // sides] = replace(measured, times_s=times_s)
    return blocks


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
    """Match the rows of two sweeps by all settings except those in which the sweeps differ as
    wholes.

    All configurations of a sweep are different. The sweeps differ as wholes in a setting if they
    share no value of it, so that one configuration matches any other. If a side would have a
    configuration twice without these settings, only those with a single value on each side are left
    out.
    """
    names = list(a[0] if a else ())
    apart, single = [], []
    for name in names:
        of_a = {row[name] for row in a}
        of_b = {row[name] for row in b}
        if of_a.isdisjoint(of_b):
            apart.append(name)
            if len(of_a) == len(of_b) == 1:
                single.append(name)
    for differing in (apart, single):
        shared = [name for name in names if name not in differing]
        places_a = _places(a, shared)
        places_b = _places(b, shared)
        if len(places_a) == len(a) and len(places_b) == len(b):
            break
    pairs, only_a = [], []
    for key, index in places_a.items():
        if key in places_b:
            pairs.append((index, places_b[key]))
        else:
            only_a.append(index)
    only_b = tuple(index for key, index in places_b.items() if key not in places_a)
    return Matching(
        pairs=tuple(pairs), only_a=tuple(only_a), only_b=only_b, differing=tuple(differing)
    )


def _places(side: Sequence[Settings], names: Sequence[str]) -> dict[Hashable, int]:
    """The index of each row of a side by the values of the settings `names`."""
    place_of: dict[Hashable, int] = {}
    for index, row in enumerate(side):
        values = tuple(row[name] for name in names)
        place_of[values] = index
    return place_of


def without_profiled(side: Sequence[RunRecord]) -> Sequence[RunRecord]:
    """The runs without a profiler, whose times count; all of them where there are no others."""
    return [record for record in side if record.subject.profiler is Profiler.NONE] or side


def refuse_other_work(a: Subject, b: Subject) -> None:
    """Raise ValueError, in one line, if the modes of A and B compute other phases (those of
    inference are forward's), or if the tokens of a step were seen of only one of them.
    """

    def passes(mode: Mode | None) -> Mode | None:
        return Mode.FORWARD if mode is Mode.INFERENCE else mode

    if passes(a.mode) is not passes(b.mode):
        raise ValueError(
            f"A is of mode {a.mode} and B of mode {b.mode}, which is other work: compare runs of "
            "one mode"
        )
    if (a.tokens_per_step is None) is not (b.tokens_per_step is None):
        unseen = "A" if a.tokens_per_step is None else "B"
        raise ValueError(
            f"no tokens were seen in the steps of {unseen}, so whether they are the other's work "
            "is not known"
        )


def refuse_unlike(sides: Sequence[Sequence[RunRecord]], allow_mixed: bool) -> None:
    """Raise ValueError, in one line, for times under a profiler and, unless allowed, for unlike
    conditions.
    """
    for name, side in zip("AB", sides, strict=True):
        if any(record.subject.profiler is not Profiler.NONE for record in side):
            raise ValueError(
                f"{name} has times under a profiler, which makes a run slower; compare runs "
                "without one"
            )
    if allow_mixed:
        return
    if apart := conditions_apart(record.environment for record in chain.from_iterable(sides)):
        raise ValueError(
            f"the records come from different hardware or software ({apart}); compare them with "
            "--allow-mixed"
        )
    if any(map(_has_changed_inputs, sides)):
        raise ValueError(
            "the records of one side come from different versions of a model's source or of a "
            "token file; compare them with --allow-mixed"
        )


def conditions_apart(environments: Iterable[Environment | None]) -> str:
    """In what the known conditions differ: `driver 580 and 590`; empty where they do not."""
    texts: dict[str, set[str]] = {}
    for known in filter(None, environments):
        conditions = msgspec.to_builtins(known.identity)
        if known.identity.driver is None:  # a step on the CPU
            conditions["processors"] = known.cpu_count
        for name, value in conditions.items():
            texts.setdefault(name, set()).add(shortened(str(value), LONGEST_PART))
    apart = []
    for name, values in texts.items():
        if len(values) > 1:
            apart.append(f"{name.replace('_', ' ')} {' and '.join(sorted(values))}")
    return ", ".join(apart)


def _has_changed_inputs(side: Sequence[RunRecord]) -> bool:
    """Whether records of one side come from different versions of a model's source or of a token
    file.
    """
    states: dict[object, set[object]] = {}
    for record in side:
        states.setdefault(record.subject.configuration, set()).add(record.inputs)
        for source in record.inputs:
            states.setdefault(source.name, set()).add(source.state)
    return any(len(versions) > 1 for versions in states.values())
