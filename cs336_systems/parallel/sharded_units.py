"""Units of fully sharded data parallelism: parameters that are gathered, freed and averaged
together.

The host launches one NCCL kernel for all gathers of a unit, and one for its averages. A rank's
parts of a unit are one tensor per type, so that one kernel casts them; the gathered parameters of a
unit are one tensor too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..costs.shards import REST, aligned
from ..model.annotate import annotate
from ..model.blocks import blocks_of
from ..model.transformer import Embedding
from .exchange import Exchange, Started


@dataclass(slots=True, eq=False)
class ShardedParameter:
    """A parameter, or another leaf tensor that the module computes with, of which this rank keeps
    one part; parts are padded with zeros to one length.
    """

    name: str
    full: Tensor
    """The parameter as the module computes with it; its memory is there only while gathered."""
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
        return any(isinstance(module, Embedding | nn.Embedding) for module, _ in self.slots)

    def shard_into(self, part: Tensor, whole: Tensor) -> None:
        """Keep this rank's part in the memory `part`; `whole` is the memory into which the parts of
        all ranks are gathered.
        """
        part.copy_(padded_part(self.full.detach(), len(part)))
        self.shard = nn.Parameter(part, requires_grad=self.full.requires_grad)
        # `data` has a version counter of its own, so to autograd another gather is no change of
        # saved tensors
        self.full.data = whole.data[: self.full.numel()].view(self.full.shape)
        self.install(self.shard)

    def install(self, parameter: Tensor) -> None:
        """Put a tensor (this rank's shard or the whole parameter) in the place of the parameter in
        all modules that use it.
        """
        for module, name in self.slots:
            module._parameters[name] = cast("nn.Parameter", parameter)

    def take_whole_gradient(self, length: int) -> Tensor:
        """Return and clear the gradient of the whole parameter, padded to this length."""
        gradient, self.full.grad = self.full.grad, None
        assert gradient is not None
        flat = gradient.contiguous().view(-1)
        if len(flat) == length:
            return flat
        return torch.cat([flat, flat.new_zeros(length - len(flat))])

    def add_gradient(self, mean: Tensor) -> None:
        """Add the averaged gradient `mean` to the gradient of this rank's shard."""
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean


def padded_part(tensor: Tensor, length: int) -> Tensor:
    """This rank's part, of `length` elements, of the tensor's elements; padded with zeros at the
    end.
    """
    part = tensor.new_zeros(length)
    elements = tensor.view(-1)[dist.get_rank() * length :][:length]
    part[: len(elements)] = elements
    return part


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnitParameters:
    """Parameters that are gathered together, and the module that holds them."""

    name: str
    """Path of the module, or REST."""
    module: nn.Module | None
    """None for REST: parameters that belong to no single block or layer."""
    parameters: list[ShardedParameter]


def units_of(module: nn.Module) -> list[UnitParameters]:
    """The parameters of the module by the unit that they belong to, in the order of its modules.

    Units are the blocks, and outside of them each module that has parameters itself. The last one
    has the parameters that several units use, and those of `module` itself.
    """
    unit_of = {submodule: submodule for submodule in module.modules()}
    for block in blocks_of(module):
        unit_of |= dict.fromkeys(block.modules(), block)
    rest: list[ShardedParameter] = []
    members: dict[nn.Module, list[ShardedParameter]] = {}
    for parameter in _parameters_of(module):
        users = {unit_of[owner] for owner, _ in parameter.slots}
        if len(users) > 1 or module in users:
            rest.append(parameter)
        else:
            members.setdefault(users.pop(), []).append(parameter)
    units = [
        UnitParameters(name=path, module=unit, parameters=members[unit])
        for path, unit in module.named_modules()
        if unit in members
    ]
    return [*units, UnitParameters(name=REST, module=None, parameters=rest)]


def _parameters_of(module: nn.Module) -> Iterable[ShardedParameter]:
    """All parameters of the module, each once."""
    by_tensor: dict[Tensor, ShardedParameter] = {}
    for prefix, owner in module.named_modules():
        for name, tensor in owner.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{prefix}.{name}" if prefix else name
            parameter = by_tensor.setdefault(tensor, ShardedParameter(path, tensor))
            parameter.slots.append((owner, name))
    return by_tensor.values()


class FlatParameters:
    """Parameters of one type: this rank's parts are in one tensor, `masters`, and those of all
    ranks are gathered into another.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], dtype: torch.dtype, exchange: Exchange
    ) -> None:
        """`dtype` is the type in which the parameters are gathered."""
        self.parameters, self.dtype, self._exchange = parameters, dtype, exchange
        ranks = dist.get_world_size()
        like = parameters[0].full.detach()
        lengths = [parameter.part_length(ranks) for parameter in parameters]
        self._part_cuts = aligned(lengths, like.dtype.itemsize)
        self.masters = exchange.zeros(like, sum(self._part_cuts))
        whole_cuts = aligned([ranks * length for length in lengths], dtype.itemsize)
        self.gathered = like.new_empty(sum(whole_cuts), dtype=dtype)
        self._gathered_bytes = self.gathered.untyped_storage().nbytes()
        # every second piece is the gap that aligns the next parameter
        self.wholes = list(self.gathered.split(whole_cuts)[::2])
        parts = self.parts_of(self.masters)
        for parameter, part, whole in zip(parameters, parts, self.wholes, strict=True):
            parameter.shard_into(part, whole)
        self.free()
        self._graded: list[int] = []
        """Numbers of the parameters whose gradients are being averaged."""
        self._means: Tensor | None = None

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a tensor that is laid out like the masters."""
        return list(flat.split(self._part_cuts)[::2])

    def start_gather(self) -> Sequence[Started]:
        """Allocate the whole parameters, and start to gather them."""
        self.gathered.untyped_storage().resize_(self._gathered_bytes)
        return self._exchange.gather(self)

    def free(self) -> None:
        """Free the whole parameters; tensors that autograd has saved are valid again after the
        next gather.
        """
        self.gathered.untyped_storage().resize_(0)

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient that is not averaged yet."""
        return any(parameter.full.grad is not None for parameter in self.parameters)

    def start_scatter(self) -> Started:
        """Start to average the gradients that are there; this rank gets its part of each."""
        if self._means is not None:
            raise RuntimeError(
                "a backward must be followed by finish_gradient_synchronization before the next one"
            )
        gradients = {
            number: parameter.take_whole_gradient(len(self.wholes[number]))
            for number, parameter in enumerate(self.parameters)
            if parameter.full.grad is not None
        }
        self._graded = list(gradients)
        self._means = self.gathered.new_empty(len(self.masters))
        return self._exchange.scatter(self, gradients, self._means)

    def take_gradients(self) -> None:
        """Add the averages, for which the caller must have waited, to the gradients of the
        shards.
        """
        if self._means is None:
            return
        self._exchange.complete(self, self._means)
        parts = self.parts_of(self._means.to(self.masters.dtype))
        for number in self._graded:
            self.parameters[number].add_gradient(parts[number])
        self._means = None


class ShardedUnit:
    """Sharded parameters that are gathered, freed and averaged together."""

    def __init__(
        self, unit: UnitParameters, compute_dtype: torch.dtype | None, exchange: Exchange
    ) -> None:
        """Group the unit's parameters by the types in which they are kept and gathered, and make
        one flat tensor of each group; matrices are gathered in `compute_dtype`, embeddings in their
        own type.
        """
        self.module, self._exchange = unit.module, exchange
        self._name = name = unit.name.removeprefix("model.")  # LossModule's name for the model
        self._gather_range = f"gather {name}"
        self._wait_range = f"wait {name}"
        self._scatter_range = f"scatter {name}"
        by_types: dict[tuple[torch.dtype, torch.dtype], list[ShardedParameter]] = {}
        for parameter in unit.parameters:
            kept = gathered = parameter.full.dtype
            if compute_dtype is not None and not parameter.is_of_embedding:
                gathered = compute_dtype
            by_types.setdefault((kept, gathered), []).append(parameter)
        self.flats: list[FlatParameters] = []
        self.parameters: list[ShardedParameter] = []
        for (_, gathered), parameters in by_types.items():
            self.flats.append(FlatParameters(parameters, gathered, exchange))
            self.parameters += parameters
        self.is_lookup = isinstance(unit.module, Embedding | nn.Embedding)
        """Whether the unit is an embedding, whose backward does not read the weights."""
        trained = [parameter for parameter in self.parameters if parameter.shard.requires_grad]
        self.has_frozen = len(trained) < len(self.parameters)
        """Whether a parameter is frozen; backward may need it after the last gradient of the
        trained ones.
        """
        self.when_graded: Callable[[ShardedUnit], None]
        """Called when backward has computed the gradients of all trained parameters."""
        self.when_allocated: Callable[[str, Tensor], None] | None = None
        """Called with the unit's name and tensor when memory for a gather is allocated."""
        self._num_trained = len(trained)
        self._num_graded = 0
        self._gathering: list[Started] = []
        self._reducing: list[Started] = []
        self._is_there = False
        for parameter in trained:
            parameter.full.register_post_accumulate_grad_hook(self._count)

    def start_gather(self) -> None:
        """Start to gather the parameters, unless they are there or on their way."""
        if self._is_there:
            return
        self._is_there = True
        with annotate(self._gather_range):
            for flat in self.flats:
                self._gathering += flat.start_gather()
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
        for parameter in self.parameters:
            parameter.install(parameter.full)

    def uninstall(self) -> None:
        """Make the shards the module's parameters again."""
        for parameter in self.parameters:
            parameter.install(parameter.shard)

    def _count(self, _parameter: Tensor) -> None:
        """Autograd hook of each trained parameter: count its gradient as ready, and call
        `when_graded` after the last one.
        """
        self._num_graded += 1
        if self._num_graded == self._num_trained:
            self.when_graded(self)

    def reduce(self) -> None:
        """Start to average over all ranks the gradients that are there."""
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
        """Give each shard its averaged gradient, for which the caller must have waited."""
        for flat in self.flats:
            flat.take_gradients()


def _wait_for(works: list[Started]) -> None:
    """Wait for these asynchronous exchanges, and empty the list."""
    for work in works:
        work.wait()
    works.clear()
