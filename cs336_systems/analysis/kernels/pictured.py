"""What the pictures of steps over time are made from: the step of median time in full, and several
steps that stand beside each other.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ..columns import Ints
from .attribution import frame_of
from .classes import MAX_NAME, KernelClass
from .device_time import DeviceSteps, DeviceWindows
from .modules import CLASSES
from .phases import PHASES
from .step_profile import PicturedStep, Piece, StepLabel, Window

PICTURE_PARTS = 500
"""Parts of the pictured step; kernels of one class and stream that begin in the same part are
one piece.
"""
PARTS_BESIDE = 60
"""The same of a step that is drawn beside others."""
MOST_BESIDE = 8
"""Most steps beside each other, more if that leaves less than LEAST_OF_KIND of a kind."""
LEAST_OF_KIND = 2
"""Least steps of each kind: the shortest and the longest."""
MOST_KINDS = 6
"""Most kinds of steps that are drawn, those of most steps."""


def with_copies(kernels: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """The rows of a picture of steps: `kernels`, which lie in steps already, and after them the
    copies and fills of memory that `work` has in steps.

    `work` has a row for each job of the device: `is_copy` tells copies and fills from kernels, and
    `step` is -1 outside of all steps. `kernels` has in addition `kind`, the index of each kernel's
    class in CLASSES. Copies and fills are given the class of kernels that only copy or fill.
    """
    copies = work[work["is_copy"] & (work["step"] >= 0)]
    kind = CLASSES.index(KernelClass.COPY_AND_FILL)
    return pd.concat([kernels, copies.assign(kind=kind)])


def median_step(
    spans: DeviceSteps, windows: DeviceWindows, jobs: pd.DataFrame, strings: Sequence[str]
) -> PicturedStep:
    """The step of median wall time, of two the shorter, and where each of its kernels begins."""
    order = _by_time(spans, np.arange(len(spans)))
    step = int(order[(len(order) - 1) // 2])
    picture = _picture(step, spans, windows, jobs, PICTURE_PARTS)
    of_step = jobs[jobs["step"] == step]
    wall_ns = max(int(spans.end_ns[step] - spans.origin_ns[step]), 1)
    parts = (of_step["start_ns"] - int(spans.origin_ns[step])) * 1000 // wall_ns
    places = {}
    for name, of_name in parts.clip(0, 999).groupby(of_step["name"]):
        places[strings[name][:MAX_NAME]] = tuple(sorted(set(of_name.tolist())))
    return replace(picture, places=places)


def steps_beside(
    labels: Sequence[StepLabel], spans: DeviceSteps, windows: DeviceWindows, jobs: pd.DataFrame
) -> tuple[PicturedStep, ...]:
    """Steps of each kind in the order of the file: all of a few, else the shortest, the longest
    and some between them. Nothing of a single step.
    """
    if len(spans) < 2:
        return ()
    kinds = defaultdict[str, list[int]](list)
    for step in range(len(spans)):
        kinds[labels[step].kind if labels else ""].append(step)
    largest = sorted(kinds.values(), key=lambda steps: -len(steps))[:MOST_KINDS]
    most_of_kind = max(MOST_BESIDE // len(largest), LEAST_OF_KIND)
    chosen: list[int] = []
    for steps in largest:
        order = _by_time(spans, np.array(steps))
        places = np.linspace(0, len(order) - 1, min(most_of_kind, len(order)))
        chosen += order[places.round().astype(int)].tolist()
    return tuple(_picture(step, spans, windows, jobs, PARTS_BESIDE) for step in sorted(chosen))


def _by_time(spans: DeviceSteps, steps: Ints) -> Ints:
    """The steps in the order of their wall times, the shortest first."""
    wall = spans.end_ns[steps] - spans.origin_ns[steps]
    return steps[np.argsort(wall, kind="stable")]


def _picture(
    step: int, spans: DeviceSteps, windows: DeviceWindows, jobs: pd.DataFrame, num_parts: int
) -> PicturedStep:
    """The picture of one step, with pieces of this fineness."""
    origin = int(spans.origin_ns[step])
    wall = int(spans.end_ns[step]) - origin
    times = frame_of(windows)
    rows: Iterable[Any] = times[times["step"] == step].itertuples()
    of_phases = []
    for row in rows:
        window = Window(
            phase=PHASES[row.phase],
            host_start_s=(row.host_start_ns - origin) / 1e9,
            host_end_s=(row.host_end_ns - origin) / 1e9,
            device_start_s=(row.start_ns - origin) / 1e9,
            device_end_s=(row.end_ns - origin) / 1e9,
        )
        of_phases.append(window)
    jobs = jobs[jobs["step"] == step]
    start = jobs["start_ns"] - origin
    jobs = jobs.assign(
        part=start * num_parts // max(wall, 1), start=start, end=start + jobs["duration_ns"]
    )
    by_piece = jobs.groupby(["stream", "part", "kind"])
    bounds = by_piece.agg({"start": "min", "end": "max", "duration_ns": "sum"})
    pieces = []
    for (stream, _, kind), begin, end, busy in bounds.itertuples():
        piece = Piece(
            stream=stream,
            kind=CLASSES[kind],
            start_s=begin / 1e9,
            end_s=end / 1e9,
            busy_s=busy / 1e9,
        )
        pieces.append(piece)
    return PicturedStep(
        step=step, wall_s=wall / 1e9, windows=tuple(of_phases), pieces=tuple(pieces)
    )
