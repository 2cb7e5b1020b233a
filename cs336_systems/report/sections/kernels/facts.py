"""What sentences and tables over configurations rest on: sums and shares of a `StepProfile`, over all of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import (
    AttentionPart,
    AttentionTimes,
    IdleCause,
    KernelTimes,
    StepProfile,
)

FORWARD_AND_BACKWARD = (LaunchPhase.FORWARD, LaunchPhase.LOSS, LaunchPhase.BACKWARD)
MIN_LATE_SHARE = 0.2
"""Of the wall time, idle because the next kernel was launched late. A step that the GPU limits has a percent or two, at
its start; one that the CPU limits half and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKernel:
    """The kernel with the most time in some phases, over all steps."""

    name: str
    short_name: str
    kind: KernelClass
    count: int
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxCost:
    """Attention's softmax against its matrix products, in one phase."""

    softmax_s: float
    """Over all steps, as the others."""
    products_s: float
    whole_s: float
    """With what is neither: scaling, masking, copies."""
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


def idle_s(profile: StepProfile, *causes: IdleCause, phase: LaunchPhase | None = None) -> float:
    """Idle time of these causes over all steps, in one phase or in all."""
    return sum(row.total_s for row in profile.idle if row.cause in causes and phase in (None, row.phase))


def kernel_s(profile: StepProfile) -> float:
    """Time of the kernels over all steps."""
    return sum(sum(phase.kernel_s) for phase in profile.phases)


def late_share(profile: StepProfile) -> float:
    """Of the wall time, idle because the next kernel was launched late."""
    whole_s = wall_s(profile)
    return idle_s(profile, IdleCause.LATE_LAUNCH) / whole_s if whole_s else 0.0


def is_launch_bound(profile: StepProfile) -> bool:
    """Whether the device often has nothing to run because the host launches too slowly."""
    return late_share(profile) >= MIN_LATE_SHARE


def forward_wall_s(profile: StepProfile) -> float | None:
    """Mean wall time of forward on the device, the loss included where it stands beside; None without forward.

    That is what the records' own forward holds.
    """
    found = [phase for phase in profile.phases if phase.phase in (LaunchPhase.FORWARD, LaunchPhase.LOSS)]
    return sum(sum(phase.wall_s) for phase in found) / profile.num_steps if found else None


def top_kernel(profile: StepProfile, phases: Sequence[LaunchPhase]) -> TopKernel | None:
    """The kernel with the most time in `phases` together; None where nothing ran."""
    sums: dict[str, list[KernelTimes]] = {}
    for row in profile.kernels:
        if row.phase in phases:
            sums.setdefault(row.name, []).append(row)
    if not sums:
        return None
    rows = max(sums.values(), key=lambda rows: sum(row.total_s for row in rows))
    return TopKernel(
        name=rows[0].name, short_name=rows[0].short_name, kind=rows[0].kind,
        count=sum(row.count for row in rows), total_s=sum(row.total_s for row in rows),
    )  # fmt: skip


def class_shares(profile: StepProfile, phases: Sequence[LaunchPhase] | None = None) -> dict[KernelClass, float]:
    """Share of each class in the kernels' time of `phases`, or of the whole step; the largest first."""
    sums: dict[KernelClass, float] = {}
    for row in profile.classes:
        if phases is None or row.phase in phases:
            sums[row.kind] = sums.get(row.kind, 0.0) + row.total_s
    whole_s = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {kind: time_s / whole_s for kind, time_s in ordered} if whole_s else {}


def softmax_cost(profile: StepProfile, phase: LaunchPhase = LaunchPhase.FORWARD) -> SoftmaxCost | None:
    """What the softmax costs beside the products; None unless the profile tells both apart."""
    rows = [row for row in profile.attention if row.phase is phase]
    softmax = [row for row in rows if row.part is AttentionPart.SOFTMAX]
    products = [row for row in rows if row.part is not AttentionPart.SOFTMAX]
    products_s, softmax_s = sum(row.product_s for row in products), sum(row.total_s for row in softmax)
    if not products_s or not softmax_s:
        return None
    return SoftmaxCost(
        softmax_s=softmax_s, products_s=products_s, whole_s=sum(row.total_s for row in rows),
        softmax_flops=_flops(softmax), products_flops=_flops(products),
    )  # fmt: skip


def _flops(rows: Sequence[AttentionTimes]) -> int | None:
    known = [row.flops for row in rows if row.flops is not None]
    return sum(known) if len(known) == len(rows) else None
