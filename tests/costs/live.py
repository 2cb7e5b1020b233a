"""Bytes of the tensors that a step keeps, on a tape and as real tensors on the CPU."""

import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cs336.config import Phase, RunConfig
from cs336.costs.communication import calls, sent_share
from cs336.costs.tape import phases_of
from cs336.costs.traces import tape_of
from cs336.measure.step import TrainingStep


def sent_bytes(config: RunConfig) -> int:
    """Bytes that each rank sends in a step by its calls, if the ranks form a ring."""
    counts = calls(config)
    assert counts is not None
    return round(
        sum(
            count * call.num_bytes * sent_share(call.collective, config.ranks)
            for call, count in counts.items()
        )
    )


class FusedRMSNorm(torch.autograd.Function):
    """The tensors of PyTorch's CUDA kernel, which the CPU has not: what it keeps, and what it
    makes.
    """

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
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._sizes:
            self._sizes[key] = 0
            self._note(storage)
            weakref.finalize(storage, self._forget, key)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._sizes:
            self.now += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def tape_bytes(config: RunConfig) -> tuple[list[int], int]:
    """Bytes that were added on the tape after each phase of the last step, and at its peak."""
    tape = tape_of(config)
    now, peak, after = 0, 0, []
    for _, (begin, end), _ in phases_of(tape, -1):
        for event in tape.events[begin:end]:
            spec = tape.spec(max(event, ~event))
            now += spec.size_bytes if event >= 0 else -spec.size_bytes
            peak = max(peak, now)
        after.append(now)
    return after[:-1], peak


def real_bytes(config: RunConfig, steps: int = 2) -> tuple[list[int], int]:
    """The same as tape_bytes of real tensors on the CPU."""
    with LiveBytes() as live:
        step = TrainingStep(config)
        for _ in range(steps):
            start, after, live.peak = live.now, [], live.now
            loss = step.forward(step.batches())
            after.append(live.now - start)
            if Phase.BACKWARD in config.phases:
                step.backward(loss)
                after.append(live.now - start)
            if Phase.OPTIMIZER in config.phases:
                step.update()
                after.append(live.now - start)
            peak = live.peak - start
            step.model.zero_grad(set_to_none=True)
            kept = loss.detach()  # noqa: F841 (as the caller of a step keeps it during the next)
            del loss
        return after, peak


def use_tensors_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """The same tensors on a CPU: RMSNorm in one kernel; autocast runs softmax and likelihood in
    fp32.
    """
    patch.setattr(F, "rms_norm", lambda x, _shape, weight, _eps: FusedRMSNorm.apply(x, weight))
    softmax = torch.Tensor.softmax
    patch.setattr(torch.Tensor, "softmax", lambda self, dim: softmax(self.float(), dim))
    patch.setattr(
        F, "cross_entropy", lambda x, y: F.nll_loss(F.log_softmax(x, 1, dtype=x.dtype).float(), y)
    )
