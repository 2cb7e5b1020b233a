"""Moments at which the phase of a watched loop changes, and the times between them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from threading import get_ident
from time import perf_counter_ns
from typing import NamedTuple

import torch

from ..config import Phase
from ..measure.clock import StepTimes
from .tokens import Pass, Tokens

OPAQUE = frozenset({Phase.BACKWARD, Phase.DATA})
"""Phases in which nothing else is seen: backward recomputes what a checkpoint dropped, and a data
set may call a model.
"""
MAX_WAITS = 64
"""Waits for data between two steps, as a validation has many, that are kept before they are summed
up.
"""


class Mark(NamedTuple):
    """A moment at which the phase changes; `event` is None on a CPU."""

    host_ns: int
    event: torch.cuda.Event | None

    def is_passed(self) -> bool:
        """Whether the device is here; not if it has failed, which the loop itself will find."""
        try:
            return self.event is None or self.event.query()
        except RuntimeError:
            return False


class Wait(NamedTuple):
    """A wait for data between two steps."""

    begin: Mark
    end: Mark


@dataclass(slots=True)
class LoopStep:
    """One step of the loop and what lies between it and the step before, as it was marked: its
    times are computed later, because a mark is to cost little.
    """

    before: Mark | None = None
    """The end of the step before, or of what this program did after it; None for the first step."""
    waits: list[Wait] = field(default_factory=list)
    """Waits for data between the steps, without those that `waited_s` has."""
    waited_s: float = 0.0
    phases: list[Phase] = field(default_factory=list)
    """The phase that begins at each of `marks`; at the end of the step, OTHER."""
    marks: list[Mark] = field(default_factory=list)
    """From the beginning of the step to its end."""
    passes: list[Pass] = field(default_factory=list)
    has_closure: bool = False
    """Whether a phase began within the optimizer's."""


@dataclass(slots=True, kw_only=True)
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
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.told: list[Callable[[Phase | None], None]] = []
        """Called with each phase of a step that begins, and with None at the step's end."""
        self._phases: list[Phase] = []
        """The open phases, the innermost last."""
        self._step: LoopStep | None = None
        """The open step, or what lies between two steps; None before the first step."""
        self._waits_from: Mark | None = None
        """The beginning of an open wait for data between steps."""
        self.in_step = False
        self._thread = 0
        self._events: list[torch.cuda.Event] = []

    def is_here(self) -> bool:
        """Whether the calling thread is that of the open step."""
        return self.in_step and self.is_own_thread()

    def is_own_thread(self) -> bool:
        """Whether the calling thread is that of the last step."""
        return get_ident() == self._thread

    def begin_step(self) -> None:
        """Begin a step on the calling thread."""
        if self._step is None:
            self._step = LoopStep()
        self._phases.clear()
        self._waits_from = None
        self._thread, self.in_step = get_ident(), True
        self._change(Phase.OTHER)

    def end_step(self) -> LoopStep | None:
        """End the step and return it; None if a phase that began did not end, as after an exception
        that the loop caught in the middle of the phase.
        """
        if self._phases:
            self.drop_step()
            return None
        ended = self._close()
        self._step = LoopStep(before=ended.marks[-1])
        return ended

    def drop_step(self) -> None:
        """Forget the step: its time lies between other steps, also what waited for data."""
        dropped = self._close()
        if dropped.before is not None:
            for phase, pair in zip(dropped.phases, pairwise(dropped.marks), strict=False):
                if phase is Phase.DATA:
                    self._add_wait(Wait(*pair))
        dropped.phases.clear()
        dropped.marks.clear()
        dropped.passes.clear()
        self._phases.clear()

    def resume(self) -> None:
        """Begin here what lies between two steps: what this program did since the end of the step
        is no time of the loop.
        """
        if self._step is not None:
            self._step.before = self._mark()

    def forget(self) -> None:
        """See nothing until the next step begins, so that nothing is known to lie before it."""
        if not self.in_step:
            self._step = self._waits_from = None

    def enter(self, phase: Phase) -> bool:
        """Begin a phase, and return whether it is seen, so that `leave` must end it."""
        inside = self._phases[-1] if self._phases else Phase.OTHER
        is_update = phase is Phase.OPTIMIZER and inside is Phase.BACKWARD
        # of a GPU, autograd runs on a thread of its own, and there an optimizer within backward
        if get_ident() != self._thread and not is_update:
            return False
        if not self.in_step:
            return phase is Phase.DATA and self._begin_wait()
        if phase is inside or (inside in OPAQUE and not is_update):
            return False
        # in a CUDA graph, an event would be a node, and not tell a time
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if inside is Phase.OPTIMIZER:
            self._open.has_closure = True
        self._phases.append(phase)
        self._change(phase)
        return True

    def leave(self) -> None:
        """End the innermost phase."""
        if self._waits_from is not None:
            wait = Wait(self._waits_from, self._mark())
            self._waits_from = None
            self._add_wait(wait)
        elif self._phases and self.in_step:
            self._phases.pop()
            self._change(self._phases[-1] if self._phases else Phase.OTHER)

    def note(self, seen: Pass) -> None:
        """Add a forward pass, which ends now, to the open step."""
        seen.end = len(self._open.marks)
        self._open.passes.append(seen)

    @property
    def num_marks(self) -> int:
        """Marks of the open step so far."""
        return len(self._open.marks)

    def recycle(self, step: LoopStep) -> None:
        """Take the events of a step that has been read; its last one begins the next step."""
        if not self._is_cuda:
            return
        used = [mark for wait in step.waits for mark in wait]
        used += step.marks[:-1]
        if step.before is not None:
            used.append(step.before)
        self._events += [mark.event for mark in used if mark.event is not None]

    @property
    def _open(self) -> LoopStep:
        assert self._step is not None
        return self._step

    def _begin_wait(self) -> bool:
        """Begin a wait for data between two steps, unless it is within another."""
        is_seen = self._step is not None and self._waits_from is None
        if is_seen:
            self._waits_from = self._mark()
        return is_seen

    def _add_wait(self, wait: Wait) -> None:
        """Keep a wait; those that are over are summed up once there are many."""
        step = self._open
        step.waits.append(wait)
        if len(step.waits) > MAX_WAITS:
            over = [wait for wait in step.waits if wait.end.is_passed()]
            step.waited_s += sum(_seconds(*wait) for wait in over)
            step.waits = step.waits[len(over) :]
            self.recycle(LoopStep(waits=over))

    def _change(self, phase: Phase) -> None:
        """Let a phase of the step begin."""
        step = self._step
        assert step is not None
        step.phases.append(phase)
        step.marks.append(self._mark())
        for tell in self.told:
            tell(phase)

    def _close(self) -> LoopStep:
        """Mark the end of the open step, and return it."""
        step = self._open
        step.phases.append(Phase.OTHER)
        step.marks.append(self._mark())
        self.in_step = False
        for tell in self.told:
            tell(None)
        return step

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return Mark(perf_counter_ns(), None)
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return Mark(perf_counter_ns(), event)


