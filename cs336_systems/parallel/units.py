"""The parts of a module that are gathered and freed together: its blocks, other layers with weights, and the rest."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from cs336_systems.model.transformer import Embedding

REST = "rest"
"""Name of the unit whose parameters belong to no single block or layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a module holds a parameter."""

    owner: nn.Module
    name: str


@dataclass(slots=True, eq=False)
class Found:
    """A parameter of a module, and every place that holds it; a tied parameter has several places.

    It can also be another leaf tensor that the module computes with, which has no place.
    """

    name: str
    parameter: Tensor
    places: list[Place] = field(default_factory=list)
    least_elements: int = 0
    """Least length to which the parameter is padded before it is divided among ranks."""

    def part_length(self, ranks: int) -> int:
        """Elements of one rank's part, the last of which are padded with zeros."""
        return -(-max(self.parameter.numel(), self.least_elements) // ranks)

    @property
    def is_of_embedding(self) -> bool:
        """Whether an embedding lookup reads the parameter; autocast does not cast those."""
        return any(isinstance(place.owner, Embedding | nn.Embedding) for place in self.places)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Unit:
    """Parameters that are gathered together, and the module that holds them."""

    name: str
    """Path of the module, or REST."""
    module: nn.Module | None
    """None for REST: parameters that belong to no single block or layer."""
    found: list[Found]


def parameters_of(module: nn.Module) -> list[Found]:
    """All parameters of the module, each once."""
    found: dict[Tensor, Found] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{prefix}.{name}" if prefix else name
            found.setdefault(parameter, Found(path, parameter)).places.append(Place(owner, name))
    return list(found.values())


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost ModuleLists in the module, such as the blocks of a Transformer."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks_of(child)


def units_of(module: nn.Module) -> list[Unit]:
    """The parameters of the module by the unit that they belong to, in the order of its modules.

    Units are the blocks, and outside of them each module that has parameters itself. The last one has the parameters
    that several units use, and those of `module` itself.
    """
    blocks = list(blocks_of(module))
    inside = {id(part) for block in blocks for part in block.modules()}
    singles = [each for each in module.modules() if id(each) not in inside and each is not module]
    owners = {id(part): block for block in blocks for part in block.modules()} | {id(each): each for each in singles}
    shared: list[Found] = []
    members: dict[int, list[Found]] = {}
    for each in parameters_of(module):
        using = Counter(id(owners.get(id(place.owner), module)) for place in each.places)
        (target, *others) = using
        if others or target == id(module):
            shared.append(each)
        else:
            members.setdefault(target, []).append(each)
    units = [
        Unit(name=path, module=part, found=members[id(part)])
        for path, part in module.named_modules()
        if id(part) in members
    ]
    return [*units, Unit(name=REST, module=None, found=shared)]
