"""Bars of profiled steps: kinds of work, and how much communication is hidden."""

from collections.abc import Sequence
from itertools import chain

from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.step_profile import StepProfile, Work
from ...charts import (
    CLASS_COLOURS,
    COMPUTING_COLOUR,
    REST_COLOUR,
    Bar,
    Chart,
    Panel,
    Style,
    distinct,
)
from ...words import significant
from .sums import busy_s, collectives_s, grouped, total, wall_s

COPIES = "copy by the driver"
IDLE = "idle"
STYLES = {
    **{str(kind): Style(colour=colour) for kind, colour in CLASS_COLOURS.items()},
    COPIES: Style(colour="#FFFFFF", pattern="x", ink=CLASS_COLOURS[KernelClass.COPY_AND_FILL]),
    IDLE: Style(colour="#FFFFFF", pattern="/", ink=REST_COLOUR),
}
"""Style of each part that a bar may have, in the order of draw."""
COMPUTING, OVERLAPPED, EXPOSED = "computing", "computing and communicating", "communicating"
COMMUNICATION = {
    COMPUTING: Style(colour=COMPUTING_COLOUR),
    OVERLAPPED: Style(colour="#FFFFFF", pattern="/", ink=CLASS_COLOURS[KernelClass.COMMUNICATION]),
    EXPOSED: Style(colour=CLASS_COLOURS[KernelClass.COMMUNICATION]),
    IDLE: STYLES[IDLE],
}


def parts_ms(profile: StepProfile) -> dict[str, float]:
    """Milliseconds per step of each class of kernel, of copies by the driver, and of the idle rest,
    in drawing order.

    Together they are the step's wall time, or more if kernels overlapped. A CPU is never idle.
    """
    sums = grouped(profile.classes, lambda row: row.kind)
    parts_s = {str(kind): sums[kind].total_s for kind in CLASS_COLOURS if kind in sums}
    parts_s[COPIES] = total(times.copy_s for times in profile.phases)
    if profile.work is Work.KERNELS:
        parts_s[IDLE] = wall_s(profile) - busy_s(profile)
    steps = profile.num_steps
    return {name: time_s / steps * 1e3 for name, time_s in parts_s.items() if time_s > 0}


Labelled = Sequence[tuple[str, StepProfile]]
"""Profiles, each with the label of its configuration."""


def configuration_chart(profiles: Labelled) -> Chart | None:
    """A bar for each labelled profile: the part of its step that each class of kernel took, and
    that was idle.

    The whole is the step's wall time, and longer where kernels ran side by side. None for fewer
    than two profiles.
    """
    if len(profiles) < 2:
        return None
    bars = []
    for name, profile in _numbered(profiles):
        parts = parts_ms(profile)
        step_ms = wall_s(profile) / profile.num_steps * 1e3
        whole_ms = sum(parts.values()) or 1.0
        shares = {part: 100 * time_ms / whole_ms for part, time_ms in parts.items()}
        bars.append(Bar(name=name, parts=shares, figures=(f"{significant(step_ms, 3)} ms",)))
    label = "share of the profiled step (%), whose time is on the right"
    return Chart(
        name="configurations",
        title="Where the time of a profiled step goes, by configuration",
        settings=_settings(profiles),
        styles=STYLES,
        panels=[Panel(label=label, bars=bars)],
    )


def communication_chart(profiles: Labelled) -> Chart | None:
    """A bar for each labelled profile of a run on several ranks: when its device computed,
    communicated, or did both.

    None if fewer than two of them have collectives.
    """
    shared = [(name, profile) for name, profile in profiles if profile.communication]
    if len(shared) < 2:
        return None
    bars = []
    for name, profile in _numbered(shared):
        times_s = (
            wall_s(profile),
            busy_s(profile),
            collectives_s(profile),
            collectives_s(profile, exposed=True),
        )
        wall_ms, busy_ms, both_ms, exposed_ms = (
            time_s / profile.num_steps * 1e3 for time_s in times_s
        )
        parts = {
            COMPUTING: busy_ms - both_ms,
            OVERLAPPED: both_ms - exposed_ms,
            EXPOSED: exposed_ms,
            IDLE: wall_ms - busy_ms,
        }
        figures = (
            f"{significant(wall_ms, 3)} ms",
            f"{significant(exposed_ms, 2)} ms communicating alone",
        )
        bars.append(Bar(name=name, parts=parts, figures=figures))
    return Chart(
        name="communication",
        title="How much of a profiled step's communication is hidden",
        settings=_settings(shared),
        styles=COMMUNICATION,
        panels=[Panel(label="time of a step on the device, under the profiler (ms)", bars=bars)],
    )


def _numbered(profiles: Labelled) -> Labelled:
    """The profiles, each label with its number where it is there several times."""
    labels = distinct(label for label, _ in profiles)
    return list(zip(labels, (profile for _, profile in profiles), strict=True))


def _settings(profiles: Labelled) -> str:
    return ", ".join(devices_of([profile for _, profile in profiles]))


def devices_of(profiles: Sequence[StepProfile]) -> list[str]:
    """Names of the devices, each once."""
    names = chain.from_iterable(profile.device_names for profile in profiles)
    return list(dict.fromkeys(names))
