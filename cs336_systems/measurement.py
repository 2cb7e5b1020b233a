"""Measure one configuration in this process: warm up, time, and keep all that puts the times in doubt."""

import contextlib
import datetime
import functools
import gc
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import pynvml
import torch
from torch import Tensor, nn

from cs336_systems.clock import Clock, StepTimes, make_clock
from cs336_systems.config import Device, Mode, Phase, RunConfig
from cs336_systems.counters import compilation, compiled_graphs, read_counters
from cs336_systems.environment import environment
from cs336_systems.failure import classify, describe
from cs336_systems.nvml import Gpu, GpuMonitor, visible_gpus
from cs336_systems.precision import apply_math_mode
from cs336_systems.profiling import annotate, set_annotator
from cs336_systems.quality import timing_warnings
from cs336_systems.ranges import Range
from cs336_systems.record import (
    Durations,
    GpuState,
    Measurement,
    Memory,
    RunRecord,
    RunWarning,
    Status,
    Telemetry,
    WarningCode,
)
from cs336_systems.shortcuts.step_graph import EAGER_STEPS
from cs336_systems.step import TrainingStep
from cs336_systems.watching import Watch, annotator_of, make_watch

MAX_EXTRA_WARMUP_STEPS = 20
"""Steps added to the warm-up while torch.compile still compiles, at most."""
LEAST_TRAIN_WARMUP_STEPS = 2
"""The optimizer's state appears at the end of the first step, so the second is the first of the steady state."""


@dataclass(slots=True)
class Progress:
    """What is known so far: enough for a record whenever the run ends."""

    config: RunConfig
    started_at: str
    started: float
    where: str = "set-up"
    step: TrainingStep | None = None
    num_parameters: int | None = None
    gpu: Gpu | None = None
    setup_s: float = 0.0
    first_step_peak_bytes: int | None = None
    warmup: list[StepTimes] = field(default_factory=list)
    measured: list[StepTimes] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    warnings: list[RunWarning] = field(default_factory=list)
    skipped_steps: int = 0
    collector_on: bool | None = None
    state_before: GpuState | None = None
    profile: Path | None = None
    watch: Watch = field(default_factory=Watch)

    def warn(self, code: WarningCode, message: str) -> None:
        self.warnings.append(RunWarning(code=code, message=message))


def measure(config: RunConfig, model: nn.Module | None = None, profile: Path | None = None) -> RunRecord:
    """Run the configuration on this process's first visible device and return its record.

    Never raises for what a run can die of: running out of memory, a CUDA error and an exception of the model are
    records too. `model` (on the right device) takes the place of the one the configuration names. `profile` is where
    the run's profiler writes, unless it is nsys, which is told from outside.
    """
    progress = Progress(
        config=config,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        started=perf_counter(),
        profile=profile,
    )
    try:
        return _measure(progress, model)
    except SystemExit as error:  # of a model's module that parses arguments of its own, say
        return _failed(progress, RuntimeError(f"the model's code ended the process with status {error.code}"))
    except Exception as error:
        return _failed(progress, error)


def _measure(progress: Progress, model: nn.Module | None) -> RunRecord:
    config = progress.config
    monitor = _find_gpu(progress)
    torch.manual_seed(config.seed)
    set_annotator(annotator_of(config))
    if torch.cuda.is_initialized():
        gc.collect()  # what an earlier run of this process left in cycles is no part of this one's peaks
        torch.cuda.reset_peak_memory_stats()
    compiled_before = compilation(config)
    step = TrainingStep(config, model)
    apply_math_mode(config.precision)  # after a user's own module, which may have set another, has been imported
    progress.step, progress.watch = step, make_watch(step, progress.profile)
    clock = progress.watch.clock(make_clock(config))
    progress.num_parameters = step.num_parameters
    if config.device is Device.CUDA:
        torch.cuda.synchronize()
    progress.setup_s = perf_counter() - progress.started

    with progress.watch.whole_run():
        with _collector_off(), annotate(Range.WARMUP):
            _warm_up(step, clock, progress, monitor)
        one_step = functools.partial(_one_more, step, clock, progress)
        with _collector_off(), progress.watch.measured_steps(one_step):
            energy_before = monitor.energy_j() if monitor else None
            counters_before = read_counters(config, reset_peaks=True)
            with annotate(Range.MEASURE):
                _time(step, clock, progress)
            progress.where = "the end of profiling"
    progress.where = "the readings after the steps"
    counters = read_counters(config)
    timed = len(progress.measured) + progress.skipped_steps
    telemetry = _telemetry(monitor, progress.state_before, energy_before, timed)

    measurements = _measurements(progress)
    graph_peak_bytes = step.graph.peak_bytes if step.graph else None
    memory = counters.memory_since(counters_before, progress.first_step_peak_bytes, graph_peak_bytes)
    _judge(progress, memory, telemetry, counters.graphs - counters_before.graphs)
    return RunRecord(
        config=config,
        status=Status.OK,
        started_at=progress.started_at,
        measurements=measurements,
        warmup_times_s=tuple(times.step_s for times in progress.warmup),
        host_times_s=tuple(times.host_s for times in progress.measured),
        losses=tuple(progress.losses),
        skipped_steps=progress.skipped_steps,
        collector_on=progress.collector_on,
        num_parameters=progress.num_parameters,
        memory=memory,
        compilation=compilation(config, compiled_before),
        telemetry=telemetry,
        environment=environment(config.device, progress.gpu),
        durations=_durations(progress),
        warnings=tuple(progress.warnings),
    )


