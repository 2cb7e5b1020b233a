"""A step in a CUDA graph, on a simulated device where captured operations run only when they are
replayed.
"""

import contextlib
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch

from cs336.config import EAGER_STEPS_BEFORE_GRAPH, Mode, ModelConfig, Phase, RunConfig
from cs336.measure.clock import EventClock
from cs336.measure.step import TrainingStep
from cs336.model.fast.step_graph import StepGraph

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
SHARED = (Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.OPTIMIZER)
TOOK_S = {
    Phase.DATA: 0.5,
    Phase.FORWARD: 1.0,
    Phase.BACKWARD: 2.0,
    Phase.COMMUNICATION: 8.0,
    Phase.OPTIMIZER: 4.0,
}
"""Time of each phase by the device's clock."""


class Device:
    """The clock of a simulated GPU, and the operations captured so far."""

    def __init__(self):
        self.now_s = 0.0
        self.captured = None

    def run(self, operation):
        if self.captured is None:
            operation()
        else:
            self.captured.append(operation)

    def work(self, seconds):
        def take():
            self.now_s += seconds

        self.run(take)


@pytest.fixture
def device(monkeypatch):
    device = Device()

    class Event:
        def __init__(self, **_options):
            self.time_s = None

        def record(self):
            def note():
                self.time_s = device.now_s

            device.run(note)

        def elapsed_time(self, end):
            assert self.time_s is not None
            assert end.time_s is not None
            return (end.time_s - self.time_s) * 1e3

    class Graph:
        operations: list[Callable[[], None]]

        def replay(self):
            for operation in self.operations:
                operation()

    @contextlib.contextmanager
    def capture(graph, **_options):
        device.captured = []
        yield
        graph.operations, device.captured = device.captured, None

    for name in (
        "Stream",
        "current_stream",
        "stream",
        "synchronize",
        "graph_pool_handle",
        "reset_peak_memory_stats",
    ):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    fakes = {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "max_memory_allocated": lambda: 77,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return device


@pytest.mark.parametrize(
    ("order", "joined"),
    [(PHASES, ()), (SHARED, {Phase.COMMUNICATION})],
    ids=["one process", "several ranks"],
)
@pytest.mark.parametrize("reads_data", [False, True], ids=["random tokens", "token file"])
def test_every_step_has_each_phase_once_with_its_own_time(device, reads_data, order, joined):
    """This holds for eager steps, for the step that captures, and for replays."""
    seen = []
    loss, static = torch.zeros(()), torch.zeros(1)

    def phases(batch):
        def compute():
            loss.copy_(batch[0][0])
            seen.append((len(seen), loss.item()))

        device.run(compute)
        for phase in order:
            device.work(TOOK_S[phase])
            yield phase

    captured_after = []
    graph, clock = (
        StepGraph(phases, order, lambda: captured_after.append(len(seen)), joined),
        EventClock(),
    )
    for number in range(EAGER_STEPS_BEFORE_GRAPH + 3):
        clock.start()
        batch = (torch.full((1,), float(number)), static)
        if reads_data:
            device.work(TOOK_S[Phase.DATA])
            clock.lap(Phase.DATA)
        graph(batch, clock.lap)
        wanted = ((Phase.DATA,) if reads_data else ()) + order
        assert clock.stop().phases_s == pytest.approx({phase: TOOK_S[phase] for phase in wanted})
        assert loss.item() == number, "each step has its own batch, and the capture is one step too"
    assert seen == [(number, float(number)) for number in range(EAGER_STEPS_BEFORE_GRAPH + 3)], (
        "nothing runs twice"
    )
    assert captured_after == [EAGER_STEPS_BEFORE_GRAPH], (
        "after the capture, before its first replay"
    )
    assert graph.peak_bytes == 77


def test_gradients_do_not_add_up_without_an_optimizer(device):
    """The captured step must begin without gradients too, or its replays would add to them."""
    model = ModelConfig(
        vocab_size=7, context_length=4, d_model=8, d_ff=8, num_layers=1, num_heads=2
    )
    step = TrainingStep(RunConfig(size="custom", model=model, mode=Mode.FORWARD_BACKWARD))
    order, run = step.config.phases, step._phases
    result = []

    def phases(batch):
        result.append(any(parameter.grad is not None for parameter in step.model.parameters()))
        yield from run(batch)

    step.graph, clock = StepGraph(phases, order, lambda: None, ()), EventClock()
    for _ in range(EAGER_STEPS_BEFORE_GRAPH + 2):
        step(clock)
    assert result == [False] * (EAGER_STEPS_BEFORE_GRAPH + 1)
