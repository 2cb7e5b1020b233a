"""Weights kept twice: fp32 masters that the optimizer updates, and low-precision copies that
matmuls read.

Under autocast every step casts each weight, and each gradient back. Matmuls read the same rounded
weights either way, and their gradients are in low precision either way, so this is the same
training with fewer bytes moved. The masters are the model's parameters; the copies are no part of
its state dict.

A master can be split: then only its copy and a remainder are stored, 4 bytes instead of 6. As bf16
has the sign, the exponent and the first bits of fp32, the 16 bits of the remainder are all that the
copy lacks, and the master is known to the last bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from ...config import RunConfig
from ..transformer import Linear
from .fp8 import Fp8Scale, KeptScale, Largest, Tag, fp8_linear

COPY_DTYPE = torch.bfloat16
"""Type of the copies of weights; the configuration allows copies with --precision bf16 only."""
READ_BYTES = 16
"""A part of a packed weight starts at a multiple of these bytes: one read of a thread."""
NAN_BITS = 0x7FC00000
"""The bits of a NaN in fp32 whose lower half is 0."""
MOST_PARTS = 3
"""The largest number of weights that are packed into one, which is that of q, k and v."""


class Received(NamedTuple):
    """Gradients of the same elements that other ranks have sent, each as one axis, by rank."""

    gradients: tuple[Tensor, ...]
    before: int
    """How many of the gradients come from ranks below this one."""


@dataclass(frozen=True, slots=True)
class LeafSlice:
    """Consecutive elements of a leaf tensor that the model reads."""

    leaf: Tensor
    elements: slice
    received: Received | None = None

    @property
    def values(self) -> Tensor:
        """The elements, as one axis."""
        return self.leaf.detach().view(-1)[self.elements]

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients to add up, each as one axis: none if the leaf has none, this rank's alone, or
        those of all ranks in their order if others sent any.
        """
        if self.leaf.grad is None:
            return []
        gradient = self.leaf.grad.view(-1)[self.elements]
        if self.received is None:
            return [gradient]
        before = self.received.before
        return [*self.received.gradients[:before], gradient, *self.received.gradients[before:]]


@dataclass(slots=True, kw_only=True, eq=False)
class Weight:
    """A parameter of the model, or one rank's part of one or several; trained unless frozen."""

    name: str
    """The name of the parameter; of a part of several, all their names."""
    master: Tensor
    """What the optimizer updates, in fp32."""
    read: LeafSlice | None
    """Where the model reads the master itself; None if it reads the copy only."""
    copy: LeafSlice | None = None
    """Where the model reads the copy in low precision, if there is one."""
    largest: Tensor | None = None
    """The largest magnitude of the copy in fp32, written with the copy; None if not kept."""
    remainder: Tensor | None = None
    """What `split_values` returns beside the copy of a split master, which is empty itself."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the master, also if that is split."""
        return self.master.shape if self.remainder is None else self.remainder.shape

    @property
    def is_trained(self) -> bool:
        """Whether the master requires a gradient; the copy's leaf always does."""
        return self.master.requires_grad

    @property
    def places(self) -> list[LeafSlice]:
        """Where the model reads the weight: the master itself, the copy, or both."""
        return [place for place in (self.read, self.copy) if place is not None]

    def gradients(self) -> list[Tensor]:
        """Gradients to add up to the weight's: those of the master and of the copy, if any."""
        gradients = chain.from_iterable(place.gradients for place in self.places)
        return [gradient.view(self.shape) for gradient in gradients]

    def values(self) -> Tensor:
        """The master in fp32: the tensor itself, or a new one if the master is split."""
        if self.remainder is None:
            return self.master.detach()
        assert self.copy is not None
        return joined_values(self.copy.values.view(self.shape), self.remainder)

    def store(self, values: Tensor) -> None:
        """Make these fp32 values the master, and update the copy."""
        if self.remainder is None:
            self.master.detach().copy_(values)
        if self.copy is not None:
            copy, remainder = values, None
            if self.remainder is not None:
                copy, remainder = split_values(values)
                self.remainder.copy_(remainder)
            self.copy.values.copy_(copy.reshape(-1))
            if self.largest is not None:
                self.largest.copy_(self.copy.values.abs().amax())

    def refresh(self) -> None:
        """Update the copy, and the remainder if there is one, from the master, which must hold its
        values and is emptied again if it is split.
        """
        self.store(self.master.detach())
        if self.remainder is not None:
            self.master.data = self.master.new_empty(0)

    def split(self) -> None:
        """Split the master, which frees its memory; the model must read only the copy."""
        assert self.read is None
        self.remainder = torch.empty_like(self.master, dtype=torch.int16)
        self.refresh()


