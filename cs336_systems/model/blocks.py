"""The blocks of any model, and which of them are alike, so that one of each kind stands for all."""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from ..costs.tape import TraceError

PLAIN = (int, float, str, type(None))
"""Types of attributes that decide what a module does."""
Features = dict[tuple[str, str], object]
"""What decides what a block does, by the path of a module in it and the name of an attribute."""


def block_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost ModuleLists in the module."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from block_lists(child)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of these lists, such as the blocks of a Transformer."""
    for blocks in block_lists(module):
        yield from blocks


def keep_kinds(model: nn.Module, wanted: Sequence[int]) -> list[int]:
    """Drop all blocks of the model but one for each number in `wanted`, the number of its kind;
    return the kind of each block that the whole model has.

    Kinds are numbered by how many blocks are of them, so that 0 is the kind of most. Raises
    TraceError for a model without blocks, and without as many blocks of a kind.
    """
    blocks = _main_list(model)
    every = [*blocks]
    kinds = kinds_of(every)
    kept = _places(kinds, wanted)
    _cut_configurations(model, len(every), kept)
    _refill(blocks, [every[place] for place in kept])
    return kinds


def copy_of_kinds(model: nn.Module, wanted: Sequence[int]) -> tuple[nn.Module, list[int]]:
    """A copy of the model as `keep_kinds` would leave it, and what that returns; blocks that are
    dropped are not copied.
    """
    blocks = _main_list(model)
    every = [*blocks]
    kinds = kinds_of(every)
    kept = _places(kinds, wanted)
    try:
        _refill(blocks, [every[place] for place in kept])
        copied = deepcopy(model)
    finally:
        _refill(blocks, every)
    _cut_configurations(copied, len(every), kept)
    return copied, kinds


def _main_list(model: nn.Module) -> nn.ModuleList:
    """The list of the model's blocks, which is the one with most parameters."""
    lists = [*block_lists(model)]
    if not lists:
        raise TraceError("the model has no blocks in a torch.nn.ModuleList that could repeat")
    return max(lists, key=lambda blocks: sum(map(_elements, blocks)))


def _places(kinds: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """The places of the first blocks of the kinds that are wanted, in order."""
    kept: list[int] = []
    for kind in wanted:
        alike = {place for place, other in enumerate(kinds) if other == kind}
        left = alike.difference(kept)
        if not left:
            raise TraceError("the model has too few blocks of one kind to tell what one costs")
        kept.append(min(left))
    return sorted(kept)


def _refill(blocks: nn.ModuleList, members: Sequence[nn.Module]) -> None:
    """Let these be the members of the list."""
    del blocks[:]
    blocks.extend(members)


def kinds_of(blocks: Sequence[nn.Module]) -> list[int]:
    """A number for each block, which those have in common that have the same modules, parameters
    of the same shapes, and the same settings. The number of a block is no setting.
    """
    features = [_features(block) for block in blocks]
    numbers = {
        name
        for name in features[0]
        if all(one.get(name) == place for place, one in enumerate(features))
    }
    keys = []
    for one in features:
        keys.append(frozenset(item for item in one.items() if item[0] not in numbers))
    ranking = [key for key, _ in Counter(keys).most_common()]
    return [ranking.index(key) for key in keys]


def _features(block: nn.Module) -> Features:
    features: Features = {}
    for path, module in block.named_modules():
        features[path, "class"] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, PLAIN) and not name.startswith("_"):
                features[path, name] = value
        for name, parameter in module.named_parameters(recurse=False):
            features[path, name] = tuple(parameter.shape), parameter.requires_grad
    return features


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _cut_configurations(model: nn.Module, count: int, kept: Sequence[int]) -> None:
    """Let lists in configurations that have an entry for each block, such as `layer_types` of
    transformers, have those of the blocks that are kept; so `num_hidden_layers`.
    """
    configurations: dict[int, Any] = {}
    for module in model.modules():
        if (configuration := getattr(module, "config", None)) is not None:
            configurations[id(configuration)] = configuration
    for configuration in configurations.values():
        for name, value in list(getattr(configuration, "__dict__", {}).items()):
            if isinstance(value, list) and len(value) == count:
                configuration.__dict__[name] = [value[place] for place in kept]
