"""Data parallelism: every rank has the whole model and a batch of its own, and gradients are averaged over the ranks.

Wrap a module in one of the classes; then in each step come backward, `finish_gradient_synchronization()` and the
optimizer. Parameters and buffers begin with the values of rank 0. Later changes of buffers are not exchanged. A
parameter without a gradient has none on any rank.
"""

from collections.abc import Sequence
from typing import Any

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


class NaiveDDP(nn.Module):
    """One all-reduce for each parameter, all of them after backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        take_from_rank_0(module)
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._names, self._trained = [name for name, _ in named], [each for _, each in named]
        self._are_checked = False

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401 (whatever the module takes and returns)
        return self.module(*inputs, **named_inputs)

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients, or wait for averages in progress; call it between backward and the optimizer."""
        if not self._are_checked:
            check_same_gradients(self._names, self._trained)
            self._are_checked = True
        self._average([each for each in self._trained if each.grad is not None])

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = Averaging(_gradient(parameter)).wait()


class FlatDDP(NaiveDDP):
    """One all-reduce for all parameters of a type, after backward."""

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        _Bucket.finish([_Bucket(each).start() for each in _by_type(parameters)])


class OverlapDDP(NaiveDDP):
    """All-reduces that run while backward goes on: of each bucket of gradients, as soon as the last of it is there.

    In the first step gradients are averaged after backward, and rank 0's order in which they became ready is agreed on.
    Every rank then starts its all-reduces in this order, however its own gradients arrive.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(module)
        self._bucket_bytes = bucket_bytes
        self._ready: list[int] = []
        """Numbers of the parameters whose gradients this backward has made so far, in the order of their arrival."""
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._num_started = 0
        for number, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._note(number))

    def _note(self, number: int) -> None:
        self._ready.append(number)
        if not self._buckets:
            return
        self._bucket_of[number].num_missing -= 1
        while self._num_started < len(self._buckets) and not self._buckets[self._num_started].num_missing:
            self._buckets[self._num_started].start()
            self._num_started += 1

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._buckets:
            if self._num_started < len(self._buckets):
                raise RuntimeError("backward made other gradients than in the first step; use ddp-naive or ddp-flat")
            _Bucket.finish(self._buckets)
        else:
            super()._average(parameters)
            self._agree()
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)
        self._num_started = 0
        self._ready.clear()

    def _agree(self) -> None:
        """Make buckets of the parameters in the order in which rank 0 had their gradients."""
        agreed = [self._ready]
        dist.broadcast_object_list(agreed, src=0)
        numbers = {parameter: number for number, parameter in enumerate(self._trained)}
        for chosen in _split([self._trained[number] for number in agreed[0]], self._bucket_bytes):
            bucket = _Bucket(chosen)
            self._buckets.append(bucket)
            self._bucket_of |= {numbers[parameter]: bucket for parameter in chosen}


class _Bucket:
    """Parameters of one type whose gradients are averaged in one collective."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.num_missing = len(parameters)
        self._averaging: Averaging | None = None

    def start(self) -> "_Bucket":
        """Start to average; the gradients must be there."""
        self._averaging = Averaging(flattened([_gradient(parameter) for parameter in self.parameters]))
        return self

    @staticmethod
    def finish(buckets: Sequence["_Bucket"]) -> None:
        """Wait for the averages, which replace the gradients without a copy."""
        for bucket in buckets:
            assert bucket._averaging is not None
            flat, bucket._averaging = bucket._averaging.wait(), None
            for parameter, part in zip(bucket.parameters, parts_of(flat, bucket.parameters), strict=True):
                parameter.grad = part


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.contiguous()


def _by_type(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    types = dict.fromkeys(parameter.dtype for parameter in parameters)
    return [[parameter for parameter in parameters if parameter.dtype is dtype] for dtype in types]


def _split(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in this order, in buckets of one type that end with the parameter that fills them."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not buckets or size >= bucket_bytes or buckets[-1][0].dtype is not parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets
