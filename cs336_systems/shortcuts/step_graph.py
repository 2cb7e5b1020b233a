"""A whole step as one CUDA graph: launched by one call of the host, however many kernels it has."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.clock import Clock, EventClock
from cs336_systems.config import Phase
from cs336_systems.data import Batch

EAGER_STEPS = 3
"""Before the capture: compiling, the optimizer's state, and a step that finds both there."""

Phases = Callable[[Batch, Clock], Float[Tensor, ""]]


class StepGraph:
    """Runs the phases of a step: the first steps as they are, then captured once and replayed.

    Every call is one step of training, the one that captures too. The batch is copied to where the graph reads it.
    """

    def __init__(self, phases: Phases, order: tuple[Phase, ...], captured: Callable[[], None]) -> None:
        """`order`: the phases that the graph holds; `captured` is called between the capture and the first replay."""
        self._phases = phases
        self._order = order
        self._captured = captured
        self._stream = torch.cuda.Stream()
        self._num_steps = 0
        self._batch: Batch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.peak_bytes: int | None = None
        """Allocated at most while the graph was captured, which a replay needs too but does not count; None before."""

    def __call__(self, batch: Batch, clock: Clock) -> Float[Tensor, ""]:
        """One step; the loss stays where it is, to be overwritten by the next."""
        assert isinstance(clock, EventClock)
        self._num_steps += 1
        if self._num_steps <= EAGER_STEPS:
            return self._eagerly(batch, clock)
        is_first = self._graph is None
        if is_first:
            self._capture(batch, clock)
        assert self._batch is not None
        assert self._graph is not None
        for static, fresh in zip(self._batch, batch, strict=True):
            if static is not fresh:
                static.copy_(fresh)
        self._graph.replay()
        if not is_first:  # while it was captured, the clock was told of each phase
            clock.replayed(self._order)
        return self._loss

    def _eagerly(self, batch: Batch, clock: Clock) -> Float[Tensor, ""]:
        """On the stream of the capture, where autograd and the libraries then have all they need."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            loss = self._phases(batch, clock)
        here.wait_stream(self._stream)
        return loss

    def _capture(self, batch: Batch, clock: EventClock) -> None:
        self._batch = batch
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._loss = self._phases(batch, clock).detach()
        self.peak_bytes = torch.cuda.max_memory_allocated()
        self._captured()
