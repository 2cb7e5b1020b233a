"""Which steps of a watched loop are slow, and what was seen in them.

A quiet step costs two calls and a comparison.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter_ns
from typing import NamedTuple

import torch

from ..analysis.loop_causes import MIN_SHARE, explained
from ..analysis.warnings import MIN_OUTLIER
from ..config import Phase
from ..loop_record import Cause, Pause, SlowStep
from ..text import shortened
from .marks import WatchedStep
from .observer import Observer
from .pauses import Pauses, Seen

BEYOND = 6
"""Standard deviations, by the median distance from the median, beyond which a step is slow: by
chance in 1 of 1e9 normal times.
"""
NORMAL_MAD = 1.4826
"""Standard deviations of normal values in one median distance."""
FEWEST = 10
"""Fewest steps with a spread."""
LONG = 1.5
"""Times the usual interval from which the allocator and the clock are looked at."""
RHYTHM = 32
"""Every so many steps the allocator's counters are read in any case, so that a reading at a long
step shows what happened lately.
"""
COUNTERS_EVERY_S = 10.0
"""Time between two readings of the GPU's counters of throttled time, which take a millisecond."""
COUNTERS_AT_LONG_S = 1.0
"""The same where a step was long."""
LEAST_USUAL_S = 1.0
"""Least time over which it is known how long the clock is usually lowered."""
MORE_TOKENS = 1.1
"""Times the usual tokens from which a slow step has more of them."""
MOST_KEPT = 10_000
"""Most steps whose pauses are kept: the last ones."""
LONGEST_REASON = 120
"""Longest reason of a compilation, in characters."""
SIZES = re.compile(r"size mismatch at index (\d+)\. expected (\d+), actual (\d+)")
"""How torch.compile says that a tensor has another shape than the one it compiled for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at a moment of the program's clock, all in seconds."""

    moment_s: float
    lowered_s: Mapping[str, float]
    """For how long each reason has lowered the clock since the driver was loaded."""


class Throttling:
    """Compares readings of the counters; `read` makes one, which takes a millisecond or two."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read
        self._first: Reading | None = None
        self._last: Reading | None = None

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the last reading; None before the first."""
        return None if self._last is None else now_s - self._last.moment_s

    def look(self, now_s: float) -> dict[str, float]:
        """Read the counters; return by reason for how many seconds more than usual it lowered the
        clock since the last reading. Empty where it is not known what is usual.

        What is usual is the share of the time from the first reading to the last one: a GPU under
        full load may be at its power limit all the time.
        """
        reading = Reading(now_s, self._read())
        first, last = self._first, self._last
        self._first, self._last = first or reading, reading
        if first is None or last is None:
            return {}
        usual_s = last.moment_s - first.moment_s
        if usual_s < LEAST_USUAL_S:
            return {}
        more_s = {}
        for reason in reading.lowered_s.keys() & last.lowered_s.keys() & first.lowered_s.keys():
            share = (last.lowered_s[reason] - first.lowered_s[reason]) / usual_s
            lowered_s = reading.lowered_s[reason] - last.lowered_s[reason]
            more_s[reason] = lowered_s - share * (now_s - last.moment_s)
        return more_s


