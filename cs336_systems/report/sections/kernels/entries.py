"""Profiled runs with their kernel profiles and their plain twins."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cs336_systems.analysis.kernels.step_profile import StepProfile, decode_profile
from cs336_systems.config import Phase, Profiler, RunConfig
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.frame import order
from cs336_systems.sweep.store import kernel_profile_path
from cs336_systems.text import inert_line

KERNEL_PROFILERS = (Profiler.NSYS, Profiler.KINETO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A run under a profiler, what its kernels did, and the same run without a profiler."""

    config: RunConfig
    """Of the profiled run."""
    profile: StepProfile
    plain: RunRecord | None
    """None where there is no such run that finished."""
    profiled: RunRecord

    is_out_of_memory: ClassVar[bool] = False
    """A run that ran out of memory leaves no kernel profile."""

    @property
    def device_name(self) -> str | None:
        """None where the run could not name its device."""
        return _device(self.profiled)

    def clock_s(self, phase: Phase) -> float | None:
        """Mean time of the phase without a profiler; None where it is not known."""
        measured = None if self.plain is None else self.plain.measurement(phase)
        return None if measured is None else measured.mean_s


def load_profiled(records: Sequence[RunRecord], directory: Path) -> list[Profiled]:
    """The kernel-profiled among `records` with what `directory`/kernels has of them, in the order of the tables.

    What is missing is said.
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
        plain = _plain_twin(record, records)
        found.append(Profiled(config=record.config, profile=profile, plain=plain, profiled=record))
    return found


def _plain_twin(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord | None:
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
