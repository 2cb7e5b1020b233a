"""A step as CUDA graphs, one for each phase, each of which the host launches by one call."""

from collections.abc import Callable, Iterator

import torch

from cs336_systems.config import EAGER_STEPS_BEFORE_GRAPH, Phase
from cs336_systems.model.annotate import annotate
from cs336_systems.model.batches import Batch

Phases = Callable[[Batch], Iterator[Phase]]
"""Launches the phases of a step, and yields each after it was launched."""


class StepGraph:
    """Runs the phases of a step: the first steps eagerly; the next one captures them, and is replayed from then on.

    Every call is one training step, including the one that captures. The batch is copied to where the graphs read it.
    Each phase has a graph of its own, because clocks and profilers see no boundary inside a graph; the device goes from
    one graph to the next without waiting for the host.
    """

    def __init__(self, phases: Phases, order: tuple[Phase, ...], captured: Callable[[], None]) -> None:
        """`order` lists the phases that `phases` yields; `captured` is called between capture and first replay."""
        self._phases = phases
        self._order = order
        self._captured = captured
        self._stream = torch.cuda.Stream()
        self._num_steps = 0
        self._batch: Batch | None = None
        self._graphs: dict[Phase, torch.cuda.CUDAGraph] = {}
        self.peak_bytes: int | None = None
        """Peak of memory during the capture, which replays need but do not report; None before the capture."""

    def __call__(self, batch: Batch, lap: Callable[[Phase], None]) -> None:
        """One step; `lap` is called after each phase. The next step overwrites its results."""
        self._num_steps += 1
        if self._num_steps <= EAGER_STEPS_BEFORE_GRAPH:
            self._eagerly(batch, lap)
            return
        if self._batch is None:
            self._batch = batch
            self._capture(batch)
        for static, fresh in zip(self._batch, batch, strict=True):
            if static is not fresh:
                static.copy_(fresh)
        for phase, graph in self._graphs.items():
            with annotate(phase):
                graph.replay()
            lap(phase)

    def _eagerly(self, batch: Batch, lap: Callable[[Phase], None]) -> None:
        """Run on the capture's stream, so that autograd and the libraries have set up what they need there."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for phase in self._phases(batch):
                lap(phase)
        here.wait_stream(self._stream)

    def _capture(self, batch: Batch) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        pool = torch.cuda.graph_pool_handle()  # a phase may reuse memory that an earlier one has freed
        running = self._phases(batch)
        for phase in self._order:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                captured = next(running)
            assert captured is phase
            self._graphs[phase] = graph
        self.peak_bytes = torch.cuda.max_memory_allocated()
        self._captured()
