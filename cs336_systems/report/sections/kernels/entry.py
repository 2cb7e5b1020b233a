"""Explained traces with the records of their runs: what tables, pictures and findings of kernels
are made from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....analysis.columns import ProfileError
from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import StepProfile, decode_profile
from ....config import Phase, Profiler, RunConfig
from ....record import RunRecord, Status
from ....subject import Subject
from ....sweep.store import explanation_path
from ...section import load_entries
from .sums import total

KERNEL_PROFILERS = (Profiler.NSYS, Profiler.KINETO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long a step or a phase lasts, and how long the device works in it; sums over all steps
    of the profile.
    """

    whole_s: float
    """By the clock of the run without a profiler; of the profile itself where no such run is
    known.
    """
    busy_s: float
    """How long kernels and copies run, as the profile has it: a profiler slows the host, not the
    kernels.
    """
    profiled_s: float
    """How long the profile itself lasts."""
    by_clock: bool

    @property
    def idle_s(self) -> float:
        """How long the device is idle. Removing idle time cannot gain more than that."""
        return max(self.whole_s - self.busy_s, 0.0)

    @property
    def busy_share(self) -> float:
        """The part in which the device works, at most 1; 0 of nothing."""
        return min(self.busy_s / self.whole_s, 1.0) if self.whole_s else 0.0

    def gain_s(self, lost_s: float) -> float:
        """The most that can be gained without this much idle time in the profile, which a
        profiler makes longer.
        """
        return min(lost_s, self.idle_s) if self.by_clock else lost_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One explained trace, with the record of its run and that of the same run without a
    profiler, if known.
    """

    profile: StepProfile
    profiled: RunRecord | None = None
    plain: RunRecord | None = None
    """The same run without a profiler; None if there is none that finished."""

    @property
    def subject(self) -> Subject | None:
        """None if the record of the run is not known."""
        return None if self.profiled is None else self.profiled.subject

    @property
    def config(self) -> RunConfig | None:
        """None if the record is not known, or that of a watched loop."""
        return None if self.profiled is None else self.profiled.config

    @property
    def device_name(self) -> str | None:
        """None if no record names the device."""
        return None if self.profiled is None else self.profiled.device_name

    def clock_s(self, phase: Phase, record: RunRecord | None) -> float | None:
        """Mean time of the phase by the clock of this run, with a profiler or without; None if it
        is not known.

        Backward's time includes communication if the trace cannot tell them apart, as in one CUDA
        graph of both.
        """
        measured = None if record is None else record.measurement(phase)
        if record is None or measured is None:
            return None
        traced = {times.phase for times in self.profile.phases}
        if phase is Phase.BACKWARD and LaunchPhase.COMMUNICATION not in traced:
            communication = record.measurement(Phase.COMMUNICATION)
            if communication is not None:
                return measured.mean_s + communication.mean_s
        return measured.mean_s

    def span(self, phase: LaunchPhase | None = None) -> Span:
        """The span of the step, or of one phase. The clock timed no warm-up steps, and no file
        without steps.
        """
        profile = self.profile
        name = phase or Phase.STEP
        clock_s = None
        if name in set(Phase) and not profile.is_warmup and not profile.is_whole_trace:
            clock_s = self.clock_s(Phase(name), self.plain)
        parts = [part for part in profile.phases if phase in (None, part.phase)]
        profiled_s = total(part.wall_s for part in parts)
        return Span(
            whole_s=profiled_s if clock_s is None else clock_s * profile.num_steps,
            busy_s=total(part.busy_s for part in parts),
            profiled_s=profiled_s,
            by_clock=clock_s is not None,
        )


def load_profiled(records: Sequence[RunRecord], directory: Path) -> list[Explained]:
    """The runs of a sweep under a kernel profiler, with their profiles in `directory`/kernels, in
    the order of tables.

    A missing profile is left out, with a warning.
    """

    def load(record: RunRecord) -> Explained:
        path = explanation_path(record.subject, directory / "runs")
        try:
            profile = decode_profile(path.read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ProfileError(path, f"no kernel profile ({reason})") from error
        return Explained(profile=profile, profiled=record, plain=plain_run(record, records))

    return load_entries(records, KERNEL_PROFILERS, load)


def plain_run(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord | None:
    """The finished run of the same configuration on the same device, without a profiler."""
    wanted = record.subject.unprofiled
    for other in records:
        is_same = other.subject == wanted and other.device_name == record.device_name
        if is_same and other.status is Status.OK:
            return other
    return None
