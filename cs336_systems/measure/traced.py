"""Traces the real step of a configuration: run as `python -m cs336_systems.measure.traced`."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cs336_systems.config import Phase, RunConfig
from cs336_systems.costs.tape import Category, Tape
from cs336_systems.costs.trace import Trace, tracing
from cs336_systems.measure.step import TrainingStep


RANK=0
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


def _done(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


class Started:
    """A collective that keeps its tensors until it is waited for, as NCCL's do."""

    def __init__(self, work, *tensors) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        self._work.wait()
        self._tensors = ()


@contextlib.contextmanager
def _one_of(config: RunConfig) -> Iterator[None]:
    if not config.is_shared:
        yield
        return
    from cs336_systems.parallel import data_parallel, exchange

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=config.ranks)
    try:
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(dist, "get_backend", lambda *_: "nccl"))
            patches.enter_context(mock.patch.object(dist, "broadcast_object_list", lambda objects, src: None))
            patches.enter_context(mock.patch.object(data_parallel, "check_same_gradients", lambda names, parameters: None))
            patches.enter_context(mock.patch("torch.nn.parallel.distributed._verify_param_shape_across_processes", lambda *_: None))
            for module in (data_parallel, exchange):
                patches.enter_context(mock.patch.object(module, "of_all_ranks", lambda tensors: [[*tensors] for _ in range(config.ranks)]))
            gather, scatter = exchange.start_gather, exchange.Collectives.scatter
            patches.enter_context(mock.patch.object(exchange, "start_gather", lambda *tensors: [Started(work, *tensors) for work in gather(*tensors)]))
            patches.enter_context(mock.patch.object(exchange.Collectives, "scatter", lambda *arguments: Started(scatter(*arguments), *arguments)))
            yield
    finally:
        dist.destroy_process_group()


def traced(config: RunConfig, axes) -> Tape:
    with tracing(axes) as trace, _one_of(config):
        step = TrainingStep(config)
        step.scaler = None
        if isinstance(ddp := getattr(step.way, "module", None), torch.nn.parallel.DistributedDataParallel):
            ddp.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
        trace.note(Category.PARAMETERS, step.model.parameters())
        clock = _Clock(trace, step)
        for _ in range(4 if config.parallel.value == 'ddp' else 2):
            step(clock)
        tape = trace.tape()
        tape.calls = trace.calls
    return tape
