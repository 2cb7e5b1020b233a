"""The progress of a measured run: all that a record needs, whether the run ends well or fails."""

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

from cs336_systems.config import Phase, RunConfig
from cs336_systems.measure.clock import StepTimes
from cs336_systems.measure.nvml import Gpu
from cs336_systems.measure.step import TrainingStep
from cs336_systems.measure.watchers import Watch
from cs336_systems.record import Durations, GpuState, Measurement, RunWarning, WarningCode


class Say(Protocol):
    """Reports progress. It is called before each part of the work, and never while a step is timed."""

    def __call__(self, doing: str, done: int = 0, total: int = 0) -> None:
        """Report what is done next, in a few words; if it is one of `total` parts, `done` of these are finished."""


def say_nothing(doing: str, done: int = 0, total: int = 0) -> None:
    """Report nothing."""


@dataclass(slots=True)
class Progress:
    """What is known of a run so far. Times in seconds, `started` by `perf_counter`."""

    config: RunConfig
    started_at: str
    started: float
    where: str = "set-up"
    step: TrainingStep | None = None
    num_parameters: int | None = None
    gpu: Gpu | None = None
    setup_s: float = 0.0
    first_step_peak_bytes: int | None = None
    loss_scale: float | None = None
    """GradScaler's factor after the last step; None without one."""
    warmup: list[StepTimes] = field(default_factory=list)
    measured: list[StepTimes] = field(default_factory=list)
    page_faults: list[int] = field(default_factory=list)
    """How many each measured step had."""
    losses: list[float | None] = field(default_factory=list)
    """Losses of all steps; None for a loss that was not finite."""
    warnings: list[RunWarning] = field(default_factory=list)
    skipped_steps: int = 0
    """Steps after the warm-up that GradScaler skipped."""
    collector_on: bool | None = None
    state_before: GpuState | None = None
    profile: Path | None = None
    say: Say = say_nothing
    watch: Watch = field(default_factory=Watch)

    def warn(self, code: WarningCode, message: str) -> None:
        """Add a warning that the times may not be what they should."""
        self.warnings.append(RunWarning(code=code, message=message))

    @property
    def place(self) -> str:
        """The phase and step that the run is in, or what it does outside of steps."""
        if self.step is None or " step " not in self.where:
            return self.where
        return f"{self.step.phase} of {self.where}"

    def measurements(self) -> tuple[Measurement, ...]:
        """Times of the measured steps by phase; those of the whole step come last."""
        phases = [
            Measurement(phase, tuple(times.phases_s[phase] for times in self.measured)) for phase in self.config.phases
        ]
        return (*phases, Measurement(Phase.STEP, tuple(times.step_s for times in self.measured)))

    def host_phases(self) -> tuple[Measurement, ...]:
        """Times in which the host launched each phase of the measured steps; empty if the clock does not tell them."""
        return tuple(
            Measurement(phase, tuple(times.host_phases_s[phase] for times in self.measured))
            for phase in self.config.phases
            if all(phase in times.host_phases_s for times in self.measured)
        )

    def durations(self) -> Durations:
        """Time that the run has taken so far, in all and by part."""
        return Durations(
            setup_s=self.setup_s,
            warmup_s=sum(times.step_s for times in self.warmup),
            measured_s=sum(times.step_s for times in self.measured),
            total_s=perf_counter() - self.started,
        )
