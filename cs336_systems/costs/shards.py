"""What a rank keeps of each parameter: its share of the optimizer's state, and its parts of
sharded parameters.

The parameters, their order and their modules are those of the step's tape.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ..choices import Shards
from ..config import Precision, RunConfig, SdpaBackend
from .tape import Tape
from .traces import as_costed, tape_of

FP32_BYTES, HALF_BYTES = 4, 2
"""Bytes of an element in fp32, and in bf16 or fp16."""
LOOKUP, REST = "token_embeddings", "rest"
"""Names of two units besides the blocks: the module of lookups, and what several units use."""
ALIGNMENT_BYTES = 128
"""Parameters of a unit begin at multiples of this, a line of a GPU's cache; matmuls and NCCL
need 16.
"""


def factor_bytes(precision: Precision) -> int:
    """Bytes per element of a matmul's factors."""
    return HALF_BYTES if precision in (Precision.BF16, Precision.FP16) else FP32_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the model."""

    modules: tuple[str, ...]
    """The blocks that use it, or modules outside of blocks; mostly one."""
    shape: tuple[int, ...]
    is_looked_up: bool = False
    """Whether tokens only look up rows of the matrix."""
    is_of_positions: bool = False
    """Whether its rows are learned positions, which are added to tokens."""
    has_experts: bool = False
    """Whether the first side has the experts of a block, each of which has its own part."""

    @property
    def elements(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter has more than one axis."""
        return len(self.shape) > 1

    @property
    def unit(self) -> str:
        """Name of the unit with which the parameter is gathered: the block or module that uses it,
        or REST if several do, as with tied weights.

        Where only blocks are units, as in PyTorch's FSDP, `units` puts all other modules into REST.
        """
        return REST if len(self.modules) > 1 else self.modules[0]

    @property
    def multiplied_elements(self) -> int:
        """Elements that multiply every token: those of a matrix, unless it is only looked up."""
        return self.elements if self.is_matrix and not self.is_looked_up else 0


@lru_cache(maxsize=256)
def parameters_of(config: RunConfig) -> tuple[Parameter, ...]:
    """The parameters of the whole model, in its order."""
    return _parameters(plain(config))


@lru_cache(maxsize=256)
def _parameters(config: RunConfig) -> tuple[Parameter, ...]:
    """The same, of the eager step in one process."""
    tape = tape_of(config)
    stacks = _stacks_of_experts(tape)
    parameters = []
    for names, sides in tape.parameters:
        module = names[0].rpartition(".")[0]
        shape = tuple(map(tape.names.size, sides))
        parameter = Parameter(
            modules=tuple(dict.fromkeys(map(_block_or_module, names))),
            shape=shape,
            is_of_positions=names[0].endswith(f"{LOOKUP}.positions"),
            has_experts=stacks.get(module) == shape[0] and len(shape) > 1,
        )
        parameters.append(parameter)
    tables = [one for one in parameters if one.is_matrix and not is_block(one.unit)]
    if config.model_factory is None:
        looked_up = [one for one in tables if one.modules[-1] == LOOKUP]
    else:
        # the last table outside of blocks makes the logits
        looked_up = tables[:-1]
    return tuple(replace(one, is_looked_up=one in looked_up) for one in parameters)


def gradient_bytes(parameter: Parameter, config: RunConfig) -> int:
    """Bytes of a parameter's whole gradient, as ranks exchange it.

    Where a step reads 16-bit copies of matrices, those have 16-bit gradients. A table that is
    looked up itself, and not its copy, has a gradient in fp32, which a tied one has besides.
    """
    if not config.cast_once or not parameter.is_matrix:
        return FP32_BYTES * parameter.elements
    is_read = _is_read_itself(parameter, config)
    copy_bytes = 0 if is_read and not parameter.multiplied_elements else HALF_BYTES
    return (copy_bytes + (FP32_BYTES if is_read else 0)) * parameter.elements


def _is_read_itself(parameter: Parameter, config: RunConfig) -> bool:
    """Whether our steps look up rows in a parameter in fp32, and not in a copy of it."""
    is_table = parameter.is_looked_up or (parameter.is_matrix and len(parameter.modules) > 1)
    return is_table and (parameter.is_of_positions or not config.bf16_embedding)


def _stacks_of_experts(tape: Tape) -> dict[str, int]:
    """The number of experts of each module that has the matrices of all its experts in one
    parameter.
    """
    counts = {tape.names.size(make[7]) for make in tape.makes if make[1] == "experts"}
    stacks = {}
    for names, sides in tape.parameters:
        experts = tape.names.size(sides[0]) if sides else 0
        if len(sides) == 3 and experts in counts:
            stacks[names[0].rpartition(".")[0]] = experts
    return stacks


