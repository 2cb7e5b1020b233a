"""Fully sharded data parallelism: each rank keeps a part of every matrix, of its gradient and of
the optimizer's state.

Wrap a module by `FSDP(module, compute_dtype)`, then make the optimizer. In each step run backward,
`finish_gradient_synchronization()` and the optimizer. A unit (a block, or a layer outside of
blocks) is gathered while the units before it compute, freed after its forward, and gathered again
for backward; then its gradients are averaged and each rank keeps its part of them. Vectors, such as
the gains of norms, are not sharded: they are small.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Parallel
from .collectives import divide_gradients, graded, take_from_rank_0
from .exchange import CollectiveExchange, Exchange, PeerCopies
from .sharded_units import ShardedUnit, UnitParameters, units_of

AHEAD = Parallel.FSDP.exchange.units_ahead
"""Units that are gathered ahead of the one that computes."""


class FSDP(nn.Module):
    """A module whose matrices are sharded over the ranks. It must call its blocks, not only the
    layers in them.

    Its parameters are the shards, which have one axis, under the names of the whole ones.
    `compute_dtype` is the type in which matrices are gathered, multiplied and have their gradients
    averaged; shards, their gradients and so the optimizer's state keep the parameters' own type.
    Embeddings are gathered in their own type, because a lookup is no matrix product. `units` say
    what is gathered together, if not all parameters by block and layer.

    With `copies`, ranks copy parts and gradients from and to each other's memory instead of calling
    collectives. On GPUs that occupies no multiprocessor (see parallel/exchange.py), but takes
    memory for the gradients that other ranks send. Without `adds` the optimizer adds these up,
    because it reads them anyway. Gradients are exchanged after every backward pass, and those of a
    shard add up.
    """

    is_accumulating = False

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        units: Sequence[UnitParameters] | None = None,
        *,
        copies: bool = False,
        adds: bool = True,
    ) -> None:
        """Shard the matrices of `module`, in `units` of parameters that are gathered together (by
        default, those of its blocks).

        With `copies`, ranks copy each other's memory instead of calling collectives; `adds` says
        whether gradients are then added up here or by the optimizer. Matrices are gathered in
        `compute_dtype`, if it is given.
        """
        super().__init__()
        self.module = module
        take_from_rank_0(module)
        device = next(module.parameters()).device
        self._exchange: Exchange = CollectiveExchange()
        if copies:
            self._exchange = PeerCopies(device, adds=adds)
        self._replicated: list[Tensor] = []
        """Vectors, which every rank has whole."""
        self._units: list[ShardedUnit] = []
        for unit in units_of(module) if units is None else units:
            self._shard(unit, compute_dtype)
        self._flats = list(chain.from_iterable(unit.flats for unit in self._units))
        self._exchange.connect(self._flats)
        self._last_order: list[ShardedUnit] = []
        """Units in the order of the last forward."""
        self._order: list[ShardedUnit] = []
        """Units that this forward has reached, in order."""
        self._in_backward = False
        self._reducing: ShardedUnit | None = None
        """The unit whose gradients are being averaged."""
        *parts, self._rest = self._units
        for part in parts:
            self._register(part)
        for sharded in self._units:
            sharded.when_graded = self._after_backward

    def _shard(self, unit: UnitParameters, compute_dtype: torch.dtype | None) -> None:
        """Shard the unit's matrices; a unit without any is left out, unless it is the rest."""
        matrices = [parameter for parameter in unit.parameters if parameter.full.ndim > 1]
        vectors = [parameter for parameter in unit.parameters if parameter.full.ndim <= 1]
        self._replicated += [vector.full for vector in vectors]
        if matrices or unit.module is None:
            unit = replace(unit, parameters=matrices)
            self._units.append(ShardedUnit(unit, compute_dtype, self._exchange))

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        """Call the module, with parameters gathered just before they are needed.

        The order of the units in the last forward tells which to gather first. Without gradients,
        all gathered parameters are freed at the end.
        """
        self._last_order = self._order or self._last_order
        self._order = []
        self._in_backward = False
        self._exchange.begin()
        self._rest.gather()
        self._rest.install()
        self._gather_ahead(self._last_order[:AHEAD])
        try:
            output = self.module(*inputs, **named_inputs)
        finally:
            self._rest.uninstall()
        if not torch.is_grad_enabled():
            self._free_all()
        elif not self._exchange.averages:
            divide_gradients(output)
        return output

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients whose averages have not started, and give each shard its averaged
        gradient; call it between backward and the optimizer.
        """
        for unit in self._units:
            unit.reduce()
            unit.wait_for_gradients()
        self._reducing = None
        self._free_all()
        self._exchange.receive()
        for unit in self._units:
            unit.take_gradients()
        self._exchange.average(
            [vector.grad for vector in self._replicated if vector.grad is not None]
        )
        self._in_backward = False

    def _register(self, unit: ShardedUnit) -> None:
        """Have the unit gathered before each call of its module, and freed after it."""
        module = unit.module
        assert module is not None
        if module._compiled_call_impl is not None:  # hooks would be compiled too
            module._compiled_call_impl = functools.partial(
                self._call, unit, module._compiled_call_impl
            )
            return
        module.register_forward_pre_hook(lambda _module, _inputs: self._before_forward(unit))
        # always, because a checkpoint ends its recomputation by an exception
        module.register_forward_hook(
            lambda _module, _inputs, output: self._after_forward(unit, output), always_call=True
        )

    def _call(
        self,
        unit: ShardedUnit,
        compiled: Callable[..., Any],
        *inputs: Any,  # noqa: ANN401
        **named_inputs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call a compiled module with its parameters gathered."""
        self._before_forward(unit)
        output = None
        try:
            output = compiled(*inputs, **named_inputs)
        finally:
            self._after_forward(unit, output)
        return output

    def watch_gathers(self, see: Callable[[str, Tensor], None]) -> list[Tensor]:
        """Have `see` called with a unit's name and tensor whenever memory for its whole parameters
        is allocated.

        Return all these tensors; their storage is empty while the parameters are not gathered.
        """
        for unit in self._units:
            unit.when_allocated = see
        return [flat.gathered for flat in self._flats]

    def shard_of(self, parameter: Tensor) -> Tensor:
        """This rank's part of a whole tensor that a unit shards: a parameter that the module had
        before wrapping, or another tensor that the caller has put into the units.
        """
        parameters = chain.from_iterable(unit.parameters for unit in self._units)
        return next(sharded.shard for sharded in parameters if sharded.full is parameter)

    def received(self, parameter: Tensor) -> tuple[Tensor, ...] | None:
        """Buffers with the other ranks' gradients of this rank's part, in rank order; None if
        they send none.
        """
        if not isinstance(self._exchange, PeerCopies):
            return None
        for flat in self._flats:
            for sharded, rows in zip(flat.parameters, self._exchange.received(flat), strict=True):
                if sharded.full is parameter:
                    return rows
        return None

    def _before_forward(self, unit: ShardedUnit) -> None:
        """Gather the unit, and start to gather those that came next in the last forward."""
        unit.gather()
        unit.install()
        if self._in_backward:  # a checkpoint computes the unit again
            return
        place = len(self._order)
        self._order.append(unit)
        if self._last_order[place : place + 1] == [unit]:
            self._gather_ahead(self._last_order[place + 1 : place + 1 + AHEAD])

    def _after_forward(self, unit: ShardedUnit, output: Any) -> None:  # noqa: ANN401
        """Free the unit, unless backward begins with it, and have backward gather it again."""
        unit.uninstall()
        if self._in_backward:
            return
        is_last = self._last_order[-1:] == [unit]
        # backward begins with the last unit, so that stays
        if not (is_last and torch.is_grad_enabled()):
            unit.free()
        for tensor in graded(output):
            tensor.register_hook(lambda _gradient, unit=unit: self._before_backward(unit))

    def _before_backward(self, unit: ShardedUnit) -> None:
        """Gather the unit for its backward, and start to gather those before it."""
        self._in_backward = True
        if not unit.is_lookup:
            unit.gather()
        place = self._order.index(unit)
        next_ones = reversed(self._order[max(0, place - AHEAD) : place])
        self._gather_ahead([ahead for ahead in next_ones if not ahead.is_lookup])

    def _after_backward(self, unit: ShardedUnit) -> None:
        """Start to average the unit's gradients, all of which are ready, and wait for those of the
        previous unit.

        So the whole gradients of at most two units are in memory.
        """
        if self._reducing is not None:
            self._reducing.wait_for_gradients()
        unit.reduce()
        self._reducing = unit
        if unit is not self._rest and not unit.has_frozen:
            unit.free()

    def _gather_ahead(self, units: Sequence[ShardedUnit]) -> None:
        """Start to gather the parameters of these units, without waiting."""
        for unit in units:
            unit.start_gather()

    def _free_all(self) -> None:
        """Free the gathered parameters of all units."""
        for unit in self._units:
            unit.free()
