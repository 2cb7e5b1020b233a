"""Sums and shares of a `StepProfile`, over all of its steps, which tables and sentences are made from."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import (
    AttentionPart,
    AttentionTimes,
    IdleCause,
    KernelTimes,
    PhaseTimes,
    StepProfile,
)

FORWARD, BACKWARD = (LaunchPhase.FORWARD,), (LaunchPhase.BACKWARD,)
FORWARD_AND_BACKWARD = (LaunchPhase.FORWARD, LaunchPhase.LOSS, LaunchPhase.BACKWARD)
NOTICEABLE = 0.005
"""Share of the step's wall time: a phase that launched nothing and is shorter is not shown, such as taking a batch that
is ready."""
MIN_LATE_SHARE = 0.2
"""Share of the wall time that the GPU is idle because the next kernel was launched late. A step that the GPU limits has
a percent or two, at its start; one that the CPU limits half and more."""


class Timed(Protocol):
    """Some calls, with the time that they took together."""

    @property
    def count(self) -> int:
        """How many there were."""

    @property
    def total_s(self) -> float:
        """Their time."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Calls added up."""

    count: int = 0
    total_s: float = 0.0


R = TypeVar("R", bound=Timed)
K = TypeVar("K", bound=Hashable)


def added(rows: Iterable[Timed]) -> Sum:
    """All rows together."""
    kept = list(rows)
    return Sum(sum(row.count for row in kept), sum(row.total_s for row in kept))


def grouped(rows: Iterable[R], key: Callable[[R], K]) -> dict[K, Sum]:
    """The rows of each key together, the longest first."""
    groups: dict[K, list[R]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    sums = {name: added(group) for name, group in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].total_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxCost:
    """Attention's softmax against its matrix products, in one phase; times over all steps."""

    softmax_s: float
    products_s: float
    rest_s: float
    """Scaling, masking and copies."""
    softmax_flops: int | None
    products_flops: int | None

    @property
    def time_ratio(self) -> float:
        """Softmax over products."""
        return self.softmax_s / self.products_s

    @property
    def flops_ratio(self) -> float | None:
        """Softmax over products; None where the FLOPs are not known."""
        return self.softmax_flops / self.products_flops if self.softmax_flops and self.products_flops else None

    @property
    def time_per_flop_ratio(self) -> float | None:
        """How many times longer the softmax takes for a FLOP; None where the FLOPs are not known."""
        return None if self.flops_ratio is None else self.time_ratio / self.flops_ratio


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


def is_launch_bound(profile: StepProfile) -> bool:
    """Whether the device often has nothing to run because the host launches too slowly."""
    return idle(profile, IdleCause.LATE_LAUNCH).total_s >= MIN_LATE_SHARE * wall_s(profile) > 0


def forward_wall_s(profile: StepProfile) -> float | None:
    """Mean wall time of forward on the device, the loss included where it stands beside; None without forward.

    That is what the records' own forward holds.
    """
    found = [phase for phase in profile.phases if phase.phase in (LaunchPhase.FORWARD, LaunchPhase.LOSS)]
    return sum(sum(phase.wall_s) for phase in found) / profile.num_steps if found else None


def top_kernel(profile: StepProfile, chosen: Collection[LaunchPhase]) -> KernelTimes | None:
    """The kernel with the most time in the phases together, with its count and time there; None where nothing ran."""
    rows = [row for row in profile.kernels if row.phase in chosen]
    for name, own in grouped(rows, lambda row: row.name).items():
        row = next(row for row in rows if row.name == name)
        return replace(row, phase=None, count=own.count, total_s=own.total_s)
    return None


def class_shares(
    profile: StepProfile, chosen: Collection[LaunchPhase] = tuple(LaunchPhase)
) -> dict[KernelClass, float]:
    """Share of each class in the kernels' time of some phases, or of the whole step; the largest first."""
    sums = grouped((row for row in profile.classes if row.phase in chosen), lambda row: row.kind)
    whole_s = sum(part.total_s for part in sums.values())
    return {kind: part.total_s / whole_s for kind, part in sums.items()} if whole_s else {}


def softmax_cost(profile: StepProfile, phase: LaunchPhase = LaunchPhase.FORWARD) -> SoftmaxCost | None:
    """What the softmax costs beside the products; None unless the profile tells both apart."""
    rows = [row for row in profile.attention if row.phase is phase]
    softmax = [row for row in rows if row.part is AttentionPart.SOFTMAX]
    products = [row for row in rows if row.part is not AttentionPart.SOFTMAX]
    products_s, softmax_s = sum(row.product_s for row in products), added(softmax).total_s
    if not products_s or not softmax_s:
        return None
    return SoftmaxCost(
        softmax_s=softmax_s, products_s=products_s, rest_s=added(rows).total_s - softmax_s - products_s,
        softmax_flops=_flops(softmax), products_flops=_flops(products),
    )  # fmt: skip


def _flops(rows: Iterable[AttentionTimes]) -> int | None:
    flops = [row.flops for row in rows]
    return None if None in flops else sum(number or 0 for number in flops)
