"""Columns and times that make sense, or an error."""

import numpy as np
import pytest

from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, Trace, durations
from tests.analysis.kernels.tracing import Recording, ints, make_trace, training


def test_durations_are_differences() -> None:
    assert durations(ints([1, -5]), ints([1, 7]), "kernels").tolist() == [0, 12]
    assert durations(ints([]), ints([]), "kernels").tolist() == []


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
        durations(ints(start), ints(end), "kernels")


def test_columns_have_one_length() -> None:
    trace = make_trace(training(1))
    columns = {name: getattr(trace.ranges, name) for name in type(trace.ranges).__dataclass_fields__}
    with pytest.raises(ValueError, match="Ranges needs columns of one length"):
        type(trace.ranges)(**{**columns, "thread": np.zeros(1, dtype=np.int64)})


def test_strings_are_found_by_their_text_and_are_distinct() -> None:
    trace = make_trace(training(1))
    assert [trace.strings[i] for i in trace.string_ids("head", "no such", "gemm")] == ["head", "gemm"]
    empty = make_trace(Recording())
    with pytest.raises(ValueError, match="distinct"):
        Trace(
            strings=("a", "a"), kernels=empty.kernels, copies=empty.copies, ranges=empty.ranges,
            api_calls=empty.api_calls,
        )  # fmt: skip