class SlowSteps(Observer):
    """Keeps what was seen in each interval: from the end of a step to that of the next.

    `throttled_s` reads for how long each reason has lowered the GPU's clock since the driver was
    loaded; None without a GPU.
    """

    def __init__(
        self, pauses: Pauses, throttled_s: Callable[[], Mapping[str, float]] | None
    ) -> None:
        self._pauses = pauses
        self._throttling = None if throttled_s is None else Throttling(throttled_s)
        self._kept: dict[int, dict[Cause, Seen]] = {}
        """By the number of the step that ended the interval."""
        self._host, self._device = Usually(), Usually()
        self._ended_ns = 0
        """When the last step ended on the host."""
        self.num_read = 0
        """Measured steps that were read."""
        self._allocated = (0, 0)
        self._allocated_at = 0

    def step_ended(self, number: int) -> None:
        """Keep what was seen in this interval."""
        if self._pauses.seen:
            seen = self._pauses.take()
            if number >= 0:
                self._kept[number] = seen
            if len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        if self._throttling is not None:
            # the allocator works on the host, so that the host's time tells
            ended_ns, self._ended_ns = self._ended_ns, perf_counter_ns()
            is_long = self._host.is_long((self._ended_ns - ended_ns) / 1e9)
            if is_long or number % RHYTHM == 0:
                self._look_at_allocator(number, is_long=is_long and number >= 0)

    def steps_read(self, first: int, steps: Sequence[WatchedStep]) -> None:
        """Look at what counters of the GPU tell if a step was long."""
        self.num_read = max(0, first + len(steps))
        if self._throttling is None:
            return
        for number, step in enumerate(steps, first):
            interval_s = step.interval_s
            usual_s = self._device.usual_s
            is_long = self._device.is_long(interval_s)
            if number >= 0:
                excess_s = interval_s - usual_s
                self._look_at_throttling(self._throttling, number, excess_s, is_long=is_long)

    def slow_steps(
        self, warmup: Sequence[WatchedStep], steps: Sequence[WatchedStep]
    ) -> tuple[SlowStep, ...]:
        """The slow ones of `steps`, the last measured steps that were read."""
        first = self.num_read - len(steps)
        numbers = range(first, self.num_read)
        usual_ns = {cause: self._usual_ns(cause, numbers) for cause in Cause}
        shapes = {shape for step in warmup for shape in step.tokens.shapes}
        slow_ones = slow_positions(steps)
        slow = []
        for position, step in enumerate(steps):
            if position in slow_ones:
                seen = self._kept.get(first + position, {})
                new = set(step.tokens.shapes) - shapes
                pauses = [_pause(cause, seen[cause], usual_ns[cause], new) for cause in seen]
                slow.append(_slow_step(position, step, slow_ones[position], pauses))
            shapes.update(step.tokens.shapes)
        return tuple(slow)

    def _usual_ns(self, cause: Cause, numbers: range) -> int:
        """The median time of this cause in an interval, 0 if most intervals have none."""
        times_ns = [
            seen[cause].ns or 0
            for number, seen in self._kept.items()
            if cause in seen and number in numbers
        ]
        return statistics.median_low([0] * (len(numbers) - len(times_ns)) + times_ns)

    def _look_at_allocator(self, number: int, *, is_long: bool = False) -> None:
        """Read the counters of PyTorch's allocator, of which a long step shows the difference."""
        counters = torch.cuda.memory_stats_as_nested_dict()
        if not counters:
            return
        now = counters["segment"]["all"]["allocated"], counters["num_alloc_retries"]
        segments, retries = now[0] - self._allocated[0], now[1] - self._allocated[1]
        steps = number - self._allocated_at
        self._allocated, self._allocated_at = now, number
        if is_long and (segments or retries):
            details = [f"{segments} cudaMalloc and {retries} retries in the last {steps} steps"]
            kept = self._kept.setdefault(number, {})
            kept[Cause.ALLOCATOR] = Seen(None, segments + retries, details)

    def _look_at_throttling(
        self, throttling: Throttling, number: int, excess_s: float, *, is_long: bool
    ) -> None:
        """Read the counters of throttled time seldom, and at a long step sooner: this tells for how
        long at most the clock was lower in it.
        """
        now_s = monotonic()
        age_s = throttling.age_s(now_s)
        if age_s is not None and age_s < (COUNTERS_AT_LONG_S if is_long else COUNTERS_EVERY_S):
            return
        more_s = throttling.look(now_s)
        if not is_long or age_s is None:
            return
        for reason, seconds in sorted(more_s.items()):
            if seconds >= MIN_SHARE * excess_s:
                seen = self._kept.setdefault(number, {}).setdefault(Cause.CLOCK, Seen(None, 1))
                lowered = f"{reason} for up to {seconds:.3g} s of the last {age_s:.3g} s"
                seen.details.append(lowered)


class Usually:
    """Tells long intervals, at which counters are looked at, from usual ones."""

    def __init__(self) -> None:
        self.usual_s = 0.0
        """Follows the median slowly."""

    def is_long(self, interval_s: float) -> bool:
        """Whether this interval is long; it counts for the later ones."""
        is_long = interval_s > LONG * self.usual_s
        # follows the median slowly, whatever single steps take
        self.usual_s *= 1.02 if interval_s > self.usual_s else 0.98
        self.usual_s = self.usual_s or interval_s
        return is_long


class Usual(NamedTuple):
    """What is usual of the intervals of steps that are alike, in seconds."""

    median_s: float
    limit_s: float
    """Beyond it, a step is slow."""
    positions: Sequence[int]


