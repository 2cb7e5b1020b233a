"""Bytes of the tensors that a step keeps, on a tape and as real tensors on the CPU."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cs336_systems.config import Parallel, Phase, RunConfig
from cs336_systems.costs.forecast.step import StepTape
from cs336_systems.costs.forecast.tape import Category, Tape
from cs336_systems.measure.step import TrainingStep
from cs336_systems.parallel import data_parallel, exchange


class FusedRMSNorm(torch.autograd.Function):
    """The tensors of PyTorch's CUDA kernel, which the CPU has not: what it keeps, and what it makes."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = torch.zeros(*x.shape[:-1], 1)
        ctx.save_for_backward(x, weight, scale)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators have made and nobody has let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                # of a tensor that is spread over ranks, the part that is here
                self._watch(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._sizes:
            self._sizes[key] = 0
            self._note(storage)
            weakref.finalize(storage, self._forget, key)

    @contextmanager
    def of_resized(self) -> Iterator[None]:
        """Also count what resizing a storage adds or takes away, which no operator does."""
        resize = torch.UntypedStorage.resize_

        def note(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._note(storage)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", note)
            yield

    def _note(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._sizes:
            self.now += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def tape_bytes(config: RunConfig, steps: int = 2) -> tuple[int, list[int], int]:
    """Bytes on the tape when the last step begins; what was added after each of its phases, and at its peak."""
    step = StepTape(config)
    step.set_up()
    for _ in range(steps - 1):
        step.run()
    start = sum(_signed_bytes(step.tape, event) for event in step.tape.events)
    step.run()
    now, peak, after = 0, 0, []
    for (_, begin, _), (_, end, _) in pairwise(step.tape.steps[-1]):
        for event in step.tape.events[begin:end]:
            now += _signed_bytes(step.tape, event)
            peak = max(peak, now)
        after.append(now)
    return start, after, peak


def _signed_bytes(tape: Tape, event: int) -> int:
    spec = tape.spec(max(event, ~event))
    if spec.category is Category.LIBRARY_WORKSPACE:
        return 0
    return spec.size_bytes if event >= 0 else -spec.size_bytes


def real_bytes(config: RunConfig, steps: int = 2, rank: int = 0) -> tuple[int, list[int], int]:
    """The same as tape_bytes of real tensors on the CPU."""
    with LiveBytes() as live, live.of_resized():
        step = TrainingStep(config, rank=rank)
        for _ in range(steps):
            start, after, live.peak = live.now, [], live.now
            loss = step.forward(step.batches())
            after.append(live.now - start)
            if Phase.BACKWARD in config.phases:
                step.backward(loss)
                after.append(live.now - start)
            if step.way is not None:
                step.way.finish_gradient_synchronization()
                after.append(live.now - start)
            if Phase.OPTIMIZER in config.phases:
                step.update()
                after.append(live.now - start)
            peak = live.peak - start
            step.model.zero_grad(set_to_none=True)
            kept = loss.detach()  # noqa: F841 (as the caller of a step keeps it during the next)
            del loss
        return start, after, peak


class Started:
    """A collective that keeps its tensors until it is waited for, as NCCL's do."""

    def __init__(self, work, *tensors) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        self._work.wait()
        self._tensors = ()


@contextmanager
def one_of(ranks: int, rank: int, way: Parallel) -> Iterator[None]:
    """Be one of several ranks, of which the others are not there: collectives return at once what they were given.

    PyTorch's DistributedDataParallel needs real ones, but holds the same whatever the number of ranks is: 1.
    """
    if way is Parallel.DDP:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data_parallel, "check_same_gradients", lambda names, parameters: None)
            patch.setattr(dist, "broadcast_object_list", lambda objects, src: None)
            for module in (data_parallel, exchange):
                patch.setattr(module, "of_all_ranks", lambda tensors: [[*tensors] for _ in range(ranks)])
            gather, scatter = exchange.start_gather, exchange.Collectives.scatter
            patch.setattr(
                exchange, "start_gather", lambda *tensors: [Started(work, *tensors) for work in gather(*tensors)]
            )
            patch.setattr(exchange.Collectives, "scatter", lambda *arguments: Started(scatter(*arguments), *arguments))
            yield
    finally:
        dist.destroy_process_group()


def order_of_gradients(config: RunConfig) -> list[str]:
    """Names of the parameters in the order in which a real backward has made their gradients."""
    step, order = TrainingStep(config), []
    for name, each in step.model.named_parameters():
        each.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    step.backward(step.forward(step.batches()))
    return order


def use_tensors_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """The same tensors on a CPU: RMSNorm in one kernel; autocast runs softmax and likelihood in fp32."""
    patch.setattr(F, "rms_norm", lambda x, _shape, weight, _eps: FusedRMSNorm.apply(x, weight))
    softmax = torch.Tensor.softmax
    patch.setattr(torch.Tensor, "softmax", lambda self, dim: softmax(self.float(), dim))
    patch.setattr(F, "cross_entropy", lambda x, y: F.nll_loss(F.log_softmax(x, 1, dtype=x.dtype).float(), y))