def split_values(values: Float[Tensor, "..."]) -> tuple[Tensor, Tensor]:
    """fp32 values rounded to bf16, halves away from zero, and the difference of the bits of the
    two, as int16.

    NaN stays NaN, one of several.
    """
    bits = values.contiguous().view(torch.int32)
    # else the sum could carry NaN's bits over to 0
    bits = torch.where(values.isnan(), NAN_BITS, bits)
    return ((bits + 2**15) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def joined_values(copy: Tensor, remainder: Tensor) -> Float[Tensor, "..."]:
    """The fp32 values of which `split_values` made these two."""
    return ((copy.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def whole(name: str, master: nn.Parameter) -> Weight:
    """The weight of a parameter that the model reads itself, without a copy."""
    return Weight(name=name, master=master, read=LeafSlice(master, slice(0, master.numel())))


def drop_gradients(weights: Iterable[Weight]) -> None:
    """Drop the gradients of all leaves that the model reads."""
    for weight in weights:
        for place in weight.places:
            place.leaf.grad = None


class Copies(NamedTuple):
    """Copies of the weight of a linear layer, or of several packed into one, and of the bias."""

    weight: Tensor
    bias: Tensor | None
    in_fp8: bool = False
    """Whether the matmul casts both its factors to fp8."""
    scale: Fp8Scale | None = None
    """Scale of the weight in fp8; None if it is not kept."""

    def matmul(
        self, x: Float[Tensor, "... d_in"], largest: Largest | None = None, *, tags: bool = False
    ) -> tuple[Float[Tensor, "... d_out"], Tag | None]:
        """x W^T, plus the bias if there is one; with `tags` in fp8 the tag for the operation that
        reads the result.

        `largest` has the largest magnitudes of x, if they are known.
        """
        if self.in_fp8:
            return fp8_linear(x, self.weight, self.bias, largest, self.scale, tags=tags)
        return F.linear(x, self.weight, self.bias), None


class CopyMaker:
    """Makes the copies for a model's linear layers, and remembers which copy each parameter has."""

    def __init__(self, settings: RunConfig, model: nn.Module) -> None:
        self.settings = settings
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        # with several ranks, a block's copies may be gathered only just before the block runs
        self._keeps_scales = settings.fp8 and not settings.is_shared
        self._copied: dict[nn.Parameter, Weight] = {}
        self.scales: list[KeptScale] = []
        """The scales of the weights in fp8, if the optimizer keeps the magnitudes of the copies.

        Each comes with MOST_PARTS magnitudes: one for each packed part, and 0 for the rest.
        """

    def copies(self, *layers: Linear) -> Copies:
        """Copies for one layer of a block, or for several that read the same tensor, packed."""
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = self._copy(biases) if biases else None
        if not self._keeps_scales:
            return Copies(self._copy(weights), bias, self.settings.fp8)
        largest = torch.zeros(MOST_PARTS, device=weights[0].device)
        scale = torch.empty((), device=weights[0].device)
        self.scales.append(KeptScale(largest, scale))
        return Copies(self._copy(weights, largest=largest), bias, True, scale)

    def padded(self, layer: Linear, multiple: int) -> Copies:
        """A copy with rows of 0 appended up to a multiple of `multiple`; never in fp8."""
        return Copies(self._copy([layer.weight], surplus=-len(layer.weight) % multiple), None)

    def table(self, parameter: nn.Parameter) -> Tensor:
        """A copy to look up rows in: that of the head, if the head has the same weight."""
        if parameter in self._copied:
            place = self._copied[parameter].copy
            assert place is not None
            return place.leaf
        return self._copy([parameter])

    def weights(self, embedding: nn.Parameter, *, is_read: bool) -> tuple[Weight, ...]:
        """The model's parameters, with copies; `is_read` says if the `embedding` is read itself."""
        if is_read and embedding in self._copied:
            self._copied[embedding].read = LeafSlice(embedding, slice(0, embedding.numel()))
        return tuple(
            self._copied.get(parameter) or whole(name, parameter)
            for parameter, name in self._names.items()
        )

    def _copy(
        self, masters: Sequence[nn.Parameter], surplus: int = 0, largest: Tensor | None = None
    ) -> Tensor:
        """A leaf with copies of the masters, stacked by rows, and `surplus` rows of 0; `largest`
        gets the magnitude of each copy.
        """
        first, num_rows = masters[0], sum(len(master) for master in masters)
        shape = num_rows + surplus, *first.shape[1:]
        source = torch.zeros(shape, dtype=COPY_DTYPE, device=first.device, requires_grad=True)
        start = 0
        for number, master in enumerate(masters):
            place = LeafSlice(source, slice(start, start + master.numel()))
            weight = Weight(
                name=self._names[master],
                master=master,
                read=None,
                copy=place,
                largest=None if largest is None else largest[number],
            )
            weight.refresh()
            self._copied[master] = weight
            start += master.numel()
        return source