def resolved(step: LoopStep, tokens_of: Callable[[list[Pass]], Tokens]) -> WatchedStep:
    """The times of a step whose marks have all passed; `tokens_of` reads its forward passes."""
    _settle(step)
    first, last = step.marks[0], step.marks[-1]
    host_phases = _by_phase(step, [mark.host_ns for mark in step.marks])
    is_cuda = first.event is not None
    phases = host_phases
    if is_cuda:
        phases = _by_phase(step, _device_ns(step.marks))
    waited_s = step.waited_s
    for wait in step.waits:
        waited_s += _seconds(*wait)
    return WatchedStep(
        times=StepTimes(
            step_s=_seconds(first, last),
            host_s=(last.host_ns - first.host_ns) / 1e9,
            phases_s=phases,
            host_phases_s=host_phases if is_cuda else {},
        ),
        between_s=None if step.before is None else _seconds(step.before, first),
        between_data_s=round(waited_s, 9),
        tokens=tokens_of(step.passes),
    )


def _settle(step: LoopStep) -> None:
    """Name the parts of a step that only what follows tells.

    A forward pass in evaluation mode whose outputs no backward pass reaches is OTHER. Within an
    optimizer, what lies between a forward pass and backward is the closure's loss: OTHER.
    """
    phases = step.phases
    for seen in [seen for seen in step.passes if not seen.is_training]:
        step.passes.remove(seen)
        for index in range(seen.begin, seen.end):
            if phases[index] is Phase.FORWARD:
                phases[index] = Phase.OTHER
    if not step.has_closure:
        return
    for index in range(1, len(phases) - 1):
        is_between = phases[index - 1] is Phase.FORWARD and phases[index + 1] is Phase.BACKWARD
        if phases[index] is Phase.OPTIMIZER and is_between:
            phases[index] = Phase.OTHER


def _by_phase(step: LoopStep, moments_ns: list[int]) -> dict[Phase, float]:
    """The time of each phase, in whole nanoseconds, which sums of floats are not."""
    times_ns: dict[Phase, int] = {}
    begin_ns = moments_ns[0]
    for phase, end_ns in zip(step.phases, moments_ns[1:], strict=False):
        times_ns[phase] = times_ns.get(phase, 0) + end_ns - begin_ns
        begin_ns = end_ns
    return {phase: time_ns / 1e9 for phase, time_ns in times_ns.items()}


def _device_ns(marks: list[Mark]) -> list[int]:
    """When the device passed the marks, from the first one on."""
    moments_ns = [0]
    for mark, following in pairwise(marks):
        moments_ns.append(moments_ns[-1] + round(1e9 * _seconds(mark, following)))
    return moments_ns


def _seconds(begin: Mark, end: Mark) -> float:
    if begin.event is None or end.event is None:
        return (end.host_ns - begin.host_ns) / 1e9
    return round(float(begin.event.elapsed_time(end.event)) / 1e3, 9)
