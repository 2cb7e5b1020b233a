"""The entries of tables about kernels: explained traces, with the records of their runs if these are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import StepProfile, decode_profile
from cs336_systems.config import Phase, Profiler, RunConfig
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.entries import load_entries
from cs336_systems.sweep.store import kernel_profile_path

KERNEL_PROFILERS = (Profiler.NSYS, Profiler.KINETO)


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
        path = kernel_profile_path(record.config, directory / "runs")
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
