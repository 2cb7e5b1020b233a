"""The collectives of a step on several ranks, in the order of their launches.

They follow from the tape of the step in one process, which has the parameters, their modules and
the order of their gradients, and from what the way of `--parallel` declares (`EXCHANGES`).

Collectives run in a ring: of S bytes that all n ranks have in the end, an all-gather makes each
rank send (n - 1) / n, a reduce-scatter and a broadcast as many, an all-reduce twice as many
(Patarasuk and Yuan 2009).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..choices import EXCHANGES
from ..config import Phase, RunConfig
from .memory import MAX_LAYERS
from .shards import (
    FP32_BYTES,
    LOOKUP,
    REST,
    Unit,
    gradient_bytes,
    parameters_of,
    plain,
    replicated_elements,
    units,
)
from .traces import has_tape, tape_of


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
class CollectiveCall:
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


def bus_share(collective: Collective, ranks: int) -> float | None:
    """Bytes on the bus for each byte of the whole tensor, by the convention of nccl-tests
    (PERFORMANCE.md): bus bandwidth compares with the links' whatever the collective and the number
    of ranks. None for kinds that it does not have.
    """
    match collective:
        case Collective.BROADCAST | Collective.REDUCE | Collective.POINT_TO_POINT:
            return 1.0
        case Collective.PUSH | Collective.COPY_TO_PEERS | Collective.OTHER:
            return None
    return sent_share(collective, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Kernels of one rank, the collectives that they need, and those that follow from them."""

    phase: Phase
    multiplied_elements: int = 0
    """Elements of matrices that the kernels multiply, as a measure of their share of the phase."""
    gathers: tuple[CollectiveCall, ...] = ()
    """Collectives that must have ended before the kernels."""
    sends: tuple[CollectiveCall, ...] = ()
    """Collectives that are launched once the kernels have ended."""


NOTHING: tuple[tuple[CollectiveCall, ...], tuple[CollectiveCall, ...]] = (), ()
"""What a module exchanges that no unit has: nothing is gathered and nothing scattered."""


def calls(config: RunConfig) -> Counter[CollectiveCall] | None:
    """The collectives of a step in the steady state, with the number of each.

    None for a run in one process, a user's own model, way or optimizer, models of more than
    MAX_LAYERS, steps that cannot be traced, and ranks that exchange copies of weights
    (`cast_once`).
    """
    is_known = config.parallel in EXCHANGES and config.model_factory is None
    is_known = is_known and not config.has_own_parts and not config.cast_once
    if not is_known or config.model.num_layers > MAX_LAYERS:
        return None
    if not has_tape(plain(config)):
        return None
    counts = Counter[CollectiveCall]()
    for stage in stages(config):
        times = 1 if stage.phase is Phase.OPTIMIZER else exchanges(config)
        for call in (*stage.gathers, *stage.sends):
            counts[call] += times
    return counts


def exchanges(config: RunConfig) -> int:
    """How often a step exchanges: sharded parameters are gathered, and their gradients reduced, in
    each micro-batch; whole gradients are averaged after the last one.
    """
    return config.accumulate_steps if config.parallel.shards_parameters else 1


def stages(config: RunConfig) -> list[Stage]:
    """What a rank computes and exchanges in the last micro-batch of a step, and in the optimizer,
    in order.
    """
    way = config.parallel
    step = _sharded(config) if way.shards_parameters else _averaged(config)
    sends = []
    if elements := replicated_elements(config):
        sends.append(CollectiveCall(Collective.ALL_REDUCE, FP32_BYTES * elements))
    # all-reduces of one element, by which ranks wait for each other's copies
    if way.exchange.copies:
        sends += [CollectiveCall(Collective.ALL_REDUCE, FP32_BYTES)] * 2
    updates = []
    if config.shard_optimizer:
        updates = [*_updates(config)]
    return [
        *step,
        Stage(phase=Phase.BACKWARD, sends=tuple(sends)),
        Stage(phase=Phase.OPTIMIZER, sends=tuple(updates)),
    ]


