"""Measure one configuration in this process: warm up, time the steps, and record what puts the
times in doubt.
"""

import contextlib
import functools
import gc
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Self

import pynvml
import torch
from torch import nn

from .. import waits
from ..analysis.statistics import steady_interval
from ..config import Device, Mode, Phase, Profiler, RunConfig
from ..model.annotate import annotate, set_annotator
from ..model.fast.compiled_ahead import compiling_ahead
from ..parallel.collectives import Rank, barrier_on_host, group_of
from ..ranges import Range, rank_range
from ..record import Memory, MemoryMoment, MomentName, RunRecord, Telemetry, Traffic, WarningCode
from ..text import LONGEST_PART, counted, shortened
from .clock import Clock, ObservedClock, StepTimes, make_clock
from .compilers import compilers_told
from .environment import lacking_memory
from .failure import classify, describe
from .gpm import ActivityMonitor
from .inputs import inputs_of
from .nvml import GpuMonitor, visible_gpus
from .precision import apply_math_mode
from .progress import LEAST_TRAIN_WARMUP_STEPS, Progress
from .step import TrainingStep, memory_since, reset_memory
from .watchers import Watch, annotator_of

MAX_EXTRA_WARMUP_STEPS = 20
"""Most steps that are added to the warm-up while torch.compile still compiles."""
MAX_EXTRA_SKIPPED_STEPS = 20
"""Steps that GradScaler may skip in addition to the number of steps wanted: it halves its factor
of 2^16 each time.
"""
STABLE, MAX_STABLE_STEPS = 0.01, 200
"""Half the interval of the mean, relative to it, at which `until_stable` stops, and the most
steps until then.
"""


