"""Fully sharded data parallelism: each rank keeps a part of every matrix, of its gradient and of
the optimizer's state.

Wrap a module by `FSDP(module, compute_dtype)`, then make the optimizer. In each step run backward,
`finish_gradient_synchronization()` and the optimizer. A unit (a block, or a layer outside of
blocks) is gathered while the units before it compute, freed after its forward, and gathered again
for backward; then its gradients are averaged and each rank keeps its part of them. Vectors, such as
the gains of norms, are not sharded: they are small.

The host launches one NCCL kernel for all gathers of a unit, and one for its averages. A rank's
parts of a unit are one tensor, so that one kernel casts them; the gathered parameters of a unit are
one tensor too.

**The fast model** has masters, and low-precision copies that it computes with. A rank keeps and
updates its part of every matrix's master and of the optimizer's state. With whole copies (ZeRO-2,
Rajbhandari et al. 2020) it receives only its part of the average gradient, and sends its part of
the updated copy to the others. With sharded copies (`CopyFSDP`) the copies, and masters that the
model reads itself, are gathered to compute with.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import Parallel
from ..costs.shards import REST, aligned
from ..model.annotate import annotate
from ..model.fast.master_adamw import IN_FP32, MasterAdamW, Storage
from ..model.fast.model import COPY_DTYPE, FastLM
from ..model.fast.weights import ALIGNMENT, LeafSlice, Received, Weight
from ..model.trainable import blocks_of
from ..model.transformer import Embedding
from .collectives import all_gather, divide_gradients, graded, grouped, own_part, take_from_rank_0
from .data_parallel import Leaf, PushDDP
from .exchange import CollectiveExchange, Exchange, PeerCopies, Pushes, Started, of_all_ranks

AHEAD = Parallel.FSDP.exchange.units_ahead
"""Units that are gathered ahead of the one that computes."""


@dataclass(slots=True, eq=False)
class ShardedParameter:
    """A parameter of which this rank keeps one part, padded with zeros so that all parts have one
    length.

    It can also be another leaf tensor that the module computes with.
    """

    name: str
    full: Tensor
    """The parameter as the module computes with it, which is there only while it is gathered."""
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Modules that hold the parameter, and its name there: several for a tied one, none for
    another leaf tensor.
    """
    least_elements: int = 0
    """Least length to which the parameter is padded before it is divided among ranks."""
    shard: nn.Parameter = field(init=False)

    def part_length(self, ranks: int) -> int:
        """Elements of one rank's part, the last of which are padded with zeros."""
        return -(-max(self.full.numel(), self.least_elements) // ranks)

    @property
    def is_of_embedding(self) -> bool:
        """Whether an embedding lookup reads the parameter; autocast does not cast those."""
        return any(isinstance(owner, Embedding | nn.Embedding) for owner, _ in self.slots)

    def shard_into(self, part: Tensor, whole: Tensor) -> None:
        """Keep this rank's part in the memory `part`; `whole` is that of all ranks' parts once
        they are gathered.
        """
        part.copy_(padded_part(self.full.detach(), len(part)))
        self.shard = nn.Parameter(part, requires_grad=self.full.requires_grad)
        # `data` has a version counter of its own, so to autograd another gather is no change of
        # saved tensors
        self.full.data = self.shaped(whole.data)
        self.put(self.shard)

    def shaped(self, whole: Tensor) -> Tensor:
        """The parts of all ranks in the parameter's shape."""
        return whole[: self.full.numel()].view(self.full.shape)

    def put(self, parameter: Tensor) -> None:
        """Set the modules' parameter to the shard or to the whole parameter."""
        for owner, name in self.slots:
            owner._parameters[name] = cast("nn.Parameter", parameter)

    def take_whole_gradient(self, length: int) -> Tensor:
        """Return and clear the gradient of the whole parameter, padded to this length."""
        gradient, self.full.grad = self.full.grad, None
        assert gradient is not None
        flat = gradient.contiguous().view(-1)
        return (
            flat if len(flat) == length else torch.cat([flat, flat.new_zeros(length - len(flat))])
        )

    def add_gradient(self, mean: Tensor) -> None:
        """Add to the gradient of the shard."""
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnitParameters:
    """Parameters that are gathered together, and the module that holds them."""

    name: str
    """Path of the module, or REST."""
    module: nn.Module | None
    """None for REST: parameters that belong to no single block or layer."""
    found: list[ShardedParameter]


def parameters_of(module: nn.Module) -> list[ShardedParameter]:
    """All parameters of the module, each once."""
    found: dict[Tensor, ShardedParameter] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{prefix}.{name}" if prefix else name
            found.setdefault(parameter, ShardedParameter(path, parameter)).slots.append(
                (owner, name)
            )
    return list(found.values())


def units_of(module: nn.Module) -> list[UnitParameters]:
    """The parameters of the module by the unit that they belong to, in the order of its modules.

    Units are the blocks, and outside of them each module that has parameters itself. The last one
    has the parameters that several units use, and those of `module` itself.
    """
    blocks = list(blocks_of(module))
    inside = {id(part) for block in blocks for part in block.modules()}
    singles = [each for each in module.modules() if id(each) not in inside and each is not module]
    owners = {id(part): block for block in blocks for part in block.modules()} | {
        id(each): each for each in singles
    }
    shared: list[ShardedParameter] = []
    members: dict[int, list[ShardedParameter]] = {}
    for each in parameters_of(module):
        using = Counter(id(owners.get(id(owner), module)) for owner, _ in each.slots)
        (target, *others) = using
        if others or target == id(module):
            shared.append(each)
        else:
            members.setdefault(target, []).append(each)
    units = [
        UnitParameters(name=path, module=part, found=members[id(part)])
        for path, part in module.named_modules()
        if id(part) in members
    ]
    return [*units, UnitParameters(name=REST, module=None, found=shared)]


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
    because it reads them anyway.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        units: Sequence[UnitParameters] | None = None,
        *,
        copies: bool = False,
        adds: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        take_from_rank_0(module)
        every = units_of(module) if units is None else units
        matrices = [
            replace(unit, found=[each for each in unit.found if each.full.ndim > 1])
            for unit in every
        ]
        self._replicated = [
            each.full for unit in every for each in unit.found if each.full.ndim <= 1
        ]
        device = next(module.parameters()).device
        self._exchange = exchange = (
            PeerCopies(device, adds=adds) if copies else CollectiveExchange()
        )
        kept = (unit for unit in matrices if unit.found or unit.module is None)
        self._units = [_ShardedUnit(unit, compute_dtype, exchange) for unit in kept]
        exchange.connect([flat for unit in self._units for flat in unit.flats])
        self._order: list[_ShardedUnit] = []
        """Units in the order of the last forward."""
        self._seen: list[_ShardedUnit] = []
        self._in_backward = False
        self._reducing: _ShardedUnit | None = None
        *self._parts, self._whole = self._units
        for unit in self._parts:
            self._watch(unit)
        for unit in self._units:
            unit.when_graded = self._after_backward

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        self._order, self._seen, self._in_backward = self._seen or self._order, [], False
        self._exchange.begin()
        self._whole.gather()
        self._whole.install()
        self._gather_ahead(self._order[:AHEAD])
        try:
            output = self.module(*inputs, **named_inputs)
        finally:
            self._whole.uninstall()
        if not torch.is_grad_enabled():
            self._free_all()
        elif not self._exchange.averages:
            divide_gradients(output)
        return output

    def finish_gradient_synchronization(self) -> None:
        """Average what is left, and give each shard its gradient; call it between backward and
        the optimizer.
        """
        for unit in self._units:
            unit.reduce()
            unit.wait_for_gradients()
        self._reducing = None
        self._free_all()
        self._exchange.receive()
        for unit in self._units:
            unit.take_gradients()
        self._exchange.average([each.grad for each in self._replicated if each.grad is not None])
        self._in_backward = False

    def _watch(self, unit: "_ShardedUnit") -> None:
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
        unit: "_ShardedUnit",
        compiled: Callable[..., Any],
        *inputs: Any,  # noqa: ANN401
        **named_inputs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
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
        return [flat.gathered for unit in self._units for flat in unit.flats]

    def shard_of(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter that the module had before wrapping, or of another
        tensor of a unit.
        """
        return next(
            each.shard for unit in self._units for each in unit.sharded if each.full is parameter
        )

    def received(self, parameter: Tensor) -> tuple[Tensor, ...] | None:
        """Buffers with the other ranks' gradients of this rank's part, in rank order; None if
        they send none.
        """
        if not isinstance(self._exchange, PeerCopies):
            return None
        for flat in (flat for unit in self._units for flat in unit.flats):
            for sharded, rows in zip(flat.sharded, self._exchange.received(flat), strict=True):
                if sharded.full is parameter:
                    return rows
        return None

    def _before_forward(self, unit: "_ShardedUnit") -> None:
        unit.gather()
        unit.install()
        if self._in_backward:  # a checkpoint computes the unit again
            return
        place = len(self._seen)
        self._seen.append(unit)
        if self._order[place : place + 1] == [unit]:
            self._gather_ahead(self._order[place + 1 : place + 1 + AHEAD])

    def _after_forward(self, unit: "_ShardedUnit", output: Any) -> None:  # noqa: ANN401
        unit.uninstall()
        if self._in_backward:
            return
        if not self._order or unit is not self._order[-1] or not torch.is_grad_enabled():
            unit.free()  # backward begins with the last unit, so that stays
        for tensor in graded(output):
            tensor.register_hook(lambda _gradient, unit=unit: self._before_backward(unit))

    def _before_backward(self, unit: "_ShardedUnit") -> None:
        self._in_backward = True
        if not unit.is_lookup:
            unit.gather()
        place = self._seen.index(unit)
        next_ones = reversed(self._seen[max(0, place - AHEAD) : place])
        self._gather_ahead([each for each in next_ones if not each.is_lookup])

    def _after_backward(self, unit: "_ShardedUnit") -> None:
        """Start to average the unit's gradients, all of which are ready, and wait for those of the
        previous unit.

        So the whole gradients of at most two units are in memory.
        """
        if self._reducing is not None:
            self._reducing.wait_for_gradients()
        unit.reduce()
        self._reducing = unit
        if unit is not self._whole and not unit.has_frozen:
            unit.free()

    def _gather_ahead(self, units: Sequence["_ShardedUnit"]) -> None:
        for unit in units:
            unit.start_gather()

    def _free_all(self) -> None:
        for unit in self._units:
            unit.free()


class _Flat:
    """Parameters of one type: this rank's parts are in one tensor, and all ranks' are gathered
    into another.
    """

    def __init__(
        self, found: Sequence[ShardedParameter], dtype: torch.dtype, exchange: Exchange
    ) -> None:
        self.dtype, self._exchange, ranks = dtype, exchange, dist.get_world_size()
        like = found[0].full.detach()
        lengths = [each.part_length(ranks) for each in found]
        self._cuts = aligned(lengths, like.dtype.itemsize)
        self.masters = exchange.zeros(like, sum(self._cuts))
        whole_cuts = aligned([ranks * length for length in lengths], dtype.itemsize)
        self.gathered = like.new_empty(sum(whole_cuts), dtype=dtype)
        self._bytes = self.gathered.untyped_storage().nbytes()
        self.wholes = list(self.gathered.split(whole_cuts)[::2])
        self.sharded = found
        for each, part, whole in zip(found, self.parts_of(self.masters), self.wholes, strict=True):
            each.shard_into(part, whole)
        self.free()
        self._graded: list[ShardedParameter] = []
        """Parameters whose gradients are being averaged."""
        self._means: Tensor | None = None

    def start_gather(self) -> Sequence[Started]:
        """Allocate the whole parameters, and start to gather them."""
        self.gathered.untyped_storage().resize_(self._bytes)
        return self._exchange.gather(self)

    def free(self) -> None:
        """Free the whole parameters; tensors that autograd has saved are valid again after the
        next gather.
        """
        self.gathered.untyped_storage().resize_(0)

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient that is not averaged yet."""
        return any(each.full.grad is not None for each in self.sharded)

    def start_scatter(self) -> Started:
        """Start to average the gradients that are there; this rank gets its part of each."""
        if self._means is not None:
            raise RuntimeError(
                "a backward must be followed by finish_gradient_synchronization before the next one"
            )
        wholes = {
            number: each.take_whole_gradient(len(self.wholes[number]))
            for number, each in enumerate(self.sharded)
            if each.full.grad is not None
        }
        self._graded = [self.sharded[number] for number in wholes]
        self._means = self.gathered.new_empty(len(self.masters))
        return self._exchange.scatter(self, wholes, self._means)

    def take_gradients(self) -> None:
        """Add the averages, for which the caller must have waited, to the gradients of the
        shards.
        """
        if self._means is None:
            return
        self._exchange.complete(self, self._means)
        parts = dict(
            zip(self.sharded, self.parts_of(self._means.to(self.masters.dtype)), strict=True)
        )
        for each in self._graded:
            each.add_gradient(parts[each])
        self._means = None

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a tensor that is laid out like the masters."""
        return list(flat.split(self._cuts)[::2])


class _ShardedUnit:
    """Sharded parameters that are gathered, freed and averaged together."""

    def __init__(
        self, unit: UnitParameters, compute_dtype: torch.dtype | None, exchange: Exchange
    ) -> None:
        self.module, self._exchange = unit.module, exchange
        self._name = name = unit.name.removeprefix("model.")  # LossModule's name for the model
        self._gather_range, self._wait_range, self._scatter_range = (
            f"gather {name}",
            f"wait {name}",
            f"scatter {name}",
        )
        types: dict[tuple[torch.dtype, torch.dtype], list[ShardedParameter]] = {}
        for each in unit.found:
            own = each.full.dtype
            gathered = own if compute_dtype is None or each.is_of_embedding else compute_dtype
            types.setdefault((own, gathered), []).append(each)
        self.flats = [_Flat(found, gathered, exchange) for (_, gathered), found in types.items()]
        self.sharded = [each for flat in self.flats for each in flat.sharded]
        self.is_lookup = isinstance(unit.module, Embedding | nn.Embedding)
        """Whether the unit is an embedding, whose backward does not read the weights."""
        trained = [sharded for sharded in self.sharded if sharded.shard.requires_grad]
        self.has_frozen = len(trained) < len(self.sharded)
        """Whether a parameter is frozen; backward may need it after the last gradient of the
        trained ones.
        """
        self.when_graded: Any = None
        self.when_allocated: Callable[[str, Tensor], None] | None = None
        self._num_trained, self._num_graded = len(trained), 0
        self._gathering: list[Started] = []
        self._reducing: list[Started] = []
        self._is_there = False
        for sharded in trained:
            sharded.full.register_post_accumulate_grad_hook(self._count)

    def start_gather(self) -> None:
        """Start to gather the parameters, unless they are there or on their way."""
        if self._is_there:
            return
        self._is_there = True
        with annotate(self._gather_range):
            self._gathering = [started for flat in self.flats for started in flat.start_gather()]
        if self.when_allocated is not None:
            for flat in self.flats:
                self.when_allocated(self._name, flat.gathered)

    def gather(self) -> None:
        """Gather the parameters, or wait until they are there."""
        self.start_gather()
        if self._gathering:
            with annotate(self._wait_range):  # what is launched next needs the parameters
                _wait_for(self._gathering)

    def free(self) -> None:
        """Free the parameters, if they are there."""
        if self._is_there:
            _wait_for(self._gathering)
            for flat in self.flats:
                flat.free()
            self._is_there = False

    def install(self) -> None:
        """Let the module compute with the whole parameters."""
        for each in self.sharded:
            each.put(each.full)

    def uninstall(self) -> None:
        """Let the module have the shards as its parameters."""
        for each in self.sharded:
            each.put(each.shard)

    def _count(self, _parameter: Tensor) -> None:
        self._num_graded += 1
        if self._num_graded == self._num_trained:
            self.when_graded(self)

    def reduce(self) -> None:
        """Start to average the gradients that are there."""
        self._num_graded = 0
        if any(flat.has_gradients for flat in self.flats):
            self.wait_for_gradients()
            with annotate(self._scatter_range):
                self._reducing = [flat.start_scatter() for flat in self.flats if flat.has_gradients]

    def wait_for_gradients(self) -> None:
        """Wait until the whole gradients have been read; give each shard its gradient, unless
        that needs `receive`.
        """
        _wait_for(self._reducing)
        if not self._exchange.is_late:
            self.take_gradients()

    def take_gradients(self) -> None:
        """Give each shard its gradient."""
        for flat in self.flats:
            flat.take_gradients()


def padded_part(tensor: Tensor, length: int) -> Tensor:
    """This rank's part of the elements, of this length, padded with zeros."""
    part = tensor.new_zeros(length)
    own = tensor.view(-1)[dist.get_rank() * length :][:length]
    part[: len(own)] = own
    return part


def _wait_for(works: list[Started]) -> None:
    """Wait for the exchanges, and forget them."""
    for work in works:
        work.wait()
    works.clear()


BUCKET_BYTES = 64 * 2**20
"""Least bytes of copies in a full bucket; one bucket is exchanged while the next is updated."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pack:
    """All weights whose copies are in one leaf tensor, or a single weight without a copy."""

    names: list[str]
    weights: list[Weight]
    is_read: bool
    """Whether the model reads the masters themselves."""

    @property
    def is_trained(self) -> bool:
        """Whether the weights are trained; raise ValueError if only some are, as a rank's part
        may span several.
        """
        found = {weight.is_trained for weight in self.weights}
        if len(found) > 1:
            raise ValueError(
                f"{' + '.join(self.names)} are one tensor, of which each rank trains a part: "
                "freeze all or none"
            )
        return found.pop()

    @property
    def copy(self) -> Tensor | None:
        """The leaf with the copies."""
        place = self.weights[0].copy
        return None if place is None else place.leaf

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors that the model reads, whose gradients are averaged."""
        copies = [] if self.copy is None else [self.copy]
        return [*copies, *(weight.master for weight in self.weights)] if self.is_read else copies

    @property
    def shared_elements(self) -> int:
        """Number of elements that are sharded: all of them, but 0 for vectors and if parts would
        not be aligned.
        """
        elements = sum(weight.master.numel() for weight in self.weights)
        is_matrix = self.weights[0].master.ndim > 1
        return elements if is_matrix and elements % (dist.get_world_size() * ALIGNMENT) == 0 else 0

    def free_masters(self) -> None:
        """Empty the model's own tensors of masters that it does not read, as a rank keeps a part
        of them.
        """
        for weight in self.weights:
            weight.master.data = weight.master.new_empty(0)

    @property
    def exchanged(self) -> list[Tensor]:
        """Tensors, as one axis, of which each rank updates its own part; none if every rank
        updates the whole.
        """
        return [
            leaf.detach().view(-1)[: self.shared_elements]
            for leaf in self.leaves
            if self.shared_elements
        ]


def leaves_of(model: FastLM, *, shares: bool) -> list[Leaf]:
    """The tensors whose gradients are averaged; with `shares`, each rank needs its part of most
    of them only.
    """
    return [
        Leaf(" + ".join(pack.names), leaf, pack.shared_elements if shares else 0)
        for pack in packs_of(model)
        for leaf in pack.leaves
    ]


class _Owned:
    """The weights of a pack that this rank updates: all of them whole, or its part of them as
    one weight.
    """

    def __init__(self, pack: Pack, weights: list[Weight]) -> None:
        """`pack` is as it was before its masters were freed."""
        self.weights = weights
        self._names = pack.names

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """The weights by name; a single part of several weights is named after all of them."""
        names = self._names if len(self._names) == len(self.weights) else [" + ".join(self._names)]
        return zip(names, self.weights, strict=True)


class OwnsWeights:
    """Something that updates this rank's part of the weights."""

    _owned: list[_Owned]

    @property
    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """What this rank updates, by the names of the parameters that it is, or is a part of."""
        return (named for owned in self._owned for named in owned.named_weights())


class ShardedMasterAdamW(OwnsWeights, MasterAdamW):
    """MasterAdamW of this rank's part of all matrices; each rank also updates every vector.

    Every rank updates the whole of a matrix that cannot be split into aligned parts, one for each
    rank. Raises ValueError if no matrix can be split.

    Of masters that the model does not read itself only this rank's part is kept; the model's own
    tensors become empty. The ranks exchange updated parts in buckets, each while the next one is
    updated.
    """

    def __init__(
        self, model: FastLM, lr: float, pushes: PushDDP | None = None, storage: Storage = IN_FP32
    ) -> None:
        """`pushes` is the PushDDP around the model, if there is one; then updated copies are
        pushed too.
        """
        packs = list(packs_of(model))
        if not any(pack.shared_elements for pack in packs):
            ranks = dist.get_world_size()
            raise ValueError(
                f"no matrix of the model has a multiple of {ranks * ALIGNMENT} elements, so none "
                f"can be cut into aligned parts for {ranks} ranks: use another number, or "
                "--parallel fsdp, which pads its parts"
            )
        self._owned = [_Owned(pack, _own_weights(pack, pushes)) for pack in packs]
        exchanged = [pack.exchanged for pack in packs]
        for pack in packs:
            if pack.shared_elements and not pack.is_read:
                pack.free_masters()
        own = [owned.weights for owned in self._owned]
        super().__init__([weight for weights in own for weight in weights], storage, lr=lr)
        self._buckets = _buckets(own, exchanged)
        every = [tensor for tensors in exchanged for tensor in tensors]
        self._exchange = _Gathers() if pushes is None else _PushedParts(every)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's part, and exchange it."""
        del closure
        self._steps += 1
        for number, (weights, exchanged) in enumerate(self._buckets):
            self._update(weights, number)
            self._exchange.start(exchanged)
        self._exchange.finish()


class _Gathers:
    """Exchanges the updated parts of tensors by all-gathers."""

    def __init__(self) -> None:
        self._started: list[Any] = []

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start with these tensors, of which this rank has updated its part."""
        self._started += grouped(
            lambda whole: all_gather(whole, own_part(whole), async_op=True), tensors
        )

    def finish(self) -> None:
        """Wait for all."""
        for gather in self._started:
            gather.wait()
        self._started.clear()


class _PushedParts:
    """Exchanges the updated parts of tensors by copies to the other ranks' memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        rank = dist.get_rank()
        others = [theirs for number, theirs in enumerate(of_all_ranks(tensors)) if number != rank]
        self._targets = {
            id(tensor): [own_part(theirs[number]) for theirs in others]
            for number, tensor in enumerate(tensors)
        }
        self._pushes = Pushes(tensors[0].device)

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start with these tensors, of which this rank has updated its part."""
        self._pushes.start(
            [
                (own_part(tensor), target)
                for tensor in tensors
                for target in self._targets[id(tensor)]
            ]
        )

    def finish(self) -> None:
        """Wait for all."""
        self._pushes.finish()


def packs_of(model: FastLM) -> Iterator[Pack]:
    """The model's weights, grouped by the leaf tensor that the model reads."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    packed: dict[Tensor, list[Weight]] = {}
    for weight in model.weights:
        packed.setdefault(weight.master if weight.copy is None else weight.copy.leaf, []).append(
            weight
        )
    for weights in packed.values():
        is_read = weights[0].read is not None
        yield Pack(
            names=[names[weight.master] for weight in weights], weights=weights, is_read=is_read
        )


def with_received(weight: Weight, pushes: PushDDP) -> Weight:
    """The weight, with the buffers for other ranks' gradients of all its elements."""
    places = [
        place and replace(place, received=received(pushes.received(place.leaf), place.elements))
        for place in (weight.read, weight.copy)
    ]
    return replace(weight, read=places[0], copy=places[1])


def received(rows: tuple[Tensor, ...] | None, elements: slice = slice(None)) -> Received | None:
    """These elements of the other ranks' gradients, in the order of the ranks; None if there are
    none.
    """
    return None if rows is None else Received(tuple(row[elements] for row in rows), dist.get_rank())


def _own_weights(pack: Pack, pushes: PushDDP | None) -> list[Weight]:
    """The weights that this rank updates: its part of the pack's matrices as one weight, or all
    weights whole.
    """
    if not pack.shared_elements:
        return (
            pack.weights
            if pushes is None
            else [with_received(weight, pushes) for weight in pack.weights]
        )
    length = pack.shared_elements // dist.get_world_size()
    part = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
    places = {
        leaf: LeafSlice(leaf, part, None if pushes is None else received(pushes.received(leaf)))
        for leaf in pack.leaves
    }
    return [_part_of(pack, places, length)]


def _part_of(pack: Pack, places: Mapping[Tensor, LeafSlice], length: int) -> Weight:
    """This rank's part of the matrices of a pack, of this length; `places` has its part of each
    leaf.
    """
    copy = None if pack.copy is None else places[pack.copy]
    if pack.is_read:
        [weight] = pack.weights
        read = places[weight.master]
        return Weight(master=read.values.requires_grad_(pack.is_trained), read=read, copy=copy)
    masters = torch.cat([weight.master.detach().view(-1) for weight in pack.weights])
    return Weight(
        master=padded_part(masters, length).requires_grad_(pack.is_trained), read=None, copy=copy
    )


def _buckets(
    own: Sequence[list[Weight]], exchanged: Sequence[list[Tensor]]
) -> list[tuple[list[Weight], list[Tensor]]]:
    """Buckets of weights that are updated together, and of tensors then exchanged together, in
    forward's order.
    """
    buckets: list[tuple[list[Weight], list[Tensor]]] = []
    size = BUCKET_BYTES
    for weights, tensors in zip(own, exchanged, strict=True):
        if size >= BUCKET_BYTES:
            buckets.append(([], []))
            size = 0
        buckets[-1][0].extend(weights)
        buckets[-1][1].extend(tensors)
        size += sum(tensor.nbytes for tensor in tensors)
    return buckets


class CopyFSDP(OwnsWeights, FSDP):
    """FSDP of a module that contains the fast model; `model.weights` become this rank's parts, and
    whole vectors.

    Of masters that the model does not read itself only this rank's part is kept; the model's own
    tensors become empty.
    """

    def __init__(
        self, module: nn.Module, model: FastLM, *, copies: bool = False, adds: bool = True
    ) -> None:
        packs = list(packs_of(model))
        super().__init__(module, COPY_DTYPE, list(_units(module, packs)), copies=copies, adds=adds)
        is_matrix = [pack.weights[0].master.ndim > 1 for pack in packs]
        self._owned = [
            _Owned(pack, _own_parts_of(pack, self, is_summed=adds) if is_cut else pack.weights)
            for pack, is_cut in zip(packs, is_matrix, strict=True)
        ]
        for pack, is_cut in zip(packs, is_matrix, strict=True):
            if is_cut and not pack.is_read:
                pack.free_masters()
        model.weights = tuple(weight for owned in self._owned for weight in owned.weights)


def _units(module: nn.Module, packs: Sequence[Pack]) -> Iterator[UnitParameters]:
    """The units of the module, with the tensors that the model reads in the place of the
    masters.
    """
    pack_of = {weight.master: pack for pack in packs for weight in pack.weights}
    for unit in units_of(module):
        found: list[ShardedParameter] = []
        for pack in dict.fromkeys(pack_of[each.full] for each in unit.found):
            elements = max(leaf.numel() for leaf in pack.leaves)
            own = {each.full: each for each in unit.found}
            for leaf in pack.leaves:
                slots = own[leaf].slots if leaf in own else []
                found.append(ShardedParameter(" + ".join(pack.names), leaf, slots, elements))
        yield UnitParameters(name=unit.name, module=unit.module, found=found)


def _own_parts_of(pack: Pack, fsdp: FSDP, *, is_summed: bool) -> list[Weight]:
    """The weight that this rank updates: its part of the matrices of the pack."""
    shards = {leaf: fsdp.shard_of(leaf) for leaf in pack.leaves}
    places = {
        leaf: LeafSlice(
            shard, slice(0, len(shard)), None if is_summed else received(fsdp.received(leaf))
        )
        for leaf, shard in shards.items()
    }
    return [_part_of(pack, places, len(shards[pack.leaves[0]]))]
