"""Moments at which the phase of a watched step changes, and the times between them."""

from dataclasses import dataclass, field

import torch

from ..config import Phase
from ..measure.clock import StepTimes


@dataclass(slots=True)
class Mark:
    """A moment at which the phase changes; `event` is None on a CPU."""

    phase: Phase | None
    """The phase that begins here; None at the end of the step."""
    host_ns: int
    event: torch.cuda.Event | None


@dataclass(slots=True)
class LoopStep:
    """One step of the loop: its marks, and what went through the model."""

    marks: list[Mark] = field(default_factory=list)
    forwards: int = 0
    tokens: int = 0

    def is_over(self) -> bool:
        """Whether the device has passed the last mark."""
        event = self.marks[-1].event
        return event is None or event.query()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """A finished step."""

    times: StepTimes
    between_s: float | None
    """From the end of the step before to the beginning of this one, on the device; None for the
    first.
    """
    tokens: int
    """Elements of the first integer tensor that the model was given, summed over the step's
    forward passes.
    """


def resolved(step: LoopStep, before: Mark | None) -> WatchedStep:
    """The times of a step whose marks have all passed.

    What lies between a backward pass and another forward pass of the same step belongs to data,
    like what comes before the first forward pass.
    """
    first, last = step.marks[0], step.marks[-1]
    phases: dict[Phase, float] = {}
    host_phases: dict[Phase, float] = {}
    for mark, following in zip(step.marks, step.marks[1:], strict=False):
        assert mark.phase is not None
        phase = mark.phase
        if phase in (Phase.DATA, Phase.OPTIMIZER) and mark is not first:
            phase = Phase.DATA if following.phase is Phase.FORWARD else Phase.OPTIMIZER
        phases[phase] = phases.get(phase, 0.0) + _seconds(mark, following)
        host_phases[phase] = host_phases.get(phase, 0.0) + (following.host_ns - mark.host_ns) / 1e9
    host_s = (last.host_ns - first.host_ns) / 1e9
    times = StepTimes(
        step_s=_seconds(first, last),
        host_s=host_s,
        phases_s=phases,
        host_phases_s=host_phases if first.event is not None else {},
    )
    between_s = None if before is None else _seconds(before, first)
    return WatchedStep(times=times, between_s=between_s, tokens=step.tokens)


def _seconds(begin: Mark, end: Mark) -> float:
    if begin.event is None or end.event is None:
        return (end.host_ns - begin.host_ns) / 1e9
    return float(begin.event.elapsed_time(end.event)) / 1e3
