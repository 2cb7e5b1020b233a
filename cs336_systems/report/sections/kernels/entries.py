"""The entries of tables about kernels: explained traces, with the records of their runs if these are known."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import StepProfile, decode_profile
from cs336_systems.analysis.kernels.what_if import WhatIf, what_if
from cs336_systems.config import Phase, Profiler, RunConfig
from cs336_systems.costs.ranks_time import predicted_time
from cs336_systems.costs.time import QUEUE_DEPTH, TimePrediction, operations
from cs336_systems.record import RunRecord, Status, WarningCode
from cs336_systems.report.entries import load_entries
from cs336_systems.studies.ceilings_files import Ceilings
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
    what_if: WhatIf | None = None
    """What the step would take with changes; None if that was not worked out."""

    @property
    def device_name(self) -> str | None:
        """None if no record names the device."""
        return None if self.profiled is None else self.profiled.device_name

    def clock_s(self, phase: Phase) -> float | None:
        """Mean time of the phase without a profiler; None if it is not known.

        Backward's time includes communication if the trace cannot tell them apart, as in one CUDA graph of both.
        """
        phases = [phase]
        if phase is Phase.BACKWARD and all(own.phase is not LaunchPhase.COMMUNICATION for own in self.profile.phases):
            phases.append(Phase.COMMUNICATION)
        found = [None if self.plain is None else self.plain.measurement(each) for each in phases]
        means_s = [measured.mean_s for measured in found if measured is not None]
        return sum(means_s) if found[0] is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled(Explained):
    """An explained trace of a run whose record is known."""

    config: RunConfig
    profiled: RunRecord


E = TypeVar("E", bound=Explained)


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


def replayed(entries: Iterable[E], ceilings: Ceilings) -> list[E]:
    """The entries with predicted times of their steps with changes; times of matmuls are from the ceilings."""
    return [replace(entry, what_if=_what_if(entry, ceilings)) for entry in entries]


def _what_if(entry: Explained, ceilings: Ceilings) -> WhatIf:
    """Predicted times with changes, using the host's launch time of the run without a profiler.

    If launches do not limit that run, the host also waited for the device, so its time is only an upper bound. Then the
    launch time predicted from the ceilings, scaled by this host's speed in launching forward, is used if it is less.
    """
    curves = ceilings.curves(entry.device_name or next(iter(entry.profile.device_names), ""))
    plain = None if entry.config is None else entry.config.unprofiled
    predicted = None if plain is None or curves is None else predicted_time(plain, curves)
    measured = () if entry.plain is None else entry.plain.launch_times_s
    known_s = [statistics.median(measured)] if measured else []
    is_host_measured = entry.plain is not None and WarningCode.LAUNCH_BOUND in {w.code for w in entry.plain.warnings}
    if predicted is not None and not (known_s and is_host_measured):
        known_s.append(predicted.launch_s * _slowness(entry.plain, predicted))
    return what_if(entry.profile, entry.config, curves, min(known_s, default=None))


def _slowness(plain: RunRecord | None, predicted: TimePrediction) -> float:
    """Time in which the host of a run launched forward, over the predicted time; 1 if that is not known.

    The queue is empty when forward begins. If forward has more launches than the queue holds, the host waits for the
    device, and its time does not show its speed. A CUDA graph is one launch.
    """
    timed = () if plain is None else plain.host_phases
    measured = next((each.times_s for each in timed if each.phase is Phase.FORWARD), None)
    foretold_s = predicted.host_phases_s.get(Phase.FORWARD)
    if plain is None or not measured or not foretold_s:
        return 1.0
    num_launches = sum(each.launches for each in operations(plain.config)[Phase.FORWARD])
    has_waited = not plain.config.cuda_graph and num_launches > QUEUE_DEPTH
    return 1.0 if has_waited else statistics.median(measured) / foretold_s


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
