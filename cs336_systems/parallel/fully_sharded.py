"""Fully sharded data parallelism: each rank keeps a part of every matrix, of its gradient and of the optimizer's state.

`FSDP(module, compute_dtype)`, then in each step backward, `finish_gradient_synchronization()`, and the optimizer, which
is made after the module is wrapped. A unit (a block, or a layer outside of blocks) is gathered before its forward,
while the unit before it computes, freed after it, and gathered again for backward; then its gradients are averaged and
each rank keeps its part of them. Vectors, such as the gains of norms, are not sharded: there is little to save.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.model.transformer import Embedding
from cs336_systems.parallel.collectives import Averaging, take_from_rank_0, wait
from cs336_systems.parallel.units import Found, units_of


class FSDP(nn.Module):
    """A module whose matrices are sharded over the ranks.

    Its parameters are the shards, which have one axis, under the names of the whole ones. `compute_dtype` is the type
    in which matrices are gathered, multiplied and have their gradients averaged; shards, their gradients and so the
    optimizer's state keep the parameters' own type. Embeddings are gathered in their own type, because a lookup is no
    matrix product.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        take_from_rank_0(module)
        found = ((part, [each for each in own if each.parameter.ndim >= 2]) for part, own in units_of(module))
        self._units = [_Unit(part, own, compute_dtype) for part, own in found if own or part is None]
        shards = {id(each.shard) for unit in self._units for each in unit.sharded}
        self._replicated = [each for each in module.parameters() if id(each) not in shards]
        self._order: list[_Unit] = []
        """Units in the order of the last forward."""
        self._seen: list[_Unit] = []
        self._in_backward = False
        self._reducing: _Unit | None = None
        self._open: _Unit | None = None
        """A unit that one of its layers began, because the model calls the layers of the unit and not its module."""
        *self._parts, self._whole = self._units
        for unit in self._parts:
            assert unit.module is not None
            unit.module.register_forward_pre_hook(lambda _module, _inputs, unit=unit: self._before_forward(unit))
            # always, because a checkpoint ends its recomputation by an exception
            unit.module.register_forward_hook(
                lambda _module, _inputs, output, unit=unit: self._after_forward(unit, output), always_call=True
            )
            for layer in unit.layers:
                layer.register_forward_pre_hook(lambda _module, _inputs, unit=unit: self._before_layer(unit))
                layer.register_forward_hook(lambda _module, _inputs, output, unit=unit: self._after_layer(unit, output))
        for unit in self._units:
            unit.when_graded = self._after_backward

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401 (whatever the module takes and returns)
        self._order, self._seen, self._in_backward = self._seen or self._order, [], False
        self._whole.gather()
        self._whole.install()
        self._gather_ahead(self._order[:1])
        try:
            output = self.module(*inputs, **named_inputs)
        finally:
            self._whole.uninstall()
            self._close()
        if not torch.is_grad_enabled():
            self._free_all()
        return output

    def finish_gradient_synchronization(self) -> None:
        """Average what is left, and give each shard its gradient; call it between backward and the optimizer."""
        for unit in self._units:
            unit.reduce()
            unit.take_gradients()
        self._reducing = None
        self._close()
        Averaging([each.grad for each in self._replicated if each.grad is not None]).wait()
        self._free_all()
        self._in_backward = False

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """All parameters whole, in their own type, by their names in the module; every rank must call it."""
        whole = {name: each.detach().clone() for name, each in self.module.named_parameters(remove_duplicate=False)}
        for unit in self._units:
            for sharded in unit.sharded:
                full = sharded.gathered()
                for name, each in self.module.named_parameters(remove_duplicate=False):
                    if each is sharded.shard:
                        whole[name] = full
        return whole

    def _before_layer(self, unit: "_Unit") -> None:
        if not unit.is_installed:
            self._before_forward(unit)
            self._open = unit

    def _after_layer(self, unit: "_Unit", output: Any) -> None:  # noqa: ANN401
        if unit is self._open and not self._in_backward:
            self._gather_for_backward(unit, output)

    def _close(self) -> None:
        """End the unit that a layer began: the model has gone on to another one."""
        unit, self._open = self._open, None
        if unit is not None:
            self._after_forward(unit, None)

    def _before_forward(self, unit: "_Unit") -> None:
        self._close()
        unit.gather()
        unit.install()
        if self._in_backward:  # a checkpoint computes the unit again
            return
        place = len(self._seen)
        self._seen.append(unit)
        if self._order[place : place + 1] == [unit]:
            self._gather_ahead(self._order[place + 1 : place + 2])

    def _after_forward(self, unit: "_Unit", output: Any) -> None:  # noqa: ANN401
        unit.uninstall()
        if self._in_backward:
            return
        if not self._order or unit is not self._order[-1] or not torch.is_grad_enabled():
            unit.free()  # backward begins with the last unit, so that stays
        self._gather_for_backward(unit, output)

    def _gather_for_backward(self, unit: "_Unit", output: Any) -> None:  # noqa: ANN401
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _gradient, unit=unit: self._before_backward(unit))

    def _before_backward(self, unit: "_Unit") -> None:
        self._in_backward = True
        if not unit.is_lookup:
            unit.gather()
        place = self._seen.index(unit)
        self._gather_ahead([each for each in self._seen[max(0, place - 1) : place] if not each.is_lookup])

    def _after_backward(self, unit: "_Unit") -> None:
        """All gradients of the unit are there: average them while backward goes on, and wait for the unit before it.

        So the whole gradients of at most two units are kept.
        """
        if self._reducing is not None:
            self._reducing.take_gradients()
        unit.reduce()
        self._reducing = unit
        if unit is not self._whole and not unit.has_frozen:
            unit.free()

    def _gather_ahead(self, units: Sequence["_Unit"]) -> None:
        for unit in units:
            unit.start_gather()

    def _free_all(self) -> None:
        for unit in self._units:
            unit.free()


