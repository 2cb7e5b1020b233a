"""Moments at which the phase of a watched loop changes, and the times between them."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import sub
from threading import get_ident
from time import perf_counter_ns
from typing import NamedTuple

import torch

from ..config import Phase
from ..measure.clock import StepTimes
from .tokens import Pass, Tokens

# in Python 3.11, reading a member of an enum is a call
DATA, FORWARD, BACKWARD = Phase.DATA, Phase.FORWARD, Phase.BACKWARD
OPTIMIZER, OTHER = Phase.OPTIMIZER, Phase.OTHER
OPAQUE = frozenset({BACKWARD, DATA})
"""Phases in which nothing else is seen: backward recomputes what a checkpoint dropped, and a data
set may call a model.
"""
BETWEEN = "between steps"
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
    phases: list[Phase] = field(default_factory=list)
    """The phases that began, from the beginning of the step; at its end, OTHER."""
    host_ns: list[int] = field(default_factory=list)
    """When they began."""
    events: list[torch.cuda.Event] = field(default_factory=list)
    """These moments on the device; empty on a CPU."""
    passes: list[Pass] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    """Waits for data between the steps, without those that `waited_s` has."""
    waited_s: float = 0.0
    has_closure: bool = False
    """Whether a phase began within the optimizer's."""

    def is_passed(self) -> bool:
        """Whether the device has done the step."""
        return not self.events or self.mark(-1).is_passed()

    def mark(self, index: int) -> Mark:
        """The moment at which a phase began."""
        return Mark(self.host_ns[index], self.events[index] if self.events else None)


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

    @property
    def interval_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.times.step_s + (self.between_s or 0.0)

    @property
    def has_update(self) -> bool:
        """Whether the optimizer ran."""
        return OPTIMIZER in self.times.phases_s

    def parts_s(self) -> dict[str, float]:
        """The parts of the interval: the phases, all that waits for data, and what else lies
        between the steps.
        """
        parts_s: dict[str, float] = {DATA: self.between_data_s}
        for phase, seconds in self.times.phases_s.items():
            parts_s[phase] = parts_s.get(phase, 0.0) + seconds
        parts_s[BETWEEN] = (self.between_s or 0.0) - self.between_data_s
        return parts_s


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
        self.thread = 0
        """The thread of the last step."""
        self._events: list[torch.cuda.Event] = []

    def begin_step(self) -> None:
        """Begin a step on the calling thread."""
        if self._step is None:
            self._step = LoopStep()
        self._phases.clear()
        self._waits_from = None
        self.thread, self.in_step = get_ident(), True
        self._begin(self._step, OTHER)

    def end_step(self) -> LoopStep | None:
        """End the step and return it; None if a phase that began did not end, as after an exception
        that the loop caught in the middle of the phase.
        """
        if self._phases:
            self.drop_step()
            return None
        ended = self._close()
        self._step = LoopStep(ended.mark(-1))
        return ended

    def drop_step(self) -> LoopStep:
        """Forget the step, and return it: its time lies between other steps, also what waited for
        data.
        """
        dropped = self._close()
        self._step = LoopStep(dropped.before, waits=dropped.waits, waited_s=dropped.waited_s)
        if dropped.before is not None:
            for index, phase in enumerate(dropped.phases):
                if phase is DATA:
                    self._add_wait(Wait(dropped.mark(index), dropped.mark(index + 1)))
        self._phases.clear()
        return dropped

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
        is_usual = not self._phases and self.in_step and get_ident() == self.thread
        if not is_usual and not self._sees_inside(phase):
            return False
        step = self._step
        if step is None or not self.in_step:
            return self._begin_wait()
        # in a CUDA graph, an event would be a node, and not tell a time
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        self._phases.append(phase)
        self._begin(step, phase)
        return True

    def leave(self) -> None:
        """End the innermost phase."""
        if self._waits_from is not None:
            wait = Wait(self._waits_from, self._mark())
            self._waits_from = None
            self._add_wait(wait)
        elif self._phases and self.in_step:
            self._phases.pop()
            assert self._step is not None
            self._begin(self._step, self._phases[-1] if self._phases else OTHER)

    def leave_forward(self, seen: Pass) -> None:
        """End a forward pass."""
        step = self._step
        assert step is not None
        seen.end = len(step.phases)
        step.passes.append(seen)
        self.leave()

    def num_marks(self) -> int:
        """Marks of the open step so far."""
        return 0 if self._step is None else len(self._step.phases)

    def recycle(self, step: LoopStep) -> None:
        """Take the events of a step that has been read; its last one begins the next step."""
        if not self._is_cuda:
            return
        used = [mark.event for wait in step.waits for mark in wait]
        used += step.events[:-1]
        if step.before is not None:
            used.append(step.before.event)
        self._events += [event for event in used if event is not None]

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

    def _sees_inside(self, phase: Phase) -> bool:
        """Whether a phase is seen that begins between steps, within another or on another thread;
        what begins within the optimizer's is its closure's.
        """
        inside = self._phases[-1] if self._phases else OTHER
        is_update = phase is OPTIMIZER and inside is BACKWARD
        # of a GPU, autograd runs on a thread of its own, and there an optimizer within backward
        if get_ident() != self.thread and not is_update:
            return False
        if not self.in_step:
            return phase is DATA
        if phase is inside or (inside in OPAQUE and not is_update):
            return False
        if inside is OPTIMIZER:
            self._open.has_closure = True
        return True

    def _begin(self, step: LoopStep, phase: Phase) -> None:
        """Let a phase of the step begin."""
        step.phases.append(phase)
        if self._is_cuda:
            step.events.append(self._event())
        step.host_ns.append(perf_counter_ns())
        for tell in self.told:
            tell(phase)

    def _close(self) -> LoopStep:
        """Mark the end of the open step, and return it."""
        step = self._step
        assert step is not None
        step.phases.append(OTHER)
        if self._is_cuda:
            step.events.append(self._event())
        step.host_ns.append(perf_counter_ns())
        self.in_step = False
        for tell in self.told:
            tell(None)
        return step

    def _mark(self) -> Mark:
        return Mark(perf_counter_ns(), self._event() if self._is_cuda else None)

    def _event(self) -> torch.cuda.Event:
        """An event that the device passes once it has done what was launched so far."""
        event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def resolved(step: LoopStep, tokens_of: Callable[[list[Pass]], Tokens]) -> WatchedStep:
    """The times of a step whose marks have all passed; `tokens_of` reads its forward passes."""
    if step.passes:
        _settle(step)
    first, last = step.mark(0), step.mark(-1)
    host_phases_s = _by_phase(step.phases, step.host_ns)
    is_cuda = bool(step.events)
    waited_s = step.waited_s
    for wait in step.waits:
        waited_s += _seconds(*wait)
    times = StepTimes(
        step_s=_seconds(first, last),
        host_s=(last.host_ns - first.host_ns) / 1e9,
        phases_s=_by_phase(step.phases, _device_ns(step.events)) if is_cuda else host_phases_s,
        host_phases_s=host_phases_s if is_cuda else {},
    )
    return WatchedStep(
        times=times,
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
            if phases[index] is FORWARD:
                phases[index] = OTHER
    if not step.has_closure:
        return
    for index in range(1, len(phases) - 1):
        is_between = phases[index - 1] is FORWARD and phases[index + 1] is BACKWARD
        if phases[index] is OPTIMIZER and is_between:
            phases[index] = OTHER


def _by_phase(phases: list[Phase], moments_ns: list[int]) -> dict[Phase, float]:
    """The time of each phase, in whole nanoseconds, which sums of floats are not."""
    times_ns = defaultdict[Phase, int](int)
    for phase, time_ns in zip(phases, map(sub, moments_ns[1:], moments_ns), strict=False):
        times_ns[phase] += time_ns
    return {phase: time_ns / 1e9 for phase, time_ns in times_ns.items()}


def _device_ns(events: list[torch.cuda.Event]) -> list[int]:
    """When the device passed the events, from the first one on."""
    moments_ns = [0]
    for event, following in pairwise(events):
        moments_ns.append(moments_ns[-1] + round(1e6 * event.elapsed_time(following)))
    return moments_ns


def _seconds(begin: Mark, end: Mark) -> float:
    if begin.event is None or end.event is None:
        return (end.host_ns - begin.host_ns) / 1e9
    return round(float(begin.event.elapsed_time(end.event)) / 1e3, 9)
