"""The fast model's weights shared out among ranks, by a sharded optimizer or by FSDP.

A rank keeps and updates its part of every matrix's master and of the optimizer's state. With whole
copies (`ShardedMasterAdamW`: ZeRO-2, Rajbhandari et al. 2020) it receives only its part of the
average gradient, and sends its part of the updated copy to the others. With sharded copies
(`CopyFSDP`) the copies, and masters that the model reads itself, are gathered to compute with.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model.fast.master_adamw import IN_FP32, MasterAdamW, Storage
from ..model.fast.model import FastLM
from ..model.fast.weights import COPY_DTYPE, READ_BYTES, LeafSlice, Weight
from .collectives import all_gather, own_part, start_grouped
from .data_parallel import PushDDP
from .exchange import Pushes, of_all_ranks
from .fully_sharded import FSDP
from .packs import Pack, packs_of, received, with_received
from .sharded_units import ShardedParameter, UnitParameters, units_of

BUCKET_BYTES = 64 * 2**20
"""Least bytes of copies in a full bucket; one bucket is exchanged while the next is updated."""


class ShardedMasterAdamW(MasterAdamW):
    """MasterAdamW of this rank's part of all matrices; each rank also updates every vector.

    Every rank updates the whole of a matrix that cannot be split into aligned parts, one for each
    rank. Raises ValueError if no matrix can be split.

    Of masters that the model does not read itself only this rank's part is kept; the model's own
    tensors become empty. The ranks exchange updated parts in buckets, each while the next one is
    updated.
    """

    def __init__(
        self, model: FastLM, lr: float, pushes: PushDDP | None = None, storage: Storage = IN_FP32
    ) -> None:
        """`pushes` is the PushDDP around the model, if there is one; then updated copies are
        pushed too.
        """
        packs = list(packs_of(model))
        if not any(pack.shared_elements for pack in packs):
            ranks = dist.get_world_size()
            raise ValueError(
                f"no matrix of the model has a multiple of {ranks * READ_BYTES} elements, so none "
                f"can be cut into aligned parts for {ranks} ranks: use another number, or "
                "--parallel fsdp, which pads its parts"
            )
        # both read the masters, so before those are freed
        updated = [_updated_weights(pack, pushes) for pack in packs]
        exchanged = [pack.exchanged for pack in packs]
        for pack in packs:
            if pack.shared_elements:
                pack.free_masters()
        super().__init__(list(chain.from_iterable(updated)), storage, lr=lr)
        self._buckets = _buckets(updated, exchanged)
        if pushes is None:
            self._exchange: _Gathers | _PushedParts = _Gathers()
        else:
            self._exchange = _PushedParts(list(chain.from_iterable(exchanged)))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights of this rank's part, and exchange the updated copies with the other
        ranks.
        """
        del closure
        self._steps += 1
        for number, (weights, exchanged) in enumerate(self._buckets):
            self._update(weights, number)
            self._exchange.start(exchanged)
        self._exchange.finish()


def _updated_weights(pack: Pack, pushes: PushDDP | None) -> list[Weight]:
    """The weights that this rank updates: its part of the pack's matrices as one weight, or all
    weights whole.
    """
    if pack.shared_elements:
        length = pack.shared_elements // dist.get_world_size()
        part = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
        places = {}
        for leaf in pack.leaves:
            rows = None if pushes is None else pushes.received(leaf)
            places[leaf] = LeafSlice(leaf, part, received(rows))
        return [pack.part(places, length)]
    if pushes is None:
        return pack.weights
    return [with_received(weight, pushes) for weight in pack.weights]


def _buckets(
    updated: Sequence[list[Weight]], exchanged: Sequence[list[Tensor]]
) -> list[tuple[list[Weight], list[Tensor]]]:
    """Buckets of weights that are updated together, and of tensors then exchanged together, in
    forward's order.
    """
    buckets: list[tuple[list[Weight], list[Tensor]]] = []
    size = BUCKET_BYTES
    for weights, tensors in zip(updated, exchanged, strict=True):
        if size >= BUCKET_BYTES:
            buckets.append(([], []))
            size = 0
        buckets[-1][0].extend(weights)
        buckets[-1][1].extend(tensors)
        size += sum(tensor.nbytes for tensor in tensors)
    return buckets


