"""The calls of a watched model, kept as shapes, from which they can be made again without data."""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MAX_CALLS = 32
"""Most different calls that are kept, so that a loop whose calls never repeat costs little."""
new: Any = tuple.__new__
"""Makes a named tuple faster than its class, whose constructor is written in Python."""
PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)
"""Classes whose values are kept as they are."""


class Shape(NamedTuple):
    """What stands for a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def is_integer(self) -> bool:
        """Whether it may hold tokens."""
        return bool(self.sizes) and self.dtype in (torch.int64, torch.int32)

    @property
    def num_bytes(self) -> int:
        """Bytes of a tensor of this shape."""
        return prod(self.sizes) * self.dtype.itemsize

    def tensor(self) -> Tensor:
        """A tensor of this shape, without data."""
        return torch.empty(
            self.sizes, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )


class Several(NamedTuple):
    """What stands for a list, a tuple or a mapping."""

    kind: type
    keys: tuple[Hashable, ...] | None
    """The keys of a mapping; None for a list and a tuple."""
    values: tuple[Any, ...]

    def get(self, key: Hashable) -> Any:  # noqa: ANN401
        """The value of a mapping's key; None without it."""
        return self.values[self.keys.index(key)] if self.keys and key in self.keys else None


class Opaque(NamedTuple):
    """What stands for a value of a class that is not known, which is not kept."""

    kind: type


class Call(NamedTuple):
    """A call of a model: its arguments by position and by name."""

    model: "weakref.ref[nn.Module]"
    inputs: Several
    named: Several

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with tensors that have no data; raise TypeError for one of a class that is
        not known.
        """
        return restored(self.inputs), restored(self.named)


NOTHING = Several(dict, (), ())
"""No arguments by name."""


class Calls:
    """The different calls that were seen, at most MAX_CALLS."""

    def __init__(self) -> None:
        self.seen: list[Call] = []
        """In the order in which they came first, none twice; a step keeps their indices."""
        self._numbers: dict[Call, int] = {}
        """The index in `seen` of each, so that a call that comes again is soon recognised."""
        self.last: Call | None = None
        """The last call, also beyond MAX_CALLS."""

    def number(self, call: Call) -> int:
        """The index of this call in `seen`; -1 for one that is beyond MAX_CALLS."""
        self.last = call
        number = self._numbers.get(call)
        if number is None:
            if len(self.seen) == MAX_CALLS:
                return -1
            number = self._numbers[call] = len(self.seen)
            self.seen.append(call)
        return number


def call_of(
    model: "weakref.ref[nn.Module]", inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> Call:
    """The call of a model that is given these."""
    values = new(Several, (list, None, tuple(map(described, inputs))))
    call: Call = new(Call, (model, values, described(named) if named else NOTHING))
    return call


def described(value: Any) -> Hashable:  # noqa: ANN401 (an argument of the model)
    """What stands for an argument: it holds no tensor, and equal shapes are equal."""
    if isinstance(value, Tensor):
        shape: Shape = new(Shape, (value.shape, value.dtype, value.requires_grad))
        return shape
    if isinstance(value, Mapping):
        values = tuple(map(described, value.values()))
        return Several(dict, tuple(value), values)
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return Several(kind, None, tuple(map(described, value)))
    return value if isinstance(value, PLAIN) else Opaque(type(value))


def shapes_in(values: Iterable[Any]) -> Iterator[Shape]:
    """What stands for the tensors among these arguments."""
    for value in values:
        if isinstance(value, Several):
            yield from shapes_in(value.values)
        elif isinstance(value, Shape):
            yield value


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
