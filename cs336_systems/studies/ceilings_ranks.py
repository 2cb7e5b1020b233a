"""Collectives between processes of this machine, each with a GPU of its own; with device cpu, over gloo."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
import torch.distributed as dist

from cs336_systems.config import Device
from cs336_systems.costs.communication import Collective
from cs336_systems.costs.shards import FP32_BYTES
from cs336_systems.files import write_atomically
from cs336_systems.measure.failure import classify, describe
from cs336_systems.measure.nvml import visible_gpus
from cs336_systems.parallel.collectives import Rank, all_gather, devices_of, group_of, reduce_scatter
from cs336_systems.parallel.exchange import of_all_ranks, shared_rows
from cs336_systems.record import Failure, Status
from cs336_systems.studies.ceilings_records import UNTIMED, CeilingsGrid, CollectiveCell, Loops, Timing
from cs336_systems.studies.timing import PROBES, device_timer, host_timer, replayed
from cs336_systems.sweep.ranks import first_failed, run_ranks

PATIENCE_S = 120.0
"""How long a process waits for the others before it fails."""
GRAPH_BELOW_S, GRAPH_RUNS = 1e-4, 100
"""A collective shorter than this time is repeated this many times within a CUDA graph."""
LOOP_SHARE = 0.5
"""Share of the grid's least time of a loop that suffices here: there are many cells, and all processes repeat."""
NO_ACCESS = "the GPUs cannot write to each other's memory"
_RESULT, _MEETING = "collectives.json", "rendezvous"


def measure_collectives(grid: CeilingsGrid, rows: Sequence[CollectiveCell]) -> list[CollectiveCell]:
    """Time the collectives of the rows, all of which have the same number of processes.

    If a process fails, the others are ended, the row at which it failed gets the failure, and new processes continue
    with the next row. If the processes cannot form a group, all remaining rows get the failure.
    """
    measured: list[CollectiveCell] = []
    while left := rows[len(measured) :]:
        found, failed = _in_processes(grid, left)
        measured += [
            row.failed(Status.UNAVAILABLE, Failure(message=NO_ACCESS)) if loops is None else row.with_loops(loops)
            for row, loops in zip(left, found or [], strict=False)
        ]
        if failed is not None:
            blamed = rows[len(measured) :] if found is None else rows[len(measured) : len(measured) + 1]
            measured += [row.failed(*failed) for row in blamed]
    return measured


def _in_processes(
    grid: CeilingsGrid, rows: Sequence[CollectiveCell]
) -> tuple[list[Loops | None] | None, tuple[Status, Failure] | None]:
    """The loops of the rows that were measured before a process failed, and how it failed.

    None instead of loops if the processes could not form a group.
    """
    assert not torch.cuda.is_initialized(), "forked processes could not use CUDA"
    gpus = [gpu.uuid for gpu in visible_gpus()] if grid.device is Device.CUDA else []
    ranks = range(rows[0].world_size)
    with TemporaryDirectory(prefix="cs336-", dir=get_temp_dir()) as scratch:
        failed = first_failed(run_ranks([partial(_serve, rank, grid, rows, scratch, gpus) for rank in ranks], Timing))
        path = Path(scratch) / _RESULT
        found = msgspec.json.decode(path.read_bytes(), type=list[Loops | None]) if path.exists() else None
        return found, None if failed is None else (failed.status, failed.failure)


def _serve(rank: int, grid: CeilingsGrid, rows: Sequence[CollectiveCell], scratch: str, gpus: Sequence[str]) -> Timing:
    """What one process does; the answer has no loops, which the first process writes."""
    ranks = rows[0].world_size
    torch.set_num_threads(1)  # the processes share the cores, and OpenMP's threads do not survive a fork
    try:
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices_of(rank, gpus[:ranks], all_of_them=True)
        place = Rank(rank=rank, ranks=ranks, meeting=f"file://{scratch}/{_MEETING}", timeout_s=PATIENCE_S)
        with group_of(place, grid.device):
            loops: list[Loops | None] = []
            _keep(loops, grid.device, scratch)  # an empty result shows that the processes have formed a group
            for row in rows:
                loops.append(_loops(grid, row))
                _keep(loops, grid.device, scratch)
    except Exception as error:
        status = classify(error)
        return Timing(status=status, failure=describe(error, status, "collectives", grid.device))
    return UNTIMED


