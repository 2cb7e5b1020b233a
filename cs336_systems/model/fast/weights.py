"""Weights kept twice: fp32 masters that the optimizer updates, and low-precision copies that matmuls read.

Under autocast every step casts each weight, and each gradient back. Matmuls read the same rounded weights either way,
and their gradients are in low precision either way, so this is the same training with fewer bytes moved. The masters
are the model's parameters; the copies are no part of its state dict.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.model.fast.fp8 import fp8_linear
from cs336_systems.model.transformer import Linear

ALIGNMENT = 16
"""Bytes that each part of a packed weight starts at a multiple of, as a kernel's threads read so many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor that is trained."""

    master: nn.Parameter
    """The model's parameter, in fp32."""
    source: Tensor | None = None
    """Leaf tensor that holds the copy in some of its rows; None if the model reads the master itself."""
    rows: slice | None = None
    """The rows of `source`, and of its gradient, that belong to the copy; None without a copy."""

    @property
    def copy(self) -> Tensor | None:
        """The copy in low precision, of the master's shape."""
        return None if self.source is None else self.source.detach()[self.rows]

    def gradients(self) -> list[Tensor]:
        """Gradients whose sum is that of the weight: the master's own and the copy's, as far as there are any."""
        own = [] if self.master.grad is None else [self.master.grad]
        copied = [] if self.source is None or self.source.grad is None else [self.source.grad[self.rows]]
        return own + copied

    def refresh(self) -> None:
        """Copy the master again."""
        if (copy := self.copy) is not None:
            copy.copy_(self.master.detach())


def drop_gradients(weights: Iterable[Weight]) -> None:
    """Drop the gradients of the copies; those of the masters are left to the optimizer or the model."""
    for weight in weights:
        if weight.source is not None:
            weight.source.grad = None


class Copies(NamedTuple):
    """Low-precision copies of the weight of a linear layer, or of several packed into one, and of the bias if any."""

    weight: Tensor
    bias: Tensor | None
    in_fp8: bool = False
    """Whether the matmul casts both its factors to fp8."""

    def matmul(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """x W^T, plus the bias if there is one."""
        return (fp8_linear if self.in_fp8 else F.linear)(x, self.weight, self.bias)


class CopyMaker:
    """Makes the copies for a model's linear layers, and remembers which copy each parameter has."""

    def __init__(self, dtype: torch.dtype, *, fp8: bool = False) -> None:
        self._dtype, self._fp8 = dtype, fp8
        self._found: dict[nn.Parameter, Weight] = {}

    def copies(self, layer: Linear) -> Copies:
        """Copies for one layer of a block."""
        bias = None if layer.bias is None else self._copy([layer.bias])
        return Copies(self._copy([layer.weight]), bias, self._fp8)

    def packed(self, *layers: Linear) -> Copies | None:
        """One weight and bias for layers that read the same tensor; None if a part would not be aligned."""
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if any(part.numel() * self._dtype.itemsize % ALIGNMENT for part in (*weights, *biases)):
            return None
        bias = self._copy(biases) if biases else None
        return Copies(self._copy(weights), bias, self._fp8)

    def padded(self, layer: Linear, multiple: int) -> Copies:
        """A copy with rows of 0 appended until their number is a multiple of `multiple`; never in fp8."""
        return Copies(self._copy([layer.weight], surplus=-len(layer.weight) % multiple), None)

    def weights(self, parameters: Iterable[nn.Parameter]) -> tuple[Weight, ...]:
        """The parameters, with their copies if they have any."""
        return tuple(self._found.get(parameter) or Weight(master=parameter) for parameter in parameters)

    def _copy(self, masters: Sequence[nn.Parameter], surplus: int = 0) -> Tensor:
        """A leaf with copies of the masters one below the other, and `surplus` rows of 0."""
        first, num_rows = masters[0], sum(len(master) for master in masters)
        source = torch.zeros(
            num_rows + surplus, *first.shape[1:], dtype=self._dtype, device=first.device, requires_grad=True
        )
        start = 0
        for master in masters:
            weight = Weight(master=master, source=source, rows=slice(start, start + len(master)))
            weight.refresh()
            self._found[master] = weight
            start += len(master)
        return source
