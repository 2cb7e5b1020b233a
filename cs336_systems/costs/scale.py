"""Forecast of a training step on many GPUs: time, exposed communication, memory and MFU of each parallel scheme."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

from cs336_systems.config import Parallel, Phase, RunConfig
from cs336_systems.costs.accounting import step_flops
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.limits import Given, Scheme, best_data_ranks, feed
from cs336_systems.costs.links import Links
from cs336_systems.costs.memory import peaks_by_half
from cs336_systems.costs.ranks_time import RanksTime, compute_time, with_communication
from cs336_systems.costs.shards import factor_bytes
from cs336_systems.costs.time import TimePrediction

PARALLEL = {
    Scheme.DATA: Parallel.DDP,
    Scheme.SHARDED: Parallel.FSDP,
    Scheme.TENSOR: Parallel.NONE,
    Scheme.BOTH: Parallel.FSDP,
}
"""How the data ranks of each scheme share a step."""
FEW_LAYERS, MORE_LAYERS = 6, 8
"""Layers of the two models from which deeper ones are extrapolated, because every further layer costs the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs that are all alike, and how they are connected."""

    curves: Curves
    links: Links
    peak_flops_per_s: float | None
    """Peak of one GPU by its data sheet, for the MFU; None if not known."""
    memory_bytes: int | None = None
    """Memory of each by its data sheet; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleStep:
    """The forecast of a step of one scheme on one number of ranks."""

    scheme: Scheme
    data_ranks: int
    tensor_ranks: int
    batch_size: int
    """Sequences of a data rank, which all of its tensor ranks share."""
    tokens_per_rank: float
    """Tokens of the step over the number of ranks."""
    times: RanksTime
    memory_bytes: int | None
    """Peak of the rank that keeps most; None if it is not predicted."""
    mfu: float | None

    @property
    def ranks(self) -> int:
        return self.data_ranks * self.tensor_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is asked of a step on many GPUs, and the answer."""

    config: RunConfig
    """The step of one process."""
    steps: tuple[tuple[Scheme, int, ScaleStep | str], ...]
    """For each scheme and number of ranks, the forecast, or the reason why there is none."""
    given: Given
    """What the inequalities are about: the tokens of a step on the most ranks."""
    machine: Machine
    device_name: str
    is_measured: bool
    """Whether the times of kernels are from measured ceilings of the device, not from its data sheet."""


def scale_step(config: RunConfig, scheme: Scheme, ranks: int, sequences: int, machine: Machine) -> ScaleStep | str:
    """Predict a step of `sequences` sequences on all ranks together; `config` is the step of one process.

    Returns the reason in a few words if there is no such step or no forecast.
    """
    if misfit := machine.links.misfit(ranks):
        return misfit
    shapes = [*_shapes(scheme, ranks, machine.links.gpus_per_node)]
    if not shapes:
        return "too few ranks for both"
    shared = [shape for shape in shapes if sequences % shape[0] == 0]
    if not shared:
        return f"{sequences} sequences are not a multiple of {min(data for data, _ in shapes)} data ranks"
    wanted = best_data_ranks(ranks, sequences * config.model.context_length, feed(config.model))
    data, tensor = min(shared, key=lambda shape: abs(log(shape[0] / wanted)))
    on_rank = replace(config, parallel=PARALLEL[scheme], ranks=data, batch_size=sequences // data)
    compute = _compute(_alike(on_rank), machine.curves, tensor)
    if compute is None:
        return "not predicted"
    times = with_communication(on_rank, compute, machine.curves, machine.links, tensor)
    flops = step_flops(replace(config, batch_size=1))
    peak = machine.peak_flops_per_s
    return ScaleStep(
        scheme=scheme,
        data_ranks=data,
        tensor_ranks=tensor,
        batch_size=sequences // data,
        tokens_per_rank=sequences * config.model.context_length / ranks,
        times=times,
        memory_bytes=_memory_bytes(_alike(on_rank), tensor),
        mfu=None if peak is None or flops is None else flops * sequences / (ranks * times.time.step_s * peak),
    )


def _shapes(scheme: Scheme, ranks: int, gpus_per_node: int) -> Iterator[tuple[int, int]]:
    """Data and tensor ranks; tensor ranks divide a node, or fill nodes."""
    if scheme is Scheme.TENSOR:
        yield 1, ranks
    elif scheme is not Scheme.BOTH:
        yield ranks, 1
    else:
        for tensor in range(2, ranks // 2 + 1):
            if ranks % tensor == 0 and (gpus_per_node % tensor == 0 or tensor % gpus_per_node == 0):
                yield ranks // tensor, tensor


def _alike(config: RunConfig) -> RunConfig:
    """A configuration with few ranks, each of which computes and keeps the same; unchanged if models are sharded."""
    return replace(config, ranks=min(2, config.ranks)) if config.parallel is PARALLEL[Scheme.DATA] else config


@lru_cache(maxsize=256)
def _compute(config: RunConfig, curves: Curves, tensor_ranks: int) -> TimePrediction | None:
    few, more = _models(config)
    below = compute_time(few, curves, tensor_ranks)
    if few == more or below is None:
        return below
    above = compute_time(more, curves, tensor_ranks)
    assert above is not None

    def at(take: Callable[[TimePrediction], float]) -> float:
        return _extrapolated(config, take(below), take(above))

    def by_phase(take: Callable[[TimePrediction], Mapping[Phase, float]]) -> dict[Phase, float]:
        return {phase: _extrapolated(config, take(below)[phase], time_s) for phase, time_s in take(above).items()}

    return replace(
        above,
        phases_s=by_phase(lambda time: time.phases_s),
        kernels_s=by_phase(lambda time: time.kernels_s),
        host_phases_s=by_phase(lambda time: time.host_phases_s),
        step_s=at(lambda time: time.step_s),
        launch_s=at(lambda time: time.launch_s),
    )


@lru_cache(maxsize=256)
def _memory_bytes(config: RunConfig, tensor_ranks: int) -> int | None:
    """The peak; tensor ranks have equal shares of everything, and in addition a layer's gathered input and result."""
    few, more = _models(config)
    below, above = peaks_by_half(few), peaks_by_half(more)
    if below is None or above is None:
        return None
    whole = max(_extrapolated(config, *pair) if few != more else pair[0] for pair in zip(below, above, strict=True))
    stream = config.batch_size * config.model.context_length * config.model.d_model
    gathered = 2 * stream * factor_bytes(config.precision)
    return round(whole / tensor_ranks) + (gathered if tensor_ranks > 1 else 0)


def _models(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """The same step with FEW_LAYERS and MORE_LAYERS layers; twice the step itself if it cannot be extrapolated."""
    if config.model.num_layers <= MORE_LAYERS or config.checkpoint_blocks > 1:
        return config, config
    few, more = (replace(config.model, num_layers=count) for count in (FEW_LAYERS, MORE_LAYERS))
    return replace(config, model=few), replace(config, model=more)


def _extrapolated(config: RunConfig, below: float, above: float) -> float:
    """The value at the step's own number of layers, on the line through the values at FEW_LAYERS and MORE_LAYERS."""
    return below + (above - below) * (config.model.num_layers - FEW_LAYERS) / (MORE_LAYERS - FEW_LAYERS)
