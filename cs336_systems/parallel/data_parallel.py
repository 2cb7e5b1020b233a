"""Data parallelism: every rank has the whole model and a batch of its own, and gradients are
averaged over the ranks.

Wrap a module in one of the classes; then in each step run backward,
`finish_gradient_synchronization()` and the optimizer. Parameters and buffers begin with the values
of rank 0. Later changes of buffers are not exchanged. A parameter without a gradient must have none
on any rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..costs.communication import split_into_buckets
from . import collectives
from .exchange import Pushes, of_all_ranks, other_ranks, row_from_here, shared_rows

OTHER_GRADIENTS = "backward made other gradients than in the first step; use ddp-naive or ddp-flat"


class Leaf(NamedTuple):
    """A tensor that backward computes a gradient for."""

    name: str
    tensor: Tensor
    shared_elements: int = 0
    """Leading elements of whose average each rank gets only its own part; 0: every rank gets the
    whole average.
    """


class Wrapper(nn.Module):
    """Calls a module whose gradients are shared among ranks."""

    module: nn.Module
    is_accumulating = False
    """Whether another backward pass follows before `finish_gradient_synchronization()`."""

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        """Call the wrapped module."""
        return self.module(*inputs, **named_inputs)


class NaiveDDP(Wrapper):
    """One all-reduce for each parameter, all of them after backward.

    `leaves` are the tensors whose gradients are averaged: all parameters, unless the module
    computes with others.
    """

    def __init__(self, module: nn.Module, leaves: Sequence[Leaf] | None = None) -> None:
        """Give all ranks the parameters of rank 0; without `leaves`, gradients of all trained
        parameters are averaged.
        """
        super().__init__()
        self.module = module
        collectives.take_from_rank_0(module)
        every = [Leaf(*named) for named in module.named_parameters()] if leaves is None else leaves
        self._leaves = [leaf for leaf in every if leaf.tensor.requires_grad]
        self._are_checked = False

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients, or wait for averages in progress; call it between backward and
        the optimizer.
        """
        if not self._are_checked:
            collectives.check_same_gradients(
                [leaf.name for leaf in self._leaves], [leaf.tensor for leaf in self._leaves]
            )
            self._are_checked = True
        self._average([leaf for leaf in self._leaves if leaf.tensor.grad is not None])

    def _hook(self, when_ready: Callable[[int], None]) -> None:
        """Have backward call the function with the number of each leaf whose gradient is ready."""
        for number, leaf in enumerate(self._leaves):
            leaf.tensor.register_post_accumulate_grad_hook(
                lambda _, number=number: when_ready(number)
            )

    def _average(self, leaves: Sequence[Leaf]) -> None:
        """Average the gradients of `leaves`, all of which are present, one after the other."""
        for leaf in leaves:
            _averaging([leaf]).wait()


class FlatDDP(NaiveDDP):
    """One all-reduce for all parameters of a type, after backward."""

    def _average(self, leaves: Sequence[Leaf]) -> None:
        """Average the gradients of `leaves`, all of which are present, with one collective for each
        data type.

        Gradients of leaves that are shared out are averaged in place; the others are copied into
        one flat tensor per data type, and become views of it.
        """
        shared_out = [leaf for leaf in leaves if leaf.shared_elements]
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for leaf in leaves:
            if not leaf.shared_elements:
                by_type.setdefault(leaf.tensor.dtype, []).append(leaf.tensor)
        flats = [_flatten_dense_tensors([*map(_gradient, group)]) for group in by_type.values()]
        for averaging in (collectives.Averaging(flats), _averaging(shared_out)):
            averaging.wait()
        for group, flat in zip(by_type.values(), flats, strict=True):
            for tensor, part in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
                tensor.grad = part


