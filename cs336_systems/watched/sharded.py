"""Models whose parameters are sharded over several ranks, as what one rank computes with them."""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .dataless import HOOKS, empty, without_data

PACKAGE = "torch.distributed.tensor"
"""Where PyTorch has DTensor and the hooks of its parallel layers."""


def rank_copy(model: nn.Module) -> nn.Module:
    """A copy without data, as `without_data` makes it, of what this rank computes with.

    `fully_shard` gathers a parameter before it is used: it is whole in the copy. What is sharded
    for tensor parallelism stays so, with PyTorch's hooks that gather and reduce activations.
    """
    modules = list(model.modules())
    if not any(_is_gathered(module) or list(_shards_in(module)) for module in modules):
        return without_data(model)
    gathered = {
        id(parameter)
        for module in modules
        if _is_gathered(module)
        for parameter in module.parameters()
    }
    standing: dict[int, Any] = {}
    for module in modules:
        for shard in _shards_in(module):
            if id(shard) not in standing:
                standing[id(shard)] = _on_this_rank(shard, is_gathered=id(shard) in gathered)
    bare = {module: _without_state(module) for module in modules}
    # whatever refers to a module by another way than its parent gets the bare one
    memo: dict[int, Any] = {id(module): twin for module, twin in bare.items()}
    placeholders = {key: nn.Parameter(torch.empty(0, device="meta")) for key in standing}
    for module, twin in bare.items():
        parts = {name: bare[part] for name, part in module._modules.items() if part is not None}
        vars(twin)["_modules"] = {**module._modules, **parts}
        _replace(module, twin, placeholders)
    copied = without_data(bare[model], memo)
    for module, twin in bare.items():
        made = memo.get(id(twin))
        if type(made) is type(twin):
            _replace(module, made, standing)
            _hook(module, made)
            vars(twin).update(vars(made))
    return copied


def _classes(name: str) -> tuple[type, ...]:
    """The class of this name among those of sharding; none where it was never imported."""
    places = [sys.modules.get(place) for place in (PACKAGE, "torch.distributed.fsdp")]
    return tuple(vars(place)[name] for place in places if place is not None and name in vars(place))


def _is_gathered(module: nn.Module) -> bool:
    """Whether `fully_shard` gathers the module's parameters."""
    return isinstance(module, _classes("FSDPModule"))


def _shards_in(module: nn.Module) -> Iterator[Any]:
    """The parameters and buffers of the module itself of which this rank has a part."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if isinstance(tensor, _classes("DTensor")):
            yield tensor


def _on_this_rank(shard: Any, *, is_gathered: bool) -> Tensor:  # noqa: ANN401 (a DTensor)
    """What the rank computes with, without data: the whole tensor, or its shard."""
    if not is_gathered:
        return empty(shard)
    # the first axes of the mesh hold replicas, and the one after them is that of fully_shard
    sharding = [
        place for place, placement in enumerate(shard.placements) if not placement.is_replicate()
    ]
    others = shard.placements[sharding[0] + 1 :] if sharding else ()
    whole = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
    if others:
        from torch.distributed.tensor import distribute_tensor

        mesh = shard.device_mesh[shard.device_mesh.mesh_dim_names[-len(others) :]]
        whole = distribute_tensor(whole, mesh, others, src_data_rank=None)  # without a collective
    return nn.Parameter(whole, requires_grad=shard.requires_grad)


def _without_state(module: nn.Module) -> nn.Module:
    """A module of the class that was sharded, with the same attributes but what PyTorch keeps of
    its sharding in it, and this program of its hooks.
    """
    kind = type(module)
    if _is_gathered(module):
        kind = kind.__bases__[-1]  # fully_shard gives the module a class of its own before it
    bare: nn.Module = object.__new__(kind)
    vars(bare).update({name: value for name, value in vars(module).items() if name[:2] != "__"})
    return bare


def _replace(module: nn.Module, made: nn.Module, standing: dict[int, Any]) -> None:
    """Give a copy of a module what stands for its shards."""
    for table in ("_parameters", "_buffers"):
        tensors = vars(made)[table].copy()
        for name, tensor in vars(module)[table].items():
            if id(tensor) in standing:
                tensors[name] = standing[id(tensor)]
        vars(made)[table] = tensors


def _hook(module: nn.Module, made: nn.Module) -> None:
    """Give a copy of a module PyTorch's own hooks of tensor parallelism."""
    keys = set()
    for table in ("_forward_pre_hooks", "_forward_hooks"):
        for key, hook in vars(module)[table].items():
            function = hook.func if isinstance(hook, functools.partial) else hook
            if getattr(function, "__module__", "").startswith(PACKAGE):
                keys.add(key)
    for table in HOOKS:
        kept = {key: hook for key, hook in vars(module)[table].items() if key in keys}
        vars(made)[table] = type(vars(made)[table])({**vars(made)[table], **kept})
