"""The parts that watch one loop, and in which order they are told of its steps."""

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import Profiler
from ..subject import WatchedLoop
from .flops import LoopTracer
from .gpu import LoopGpu
from .growth import Growth, allocated_on_gpu
from .hooks import Hooks
from .live import Live
from .marks import Timeline
from .observer import Observer, Observers
from .out_of_memory import OutOfMemoryExplainer
from .pauses import Pauses
from .profiled import Profiled
from .ranks import Ranks
from .slow_steps import SlowSteps
from .steps import Steps
from .syncs import Syncs
from .tokens import PassReader


class Parts:
    """What watches a loop with these models and optimizers of PyTorch."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        loop: WatchedLoop,
        directory: Path,
    ) -> None:
        device = device_of(models)
        has_profiler = loop.profiler is not Profiler.NONE
        self._models = tuple(map(weakref.ref, models))
        self._num_parameters = _num_parameters(models)
        self.gpu = LoopGpu(counts_activity=not has_profiler) if device.type == "cuda" else None
        self.timeline = Timeline(device)
        self.pauses = Pauses()
        self.reader = PassReader(models, device)
        self.steps = Steps(self.timeline, self.reader, loop.warmup_steps, has_profiler=has_profiler)
        self.profiled = Profiled(models[0], optimizers, loop, directory)
        self.slow_steps = SlowSteps(self.pauses, self.gpu)
        self.syncs = Syncs(models)
        self.growth = Growth(None if self.gpu is None else allocated_on_gpu)
        self.ranks = Ranks(loop.name, models, self.slow_steps)
        self.out_of_memory = OutOfMemoryExplainer(models, optimizers, self.reader, device)
        self.tracer = LoopTracer(self.reader.calls.seen)
        self.hooks = Hooks(self.timeline, models, optimizers, self.reader, self.pauses)

    def observe(self, observers: Sequence[Observer]) -> None:
        """Let these parts, in this order, look at the steps."""
        self.steps.observers = Observers(observers)
        self.timeline.told = self.steps.observers.phase_begins

    def in_order(self, live: Live) -> list[Observer]:
        """The parts that look at steps, and the lines that the loop shows meanwhile."""
        # the first, so that what other parts do lies in no pause
        observers: list[Observer] = [self.slow_steps]
        if self.gpu is not None:
            observers.append(self.gpu)
        if self.profiled.has_profiler:
            observers.append(self.profiled)
        observers += [self.ranks, live]
        if self.gpu is not None:
            observers.append(self.growth)
        if self.syncs.sees_model:  # else its calls at each phase would only cost time
            observers.append(self.syncs)
        return [*observers, self.out_of_memory]

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, shared ones once; of models that are gone, as it was."""
        models = [model for reference in self._models if (model := reference()) is not None]
        if models:
            self._num_parameters = _num_parameters(models)
        return self._num_parameters


def device_of(models: Iterable[nn.Module]) -> torch.device:
    """Where the loop runs: where the first parameter or buffer is that is loaded."""
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            # tensors that are not loaded yet are on "meta", whatever the device
            if tensor.device.type != "meta":
                return tensor.device
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _num_parameters(models: Iterable[nn.Module]) -> int:
    """Elements of all parameters, shared ones once."""
    parameters = {parameter for model in models for parameter in model.parameters()}
    return sum(map(Tensor.numel, parameters))