class _Gathers:
    """Exchanges the updated parts of tensors by all-gathers."""

    def __init__(self) -> None:
        self._started: list[Any] = []

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start to gather these tensors; each rank has updated its own part of each."""
        self._started += start_grouped(
            lambda whole: all_gather(whole, own_part(whole), async_op=True), tensors
        )

    def finish(self) -> None:
        """Wait for all gathers that were started."""
        for gather in self._started:
            gather.wait()
        self._started.clear()


class _PushedParts:
    """Exchanges the updated parts of tensors by copies to the other ranks' memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Exchange the addresses of `tensors` with all other ranks, which have tensors of the same
        shapes.
        """
        by_rank = of_all_ranks(tensors)
        del by_rank[dist.get_rank()]
        self._targets: dict[int, list[Tensor]] = {}
        """By the identity of a tensor: this rank's part of it in the memory of each other rank."""
        for tensor, *copies in zip(tensors, *by_rank, strict=True):
            self._targets[id(tensor)] = [own_part(copy) for copy in copies]
        self._pushes = Pushes(tensors[0].device)

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy this rank's part of each tensor, which it has updated, to the same place of
        the tensor on every other rank.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            part = own_part(tensor)
            pairs += [(part, target) for target in self._targets[id(tensor)]]
        self._pushes.start(pairs)

    def finish(self) -> None:
        """Wait until every rank has made its copies."""
        self._pushes.finish()


class CopyFSDP(FSDP):
    """FSDP of a module that contains the fast model; `model.weights` become this rank's parts, and
    whole vectors.

    Of masters that the model does not read itself only this rank's part is kept; the model's own
    tensors become empty.
    """

    def __init__(
        self, module: nn.Module, model: FastLM, *, copies: bool = False, adds: bool = True
    ) -> None:
        """Shard the low-precision copies of the weights of `model` instead of its parameters; each
        rank keeps the master weights of its own part only.

        `copies` and `adds` are those of `FSDP`.
        """
        packs = list(packs_of(model))
        super().__init__(module, COPY_DTYPE, list(_units(module, packs)), copies=copies, adds=adds)
        updated: list[Weight] = []
        for pack in packs:
            if pack.is_matrix:
                updated.append(self._part_of(pack, is_summed=adds))
                pack.free_masters()
            else:
                updated += pack.weights
        model.weights = tuple(updated)

    def _part_of(self, pack: Pack, *, is_summed: bool) -> Weight:
        """The weight that this rank updates: its part of the matrices of the pack."""
        places = {}
        for leaf in pack.leaves:
            shard = self.shard_of(leaf)
            rows = None if is_summed else self.received(leaf)
            places[leaf] = LeafSlice(shard, slice(0, len(shard)), received(rows))
        length = len(places[pack.leaves[0]].leaf)
        return pack.part(places, length)


def _units(module: nn.Module, packs: Sequence[Pack]) -> Iterator[UnitParameters]:
    """The units of the module, with the tensors that the model reads in the place of the
    masters.
    """
    pack_of: dict[Tensor, Pack] = {}
    for pack in packs:
        pack_of |= {weight.master: pack for weight in pack.weights}
    for unit in units_of(module):
        slots_of = {parameter.full: parameter.slots for parameter in unit.parameters}
        parameters: list[ShardedParameter] = []
        for pack in dict.fromkeys(pack_of[master] for master in slots_of):
            # all leaves of a pack have parts of one length, also if only its copy is padded
            elements = max(leaf.numel() for leaf in pack.leaves)
            parameters += [
                ShardedParameter(pack.name, leaf, slots_of.get(leaf, []), elements)
                for leaf in pack.leaves
            ]
        yield UnitParameters(name=unit.name, module=unit.module, parameters=parameters)
