"""Numbers that findings and answers about a `MemoryProfile` share: peaks of steps and phases, the optimizer's start."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cs336_systems.analysis.memory.profile import Category, MemoryProfile, Moment
from cs336_systems.report.memory.tables import bytes_of

START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """From one boundary to the next in one step: a phase."""

    step: int
    phase: str
    begin_s: float
    end_s: float
    peak_bytes: int
    """Allocated at most, as far as the timeline resolves it."""
    end_bytes: int
    """Allocated at its end."""


def spans(profile: MemoryProfile) -> list[Span]:
    """The phases of all steps in time; none where the snapshot knows no boundaries."""
    return [
        Span(
            step=end.step, phase=end.phase, begin_s=begin.time_s, end_s=end.time_s, end_bytes=end.allocated_bytes,
            peak_bytes=_peak_between(profile, begin, end),
        )
        for begin, end in pairwise(profile.boundaries)
        if begin.step == end.step and end.phase != START
    ]  # fmt: skip


def _peak_between(profile: MemoryProfile, begin: Moment, end: Moment) -> int:
    time_s = np.array(profile.timeline.time_s)
    total = allocated(profile)[(time_s >= begin.time_s) & (time_s < end.time_s)]
    known = [begin.allocated_bytes, end.allocated_bytes, *total.tolist()]
    if (profile.peak.step, profile.peak.phase) == (end.step, end.phase):
        known.append(profile.peak.allocated_bytes)
    return int(max(known))


def allocated(profile: MemoryProfile) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All categories together at each point of the timeline, in bytes."""
    rows = np.array(profile.timeline.num_bytes, np.int64).reshape(-1, len(profile.timeline.time_s))
    return np.asarray(rows.sum(axis=0), np.int64)


def phase_peaks(profile: MemoryProfile) -> dict[str, int]:
    """The most that was allocated in each phase, over all steps, in the order of the phases."""
    peaks: dict[str, int] = {}
    for span in spans(profile):
        peaks[span.phase] = max(peaks.get(span.phase, 0), span.peak_bytes)
    return peaks


def step_peaks(profile: MemoryProfile) -> dict[int, int]:
    """The most that was allocated in each step."""
    peaks: dict[int, int] = {}
    for span in spans(profile):
        peaks[span.step] = max(peaks.get(span.step, 0), span.peak_bytes)
    return peaks


def starts(profile: MemoryProfile) -> Sequence[Moment]:
    """The beginnings of the steps."""
    return [moment for moment in profile.boundaries if moment.phase == START]


def late_state_bytes(profile: MemoryProfile) -> int:
    """Optimizer state that is there at the end and was not when the first step began; 0 in the steady state."""
    if not profile.boundaries:
        return 0
    first, last = profile.boundaries[0], profile.boundaries[-1]
    return max(0, bytes_of(last, Category.OPTIMIZER_STATE) - bytes_of(first, Category.OPTIMIZER_STATE))