def measure(
    config: RunConfig,
    model: nn.Module | None = None,
    profile: Path | None = None,
    rank: Rank | None = None,
    until_stable: bool = False,
) -> RunRecord:
    """Run the configuration on this process's first visible device and return its record.

    A failed run has a record too: out of memory, a CUDA error and an exception in the model's code
    are not raised. The times are not judged yet (`judged`). `model` (on the right device) replaces
    the one that the configuration names. `profile` is the file that the run's profiler writes;
    nsys, which runs outside this process, does not need it.

    Of a run on several ranks, this process is `rank`, and the record is this rank's. With
    `until_stable` steps are added until their mean is known to 1 %, and the record's configuration
    says how many there were.
    """
    # before the user's module is imported: its source may be edited at any time
    inputs = inputs_of(config)
    progress = Progress(subject=config, profile=profile, until_stable=until_stable)
    try:
        with contextlib.nullcontext() if rank is None else group_of(rank, config.device):
            try:
                record = _measure(progress, model, 0 if rank is None else rank.rank)
            finally:
                if progress.step is not None:
                    progress.step.give_up_graph()
    # for example from a model's module that parses arguments of its own
    except SystemExit as error:
        why = f"the model's code ended the process with status {error.code}"
        record = _failed(progress, RuntimeError(why))
    except BaseException as error:
        if (
            isinstance(error, KeyboardInterrupt)
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            raise  # Ctrl-C; with another handler installed, the model's own code raised it
        record = _failed(progress, error)
    return replace(record, inputs=inputs)


def _measure(progress: Progress, model: nn.Module | None, rank: int) -> RunRecord:
    """Measure this rank's part of the run and return its record; a failure is raised."""
    config = progress.config
    # a machine without enough memory would hardly answer any more, or end any of its processes
    lacking = lacking_memory(config) if model is None else None
    if lacking is not None:
        raise MemoryError(f"not run: {lacking}")
    monitor = _find_gpu(progress)
    with compiling_ahead(config):
        step = _make_step(config, model, rank)
    compiled_before = step.compilation()
    watch = Watch(step, progress.profile)
    progress.step, progress.watch = step, watch
    progress.num_parameters = step.num_parameters
    progress.loss_scale = step.loss_scale()
    activity = _activity_monitor(progress, monitor)
    clock = watch.clock(make_clock(config))
    moments = _end_setup(step, progress)
    with watch.whole_run():
        _warm_up(step, clock, progress, monitor)
        one_step = functools.partial(
            _warm_up_once, step, clock, progress, "the first step under the profiler"
        )
        with _collector_off(), watch.measured_steps(one_step):
            before = _Readings.before_steps(step, monitor)
            with annotate(Range.MEASURE), _range_of_rank(config, rank):
                _meet_under_nsys(config, "begin")
                _time(step, clock, progress, activity)
                _meet_under_nsys(config, "end")
            # before a profiler writes while the GPU idles
            telemetry = _telemetry(monitor, progress, before.energy_j)
            progress.where = "the end of profiling"
    progress.where = "the readings after the steps"
    memory = _memory_since(before.memory, step, progress)
    _judge(progress, memory, telemetry, step.compiled_graphs() - before.graphs)
    traffic = _look_inside(step, clock, progress, moments)
    return replace(
        progress.finished(),
        skipped_steps=progress.skipped_steps,
        collector_on=progress.collector_on,
        memory=memory,
        moments=tuple(moments),
        traffic=traffic,
        compilation=step.compilation(compiled_before),
        telemetry=telemetry,
        activity=activity.activity(),
    )


def _end_setup(step: TrainingStep, progress: Progress) -> list[MemoryMoment]:
    """Wait until the device has made the step, and note how long that took; return the memory then,
    which is read of a run on several ranks.
    """
    if step.config.device is Device.CUDA:
        torch.cuda.synchronize()
    moments = [] if step.way is None else [step.memory_now(MomentName.INITIALISED)]
    progress.setup_s = perf_counter() - progress.started
    return moments


class _Readings(NamedTuple):
    """What is read just before the measured steps, to be compared with the same after them."""

    energy_j: float | None
    graphs: int
    """Graphs that torch.compile has made."""
    memory: dict[str, int] | None
    """Counters of PyTorch's CUDA allocator; None on a CPU."""

    @classmethod
    def before_steps(cls, step: TrainingStep, monitor: GpuMonitor | None) -> Self:
        """Read all of it, and let the allocator's peaks start again from here."""
        return cls(
            energy_j=monitor.energy_j() if monitor else None,
            graphs=step.compiled_graphs(),
            memory=reset_memory() if step.config.device is Device.CUDA else None,
        )


def _memory_since(
    before: dict[str, int] | None, step: TrainingStep, progress: Progress
) -> Memory | None:
    """The memory of the measured steps, from the allocator's counters before them; None on a CPU,
    which has none.
    """
    if before is None:
        return None
    memory = memory_since(before, step.graph.peak_bytes if step.graph else None)
    return replace(memory, first_step_peak_allocated_bytes=progress.first_step_peak_bytes)


def _make_step(config: RunConfig, model: nn.Module | None, rank: int) -> TrainingStep:
    """Set PyTorch up as the configuration asks, and make the step that is measured."""
    if config.expandable_segments:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.manual_seed(config.seed)
    set_annotator(annotator_of(config))
    if torch.cuda.is_initialized():
        _forget_earlier_runs()
    with compilers_told(config), waits.waiting_for("making the model"):
        step = TrainingStep(config, model, rank)
    # after a user's own module, which may have set another, has been imported
    apply_math_mode(config.precision)
    return step


def _range_of_rank(config: RunConfig, rank: int) -> contextlib.AbstractContextManager[None]:
    """The range that names this rank in a profile; none around a step of one process."""
    return annotate(rank_range(rank)) if config.is_shared else contextlib.nullcontext()


def _forget_earlier_runs() -> None:
    """Release memory that an earlier run of this process left on the GPU, so that it is not in this
    run's peaks.

    Cached blocks are released too: a request served from a larger block may get up to 1 MiB more
    than it asked for.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _find_gpu(progress: Progress) -> GpuMonitor | None:
    """Find the GPU and warn about other processes on it; call it before this process has a
    context there.
    """
    if progress.config.device is Device.CPU:
        return None
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    progress.gpu = next(iter(visible_gpus()), None)
    why = "NVML does not answer"
    if progress.gpu is not None:
        try:
            monitor = GpuMonitor(progress.gpu.uuid)
            others = monitor.processes() - torch.cuda.is_initialized()
            monitor.state()  # some GPUs exist in NVML but have no power reading
        except pynvml.NVMLError as error:
            why = f"NVML: {error}"
        else:
            _warn_of_others(progress, others)
            return monitor
    progress.warn(
        WarningCode.NO_TELEMETRY, f"{why}: clocks, power and other processes are not known"
    )
    return None


def _warn_of_others(progress: Progress, others: int) -> None:
    """Warn of other processes on the GPU."""
    if others > 0:
        progress.warn(
            WarningCode.GPU_SHARED,
            f"{others} other process(es) held a context on this GPU; end them, run again",
        )


def _activity_monitor(progress: Progress, monitor: GpuMonitor | None) -> ActivityMonitor:
    """What reads the GPU's counters; it reads none under a profiler, which may use them."""
    gpu = progress.gpu
    if gpu is None or monitor is None or progress.config.profiler is not Profiler.NONE:
        return ActivityMonitor(None)
    return ActivityMonitor(gpu.uuid)


def _warm_up(
    step: TrainingStep, clock: Clock, progress: Progress, monitor: GpuMonitor | None
) -> None:
    """Run the warm-up, in its range and with the garbage collector off."""
    config = progress.config
    with (
        _collector_off(),
        annotate(Range.WARMUP),
        waits.waiting_for("warm-up steps", str(config.warmup_steps)),
        compilers_told(config),
    ):
        _run_warm_up(step, clock, progress, monitor)


def _run_warm_up(
    step: TrainingStep, clock: Clock, progress: Progress, monitor: GpuMonitor | None
) -> None:
    """Run the steps of the warm-up. Steps that GradScaler skips do not count; steps are added while
    the last one still compiles.
    """
    config = progress.config
    wanted = config.warmup_steps
    taken = 0
    while taken < wanted:
        if taken == wanted - 1:
            _settle(progress, monitor)
        graphs = step.compiled_graphs()
        taken += _warm_up_once(step, clock, progress, f"warm-up step {len(progress.warmup)}")
        _check_skipped(len(progress.warmup) - taken, wanted)
        if len(progress.warmup) == 1 and config.device is Device.CUDA:
            progress.first_step_peak_bytes = torch.cuda.max_memory_allocated()
        most = config.warmup_steps + MAX_EXTRA_WARMUP_STEPS
        # every rank takes as many steps as the others
        if taken == wanted and step.on_any_rank(step.compiled_graphs() > graphs) and wanted < most:
            wanted += 1
    if not taken:
        _settle(progress, monitor)
    if config.mode is Mode.TRAIN or not taken:
        advice = f"; use at least --warmup-steps {LEAST_TRAIN_WARMUP_STEPS}"
        progress.warn_of_short_warmup(taken, advice)


def _settle(progress: Progress, monitor: GpuMonitor | None) -> None:
    """Announce the timed steps, collect garbage, and read the GPU's state.

    All this comes before the last warm-up step, since the step after a pause is slower.
    """
    steps = progress.config.measured_steps
    seconds = steps * progress.warmup[-1].step_s if progress.warmup else 0
    how_long = f", about {seconds:.0f} s" if seconds >= 1 else ""
    waits.say(f"timed steps: {steps}{how_long}")
    gc.collect()
    progress.state_before = monitor.state() if monitor else None


def _warm_up_once(step: TrainingStep, clock: Clock, progress: Progress, where: str) -> bool:
    """Run one step of the warm-up; return whether it updated the weights."""
    progress.where = where
    times, is_taken = _run(step, clock, progress)
    progress.warmup.append(times)
    return is_taken


def _meet_under_nsys(config: RunConfig, where: str) -> None:
    """Wait for the other ranks: nsys captures all of them from when the first begins its measured
    steps to its end.

    To begin, it may wait until a device is idle, so the ranks meet on the host.
    """
    if config.is_shared and config.profiler is Profiler.NSYS:
        barrier_on_host(f"measured steps: {where}")


def _time(step: TrainingStep, clock: Clock, progress: Progress, activity: ActivityMonitor) -> None:
    """The timed loop: run steps until enough were measured; those that GradScaler skips do not
    count.
    """
    config = progress.config
    progress.collector_on = gc.isenabled()
    activity.between_steps()
    while _goes_on(progress):
        progress.where = f"measured step {len(progress.measured)}"
        times, is_taken = _run(step, clock, progress)
        if is_taken:
            progress.measured.append(times)
        else:
            progress.skipped_steps += 1
            _check_skipped(progress.skipped_steps, config.measured_steps)
        activity.between_steps()
    activity.between_steps(is_end=True)
    progress.subject = replace(config, measured_steps=len(progress.measured))


def _goes_on(progress: Progress) -> bool:
    """Whether another step is to be measured; with `until_stable`, say how well their mean is known
    so far.
    """
    times_s = [times.step_s for times in progress.measured]
    if len(times_s) < progress.config.measured_steps:
        return True
    if not progress.until_stable:
        return False
    half = steady_interval(times_s)
    reached = "no interval yet" if half is None else f"± {100 * half:.1f} %"
    waits.say(f"{counted(len(times_s), 'step')}, {reached}, wanted {100 * STABLE:g} %")
    return len(times_s) < MAX_STABLE_STEPS and (half is None or half > STABLE)


def _run(step: TrainingStep, clock: Clock, progress: Progress) -> tuple[StepTimes, bool]:
    """Run one step; return its times and whether it updated the weights. GradScaler skips steps
    that overflow.
    """
    times, loss = step(clock)
    value = loss.item()
    progress.losses.append(value if math.isfinite(value) else None)
    last = progress.loss_scale
    progress.loss_scale = step.loss_scale()
    return times, last is None or progress.loss_scale is None or progress.loss_scale >= last


def _check_skipped(skipped: int, wanted: int) -> None:
    if skipped > wanted + MAX_EXTRA_SKIPPED_STEPS:
        raise RuntimeError(f"GradScaler skipped {skipped} steps: the gradients are not finite")


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Turn Python's garbage collector off: a collection takes tens of milliseconds at an
    arbitrary moment.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _look_inside(
    step: TrainingStep, clock: Clock, progress: Progress, moments: list[MemoryMoment]
) -> tuple[Traffic, ...] | None:
    """Run one more step of a shared run, not timed; count what this rank sends, and note what it
    keeps in memory.

    None, without such a step, for a run in one process. The step is eager: a replayed graph
    launches its collectives without calling them, and keeps its gradients where they cannot be
    seen.
    """
    if step.way is None:
        return None
    from ..parallel.collectives import TrafficCounter

    step.give_up_graph()
    progress.where = "the step after the measured ones, whose traffic is counted"
    moment_after = {
        Phase.COMMUNICATION: MomentName.BEFORE_OPTIMIZER,
        Phase.OPTIMIZER: MomentName.AFTER_OPTIMIZER,
    }

    def look(ended: Phase | None) -> None:
        if ended in moment_after:
            moments.append(step.memory_now(moment_after[ended]))

    counter = TrafficCounter()
    with counter:
        step(ObservedClock(clock, look))
    return counter.traffic()


def _telemetry(
    monitor: GpuMonitor | None, progress: Progress, energy_before: float | None
) -> Telemetry | None:
    """The GPU's state before and after the measured steps, and the energy of one step."""
    if monitor is None or progress.state_before is None:
        return None
    energy = monitor.energy_j()
    after = monitor.state()
    steps = len(progress.measured) + progress.skipped_steps
    per_step = None if energy is None or energy_before is None else (energy - energy_before) / steps
    return Telemetry(before=progress.state_before, after=after, energy_per_step_j=per_step)


def _judge(
    progress: Progress, memory: Memory | None, telemetry: Telemetry | None, graphs: int
) -> None:
    """Add the warnings that follow from the finished run's memory and telemetry."""
    if graphs:
        progress.warn(
            WarningCode.RECOMPILED,
            f"torch.compile made {graphs} graph(s) while timing; use more --warmup-steps",
        )
    if memory and (memory.segments_allocated or memory.alloc_retries):
        progress.warn(
            WarningCode.ALLOCATOR_GREW,
            f"the allocator asked the driver for {memory.segments_allocated} segment(s) and "
            f"flushed its cache {memory.alloc_retries} time(s) while timing; use more "
            "--warmup-steps or a smaller batch",
        )
    if telemetry:
        progress.warn_if_throttled(telemetry)
        _warn_of_others(
            progress, max(telemetry.before.other_processes, telemetry.after.other_processes)
        )
    if progress.skipped_steps:
        progress.warn(
            WarningCode.SKIPPED_STEPS,
            f"GradScaler skipped {progress.skipped_steps} step(s); they are not timed",
        )
    if None in progress.losses:
        progress.warn(
            WarningCode.NOT_FINITE,
            f"the loss was not finite in {progress.losses.count(None)} step(s)",
        )


def _failed(progress: Progress, error: BaseException) -> RunRecord:
    """The record of a run that `error` ended; the memory snapshot is written, if one is taken."""
    status = classify(error)
    try:
        if progress.watch is not None:
            progress.watch.dump_memory()
    # a broken context or a full disk; the run's failure stays the result
    except (RuntimeError, OSError) as unwritten:
        progress.warn(
            WarningCode.NO_SNAPSHOT,
            f"the history of memory was not kept: {shortened(str(unwritten), LONGEST_PART)}",
        )
    failure = describe(error, status, progress.place, progress.config.device)
    return replace(progress.record(status), failure=failure)
