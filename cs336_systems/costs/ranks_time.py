"""Time of a step on several ranks: the kernels of one rank, its collectives, and the exposed part
of these.

Collectives run one after the other, at the same time as kernels. Their time is exposed where
kernels wait for them; elsewhere they slow the kernels down.

A collective runs as rings within every node and across the nodes at the same time, as NCCL's do:
each GPU of a node sends its share of what leaves the node through its own network adapter. Of S
bytes that n nodes of g ranks have in the end, a GPU sends S (g - 1) / g to its neighbours in an
all-gather, and S (n - 1) / (n g) to other nodes; the slower of the two decides (Austin et al. 2025,
How to Scale Your Model, "How to Think About GPUs"). Latencies of the network are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..config import Parallel, Phase, RunConfig
from .communication import (
    AVERAGING,
    Call,
    Collective,
    calls,
    exchange_calls,
    gathered_once,
    gradient_calls,
    part_bytes,
    sent_share,
)
from .curves import Curves, interpolated
from .memory import is_predictable
from .shards import AHEAD, FP32_BYTES, HEAD, LOOKUP, REST, parameter_elements, parameter_shapes
from .time import TimePrediction, has_known_kernels, operations, replay_operations, step_time

SPEED_BESIDE = 0.5
"""Speed of kernels during a collective of NCCL, which occupies multiprocessors: the last thread
blocks of a matmul wait for a second wave, which doubles its time. Copies occupy no multiprocessor.
"""
AFTER_BACKWARD = (Parallel.DDP_NAIVE, Parallel.DDP_FLAT)
"""Ways that average gradients after backward."""
WAITS_IN_BACKWARD = (Parallel.DDP, Parallel.FSDP2)
"""PyTorch's DDP and FSDP, which wait for collectives at the end of backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Connections of GPUs that are all alike."""

    gpus_per_node: int
    node_bytes_per_s: float
    """Rate at which each GPU sends to others of its node."""
    network_bytes_per_s: float | None = None
    """Rate at which each GPU sends to other nodes while all others of its node do so too; None:
    there is one node.
    """
    times: Mapping[Collective, Mapping[int, float]] = field(default_factory=dict)
    """Measured times of collectives within a node, by bytes; `node_bytes_per_s` is used for
    kinds not measured.
    """
    measured_ranks: int = 2
    """Ranks among which `times` were measured."""

    def call_s(self, call: Call, ranks: int) -> float:
        """Time of a collective of so many ranks while nothing else is sent; beyond one node they
        fill their nodes.
        """
        in_node = min(ranks, self.gpus_per_node)
        return max(self._in_node_s(call, in_node), self._across_s(call, in_node, ranks // in_node))

    def _in_node_s(self, call: Call, ranks: int) -> float:
        """Measured times are scaled by what a rank sends if another number of ranks was
        measured.
        """
        share = sent_share(call.collective, ranks)
        if not share:
            return 0.0
        if not (times := self._times_of(call.collective)):
            return share * call.num_bytes / self.node_bytes_per_s
        return (
            interpolated(times, call.num_bytes)
            * share
            / sent_share(call.collective, self.measured_ranks)
        )

    def _times_of(self, kind: Collective) -> Mapping[int, float]:
        """Times of this kind; if only all-reduces were measured, an all-gather or reduce-scatter
        takes half of one.
        """
        if (found := self.times.get(kind)) or kind not in (
            Collective.ALL_GATHER,
            Collective.REDUCE_SCATTER,
        ):
            return found or {}
        return {
            num_bytes: time_s / 2
            for num_bytes, time_s in self.times.get(Collective.ALL_REDUCE, {}).items()
        }

    def _across_s(self, call: Call, in_node: int, nodes: int) -> float:
        if nodes == 1:
            return 0.0
        assert self.network_bytes_per_s is not None
        is_push = call.collective is Collective.PUSH
        share = in_node * (nodes - 1) if is_push else sent_share(call.collective, nodes) / in_node
        return call.num_bytes * share / self.network_bytes_per_s


def measured_links(
    collectives: Mapping[int, Mapping[Collective, Mapping[int, float]]],
    gpus_per_node: int,
    network_bytes_per_s: float | None = None,
) -> Links | None:
    """Links by measured times of collectives, by the number of their ranks: the largest that a node
    has room for.

    None if no ring of so few ranks was measured.
    """
    for ranks in sorted(collectives, reverse=True):
        rate = fastest_bytes_per_s(collectives[ranks], ranks)
        if ranks <= gpus_per_node and rate is not None:
            return Links(
                gpus_per_node=gpus_per_node,
                node_bytes_per_s=rate,
                network_bytes_per_s=network_bytes_per_s,
                times=collectives[ranks],
                measured_ranks=ranks,
            )
    return None


def fastest_bytes_per_s(
    times: Mapping[Collective, Mapping[int, float]], ranks: int
) -> float | None:
    """The highest rate at which a rank sent in an all-reduce, all-gather or reduce-scatter; None
    if none was timed.
    """
    rings = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    rates = (
        num_bytes * sent_share(kind, ranks) / time_s
        for kind in rings
        for num_bytes, time_s in times.get(kind, {}).items()
    )
    return max(rates, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksTime:
    """Times of a step on several ranks."""

    time: TimePrediction
    """Times of the step; exposed communication is part of the phase that waits for it."""
    compute_s: float
    """The step without communication."""
    communication_s: float
    """All collectives, one after the other."""
    slowed_s: float
    """How much longer the kernels take because of the collectives beside them."""

    @property
    def exposed_s(self) -> float:
        """Part of the communication for which the kernels wait."""
        return max(0.0, self.time.step_s - self.compute_s - self.slowed_s)


def predicted_time(config: RunConfig, curves: Curves) -> TimePrediction | None:
    """Predict the time of a step on the machine that has these curves, on one rank or on several of
    one node.

    None where `step_time` predicts none, and for several ranks if no collectives among at most so
    many were measured.
    """
    if not config.is_shared:
        return step_time(config, curves)
    links = measured_links(curves.collectives, max(2, config.ranks))
    found = None if links is None else ranks_step_time(config, curves, links)
    return None if found is None else found.time


def ranks_step_time(config: RunConfig, curves: Curves, links: Links) -> RanksTime | None:
    """Predict the time of a step on `config.ranks` ranks; None for what is not predicted on one
    rank either.
    """
    compute = compute_time(config, curves)
    if compute is None:
        return None

    def call_s(call: Call) -> float:
        return links.call_s(call, config.ranks)

    added = _averaged if config.parallel in AVERAGING else _sharded
    more_s, slowed_s = added(config, compute, call_s)
    found: Mapping[Call, int] = calls(config) or {}
    elements = sum(parameter_elements(config).values())
    # passes over gradients after backward: ddp-flat flattens them, ddp-push adds up those of all
    # ranks
    if config.parallel is Parallel.DDP_FLAT:
        more_s[Phase.COMMUNICATION] += curves.pass_s(2 * FP32_BYTES * elements)
    elif config.parallel is Parallel.DDP_PUSH:
        more_s[Phase.COMMUNICATION] += (config.ranks - 1) * curves.pass_s(3 * FP32_BYTES * elements)
    if config.shard_optimizer:
        more_s[Phase.OPTIMIZER] = _sum_s(found, Collective.BROADCAST, call_s)
    phases = [phase for phase in Phase if phase in compute.phases_s or phase in more_s]
    time = replace(
        compute,
        phases_s={
            phase: compute.phases_s.get(phase, 0.0) + more_s.get(phase, 0.0) for phase in phases
        },
        kernels_s={
            phase: compute.kernels_s.get(phase, 0.0) + more_s.get(phase, 0.0) for phase in phases
        },
        step_s=compute.step_s + sum(more_s.values()),
    )
    communication_s = sum(count * call_s(call) for call, count in found.items())
    return RanksTime(
        time=time, compute_s=compute.step_s, communication_s=communication_s, slowed_s=slowed_s
    )


def compute_time(config: RunConfig, curves: Curves) -> TimePrediction | None:
    """Time of the kernels of one rank of an eager step; None where it is not predicted."""
    alone = config.alone
    if not is_predictable(alone) or not has_known_kernels(alone, curves):
        return None
    return replay_operations(operations(config), config.precision, curves)


class _Timeline:
    """Two queues that run at the same time: kernels in order, and collectives in order."""

    def __init__(self, config: RunConfig) -> None:
        self.now_s = 0.0
        """When the last kernel has ended."""
        self.sent_s = 0.0
        """When the last collective has ended."""
        self.slowed_s = 0.0
        self._speed_beside = 1.0 if config.parallel.writes_to_others else SPEED_BESIDE

    def send(self, time_s: float) -> float:
        """Launch a collective now; return when it ends."""
        self.sent_s = max(self.sent_s, self.now_s) + time_s
        return self.sent_s

    def compute(self, alone_s: float) -> None:
        """Run kernels that take `alone_s` without collectives, and longer during one."""
        beside_s = max(0.0, self.sent_s - self.now_s)
        slow_s = min(beside_s, alone_s / self._speed_beside)
        taken_s = slow_s + alone_s - slow_s * self._speed_beside
        self.slowed_s += taken_s - alone_s
        self.now_s += taken_s

    def wait(self, until_s: float) -> None:
        """Let the kernels wait."""
        self.now_s = max(self.now_s, until_s)


CallTime = Callable[[Call], float]


def _sum_s(found: Mapping[Call, int], kind: Collective, call_s: CallTime) -> float:
    """Time of all calls of a kind, one after the other."""
    return sum(count * call_s(call) for call, count in found.items() if call.collective is kind)


def _late(config: RunConfig) -> Phase:
    """The phase that waits for the collectives that are left after backward."""
    return Phase.BACKWARD if config.parallel in WAITS_IN_BACKWARD else Phase.COMMUNICATION


def _averaged(
    config: RunConfig, compute: TimePrediction, call_s: CallTime
) -> tuple[dict[Phase, float], float]:
    """How much longer each phase takes if whole gradients are averaged, and how much of that
    kernels are slowed.
    """
    backward_s, line = compute.phases_s[Phase.BACKWARD], _Timeline(config)
    weights = {} if config.parallel in AFTER_BACKWARD else _weights(config)
    if not weights:
        line.compute(backward_s)
    for names, call in gradient_calls(config):
        # each group takes a share of backward's time in proportion to its matrices' elements
        if weights:
            line.compute(backward_s * sum(weights[name] for name in names) / sum(weights.values()))
        line.send(call_s(call))
    more = {Phase.BACKWARD: line.slowed_s, Phase.COMMUNICATION: 0.0}
    more[_late(config)] += max(0.0, line.sent_s - line.now_s)
    return more, line.slowed_s


def _sharded(
    config: RunConfig, compute: TimePrediction, call_s: CallTime
) -> tuple[dict[Phase, float], float]:
    """The same if parameters are sharded: each unit is gathered ahead, and its gradients are
    scattered.
    """
    parts, line, shares = part_bytes(config), _Timeline(config), _shares(config)
    gather_s, scatter_s = (
        {unit: call_s(exchange_calls(config, own)[number]) for unit, own in parts.items()}
        for number in (0, 1)
    )
    order = [
        *((Phase.FORWARD, unit) for unit in shares),
        *((Phase.BACKWARD, unit) for unit in reversed(shares)),
    ]
    once = gathered_once(config, [*parts])
    gathers = [
        place
        for place, (phase, unit) in enumerate(order)
        if unit in parts and (phase is Phase.FORWARD or unit not in once)
    ]
    ahead = 1 if config.parallel is Parallel.FSDP2 else AHEAD
    arrived: dict[int, float] = {}
    if REST in parts:
        line.wait(line.send(gather_s[REST]))
    more, alone_s = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION), 0.0), 0.0
    for place, (phase, unit) in enumerate(order):
        while gathers and gathers[0] <= place + ahead:
            needed = gathers.pop(0)
            arrived[needed] = line.send(gather_s[order[needed][1]])
        line.wait(arrived.get(place, 0.0))
        compute_s = shares[unit] * compute.phases_s[phase]
        line.compute(compute_s)
        if phase is Phase.BACKWARD and unit in parts:
            line.send(scatter_s[unit])
        alone_s += compute_s
        more[phase] = line.now_s - alone_s
    more[Phase.BACKWARD] -= more[Phase.FORWARD]
    if REST in parts:
        line.send(scatter_s[REST])
    # at the end, the gradients of vectors are averaged, which every rank has whole
    vectors_s = _sum_s(calls(config) or {}, Collective.ALL_REDUCE, call_s)
    more[_late(config)] += max(0.0, line.sent_s - line.now_s) + vectors_s
    return {phase: max(0.0, time_s) for phase, time_s in more.items()}, line.slowed_s


def _shares(config: RunConfig) -> dict[str, float]:
    """Share of each unit in the time of forward, and of backward, in the order of forward."""
    weights = dict.fromkeys([LOOKUP, *map(str, range(config.model.num_layers)), HEAD], 0)
    for parameter, weight in _weights(config).items():
        unit = parameter.partition(".")[0]
        # a lookup multiplies nothing
        weights[unit if unit in weights and unit != LOOKUP else HEAD] += weight
    return {unit: weight / sum(weights.values()) for unit, weight in weights.items()}


def _weights(config: RunConfig) -> dict[str, int]:
    """Elements of each parameter that multiply every token: those of matrices; 0 for vectors and
    lookup tables.
    """
    shapes = parameter_shapes(config.model)
    tables = {LOOKUP, "positions"} if "lm_head" in shapes else {"positions"}
    counts = parameter_elements(config)
    return {
        name: counts[name] if len(shape) > 1 and name not in tables else 0
        for name, shape in shapes.items()
    }
