"""Kernels that took far longer in one step than in all others, as a first call does."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import KernelTimes, StepProfile
from cs336_systems.report.sections.kernels.facts import wall_s

MIN_TIMES = 20
"""Smallest ratio of a one-off call to the median call of its kernel."""
MIN_SHARE = 0.01
"""Smallest share of the wall time that all one-offs of a phase must take to be reported."""
MIN_SHARE_EACH = 0.001
"""Smallest share of the wall time of a single one-off."""


@dataclass(frozen=True, slots=True)
class OneOff:
    """A kernel that took longer in a phase of one step than in the same phase of the other steps."""

    kernel: KernelTimes
    phase: LaunchPhase
    step: int
    excess_s: float
    """How much longer it took than in the other steps."""


def find_one_offs(profile: StepProfile) -> list[OneOff]:
    """Find all one-offs, the longest first; a single step has none, because there is no other to compare it with.

    The longest step of a phase is examined. It must exceed the median of the others by half of its one-offs' time.
    """
    found: list[OneOff] = []
    for phase in profile.phases:
        times_s = phase.kernel_s
        if len(times_s) < 2:
            continue
        step = times_s.index(max(times_s))
        longer_s = times_s[step] - statistics.median(times_s[:step] + times_s[step + 1 :])
        # a collective that takes long waits for another rank, which may happen in any step
        kernels = [each for each in profile.kernels
                   if each.phase is phase.phase and each.kind is not KernelClass.COMMUNICATION]  # fmt: skip
        excesses = [(kernel, _excess_s(kernel, times_s, step)) for kernel in kernels]
        own = [OneOff(kernel, phase.phase, step, excess_s) for kernel, excess_s in excesses
               if excess_s >= MIN_SHARE_EACH * wall_s(profile) > 0]  # fmt: skip
        total_s = sum(one_off.excess_s for one_off in own)
        if own and total_s >= MIN_SHARE * wall_s(profile) and longer_s >= total_s / 2:
            found += own
    return sorted(found, key=lambda one_off: -one_off.excess_s)


def _excess_s(kernel: KernelTimes, times_s: Sequence[float], step: int) -> float:
    """By how much the kernel made the phase of that step longer; 0 if it may have been the same in all steps.

    A profile has no times of single calls, so this is inferred from sums. A kernel with fewer calls than steps did not
    run in every step: all of its time counts. A kernel whose total exceeds the time of the phase in the other steps,
    scaled to all steps, was longer in this one. A call far longer than the median is a one-off if the kernel's other
    calls together are too short to hold one as long in half of the other steps.
    """
    num_steps, others_s = len(times_s), sum(times_s) - times_s[step]
    if kernel.count < num_steps:
        return kernel.total_s
    has_no_like = kernel.total_s - kernel.max_s < kernel.max_s * (num_steps - 1) / 2
    is_alone = has_no_like and kernel.max_s >= MIN_TIMES * kernel.median_s
    no_room_s = kernel.total_s - others_s * num_steps / (num_steps - 1)
    return max(no_room_s, kernel.max_s - kernel.median_s if is_alone else 0.0, 0.0)


def without(profile: StepProfile, one_offs: Iterable[OneOff]) -> StepProfile:
    """The profile as it would be without the excess time of these one-offs."""
    for one_off in one_offs:
        kernel, phase, excess_s = one_off.kernel, one_off.phase, one_off.excess_s
        profile = replace(
            profile,
            kernels=tuple(
                replace(row, total_s=row.total_s - excess_s)
                if row.name == kernel.name and row.phase in (None, phase)
                else row
                for row in profile.kernels
            ),
            classes=tuple(
                replace(row, total_s=row.total_s - excess_s) if (row.kind, row.phase) == (kernel.kind, phase) else row
                for row in profile.classes
            ),
            phases=tuple(
                replace(row, kernel_s=_less(row.kernel_s, one_off.step, excess_s)) if row.phase is phase else row
                for row in profile.phases
            ),
        )
    return profile


def _less(times_s: tuple[float, ...], step: int, excess_s: float) -> tuple[float, ...]:
    return (*times_s[:step], times_s[step] - excess_s, *times_s[step + 1 :])
