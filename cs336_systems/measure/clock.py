"""Clocks for one training step: the whole step and each of its phases, without slowing the step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns
from typing import Protocol, runtime_checkable

import torch

from ..config import Device, Phase, RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one step, in seconds."""

    step_s: float
    host_s: float
    """Time until the host had launched the whole step; for the rest of `step_s` it waited for
    the device.
    """
    phases_s: dict[Phase, float]
    host_phases_s: dict[Phase, float] = field(default_factory=dict)
    """Time that the host took to launch each phase; empty from HostClock, where it would equal
    `phases_s`.
    """


@runtime_checkable
class Clock(Protocol):
    """Times one step: `start`, then `lap` at the end of each phase, then `stop`."""

    def start(self) -> None:
        """Wait for the device, then start."""

    def lap(self, phase: Phase, end: torch.cuda.Event | None = None) -> None:
        """End `phase` here, or at the event `end`, which is already recorded in the stream."""

    def stop(self) -> StepTimes:
        """Wait for the device, then stop."""


class HostClock:
    """Reads the host's monotonic clock at the end of every phase.

    For a CPU; with `synchronize`, it is the textbook way to time a GPU, which slows the step.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        """`synchronize` waits for the device; a CPU needs no waiting."""
        self._synchronize = synchronize

    def start(self) -> None:
        """Begin to time a step, once the device is idle."""
        self._synchronize()
        self._phases: list[Phase] = []
        self._ends = [perf_counter_ns()]

    def lap(self, phase: Phase, end: torch.cuda.Event | None = None) -> None:
        """Note that a phase has ended, once the device has finished it."""
        assert end is None, "the host does not see when the device records an event"
        self._synchronize()
        self._phases.append(phase)
        self._ends.append(perf_counter_ns())

    def stop(self) -> StepTimes:
        """Times of the step and its phases in seconds, by the host's clock."""
        launched = perf_counter_ns()
        self._synchronize()
        end = perf_counter_ns()
        start = self._ends[0]
        times_s = ((end - begin) / 1e9 for begin, end in pairwise(self._ends))
        return StepTimes(
            step_s=(end - start) / 1e9,
            host_s=(launched - start) / 1e9,
            phases_s=_by_phase(self._phases, times_s),
        )


class EventClock:
    """Records a CUDA event on the current stream at the end of every phase, so the host never
    waits inside a step.
    """

    def __init__(self) -> None:
        """Start without CUDA events; they are made in the first step."""
        self._events: list[torch.cuda.Event] = []
        """All that were made; every step records them again, in this order."""

    def start(self) -> None:
        """Begin to time a step, once the device is idle."""
        torch.cuda.synchronize()
        self._phases: list[Phase] = []
        self._ends: list[torch.cuda.Event] = []
        self._host_ends = [perf_counter_ns()]
        self._record()

    def lap(self, phase: Phase, end: torch.cuda.Event | None = None) -> None:
        """Note on host and device that a phase has ended; `end` is an event that marks this
        already, such as one in a CUDA graph.
        """
        self._phases.append(phase)
        if end is None:
            self._record()
        else:
            self._ends.append(end)
        self._host_ends.append(perf_counter_ns())

    def stop(self) -> StepTimes:
        """Times in seconds: of the step by the host's clock, and of its phases on the device
        (between CUDA events) and on the host (launching them).
        """
        launched = perf_counter_ns()
        torch.cuda.synchronize()
        end = perf_counter_ns()
        start = self._host_ends[0]
        on_device = (begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self._ends))
        on_host = ((end - begin) / 1e9 for begin, end in pairwise(self._host_ends))
        return StepTimes(
            step_s=(end - start) / 1e9,
            host_s=(launched - start) / 1e9,
            phases_s=_by_phase(self._phases, on_device),
            host_phases_s=_by_phase(self._phases, on_host),
        )

    def _record(self) -> None:
        """Record the next CUDA event on the current stream; make it if no earlier step has."""
        if len(self._ends) == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[len(self._ends)]
        event.record()
        self._ends.append(event)


class ObservedClock:
    """Wraps a clock, and calls `observe` with None when a step begins, and with each phase when
    it has ended.
    """

    def __init__(self, clock: Clock, observe: Callable[[Phase | None], None]) -> None:
        """`observe` is called with each phase that has ended, and with None when a step begins."""
        self._clock, self._observe = clock, observe

    def start(self) -> None:
        """Begin to time a step, and tell the observer."""
        self._clock.start()
        self._observe(None)

    def lap(self, phase: Phase, end: torch.cuda.Event | None = None) -> None:
        """Note that a phase has ended, and tell the observer."""
        self._clock.lap(phase, end)
        self._observe(phase)

    def stop(self) -> StepTimes:
        """The times that the wrapped clock has measured."""
        return self._clock.stop()


def _by_phase(phases: Iterable[Phase], times_s: Iterable[float]) -> dict[Phase, float]:
    """The time of each phase; micro-batches repeat forward and backward, whose times add up."""
    sums: dict[Phase, float] = {}
    for phase, time_s in zip(phases, times_s, strict=True):
        sums[phase] = sums.get(phase, 0.0) + time_s
    return sums


def make_clock(config: RunConfig) -> Clock:
    """The clock for the configuration's device and `sync_phases`."""
    if config.device is Device.CPU:
        return HostClock()
    return HostClock(torch.cuda.synchronize) if config.sync_phases else EventClock()
