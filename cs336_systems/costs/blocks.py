"""Of what blocks a model consists, and how they can be divided: of this project's models by their
configuration, of any other by the tapes of its blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..config import RunConfig
from ..model_file import heads_of_keys
from .compiled import uncompiled
from .depth import kinds_of_blocks, of_depth
from .shards import Parameter, is_block, parameters_of
from .tape import OperationKind
from .traces import as_costed, idle_parameters, tape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a model, and the sizes that ranks can divide."""

    kinds: tuple[int, ...]
    """The kind of each block."""
    d_model: int
    num_heads: int
    num_kv_heads: int
    """0 if the keys have as many heads as the queries, or their number is not known."""
    d_ff: int
    """0 if it is not known."""
    experts: int
    """Experts of a block, which ranks can divide; 0 without any."""
    inner_sides: tuple[int, ...] = ()
    """Sides of the matrices of a model of one's own by which ranks divide them: those that are not
    d_model, and of the matrix that chooses experts none.
    """
    experts_per_token: int
    vocabulary: str
    """The side of matrices that is the vocabulary, in formulas of the tape."""
    parameters: int
    """Parameters of the whole model."""
    active_parameters: int
    """Those that a token multiplies: without experts that it does not choose."""


def blocks_of_model(config: RunConfig) -> Blocks:
    """The blocks of the model of a configuration; raise DepthError for a model of one's own that
    cannot be traced.
    """
    return _blocks(plain_model(config))


@lru_cache(maxsize=4096)
def plain_model(config: RunConfig) -> RunConfig:
    """A step of one sequence on one process, whose tapes have the same parameters."""
    alone = uncompiled(as_costed(config.alone))
    return replace(alone, batch_size=1, accumulate_steps=1, checkpoint_blocks=0)


@lru_cache(maxsize=64)
def _blocks(config: RunConfig) -> Blocks:
    """The same, of a configuration without settings that change nothing."""
    kinds, model = kinds_of_blocks(config), config.model
    of_kinds = [block_parameters(config, kind) for kind in range(max(kinds) + 1)]
    outside = outside_parameters(config)
    parameters = sum(one.elements for one in outside)
    for kind in kinds:
        parameters += sum(one.elements for one in of_kinds[kind])
    if config.model_factory is None:
        return Blocks(
            kinds=kinds,
            d_model=model.d_model,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            d_ff=model.d_ff,
            experts=0,
            experts_per_token=0,
            vocabulary="vocabulary",
            parameters=parameters,
            active_parameters=parameters,
        )
    table = max((one for one in outside if one.is_matrix), key=lambda one: one.elements)
    experts, chosen = _experts(config, kinds)
    return Blocks(
        kinds=kinds,
        d_model=table.shape[-1],
        num_heads=_heads(config),
        num_kv_heads=heads_of_keys(config.model_factory),
        d_ff=0,
        experts=experts,
        inner_sides=_inner_sides(of_kinds, table.shape[-1], experts),
        experts_per_token=chosen,
        vocabulary=str(table.shape[0]),
        parameters=parameters,
        active_parameters=parameters - _idle_parameters(config, kinds),
    )


@lru_cache(maxsize=256)
def block_parameters(config: RunConfig, kind: int) -> tuple[Parameter, ...]:
    """The parameters of a block of this kind."""
    (usual,) = _by_block(of_depth(config, 1))
    usual_shapes = [one.shape for one in usual]
    of_two = _by_block(of_depth(config, 2, kind))
    # blocks are numbered as they come, and either may be the usual one
    for parameters in of_two:
        if [one.shape for one in parameters] != usual_shapes:
            return parameters
    return of_two[-1]


def _by_block(config: RunConfig) -> list[tuple[Parameter, ...]]:
    """The parameters of each block."""
    blocks: dict[str, list[Parameter]] = {}
    for parameter in parameters_of(config):
        if is_block(parameter.unit):
            blocks.setdefault(parameter.unit, []).append(parameter)
    return [tuple(parameters) for parameters in blocks.values()]


@lru_cache(maxsize=256)
def outside_parameters(config: RunConfig) -> tuple[Parameter, ...]:
    """The parameters outside of blocks."""
    return tuple(one for one in parameters_of(of_depth(config, 1)) if not is_block(one.unit))


def _heads(config: RunConfig) -> int:
    """Heads of queries, by the kernels of fused attention; 1 without any."""
    tape = tape_of(of_depth(config, 1))
    kernels = [one for one in tape.operations if one.kind is OperationKind.ATTENTION]
    return kernels[0].batch // config.batch_size if kernels else 1


def _inner_sides(
    of_kinds: Iterable[Iterable[Parameter]], d_model: int, experts: int
) -> tuple[int, ...]:
    """The sides of blocks' matrices that are neither d_model nor the number of experts."""
    sides: set[int] = set()
    for parameters in of_kinds:
        for one in parameters:
            if one.is_matrix:
                sides.update(one.shape)
    return tuple(sorted(sides - {d_model, experts}))


def _experts(config: RunConfig, kinds: tuple[int, ...]) -> tuple[int, int]:
    """The experts of a block, and how many of them a token chooses."""
    tokens = config.batch_size * config.model.context_length
    for kind in range(max(kinds) + 1):
        tape = tape_of(of_depth(config, 2, kind))
        for _, make, *arguments in tape.makes:
            if make == "experts":
                rows, experts = tape.names.size(arguments[1]), tape.names.size(arguments[5])
                return experts, round(rows * experts / tokens)
    return 0, 0


def _idle_parameters(config: RunConfig, kinds: tuple[int, ...]) -> int:
    """Parameters of experts that a token does not choose, in all blocks."""
    of_one = idle_parameters(of_depth(config, 1)) or 0
    of_kinds = []
    for kind in range(max(kinds) + 1):
        of_kinds.append((idle_parameters(of_depth(config, 2, kind)) or 0) - of_one)
    return sum(of_kinds[kind] for kind in kinds)
