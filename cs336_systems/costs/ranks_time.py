"""Time of a step on several ranks: the kernels of one rank, its collectives, and the exposed part of these.

Collectives run one after the other, at the same time as kernels. Their time is exposed where kernels wait for them;
elsewhere they slow the kernels down.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from cs336_systems.config import Parallel, Phase, RunConfig
from cs336_systems.costs.communication import AVERAGING, Call, Collective, call_of, calls, gradient_groups, unit_bytes
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.links import Links, measured_links
from cs336_systems.costs.memory import is_predictable
from cs336_systems.costs.shards import (
    AHEAD,
    FP32_BYTES,
    HEAD,
    LOOKUP,
    REST,
    parameter_elements,
    parameter_shapes,
)
from cs336_systems.costs.time import TimePrediction, has_known_kernels, operations, replay_operations, step_time

SPEED_BESIDE = 0.5
"""Speed of kernels during a collective of NCCL, which occupies multiprocessors: the last thread blocks of a matmul wait
for a second wave, which doubles its time. Copies occupy no multiprocessor."""
AFTER_BACKWARD = (Parallel.DDP_NAIVE, Parallel.DDP_FLAT)
"""Ways that average gradients after backward."""
WAITS_IN_BACKWARD = (Parallel.DDP, Parallel.FSDP2)
"""PyTorch's DDP and FSDP, which wait for collectives at the end of backward."""


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
    """Predict the time of a step on the machine that has these curves, on one rank or on several of one node.

    None where `step_time` predicts none, and for several ranks if no collectives among at most so many were measured.
    """
    if not config.is_shared:
        return step_time(config, curves)
    links = measured_links(curves.collectives, max(2, config.ranks))
    found = None if links is None else ranks_step_time(config, curves, links)
    return None if found is None else found.time


def ranks_step_time(config: RunConfig, curves: Curves, links: Links) -> RanksTime | None:
    """Predict the time of a step on `config.ranks` ranks; None for what is not predicted on one rank either."""
    compute = compute_time(config, curves)
    if compute is None:
        return None
    exchange = _Exchange(config=config, compute=compute, curves=curves, links=links)
    more_s, slowed_s = exchange.more_s()
    phases = [phase for phase in Phase if phase in compute.phases_s or phase in more_s]
    time = replace(
        compute,
        phases_s={phase: compute.phases_s.get(phase, 0.0) + more_s.get(phase, 0.0) for phase in phases},
        kernels_s={phase: compute.kernels_s.get(phase, 0.0) + more_s.get(phase, 0.0) for phase in phases},
        step_s=compute.step_s + sum(more_s.values()),
    )
    return RanksTime(
        time=time, compute_s=compute.step_s, communication_s=exchange.communication_s, slowed_s=slowed_s
    )  # fmt: skip


def compute_time(config: RunConfig, curves: Curves) -> TimePrediction | None:
    """Time of the kernels of one rank of an eager step; None where it is not predicted."""
    alone = config.alone
    if not is_predictable(alone) or not has_known_kernels(alone, curves):
        return None
    return replay_operations(operations(config), config.precision, curves)


