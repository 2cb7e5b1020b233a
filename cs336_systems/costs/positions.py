# ruff: noqa: ANN401 (operators get whatever PyTorch passes)
"""The positions of tokens, which a trace knows although its tensors have no data."""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, UntypedStorage


class Positions:
    """Knows the values of tensors that `arange` has made, and of their sums with numbers."""

    def __init__(self) -> None:
        """Start without known values."""
        self._known: WeakKeyDictionary[UntypedStorage, range] = WeakKeyDictionary()

    def follow(self, name: str, args: Any, outs: Sequence[Tensor]) -> None:
        """Note what follows of an operator's result; raise IndexError if it looks up a position
        that a table does not have.
        """
        if name == "arange" and all(isinstance(bound, int) for bound in args):
            self._known[outs[0].untyped_storage()] = range(*args)
        elif name == "add" and isinstance(args[1], int):
            self._shift(args[0], args[1], outs[0])
        elif name == "embedding":
            self._check(args[0], args[1:2])
        elif name == "index":
            self._check(args[0], args[1])
        elif name.endswith("_") and args and isinstance(args[0], Tensor):
            self._known.pop(args[0].untyped_storage(), None)

    def _shift(self, positions: Tensor, offset: int, total: Tensor) -> None:
        """Know the values of `total`, the sum of positions and a number."""
        values = self._values(positions)
        shifted = range(values.start + offset, values.stop + offset, values.step)
        # repeated positions are more elements than values
        if values and len(shifted) == total.numel():
            self._known[total.untyped_storage()] = shifted

    def _check(self, table: Tensor, indices: Iterable[Tensor | None]) -> None:
        """Raise IndexError for an index whose values go beyond its axis of the table."""
        for rows, index in zip(table.shape, indices, strict=False):
            last = max(self._values(index), default=-1)
            if last >= rows:
                raise IndexError(f"a table of {rows:,} rows has no position {last:,}")

    def _values(self, tensor: Tensor | None) -> range:
        """The values from the first to the last of a tensor's; none if they are not known."""
        if tensor is None:
            return range(0)
        values = self._known.get(tensor.untyped_storage(), range(0))
        first = tensor.storage_offset()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = first + sum((size - 1) * stride for size, stride in steps)
        return values[first : last + 1]
