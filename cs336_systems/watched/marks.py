"""Moments at which the phase of a watched loop changes, and the times between them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from threading import get_ident
from time import perf_counter_ns

import torch

from ..config import Device, Phase
from ..measure.clock import StepTimes
from .tokens import Pass, Tokens, tokens_of

OPAQUE = frozenset({Phase.BACKWARD, Phase.DATA})
"""Phases in which nothing else is seen: backward recomputes what a checkpoint dropped, and a data
set may call a model.
"""


@dataclass(slots=True)
class Mark:
    """A moment at which the phase changes; `event` is None on a CPU."""

    phase: Phase
    """The phase that begins here; at the end of a step, OTHER."""
    host_ns: int
    event: torch.cuda.Event | None


@dataclass(slots=True)
class LoopStep:
    """One step of the loop and what lies between it and the step before."""

    marks: list[Mark] = field(default_factory=list)
    """From the end of the step before; of the first step, from its beginning."""
    begin: int = 0
    """Index of the mark at which the step itself begins."""
    passes: list[Pass] = field(default_factory=list)

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
    between_data_s: float
    """How much of `between_s` waited for data."""
    tokens: Tokens
    """What went through the model in forward passes."""


class Timeline:
    """Records when the phases of a loop begin and end, on the thread that runs its steps.

    Phases nest: an optimizer's closure runs forward and backward. What is inside of none is OTHER.
    `begins` is called with each phase of a step that begins, and with None at the step's end.
    """

    def __init__(self, device: Device, begins: Callable[[Phase | None], None]) -> None:
        self._is_cuda = device is Device.CUDA
        self._begins = begins
        self._phases: list[Phase] = []
        """The open phases, the innermost last."""
        self._step: LoopStep | None = None
        """The open step, or what lies between two steps; None before the first step."""
        self.in_step = False
        self._thread = 0
        self._events: list[torch.cuda.Event] = []

    def is_here(self) -> bool:
        """Whether the calling thread is that of the open step."""
        return self.in_step and get_ident() == self._thread

    def begin_step(self) -> None:
        """Begin a step on the calling thread."""
        if self._step is None:
            self._step = LoopStep()
        self._phases.clear()
        self._thread, self.in_step = get_ident(), True
        self._step.begin = len(self._step.marks)
        self._mark(Phase.OTHER)

    def end_step(self) -> LoopStep | None:
        """End the step and return it; None if a phase that began did not end, as where an exception
        was caught that leaves no trace.
        """
        if self._phases:
            self.drop_step()
            return None
        ended = self._open
        self._mark(Phase.OTHER)
        self.in_step = False
        self._begins(None)
        last = ended.marks[-1]
        self._step = LoopStep([Mark(Phase.OTHER, last.host_ns, last.event)])
        return ended

    def drop_step(self) -> None:
        """Forget the step: its time lies between other steps."""
        self._phases.clear()
        self._mark(Phase.OTHER)
        self.in_step = False
        self._begins(None)
        self._open.passes.clear()
        for mark in self._open.marks[self._open.begin :]:
            if mark.phase is not Phase.DATA:
                mark.phase = Phase.OTHER

    def enter(self, phase: Phase) -> bool:
        """Begin a phase, and return whether it is seen, so that `leave` must end it."""
        inside = self._phases[-1] if self._phases else Phase.OTHER
        is_update = phase is Phase.OPTIMIZER and inside is Phase.BACKWARD
        # of a GPU, autograd runs on a thread of its own, and there an optimizer within backward
        if get_ident() != self._thread and not is_update:
            return False
        if not self.in_step and phase is not Phase.DATA:
            return False
        if phase is inside or (inside in OPAQUE and not is_update):
            return False
        self._phases.append(phase)
        self._mark(phase)
        return True

    def leave(self) -> None:
        """End the innermost phase."""
        if self._phases:
            self._phases.pop()
            self._mark(self._phases[-1] if self._phases else Phase.OTHER)

    def note(self, seen: Pass) -> None:
        """Add what a forward pass of the open step was given."""
        seen.mark = len(self._open.marks) - 1
        self._open.passes.append(seen)

    def recycle(self, step: LoopStep) -> None:
        """Take the events of a step that has been read; its last one begins the next step."""
        self._events += [mark.event for mark in step.marks[:-1] if mark.event is not None]

    @property
    def _open(self) -> LoopStep:
        assert self._step is not None
        return self._step

    def _mark(self, phase: Phase) -> None:
        event = None
        if self._is_cuda:
            event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
            event.record()
        self._open.marks.append(Mark(phase, perf_counter_ns(), event))
        if self.in_step:
            self._begins(phase)


def resolved(step: LoopStep) -> WatchedStep:
    """The times of a step whose marks have all passed."""
    _settle(step)
    between_data_s = 0.0
    for mark, following in pairwise(step.marks[: step.begin + 1]):
        if mark.phase is Phase.DATA:
            between_data_s += _seconds(mark, following)
    marks = step.marks[step.begin :]
    phases: dict[Phase, float] = {}
    host_phases: dict[Phase, float] = {}
    for mark, following in pairwise(marks):
        phases[mark.phase] = phases.get(mark.phase, 0.0) + _seconds(mark, following)
        host_s = (following.host_ns - mark.host_ns) / 1e9
        host_phases[mark.phase] = host_phases.get(mark.phase, 0.0) + host_s
    first, last = marks[0], marks[-1]
    times = StepTimes(
        step_s=_seconds(first, last),
        host_s=(last.host_ns - first.host_ns) / 1e9,
        phases_s=_rounded(phases),
        host_phases_s=_rounded(host_phases) if first.event is not None else {},
    )
    return WatchedStep(
        times=times,
        between_s=_seconds(step.marks[0], first) if step.begin else None,
        between_data_s=round(between_data_s, 9),
        tokens=tokens_of(step.passes),
    )


def _settle(step: LoopStep) -> None:
    """Name the parts of a step that only what follows tells.

    A forward pass in evaluation mode is one of training if backward follows, and else OTHER. Within
    an optimizer, what lies between a forward pass and backward is the closure's loss: OTHER.
    """
    backwards = [at for at, mark in enumerate(step.marks) if mark.phase is Phase.BACKWARD]
    last_backward = backwards[-1] if backwards else -1
    for seen in step.passes:
        if not seen.is_training and seen.mark > last_backward:
            step.marks[seen.mark].phase = Phase.OTHER
            seen.clear()
    for at in backwards:
        before = step.marks[max(at - 2, 0) : at]
        if [mark.phase for mark in before] == [Phase.FORWARD, Phase.OPTIMIZER]:
            before[1].phase = Phase.OTHER


def _rounded(times_s: dict[Phase, float]) -> dict[Phase, float]:
    """The times as whole nanoseconds, which sums of floats are not."""
    return {phase: round(time_s, 9) for phase, time_s in times_s.items()}


def _seconds(begin: Mark, end: Mark) -> float:
    if begin.event is None or end.event is None:
        return (end.host_ns - begin.host_ns) / 1e9
    return round(float(begin.event.elapsed_time(end.event)) / 1e3, 9)
