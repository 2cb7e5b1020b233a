"""A step as CUDA graphs, one for each phase; the host launches a graph by one call."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from ...config import EAGER_STEPS_BEFORE_GRAPH, Phase
from ...waits import waiting_for
from ..annotate import annotate

LaunchPhases = Callable[[Sequence[Tensor]], Iterator[Phase]]
"""Launches the phases of a step from its tokens and targets, and yields each after that."""
Lap = Callable[[Phase, torch.cuda.Event | None], None]
"""Notes that a phase ends here, or at the event."""


class StepGraph:
    """Runs the phases of a step: the first steps eagerly; the next one captures graphs, and later
    ones replay these.

    The batch is copied to where the graphs read it. Each phase has a graph of its own, because
    clocks and profilers see no boundary inside a graph; the device goes from one graph to the next
    without waiting for the host. A phase whose kernels begin in the phase before, such as
    collectives that start in backward, shares its graph, which records an event where the first
    ends.
    """

    def __init__(
        self,
        phases: LaunchPhases,
        order: tuple[Phase, ...],
        captured: Callable[[], None],
        joined: Collection[Phase],
    ) -> None:
        """`order` lists the phases that `phases` yields, of which those of `joined` share the graph
        of the phase before; `captured` is called between capture and first replay.
        """
        self._phases = phases
        self._groups: list[list[Phase]] = []
        """The phases of each graph."""
        for phase in order:
            if phase in joined:
                self._groups[-1].append(phase)
            else:
                self._groups.append([phase])
        self._captured = captured
        # kernels of the step have priority over those of other streams
        self._stream = torch.cuda.Stream(priority=-1)
        self._num_steps = 0
        self._batch: Sequence[Tensor] | None = None
        self._graphs: list[tuple[torch.cuda.CUDAGraph, list[Phase], list[torch.cuda.Event]]] = []
        """Each with its phases, and an event at the end of each of them but the last."""
        self.peak_bytes: int | None = None
        """Peak of allocated memory during the capture, which replays need but do not report."""

    def __call__(self, batch: Sequence[Tensor], lap: Lap) -> None:
        """One step; `lap` is called after each phase. The next step overwrites its results."""
        self._num_steps += 1
        if self._num_steps <= EAGER_STEPS_BEFORE_GRAPH:
            self._eagerly(batch, lap)
            return
        if self._batch is None:
            self._batch = batch
            with waiting_for("capturing CUDA graphs"):
                self._capture(batch)
        for static, fresh in zip(self._batch, batch, strict=True):
            if static is not fresh:
                static.copy_(fresh)
        for graph, phases, ends in self._graphs:
            with annotate(phases[0]):
                graph.replay()
            for phase, end in zip(phases, (*ends, None), strict=True):
                lap(phase, end)

    def release(self) -> None:
        """Free the graphs: NCCL keeps its communicator while a graph holds a collective."""
        for graph, _, _ in self._graphs:
            graph.reset()
        self._graphs.clear()

    def _eagerly(self, batch: Sequence[Tensor], lap: Lap) -> None:
        """Run on the capture's stream, so that autograd and the libraries initialise there."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for phase in self._phases(batch):
                lap(phase, None)
        here.wait_stream(self._stream)

    def _capture(self, batch: Sequence[Tensor]) -> None:
        """Capture one graph for each group of phases, all from one run of them."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # shared, so a phase can reuse memory that an earlier phase has freed
        pool = torch.cuda.graph_pool_handle()
        running = self._phases(batch)
        for phases in self._groups:
            graph, ends = torch.cuda.CUDAGraph(), []
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                for phase in phases:
                    captured = next(running)
                    assert captured is phase
                    if phase is not phases[-1]:
                        ends.append(torch.cuda.Event(enable_timing=True, external=True))
                        ends[-1].record()
            self._graphs.append((graph, phases, ends))
        self.peak_bytes = torch.cuda.max_memory_allocated()
        self._captured()
