"""Numbers that findings and answers about a `MemoryProfile` share: peaks of steps and phases, the optimizer's start."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cs336_systems.analysis.memory.profile import Category, MemoryProfile, Moment
from cs336_systems.report.sections.memory.tables import bytes_of

START = "start"


def allocated(profile: MemoryProfile) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All categories together at each point of the timeline, in bytes."""
    rows = np.array(profile.timeline.num_bytes, np.int64).reshape(-1, len(profile.timeline.time_s))
    return np.asarray(rows.sum(axis=0), np.int64)


def phase_peaks(profile: MemoryProfile) -> dict[str, int]:
    """The most that was allocated in each phase, over all steps, in the order of the phases."""
    peaks: dict[str, int] = {}
    for phase in profile.phases:
        peaks[phase.phase] = max(peaks.get(phase.phase, 0), phase.peak_bytes)
    return peaks


def step_peaks(profile: MemoryProfile) -> dict[int, int]:
    """The most that was allocated in each step."""
    peaks: dict[int, int] = {}
    for phase in profile.phases:
        peaks[phase.step] = max(peaks.get(phase.step, 0), phase.peak_bytes)
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


def unnamed_copies_bytes(profile: MemoryProfile) -> int:
    """Temporary blocks at the peak of half a fp32 weight's size, at most as many as there are such weights.

    Under autocast without a graph these are its copies of the weights: nothing saves them, so nothing names them.
    """
    weights = Counter[int]()
    for row in profile.at_peak:
        if row.category is Category.PARAMETERS and row.dtype == "float32":
            weights[row.requested_bytes // 2] += row.count_at_peak
    copies = Counter[int]()
    for row in profile.at_peak:
        if row.category is Category.TEMPORARY and row.requested_bytes in weights:
            copies[row.requested_bytes] += row.count_at_peak
    return sum(num_bytes * min(count, weights[num_bytes]) for num_bytes, count in copies.items())
