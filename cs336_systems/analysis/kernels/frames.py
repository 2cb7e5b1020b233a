"""The long data frame of all kernels and copies of a trace, and sums over it.

A profile's tables are aggregated from this frame. Times are whole nanoseconds, so that sums are exact.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import Columns
from cs336_systems.analysis.kernels.attribution import Attribution
from cs336_systems.analysis.kernels.device_time import Jobs
from cs336_systems.analysis.kernels.phases import PHASES, LaunchPhase


def frame_of(columns: Columns) -> pd.DataFrame:
    """The same columns as a data frame."""
    return pd.DataFrame({field.name: getattr(columns, field.name) for field in fields(columns)})


def job_frame(jobs: Jobs, attribution: Attribution) -> pd.DataFrame:
    """A row for each kernel, then one for each copy: the columns of `Jobs`, and what else the tables need."""
    placed, moved = attribution.kernels, attribution.copies
    return frame_of(jobs).assign(
        duration_ns=jobs.end_ns - jobs.start_ns,
        is_copy=np.arange(len(jobs)) >= len(placed),
        is_recomputed=np.concatenate((placed.is_recomputed, moved.is_recomputed)),
    )


def by_phase(frame: pd.DataFrame) -> Iterator[tuple[LaunchPhase, pd.DataFrame]]:
    """Yield each phase that has rows, with these."""
    for code, phase in enumerate(PHASES):
        if len(rows := frame[frame["phase"] == code]):
            yield phase, rows


def totals(frame: pd.DataFrame, *by: str) -> Iterator[Any]:
    """Yield a named tuple for each group, the longest first: its keys, the number `count` of its rows, and `total_ns`.

    Groups of equal length are in the order of their keys.
    """
    found = frame.groupby(list(by))["duration_ns"].agg(count="size", total_ns="sum").reset_index()
    yield from found.sort_values("total_ns", ascending=False, kind="stable").itertuples()
