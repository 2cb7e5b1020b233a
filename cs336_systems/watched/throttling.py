"""How long the driver lowered the GPU's clock between two moments, by its own counters, so that a
slow step tells what happened since the last reading.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

LEAST_USUAL_S = 1.0
"""Least time over which it is known how long the clock is usually lowered."""


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
