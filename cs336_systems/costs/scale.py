"""Forecast of a training step on many GPUs: time, exposed communication, memory and MFU of each parallel scheme."""

from dataclasses import dataclass, replace

from cs336_systems.config import Parallel, RunConfig
from cs336_systems.costs.accounting import step_flops
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.limits import Given, Scheme
from cs336_systems.costs.links import Links
from cs336_systems.costs.memory import rank_peak_bytes
from cs336_systems.costs.ranks_time import RanksTime, ranks_step_time

PARALLEL = {Scheme.DATA: Parallel.DDP, Scheme.SHARDED: Parallel.FSDP}
"""The schemes whose steps are forecast, which measured steps of few ranks test."""


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

    times: RanksTime
    memory_bytes: int | None
    """Peak of the rank that keeps most; None if it is not predicted."""
    mfu: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is asked of a step on many GPUs, and the answer."""

    config: RunConfig
    """The step of one process."""
    steps: tuple[tuple[Scheme, int, ScaleStep | None], ...]
    """For each scheme and number of ranks the forecast, None where there is none."""
    given: Given
    """What the inequalities are about: the tokens of a step on the most ranks."""
    machine: Machine
    device_name: str
    is_measured: bool
    """Whether the times of kernels are from measured ceilings of the device, not from its data sheet."""


def scale_step(config: RunConfig, scheme: Scheme, ranks: int, machine: Machine) -> ScaleStep | None:
    """Predict a step of `ranks` ranks, each of which has the step `config` of one process; None if it is not known."""
    on_rank = replace(config, parallel=PARALLEL[scheme], ranks=ranks)
    times = ranks_step_time(on_rank, machine.curves, machine.links)
    if times is None:
        return None
    flops, peak = step_flops(config), machine.peak_flops_per_s
    return ScaleStep(
        times=times,
        memory_bytes=rank_peak_bytes(on_rank),
        mfu=None if peak is None or flops is None else flops / (times.time.step_s * peak),
    )
