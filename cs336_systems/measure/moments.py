"""What one rank's memory holds at moments of a step, by kind of tensor, as the live process can tell."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from cs336_systems.config import Device, Phase
from cs336_systems.measure.clock import Clock, StepTimes
from cs336_systems.measure.step import TrainingStep
from cs336_systems.record import MemoryMoment, Moment


def memory_now(step: TrainingStep, moment: Moment) -> MemoryMoment:
    """What the step's tensors take now."""
    trained = list(_trained(step))
    states = [] if step.optimizer is None else step.optimizer.state.values()
    return MemoryMoment(
        moment=moment,
        allocated_bytes=torch.cuda.memory_allocated() if step.config.device is Device.CUDA else None,
        parameters_bytes=_bytes(trained),
        gradients_bytes=_bytes(tensor.grad for tensor in trained if tensor.grad is not None),
        optimizer_state_bytes=_bytes(value for state in states for value in state.values() if torch.is_tensor(value)),
    )


class MomentClock:
    """Wraps a clock, and notes what is in memory before and after the optimizer's step."""

    def __init__(self, clock: Clock, step: TrainingStep) -> None:
        self._clock, self._step = clock, step
        self.moments: list[MemoryMoment] = []

    def start(self) -> None:
        self._clock.start()

    def lap(self, phase: Phase, end: torch.cuda.Event | None = None) -> None:
        self._clock.lap(phase, end)
        if phase is Phase.COMMUNICATION:
            self.moments.append(memory_now(self._step, Moment.BEFORE_OPTIMIZER))
        elif phase is Phase.OPTIMIZER:
            self.moments.append(memory_now(self._step, Moment.AFTER_OPTIMIZER))

    def stop(self) -> StepTimes:
        return self._clock.stop()


def _trained(step: TrainingStep) -> Iterator[Tensor]:
    """The parameters that this rank keeps, whole or in part, and their copies in low precision."""
    found: dict[int, Tensor] = {id(each): each for each in step.model.parameters()}
    for weight in getattr(step.model, "weights", ()):
        kept = (weight.master, weight.remainder, None if weight.copy is None else weight.copy.leaf)
        found |= {id(each): each for each in kept if each is not None}
    yield from found.values()


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors; a tensor that PyTorch has sharded counts with this rank's part."""
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)