class _Sharded:
    """A parameter of which this rank keeps one part, padded with zeros so that all parts have one length."""

    def __init__(self, found: Found, compute_dtype: torch.dtype | None) -> None:
        self.places, whole = found.places, found.parameter
        self._ranks = dist.get_world_size()
        self._count, self._shape = whole.numel(), whole.shape
        self._length = -(-self._count // self._ranks)
        dtype = whole.dtype if compute_dtype is None or found.is_of_embedding else compute_dtype
        first = dist.get_rank() * self._length
        own = whole.new_zeros(self._length)
        part = whole.detach().view(-1)[first : first + self._length]
        own[: len(part)] = part
        self.shard = nn.Parameter(own, requires_grad=whole.requires_grad)
        self._flat = torch.empty(self._ranks * self._length, dtype=dtype, device=whole.device)
        # `data` has a count of versions of its own: gathering again must not look like a change of saved tensors
        self.full = nn.Parameter(self._flat.data[: self._count].view(self._shape), requires_grad=whole.requires_grad)
        self._bytes = self._flat.untyped_storage().nbytes()
        self.free()
        self._reduced: Tensor | None = None
        self._divides = dist.get_backend() != "nccl"  # gloo has no average
        self.uninstall()

    def allocate(self) -> tuple[Tensor, Tensor]:
        """Allocate the whole parameter; return it and this rank's part, for an all-gather."""
        self._flat.untyped_storage().resize_(self._bytes)
        return self._flat, self.shard.detach().to(self._flat.dtype)

    def free(self) -> None:
        """Free the whole parameter; what autograd has saved of it is there again once it is gathered again."""
        self._flat.untyped_storage().resize_(0)

    def gathered(self) -> Tensor:
        """The whole parameter in the type of its shards, in memory of its own."""
        flat = self.shard.new_empty(self._ranks * self._length)
        dist.all_gather_into_tensor(flat, self.shard.detach())
        return flat[: self._count].view(self._shape)

    def install(self) -> None:
        """Let the modules compute with the whole parameter."""
        self._put(self.full)

    def uninstall(self) -> None:
        """Let the modules have the shard as their parameter."""
        self._put(self.shard)

    def _put(self, parameter: nn.Parameter) -> None:
        for place in self.places:
            place.owner._parameters[place.name] = parameter

    def start_reduce(self) -> dist.Work | None:
        """Start to average the gradient over the ranks; each keeps its part."""
        gradient, self.full.grad = self.full.grad, None
        if gradient is None:
            return None
        flat = gradient.contiguous().view(-1)
        if len(flat) < len(self._flat):
            flat = torch.cat([flat, flat.new_zeros(len(self._flat) - len(flat))])
        self._reduced = flat.new_empty(self._length)
        op = dist.ReduceOp.SUM if self._divides else dist.ReduceOp.AVG
        work: dist.Work | None = dist.reduce_scatter_tensor(self._reduced, flat, op=op, async_op=True)
        return work

    def take_gradient(self) -> None:
        """Give the shard its gradient, for which the caller has waited."""
        part, self._reduced = self._reduced, None
        if part is None:
            return
        mean = (part.div_(self._ranks) if self._divides else part).to(self.shard.dtype)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean


class _Unit:
    """Sharded parameters that are gathered, freed and averaged together."""

    def __init__(self, module: nn.Module | None, found: Sequence[Found], compute_dtype: torch.dtype | None) -> None:
        self.module = module
        self.sharded = [_Sharded(each, compute_dtype) for each in found]
        self.is_lookup = isinstance(module, Embedding | nn.Embedding)
        """Backward of a lookup does not read the weights."""
        trained = [each for each in self.sharded if each.shard.requires_grad]
        self.has_frozen = len(trained) < len(self.sharded)
        """Backward may need a frozen parameter after the last gradient of the others."""
        self.when_graded: Any = None
        self._num_trained, self._num_graded = len(trained), 0
        self._gathering: list[dist.Work | None] = []
        self._reducing: list[dist.Work | None] = []
        self._is_there = self.is_installed = False
        for each in trained:
            each.full.register_post_accumulate_grad_hook(self._count)

    def start_gather(self) -> None:
        """Start to gather the parameters, unless they are there or on their way."""
        if self._is_there:
            return
        self._is_there = True
        self._gathering = [dist.all_gather_into_tensor(*each.allocate(), async_op=True) for each in self.sharded]

    def gather(self) -> None:
        """Gather the parameters, or wait until they are there."""
        self.start_gather()
        _wait_for(self._gathering)

    def free(self) -> None:
        """Free the parameters, if they are there."""
        if self._is_there:
            _wait_for(self._gathering)
            for each in self.sharded:
                each.free()
            self._is_there = False

    @property
    def layers(self) -> list[nn.Module]:
        """The modules in the unit that have its parameters, besides the unit's own module."""
        owners = [place.owner for each in self.sharded for place in each.places]
        return [each for each in dict.fromkeys(owners) if each is not self.module]

    def install(self) -> None:
        """Let the module compute with the whole parameters."""
        self.is_installed = True
        for each in self.sharded:
            each.install()

    def uninstall(self) -> None:
        """Let the module have the shards as its parameters."""
        self.is_installed = False
        for each in self.sharded:
            each.uninstall()

    def _count(self, _parameter: Tensor) -> None:
        self._num_graded += 1
        if self._num_graded == self._num_trained:
            self.when_graded(self)

    def reduce(self) -> None:
        """Start to average the gradients that are there."""
        self._num_graded = 0
        self._reducing += [each.start_reduce() for each in self.sharded if each.full.grad is not None]

    def take_gradients(self) -> None:
        """Wait for the averages, and give each shard its gradient."""
        _wait_for(self._reducing)
        for each in self.sharded:
            each.take_gradient()


def _wait_for(works: list[dist.Work | None]) -> None:
    for work in works:
        wait(work)
    works.clear()
