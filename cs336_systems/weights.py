"""Weights kept twice: fp32 masters that the optimizer updates, and low-precision copies that the model reads.

Under autocast every step casts each weight, and each gradient back. Products see the same rounded weights either way,
and gradients come out of them in low precision either way, so this is the same training with fewer bytes moved.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.model import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor that is trained."""

    master: nn.Parameter
    """fp32; the model's own parameter where it has no copy, or where another module reads it as it is (tied)."""
    copy: nn.Parameter | None
    """What a linear layer of the model reads in its place; None where the model reads the master alone."""

    def gradients(self) -> list[Tensor]:
        """Gradients whose sum is that of the weight: the master's own and the copy's, as far as there are any."""
        sources = (self.master, self.copy)
        return [source.grad for source in sources if source is not None and source.grad is not None]


def cast_linear_weights(model: nn.Module, dtype: torch.dtype) -> tuple[Weight, ...]:
    """Give every linear layer of `model` a copy of its weight and bias in `dtype`; return all weights, once each.

    The state dict stays that of the masters, in fp32, whether it is saved or loaded.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}
    masters: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Linear):
            for name, master in list(module.named_parameters(recurse=False)):
                copies[master] = nn.Parameter(master.detach().to(dtype))
                setattr(module, name, copies[master])
                masters[f"{prefix}.{name}"] = master
    _keep_state_dict(model, masters)
    every = dict.fromkeys([*masters.values(), *_read_as_they_are(model, copies.values())])
    return tuple(Weight(master=master, copy=copies.get(master)) for master in every)


def _read_as_they_are(model: nn.Module, copies: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    cast = set(copies)
    return [parameter for parameter in model.parameters() if parameter not in cast]


def _keep_state_dict(model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    """Have `model` save the masters, and load into them; its own loading then fills the copies."""

    def save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        for name, master in masters.items():
            state[prefix + name] = master.detach()

    def load(_module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        with torch.no_grad():
            for name, master in masters.items():
                loaded = state.get(prefix + name)
                if isinstance(loaded, Tensor) and loaded.shape == master.shape:  # else loading says what is wrong
                    master.copy_(loaded)

    model.register_state_dict_post_hook(save)
    model.register_load_state_dict_pre_hook(load)
