"""The collectives of the fast model, call by call: of its bf16 copies, some packed, and of masters that it reads.

`model/fast/` defines these tensors; `parallel/sharded_weights.py` and `parallel/sharded_copies.py` exchange them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cs336_systems.config import Arch, Parallel, RunConfig
from cs336_systems.costs.calls import BUCKET_BYTES, Call, Collective, call_of
from cs336_systems.costs.shards import FP32_BYTES, HALF_BYTES, HEAD, LOOKUP, REST

ALIGNED_ELEMENTS = 8
"""Weights are packed if each part begins at a multiple of this many elements in bf16."""
EXCHANGED_BYTES = 64 * 2**20
"""Least bytes of updated copies in a full bucket, which a sharded optimizer sends together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A tensor that backward computes a gradient for."""

    unit: str
    """The unit of fsdp with which the tensor is gathered."""
    elements: int
    element_bytes: int
    is_matrix: bool = True
    surplus: int = 0
    """Elements that pad the vocabulary; no rank updates them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor with its surplus."""
        return self.element_bytes * (self.elements + self.surplus)

    def shared_bytes(self, ranks: int) -> int:
        """Bytes that a sharded optimizer shards: a matrix without surplus; 0 for vectors and unaligned parts."""
        is_shared = self.is_matrix and self.elements % (ranks * 2 * ALIGNED_ELEMENTS) == 0
        return self.element_bytes * self.elements if is_shared else 0


def calls_with_copies(config: RunConfig) -> Iterator[Call]:
    """The collectives of a step of the fast model in the steady state."""
    found = leaves(config)
    if config.parallel.is_fsdp:
        yield from _of_units(config, found)
        yield from meetings(config)
        return
    ranks = config.ranks
    shared = {leaf: leaf.shared_bytes(ranks) if config.shard_optimizer else 0 for leaf in found}
    if config.parallel is Parallel.DDP_PUSH:
        for leaf in found:
            yield call_of(Collective.PUSH, shared[leaf] // ranks or leaf.num_bytes)
        yield from meetings(config)
    else:
        for group in _groups(config, found):
            for kind, sizes in (
                (Collective.ALL_REDUCE, [leaf.num_bytes for leaf in group if not shared[leaf]]),
                (Collective.REDUCE_SCATTER, [shared[leaf] for leaf in group]),
            ):
                if sum(sizes):
                    yield call_of(kind, sum(sizes))
    if config.shard_optimizer:
        yield from _exchanges(config, found)


def exchanges(config: RunConfig, parts: Sequence[int], gathers: int) -> Iterator[Call]:
    """The calls that gather parameters `gathers` times and scatter their gradients once.

    `parts` are the bytes of a rank's part of each parameter. There is one push per parameter, but one collective for
    all parameters.
    """
    if config.parallel is Parallel.FSDP_PUSH:
        yield from (call_of(Collective.PUSH, part) for part in parts for _ in range(gathers + 1))
    elif parts:
        payload = config.ranks * sum(parts)
        yield from (call_of(Collective.ALL_GATHER, payload) for _ in range(gathers))
        yield call_of(Collective.REDUCE_SCATTER, payload)


def meetings(config: RunConfig) -> Iterator[Call]:
    """All-reduces of one element, by which ranks wait for each other's copies."""
    if config.parallel.writes_to_others:
        for _ in range(3 if config.shard_optimizer and config.cast_once else 2):
            yield call_of(Collective.ALL_REDUCE, FP32_BYTES)


def _groups(config: RunConfig, found: Sequence[Leaf]) -> list[list[Leaf]]:
    """Leaves whose gradients are averaged together."""
    if config.parallel is Parallel.DDP_NAIVE:
        return [[leaf] for leaf in found]
    limit = BUCKET_BYTES if config.parallel is Parallel.DDP_OVERLAP else None
    ordered = _backwards(config, found)
    types = ([leaf for leaf in ordered if leaf.element_bytes == size] for size in (HALF_BYTES, FP32_BYTES))
    return [group for of_type in types for group in _filled(of_type, limit)]


def _filled(found: Iterable[Leaf], limit: int | None) -> Iterator[list[Leaf]]:
    """Groups of leaves, each of which ends with the leaf that reaches the limit; one group if there is no limit."""
    group: list[Leaf] = []
    for leaf in found:
        group.append(leaf)
        if limit is not None and sum(each.num_bytes for each in group) >= limit:
            yield group
            group = []
    if group:
        yield group


