"""Explained traces with the records of their runs, if known, of which tables, sentences and pictures are made.

Sums here are over all steps of a profile.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import IdleCause, PhaseTimes, StepProfile, Work, decode_profile
from cs336_systems.config import Phase, Profiler, RunConfig
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.section import load_entries
from cs336_systems.report.words import label
from cs336_systems.sweep.store import explanation_path
from cs336_systems.text import counted

KERNEL_PROFILERS = (Profiler.NSYS, Profiler.KINETO)
WHOLE_STEP = "step"
"""Name of all phases together in the column of phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One explained trace, with the record of its run and that of the same run without a profiler, if known."""

    profile: StepProfile
    config: RunConfig | None = None
    profiled: RunRecord | None = None
    plain: RunRecord | None = None
    """The same run without a profiler; None if there is none that finished."""

    @property
    def device_name(self) -> str | None:
        """None if no record names the device."""
        return None if self.profiled is None else self.profiled.device_name

    def clock_s(self, phase: Phase, record: RunRecord | None) -> float | None:
        """Mean time of the phase by the clock of this run, with a profiler or without; None if it is not known.

        Backward's time includes communication if the trace cannot tell them apart, as in one CUDA graph of both.
        """
        phases = [phase]
        if phase is Phase.BACKWARD and all(own.phase is not LaunchPhase.COMMUNICATION for own in self.profile.phases):
            phases.append(Phase.COMMUNICATION)
        found = [None if record is None else record.measurement(each) for each in phases]
        means_s = [measured.mean_s for measured in found if measured is not None]
        return sum(means_s) if found[0] is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled(Explained):
    """An explained trace of a run whose record is known."""

    config: RunConfig
    profiled: RunRecord


def explained(profile: StepProfile, record: RunRecord | None, others: Sequence[RunRecord] = ()) -> Explained:
    """The entry of a profile: with the record of its run, if known, and the run without a profiler among `others`."""
    if record is None:
        return Explained(profile=profile)
    return Profiled(profile=profile, config=record.config, profiled=record, plain=_plain_run(record, others))


def load_profiled(records: Sequence[RunRecord], directory: Path) -> list[Profiled]:
    """The runs of a sweep under a kernel profiler, with their profiles in `directory`/kernels, in the order of tables.

    A missing profile is left out, with a warning.
    """

    def load(record: RunRecord) -> Profiled:
        path = explanation_path(record.config, directory / "runs")
        try:
            profile = decode_profile(path.read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ProfileError(path, f"no kernel profile ({reason})") from error
        return Profiled(config=record.config, profile=profile, plain=_plain_run(record, records), profiled=record)

    return load_entries(records, KERNEL_PROFILERS, load)


def _plain_run(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord | None:
    """The finished run of the same configuration on the same device, without a profiler."""
    wanted = record.config.unprofiled
    return next(
        (
            other
            for other in records
            if other.config == wanted and other.status is Status.OK and other.device_name == record.device_name
        ),
        None,
    )


class Timed(Protocol):
    """Any part of a profile that has a count and a total time."""

    @property
    def count(self) -> int: ...
    @property
    def total_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Sum:
    """Number and total time of some calls."""

    count: int = 0
    total_s: float = 0.0


T = TypeVar("T", bound=Timed)
K = TypeVar("K", bound=Hashable)


def added(rows: Iterable[Timed]) -> Sum:
    """The sum of counts and of times over all rows."""
    kept = list(rows)
    return Sum(sum(row.count for row in kept), sum(row.total_s for row in kept))


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, Sum]:
    """The sums of the rows by key, the longest time first."""
    groups: dict[K, list[T]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    sums = {name: added(group) for name, group in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].total_s))


def wall_s(profile: StepProfile) -> float:
    """Wall time of all phases."""
    return sum(sum(phase.wall_s) for phase in profile.phases)


def kernel_s(profile: StepProfile, chosen: Collection[LaunchPhase] = tuple(LaunchPhase)) -> float:
    """Time of the kernels of some phases, or of all."""
    return sum(sum(phase.kernel_s) for phase in profile.phases if phase.phase in chosen)


def num_launches(*phases: PhaseTimes) -> int:
    """Number of the kernels of these phases."""
    return sum(sum(phase.launches) for phase in phases)


def idle(profile: StepProfile, cause: IdleCause, phase: LaunchPhase | None = None) -> Sum:
    """Idle times of this cause, in one phase or in all."""
    return added(row for row in profile.idle if row.cause is cause and phase in (None, row.phase))


def collectives_s(profile: StepProfile, *, exposed: bool = False) -> float:
    """Time in which collectives ran on the device; if `exposed`, the part in which the device computes nothing."""
    rows = [row for row in profile.communication if row.collective is None]
    return sum(sum(row.exposed_s if exposed else row.total_s) for row in rows)


def copies_alone_s(profile: StepProfile) -> float:
    """Time in which copies ran on the device and no kernel; a lower bound for profiles of earlier versions."""
    if profile.copies:
        return profile.copies[-1].alone_s
    return max(sum(sum(phase.busy_s) for phase in profile.phases) - kernel_s(profile), 0.0) if profile.gaps else 0.0


def mean_std_ms(parts_s: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Mean and deviation over the steps, in ms, of the parts together; no deviation of one step."""
    times_s = [sum(times) for times in zip(*parts_s, strict=True)]
    std_ms = statistics.stdev(times_s) * 1e3 if len(times_s) > 1 else None
    return sum(times_s) / max(len(times_s), 1) * 1e3, std_ms


def terms(profile: StepProfile) -> tuple[str, str]:
    """What the profile lists, and its time, in words: kernel and GPU time, or operator and CPU time for a CPU."""
    return ("operator", "CPU time") if profile.work is Work.OPERATORS else ("kernel", "GPU time")


def about(profile: StepProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    steps = counted(profile.num_steps, "warm-up step" if profile.is_warmup else "step")
    steps = "no steps in the file, so the whole of it counts as one" if profile.is_whole_trace else steps
    return f"{', '.join([*map(label, (profile.source, *profile.device_names)), steps])}."


def path_text(path: tuple[str, ...], cut: bool = True) -> str:
    """Ranges around a launch as `block.3 > ffn`; each name is `cut` to what a table has room for."""
    return " > ".join(label(name) if cut else name for name in path) or "outside of all ranges"
