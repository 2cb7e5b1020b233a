"""Timed loops of repetitions, and rows of a study whose cells are timed so."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Annotated, Any, Self

import msgspec

from cs336_systems.analysis.warnings import LOOPS, timing_warnings
from cs336_systems.record import MAX_TIME_S, Failure, RunWarning, Status
from cs336_systems.studies.records import Row, RowT

MIN_TIME_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """Raw times of loops of `count` repetitions each. Statistics are derived from them, never stored."""

    count: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times_s or not all(MIN_TIME_S <= time_s <= MAX_TIME_S for time_s in self.times_s):
            raise ValueError(f"loops need at least one time, each from {MIN_TIME_S:g} to {MAX_TIME_S:g} s")

    def __add__(self, others: "Loops") -> "Loops":
        """The loops of both; where their counts differ, as if each loop were one repetition of mean time."""
        if self.count == others.count:
            return replace(self, times_s=(*self.times_s, *others.times_s))
        times_s = (max(MIN_TIME_S, time_s / each.count) for each in (self, others) for time_s in each.times_s)
        return Loops(count=1, times_s=tuple(times_s))

    @property
    def median_s(self) -> float:
        """Time of one repetition in the median loop, in seconds."""
        return median(self.times_s) / self.count

    @property
    def stdev_s(self) -> float | None:
        """Sample standard deviation over the loops of the time of one repetition; None for a single loop."""
        return stdev(self.times_s) / self.count if len(self.times_s) > 1 else None

    @property
    def cv(self) -> float | None:
        """Standard deviation of the loops over their mean; None for a single loop."""
        return stdev(self.times_s) / fmean(self.times_s) if len(self.times_s) > 1 else None

    @property
    def spread(self) -> float:
        """Slowest loop over fastest, minus 1."""
        return max(self.times_s) / min(self.times_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Loops of one cell, or its failure."""

    status: Status
    failure: Failure | None = None
    loops: Loops | None = None

    @property
    def time_s(self) -> float | None:
        """Time of one repetition; None unless status is ok."""
        return None if self.loops is None else self.loops.median_s

    @property
    def cv(self) -> float | None:
        """Relative standard deviation of the time, and so of a rate; None if it is not known."""
        return None if self.loops is None else self.loops.cv

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """Reasons to doubt the time."""
        return () if self.loops is None else timing_warnings(self.loops.times_s, repeated=LOOPS)

    def rate(self, amount: float) -> float | None:
        """`amount` per repetition, as a rate per second; None without a time."""
        return None if self.loops is None else amount / self.loops.median_s


class TimedRow(Row):
    """A row with a field `timing`."""

    __slots__ = ()

    def failed(self, status: Status, failure: Failure) -> Self:
        """The row with the failure in place of a measurement."""
        return replace(self, timing=Timing(status=status, failure=failure))  # type: ignore[type-var]

    def with_loops(self, loops: Loops) -> Self:
        """The row with the times of these loops."""
        return replace(self, timing=Timing(status=Status.OK, loops=loops))  # type: ignore[type-var]

    def joined(self, other: Self) -> Self:
        """The row with the loops of both rows; if one of them failed, the row with its failure."""
        mine, theirs = self.timing.loops, other.timing.loops  # type: ignore[attr-defined]
        if mine is None or theirs is None:
            return self if mine is None else other
        return self.with_loops(mine + theirs)


def joined(rows: Iterable[RowT]) -> tuple[RowT, ...]:
    """The rows, with those of the same cell joined into one."""
    found: dict[Row, Any] = {}
    for row in rows:
        cell = row.with_loops(Loops(count=1, times_s=(1.0,))) if isinstance(row, TimedRow) else row
        found[cell] = found[cell].joined(row) if cell in found else row
    return tuple(found.values())
