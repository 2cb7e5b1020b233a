"""The fast model on several ranks: sharded masters, with low-precision copies that each rank has whole or in part.

A rank keeps and updates its part of every matrix's master and of the optimizer's state. With whole copies (ZeRO-2,
Rajbhandari et al. 2020) it receives only its part of the average gradient, and sends its part of the updated copy to
the others. With sharded copies (`CopyFSDP`) the copies, and masters that the model reads itself, are gathered to
compute with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.model.fast.master_adamw import IN_FP32, MasterAdamW, Storage
from cs336_systems.model.fast.model import COPY_DTYPE, FastLM
from cs336_systems.model.fast.weights import ALIGNMENT, LeafSlice, Received, Weight
from cs336_systems.parallel.collectives import all_gather, grouped, own_part
from cs336_systems.parallel.data_parallel import Leaf, PushDDP
from cs336_systems.parallel.exchange import Pushes, of_all_ranks
from cs336_systems.parallel.fully_sharded import FSDP, ShardedParameter, UnitParameters, padded_part, units_of

BUCKET_BYTES = 64 * 2**20
"""Least bytes of copies in a full bucket; one bucket is exchanged while the next is updated."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pack:
    """All weights whose copies are in one leaf tensor, or a single weight without a copy."""

    names: list[str]
    weights: list[Weight]
    is_read: bool
    """Whether the model reads the masters themselves."""

    @property
    def is_trained(self) -> bool:
        """Whether the weights are trained; raise ValueError if only some are, as a rank's part may span several."""
        found = {weight.is_trained for weight in self.weights}
        if len(found) > 1:
            raise ValueError(
                f"{' + '.join(self.names)} are one tensor, of which each rank trains a part: freeze all or none"
            )
        return found.pop()

    @property
    def copy(self) -> Tensor | None:
        """The leaf with the copies."""
        place = self.weights[0].copy
        return None if place is None else place.leaf

    @property
    def leaves(self) -> list[Tensor]:
        """All tensors that the model reads, whose gradients are averaged."""
        copies = [] if self.copy is None else [self.copy]
        return [*copies, *(weight.master for weight in self.weights)] if self.is_read else copies

    @property
    def shared_elements(self) -> int:
        """Number of elements that are sharded: all of them, but 0 for vectors and if parts would not be aligned."""
        elements = sum(weight.master.numel() for weight in self.weights)
        is_matrix = self.weights[0].master.ndim > 1
        return elements if is_matrix and elements % (dist.get_world_size() * ALIGNMENT) == 0 else 0

    def free_masters(self) -> None:
        """Empty the model's own tensors of masters that it does not read, as a rank keeps a part of them."""
        for weight in self.weights:
            weight.master.data = weight.master.new_empty(0)

    @property
    def exchanged(self) -> list[Tensor]:
        """Tensors, as one axis, of which each rank updates its own part; none if every rank updates the whole."""
        return [leaf.detach().view(-1)[: self.shared_elements] for leaf in self.leaves if self.shared_elements]


def leaves_of(model: FastLM, *, shares: bool) -> list[Leaf]:
    """The tensors whose gradients are averaged; with `shares`, each rank needs its part of most of them only."""
    return [
        Leaf(" + ".join(pack.names), leaf, pack.shared_elements if shares else 0)
        for pack in packs_of(model)
        for leaf in pack.leaves
    ]


class _Owned:
    """The weights of a pack that this rank updates: all of them whole, or its part of them as one weight."""

    def __init__(self, pack: Pack, weights: list[Weight]) -> None:
        """`pack` is as it was before its masters were freed."""
        self.weights = weights
        self._names = pack.names

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """The weights by name; a single part of several weights is named after all of them."""
        names = self._names if len(self._names) == len(self.weights) else [" + ".join(self._names)]
        return zip(names, self.weights, strict=True)


class OwnsWeights:
    """Something that updates this rank's part of the weights."""

    _owned: list[_Owned]

    @property
    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """What this rank updates, by the names of the parameters that it is, or is a part of."""
        return (named for owned in self._owned for named in owned.named_weights())


