"""The parts that watch one loop, and the record of what they have seen of its steps."""

import statistics
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..analysis.loop_advice import loop_warnings
from ..analysis.warnings import launch_bound_phases
from ..config import Device, Mode, Phase, Profiler
from ..costs.accounting import mfu as share_of_peak
from ..loop_record import LoopFlops, LoopRecord, SlowStep
from ..measure.progress import Progress
from ..record import Measurement, RunRecord, RunWarning, Status, Telemetry, WarningCode
from ..subject import WatchedLoop
from .flops import LoopTracer
from .gpu import LoopGpu
from .growth import Growth, allocated_on_gpu
from .hooks import Hooks
from .live import Live, Sums
from .marks import Timeline, WatchedStep
from .observer import TROUBLES, Observer, Observers
from .out_of_memory import OutOfMemoryExplainer
from .pauses import Pauses
from .profiled import Profiled
from .ranks import Ranks, Syncs
from .slow_steps import SlowSteps
from .steps import Steps
from .tokens import AxisOrder, PassReader

WHAT_TO_WATCH = (
    "give watch the model that the loop calls (model(...), not model.forward(...), and the "
    "outermost wrapper)"
)
NO_CALL = f"no call of the model was seen, so the phases are empty: {WHAT_TO_WATCH}"
NO_TRAINING = (
    "all calls of the model that were seen ran without gradients, or in evaluation mode without a "
    "backward, which are no forward of a training step, so the phases are empty: if the loop "
    f"trains, {WHAT_TO_WATCH}"
)


