"""Kernels by the line of the program that launched them."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from .attribution import totals
from .step_profile import PlaceTimes
from .trace import Trace


def place_times(kernels: pd.DataFrame, trace: Trace) -> Iterator[PlaceTimes]:
    """Times of these kernels by line, the longest first; nothing if the file has no stacks."""
    if not trace.places:
        return
    place = np.append(trace.call_place, -1)[kernels["call"]]
    for row in totals(kernels.assign(place=place), "place"):
        yield PlaceTimes(
            place=trace.places[row.place] if row.place >= 0 else None,
            count=row.count,
            total_s=row.total_ns / 1e9,
        )
