"""The fast model fully sharded: each rank keeps its part of every matrix's master, and of its low-precision copy.

Copies are gathered to compute with, and so are masters that the model reads itself. The optimizer updates this rank's
parts of the masters, and writes its parts of the copies.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from cs336_systems.model.fast.model import COPY_DTYPE, FastLM
from cs336_systems.model.fast.weights import Place, Weight
from cs336_systems.parallel.fully_sharded import FSDP, gathered, own_part
from cs336_systems.parallel.sharded_weights import Pack, name_weights, packs_of, received
from cs336_systems.parallel.units import Found, Unit, units_of


class CopyFSDP(FSDP):
    """FSDP of a module that contains the fast model; `model.weights` become this rank's parts, and whole vectors.

    Of masters that the model does not read itself only this rank's part is kept; the model's own tensors become empty.
    """

    def __init__(self, module: nn.Module, model: FastLM, *, copies: bool = False, adds: bool = True) -> None:
        self._packs = list(packs_of(model))
        self._shapes = [[weight.master.shape for weight in pack.weights] for pack in self._packs]
        super().__init__(module, COPY_DTYPE, list(_units(module, self._packs)), copies=copies, adds=adds)
        self._adds = adds
        self._own = [self._take_own(pack) for pack in self._packs]
        model.weights = tuple(weight for own in self._own for weight in own)

    def _take_own(self, pack: Pack) -> list[Weight]:
        """The weights that this rank updates of the pack; frees masters that the model does not read."""
        if pack.weights[0].master.ndim == 1:
            return pack.weights
        own = _own_weights(pack, self, is_summed=self._adds)
        for weight in () if pack.is_read else pack.weights:
            weight.master.data = weight.master.new_empty(0)
        return own

    @property
    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """What this rank updates, by the names of the parameters that it is, or is a part of."""
        for pack, own in zip(self._packs, self._own, strict=True):
            yield from name_weights(pack.names, own)

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """All masters whole, by their names in the model; every rank must call it."""
        found: dict[str, Tensor] = {}
        for pack, shapes, own in zip(self._packs, self._shapes, self._own, strict=True):
            if len(shapes[0]) > 1:
                [weight] = own
                [flat] = gathered([weight.values()])
                parts = flat[: sum(shape.numel() for shape in shapes)].split([shape.numel() for shape in shapes])
                found |= {name: part.view(shape) for name, shape, part in zip(pack.names, shapes, parts, strict=True)}
            else:
                found |= {name: weight.values().clone() for name, weight in zip(pack.names, own, strict=True)}
        return found


def _units(module: nn.Module, packs: Sequence[Pack]) -> Iterator[Unit]:
    """The units of the module, with the tensors that the model reads in the place of the masters."""
    pack_of = {weight.master: pack for pack in packs for weight in pack.weights}
    for unit in units_of(module):
        found: list[Found] = []
        for pack in dict.fromkeys(pack_of[each.parameter] for each in unit.found):
            elements = max(leaf.numel() for leaf in pack.leaves)
            own = {each.parameter: each for each in unit.found}
            for leaf in pack.leaves:
                places = own[leaf].places if leaf in own else []
                found.append(Found(" + ".join(pack.names), leaf, places, elements))
        yield Unit(name=unit.name, module=unit.module, found=found)


def _own_weights(pack: Pack, fsdp: FSDP, *, is_summed: bool) -> list[Weight]:
    """The weight that this rank updates: its part of the matrices of the pack."""
    shards = {leaf: fsdp.shard_of(leaf) for leaf in pack.leaves}
    places = {
        leaf: Place(shard, slice(0, len(shard)), None if is_summed else received(fsdp.received(leaf)))
        for leaf, shard in shards.items()
    }
    copy = None if pack.copy is None else places[pack.copy]
    if pack.is_read:
        [weight] = pack.weights
        return [Weight(master=shards[weight.master], read=places[weight.master], copy=copy)]
    assert pack.copy is not None
    masters = torch.cat([weight.master.detach().view(-1) for weight in pack.weights])
    master = own_part(masters, len(shards[pack.copy])).requires_grad_(pack.is_trained)
    return [Weight(master=master, read=None, copy=copy)]
