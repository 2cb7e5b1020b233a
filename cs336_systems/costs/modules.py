"""What the modules of a user's own model cost in a step, from its tape."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod

from cs336_systems.config import Phase, RunConfig
from cs336_systems.costs.memory import is_predictable
from cs336_systems.costs.tape import MATMULS_OF, REPEATED, Kind, Operation, phases_of
from cs336_systems.costs.traces import own_parameters, tape_of

OUTSIDE = "outside of the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCosts:
    """Parameters of a module, and what its kernels compute and move, all modules of a list together."""

    parameters: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    """What a checkpoint or fused attention computes again counts again, as in torch.utils.flop_counter."""
    forward_moved_bytes: int = 0
    backward_moved_bytes: int = 0


def costs_by_module(config: RunConfig) -> dict[str, ModuleCosts]:
    """Costs of a step on one rank by the paths of modules, down to `module_depth`; parameters alone without a tape.

    Left out: the optimizer.
    """
    alone = config.alone
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, count in own_parameters(alone).items():
        found[_shown(path, config.module_depth)]["parameters"] += count
    if is_predictable(alone):
        tape = tape_of(alone)
        for phase, _, (first, stop) in phases_of(tape, -1):
            if phase in (Phase.FORWARD, Phase.BACKWARD):
                for number, place in zip(tape.launches[first:stop], tape.places[first:stop], strict=True):
                    costs, operation = found[_shown(place, config.module_depth)], tape.operations[number]
                    costs[f"{phase}_flops"] += flops_of(operation)
                    costs[f"{phase}_moved_bytes"] += operation.launches * operation.moved_bytes
    return {path: ModuleCosts(**costs) for path, costs in found.items()}


def _shown(path: str | None, depth: int) -> str:
    """The path of a module down to `depth` levels; a list and the number in it are one."""
    if path is None:
        return OUTSIDE
    words = path.replace(REPEATED, "*").split(".")[:depth]
    return ".".join(words).replace("*", REPEATED) or "the model itself"


def flops_of(operation: Operation) -> int:
    """FLOPs of matmuls, fused attention in full; those of other operations do not count."""
    if operation.kind not in (Kind.MATMUL, Kind.ATTENTION):
        return 0
    return 2 * operation.batch * prod(operation.sides) * MATMULS_OF.get(operation.form, 1)