class _Timeline:
    """Two queues that run at the same time: kernels in order, and collectives in order."""

    def __init__(self, speed_beside: float) -> None:
        self.now_s = 0.0
        """When the last kernel has ended."""
        self.sent_s = 0.0
        """When the last collective has ended."""
        self.slowed_s = 0.0
        self._speed_beside = speed_beside

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


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """The collectives of one step."""

    config: RunConfig
    compute: TimePrediction
    curves: Curves
    links: Links

    def more_s(self) -> tuple[dict[Phase, float], float]:
        """How much longer each phase takes than its kernels alone, and how much of that the kernels are slowed."""
        config = self.config
        more, slowed_s = self._averaged() if config.parallel in AVERAGING else self._sharded()
        if config.shard_optimizer:
            broadcasts = (each for each in self._calls if each.collective is Collective.BROADCAST)
            more[Phase.OPTIMIZER] = sum(self._calls[each] * self._call_s(each) for each in broadcasts)
        return more, slowed_s

    @property
    def communication_s(self) -> float:
        """All collectives, one after the other."""
        return sum(count * self._call_s(call) for call, count in self._calls.items())

    @cached_property
    def _calls(self) -> Mapping[Call, int]:
        return calls(self.config) or {}

    def _call_s(self, call: Call) -> float:
        return self.links.call_s(call, self.links.group(self.config.ranks))

    # whole gradients are averaged

    def _averaged(self) -> tuple[dict[Phase, float], float]:
        """The result of `more_s` for ways that average whole gradients."""
        backward_s = self.compute.phases_s[Phase.BACKWARD]
        weights = {} if self.config.parallel in AFTER_BACKWARD else _weights(self.config)
        kind = Collective.PUSH if self.config.parallel is Parallel.DDP_PUSH else Collective.ALL_REDUCE
        counts, line = parameter_elements(self.config), _Timeline(self._speed_beside)
        if not weights:
            line.compute(backward_s)
        for group in gradient_groups(self.config):
            if weights:  # each group takes a share of backward's time in proportion to its matrices' elements
                line.compute(backward_s * sum(weights[name] for name in group) / sum(weights.values()))
            line.send(self._call_s(call_of(kind, FP32_BYTES * sum(counts[name] for name in group))))
        after_s = max(0.0, line.sent_s - line.now_s) + self._passes_s(sum(counts.values()))
        more = {Phase.BACKWARD: line.slowed_s, Phase.COMMUNICATION: 0.0}
        more[self._late] += after_s
        return more, line.slowed_s

    @property
    def _late(self) -> Phase:
        """The phase that waits for the collectives that are left after backward."""
        return Phase.BACKWARD if self.config.parallel in WAITS_IN_BACKWARD else Phase.COMMUNICATION

    @property
    def _speed_beside(self) -> float:
        return 1.0 if self.config.parallel.writes_to_others else SPEED_BESIDE

    def _passes_s(self, elements: int) -> float:
        """Time of passes over gradients after backward: ddp-flat flattens them, ddp-push adds up those of all ranks."""
        if self.config.parallel is Parallel.DDP_FLAT:
            return self.curves.pass_s(2 * FP32_BYTES * elements)
        if self.config.parallel is Parallel.DDP_PUSH:
            return (self.config.ranks - 1) * self.curves.pass_s(3 * FP32_BYTES * elements)
        return 0.0

    # parameters are sharded

    def _sharded(self) -> tuple[dict[Phase, float], float]:
        """The result of `more_s` for sharded parameters: each unit is gathered ahead, and its gradients scattered."""
        units, line = unit_bytes(self.config), _Timeline(self._speed_beside)
        jobs = list(self._jobs(units))
        gathers = [place for place, job in enumerate(jobs) if job.gathers]
        gather, scatter = self._kinds
        arrived: dict[int, float] = {}
        if REST in units:
            line.wait(line.send(self._call_s(call_of(gather, units[REST]))))
        more, alone_s = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION), 0.0), 0.0
        for place, job in enumerate(jobs):
            while gathers and gathers[0] <= place + self._ahead:
                unit = jobs[gathers[0]].unit
                arrived[gathers.pop(0)] = line.send(self._call_s(call_of(gather, units[unit])))
            line.wait(arrived.get(place, 0.0))
            line.compute(job.compute_s)
            if job.scatters:
                line.send(self._call_s(call_of(scatter, units[job.unit])))
            alone_s += job.compute_s
            more[job.phase] = line.now_s - alone_s
        more[Phase.BACKWARD] -= more[Phase.FORWARD]
        if REST in units:
            line.send(self._call_s(call_of(scatter, units[REST])))
        more[self._late] += max(0.0, line.sent_s - line.now_s) + self._vectors_s()
        return {phase: max(0.0, time_s) for phase, time_s in more.items()}, line.slowed_s

    @property
    def _ahead(self) -> int:
        return 1 if self.config.parallel is Parallel.FSDP2 else AHEAD

    @property
    def _kinds(self) -> tuple[Collective, Collective]:
        """The kinds of call that gather parameters and that scatter their gradients."""
        if self.config.parallel is Parallel.FSDP_PUSH:
            return Collective.PUSH, Collective.PUSH
        return Collective.ALL_GATHER, Collective.REDUCE_SCATTER

    def _vectors_s(self) -> float:
        """Time to average the gradients of vectors, which every rank has whole, at the end."""
        alone = (each for each in self._calls if each.collective is Collective.ALL_REDUCE)
        return sum(self._calls[each] * self._call_s(each) for each in alone)

    def _jobs(self, units: Mapping[str, int]) -> Iterator["_Job"]:
        """The parts of forward and of backward in their order."""
        names = [LOOKUP, *map(str, range(self.config.model.num_layers)), HEAD]
        weights = dict.fromkeys(names, 0)
        for parameter, weight in _weights(self.config).items():
            unit = parameter.partition(".")[0]
            weights[unit if unit in weights and unit != LOOKUP else HEAD] += weight  # a lookup multiplies nothing
        shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        once = (LOOKUP, [name for name in names if name in units][-1]) if self.config.parallel.is_fsdp else ()
        for phase, order in ((Phase.FORWARD, names), (Phase.BACKWARD, names[::-1])):
            compute_s = self.compute.phases_s[phase]
            for name in order:
                is_unit, is_back = name in units, phase is Phase.BACKWARD
                yield _Job(
                    phase=phase,
                    unit=name,
                    compute_s=shares[name] * compute_s,
                    gathers=is_unit and not (is_back and name in once),
                    scatters=is_unit and is_back,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The kernels of one unit in forward or backward."""

    phase: Phase
    unit: str
    compute_s: float
    gathers: bool
    """Whether the unit's parameters must be gathered before."""
    scatters: bool
    """Whether the unit's gradients are scattered afterwards."""


def _weights(config: RunConfig) -> dict[str, int]:
    """Elements of each parameter that multiply every token: those of matrices; 0 for vectors and lookup tables."""
    shapes = parameter_shapes(config.model)
    tables = {LOOKUP, "positions"} if "lm_head" in shapes else {"positions"}
    counts = parameter_elements(config)
    return {
        name: counts[name] if len(shape.split()) > 1 and name not in tables else 0 for name, shape in shapes.items()
    }
