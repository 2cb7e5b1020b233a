"""Models whose parameters `fully_shard` divides among ranks, as what one rank computes with."""

import contextlib
import copy
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .dataless import without_data


def rank_copy(model: nn.Module) -> nn.Module:
    """A copy without data, as `without_data` makes it, of what this rank computes with.

    `fully_shard` gathers a parameter before it is used: it is whole in the copy.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    gathered = [module for module in model.modules() if kind and isinstance(module, kind)]
    memo: dict[int, Any] = {}
    for module in gathered:
        for parameter in module.parameters():
            if _is_only_gathered(parameter):
                memo[id(parameter)] = _whole(parameter)
    with contextlib.ExitStack() as patches:
        for sharded in set(map(type, gathered)):
            patches.enter_context(mock.patch.object(sharded, "__deepcopy__", _copied))
        return without_data(model, memo)


def _is_only_gathered(parameter: Any) -> bool:  # noqa: ANN401 (a DTensor)
    """Whether nothing else divides the parameter, as tensor parallelism does."""
    placements = getattr(parameter, "placements", ())
    return sum(not placement.is_replicate() for placement in placements) <= 1


def _whole(parameter: Tensor) -> nn.Parameter:
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of the class that the module had before `fully_shard` gave it one that refuses to be
    copied, without what PyTorch keeps of its sharding in it.
    """
    made: nn.Module = object.__new__(type(module).__bases__[-1])
    memo[id(module)] = made
    state = {name: value for name, value in vars(module).items() if name[:2] != "__"}
    vars(made).update(copy.deepcopy(state, memo))
    return made