def _updates(config: RunConfig) -> Iterator[CollectiveCall]:
    """The collectives by which a sharded optimizer sends what it has updated: each parameter from
    the rank that owns it; of the fast model's matrices every rank's part.
    """
    for parameter in parameters_of(config):
        num_bytes = gradient_bytes(parameter, config)
        if not config.cast_once:
            yield CollectiveCall(Collective.BROADCAST, num_bytes)
        elif parameter.is_matrix and config.parallel.exchange.copies:
            yield CollectiveCall(Collective.PUSH, num_bytes // config.ranks)
        elif parameter.is_matrix:
            yield CollectiveCall(Collective.ALL_GATHER, num_bytes)


def _averaged(config: RunConfig) -> Iterator[Stage]:
    """Stages of backward if every rank has whole gradients, which are averaged bucket by bucket.

    Of the fast model's gradients a rank with a sharded optimizer needs its part only.
    """
    rules, parameters = config.parallel.exchange, parameters_of(config)
    collective = Collective.PUSH if rules.copies else Collective.ALL_REDUCE
    needs_part = config.cast_once and config.shard_optimizer
    if needs_part and not rules.copies:
        collective = Collective.REDUCE_SCATTER
    ordered = [parameters[place] for place in tape_of(plain(config)).gradient_order]
    if not rules.starts_in_backward:
        multiplied = sum(parameter.multiplied_elements for parameter in ordered)
        yield Stage(phase=Phase.BACKWARD, multiplied_elements=multiplied)
    bucket_bytes = rules.bucket_bytes
    if bucket_bytes is None:
        bucket_bytes = config.bucket_mib * 2**20
    sizes = [gradient_bytes(parameter, config) for parameter in ordered]
    if needs_part and rules.copies:
        sizes = [size // config.ranks for size in sizes]
    for places in split_into_buckets(sizes, bucket_bytes, rules.first_bucket_bytes):
        multiplied = 0
        if rules.starts_in_backward:
            multiplied = sum(ordered[place].multiplied_elements for place in places)
        call = CollectiveCall(collective, sum(sizes[place] for place in places))
        yield Stage(phase=Phase.BACKWARD, multiplied_elements=multiplied, sends=(call,))


def split_into_buckets(
    sizes: Sequence[int], bucket_bytes: float, first_bytes: float | None = None
) -> list[list[int]]:
    """Split tensors of these sizes into buckets that are averaged together: a bucket ends with the
    tensor that fills it. Returns the places of each bucket's tensors.

    `first_bytes` is the size of the first bucket, if it is another one.
    """
    buckets: list[list[int]] = []
    filled, limit = 0, 0.0
    for place, size in enumerate(sizes):
        if filled >= limit:
            limit = bucket_bytes
            if first_bytes is not None and not buckets:
                limit = first_bytes
            buckets.append([])
            filled = 0
        buckets[-1].append(place)
        filled += size
    return buckets


def _sharded(config: RunConfig) -> Iterator[Stage]:
    """Forward and backward of sharded parameters: each unit is gathered, freed after forward and
    gathered again for backward, and its gradients are scattered.
    """
    exchanged = {unit.name: _exchanged(unit, config) for unit in units(config)}
    multiplied = _multiplied_by_unit(config)
    names = [name for name in multiplied if name in exchanged or multiplied[name]]
    gathered_once = {LOOKUP, REST}
    if config.parallel.exchange.keeps_last_unit:
        gathered_once.add([name for name in names if name in exchanged][-1])
    for name in names:
        gathers, _ = exchanged.get(name, NOTHING)
        yield Stage(phase=Phase.FORWARD, multiplied_elements=multiplied[name], gathers=gathers)
    for name in reversed(names):
        gathers, scatters = exchanged.get(name, NOTHING)
        yield Stage(
            phase=Phase.BACKWARD,
            multiplied_elements=multiplied[name],
            gathers=() if name in gathered_once else gathers,
            sends=scatters,
        )


def _multiplied_by_unit(config: RunConfig) -> dict[str, int]:
    """Elements that the kernels of each block, and of each module outside of blocks, multiply, in
    the order of forward; a tied table multiplies in the last module that uses it.
    """
    parameters = parameters_of(config)
    # REST is gathered before all others
    multiplied = {REST: 0} | {parameter.modules[0]: 0 for parameter in parameters}
    for parameter in parameters:
        module = parameter.modules[-1]
        multiplied[module] = multiplied.get(module, 0) + parameter.multiplied_elements
    return multiplied


def _exchanged(
    unit: Unit, config: RunConfig
) -> tuple[tuple[CollectiveCall, ...], tuple[CollectiveCall, ...]]:
    """The collectives that gather a unit's parameters, and those that reduce and scatter their
    gradients.
    """
    parts_bytes = [unit.element_bytes * part for part in unit.parts]
    if config.parallel.exchange.copies:
        pushes = tuple(CollectiveCall(Collective.PUSH, part_bytes) for part_bytes in parts_bytes)
        return pushes, pushes
    whole_bytes = config.ranks * sum(parts_bytes)
    return (
        (CollectiveCall(Collective.ALL_GATHER, whole_bytes),),
        (CollectiveCall(Collective.REDUCE_SCATTER, whole_bytes),),
    )
