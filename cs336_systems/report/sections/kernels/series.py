"""What the pictures of a kernel trace draw: bars of time by class, and how busy a stream was through one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import Piece, StepProfile
from cs336_systems.report.entries import Values
from cs336_systems.report.plots.drawing import CLASS_COLOURS, LONGEST_SOURCE, shorten
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.shares import CLASS_KEYS, class_rows
from cs336_systems.report.sections.kernels.tables import is_shown, phase_rows
from cs336_systems.text import inert_line

Times = NDArray[np.float64]


COPIES = "copy by the driver"
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class TimeBar:
    """One bar: a row of the table of phases, and what it consists of in milliseconds per step, in the order of drawing.

    It is longer than the wall time where kernels ran side by side.
    """

    row: Values
    parts_ms: Mapping[str, float]
    """Classes of kernels, copies by the driver and the idle rest of the wall time, as far as there are any."""

    @property
    def length_ms(self) -> float:
        """All that the bar shows."""
        return sum(self.parts_ms.values())

    @property
    def overlap_ms(self) -> float:
        """How long kernels and copies ran beside others, on several streams or devices; 0 for operators."""
        busy_ms = self.row["busy_mean_ms"]
        return 0.0 if busy_ms is None else self.length_ms - self.parts_ms.get(IDLE, 0.0) - busy_ms


def time_bars(profile: StepProfile) -> list[TimeBar]:
    """A bar for each phase in which something ran, or which took a noticeable part of the step; last the whole step."""
    entry = Explained(profile=profile)
    classes = {row["phase"]: row for row in class_rows(entry)}
    return [_time_bar(row, classes.get(row["phase"], {})) for row in phase_rows(entry) if is_shown(row)]


def _time_bar(row: Values, classes: Values) -> TimeBar:
    parts_ms = {str(kind): classes.get(f"{CLASS_KEYS[kind]}_ms_per_step", 0.0) for kind in CLASS_COLOURS}
    idle_ms = 0.0 if row["busy_mean_ms"] is None else row["wall_mean_ms"] - row["busy_mean_ms"]
    parts_ms |= {COPIES: row["copy_mean_ms"], IDLE: idle_ms}
    return TimeBar(row, {name: time_ms for name, time_ms in parts_ms.items() if time_ms > 0})


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