class Parts:
    """What watches a loop with these models and optimizers of PyTorch, and makes its records.

    `unseen` has, in a sentence each, what cannot be seen of it; `every` is the number of steps
    between two lines that it shows.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        loop: WatchedLoop,
        directory: Path,
        unseen: Sequence[str],
        every: int | None,
    ) -> None:
        self._loop, self._unseen = loop, unseen
        self._num_troubles = len(TROUBLES)
        """Those of loops that were watched before."""
        device = device_of(models)
        has_profiler = loop.profiler is not Profiler.NONE
        self._models = tuple(map(weakref.ref, models))
        self._num_parameters = _num_parameters(models)
        self.gpu = gpu = None
        if loop.device is Device.CUDA:
            self.gpu = gpu = LoopGpu(counts_activity=not has_profiler)
        self.timeline = Timeline(device)
        self.pauses = Pauses()
        self.reader = PassReader(models, device)
        self.steps = Steps(self.timeline, self.reader, loop.warmup_steps, has_profiler=has_profiler)
        self.profiled = Profiled(models[0], optimizers, loop, directory)
        self._slow_steps = SlowSteps(self.pauses, None if gpu is None else gpu.throttled_s)
        self._syncs = Syncs(models)
        self._growth = Growth(allocated_on_gpu)
        self.ranks = Ranks(loop.name, models, self._slow_steps)
        self.out_of_memory = OutOfMemoryExplainer(models, optimizers, self.reader, device)
        self.tracer = LoopTracer(self.reader)
        self.hooks = Hooks(self.timeline, models, optimizers, self.reader, self.pauses)
        self.live = Live(loop.name, self.steps.measured, every, self.mfu, self.ranks)
        self._progress = Progress(subject=loop, gpu=None if gpu is None else gpu.gpu)
        self.steps.observers = Observers(self._observers())
        self.timeline.told = self.steps.observers.phase_begins

    def _observers(self) -> list[Observer]:
        """The parts that look at steps, in the order in which they are told."""
        # the first, so that what other parts do lies in no pause
        observers: list[Observer] = [self._slow_steps]
        if self.gpu is not None:
            observers.append(self.gpu)
        if self.profiled.has_profiler:
            observers.append(self.profiled)
        observers += [self.ranks, self.live]
        if self.gpu is not None:
            observers.append(self._growth)
        if self._syncs.sees_model:  # else its calls at each phase would only cost time
            observers.append(self._syncs)
        return [*observers, self.out_of_memory]

    def record(self) -> RunRecord:
        """The record of the steps so far; waits until the device has done them.

        Raise RuntimeError before the first step that counts.
        """
        for observer in self.steps.observers.parts:
            observer.finish()
        self.steps.settle()
        steps = self.steps.reported
        progress = replace(
            self._progress,
            num_parameters=self.num_parameters,
            warmup=[step.times for step in self.steps.warmup],
            measured=[step.times for step in steps],
            warnings=[],
        )
        if steps:
            return self._finished(progress, steps)
        lacking = self.out_of_memory
        if lacking.last is None:
            raise RuntimeError(f"watch: no step to report: {self._why_none(len(progress.warmup))}")
        return replace(
            progress.record(Status.OOM),
            failure=lacking.failure,
            seen=LoopRecord(out_of_memory=lacking.last),
        )

    def _why_none(self, warmup: int) -> str:
        """Why there is no step to report after so many warm-up steps, and what to do."""
        if not self.steps.num_ended:
            return (
                "none has ended; put the code of each step of the loop into `with watched.step():`"
            )
        return (
            f"{warmup} of {self._loop.warmup_steps} warm-up steps are done; watch more steps, or "
            "give watch(..., warmup_steps=0)"
        )

    def _finished(self, progress: Progress, steps: Sequence[WatchedStep]) -> RunRecord:
        """The record of a loop with measured steps."""
        gpu = self.gpu
        telemetry = None if gpu is None else gpu.telemetry()
        progress.subject = described(self._loop, steps, self.reader.order)
        measured = all_measurements(steps)
        host_phases = measurements([step.times.host_phases_s for step in steps])
        self._judge(progress, telemetry, measured, host_phases)
        return replace(
            progress.finished(),
            measurements=measured,
            host_phases=host_phases,
            between_s=tuple(step.between_s for step in steps if step.between_s is not None),
            seen=self._seen(steps),
            memory=None if gpu is None else gpu.memory(),
            telemetry=telemetry,
            activity=None if gpu is None else gpu.activity(),
        )

    def _seen(self, steps: Sequence[WatchedStep]) -> LoopRecord:
        """What was seen of these steps besides times."""
        flops, reason = self.flops(steps)
        slow_steps: tuple[SlowStep, ...] = ()
        if not self.profiled.has_profiler:  # which slows steps by itself
            slow_steps = self._slow_steps.slow_steps(self.steps.warmup, steps)
        tokens = tuple(step.tokens.count or 0 for step in steps)
        lengths = context_lengths(steps, self.reader.order)
        later = [step for step in steps if step.between_s is not None]
        padding_tokens = masked_tokens = None
        masked = [step.tokens for step in steps if step.tokens.padding is not None]
        if masked:
            padding_tokens = sum(counts.padding or 0 for counts in masked)
            masked_tokens = sum(counts.count or 0 for counts in masked)
        return LoopRecord(
            tokens=tokens if any(tokens) else (),
            context_lengths=(min(lengths), max(lengths)) if lengths else None,
            padding_tokens=padding_tokens,
            masked_tokens=masked_tokens,
            between_data_s=tuple(step.between_data_s for step in later),
            flops=flops,
            not_traced=reason,
            slow_steps=slow_steps,
            growth=self._growth.growth(self.steps.first_kept),
            syncs_per_update=self._syncs.per_update,
            rank=self.ranks.rank(steps),
            out_of_memory=self.out_of_memory.last,
        )

    def flops(self, steps: Collection[WatchedStep]) -> tuple[LoopFlops | None, str]:
        """The FLOPs of the mean of these steps, and why they are not known. The first call traces
        the model, which takes time that is not the loop's.
        """
        num_traced = self.tracer.num_traced
        flops, reason = self.tracer.flops(steps)
        if self.tracer.num_traced != num_traced:
            self.timeline.forget()
        return flops, reason

    def mfu(self, sums: Sums) -> float | None:
        """MFU of these steps; None before the model was traced, and where FLOPs, precision or the
        device's peak are not known.
        """
        flops, steps = self.tracer.last, self.steps.measured
        if flops is None or self.gpu is None or not steps or not sums.loop_s:
            return None
        precision = steps[-1].tokens.precision
        if precision is None:
            return None
        rate = flops.per_step * sums.steps / sums.loop_s
        return share_of_peak(rate, torch.cuda.get_device_name(), precision)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, shared ones once; of models that are gone, as it was."""
        models = [model for reference in self._models if (model := reference()) is not None]
        if models:
            self._num_parameters = _num_parameters(models)
        return self._num_parameters

    def _judge(
        self,
        progress: Progress,
        telemetry: Telemetry | None,
        measured: tuple[Measurement, ...],
        host_phases: tuple[Measurement, ...],
    ) -> None:
        """Add the warnings that follow from the times and the telemetry."""
        if all(measured[-1].times_s):  # a coarse clock may show 0
            launched_s = launch_bound_phases(measured, host_phases)
            progress.warnings += loop_warnings(measured, launched_s)
        phases = {measurement.phase for measurement in measured}
        unseen = list(self._unseen)
        if Phase.FORWARD not in phases:
            is_called = self.pauses.has_evaluated or self.reader.order.num_passes > 0
            unseen.append(NO_TRAINING if is_called else NO_CALL)
        unseen += [
            f"an error of this program's own: {trouble}"
            for trouble in TROUBLES[self._num_troubles :]
        ]
        for message in unseen:
            progress.warnings.append(RunWarning(code=WarningCode.NOT_SEEN, message=message))
        if Phase.OPTIMIZER in phases:
            progress.warn_of_short_warmup(len(progress.warmup))
        if telemetry is not None:
            progress.warn_if_throttled(telemetry)