def plain(config: RunConfig) -> RunConfig:
    """The configuration of the eager step in one process, whose tape has the parameters and the
    order of gradients. Of this project's models it is the same for all batches and checkpoints.
    """
    eager = as_costed(config).alone.without_shortcuts
    if eager.model_factory is not None:
        return eager
    eager = eager.with_defaults("batch_size", "accumulate_steps", "checkpoint_blocks")
    return replace(eager, model=replace(eager.model, sdpa_backend=SdpaBackend.AUTO))


def _block_or_module(name: str) -> str:
    """The block that has a parameter, `layers.3` of `layers.3.ffn.w1.weight`, else its module."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: place + 1])
    return ".".join(words[:-1])


def is_block(unit: str) -> bool:
    """Whether a unit is a block, and not a single layer or the rest."""
    return unit.rpartition(".")[2].isdigit()


def kept_elements(config: RunConfig) -> list[int]:
    """Elements of each parameter, and of its gradient, that a rank keeps; the same on every rank,
    because of padding.
    """
    return [_part_elements(parameter, config) for parameter in parameters_of(config)]


def _part_elements(parameter: Parameter, config: RunConfig) -> int:
    """Elements of a parameter that one rank holds, rounded up.

    With `Shards.MATRICES` matrices are cut into equal parts and vectors stay whole; with
    `Shards.ROWS` every parameter is cut by rows; else each rank holds all of it.
    """
    match config.parallel.exchange.shards:
        case Shards.MATRICES if parameter.is_matrix:
            return -(-parameter.elements // config.ranks)
        case Shards.ROWS:
            rows, *columns = parameter.shape
            return -(-rows // config.ranks) * prod(columns)
    return parameter.elements


def updated_elements(config: RunConfig) -> int:
    """Elements of all parameters that a rank's optimizer updates; with a sharded one, on the rank
    that has most.
    """
    kept = kept_elements(config)
    return max(owned_elements(kept, config.ranks)) if config.shard_optimizer else sum(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered, freed and averaged together."""

    name: str
    parts: tuple[int, ...]
    """Elements of a rank's part of each parameter; all ranks' parts are equally long."""
    element_bytes: int
    """Bytes per element of the type in which parameters are gathered and gradients averaged."""

    def gathered_bytes(self, ranks: int) -> int:
        """Bytes of the tensor into which the parts of all ranks are gathered."""
        lengths = [ranks * part for part in self.parts]
        return self.element_bytes * sum(aligned(lengths, self.element_bytes))


def units(config: RunConfig) -> list[Unit]:
    """The units of a model whose parameters are sharded, in the order of its modules; REST, which
    is gathered before all others, comes first.

    PyTorch's fully_shard has the blocks, and one unit of all else.
    """
    by_rows = config.parallel.exchange.shards is Shards.ROWS
    members: dict[str, list[Parameter]] = {REST: []}
    for parameter in parameters_of(config):
        unit = parameter.unit
        if by_rows and not is_block(unit):
            unit = REST
        if by_rows or parameter.is_matrix:
            members.setdefault(unit, []).append(parameter)
    units = []
    for name, parameters in members.items():
        if parameters:
            parts = tuple(_part_elements(parameter, config) for parameter in parameters)
            element_bytes = _gathered_type_bytes(parameters, config, by_rows)
            units.append(Unit(name=name, parts=parts, element_bytes=element_bytes))
    return units


def _gathered_type_bytes(parameters: Sequence[Parameter], config: RunConfig, by_rows: bool) -> int:
    """Bytes of an element of a unit's parameters in the type in which they are gathered."""
    if config.precision is not Precision.BF16:
        return FP32_BYTES
    # our FSDP leaves a table in its type that is looked up itself, as a lookup is no matmul
    is_wide = not by_rows and any(_is_read_itself(one, config) for one in parameters)
    return FP32_BYTES if is_wide else HALF_BYTES


def replicated_elements(config: RunConfig) -> int:
    """Elements of the parameters that are in no unit, so that every rank has them whole."""
    if config.parallel.exchange.shards is not Shards.MATRICES:
        return 0
    return sum(one.elements for one in parameters_of(config) if not one.is_matrix)


def next_owner(owned: list[int], count: int) -> int:
    """The rank that owns the fewest elements so far, to which these `count` are given."""
    owner = owned.index(min(owned))
    owned[owner] += count
    return owner


def owned_elements(counts: Sequence[int], ranks: int) -> list[int]:
    """How many elements a sharded optimizer gives to each rank, of parameters of these elements."""
    owned = [0] * ranks
    for count in counts:
        next_owner(owned, count)
    return owned


def aligned(lengths: Sequence[int], element_bytes: int) -> list[int]:
    """Sizes to split a tensor by: the lengths (elements), and between every two the gap that
    aligns the second.
    """
    multiple = ALIGNMENT_BYTES // element_bytes
    sizes: list[int] = []
    for length in lengths:
        sizes += [length, -length % multiple]
    return sizes[:-1]
