"""Sums and shares of a `StepProfile` over all of its steps, and words for its times, counts and places."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
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
    Work,
)
from cs336_systems.report.words import label, significant

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


def mean_std_ms(parts_s: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Mean and deviation over the steps, in ms, of the parts together; no deviation of one step."""
    times_s = [sum(times) for times in zip(*parts_s, strict=True)]
    std_ms = statistics.stdev(times_s) * 1e3 if len(times_s) > 1 else None
    return sum(times_s) / max(len(times_s), 1) * 1e3, std_ms


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


WHERE = {
    LaunchPhase.DATA: "the making of the batch",
    LaunchPhase.FORWARD: "forward",
    LaunchPhase.LOSS: "the loss",
    LaunchPhase.BACKWARD: "backward",
    LaunchPhase.COMMUNICATION: "communication",
    LaunchPhase.OPTIMIZER: "the optimizer",
    LaunchPhase.UNATTRIBUTED: "no phase",
}
"""Names of phases in sentences."""
WHOLE_STEP = "step"
"""Name of all phases together in the column of phases."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Names of the work of a profile."""

    item: str
    time: str

    @property
    def items(self) -> str:
        """The plural."""
        return f"{self.item}s"


def terms(profile: StepProfile) -> Terms:
    """Kernels and GPU time, or operators and CPU time for a trace of a CPU."""
    return Terms("operator", "CPU time") if profile.work is Work.OPERATORS else Terms("kernel", "GPU time")


def about(profile: StepProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    kind = "warm-up step" if profile.is_warmup else "step"
    steps = f"{profile.num_steps} {kind}" + ("s" if profile.num_steps != 1 else "")
    steps = "no steps in the file, so the whole of it counts as one" if profile.is_whole_trace else steps
    return f"{', '.join([*map(label, (profile.source, *profile.device_names)), steps])}."


def path_text(path: tuple[str, ...], cut: bool = True) -> str:
    """Ranges around a launch as `block.3 > ffn`; each name is `cut` to what a table has room for."""
    return " > ".join(label(name) if cut else name for name in path) or "outside of all ranges"


def ms(time_s: float) -> str:
    """The time in ms for a sentence, to three digits."""
    return f"{significant(time_s * 1e3, 3)} ms"


def us(time_s: float) -> str:
    """The time in µs for a sentence, to three digits."""
    return f"{significant(time_s * 1e6, 3)} µs"


def number(per_step: float) -> str:
    """A count per step: whole, or to three digits."""
    return significant(per_step, 3) if per_step % 1 else f"{per_step:,.0f}"


def times(per_step: float) -> str:
    """How often something happens in a step: `once a step`, `4 times a step`."""
    return "once a step" if per_step == 1 else f"{number(per_step)} times a step"


def launches(per_step: float, profile: StepProfile) -> str:
    """How often kernels or operators ran in a step: `4 launches`, `1 call`."""
    one, many = ("call", "calls") if profile.work is Work.OPERATORS else ("launch", "launches")
    return f"{number(per_step)} {one if per_step == 1 else many}"


def items(per_step: float, profile: StepProfile) -> str:
    """How many kernels or operators there were in a step: `4 kernels`, `1 kernel`."""
    words = terms(profile)
    return f"{number(per_step)} {words.item if per_step == 1 else words.items}"
