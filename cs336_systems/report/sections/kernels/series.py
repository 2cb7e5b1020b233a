"""What the pictures of a kernel trace draw: bars of time by class, and how busy a stream was through one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import PhaseTimes, Piece, StepProfile, Work
from cs336_systems.report.plots.drawing import CLASS_COLOURS, LONGEST_SOURCE, shorten
from cs336_systems.report.sections.kernels.facts import NOTICEABLE
from cs336_systems.text import inert_line

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBar:
    """What one bar consists of, in milliseconds per step; longer than the wall time where kernels ran side by side."""

    name: str
    launches: float
    classes_ms: Mapping[KernelClass, float]
    """In the order of drawing, without those that took no time."""
    copies_ms: float
    """Copies and fills by the driver, which are no kernels."""
    wall_ms: float
    busy_ms: float | None
    """When at least one kernel or copy ran; None for operators, where idle time has no meaning."""

    @property
    def idle_ms(self) -> float:
        """The rest of the wall time; 0 where it has no meaning."""
        return 0.0 if self.busy_ms is None else max(self.wall_ms - self.busy_ms, 0.0)

    @property
    def ran_ms(self) -> float:
        """Kernels and copies, added up over streams and devices."""
        return sum(self.classes_ms.values()) + self.copies_ms

    @property
    def length_ms(self) -> float:
        """All that the bar shows."""
        return self.ran_ms + self.idle_ms


def phase_bars(profile: StepProfile) -> list[TimeBar]:
    """A bar for each phase in which something ran, or which took a noticeable part of the step."""
    step_s = sum(sum(phase.wall_s) for phase in profile.phases)
    return [
        _time_bar(profile, (phase,), phase.phase)
        for phase in profile.phases
        if any(phase.launches) or any(phase.copies) or sum(phase.wall_s) > NOTICEABLE * step_s
    ]


def step_bar(profile: StepProfile, name: str) -> TimeBar:
    """One bar for all phases together."""
    return _time_bar(profile, profile.phases, name)


def _time_bar(profile: StepProfile, phases: Sequence[PhaseTimes], name: str) -> TimeBar:
    ms = 1e3 / profile.num_steps
    names = {phase.phase for phase in phases}
    sums = {
        kind: ms * sum(row.total_s for row in profile.classes if row.kind is kind and row.phase in names)
        for kind in CLASS_COLOURS
    }
    return TimeBar(
        name=name,
        launches=sum(sum(phase.launches) for phase in phases) / profile.num_steps,
        classes_ms={kind: time_ms for kind, time_ms in sums.items() if time_ms},
        copies_ms=ms * sum(sum(phase.copy_s) for phase in phases),
        wall_ms=ms * sum(sum(phase.wall_s) for phase in phases),
        busy_ms=ms * sum(sum(phase.busy_s) for phase in phases) if profile.work is Work.KERNELS else None,
    )


def utilisation(pieces: Sequence[Piece], edges: Times) -> dict[KernelClass, Times]:
    """The part of each cell between `edges` (seconds) in which kernels of a class ran, in the order of drawing.

    Within a piece, the time in which its kernels ran counts as spread evenly.
    """
    return {
        kind: _covered([piece for piece in pieces if piece.kind is kind], edges) / np.diff(edges)
        for kind in CLASS_COLOURS
        if any(piece.kind is kind for piece in pieces)
    }


def _covered(pieces: Sequence[Piece], edges: Times) -> Times:
    """Seconds of each cell in which the pieces ran."""
    start = np.array([piece.start_s for piece in pieces])
    length = np.array([piece.end_s for piece in pieces]) - start
    busy = np.array([piece.busy_s for piece in pieces])
    # a piece of no length would divide by zero, and has nothing to cover
    start, length, busy = start[length > 0], length[length > 0], busy[length > 0]
    until = np.clip((edges[:, None] - start) / length, 0.0, 1.0) @ busy
    return np.diff(until)


def describe_source(profile: StepProfile) -> list[str]:
    """File and devices, in words."""
    source = shorten(inert_line(profile.source).replace(", ", " "), LONGEST_SOURCE)
    return [source, *describe_devices([profile])]


def describe_devices(profiles: Sequence[StepProfile]) -> list[str]:
    """Names of the devices, each once."""
    return list(dict.fromkeys(inert_line(name) for profile in profiles for name in profile.device_names))


def describe_steps(profile: StepProfile) -> str:
    """How many steps the numbers are the mean of."""
    if profile.is_whole_trace:
        return "the whole trace"
    kind = "warm-up step" if profile.is_warmup else "step"
    return f"mean of {profile.num_steps} {kind}s" if profile.num_steps > 1 else f"1 {kind}"