def usual_of(steps: Sequence[WatchedStep]) -> dict[bool, Usual]:
    """What is usual of the steps with the optimizer (True) and of those without it; a kind of which
    there are fewer than FEWEST is left out.
    """
    alike = defaultdict[bool, list[int]](list)
    intervals_s = []
    for position, step in enumerate(steps):
        alike[step.has_update].append(position)
        intervals_s.append(step.interval_s)
    usual = {}
    for kind, positions in alike.items():
        if len(positions) >= FEWEST:
            times_s = [intervals_s[position] for position in positions]
            median_s = statistics.median(times_s)
            spread_s = statistics.median([abs(time_s - median_s) for time_s in times_s])
            beyond_s = max(BEYOND * NORMAL_MAD * spread_s, MIN_OUTLIER * median_s)
            usual[kind] = Usual(median_s, median_s + beyond_s, positions)
    return usual


def is_slow(step: WatchedStep, usual: Mapping[bool, Usual]) -> bool:
    """Whether a step with the time before it takes longer than is usual of its kind."""
    kind = usual.get(step.has_update)
    return kind is not None and step.interval_s > kind.limit_s


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians of steps that are alike."""

    interval_s: float
    parts_s: Mapping[str, float]
    tokens: float


def slow_positions(steps: Sequence[WatchedStep]) -> dict[int, Medians]:
    """The positions of the slow steps, in order, with the medians of the steps that are alike."""
    usual = usual_of(steps)
    medians: dict[bool, Medians] = {}
    slow = {}
    for position, step in enumerate(steps):
        if is_slow(step, usual):
            kind = step.has_update
            if kind not in medians:
                alike = [steps[index] for index in usual[kind].positions]
                medians[kind] = _medians(alike, usual[kind].median_s)
            slow[position] = medians[kind]
    return slow


def _pause(
    cause: Cause, seen: Seen, usual_ns: int, new_shapes: Iterable[tuple[int, ...] | None]
) -> Pause:
    """What was seen of a cause beyond what is usual of it."""
    details = seen.details
    if cause is Cause.COMPILATION:
        details = _compiled_for(new_shapes, details)
    seconds = None if seen.ns is None else max(0, seen.ns - usual_ns) / 1e9
    return Pause(
        cause=cause, seconds=seconds, count=seen.count, details=tuple(dict.fromkeys(details))
    )


def _slow_step(
    position: int, step: WatchedStep, usual: Medians, pauses: Sequence[Pause]
) -> SlowStep:
    """A slow step with the pauses that explain it; data and tokens are known from its times."""
    excess_s = step.interval_s - usual.interval_s
    more_s = step.parts_s()
    for part in more_s:
        more_s[part] -= usual.parts_s.get(part, 0.0)
    waited = Pause(cause=Cause.DATA, seconds=max(0.0, more_s[Phase.DATA]))
    pauses = [*pauses, waited]
    if usual.tokens and (step.tokens.count or 0) > MORE_TOKENS * usual.tokens:
        pauses.append(Pause(cause=Cause.TOKENS))
    return SlowStep(
        number=position,
        excess_s=round(excess_s, 9),
        where=max(more_s, key=more_s.__getitem__),
        backward_s=round(max(0.0, more_s.get(Phase.BACKWARD, 0.0)), 9),
        pauses=explained(pauses, excess_s),
    )


def _medians(steps: Sequence[WatchedStep], interval_s: float) -> Medians:
    parts_s = defaultdict[str, list[float]](list)
    for step in steps:
        for part, seconds in step.parts_s().items():
            parts_s[part].append(seconds)
    medians_s = {}
    for part, times_s in parts_s.items():
        missing = [0.0] * (len(steps) - len(times_s))
        medians_s[part] = statistics.median(missing + times_s)
    return Medians(
        interval_s, medians_s, statistics.median([step.tokens.count or 0 for step in steps])
    )


def _compiled_for(shapes: Iterable[tuple[int, ...] | None], reasons: Iterable[str]) -> list[str]:
    """What changed before a compilation: the new shapes of tokens, else the sizes that
    torch.compile says, else its reason.
    """
    told = [f"tokens of {' x '.join(map(str, shape))}" for shape in shapes if shape is not None]
    if told:
        return sorted(told)
    for reason in reasons:
        sizes = SIZES.search(reason)
        if sizes is None:
            told.append(shortened(reason, LONGEST_REASON))
        else:
            told.append(f"size {sizes[3]} of dimension {sizes[1]}")
    return told
