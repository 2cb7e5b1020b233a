"""Time of a step on several ranks: the kernels of one rank, its collectives, and the exposed part
of these.

Collectives run one after the other, at the same time as kernels. Their time is exposed where
kernels wait for them; elsewhere they slow the kernels down.

A collective runs as rings within every node and across the nodes at the same time, as NCCL's do:
each GPU of a node sends its share of what leaves the node through its own network adapter. Of S
bytes that n nodes of g ranks have in the end, a GPU sends S (g - 1) / g to its neighbours in an
all-gather, and S (n - 1) / (n g) to other nodes; the slower of the two decides (Austin et al. 2025,
How to Scale Your Model, "How to Think About GPUs"). Of latencies only those of the steps of rings
count that gather or scatter; all-reduces of many ranks run as trees, which have few.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from ..choices import ExchangeRules
from ..config import Phase, RunConfig
from .communication import Collective, CollectiveCall, Stage, exchanges, sent_share, stages
from .curves import CollectiveTimes, Curves, interpolated
from .shards import gradient_bytes, parameters_of
from .time import TimePrediction, step_time

SPEED_BESIDE = 0.5
"""Speed of kernels during a collective of NCCL, which occupies multiprocessors: the last thread
blocks of a matmul wait for a second wave, which doubles its time. Copies occupy no multiprocessor.
"""
CALL_SPREAD = 1.25
"""Nine of ten collectives take between the expected time divided and multiplied by this: the
all-reduces of each size in the published ceilings of two hosts differ by up to this.
"""


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
    times: CollectiveTimes = field(default_factory=dict)
    """Measured times of collectives within a node, by bytes; `node_bytes_per_s` is used for
    kinds not measured.
    """
    measured_ranks: int = 2
    """Ranks among which `times` were measured."""
    node_step_s: float = 0.0
    network_step_s: float = 0.0
    """Time of a step of a ring beside that of its bytes, between GPUs of a node and between nodes.
    All-gathers and reduce-scatters of n ranks have n - 1 steps.
    """

    def call_s(self, call: CollectiveCall, ranks: int, in_node: int | None = None) -> float:
        """Seconds of a collective among `ranks` ranks while nothing else is sent, of which each
        node has `in_node`. By default these are neighbours, and more than a node has fill nodes.
        """
        if in_node is None:
            in_node = min(ranks, self.gpus_per_node)
        nodes = ranks // in_node
        if call.collective is Collective.ALL_TO_ALL and nodes > 1:
            # the part for other ranks of the node
            call = replace(call, num_bytes=call.num_bytes // nodes)
        near_s = self._in_node_s(call, in_node)
        steps_s = self._steps_s(call.collective, ranks, nodes)
        if nodes == 1:
            return near_s + steps_s
        assert self.network_bytes_per_s is not None
        share = sent_share(call.collective, nodes)
        if call.collective is Collective.ALL_TO_ALL:
            share *= nodes
        # the ranks of a node share what leaves it in a ring, and each pushes to all others
        if call.collective is Collective.PUSH:
            share *= in_node
        elif call.collective is not Collective.ALL_TO_ALL:
            share /= in_node
        return steps_s + max(near_s, call.num_bytes * share / self.network_bytes_per_s)

    def _steps_s(self, kind: Collective, ranks: int, nodes: int) -> float:
        """Time of the steps of a ring that measured times do not have."""
        if kind not in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            return 0.0
        measured = self.measured_ranks - 1 if self._times_of(kind) else 0
        in_nodes = max(0, ranks - nodes - measured)
        return in_nodes * self.node_step_s + (nodes - 1) * self.network_step_s

    def _in_node_s(self, call: CollectiveCall, ranks: int) -> float:
        """Time among ranks of one node; measured times are scaled by what a rank sends if another
        number of ranks was measured.
        """
        share = sent_share(call.collective, ranks)
        if not share:
            return 0.0
        if not (times := self._times_of(call.collective)):
            return share * call.num_bytes / self.node_bytes_per_s
        measured_share = sent_share(call.collective, self.measured_ranks)
        return interpolated(times, call.num_bytes) * share / measured_share

    def _times_of(self, kind: Collective) -> Mapping[int, float]:
        """Times of this kind; if only all-reduces were measured, an all-gather, a reduce-scatter or
        an all-to-all takes half of one, as each rank sends half as much.
        """
        if self.times.get(kind):
            return self.times[kind]
        halves = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
        if kind not in halves:
            return {}
        return {
            num_bytes: time_s / 2
            for num_bytes, time_s in self.times.get(Collective.ALL_REDUCE, {}).items()
        }


def measured_links(
    collectives: Mapping[int, CollectiveTimes],
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


def fastest_bytes_per_s(times: CollectiveTimes, ranks: int) -> float | None:
    """The highest rate at which a rank sent in an all-reduce, all-gather or reduce-scatter; None
    if none was timed.
    """
    rings = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    rates: list[float] = []
    for ring in rings:
        for num_bytes, time_s in times.get(ring, {}).items():
            rates.append(num_bytes * sent_share(ring, ranks) / time_s)
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


def predicted_time(
    config: RunConfig, curves: Curves, links: Links | None = None
) -> TimePrediction | None:
    """Predict the time of a step on the machine that has these curves, on one rank or on several.

    Several ranks are joined by these links, or else by those of one node that the curves have. None
    where `step_time` predicts none, and for several ranks without links.
    """
    if not config.is_shared:
        return step_time(config, curves)
    links = links or measured_links(curves.collectives, max(2, config.ranks))
    times = None if links is None else ranks_step_time(config, curves, links)
    return None if times is None else times.time


def ranks_step_time(config: RunConfig, curves: Curves, links: Links) -> RanksTime | None:
    """Predict the time of a step on `config.ranks` ranks; None for what is not predicted on one
    rank either.

    In the interval, all kernels and all collectives are as fast, or as slow, as is likely.
    """
    compute = step_time(config, curves)
    if compute is None or compute.low_s is None or compute.high_s is None:
        return None
    exchanged = _Exchanged(config, curves, links, compute)
    more_s = exchanged.more_s
    low, high = compute.low_s / compute.step_s, compute.high_s / compute.step_s
    faster = _Exchanged(config, curves, links, compute, low, 1 / CALL_SPREAD)
    slower = _Exchanged(config, curves, links, compute, high, CALL_SPREAD)
    phases_s, kernels_s = {}, {}
    for phase in Phase:
        if phase in compute.phases_s or phase in more_s:
            phases_s[phase] = compute.phases_s.get(phase, 0.0) + more_s.get(phase, 0.0)
            kernels_s[phase] = compute.kernels_s.get(phase, 0.0) + more_s.get(phase, 0.0)
    time = replace(
        compute,
        phases_s=phases_s,
        kernels_s=kernels_s,
        step_s=compute.step_s + sum(more_s.values()),
        low_s=compute.low_s + sum(faster.more_s.values()),
        high_s=compute.high_s + sum(slower.more_s.values()),
    )
    return RanksTime(
        time=time,
        compute_s=compute.step_s,
        communication_s=exchanged.communication_s,
        slowed_s=exchanged.slowed_s,
    )


class _Exchanged:
    """What the ranks of a step exchange, and how much longer it takes for that."""

    def __init__(
        self,
        config: RunConfig,
        curves: Curves,
        links: Links,
        compute: TimePrediction,
        kernel_factor: float = 1.0,
        call_factor: float = 1.0,
    ) -> None:
        """Simulate the exchange if kernels, and collectives, take so many times as long as is
        expected.
        """
        rules, steps = config.parallel.exchange, stages(config)
        times = exchanges(config)

        @cache
        def call_s(call: CollectiveCall) -> float:
            """Seconds of one collective among all ranks."""
            return call_factor * links.call_s(call, config.ranks)

        micro_batch_s = {
            phase: kernel_factor * time_s / config.accumulate_steps
            for phase, time_s in compute.phases_s.items()
        }
        line = Timeline(rules, call_s, sends_updates_beside=config.cast_once)
        self.more_s = line.run(steps, micro_batch_s)
        """How much longer each phase takes."""
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION):
            self.more_s[phase] *= times
        self.slowed_s = times * line.slowed_s
        """How much longer kernels take because of the collectives beside them."""
        passes_s = _gradient_passes_s(config, curves)
        self.more_s[Phase.COMMUNICATION] += kernel_factor * passes_s
        self.communication_s = 0.0
        """All collectives, one after the other."""
        for stage in steps:
            stage_s = sum(map(call_s, (*stage.gathers, *stage.sends)))
            self.communication_s += stage_s * (1 if stage.phase is Phase.OPTIMIZER else times)


def _gradient_passes_s(config: RunConfig, curves: Curves) -> float:
    """Seconds of the passes over gradients after backward: they are copied into one tensor, or
    those of all ranks are added up.
    """
    rules = config.parallel.exchange
    num_bytes = sum(gradient_bytes(parameter, config) for parameter in parameters_of(config))
    if rules.bucket_bytes == inf:
        return curves.pass_s(2 * num_bytes)
    if rules.copies and not config.parallel.shards_parameters:
        # the fast model's optimizer adds them up, and only reads them
        moved_bytes = num_bytes if config.cast_once else 3 * num_bytes
        return (config.ranks - 1) * curves.pass_s(moved_bytes)
    return 0.0


class Timeline:
    """Two queues that run at the same time: kernels in order, and collectives in order."""

    def __init__(
        self,
        rules: ExchangeRules,
        call_s: Callable[[CollectiveCall], float],
        *,
        sends_updates_beside: bool = False,
    ) -> None:
        """Start a step at time 0, of a way of `--parallel` with these rules; `call_s` gives the
        seconds of a collective. With `sends_updates_beside` a sharded optimizer sends while it
        computes; otherwise it waits for the parameters of other ranks.
        """
        self._call_s = call_s
        self._sends_updates_beside = sends_updates_beside
        self.now_s = 0.0
        """When the last kernel has ended."""
        self.sent_s = 0.0
        """When the last collective has ended."""
        self.slowed_s = 0.0
        self._rules = rules
        self._speed_beside = 1.0 if self._rules.copies else SPEED_BESIDE

    def run(self, steps: Sequence[Stage], phases_s: Mapping[Phase, float]) -> dict[Phase, float]:
        """Simulate the stages of a step; return how much longer each phase takes than its kernels
        alone.

        `phases_s` has the times of the kernels without collectives. A stage's share of its phase
        is its share of the elements of matrices that the phase multiplies.
        """
        computed = [stage for stage in steps if stage.phase is not Phase.OPTIMIZER]
        phase_elements = Counter[Phase]()
        for stage in computed:
            phase_elements[stage.phase] += stage.multiplied_elements
        more_s = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION), 0.0)
        alone_s, arrivals_s = 0.0, list[float]()
        for place, stage in enumerate(computed):
            # gathers run ahead of the kernels that need them
            for later in computed[len(arrivals_s) : place + self._rules.units_ahead + 1]:
                arrivals_s.append(self._send(later.gathers))
            if stage.gathers:
                self.now_s = max(self.now_s, arrivals_s[place])
            share = stage.multiplied_elements / (phase_elements[stage.phase] or 1)
            stage_s = share * phases_s[stage.phase]
            self._compute(stage_s)
            self._send(stage.sends)
            alone_s += stage_s
            more_s[stage.phase] = self.now_s - alone_s
        # delays are counted from the start of the step, so that of backward includes forward's
        more_s[Phase.BACKWARD] -= more_s[Phase.FORWARD]
        # the phase that waits for the collectives that are still running after the last kernel
        waiting = Phase.BACKWARD if self._rules.ends_in_backward else Phase.COMMUNICATION
        more_s[waiting] += max(0.0, self.sent_s - self.now_s)
        for stage in steps:
            if stage.phase is Phase.OPTIMIZER and stage.sends:
                sent_s = sum(map(self._call_s, stage.sends))
                # the fast model's optimizer updates while it sends what it has updated before
                beside_s = phases_s[Phase.OPTIMIZER] if self._sends_updates_beside else 0.0
                more_s[Phase.OPTIMIZER] = max(sent_s - beside_s, 0.0)
        return {phase: max(0.0, time_s) for phase, time_s in more_s.items()}

    def _send(self, sent: Sequence[CollectiveCall]) -> float:
        """Launch collectives now; return when they end.

        Copies follow one another without a gap, as if they were one.
        """
        begin_s = max(self.sent_s, self.now_s)
        if sent and sent[0].collective is Collective.PUSH:
            sent = [CollectiveCall(Collective.PUSH, sum(call.num_bytes for call in sent))]
        if sent:
            self.sent_s = begin_s + sum(map(self._call_s, sent))
        return self.sent_s

    def _compute(self, alone_s: float) -> None:
        """Run kernels that take `alone_s` without collectives, and longer during one."""
        beside_s = max(0.0, self.sent_s - self.now_s)
        slow_s = min(beside_s, alone_s / self._speed_beside)
        taken_s = slow_s + alone_s - slow_s * self._speed_beside
        self.slowed_s += taken_s - alone_s
        self.now_s += taken_s
