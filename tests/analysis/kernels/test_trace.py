"""Columns and times that make sense, or an error; the innermost interval against a search
through all of them.
"""

import random

import numpy as np
import pytest

from cs336.analysis.kernels.trace import MAX_TIME_NS, Nesting, check_times
from tests.analysis.kernels.tracing import ints, make_trace, training


@pytest.mark.parametrize(
    ("start", "end", "problem"),
    [
        ([0, 5], [1, 4], "kernels must end after they start, got start 5 and end 4 in row 1"),
        ([-(2**63)], [2**63 - 1], "kernels need times within"),
        ([0], [2**63 - 1], "got 9223372036854775807"),
        ([0] * 9, [MAX_TIME_NS // 4] * 9, "together"),
    ],
)
def test_times_that_are_none_are_refused(start: list[int], end: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_times(ints(start), ints(end), "kernels")


def test_columns_have_one_length() -> None:
    trace = make_trace(training(1))
    columns = {
        name: getattr(trace.ranges, name) for name in type(trace.ranges).__dataclass_fields__
    }
    with pytest.raises(ValueError, match="Ranges needs columns of one length"):
        type(trace.ranges)(**{**columns, "thread": np.zeros(1, dtype=np.int64)})


def brute_force(start: list[int], end: list[int], time_ns: int) -> tuple[int, int] | None:
    """Start and end of the interval that holds the time and began last, the shortest of those."""
    holding = [(s, e) for s, e in zip(start, end, strict=True) if s <= time_ns < e]
    return max(holding, key=lambda interval: (interval[0], -interval[1])) if holding else None


@pytest.mark.parametrize("seed", range(50))
def test_innermost_as_by_brute_force(seed: int) -> None:
    """Of any intervals: nested, crossing, empty, equal."""
    generator = random.Random(seed)
    start = [generator.randint(0, 30) for _ in range(generator.randint(0, 25))]
    end = [s + generator.choice([0, 1, 5, 20]) for s in start]
    timeline = Nesting(ints(start), ints(end))
    for now, found in enumerate(timeline.at(np.arange(-1, 60)).tolist(), start=-1):
        expected = brute_force(start, end, now)
        assert (None if found < 0 else (start[found], end[found])) == expected, now
    for index, parent in enumerate(timeline.parent.tolist()):
        if parent >= 0:
            assert start[parent] <= start[index] < end[parent]