class ShardedMasterAdamW(OwnsWeights, MasterAdamW):
    """MasterAdamW of this rank's part of all matrices; each rank also updates every vector.

    Every rank updates the whole of a matrix that cannot be split into aligned parts, one for each rank. Raises
    ValueError if no matrix can be split.

    Of masters that the model does not read itself only this rank's part is kept; the model's own tensors become empty.
    The ranks exchange updated parts in buckets, each while the next one is updated.
    """

    def __init__(self, model: FastLM, lr: float, pushes: PushDDP | None = None, storage: Storage = IN_FP32) -> None:
        """`pushes` is the PushDDP around the model, if there is one; then updated copies are pushed too."""
        packs = list(packs_of(model))
        if not any(pack.shared_elements for pack in packs):
            ranks = dist.get_world_size()
            raise ValueError(
                f"no matrix of the model has a multiple of {ranks * ALIGNMENT} elements, so none can be cut into "
                f"aligned parts for {ranks} ranks: use another number, or --parallel fsdp, which pads its parts"
            )
        self._owned = [_Owned(pack, _own_weights(pack, pushes)) for pack in packs]
        exchanged = [pack.exchanged for pack in packs]
        for pack in packs:
            if pack.shared_elements and not pack.is_read:
                pack.free_masters()
        own = [owned.weights for owned in self._owned]
        super().__init__([weight for weights in own for weight in weights], storage, lr=lr)
        self._buckets = _buckets(own, exchanged)
        every = [tensor for tensors in exchanged for tensor in tensors]
        self._exchange = _Gathers() if pushes is None else _PushedParts(every)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's part, and exchange it."""
        del closure
        self._steps += 1
        for number, (weights, exchanged) in enumerate(self._buckets):
            self._update(weights, number)
            self._exchange.start(exchanged)
        self._exchange.finish()


class _Gathers:
    """Exchanges the updated parts of tensors by all-gathers."""

    def __init__(self) -> None:
        self._started: list[Any] = []

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start with these tensors, of which this rank has updated its part."""
        self._started += grouped(lambda whole: all_gather(whole, own_part(whole), async_op=True), tensors)

    def finish(self) -> None:
        """Wait for all."""
        for gather in self._started:
            gather.wait()
        self._started.clear()


class _PushedParts:
    """Exchanges the updated parts of tensors by copies to the other ranks' memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        rank = dist.get_rank()
        others = [theirs for number, theirs in enumerate(of_all_ranks(tensors)) if number != rank]
        self._targets = {
            id(tensor): [own_part(theirs[number]) for theirs in others] for number, tensor in enumerate(tensors)
        }
        self._pushes = Pushes(tensors[0].device)

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start with these tensors, of which this rank has updated its part."""
        self._pushes.start([(own_part(tensor), target) for tensor in tensors for target in self._targets[id(tensor)]])

    def finish(self) -> None:
        """Wait for all."""
        self._pushes.finish()


def packs_of(model: FastLM) -> Iterator[Pack]:
    """The model's weights, grouped by the leaf tensor that the model reads."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    packed: dict[Tensor, list[Weight]] = {}
    for weight in model.weights:
        packed.setdefault(weight.master if weight.copy is None else weight.copy.leaf, []).append(weight)
    for weights in packed.values():
        is_read = weights[0].read is not None
        yield Pack(names=[names[weight.master] for weight in weights], weights=weights, is_read=is_read)


def with_received(weight: Weight, pushes: PushDDP) -> Weight:
    """The weight, with the buffers for other ranks' gradients of all its elements."""
    places = [
        place and replace(place, received=received(pushes.received(place.leaf), place.elements))
        for place in (weight.read, weight.copy)
    ]
    return replace(weight, read=places[0], copy=places[1])


def received(rows: tuple[Tensor, ...] | None, elements: slice = slice(None)) -> Received | None:
    """These elements of the other ranks' gradients, in the order of the ranks; None if there are none."""
    return None if rows is None else Received(tuple(row[elements] for row in rows), dist.get_rank())


