"""Sums and shares of a `StepProfile` over all of its steps, for tables and sentences."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import (
    AttentionTimes,
    ClassTimes,
    HostCalls,
    IdleCause,
    IdleTimes,
    KernelTimes,
    ModuleTimes,
    PhaseTimes,
    StepProfile,
)

NOTICEABLE = 0.005
"""Share of the step's wall time: a phase that launched nothing and is shorter is not shown, such as taking a batch that
is ready."""
MIN_LATE_SHARE = 0.2
"""Share of the wall time that the GPU is idle because the next kernel was launched late. A step that the GPU limits has
a percent or two, at its start; one that the CPU limits half and more."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Number and total time of some calls."""

    count: int = 0
    total_s: float = 0.0


Timed: TypeAlias = KernelTimes | ClassTimes | AttentionTimes | ModuleTimes | IdleTimes | HostCalls | Sum
"""Any part of a profile that has a count and a total time."""
R = TypeVar("R", bound=Timed)
K = TypeVar("K", bound=Hashable)


def added(rows: Iterable[Timed]) -> Sum:
    """The sum of counts and of times over all rows."""
    kept = list(rows)
    return Sum(sum(row.count for row in kept), sum(row.total_s for row in kept))


def grouped(rows: Iterable[R], key: Callable[[R], K]) -> dict[K, Sum]:
    """The sums of the rows by key, the longest time first."""
    groups: dict[K, list[R]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    sums = {name: added(group) for name, group in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].total_s))


def wall_s(profile: StepProfile) -> float:
    """Wall time of all phases, over all steps."""
    return sum(sum(phase.wall_s) for phase in profile.phases)


def kernel_s(profile: StepProfile, chosen: Collection[LaunchPhase] = tuple(LaunchPhase)) -> float:
    """Time of the kernels of some phases, or of all, over all steps."""
    return sum(sum(phase.kernel_s) for phase in profile.phases if phase.phase in chosen)


def num_launches(*phases: PhaseTimes) -> int:
    """Number of the kernels of these phases, over all steps."""
    return sum(sum(phase.launches) for phase in phases)


def idle(profile: StepProfile, cause: IdleCause, phase: LaunchPhase | None = None) -> Sum:
    """Idle times of this cause over all steps, in one phase or in all."""
    return added(row for row in profile.idle if row.cause is cause and phase in (None, row.phase))


def exposed_s(profile: StepProfile, phase: LaunchPhase | None = None) -> float:
    """Time of collectives, in one phase or in all, in which the device computes nothing, over all steps."""
    own = [row for row in profile.communication if row.collective is None and phase in (None, row.phase)]
    return sum(sum(row.exposed_s) for row in own)


def collectives_s(profile: StepProfile) -> float:
    """Time in which collectives ran on the device, over all steps."""
    return sum(sum(row.total_s) for row in profile.communication if row.collective is None)


def last_ranks(profile: StepProfile) -> Counter[int]:
    """In how many steps the others waited for each rank, as it waited least itself; empty if that is not known."""
    waits = [own.waited_s for own in profile.ranks if own.waited_s is not None]
    if len(waits) < max(len(profile.ranks), 2):
        return Counter()
    steps = map(list, zip(*waits, strict=False))
    return Counter(profile.ranks[times.index(min(times))].rank for times in steps if any(times))


def is_launch_bound(profile: StepProfile) -> bool:
    """Whether the device often has nothing to run because the host launches too slowly."""
    return idle(profile, IdleCause.LATE_LAUNCH).total_s >= MIN_LATE_SHARE * wall_s(profile) > 0


def top_kernel(profile: StepProfile, chosen: Collection[LaunchPhase]) -> KernelTimes | None:
    """The kernel with the most time in the phases together, with its count and time there; None if nothing ran."""
    rows = [row for row in profile.kernels if row.phase in chosen]
    for name, own in grouped(rows, lambda row: row.name).items():
        row = next(row for row in rows if row.name == name)
        return replace(row, phase=None, count=own.count, total_s=own.total_s)
    return None
