"""The times at which at least one of many intervals is open, and those at which none is."""

from dataclasses import dataclass

import numpy as np

from cs336_systems.analysis.columns import Columns, Ints
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Holes(Columns):
    """The times within windows at which no interval is open."""

    window: Ints
    """Index of the window."""
    start: Ints
    end: Ints
    before: Ints
    """Index of an interval that ended at the start; -1 where the window begins there or later."""
    after: Ints
    """Index of an interval that starts at the end; -1 where the window ends there or earlier."""


class Union:
    """The union of many intervals, which may overlap, as disjoint stretches in order."""

    __slots__ = ("_before", "_first", "_last", "end", "start")

    def __init__(self, start: Ints, end: Ints) -> None:
        order = np.argsort(start, kind="stable")
        starts, ends = start[order], end[order]
        reached = np.maximum.accumulate(ends)
        opens = np.ones(len(order), dtype=np.bool_)
        opens[1:] = starts[1:] > reached[:-1]
        first = np.flatnonzero(opens)
        last = np.append(first[1:], len(order))[: len(first)] - 1
        self.start: Ints = starts[first]
        self.end: Ints = reached[last]
        length = self.end - self.start
        self._before: Ints = np.append(0, np.cumsum(length) - length)  # before no stretch, before each
        self._first: Ints = order[first]
        # the interval that ended last in each stretch is the last one that raised the running maximum
        raised = np.append(True, reached[1:] > reached[:-1])[: len(order)]
        at = np.maximum.accumulate(np.where(raised, np.arange(len(order)), 0))
        self._last: Ints = order[at[last]]

    def until(self, time: Ints) -> Ints:
        """For each time, how long at least one interval was open before it."""
        at = np.searchsorted(self.start, time, side="right")
        inside = np.minimum(time, np.append(-MAX_TIME_NS, self.end)[at]) - np.append(-MAX_TIME_NS, self.start)[at]
        covered: Ints = self._before[at] + np.where(at > 0, inside, 0)
        return covered

    def holes(self, start: Ints, end: Ints) -> Holes:
        """The parts of each window that the union does not cover."""
        hole_start = np.append(-MAX_TIME_NS, self.end)
        hole_end = np.append(self.start, MAX_TIME_NS)
        low = np.searchsorted(hole_end, start, side="right")
        count = np.where(end > start, np.searchsorted(hole_start, end) - low, 0)
        window = np.repeat(np.arange(len(start)), count)
        hole = np.arange(len(window)) - np.repeat(np.cumsum(count) - count, count) + low[window]
        before = np.where(hole_start[hole] > start[window], np.append(-1, self._last)[hole], -1)
        after = np.where(hole_end[hole] < end[window], np.append(self._first, -1)[hole], -1)
        return Holes(
            window=window,
            start=np.maximum(hole_start[hole], start[window]),
            end=np.minimum(hole_end[hole], end[window]),
            before=before,
            after=after,
        )