def _own_weights(pack: Pack, pushes: PushDDP | None) -> list[Weight]:
    """The weights that this rank updates: its part of the pack's matrices as one weight, or all weights whole."""
    if not pack.shared_elements:
        return pack.weights if pushes is None else [with_received(weight, pushes) for weight in pack.weights]
    length = pack.shared_elements // dist.get_world_size()
    part = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
    places = {
        leaf: LeafSlice(leaf, part, None if pushes is None else received(pushes.received(leaf))) for leaf in pack.leaves
    }
    return [_part_of(pack, places, length)]


def _part_of(pack: Pack, places: Mapping[Tensor, LeafSlice], length: int) -> Weight:
    """This rank's part of the matrices of a pack, of this length; `places` has its part of each leaf."""
    copy = None if pack.copy is None else places[pack.copy]
    if pack.is_read:
        [weight] = pack.weights
        read = places[weight.master]
        return Weight(master=read.values.requires_grad_(pack.is_trained), read=read, copy=copy)
    masters = torch.cat([weight.master.detach().view(-1) for weight in pack.weights])
    return Weight(master=padded_part(masters, length).requires_grad_(pack.is_trained), read=None, copy=copy)


def _buckets(own: Sequence[list[Weight]], exchanged: Sequence[list[Tensor]]) -> list[tuple[list[Weight], list[Tensor]]]:
    """Buckets of weights that are updated together, and of tensors then exchanged together, in forward's order."""
    buckets: list[tuple[list[Weight], list[Tensor]]] = []
    size = BUCKET_BYTES
    for weights, tensors in zip(own, exchanged, strict=True):
        if size >= BUCKET_BYTES:
            buckets.append(([], []))
            size = 0
        buckets[-1][0].extend(weights)
        buckets[-1][1].extend(tensors)
        size += sum(tensor.nbytes for tensor in tensors)
    return buckets


class CopyFSDP(OwnsWeights, FSDP):
    """FSDP of a module that contains the fast model; `model.weights` become this rank's parts, and whole vectors.

    Of masters that the model does not read itself only this rank's part is kept; the model's own tensors become empty.
    """

    def __init__(self, module: nn.Module, model: FastLM, *, copies: bool = False, adds: bool = True) -> None:
        packs = list(packs_of(model))
        super().__init__(module, COPY_DTYPE, list(_units(module, packs)), copies=copies, adds=adds)
        is_matrix = [pack.weights[0].master.ndim > 1 for pack in packs]
        self._owned = [
            _Owned(pack, _own_parts_of(pack, self, is_summed=adds) if is_cut else pack.weights)
            for pack, is_cut in zip(packs, is_matrix, strict=True)
        ]
        for pack, is_cut in zip(packs, is_matrix, strict=True):
            if is_cut and not pack.is_read:
                pack.free_masters()
        model.weights = tuple(weight for owned in self._owned for weight in owned.weights)


def _units(module: nn.Module, packs: Sequence[Pack]) -> Iterator[UnitParameters]:
    """The units of the module, with the tensors that the model reads in the place of the masters."""
    pack_of = {weight.master: pack for pack in packs for weight in pack.weights}
    for unit in units_of(module):
        found: list[ShardedParameter] = []
        for pack in dict.fromkeys(pack_of[each.full] for each in unit.found):
            elements = max(leaf.numel() for leaf in pack.leaves)
            own = {each.full: each for each in unit.found}
            for leaf in pack.leaves:
                slots = own[leaf].slots if leaf in own else []
                found.append(ShardedParameter(" + ".join(pack.names), leaf, slots, elements))
        yield UnitParameters(name=unit.name, module=unit.module, found=found)


def _own_parts_of(pack: Pack, fsdp: FSDP, *, is_summed: bool) -> list[Weight]:
    """The weight that this rank updates: its part of the matrices of the pack."""
    shards = {leaf: fsdp.shard_of(leaf) for leaf in pack.leaves}
    places = {
        leaf: LeafSlice(shard, slice(0, len(shard)), None if is_summed else received(fsdp.received(leaf)))
        for leaf, shard in shards.items()
    }
    return [_part_of(pack, places, len(shards[pack.leaves[0]]))]
