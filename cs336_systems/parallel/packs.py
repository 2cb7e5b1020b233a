"""The fast model's weights on several ranks: packs of weights that are one tensor, and the parts of
them that each rank updates.

The fast model has masters, and low-precision copies that it computes with (model/fast/weights.py).
A rank updates its part of a whole pack, because gradients of the pack are exchanged as one tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..model.fast.model import FastLM
from ..model.fast.weights import READ_BYTES, LeafSlice, Received, Weight
from .data_parallel import Leaf, PushDDP
from .sharded_units import padded_part


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pack:
    """All weights whose copies are in one leaf tensor, or a single weight without a copy."""

    weights: list[Weight]
    is_read: bool
    """Whether the model reads the masters themselves."""

    @property
    def name(self) -> str:
        """The names of all weights in the pack, joined."""
        return " + ".join(weight.name for weight in self.weights)

    @property
    def is_matrix(self) -> bool:
        """Whether the weights are matrices; vectors are not shared out, because they are small."""
        return self.weights[0].master.ndim > 1

    @property
    def is_trained(self) -> bool:
        """Whether the weights are trained; raise ValueError if only some are, as a rank's part
        may span several.
        """
        states = {weight.is_trained for weight in self.weights}
        if len(states) > 1:
            raise ValueError(
                f"{self.name} are one tensor, of which each rank trains a part: freeze all or none"
            )
        return states.pop()

    @property
    def copy(self) -> Tensor | None:
        """The low-precision copy that all weights of the pack share; None if the model reads the
        weights themselves.
        """
        place = self.weights[0].copy
        return None if place is None else place.leaf

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors of the pack that the model reads, whose gradients are averaged over ranks."""
        leaves = [] if self.copy is None else [self.copy]
        if self.is_read:
            leaves += [weight.master for weight in self.weights]
        return leaves

    @property
    def shared_elements(self) -> int:
        """Number of elements that are shared out by a sharded optimizer: all of a matrix, or 0 for
        a vector and if parts would not be aligned.
        """
        elements = sum(weight.master.numel() for weight in self.weights)
        is_aligned = elements % (dist.get_world_size() * READ_BYTES) == 0
        return elements if self.is_matrix and is_aligned else 0

    def free_masters(self) -> None:
        """Empty the model's own tensors of masters that it does not read, as a rank keeps a part
        of them.
        """
        if not self.is_read:
            for weight in self.weights:
                weight.master.data = weight.master.new_empty(0)

    @property
    def exchanged(self) -> list[Tensor]:
        """Tensors, as one axis, of which each rank updates its own part; none if every rank
        updates the whole.
        """
        elements = self.shared_elements
        leaves = self.leaves if elements else []
        return [leaf.detach().view(-1)[:elements] for leaf in leaves]

    def part(self, places: Mapping[Tensor, LeafSlice], length: int) -> Weight:
        """This rank's part of all the pack's matrices, joined as one axis, as a single weight.

        `length` is the number of elements of the part. `places` has, for each of the pack's
        `leaves`, where this rank's part of it is.
        """
        copy = None if self.copy is None else places[self.copy]
        if self.is_read:
            # the part of the master shares the leaf's memory, so that updates reach the model
            [weight] = self.weights
            read = places[weight.master]
            master = read.values.requires_grad_(self.is_trained)
            return Weight(name=self.name, master=master, read=read, copy=copy)
        # new memory for this part alone, as the whole masters are freed (`free_masters`)
        masters = torch.cat([weight.master.detach().view(-1) for weight in self.weights])
        master = padded_part(masters, length).requires_grad_(self.is_trained)
        return Weight(name=self.name, master=master, read=None, copy=copy)


def packs_of(model: FastLM) -> Iterator[Pack]:
    """The model's weights, grouped by the leaf tensor that the model reads."""
    by_leaf: dict[Tensor, list[Weight]] = {}
    for weight in model.weights:
        leaf = weight.master if weight.copy is None else weight.copy.leaf
        by_leaf.setdefault(leaf, []).append(weight)
    for weights in by_leaf.values():
        yield Pack(weights=weights, is_read=weights[0].read is not None)


def leaves_of(model: FastLM, *, shares: bool) -> list[Leaf]:
    """The tensors whose gradients are averaged; with `shares`, each rank needs its part of most
    of them only.
    """
    leaves = []
    for pack in packs_of(model):
        shared_elements = pack.shared_elements if shares else 0
        leaves += [Leaf(pack.name, leaf, shared_elements) for leaf in pack.leaves]
    return leaves


def with_received(weight: Weight, pushes: PushDDP) -> Weight:
    """The weight, with the buffers for other ranks' gradients of all its elements."""

    def with_buffers(place: LeafSlice | None) -> LeafSlice | None:
        """Add to a slice of a leaf the buffers with the other ranks' gradients of the same
        elements.
        """
        if place is None:
            return None
        return replace(place, received=received(pushes.received(place.leaf), place.elements))

    return replace(weight, read=with_buffers(weight.read), copy=with_buffers(weight.copy))


def received(rows: tuple[Tensor, ...] | None, elements: slice = slice(None)) -> Received | None:
    """The given elements of the other ranks' gradients, whose buffers are `rows` in rank order;
    None if `rows` is None.
    """
    if rows is None:
        return None
    gradients = tuple(row[elements] for row in rows)
    return Received(gradients, before=dist.get_rank())
