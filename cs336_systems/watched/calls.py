"""The calls of a watched model, kept as shapes, from which they can be made again without data."""

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MAX_CALLS = 32
"""Most different calls that are kept, so that a loop whose calls never repeat costs little."""
PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)
"""Classes whose values are kept as they are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What stands for a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def tensor(self) -> Tensor:
        """A tensor of this shape, without data."""
        return torch.empty(
            self.sizes, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )


@dataclass(frozen=True, slots=True)
class Several:
    """What stands for a list, a tuple or a mapping."""

    kind: type
    keys: tuple[Hashable, ...] | None
    """The keys of a mapping; None for a list and a tuple."""
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """What stands for a value of a class that is not known, which is not kept."""

    kind: type


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model: its arguments by position and by name."""

    model: "weakref.ref[nn.Module]"
    inputs: Any
    named: Any

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with tensors that have no data; raise TypeError for one of a class that is
        not known.
        """
        return restored(self.inputs), restored(self.named)


class Calls:
    """The different calls that were seen, at most MAX_CALLS."""

    def __init__(self) -> None:
        self.seen: list[Call] = []
        self._numbers: dict[Call, int] = {}
        self.last: Call | None = None
        """The last call, also beyond MAX_CALLS."""

    def number(self, model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> int:
        """The index of this call in `seen`; -1 for one that is beyond MAX_CALLS."""
        call = Call(weakref.ref(model), described(list(inputs)), described(dict(named)))
        self.last = call
        number = self._numbers.get(call)
        if number is None:
            if len(self.seen) == MAX_CALLS:
                return -1
            number = self._numbers[call] = len(self.seen)
            self.seen.append(call)
        return number


def described(value: Any) -> Hashable:  # noqa: ANN401 (an argument of the model)
    """What stands for an argument: it holds no tensor, and equal shapes are equal."""
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, Mapping):
        values = tuple(map(described, value.values()))
        return Several(dict, tuple(value), values)
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return Several(kind, None, tuple(map(described, value)))
    return value if isinstance(value, PLAIN) else Opaque(type(value))


def restored(value: Any) -> Any:  # noqa: ANN401
    """An argument as it was, with tensors that have no data."""
    if isinstance(value, Shape):
        return value.tensor()
    if isinstance(value, Several):
        parts = [restored(part) for part in value.values]
        if value.keys is None:
            return value.kind(parts)
        return dict(zip(value.keys, parts, strict=True))
    if isinstance(value, Opaque):
        raise TypeError(f"the model is given a {value.kind.__name__}")
    return value
