"""Times collectives of several processes for the study of ceilings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import torch
import torch.distributed as dist

from ..config import Device
from ..costs.communication import Collective
from ..costs.shards import FP32_BYTES
from ..measure.failure import classify, describe
from ..measure.nvml import visible_gpus
from ..parallel.collectives import Rank, all_gather, devices_of, group_of, reduce_scatter
from ..parallel.exchange import of_all_ranks, shared_rows
from ..record import Failure, Status
from ..sweep.ranks import first_failed, run_ranks
from .ceilings_records import CeilingsGrid
from .ceilings_rows import CollectiveCell, Loops
from .loops import measure

PATIENCE_S = 120.0
"""How long a process waits for the others before it fails."""
LOOP_SHARE = 0.5
"""Share of the grid's least time of a loop that suffices here: there are many cells, and all
processes repeat.
"""
NO_ACCESS = "the GPUs cannot write to each other's memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankLoops:
    """What one of the processes sends: the loops of each row, or why it has none."""

    status: Status = Status.OK
    failure: Failure | None = None
    loops: tuple[Loops, ...] = ()


def measure_collectives(grid: CeilingsGrid, rows: Sequence[CollectiveCell]) -> list[CollectiveCell]:
    """Time collectives of one kind, by the slowest process; if a process fails, all rows get the
    failure.
    """
    assert not torch.cuda.is_initialized(), "forked processes could not use CUDA"
    gpus = [gpu.uuid for gpu in visible_gpus()] if grid.device is Device.CUDA else []
    ranks = rows[0].world_size
    devices = devices_of(gpus[:ranks], all_of_them=True)
    first, *_ = ends = run_ranks(partial(_serve, grid, rows), ranks, devices, PATIENCE_S)
    if (failed := first_failed(ends)) is not None:
        return [row.failed(failed.status, failed.failure) for row in rows]
    assert first.answer is not None
    return [row.with_loops(loops) for row, loops in zip(rows, first.answer.loops, strict=True)]


def _serve(grid: CeilingsGrid, rows: Sequence[CollectiveCell], rank: Rank) -> _RankLoops:
    """Entry of one process: time the collective of each row together with the other processes."""
    kind = rows[0].collective
    # the processes share the cores, and OpenMP's threads do not survive a fork
    torch.set_num_threads(1)
    try:
        with group_of(rank, grid.device):
            pairs = permutations(range(rank.ranks), 2) if kind is Collective.PUSH else ()
            # alike in all processes
            if not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
                return _RankLoops(status=Status.UNAVAILABLE, failure=Failure(message=NO_ACCESS))
            brief = replace(grid, loop_s=LOOP_SHARE * grid.loop_s)
            agree = partial(_agreed, grid.device)
            loops = []
            for row in rows:
                collective = make_collective(grid.device, kind, row.num_bytes)
                loops.append(measure(collective, brief, agree))
            return _RankLoops(loops=tuple(loops))
    except Exception as error:
        status = classify(error)
        return _RankLoops(
            status=status, failure=describe(error, status, "collectives", grid.device)
        )


def make_collective(device: Device, collective: Collective, num_bytes: int) -> Callable[[], object]:
    """The collective of a tensor of so many bytes among the processes of the group, of which
    each has its part.
    """
    whole = torch.rand(num_bytes // FP32_BYTES, device=device.value)
    greatest = dist.ReduceOp.MAX  # repeated sums would overflow
    if collective is Collective.ALL_REDUCE:
        return lambda: dist.all_reduce(whole, op=greatest)
    if collective is Collective.BROADCAST:
        return lambda: dist.broadcast(whole, src=0)
    if collective is Collective.PUSH:
        here = dist.get_rank()
        rows_of_ranks = of_all_ranks([shared_rows(whole, dist.get_world_size())])

        # it keeps this rank's rows alive, because the other ranks write to them
        def push() -> None:
            """Copy this process's tensor into the memory of every other process."""
            for rank, [rows] in enumerate(rows_of_ranks):
                if rank != here:
                    rows[here, : len(whole)].copy_(whole, non_blocking=True)

        return push
    part = torch.rand(len(whole) // dist.get_world_size(), device=device.value)
    if collective is Collective.ALL_GATHER:
        return lambda: all_gather(whole, part)
    return lambda: reduce_scatter(part, whole, op=greatest)


def _agreed(device: Device, time_s: float) -> float:
    """The longest of the processes' times; none goes on before all have measured theirs."""
    longest = torch.tensor(time_s, device=device.value)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)