def _exchanges(config: RunConfig, found: Sequence[Leaf]) -> Iterator[Call]:
    """The calls by which ranks exchange the parts that they have updated."""
    ranks = config.ranks
    if config.parallel is Parallel.DDP_PUSH:
        yield from (call_of(Collective.PUSH, shared // ranks) for leaf in found if (shared := leaf.shared_bytes(ranks)))
        return
    for group in _filled([leaf for leaf in found if leaf.shared_bytes(ranks)], EXCHANGED_BYTES):
        for size in (HALF_BYTES, FP32_BYTES):
            if num_bytes := sum(leaf.shared_bytes(ranks) for leaf in group if leaf.element_bytes == size):
                yield call_of(Collective.ALL_GATHER, num_bytes)


def _of_units(config: RunConfig, found: Sequence[Leaf]) -> Iterator[Call]:
    """Calls of fsdp: each unit's matrices of one type are gathered, their gradients scattered, and vectors averaged."""
    *_, last = (leaf.unit for leaf in found if leaf.is_matrix and leaf.unit != REST)
    matrices = sorted((leaf for leaf in found if leaf.is_matrix), key=_unit_and_type)
    padding = max(leaf.surplus for leaf in found)  # a tied fp32 table is padded like its copy
    for (unit, size), group in groupby(matrices, key=_unit_and_type):
        surplus = padding if unit in (REST, HEAD) else 0
        parts = [size * -(-(leaf.elements + surplus) // config.ranks) for leaf in group]
        yield from exchanges(config, parts, 1 if unit in (LOOKUP, REST, last) else 2)
    for size in (HALF_BYTES, FP32_BYTES):
        if num_bytes := sum(leaf.num_bytes for leaf in found if not leaf.is_matrix and leaf.element_bytes == size):
            yield call_of(Collective.ALL_REDUCE, num_bytes)


def _unit_and_type(leaf: Leaf) -> tuple[str, int]:
    return leaf.unit, leaf.element_bytes


def leaves(config: RunConfig) -> list[Leaf]:
    """The tensors that the fast model trains, in the order of its parameters."""
    model, is_gpt2 = config.model, config.model.arch is Arch.GPT2
    d_model, d_ff, table = model.d_model, model.d_ff, model.vocab_size * model.d_model
    head = Leaf(
        unit=REST if is_gpt2 else HEAD,
        elements=table,
        element_bytes=HALF_BYTES,
        surplus=-model.vocab_size % config.pad_vocabulary * d_model,
    )
    looked_up = Leaf(unit=REST if is_gpt2 else LOOKUP, elements=table, element_bytes=FP32_BYTES)
    positions = Leaf(unit=LOOKUP, elements=model.context_length * d_model, element_bytes=FP32_BYTES)
    found = [head, looked_up, positions] if is_gpt2 else [looked_up]

    def vectors(unit: str, size: int, *counts: int) -> list[Leaf]:
        return [Leaf(unit=unit, elements=count, element_bytes=size, is_matrix=False) for count in counts]

    def linear(unit: str, d_out: int, d_in: int, parts: int = 1) -> list[Leaf]:
        """Layers that read the same tensor, in one leaf."""
        weight = Leaf(unit=unit, elements=parts * d_out * d_in, element_bytes=HALF_BYTES)
        return [weight, *(vectors(unit, HALF_BYTES, parts * d_out) if is_gpt2 else [])]

    norm = [d_model] * (2 if is_gpt2 else 1)
    for unit in map(str, range(model.num_layers)):
        found += vectors(unit, FP32_BYTES, *norm) + linear(unit, d_model, d_model, 3) + linear(unit, d_model, d_model)
        found += vectors(unit, FP32_BYTES, *norm) + linear(unit, d_ff, d_model, 1 if is_gpt2 else 2)
        found += linear(unit, d_model, d_ff)
    return [*found, *vectors("ln_final", FP32_BYTES, *norm), *([] if is_gpt2 else [head])]


def _backwards(config: RunConfig, found: Sequence[Leaf]) -> list[Leaf]:
    """The leaves in the order in which backward computes their gradients; of gpt2's tied table, the copy's is first."""
    if config.model.arch is Arch.CS336:
        return list(found[::-1])
    head, *embeddings = found[:3]
    return [head, *found[:2:-1], *embeddings]