def _find_gpu(progress: Progress) -> GpuMonitor | None:
    """Look who else is on the GPU; before this process has a context there, that is everybody."""
    if progress.config.device is Device.CPU:
        return None
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    progress.gpu = next(iter(visible_gpus()), None)
    if progress.gpu is None:
        progress.warn(WarningCode.NO_TELEMETRY, "NVML does not answer: clocks, power and company are not known")
        return None
    try:
        monitor = GpuMonitor(progress.gpu.uuid)
        others = monitor.processes() - torch.cuda.is_initialized()
        monitor.state()  # some GPUs answer to their name and yet have no power reading
    except pynvml.NVMLError as error:
        progress.warn(WarningCode.NO_TELEMETRY, f"NVML: {error}: clocks, power and company are not known")
        return None
    if others > 0:
        progress.warn(
            WarningCode.GPU_SHARED, f"{others} other process(es) held a context on this GPU; end them, run again"
        )
    return monitor


def _warm_up(step: TrainingStep, clock: Clock, progress: Progress, monitor: GpuMonitor | None) -> None:
    config = progress.config
    wanted = max(config.warmup_steps, EAGER_STEPS + 1) if config.cuda_graph else config.warmup_steps
    while len(progress.warmup) < wanted:
        if len(progress.warmup) == wanted - 1:
            _settle(progress, monitor)
        graphs = compiled_graphs(config)
        progress.where = f"warm-up step {len(progress.warmup)}"
        times, loss = step(clock)
        progress.warmup.append(times)
        _keep_loss(progress, loss)
        if len(progress.warmup) == 1 and config.device is Device.CUDA:
            progress.first_step_peak_bytes = torch.cuda.max_memory_allocated()
        last = len(progress.warmup) == wanted
        if last and compiled_graphs(config) > graphs and wanted < config.warmup_steps + MAX_EXTRA_WARMUP_STEPS:
            wanted += 1
    if not progress.warmup:
        _settle(progress, monitor)
    if config.mode is Mode.TRAIN and len(progress.warmup) < LEAST_TRAIN_WARMUP_STEPS:
        first = "the making of the optimizer's state" if not progress.warmup else "the first with the optimizer's state"
        progress.warn(
            WarningCode.FEW_WARMUP_STEPS,
            f"{len(progress.warmup)} warm-up step(s): the measured ones include {first}; "
            f"use at least --warmup-steps {LEAST_TRAIN_WARMUP_STEPS}",
        )


def _settle(progress: Progress, monitor: GpuMonitor | None) -> None:
    """Do what makes the device wait before the last warm-up step, because the step after a pause is a slower one."""
    gc.collect()
    progress.state_before = monitor.state() if monitor else None


def _one_more(step: TrainingStep, clock: Clock, progress: Progress) -> None:
    """A step of warm-up for the profiler's own sake."""
    progress.where = "the first step under the profiler"
    times, loss = step(clock)
    progress.warmup.append(times)
    _keep_loss(progress, loss)


