"""The collectives of a step on several ranks, call by call: bytes that a rank sends, and time by measured collectives.

Collectives run in a ring: of S bytes that all n ranks have in the end, an all-gather makes each rank send (n - 1) / n,
a reduce-scatter and a broadcast as many, an all-reduce twice as many (Patarasuk and Yuan 2009).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cs336_systems.config import Arch, Parallel, Precision, RunConfig
from cs336_systems.costs.memory import MAX_LAYERS
from cs336_systems.costs.shards import FP32_BYTES, HALF_BYTES, LOOKUP, REST, kept_elements, parameter_elements, units

FIRST_BUCKET_BYTES = 2**20
"""The first bucket of PyTorch's DistributedDataParallel, which is smaller so that its all-reduce starts early."""


class Collective(StrEnum):
    """An exchange among all ranks. In a push each rank copies a tensor of its own to every other rank's memory."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    PUSH = "push"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that is launched as one; several tensors that are averaged or gathered together are one call."""

    collective: Collective
    num_bytes: int
    """Bytes of the whole tensors: of all ranks' parts together, if each rank has a part."""


def sent_share(collective: Collective, ranks: int) -> float:
    """Part of a call's bytes that each rank of a ring sends; an all-reduce is a reduce-scatter and an all-gather."""
    if collective is Collective.PUSH:
        return ranks - 1
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1) / ranks


def call_of(collective: Collective, num_bytes: int) -> Call:
    """The call of that many bytes."""
    return Call(collective=collective, num_bytes=num_bytes)


def buckets_of(sizes: Mapping[str, int], bucket_bytes: int, first_bytes: int | None = None) -> list[list[str]]:
    """The names in order, in buckets; the name that fills a bucket is its last. `first_bytes` fill the first bucket."""
    buckets: list[list[str]] = []
    filled, limit = 0, 0
    for name, size in sizes.items():
        if filled >= limit:
            limit = bucket_bytes if buckets or first_bytes is None else first_bytes
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets


AVERAGING = (Parallel.DDP_NAIVE, Parallel.DDP_FLAT, Parallel.DDP_OVERLAP, Parallel.DDP, Parallel.DDP_PUSH)
WAYS = (*AVERAGING, Parallel.FSDP, Parallel.FSDP_PUSH, Parallel.FSDP2)


def calls(config: RunConfig) -> Counter[Call] | None:
    """The collectives of a step in the steady state, with the number of each.

    None for a run in one process, a user's own model, models of more than MAX_LAYERS, and ranks that exchange copies
    of weights (`cast_once`).
    """
    is_known = config.parallel in WAYS and config.model_factory is None and not config.cast_once
    if not is_known or config.model.num_layers > MAX_LAYERS:
        return None
    found = Counter(_of_gradients(config) if config.parallel in AVERAGING else _of_shards(config))
    if config.shard_optimizer:
        counts = parameter_elements(config).values()
        found.update(call_of(Collective.BROADCAST, FP32_BYTES * count) for count in counts)
    return found


def _of_gradients(config: RunConfig) -> Iterator[Call]:
    counts = parameter_elements(config)
    kind = Collective.PUSH if config.parallel is Parallel.DDP_PUSH else Collective.ALL_REDUCE
    for group in gradient_groups(config):
        yield call_of(kind, FP32_BYTES * sum(counts[name] for name in group))
    yield from _barriers(config)


def _barriers(config: RunConfig) -> Iterator[Call]:
    """All-reduces of one element, by which ranks wait for each other's copies."""
    if config.parallel.writes_to_others:
        yield from [call_of(Collective.ALL_REDUCE, FP32_BYTES)] * 2


def _exchanges(config: RunConfig, parts: Sequence[int], gathers: int) -> Iterator[Call]:
    """The calls that gather parameters `gathers` times and scatter their gradients once.

    `parts` are the bytes of a rank's part of each parameter. There is one push per parameter, but one collective for
    all parameters.
    """
    if config.parallel is Parallel.FSDP_PUSH:
        yield from (call_of(Collective.PUSH, part) for part in parts for _ in range(gathers + 1))
    elif parts:
        payload = config.ranks * sum(parts)
        yield from [call_of(Collective.ALL_GATHER, payload)] * gathers
        yield call_of(Collective.REDUCE_SCATTER, payload)


def gradient_groups(config: RunConfig) -> list[list[str]]:
    """Names of the parameters whose gradients are averaged together, in the order in which backward makes them."""
    counts = parameter_elements(config)
    sizes = {name: FP32_BYTES * counts[name] for name in gradient_order(config)}
    if config.parallel in (Parallel.DDP_NAIVE, Parallel.DDP_PUSH):
        return [[name] for name in sizes]
    if config.parallel is Parallel.DDP_FLAT:
        return [[*sizes]]
    first_bytes = FIRST_BUCKET_BYTES if config.parallel is Parallel.DDP else None
    return buckets_of(sizes, config.bucket_mib * 2**20, first_bytes)


def _of_shards(config: RunConfig) -> Iterator[Call]:
    if config.parallel is Parallel.FSDP2:
        for name, payload in _payloads_of_fully_shard(config).items():
            yield from _exchanges(config, [payload // config.ranks], 1 if name == REST else 2)
        return
    found = units(config)
    *_, last = (unit.name for unit in found if unit.name != REST)
    for unit in found:
        parts = [unit.element_bytes * length for length in unit.lengths]
        yield from _exchanges(config, parts, 1 if unit.name in (LOOKUP, REST, last) else 2)
    in_units = {name for unit in found for name in unit.counts}
    vectors = sum(count for name, count in parameter_elements(config).items() if name not in in_units)
    yield call_of(Collective.ALL_REDUCE, FP32_BYTES * vectors)
    yield from _barriers(config)


def unit_bytes(config: RunConfig) -> dict[str, int]:
    """Bytes of each unit's all-gather: of all ranks' parts; for ways that copy, of one rank's part."""
    if config.parallel is Parallel.FSDP2:
        return _payloads_of_fully_shard(config)
    parts = config.ranks if config.parallel.writes_to_others else 1
    return {unit.name: unit.payload_bytes // parts for unit in units(config) if unit.counts}


def _payloads_of_fully_shard(config: RunConfig) -> dict[str, int]:
    """Bytes of each block, and of the rest, as PyTorch's fully_shard gathers them."""
    element_bytes = HALF_BYTES if config.precision is Precision.BF16 else FP32_BYTES
    payloads: Counter[str] = Counter()
    for name, count in kept_elements(config).items():
        unit = name.partition(".")[0]
        payloads[unit if unit.isdigit() else REST] += config.ranks * element_bytes * count
    return payloads


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
        is_bias_first = config.precision is Precision.FP32 and ".ln" not in name and name != "ln_final"
        order += [f"{name}.bias", name] if is_bias_first else [name, f"{name}.bias"]
    return [*order, "positions", "embedding"]
