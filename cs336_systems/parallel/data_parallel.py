"""Data parallelism: every rank has the whole model and a batch of its own, and gradients are averaged over the ranks.

Wrap a module in one of the classes; then in each step come backward, `finish_gradient_synchronization()` and the
optimizer. Parameters and buffers begin with the values of rank 0. Later changes of buffers are not exchanged. A
parameter without a gradient has none on any rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.collectives import (
    Averaging,
    check_same_gradients,
    flattened,
    parts_of,
    take_from_rank_0,
)

BUCKET_BYTES = 25 * 2**20
"""Gradients that are averaged together while backward goes on, as in PyTorch's DistributedDataParallel."""


class Leaf(NamedTuple):
    """A tensor that backward makes a gradient for."""

    name: str
    tensor: Tensor
    shared_elements: int = 0
    """The elements, from the first on, of whose average each rank gets its own part only; 0 if it gets the whole."""


class NaiveDDP(nn.Module):
    """One all-reduce for each parameter, all of them after backward.

    `leaves` are the tensors whose gradients are averaged: all parameters, unless the module computes with others.
    """

    def __init__(self, module: nn.Module, leaves: Sequence[Leaf] | None = None) -> None:
        super().__init__()
        self.module = module
        take_from_rank_0(module)
        every = [Leaf(*named) for named in module.named_parameters()] if leaves is None else leaves
        self._leaves = [leaf for leaf in every if leaf.tensor.requires_grad]
        self._are_checked = False

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401 (whatever the module takes and returns)
        return self.module(*inputs, **named_inputs)

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients, or wait for averages in progress; call it between backward and the optimizer."""
        if not self._are_checked:
            check_same_gradients([leaf.name for leaf in self._leaves], [leaf.tensor for leaf in self._leaves])
            self._are_checked = True
        self._average([leaf for leaf in self._leaves if leaf.tensor.grad is not None])

    def _average(self, leaves: Sequence[Leaf]) -> None:
        for leaf in leaves:
            _averaging([leaf]).wait()


class FlatDDP(NaiveDDP):
    """One all-reduce for all parameters of a type, after backward."""

    def _average(self, leaves: Sequence[Leaf]) -> None:
        shared_out = [leaf for leaf in leaves if leaf.shared_elements]
        whole = [leaf.tensor for leaf in leaves if not leaf.shared_elements]
        groups = [[each for each in whole if each.dtype is dtype] for dtype in dict.fromkeys(t.dtype for t in whole)]
        flats = [flattened([_gradient(tensor) for tensor in group]) for group in groups]
        for averaging in (Averaging(flats), _averaging(shared_out)):
            averaging.wait()
        for group, flat in zip(groups, flats, strict=True):
            for tensor, part in zip(group, parts_of(flat, group), strict=True):
                tensor.grad = part


class OverlapDDP(NaiveDDP):
    """All-reduces that run while backward goes on: of each bucket of gradients, as soon as the last of it is there.

    A bucket is averaged in place by one group of collectives. In the first step gradients are averaged after backward,
    and rank 0's order in which they became ready is agreed on. Every rank then starts its buckets in this order,
    however its own gradients arrive.
    """

    def __init__(
        self, module: nn.Module, leaves: Sequence[Leaf] | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(module, leaves)
        self._bucket_bytes = bucket_bytes
        self._ready: list[int] = []
        """Numbers of the leaves whose gradients this backward has made so far, in the order of their arrival."""
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._num_started = 0
        for number, leaf in enumerate(self._leaves):
            leaf.tensor.register_post_accumulate_grad_hook(lambda _, number=number: self._note(number))

    def _note(self, number: int) -> None:
        self._ready.append(number)
        if not self._buckets:
            return
        self._bucket_of[number].num_missing -= 1
        while self._num_started < len(self._buckets) and not self._buckets[self._num_started].num_missing:
            self._buckets[self._num_started].start()
            self._num_started += 1

    def _average(self, leaves: Sequence[Leaf]) -> None:
        if self._buckets:
            if self._num_started < len(self._buckets):
                raise RuntimeError("backward made other gradients than in the first step; use ddp-naive or ddp-flat")
            for bucket in self._buckets:
                bucket.finish()
        else:
            super()._average(leaves)
            self._agree()
        self._num_started = 0
        self._ready.clear()

    def _agree(self) -> None:
        """Make buckets of the leaves in the order in which rank 0 had their gradients."""
        agreed = [self._ready]
        dist.broadcast_object_list(agreed, src=0)
        for numbers in _split(agreed[0], self._leaves, self._bucket_bytes):
            bucket = _Bucket([self._leaves[number] for number in numbers])
            self._buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(numbers, bucket)


class _Bucket:
    """Leaves whose gradients are averaged together."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves = leaves
        self.num_missing = len(leaves)
        self._averaging: Averaging | None = None

    def start(self) -> None:
        """Start to average; the gradients must be there."""
        self._averaging = _averaging(self._leaves)

    def finish(self) -> None:
        """Wait for the averages."""
        assert self._averaging is not None
        self._averaging.wait()
        self._averaging, self.num_missing = None, len(self._leaves)


def _averaging(leaves: Sequence[Leaf]) -> Averaging:
    """Start to average the gradients of the leaves, in place."""
    whole = [_gradient(leaf.tensor) for leaf in leaves if not leaf.shared_elements]
    shared = [leaf for leaf in leaves if leaf.shared_elements]
    return Averaging(whole, [_gradient(leaf.tensor).view(-1)[: leaf.shared_elements] for leaf in shared])


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    tensor.grad = tensor.grad.contiguous()
    return tensor.grad


def _split(order: Sequence[int], leaves: Sequence[Leaf], bucket_bytes: int) -> list[list[int]]:
    """The numbers of the leaves in buckets of one type, each of which ends with the leaf that fills it.

    Buckets are in the order in which they become complete.
    """
    buckets: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for number in order:
        tensor = leaves[number].tensor
        bucket, size = filling.get(tensor.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(number)
        size += tensor.nbytes
        filling[tensor.dtype] = (bucket, size) if size < bucket_bytes else ([], 0)
    return sorted(buckets, key=lambda bucket: order.index(bucket[-1]))
