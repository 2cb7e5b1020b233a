"""The collectives of a step on several ranks, call by call: bytes that a rank sends, and time by
measured collectives.

Collectives run in a ring: of S bytes that all n ranks have in the end, an all-gather makes each
rank send (n - 1) / n, a reduce-scatter and a broadcast as many, an all-reduce twice as many
(Patarasuk and Yuan 2009).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from ..config import Arch, Parallel, Precision, RunConfig
from .memory import MAX_LAYERS
from .shards import FP32_BYTES, HALF_BYTES, LOOKUP, REST, kept_elements, parameter_elements, units

FIRST_BUCKET_BYTES = 2**20
"""The first bucket of PyTorch's DistributedDataParallel, which is smaller so that its all-reduce
starts early.
"""


class Collective(StrEnum):
    """What ranks do together; the last five only occur in traces."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    PUSH = "push"
    """Each rank copies a tensor of its own to every other rank's memory."""
    REDUCE = "reduce"
    ALL_TO_ALL = "all-to-all"
    POINT_TO_POINT = "send and receive"
    COPY_TO_PEERS = "copy to peers"
    """Copies to another device by the copy engines, which leave all multiprocessors to kernels
    that compute.
    """
    OTHER = "other"
    """Kernels whose names do not tell, such as NCCL's kernel for several kinds at once."""


TIMED = tuple(Collective)[:5]
"""The collectives that are foretold, and whose times `cs336 ceilings` measures."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that is launched as one; several tensors that are averaged or gathered
    together are one call.
    """

    collective: Collective
    num_bytes: int
    """Bytes of the whole tensors: of all ranks' parts together, if each rank has a part."""


def sent_share(collective: Collective, ranks: int) -> float:
    """Part of a call's bytes that each rank of a ring sends; an all-reduce is a reduce-scatter
    and an all-gather.
    """
    if collective is Collective.PUSH:
        return ranks - 1
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1) / ranks


AVERAGING = (
    Parallel.DDP_NAIVE,
    Parallel.DDP_FLAT,
    Parallel.DDP_OVERLAP,
    Parallel.DDP,
    Parallel.DDP_PUSH,
)
WAYS = (*AVERAGING, Parallel.FSDP, Parallel.FSDP_PUSH, Parallel.FSDP2)


def calls(config: RunConfig) -> Counter[Call] | None:
    """The collectives of a step in the steady state, with the number of each.

    None for a run in one process, a user's own model, models of more than MAX_LAYERS, and ranks
    that exchange copies of weights (`cast_once`).
    """
    is_known = config.parallel in WAYS and config.model_factory is None and not config.cast_once
    if not is_known or config.model.num_layers > MAX_LAYERS:
        return None
    is_averaged = config.parallel in AVERAGING
    found = Counter(
        (call for _, call in gradient_calls(config)) if is_averaged else _of_shards(config)
    )
    # all-reduces of one element, by which ranks wait for each other's copies
    if config.parallel.writes_to_others:
        found[Call(Collective.ALL_REDUCE, FP32_BYTES)] += 2
    if config.shard_optimizer:
        found.update(
            Call(Collective.BROADCAST, FP32_BYTES * count)
            for count in parameter_elements(config).values()
        )
    return found


def gradient_calls(config: RunConfig) -> list[tuple[list[str], Call]]:
    """The calls that average whole gradients, in their order, each with the names of its
    parameters.

    The parameter that fills a bucket is its last.
    """
    counts = parameter_elements(config)
    kind = Collective.PUSH if config.parallel is Parallel.DDP_PUSH else Collective.ALL_REDUCE
    is_alone = config.parallel in (Parallel.DDP_NAIVE, Parallel.DDP_PUSH)
    bucket_bytes = (
        inf
        if config.parallel is Parallel.DDP_FLAT
        else 0
        if is_alone
        else config.bucket_mib * 2**20
    )
    buckets: list[list[str]] = []
    filled, limit = 0, 0.0
    for name in gradient_order(config):
        if filled >= limit:
            limit = (
                FIRST_BUCKET_BYTES
                if config.parallel is Parallel.DDP and not buckets
                else bucket_bytes
            )
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += FP32_BYTES * counts[name]
    return [
        (names, Call(kind, FP32_BYTES * sum(counts[name] for name in names))) for names in buckets
    ]


def _of_shards(config: RunConfig) -> Iterator[Call]:
    found, in_pushes = part_bytes(config), config.parallel is Parallel.FSDP_PUSH
    for unit, parts in found.items():
        for together in [[part] for part in parts] if in_pushes else [parts]:
            gather, scatter = exchange_calls(config, together)
            yield from [*[gather] * (1 if unit in gathered_once(config, found) else 2), scatter]
    if config.parallel.is_fsdp:
        in_units = {name for unit in units(config) for name in unit.counts}
        vectors = sum(
            count for name, count in parameter_elements(config).items() if name not in in_units
        )
        yield Call(Collective.ALL_REDUCE, FP32_BYTES * vectors)


def exchange_calls(config: RunConfig, parts: Sequence[int]) -> tuple[Call, Call]:
    """The calls that gather parameters, of which each rank has parts of so many bytes, and
    scatter their gradients.
    """
    if config.parallel is Parallel.FSDP_PUSH:
        return (Call(Collective.PUSH, sum(parts)),) * 2
    payload = config.ranks * sum(parts)
    return Call(Collective.ALL_GATHER, payload), Call(Collective.REDUCE_SCATTER, payload)


def gathered_once(config: RunConfig, names: Collection[str]) -> set[str]:
    """Those units, of all, that are not gathered again for backward."""
    if config.parallel is Parallel.FSDP2:
        return {REST}
    return {LOOKUP, REST, [name for name in names if name != REST][-1]}


def part_bytes(config: RunConfig) -> dict[str, list[int]]:
    """Bytes of a rank's part of each parameter, by the unit with which it is gathered, in the
    order of forward.
    """
    if config.parallel.is_fsdp:
        found = {
            unit.name: [unit.element_bytes * length for length in unit.lengths]
            for unit in units(config)
        }
        return {name: parts for name, parts in found.items() if parts}
    element_bytes = HALF_BYTES if config.precision is Precision.BF16 else FP32_BYTES
    parts: dict[str, list[int]] = {}
    # PyTorch's fully_shard gathers each block, and the rest as one
    for name, count in kept_elements(config).items():
        unit = name.partition(".")[0]
        parts.setdefault(unit if unit.isdigit() else REST, []).append(element_bytes * count)
    return parts


def gradient_order(config: RunConfig) -> list[str]:
    """Names of the parameters in the order in which backward makes their gradients."""
    model = config.model
    is_gpt2 = model.arch is Arch.GPT2
    ffn = ("w2", "w1") if is_gpt2 else ("w2", "w3", "w1")
    of_block = (*ffn, "ln2", "output", "v", "k", "q", "ln1")
    layers = [f"{index}.{name}" for index in reversed(range(model.num_layers)) for name in of_block]
    if not is_gpt2:
        return ["lm_head", "ln_final", *layers, "embedding"]
    order = []
    for name in ("ln_final", *layers):
        is_bias_first = (
            config.precision is Precision.FP32 and ".ln" not in name and name != "ln_final"
        )
        order += [f"{name}.bias", name] if is_bias_first else [name, f"{name}.bias"]
    return [*order, "positions", "embedding"]
