"""Explained kernel traces, with the records of their runs if these are known."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.analysis.kernels.step_profile import StepProfile, decode_profile
from cs336_systems.config import Phase, Profiler, RunConfig
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.frame import order
from cs336_systems.sweep.store import kernel_profile_path
from cs336_systems.text import inert_line

KERNEL_PROFILERS = (Profiler.NSYS, Profiler.KINETO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What the kernels of one trace did, with the run that was traced and the same run without a profiler if known."""

    profile: StepProfile
    config: RunConfig | None = None
    profiled: RunRecord | None = None
    plain: RunRecord | None = None
    """Run without a profiler; None if there is none that finished."""

    @property
    def device_name(self) -> str | None:
        """None if no record names the device."""
        return None if self.profiled is None else _device(self.profiled)

    def clock_s(self, phase: Phase) -> float | None:
        """Mean time of the phase without a profiler; None if it is not known."""
        measured = None if self.plain is None else self.plain.measurement(phase)
        return None if measured is None else measured.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled(Explained):
    """A run under a profiler, as its record has it, with what its kernels did."""

    config: RunConfig
    profiled: RunRecord


def explained(profile: StepProfile, record: RunRecord | None, others: Sequence[RunRecord] = ()) -> Explained:
    """The profile with the record of its run, if there is one, and with the run without a profiler among the others."""
    if record is None:
        return Explained(profile=profile)
    return Profiled(profile=profile, config=record.config, profiled=record, plain=_plain_run(record, others))


def load_profiled(records: Sequence[RunRecord], directory: Path) -> list[Profiled]:
    """The runs among `records` under a kernel profiler, with their profiles in `directory`/kernels, in table order.

    A profile that is missing is named in a warning.
    """
    found = []
    for record in sorted(records, key=lambda record: order(record.config)):
        if record.config.profiler not in KERNEL_PROFILERS:
            continue
        path = kernel_profile_path(record.config, directory / "runs")
        try:
            profile = decode_profile(path.read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            ended = f"; the run ended as {record.status}" if record.status is not Status.OK else ""
            said = f"warning: {record.config.label}: no kernel profile at {path} ({reason}){ended}"
            print(inert_line(said), file=sys.stderr)
            continue
        plain = _plain_run(record, records)
        found.append(Profiled(config=record.config, profile=profile, plain=plain, profiled=record))
    return found


def _plain_run(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord | None:
    """The finished run of the same configuration on the same device, without a profiler."""
    wanted = record.config.unprofiled
    return next(
        (
            other
            for other in records
            if other.config == wanted and other.status is Status.OK and _device(other) == _device(record)
        ),
        None,
    )


def _device(record: RunRecord) -> str | None:
    return None if record.environment is None else record.environment.identity.device_name
