"""The collectives of a step on several ranks, call by call: bytes that a rank sends, and time by measured collectives.

Collectives run in a ring: of S bytes that all n ranks have in the end, an all-gather makes each rank send (n - 1) / n,
a reduce-scatter and a broadcast as many, an all-reduce twice as many (Patarasuk and Yuan 2009).
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from cs336_systems.config import Arch, Parallel, Precision, RunConfig
from cs336_systems.costs.calls import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Call,
    Collective,
    buckets_of,
    call_of,
    sent_share,
)
from cs336_systems.costs.copies import calls_with_copies, exchanges, meetings
from cs336_systems.costs.curves import interpolated
from cs336_systems.costs.memory import MAX_LAYERS
from cs336_systems.costs.shards import FP32_BYTES, LOOKUP, REST, kept_elements, parameter_elements, units

BF16_BYTES = 2
AVERAGING = (Parallel.DDP_NAIVE, Parallel.DDP_FLAT, Parallel.DDP_OVERLAP, Parallel.DDP, Parallel.DDP_PUSH)
WAYS = (*AVERAGING, Parallel.FSDP, Parallel.FSDP_PUSH, Parallel.FSDP2)


def calls(config: RunConfig) -> Counter[Call] | None:
    """The collectives of a step in the steady state, with the number of each.

    None for a run in one process, a user's own model, and models of more than MAX_LAYERS.
    """
    if config.parallel not in WAYS or config.model_factory is not None or config.model.num_layers > MAX_LAYERS:
        return None
    if config.cast_once:
        return Counter(calls_with_copies(config))
    found = Counter(_of_gradients(config) if config.parallel in AVERAGING else _of_shards(config))
    if config.shard_optimizer:
        counts = parameter_elements(config).values()
        found.update(call_of(Collective.BROADCAST, FP32_BYTES * count) for count in counts)
    return found


def sent_bytes(config: RunConfig) -> int | None:
    """Bytes that each rank sends in a step; None where the calls are not known."""
    found = calls(config)
    if found is None:
        return None
    return round(
        sum(count * call.num_bytes * sent_share(call.collective, config.ranks) for call, count in found.items())
    )


def _of_gradients(config: RunConfig) -> Iterator[Call]:
    counts = parameter_elements(config)
    kind = Collective.PUSH if config.parallel is Parallel.DDP_PUSH else Collective.ALL_REDUCE
    for group in gradient_groups(config):
        yield call_of(kind, FP32_BYTES * sum(counts[name] for name in group))
    yield from meetings(config)


def gradient_groups(config: RunConfig) -> list[list[str]]:
    """Names of the parameters whose gradients are averaged together, in the order in which backward makes them."""
    counts = parameter_elements(config)
    sizes = {name: FP32_BYTES * counts[name] for name in gradient_order(config)}
    if config.parallel in (Parallel.DDP_NAIVE, Parallel.DDP_PUSH):
        return [[name] for name in sizes]
    if config.parallel is Parallel.DDP_FLAT:
        return [[*sizes]]
    return buckets_of(sizes, BUCKET_BYTES, FIRST_BUCKET_BYTES if config.parallel is Parallel.DDP else None)


def _of_shards(config: RunConfig) -> Iterator[Call]:
    if config.parallel is Parallel.FSDP2:
        for name, payload in _payloads_of_fully_shard(config).items():
            yield from exchanges(config, [payload // config.ranks], 1 if name == REST else 2)
        return
    found = units(config)
    *_, last = (unit.name for unit in found if unit.name != REST)
    for unit in found:
        parts = [unit.element_bytes * length for length in unit.lengths]
        yield from exchanges(config, parts, 1 if unit.name in (LOOKUP, REST, last) else 2)
    in_units = {name for unit in found for name in unit.counts}
    vectors = sum(count for name, count in parameter_elements(config).items() if name not in in_units)
    yield call_of(Collective.ALL_REDUCE, FP32_BYTES * vectors)
    yield from meetings(config)


def unit_bytes(config: RunConfig) -> dict[str, int]:
    """Bytes of each unit's all-gather: of all ranks' parts; for ways that copy, of one rank's part."""
    if config.parallel is Parallel.FSDP2:
        return _payloads_of_fully_shard(config)
    parts = config.ranks if config.parallel.writes_to_others else 1
    return {unit.name: unit.payload_bytes // parts for unit in units(config) if unit.counts}


def _payloads_of_fully_shard(config: RunConfig) -> dict[str, int]:
    """Bytes of each block, and of the rest, as PyTorch's fully_shard gathers them."""
    element_bytes = BF16_BYTES if config.precision is Precision.BF16 else FP32_BYTES
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


def time_s(found: Mapping[Call, int], curves: Mapping[Collective, Mapping[int, float]]) -> float | None:
    """Time of the calls one after the other, from measured times by bytes; None if a kind was not measured."""
    if any(not curves.get(call.collective) for call in found):
        return None
    return sum(count * interpolated(curves[call.collective], call.num_bytes) for call, count in found.items())