def device_of(models: Iterable[nn.Module]) -> torch.device:
    """Where the loop runs: where the first parameter or buffer is that is loaded."""
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            # tensors that are not loaded yet are on "meta", whatever the device
            if tensor.device.type != "meta":
                return tensor.device
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _num_parameters(models: Iterable[nn.Module]) -> int:
    """Elements of all parameters, shared ones once."""
    parameters = {parameter for model in models for parameter in model.parameters()}
    return sum(map(Tensor.numel, parameters))


def measurements(steps: Sequence[Mapping[Phase, float]]) -> tuple[Measurement, ...]:
    """The times of each phase that any step has, 0 in those that do not have it.

    The optimizer's are those of the steps that have it. Where no forward pass was seen, nothing is
    known but the time that waited for data.
    """
    has_forward = any(Phase.FORWARD in times_s for times_s in steps)
    measured = []
    for phase in Phase:
        having = [times_s for times_s in steps if phase in times_s]
        if not having or not (has_forward or phase is Phase.DATA):
            continue
        counted = having if phase is Phase.OPTIMIZER else steps
        times_s = tuple(times_s.get(phase, 0.0) for times_s in counted)
        measured.append(Measurement(phase, times_s))
    return tuple(measured)


def all_measurements(steps: Sequence[WatchedStep]) -> tuple[Measurement, ...]:
    """The times of the phases, then those of the whole steps."""
    phases = measurements([step.times.phases_s for step in steps])
    return (*phases, Measurement(Phase.STEP, tuple(step.times.step_s for step in steps)))


def context_lengths(steps: Sequence[WatchedStep], order: AxisOrder) -> set[int]:
    """The lengths of the sequences of all forward passes; empty unless all are known."""
    shapes = {shape for step in steps for shape in step.tokens.shapes}
    lengths = {order.length(shape) for shape in shapes}
    known = {length for length in lengths if length is not None}
    return known if len(known) == len(lengths) else set()


def described(loop: WatchedLoop, steps: Sequence[WatchedStep], order: AxisOrder) -> WatchedLoop:
    """The loop with what was seen of it; what differs from step to step is left out."""
    phases = {phase for step in steps for phase in step.times.phases_s}
    tokens = [step.tokens.count or 0 for step in steps]
    lengths = context_lengths(steps, order)
    precisions = {step.tokens.precision for step in steps} - {None}
    return replace(
        loop,
        measured_steps=len(steps),
        mode=_mode(phases),
        precision=precisions.pop() if len(precisions) == 1 else None,
        context_length=lengths.pop() if len(lengths) == 1 else None,
        tokens_per_step=statistics.median_low(tokens) or None,
    )


def _mode(phases: set[Phase]) -> Mode | None:
    """How much of a training step the loop runs; None if no forward pass was seen, and after a
    backward without an optimizer: the loop may update by code of its own, which is not seen.
    """
    if Phase.FORWARD not in phases:
        return None
    if Phase.OPTIMIZER in phases:
        return Mode.TRAIN
    return None if Phase.BACKWARD in phases else Mode.FORWARD
