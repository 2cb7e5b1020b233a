"""What is known of a run while it goes on, from which its record is made however it ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from .. import waits
from ..analysis.warnings import throttled
from ..config import Mode, Phase, RunConfig
from ..record import (
    Durations,
    GpuState,
    Measurement,
    RunRecord,
    RunWarning,
    Status,
    Telemetry,
    Wait,
    WarningCode,
    time_now,
)
from ..subject import Subject, WatchedLoop
from .clock import StepTimes
from .environment import environment
from .nvml import Gpu
from .step import TrainingStep
from .watchers import Watch

LEAST_TRAIN_WARMUP_STEPS = 2
"""The optimizer makes its state at the end of the first step, so the second step is the first in
the steady state.
"""


@dataclass(slots=True)
class Progress:
    """What is known of a run so far. Times in seconds, `started` by `perf_counter`."""

    subject: Subject
    started_at: str = field(default_factory=time_now)
    started: float = field(default_factory=perf_counter)
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
    losses: list[float | None] = field(default_factory=list)
    """Losses of all steps; None for a loss that was not finite."""
    warnings: list[RunWarning] = field(default_factory=list)
    skipped_steps: int = 0
    """Steps after the warm-up that GradScaler skipped."""
    collector_on: bool | None = None
    state_before: GpuState | None = None
    profile: Path | None = None
    until_stable: bool = False
    """Whether to add steps until the interval of their mean is within STABLE, or
    MAX_STABLE_STEPS.
    """
    watch: Watch | None = None

    def warn(self, code: WarningCode, message: str) -> None:
        """Add a warning that the times may not be what they should, one of each code."""
        if all(warning.code is not code for warning in self.warnings):
            self.warnings.append(RunWarning(code=code, message=message))

    def warn_if_throttled(self, telemetry: Telemetry) -> None:
        """Add a warning if the driver has lowered the clock."""
        if (slowed := throttled(telemetry)) is not None:
            self.warn(WarningCode.THROTTLED, slowed)

    def warn_of_short_warmup(self, taken: int, advice: str = "") -> None:
        """Add a warning if a warm-up of so many steps leaves what only the first steps do to the
        measured ones.
        """
        if taken < LEAST_TRAIN_WARMUP_STEPS:
            first = "the making of the optimizer's state"
            if self.subject.mode is not Mode.TRAIN:
                first = "the first of the process, which makes libraries and memory ready"
            elif taken:
                first = "the first with the optimizer's state"
            self.warn(
                WarningCode.FEW_WARMUP_STEPS,
                f"{taken} warm-up step(s): the measured ones include {first}{advice}",
            )

    @property
    def config(self) -> RunConfig:
        """The configuration that is measured, which a watched loop does not have."""
        assert isinstance(self.subject, RunConfig)
        return self.subject

    @property
    def place(self) -> str:
        """The phase and step that the run is in, or what it does outside of steps."""
        if self.step is None or " step " not in self.where:
            return self.where
        return f"{self.step.phase} of {self.where}"

    def measurements(self) -> tuple[Measurement, ...]:
        """Times of the measured steps by phase; those of the whole step come last."""
        phases = _by_phase([times.phases_s for times in self.measured])
        return (*phases, Measurement(Phase.STEP, tuple(times.step_s for times in self.measured)))

    def host_phases(self) -> tuple[Measurement, ...]:
        """Times in which the host launched each phase of the measured steps; empty if the clock
        does not tell them.
        """
        return _by_phase([times.host_phases_s for times in self.measured])

    def record(self, status: Status) -> RunRecord:
        """What the record of any run has, however it ended."""
        subject = self.subject
        warmup_times_s = tuple(times.step_s for times in self.warmup)
        return RunRecord(
            config=subject if isinstance(subject, RunConfig) else None,
            loop=subject if isinstance(subject, WatchedLoop) else None,
            status=status,
            started_at=self.started_at,
            warmup_times_s=warmup_times_s,
            losses=tuple(self.losses),
            num_parameters=self.num_parameters,
            environment=environment(subject.device, self.gpu),
            durations=Durations(
                setup_s=self.setup_s,
                warmup_s=sum(warmup_times_s),
                measured_s=sum(times.step_s for times in self.measured),
                total_s=perf_counter() - self.started,
                waits=tuple(
                    Wait(what=what, seconds=seconds) for what, seconds in waits.taken().items()
                ),
            ),
            warnings=tuple(self.warnings),
        )

    def finished(self) -> RunRecord:
        """The record of a run that has ended well, with its times."""
        return replace(
            self.record(Status.OK),
            measurements=self.measurements(),
            host_times_s=tuple(times.host_s for times in self.measured),
            host_phases=self.host_phases(),
        )


def _by_phase(steps: Sequence[Mapping[Phase, float]]) -> tuple[Measurement, ...]:
    """Times of each phase that any of the steps has, 0 in those that do not have it."""
    timed = set[Phase]().union(*steps)
    measurements = []
    for phase in Phase:
        if phase in timed:
            times_s = [phases_s.get(phase, 0.0) for phases_s in steps]
            measurements.append(Measurement(phase, tuple(times_s)))
    return tuple(measurements)
