"""Charts of the time of a step by class of kernel: a bar for each phase of one trace, or for each configuration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import StepProfile, Work
from cs336_systems.report.columns import Row
from cs336_systems.report.numbers import significant
from cs336_systems.report.plots.charts import Axis, Bar, Chart, Panel, Style, distinct
from cs336_systems.report.plots.palette import CLASS_COLOURS, FAILURE_COLOUR, REST_COLOUR
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import collectives_s, exposed_s
from cs336_systems.report.sections.kernels.tables import CLASS_KEYS, class_rows, is_shown, phase_rows
from cs336_systems.report.sections.kernels.timeline import describe_devices, describe_source, describe_steps

COPIES = "copy by the driver"
IDLE = "idle"
STYLES = {
    **{str(kind): Style(colour=colour) for kind, colour in CLASS_COLOURS.items()},
    COPIES: Style(colour="#FFFFFF", pattern="x", ink=CLASS_COLOURS[KernelClass.COPY_AND_FILL]),
    IDLE: Style(colour="#FFFFFF", pattern="/", ink=REST_COLOUR),
}
"""Style of each part that a bar may have, in the order of drawing."""
OVERLAP = 0.01
"""Smallest share of the step's wall time with overlapping kernels that the picture mentions."""


@dataclass(frozen=True, slots=True)
class TimeBar:
    """One bar: a row of the table of phases, and what it consists of in milliseconds per step, in the order of drawing.

    The bar is longer than the wall time if kernels overlapped.
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


def class_chart(profile: StepProfile, file: str = "classes", name: str = "") -> Chart:
    """A bar for each phase: its kernels by class, then the time in which the device was idle, up to the wall time."""
    *phases, step = time_bars(profile)
    device = "GPU" if profile.work is Work.KERNELS else "CPU"
    words = [*([name] if name else []), *describe_source(profile), describe_steps(profile)]
    if step.overlap_ms > OVERLAP * step.row["wall_mean_ms"]:
        words.append(f"{significant(step.overlap_ms, 3)} ms of kernels ran beside others")
    sums = {part: f"{part}, {rounded(time_ms, step.length_ms)} ms" for part, time_ms in step.parts_ms.items()}
    bars = []
    for bar in phases:
        busy = "" if bar.row["busy_share"] is None else f"\n{100 * bar.row['busy_share']:.0f} % busy"
        label = f"{bar.row['phase']}, {_count(bar.row['kernels_per_step'])} {profile.work}"
        wall = f"{significant(bar.row['wall_mean_ms'], 3)} ms wall{busy}"
        bars.append(Bar(name=label, parts=bar.parts_ms, words=wall))
    y = Axis(label="time (ms)" if profile.is_whole_trace else "time per step (ms)", unit="ms")
    return Chart(
        name=file, title=f"{device} time by phase and class of {profile.work.removesuffix('s')}",
        settings=", ".join(words), size=(6.0, 0.0), legend=3, is_lying=True,
        styles={part: replace(style, label=sums.get(part)) for part, style in STYLES.items()},
        panels=[Panel(x=Axis(names=[bar.name for bar in bars]), y=y, bars=bars)],
    )  # fmt: skip


def configuration_chart(profiles: Sequence[tuple[str, StepProfile]]) -> Chart:
    """A bar for each labelled profile: the part of its step that each class of kernel took, and that was idle.

    The whole is the step's wall time, and longer where kernels ran side by side. Raise ValueError for no profile.
    """
    if not profiles:
        raise ValueError("a picture of configurations needs at least one profile, got none")
    bars = []
    labels = distinct(label for label, _ in profiles)
    for label, (_, profile) in zip(labels, profiles, strict=True):
        step = time_bars(profile)[-1]
        parts = {name: 100 * time_ms / (step.length_ms or 1.0) for name, time_ms in step.parts_ms.items()}
        bars.append(Bar(name=label, parts=parts, words=f"{significant(step.row['wall_mean_ms'], 3)} ms"))
    return Chart(
        name="configurations", title="Where the time of a step goes, by configuration",
        settings=", ".join(describe_devices([profile for _, profile in profiles])), size=(6.0, 0.0), legend=4,
        styles=STYLES, is_lying=True,
        panels=[Panel(x=Axis(names=labels),
                      y=Axis(label="share of the step (%); its time is on the right", unit="%"), bars=bars)],
    )  # fmt: skip


COMPUTING, OVERLAPPED, EXPOSED = "computing", "computing and communicating", "communicating"
COMMUNICATION = {
    COMPUTING: Style(colour="#4C72B0"),
    OVERLAPPED: Style(colour="#FFFFFF", pattern="/", ink="#4C72B0"),
    EXPOSED: Style(colour=FAILURE_COLOUR),
    IDLE: STYLES[IDLE],
}


def communication_chart(profiles: Sequence[tuple[str, StepProfile]]) -> Chart | None:
    """A bar for each labelled profile of a run on several ranks: when its device computed, communicated, or did both.

    None if none of them has collectives.
    """
    shared = [(name, profile) for name, profile in profiles if profile.communication]
    bars = []
    labels = distinct(label for label, _ in shared)
    for label, (_, profile) in zip(labels, shared, strict=True):
        step = time_bars(profile)[-1].row
        both_ms, exposed_ms = (found(profile) * 1e3 / profile.num_steps for found in (collectives_s, exposed_s))
        parts = {
            COMPUTING: step["busy_mean_ms"] - both_ms,
            OVERLAPPED: both_ms - exposed_ms,
            EXPOSED: exposed_ms,
            IDLE: step["wall_mean_ms"] - step["busy_mean_ms"],
        }
        words = f"{significant(step['wall_mean_ms'], 3)} ms, {significant(exposed_ms, 2)} of it communicating alone"
        bars.append(Bar(name=label, parts=parts, words=words))
    if not bars:
        return None
    return Chart(
        name="communication", title="How much of the communication is hidden behind computing",
        settings=", ".join(describe_devices([profile for _, profile in shared])), size=(6.0, 0.0), legend=4,
        styles=COMMUNICATION, is_lying=True,
        panels=[Panel(x=Axis(names=labels), y=Axis(label="time of a step on the device (ms)", unit="ms"), bars=bars)],
    )  # fmt: skip


def rounded(value: float, whole: float) -> str:
    """The value with the decimals that four digits of the whole leave, such as `0.12` of 43.26; `< 0.01` below them."""
    decimals = max(0, 4 - math.ceil(math.log10(whole)))
    unit = 10.0**-decimals
    return f"{value:,.{decimals}f}" if value >= unit / 2 else f"< {unit:.{decimals}f}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