def _keep(loops: Sequence[Loops | None], device: Device, scratch: str) -> None:
    """Have the first process write what is measured so far, before any process can fail at the next row."""
    if dist.get_rank() == 0:
        write_atomically(Path(scratch) / _RESULT, msgspec.json.encode(loops))
    _agreed(0.0, device)


def _loops(grid: CeilingsGrid, row: CollectiveCell) -> Loops | None:
    """Loops of the row's collective; None if the processes cannot do it."""
    if not _is_possible(row):
        return None
    return _time(grid, make_collective(grid.device, row.collective, row.num_bytes))


def _is_possible(row: CollectiveCell) -> bool:
    """Whether the processes can run the collective; all of them get the same answer."""
    if row.collective is not Collective.PUSH:
        return True
    ranks = range(row.world_size)
    return all(torch.cuda.can_device_access_peer(one, other) for one in ranks for other in ranks if one != other)


def make_collective(device: Device, collective: Collective, num_bytes: int) -> Callable[[], object]:
    """The collective of a tensor of so many bytes among the processes of the group, of which each has its part."""
    whole = torch.rand(num_bytes // FP32_BYTES, device=device.value)
    greatest = dist.ReduceOp.MAX  # repeated sums would overflow
    if collective is Collective.ALL_REDUCE:
        return lambda: dist.all_reduce(whole, op=greatest)
    if collective is Collective.BROADCAST:
        return lambda: dist.broadcast(whole, src=0)
    if collective is Collective.PUSH:
        here = dist.get_rank()
        rows = [rank_rows for [rank_rows] in of_all_ranks([shared_rows(whole, dist.get_world_size())])]
        # the function keeps this rank's rows alive, because the other ranks write to them
        return lambda: [
            rank_rows[here, : len(whole)].copy_(whole, non_blocking=True)
            for rank, rank_rows in enumerate(rows)
            if rank != here
        ]
    part = torch.rand(len(whole) // dist.get_world_size(), device=device.value)
    if collective is Collective.ALL_GATHER:
        return lambda: all_gather(whole, part)
    return lambda: reduce_scatter(part, whole, op=greatest)


def _time(grid: CeilingsGrid, run: Callable[[], object]) -> Loops:
    """Loops with equal counts in all processes; short collectives are in a CUDA graph, because the host is slower."""
    on_gpu = grid.device is Device.CUDA
    timer = device_timer if on_gpu else host_timer
    timer(run, 1)
    # the shortest of several times, because a pause of the machine makes a single one far too long
    once_s, runs = _agreed(min(timer(run, 1) for _ in range(PROBES)), grid.device), 1
    if on_gpu and once_s < GRAPH_BELOW_S:
        run, runs = replayed(run, GRAPH_RUNS), GRAPH_RUNS
    loop_s = LOOP_SHARE * grid.loop_s
    if PROBES * once_s < loop_s:
        once_s = _agreed(timer(run, PROBES) / PROBES, grid.device)
    count = max(1, math.ceil(loop_s / once_s))
    times_s = []
    for _ in range(grid.loops):
        _agreed(0.0, grid.device)  # all begin together
        times_s.append(timer(run, count))
    _agreed(0.0, grid.device)  # no process writes to memory that another has freed
    return Loops(count=count * runs, times_s=tuple(times_s))


def _agreed(time_s: float, device: Device) -> float:
    """The longest of the processes' times."""
    longest = torch.tensor(time_s, device=device.value)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)
