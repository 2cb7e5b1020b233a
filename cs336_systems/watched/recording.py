"""The record of a watched loop: what its parts have seen of the steps so far."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from ..analysis.loop_advice import loop_warnings
from ..analysis.warnings import launch_bound_phases
from ..config import Phase
from ..costs.accounting import mfu as share_of_peak
from ..loop_record import LoopFlops, LoopRecord
from ..measure.run import Progress
from ..record import Measurement, RunRecord, RunWarning, Status, Telemetry, WarningCode
from ..subject import WatchedLoop
from .live import Sums
from .marks import WatchedStep
from .observer import TROUBLES
from .parts import Parts
from .summary import all_measurements, described, measurements, seen_of

NO_FORWARD = (
    "no training forward pass of the model was seen, so the phases are empty: give watch the model "
    "that the loop calls (model(...), not model.forward(...), and the outermost wrapper)"
)


class Recorder:
    """Makes records of a loop; `unseen` has, in a sentence each, what cannot be seen of it."""

    def __init__(self, loop: WatchedLoop, parts: Parts, unseen: Sequence[str]) -> None:
        self._loop, self._parts, self._unseen = loop, parts, unseen
        gpu = parts.gpu
        self._progress = Progress(subject=loop, gpu=gpu.gpu if gpu is not None else None)

    def record(self) -> RunRecord:
        """The record of the steps so far; waits until the device has done them.

        Raise RuntimeError before the first step that counts.
        """
        parts = self._parts
        for observer in parts.steps.observers.parts:
            observer.finish()
        parts.steps.settle()
        steps = parts.steps.reported
        progress = replace(
            self._progress,
            num_parameters=parts.num_parameters,
            warmup=[step.times for step in parts.steps.warmup],
            measured=[step.times for step in steps],
            warnings=[],
        )
        if steps:
            return self._finished(progress, steps)
        lacking = parts.out_of_memory
        if lacking.last is None:
            raise RuntimeError(
                f"watch: no step to report: {len(progress.warmup)} of {self._loop.warmup_steps} "
                "warm-up steps are done; watch more steps, or give watch(..., warmup_steps=0)"
            )
        return replace(
            progress.record(Status.OOM),
            failure=lacking.failure,
            seen=LoopRecord(out_of_memory=lacking.last),
        )

    def _finished(self, progress: Progress, steps: Sequence[WatchedStep]) -> RunRecord:
        """The record of a loop with measured steps."""
        parts, gpu = self._parts, self._parts.gpu
        telemetry = None if gpu is None else gpu.telemetry()
        progress.subject = described(self._loop, steps, parts.reader.order)
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
        parts = self._parts
        flops, reason = self.flops(steps)
        # a profiler slows steps by itself
        has_slow = not parts.profiled.has_profiler
        return replace(
            seen_of(steps, parts.reader.order),
            flops=flops,
            not_traced=reason,
            slow_steps=parts.slow_steps.slow_steps(parts.steps.warmup, steps) if has_slow else (),
            growth=parts.growth.growth(parts.steps.first_kept),
            syncs_per_update=parts.syncs.per_update,
            rank=parts.ranks.rank(steps),
            out_of_memory=parts.out_of_memory.last,
        )

    def flops(self, steps: Collection[WatchedStep]) -> tuple[LoopFlops | None, str]:
        """The FLOPs of the mean of these steps, and why they are not known. The first call traces
        the model, which takes time that is not the loop's.
        """
        num_traced = self._parts.tracer.num_traced
        flops, reason = self._parts.tracer.flops(steps)
        if self._parts.tracer.num_traced != num_traced:
            self._parts.timeline.forget()
        return flops, reason

    def mfu(self, sums: Sums) -> float | None:
        """MFU of these steps; None before the model was traced, and where FLOPs, precision or the
        device's peak are not known.
        """
        flops, steps = self._parts.tracer.last, self._parts.steps.measured
        if flops is None or self._parts.gpu is None or not steps or not sums.loop_s:
            return None
        precision = steps[-1].tokens.precision
        if precision is None:
            return None
        rate = flops.per_step * sums.steps / sums.loop_s
        return share_of_peak(rate, torch.cuda.get_device_name(), precision)

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
            unseen.append(NO_FORWARD)
        unseen += [f"an error of this program's own: {trouble}" for trouble in TROUBLES]
        for message in unseen:
            progress.warnings.append(RunWarning(code=WarningCode.NOT_SEEN, message=message))
        if Phase.OPTIMIZER in phases:
            progress.warn_of_short_warmup(len(progress.warmup))
        if telemetry is not None:
            progress.warn_if_throttled(telemetry)
