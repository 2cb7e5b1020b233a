"""Traces the real step of a configuration: run as `python -m cs336_systems.measure.traced`."""

from cs336_systems.config import Mode, Phase, RunConfig
from cs336_systems.costs.tape import Category, Tape
from cs336_systems.costs.trace import Trace, tracing
from cs336_systems.measure.step import TrainingStep


class _Clock:
    def __init__(self, trace: Trace, step: TrainingStep) -> None:
        self._trace, self._phases = trace, iter(())
        self._step = step

    def start(self) -> None:
        self._phases = iter([*self._step.config.phases[1:], Phase.STEP])
        self._trace.begin(Phase.FORWARD)

    def lap(self, phase: Phase) -> None:
        parameters = [*self._step.model.parameters()]
        self._trace.note(Category.GRADIENTS, (each.grad for each in parameters if each.grad is not None))
        if phase is Phase.OPTIMIZER and self._step.optimizer is not None:
            state = self._step.optimizer.state.values()
            self._trace.note(Category.OPTIMIZER_STATE, (x for each in state for x in each.values() if hasattr(x, "untyped_storage")))
        self._trace.begin(next(self._phases))

    def stop(self):
        return None


def traced(config: RunConfig, axes) -> Tape:
    with tracing(axes) as trace:
        step = TrainingStep(config)
        step.scaler = None
        trace.note(Category.PARAMETERS, step.model.parameters())
        clock = _Clock(trace, step)
        for _ in range(2):
            step(clock)
    tape = trace.tape()
    return tape
