"""Tokens that a watched loop sends through its model, counted where an embedding looks them up."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Device, Precision
from .precision import precision_of


@dataclass(slots=True)
class Pass:
    """What one forward pass of the model was given; None is what was not seen."""

    is_training: bool
    """Whether the model was in training mode."""
    tokens: int | None = None
    shape: tuple[int, ...] = ()
    """Shape of the tokens."""
    precision: Precision | None = None
    mark: int = -1
    """Index of the mark of the step at which the pass began."""

    def clear(self) -> None:
        """Forget the pass: it was none of training."""
        self.tokens, self.shape = None, ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a step sent through the model; None is what was not seen."""

    count: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    precision: Precision | None = None


def tokens_of(passes: Iterable[Pass]) -> Tokens:
    """The sums over the forward passes of a step."""
    count, shapes, precision = None, [], None
    for seen in passes:
        if seen.tokens is not None:
            count = (count or 0) + seen.tokens
            shapes.append(seen.shape)
        precision = seen.precision or precision
    return Tokens(count, tuple(shapes), precision)


class PassReader:
    """Reads what a forward pass is given, from hooks within the model."""

    def __init__(self, models: Iterable[nn.Module], device: Device) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._device = device
        self._named: Tensor | None = None
        self._looked_up: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By embedding, the tokens that reached it in this pass, and the shape of the last."""
        self._is_open = False

    def embeddings(self) -> list[nn.Module]:
        """The embeddings of the models; `looks_up` is to be called before each of their calls."""
        modules: list[nn.Module] = []
        for reference in self._models:
            model = reference()
            if model is not None:
                modules += [part for part in model.modules() if isinstance(part, nn.Embedding)]
        return modules

    def pass_begins(
        self, _module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Begin to read a forward pass."""
        self._is_open = True
        self._looked_up.clear()
        self._named = _named_tokens((named, *inputs))

    def pass_ends(self, module: nn.Module) -> Pass:
        """What the pass was given."""
        self._is_open = False
        seen = Pass(is_training=module.training, precision=precision_of(module, self._device))
        if self._named is not None:
            seen.tokens, seen.shape = self._named.numel(), tuple(self._named.shape)
        elif self._looked_up:
            seen.tokens, seen.shape = max(self._looked_up.values())
        self._named = None
        return seen

    def looks_up(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Count the tokens that an embedding is given."""
        if self._is_open and inputs and isinstance(inputs[0], Tensor):
            ids = inputs[0]
            count, _ = self._looked_up.get(id(module), (0, ()))
            self._looked_up[id(module)] = count + ids.numel(), tuple(ids.shape)


def _named_tokens(given: Iterable[Any]) -> Tensor | None:
    """The tensor that is called input_ids, in a mapping."""
    for values in given:
        if isinstance(values, Mapping):
            ids = values.get("input_ids")
            if isinstance(ids, Tensor) and not torch.is_floating_point(ids):
                return ids
    return None