class OverlapDDP(NaiveDDP):
    """All-reduces during backward: each bucket of gradients is averaged as soon as its last
    gradient is ready.

    A bucket is averaged in place by one group of collectives. In the first step gradients are
    averaged after backward, and rank 0 broadcasts the order in which its gradients became ready.
    From then on every rank starts its buckets in this order. Raises RuntimeError for a second
    backward before `finish_gradient_synchronization()`, and for one that computes gradients of
    other tensors than in the first step.
    """

    def __init__(
        self,
        module: nn.Module,
        leaves: Sequence[Leaf] | None = None,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        """Hook each leaf, so that its gradient is noted when backward has accumulated it; a bucket
        is full from `bucket_bytes` on.
        """
        super().__init__(module, leaves)
        self._bucket_bytes = bucket_bytes
        self._ready: dict[int, None] = {}
        """Numbers of the leaves whose gradients this backward has computed, in the order in
        which they became ready.
        """
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._num_started = 0
        self._hook(self._note)

    def _note(self, number: int) -> None:
        """Note that the gradient of leaf `number` is ready, and start to average every bucket whose
        gradients are complete and whose predecessors have started.
        """
        if self.is_accumulating:
            return
        if number in self._ready:
            raise RuntimeError(
                "backward came twice before finish_gradient_synchronization(), and gradients of "
                "the first may be averaged already; set is_accumulating before all backward passes "
                "but the last to add up the gradients of several batches"
            )
        self._ready[number] = None
        if not self._buckets:
            return
        if number not in self._bucket_of:
            raise RuntimeError(OTHER_GRADIENTS)
        self._bucket_of[number].num_missing -= 1
        while self._num_started < len(self._buckets):
            bucket = self._buckets[self._num_started]
            if bucket.num_missing:
                break
            bucket.averaging = _averaging(bucket.leaves)
            self._num_started += 1

    def _average(self, leaves: Sequence[Leaf]) -> None:
        """Wait for the averages of all buckets; in the first step, which has no buckets yet,
        average the gradients now and agree on buckets.
        """
        if self._buckets:
            for bucket in self._buckets:
                if bucket.averaging is None:
                    raise RuntimeError(OTHER_GRADIENTS)
                bucket.averaging.wait()
                bucket.averaging = None
                bucket.num_missing = len(bucket.leaves)
        else:
            super()._average(leaves)
            self._agree()
        self._num_started = 0
        self._ready.clear()

    def _agree(self) -> None:
        """Make buckets of the leaves in the order in which their gradients became ready on rank
        0.
        """
        agreed = [list(self._ready)]
        dist.broadcast_object_list(agreed, src=0)
        for numbers in _split(agreed[0], self._leaves, self._bucket_bytes):
            bucket = _Bucket([self._leaves[number] for number in numbers], len(numbers))
            self._buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(numbers, bucket)


class PushDDP(NaiveDDP):
    """Every rank copies its gradients to the others during backward, and adds up those that it has
    received.

    That takes memory for the gradients of every other rank. On GPUs the copies occupy no
    multiprocessor (exchange.py). Gradients are divided by the number of ranks where backward
    begins, at the module's output. They are added up in the order of the ranks, so that all ranks
    get the same sum; without `adds` the optimizer adds them, because it reads them anyway.
    """

    def __init__(
        self, module: nn.Module, leaves: Sequence[Leaf] | None = None, *, adds: bool = True
    ) -> None:
        """Allocate buffers for the gradients of the other ranks, exchange their addresses, and hook
        each leaf so that its gradient is pushed when it is ready.
        """
        super().__init__(module, leaves)
        self._adds = adds
        self._ranks = dist.get_world_size()
        parts = [_averaged_part(leaf, leaf.tensor.detach()) for leaf in self._leaves]
        buffers = [shared_rows(part, self._ranks - 1) for part in parts]
        by_rank = of_all_ranks(buffers)
        self._others = other_ranks()
        self._received: dict[Tensor, tuple[Tensor, ...]] = {}
        """For each leaf, buffers for the gradients of the other ranks, in the order of the
        ranks.
        """
        self._targets: list[list[Tensor]] = []
        """For each leaf, where its gradient goes: a buffer of every other rank."""
        for number, (leaf, part) in enumerate(zip(self._leaves, parts, strict=True)):
            self._received[leaf.tensor] = tuple(buffers[number][:, : len(part)])
            rows = [row_from_here(by_rank[other][number], other) for other in self._others]
            self._targets.append([row[: len(part)] for row in rows])
        self._pushes = Pushes(self._leaves[0].tensor.device, waits=True)
        self._hook(self._push)

    def received(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """Buffers of a leaf's gradients from the other ranks, each as one axis, in rank order;
        None if not a leaf.
        """
        return self._received.get(tensor)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        """Call the wrapped module; its output divides the gradient by the number of ranks in
        backward.
        """
        output = super().forward(*inputs, **named_inputs)
        collectives.divide_gradients(output)
        return output

    def _push(self, number: int) -> None:
        """Start to copy a leaf's gradient, or its parts, to the other ranks."""
        if self.is_accumulating:
            return
        leaf = self._leaves[number]
        gradient = _gradient(leaf.tensor).view(-1)
        if leaf.shared_elements:
            parts = gradient[: leaf.shared_elements].view(self._ranks, -1)
            sources = [parts[other] for other in self._others]
        else:
            sources = [gradient for _ in self._others]
        self._pushes.start(list(zip(sources, self._targets[number], strict=True)))

    @torch.no_grad()
    def _average(self, leaves: Sequence[Leaf]) -> None:
        """Wait for all pushes, then add up the gradients of all ranks in rank order, unless the
        optimizer adds them.
        """
        self._pushes.finish()
        if not self._adds:
            return
        rank = dist.get_rank()
        for leaf in leaves:
            result = _averaged_part(leaf, _gradient(leaf.tensor))
            rows = self._received[leaf.tensor]
            in_order = [*rows[:rank], result, *rows[rank:]]
            total, others = in_order[0], in_order[1:]
            for count, gradient in enumerate(others, start=1):
                # the last sum goes where the optimizer reads the gradient
                torch.add(total, gradient, out=result if count == len(others) else total)


def _averaged_part(leaf: Leaf, tensor: Tensor) -> Tensor:
    """The elements of a leaf's tensor, flattened, whose average this rank gets: its own part if the
    leaf is shared out among the ranks, else all.
    """
    flat = tensor.view(-1)
    return collectives.own_part(flat[: leaf.shared_elements]) if leaf.shared_elements else flat


@dataclass(slots=True, eq=False)
class _Bucket:
    """Leaves whose gradients are averaged together."""

    leaves: Sequence[Leaf]
    num_missing: int
    """How many gradients this backward has still to compute."""
    averaging: collectives.Averaging | None = None


def _averaging(leaves: Sequence[Leaf]) -> collectives.Averaging:
    """Start to average the gradients of the leaves, in place."""
    whole: list[Tensor] = []
    shared_out: list[Tensor] = []
    for leaf in leaves:
        gradient = _gradient(leaf.tensor)
        if leaf.shared_elements:
            shared_out.append(gradient.view(-1)[: leaf.shared_elements])
        else:
            whole.append(gradient)
    return collectives.Averaging(whole, shared_out)


def _gradient(tensor: Tensor) -> Tensor:
    """The gradient of a tensor, replaced by a contiguous copy first if it is not contiguous."""
    assert tensor.grad is not None
    tensor.grad = tensor.grad.contiguous()
    return tensor.grad


def _split(order: Sequence[int], leaves: Sequence[Leaf], bucket_bytes: int) -> list[list[int]]:
    """Split the numbers of leaves into buckets of one type each; a bucket ends with the leaf that
    fills it.

    Buckets are in the order in which they become complete.
    """
    buckets: list[list[int]] = []
    for dtype in {leaf.tensor.dtype for leaf in leaves}:
        numbers = [number for number in order if leaves[number].tensor.dtype is dtype]
        sizes = [leaves[number].tensor.nbytes for number in numbers]
        for places in split_into_buckets(sizes, bucket_bytes):
            buckets.append([numbers[place] for place in places])
    return sorted(buckets, key=lambda bucket: order.index(bucket[-1]))
