"""Kernels by the line of the program that launched them."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ..columns import Ints
from ..memory.profile import Place
from .attribution import totals
from .kineto_operators import place_of
from .step_profile import PlaceTimes
from .trace import Trace, forward_of


def place_times(kernels: pd.DataFrame, trace: Trace) -> Iterator[PlaceTimes]:
    """Times of these kernels by line, the longest first; nothing if the file has no stacks."""
    if len(trace.frames):
        place, places = _of_frames(kernels, trace)
    elif trace.places:
        place, places = np.append(trace.call_place, -1)[kernels["call"]], trace.places
    else:
        return
    place_or_none = (*places, None)  # -1 is the last
    yield from totals(kernels.assign(place=place), PlaceTimes, place=place_or_none.__getitem__)


def _of_frames(kernels: pd.DataFrame, trace: Trace) -> tuple[Ints, tuple[Place, ...]]:
    """The place of each kernel by the program's innermost function at its launch, -1 for none, and
    all places.

    A kernel of backward has the place of the operator of forward.
    """
    frames, operators = trace.frames, trace.operators
    thread, time = kernels["thread"].to_numpy(), kernels["launch_ns"].to_numpy()
    _, forward = forward_of(trace, thread, time)
    is_backward = forward >= 0
    thread = np.where(is_backward, np.append(operators.thread, 0)[forward], thread)
    time = np.where(is_backward, np.append(operators.start_ns, 0)[forward], time)
    innermost = frames.by_thread().at(thread, time)
    names, place = np.unique(frames.name, return_inverse=True)
    places = tuple(place_of(trace.strings[name]) for name in names)
    known = np.where(kernels["is_launched"], innermost, -1)
    return np.append(place, -1)[known], places
