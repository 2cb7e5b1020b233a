"""Sums over the steps and phases of an explained profile, and the words for what it lists.

Sums are over all steps of a profile; tables divide them by its number of steps.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import (
    IdleCause,
    PhaseTimes,
    RankTimes,
    StepProfile,
    Timed,
    Work,
)
from ....text import counted
from ...words import label

WHOLE_STEP = "step"
"""Name of all phases together in the column of phases."""
ALL_KINDS = "all"
"""Name of all kinds of collectives or copies together in the column of kinds."""


TimedT = TypeVar("TimedT", bound=Timed)
KeyT = TypeVar("KeyT", bound=Hashable)
NumberT = TypeVar("NumberT", int, float)


def total(by_part: Iterable[Sequence[NumberT]]) -> NumberT:
    """The sum over all parts and steps; each part has one value for each step."""
    return sum(map(sum, by_part))


def added(rows: Iterable[Timed]) -> Timed:
    """The sum of counts and of times over all rows."""
    kept = list(rows)
    count = sum(row.count for row in kept)
    return Timed(count=count, total_s=sum(row.total_s for row in kept))


def grouped(rows: Iterable[TimedT], key: Callable[[TimedT], KeyT]) -> dict[KeyT, Timed]:
    """The sums of the rows by key, the longest time first."""
    groups: dict[KeyT, list[TimedT]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    sums = {name: added(group) for name, group in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].total_s))


def phases_by_name(profile: StepProfile | RankTimes) -> dict[str, tuple[LaunchPhase, ...]]:
    """Each phase and then all of them, by the names in the column of phases."""
    of_one: dict[str, tuple[LaunchPhase, ...]] = {
        times.phase: (times.phase,) for times in profile.phases
    }
    return of_one | {WHOLE_STEP: tuple(LaunchPhase)}


def wall_s(profile: StepProfile) -> float:
    """Wall time of all phases."""
    return total(times.wall_s for times in profile.phases)


def busy_s(profile: StepProfile) -> float:
    """How long the device ran kernels or copies, in all phases."""
    return total(times.busy_s for times in profile.phases)


def kernel_s(profile: StepProfile, phases: Collection[LaunchPhase] = tuple(LaunchPhase)) -> float:
    """Time of the kernels of some phases, or of all."""
    return total(times.kernel_s for times in profile.phases if times.phase in phases)


def num_launches(*phases: PhaseTimes) -> int:
    """Number of the kernels of these phases."""
    return total(times.launches for times in phases)


def idle(profile: StepProfile, cause: IdleCause, phase: LaunchPhase | None = None) -> Timed:
    """Idle times of this cause, in one phase or in all."""
    return added(row for row in profile.idle if row.cause is cause and phase in (None, row.phase))


def collectives_s(profile: StepProfile, *, exposed: bool = False) -> float:
    """Time in which collectives ran on the device; if `exposed`, the part in which the device
    computes nothing.
    """
    rows = [row for row in profile.communication if row.collective is None]
    return total(row.exposed_s if exposed else row.total_s for row in rows)


def copies_alone_s(profile: StepProfile) -> float:
    """Time in which copies ran on the device and no kernel; nothing in profiles of versions before
    4, which do not have it.
    """
    return profile.copies[-1].alone_s if profile.copies else 0.0  # the last row is of all kinds


def mean_std_ms(parts_s: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Mean and deviation over the steps, in ms, of the parts together; no deviation of one step."""
    times_s = [sum(times) for times in zip(*parts_s, strict=True)]
    std_ms = statistics.stdev(times_s) * 1e3 if len(times_s) > 1 else None
    return sum(times_s) / max(len(times_s), 1) * 1e3, std_ms


def terms(profile: StepProfile) -> tuple[str, str]:
    """What the profile lists, and its time, in words: kernel and GPU time, or operator and CPU
    time for a CPU.
    """
    if profile.work is Work.OPERATORS:
        return "operator", "CPU time"
    return "kernel", "GPU time"


def about(profile: StepProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    steps = counted(profile.num_steps, "warm-up step" if profile.is_warmup else "step")
    if profile.is_whole_trace:
        steps = "no steps in the file, so the whole of it counts as one"
    elif profile.steps_from and not profile.steps_from.startswith("the ranges"):
        steps += f", shown by {profile.steps_from}"
    if profile.ranks:
        steps += f"; rank {profile.rank}, the first of {len(profile.ranks)}"
    return f"{', '.join([*map(label, (profile.source, *profile.device_names)), steps])}."


def path_text(path: tuple[str, ...], cut: bool = True) -> str:
    """Ranges around a launch as `block.3 > ffn`; each name is `cut` to what a table has room
    for.
    """
    names = map(label, path) if cut else path
    return " > ".join(names) or "outside of all ranges"