def _time(step: TrainingStep, clock: Clock, progress: Progress) -> None:
    config = progress.config
    progress.collector_on = gc.isenabled()
    scale = step.loss_scale()
    while len(progress.measured) < config.measured_steps:
        progress.where = f"measured step {len(progress.measured)}"
        times, loss = step(clock)
        _keep_loss(progress, loss)
        scale, last_scale = step.loss_scale(), scale
        if scale is not None and last_scale is not None and scale < last_scale:
            progress.skipped_steps += 1
            if progress.skipped_steps > config.measured_steps + 20:
                raise RuntimeError(f"GradScaler skipped {progress.skipped_steps} steps: the gradients are not finite")
        else:
            progress.measured.append(times)


def _keep_loss(progress: Progress, loss: Tensor) -> None:
    value = loss.item()
    progress.losses.append(value if math.isfinite(value) else None)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """No collection of Python's garbage inside: it takes tens of milliseconds at its own moment."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _telemetry(
    monitor: GpuMonitor | None, before: GpuState | None, energy_before: float | None, steps: int
) -> Telemetry | None:
    if monitor is None or before is None:
        return None
    after, energy = monitor.state(), monitor.energy_j()
    per_step = None if energy is None or energy_before is None else (energy - energy_before) / steps
    return Telemetry(before=before, after=after, energy_per_step_j=per_step)


def _measurements(progress: Progress) -> tuple[Measurement, ...]:
    phases = [
        Measurement(phase, tuple(times.phases_s[phase] for times in progress.measured))
        for phase in progress.config.phases
    ]
    return (*phases, Measurement(Phase.STEP, tuple(times.step_s for times in progress.measured)))


def _judge(progress: Progress, memory: Memory | None, telemetry: Telemetry | None, graphs: int) -> None:
    """Add the warnings that the finished run calls for."""
    launches_apart = progress.config.device is Device.CUDA and not progress.config.sync_phases
    progress.warnings += timing_warnings(
        [times.step_s for times in progress.measured],
        [times.host_s for times in progress.measured] if launches_apart else (),
    )
    if graphs:
        progress.warn(
            WarningCode.RECOMPILED, f"torch.compile made {graphs} graph(s) while timing; use more --warmup-steps"
        )
    if memory and (memory.segments_allocated or memory.alloc_retries):
        progress.warn(
            WarningCode.ALLOCATOR_GREW,
            f"the allocator asked the driver for {memory.segments_allocated} segment(s) and flushed its cache "
            f"{memory.alloc_retries} time(s) while timing; use more --warmup-steps or a smaller batch",
        )
    if telemetry and (reasons := {*telemetry.before.throttle_reasons, *telemetry.after.throttle_reasons}):
        clock = telemetry.after.sm_clock_hz / telemetry.after.max_sm_clock_hz
        progress.warn(WarningCode.THROTTLED, f"{', '.join(sorted(reasons))}: SM clock at {clock:.0%} of its maximum")
    already = any(warning.code is WarningCode.GPU_SHARED for warning in progress.warnings)
    if telemetry and not already and (others := max(telemetry.before.other_processes, telemetry.after.other_processes)):
        progress.warn(
            WarningCode.GPU_SHARED, f"{others} other process(es) held a context on this GPU; end them, run again"
        )
    if progress.skipped_steps:
        progress.warn(
            WarningCode.SKIPPED_STEPS, f"GradScaler skipped {progress.skipped_steps} step(s); they are not timed"
        )
    if None in progress.losses:
        progress.warn(WarningCode.NOT_FINITE, f"the loss was not finite in {progress.losses.count(None)} step(s)")


def _durations(progress: Progress) -> Durations:
    return Durations(
        setup_s=progress.setup_s,
        warmup_s=sum(times.step_s for times in progress.warmup),
        measured_s=sum(times.step_s for times in progress.measured),
        total_s=perf_counter() - progress.started,
    )


def _where(progress: Progress) -> str:
    """The phase and step, or what went on outside of the steps."""
    if progress.step is None or " step " not in progress.where:
        return progress.where
    return f"{progress.step.phase} of {progress.where}"


def _failed(progress: Progress, error: Exception) -> RunRecord:
    status = classify(error)
    progress.watch.failed()
    record = RunRecord(
        config=progress.config,
        status=status,
        started_at=progress.started_at,
        failure=describe(error, status, _where(progress), progress.config.device),
        warmup_times_s=tuple(times.step_s for times in progress.warmup),
        losses=tuple(progress.losses),
        num_parameters=progress.num_parameters,
        durations=_durations(progress),
        warnings=tuple(progress.warnings),
    )
    return replace(record, environment=environment(progress.config.device, progress.gpu))
