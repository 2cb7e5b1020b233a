"""Data parallelism: every rank has the whole model and a batch of its own, and gradients are
averaged over the ranks.

Wrap a module in one of the classes; then in each step run backward,
`finish_gradient_synchronization()` and the optimizer. Parameters and buffers begin with the values
of rank 0. Later changes of buffers are not exchanged. A parameter without a gradient must have none
on any rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..costs.communication import split_into_buckets
from ..costs.shards import next_owner
from ..model.optimizer import EagerOptimizer
from . import collectives
from .exchange import Pushes, of_all_ranks, shared_rows

OTHER_GRADIENTS = "backward made other gradients than in the first step; use ddp-naive or ddp-flat"


class Leaf(NamedTuple):
    """A tensor that backward computes a gradient for."""

    name: str
    tensor: Tensor
    shared_elements: int = 0
    """Leading elements of whose average each rank gets only its own part; 0: every rank gets the
    whole average.
    """


class NaiveDDP(nn.Module):
    """One all-reduce for each parameter, all of them after backward.

    `leaves` are the tensors whose gradients are averaged: all parameters, unless the module
    computes with others.
    """

    def __init__(self, module: nn.Module, leaves: Sequence[Leaf] | None = None) -> None:
        super().__init__()
        self.module = module
        collectives.take_from_rank_0(module)
        every = [Leaf(*named) for named in module.named_parameters()] if leaves is None else leaves
        self._leaves = [leaf for leaf in every if leaf.tensor.requires_grad]
        self._are_checked = False

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        return self.module(*inputs, **named_inputs)

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

    def _average(self, leaves: Sequence[Leaf]) -> None:
        for leaf in leaves:
            _averaging([leaf]).wait()


class FlatDDP(NaiveDDP):
    """One all-reduce for all parameters of a type, after backward."""

    def _average(self, leaves: Sequence[Leaf]) -> None:
        shared_out = [leaf for leaf in leaves if leaf.shared_elements]
        whole = [leaf.tensor for leaf in leaves if not leaf.shared_elements]
        groups = [
            [each for each in whole if each.dtype is dtype]
            for dtype in dict.fromkeys(t.dtype for t in whole)
        ]
        flats = [collectives.flattened([_gradient(tensor) for tensor in group]) for group in groups]
        for averaging in (collectives.Averaging(flats), _averaging(shared_out)):
            averaging.wait()
        for group, flat in zip(groups, flats, strict=True):
            for tensor, part in zip(group, collectives.parts_of(flat, group), strict=True):
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
        super().__init__(module, leaves)
        self._bucket_bytes = bucket_bytes
        self._ready: dict[int, None] = {}
        """Numbers of the leaves whose gradients this backward has computed, in the order in
        which they became ready.
        """
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._num_started = 0
        for number, leaf in enumerate(self._leaves):
            leaf.tensor.register_post_accumulate_grad_hook(
                lambda _, number=number: self._note(number)
            )

    def _note(self, number: int) -> None:
        if number in self._ready:
            raise RuntimeError(
                "backward came twice before finish_gradient_synchronization(), and gradients of "
                "the first may be averaged already; use ddp-naive or ddp-flat to add up the "
                "gradients of several batches"
            )
        self._ready[number] = None
        if not self._buckets:
            return
        if number not in self._bucket_of:
            raise RuntimeError(OTHER_GRADIENTS)
        self._bucket_of[number].num_missing -= 1
        while (
            self._num_started < len(self._buckets)
            and not self._buckets[self._num_started].num_missing
        ):
            bucket = self._buckets[self._num_started]
            bucket.averaging = _averaging(bucket.leaves)
            self._num_started += 1

    def _average(self, leaves: Sequence[Leaf]) -> None:
        if self._buckets:
            for bucket in self._buckets:
                if bucket.averaging is None:
                    raise RuntimeError(OTHER_GRADIENTS)
                bucket.averaging.wait()
                bucket.averaging, bucket.num_missing = None, len(bucket.leaves)
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
        super().__init__(module, leaves)
        self._adds = adds
        rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._others = [other for other in range(self._ranks) if other != rank]
        parts = [_own(leaf, leaf.tensor.detach()) for leaf in self._leaves]
        rows = [shared_rows(part, self._ranks - 1) for part in parts]
        self._received = [
            list(each[:, : len(part)]) for each, part in zip(rows, parts, strict=True)
        ]
        """For each leaf, buffers for the gradients of the other ranks, in the order of the
        ranks.
        """
        theirs = of_all_ranks(rows)
        row_there = {other: rank if rank < other else rank - 1 for other in self._others}
        self._targets = [
            [theirs[other][number][row_there[other], : len(part)] for other in self._others]
            for number, part in enumerate(parts)
        ]
        self._pushes = Pushes(self._leaves[0].tensor.device, waits=True)
        for number, leaf in enumerate(self._leaves):
            leaf.tensor.register_post_accumulate_grad_hook(
                lambda _, number=number: self._push(number)
            )

    def received(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """Buffers of a leaf's gradients from the other ranks, each as one axis, in rank order;
        None if not a leaf.
        """
        found = (
            rows
            for leaf, rows in zip(self._leaves, self._received, strict=True)
            if leaf.tensor is tensor
        )
        return next(map(tuple, found), None)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        output = super().forward(*inputs, **named_inputs)
        collectives.divide_gradients(output)
        return output

    def _push(self, number: int) -> None:
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
        self._pushes.finish()
        if not self._adds:
            return
        rank = dist.get_rank()
        received = {
            id(leaf.tensor): rows for leaf, rows in zip(self._leaves, self._received, strict=True)
        }
        for leaf in leaves:
            own, rows = _own(leaf, _gradient(leaf.tensor)), received[id(leaf.tensor)]
            in_order = [*rows[:rank], own, *rows[rank:]]
            first, others = in_order[0], in_order[1:]
            for count, other in enumerate(others, start=1):
                torch.add(first, other, out=own if count == len(others) else first)


def _own(leaf: Leaf, tensor: Tensor) -> Tensor:
    """The elements, as one axis, whose average this rank gets."""
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
    whole = [_gradient(leaf.tensor) for leaf in leaves if not leaf.shared_elements]
    shared = [leaf for leaf in leaves if leaf.shared_elements]
    return collectives.Averaging(
        whole, [_gradient(leaf.tensor).view(-1)[: leaf.shared_elements] for leaf in shared]
    )


def _gradient(tensor: Tensor) -> Tensor:
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


class ShardedOptimizer(EagerOptimizer):
    """`optimizer_cls(params, **kwargs)`; each rank updates the parameters it owns (ZeRO-1,
    Rajbhandari et al. 2020).

    Each rank must have the whole gradients of the parameters that it owns, as after data
    parallelism. Every parameter goes to the rank that owns the fewest elements so far, so that the
    shares are about equal. Hyperparameters are those of `param_groups`, so learning-rate schedulers
    work as usual. Saving and loading its state is left out.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        **kwargs: Any,  # noqa: ANN401 (hyperparameters of any optimizer)
    ) -> None:
        self._make, self._settings = optimizer_cls, kwargs
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._owned = [0] * self._ranks
        """Elements that each rank owns."""
        self._owner: dict[nn.Parameter, int] = {}
        self._local: torch.optim.Optimizer | None = None
        """None as long as this rank owns no parameter."""
        self._local_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Groups of all parameters, each with the group of those that this rank owns."""
        super().__init__(params, kwargs)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override] # noqa: ANN401
        """Update the parameters of this rank, then broadcast every parameter with a gradient from
        its owner.

        `kwargs` are given to the optimizer's own step, as in the course's interface.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, local in self._local_groups:
            local.update({name: value for name, value in group.items() if name != "params"})
        if self._local is not None:
            self._local.step(**kwargs)
        updated = [each for each in self._owner if each.grad is not None]
        values = [each.detach().contiguous() for each in updated]
        works = [
            dist.broadcast(value, src=self._owner[each], async_op=True)
            for each, value in zip(updated, values, strict=True)
        ]
        for work in works:
            work.wait()
        for each, value in zip(updated, values, strict=True):
            if value.data_ptr() != each.data_ptr():
                each.copy_(value)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Share out the parameters of another group; every rank must add the same."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, value in self._usual(group["params"]).items():
            group.setdefault(name, value)
        for parameter in group["params"]:
            self._owner[parameter] = next_owner(self._owned, parameter.numel())
        own = [parameter for parameter in group["params"] if self._owner[parameter] == self._rank]
        if not own:
            return
        local = {**group, "params": own}
        if self._local is None:
            self._local = self._make([local], **self._settings)
            self.state = self._local.state
        else:
            self._local.add_param_group(local)
        self._local_groups.append((group, self._local.param_groups[-1]))

    def _usual(self, parameters: list[nn.Parameter]) -> dict[str, Any]:
        """Default hyperparameters of `optimizer_cls`, for ranks that own no parameter too."""
        return self._make(
            [nn.Parameter(each[:0]) for each in parameters[:1]], **self._settings
        ).defaults
