"""Events as data frames, and sums over them.

The tables of a profile are sums over one long frame, with a row for each kernel and copy of the trace. Times are whole
nanoseconds, so that sums are exact.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pandas as pd

from cs336_systems.analysis.columns import Columns
from cs336_systems.analysis.kernels.phases import PHASES, LaunchPhase


def frame_of(columns: Columns) -> pd.DataFrame:
    """The columns as a data frame, with one more, `duration_ns`."""
    frame = pd.DataFrame({field.name: getattr(columns, field.name) for field in fields(columns)})
    return frame.assign(duration_ns=frame["end_ns"] - frame["start_ns"])


def by_phase(frame: pd.DataFrame) -> Iterator[tuple[LaunchPhase, pd.DataFrame]]:
    """Yield each phase that has rows, and its rows."""
    for code, phase in enumerate(PHASES):
        if len(rows := frame[frame["phase"] == code]):
            yield phase, rows


def totals(frame: pd.DataFrame, *by: str) -> Iterator[Any]:
    """Yield a named tuple for each group, the longest first: its keys, the number `count` of its rows, and `total_ns`.

    Groups of equal length are in the order of their keys.
    """
    found = frame.groupby(list(by))["duration_ns"].agg(count="size", total_ns="sum").reset_index()
    yield from found.sort_values("total_ns", ascending=False, kind="stable").itertuples()
