"""Pictures of the time of a step by class of kernel: a bar for each phase of one trace, or for each configuration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import StepProfile, Work
from cs336_systems.report.columns import Row
from cs336_systems.report.numbers import significant
from cs336_systems.report.plots import bars, drawing
from cs336_systems.report.plots.drawing import CLASS_COLOURS
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.shares import CLASS_KEYS, class_rows
from cs336_systems.report.sections.kernels.tables import is_shown, phase_rows
from cs336_systems.report.sections.kernels.timeline import describe_devices, describe_source, describe_steps

COPIES = "copy by the driver"
IDLE = "idle"
STYLES: dict[str, dict[str, Any]] = {
    **{kind: {"facecolor": colour} for kind, colour in drawing.CLASS_COLOURS.items()},
    COPIES: {"facecolor": "white", "edgecolor": drawing.CLASS_COLOURS[KernelClass.COPY_AND_FILL], "hatch": "xxxx"},
    IDLE: {"facecolor": "white", "edgecolor": drawing.REST_COLOUR, "hatch": "////"},
}
"""Style of each part that a bar may have, in the order of drawing."""
BAR_INCHES = 4.1
"""Approximate length of the longest bar."""
OVERLAP = 0.01
"""Smallest share of the step's wall time with kernels side by side that the picture mentions."""


@dataclass(frozen=True, slots=True)
class TimeBar:
    """One bar: a row of the table of phases, and what it consists of in milliseconds per step, in the order of drawing.

    It is longer than the wall time where kernels ran side by side.
    """

    row: Row
    parts_ms: Mapping[str, float]
    """Classes of kernels, copies by the driver and the idle rest of the wall time, as far as there are any."""

    @property
    def length_ms(self) -> float:
        """Length of the whole bar."""
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


def _time_bar(row: Row, classes: Row) -> TimeBar:
    parts_ms = {str(kind): classes.get(f"{CLASS_KEYS[kind]}_ms_per_step", 0.0) for kind in CLASS_COLOURS}
    idle_ms = 0.0 if row["busy_mean_ms"] is None else row["wall_mean_ms"] - row["busy_mean_ms"]
    parts_ms |= {COPIES: row["copy_mean_ms"], IDLE: idle_ms}
    return TimeBar(row, {name: time_ms for name, time_ms in parts_ms.items() if time_ms > 0})


def draw_classes(profile: StepProfile, name: str = "") -> Figure:
    """A bar for each phase: its kernels by class, then the time in which the device was idle, up to the wall time."""
    *phases, step = time_bars(profile)
    device = "GPU" if profile.work is Work.KERNELS else "CPU"
    title = f"{device} time by phase and class of {profile.work.removesuffix('s')}"
    words = [*([name] if name else []), *describe_source(profile), describe_steps(profile)]
    if step.overlap_ms > OVERLAP * step.row["wall_mean_ms"]:
        words.append(f"{significant(step.overlap_ms, 3)} ms of kernels ran beside others")
    sums = step.parts_ms
    figure = _new_figure(title, ", ".join(words), 0.5 * max(len(phases), 1), -(-len(sums) // 3))
    panel = figure.subplots()
    longest = max([bar.length_ms for bar in phases], default=0.0) or 1.0
    for y, bar in enumerate(phases):
        bars.draw_bar(panel, y, _styled(bar, 1.0), BAR_INCHES / longest, digits=3)
        busy = "" if bar.row["busy_share"] is None else f"\n{100 * bar.row['busy_share']:.0f} % busy"
        bars.write_right(panel, y, f"{significant(bar.row['wall_mean_ms'], 3)} ms wall{busy}")
    names = [f"{bar.row['phase']}\n{_count(bar.row['kernels_per_step'])} {profile.work}" for bar in phases]
    bars.finish(panel, names, longest)
    panel.set_xlabel("time (ms)" if profile.is_whole_trace else "time per step (ms)", fontsize=9)
    _legend(figure, {name: f"{name}, {rounded(time_ms, step.length_ms)} ms" for name, time_ms in sums.items()}, 3)
    return figure


def draw_configurations(profiles: Sequence[tuple[str, StepProfile]]) -> Figure:
    """A bar for each labelled profile: the part of its step that each class of kernel took, and that was idle.

    The whole is the step's wall time, and longer where kernels ran side by side. Raise ValueError for no profile.
    """
    if not profiles:
        raise ValueError("a picture of configurations needs at least one profile, got none")
    steps = [time_bars(profile)[-1] for _, profile in profiles]
    names = [name for name in STYLES if any(name in bar.parts_ms for bar in steps)]
    devices = ", ".join(describe_devices([profile for _, profile in profiles]))
    title = "Where the time of a step goes, by configuration"
    labels = [drawing.wrapped(label, bars.LONGEST_LABEL) for label, _ in profiles]
    figure = _new_figure(title, devices, drawing.bar_inches(labels) * len(steps), -(-len(names) // 4))
    panel = figure.subplots()
    for y, bar in enumerate(steps):
        bars.draw_bar(panel, y, _styled(bar, 100 / (bar.length_ms or 1.0)), BAR_INCHES / 100)
        bars.write_right(panel, y, f"{significant(bar.row['wall_mean_ms'], 3)} ms")
    bars.finish(panel, labels, 100.0)
    panel.set_xlabel("share of the step (%); its time is on the right", fontsize=9)
    _legend(figure, {name: name for name in names}, 4)
    return figure


def _styled(bar: TimeBar, scale: float) -> list[bars.Part]:
    """The parts of the bar, their milliseconds times `scale`."""
    return [(time_ms * scale, STYLES[name]) for name, time_ms in bar.parts_ms.items()]


def _new_figure(title: str, settings: str, bars_inches: float, legend_rows: int) -> Figure:
    return drawing.new_figure(6.5, 1.3 + bars_inches + 0.19 * legend_rows, title, settings)


def _legend(figure: Figure, labels: Mapping[str, str], num_columns: int) -> None:
    """Draw the legend below the picture, in the order of drawing, row by row."""
    handles = [Patch(linewidth=0.5, label=label, **STYLES[name]) for name, label in labels.items()]
    drawing.legend_below(figure, handles, num_columns)


def rounded(value: float, whole: float) -> str:
    """The value with the decimals that four digits of the whole leave, such as `0.12` of 43.26; `< 0.01` below them."""
    decimals = max(0, 4 - math.ceil(math.log10(whole)))
    unit = 10.0**-decimals
    return f"{value:,.{decimals}f}" if value >= unit / 2 else f"< {unit:.{decimals}f}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
