"""All-reduce between processes of this machine, each with a GPU of its own; with device cpu, over gloo."""

import math
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from cs336_systems.config import Device
from cs336_systems.files import write_atomically
from cs336_systems.measure.failure import classify
from cs336_systems.record import Failure
from cs336_systems.studies.attention_records import CellStatus
from cs336_systems.studies.ceilings_records import FP32_BYTES, CeilingsGrid, Loops, ReduceCell, Timing
from cs336_systems.studies.ceilings_timing import PROBES, device_timer, host_timer
from cs336_systems.sweep.process import die_with_forker

PATIENCE = timedelta(seconds=120)
"""How long a process waits for the others before it gives up."""
_RESULT, _MEETING = "reductions.json", "rendezvous"


def measure_reductions(grid: CeilingsGrid) -> tuple[ReduceCell, ...]:
    """Time all-reduces of the grid's sizes among grid.world_size processes; nothing for one process.

    A process that fails takes the others with it, and every size says so.
    """
    if grid.world_size == 1:
        return ()
    with tempfile.TemporaryDirectory(prefix="cs336-") as scratch:
        try:
            spawn(_serve, args=(grid, scratch), nprocs=grid.world_size)
        except ProcessException as error:
            return _failed(grid, error)
        return msgspec.json.decode((Path(scratch) / _RESULT).read_bytes(), type=tuple[ReduceCell, ...])


def _failed(grid: CeilingsGrid, error: ProcessException) -> tuple[ReduceCell, ...]:
    lines = str(error).strip().splitlines()
    failure = Failure(message=lines[-1], traceback=str(error))
    timing = Timing(status=CellStatus(classify(error)), failure=failure)
    return tuple(
        ReduceCell(num_bytes=num_bytes, world_size=grid.world_size, timing=timing) for num_bytes in _sizes(grid)
    )


def _sizes(grid: CeilingsGrid) -> list[int]:
    return sorted({num_bytes // FP32_BYTES * FP32_BYTES for num_bytes in grid.stream_bytes})


def _serve(rank: int, grid: CeilingsGrid, scratch: str) -> None:
    """Entry of one process."""
    die_with_forker(signal.SIGKILL)
    on_gpu = grid.device is Device.CUDA
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{scratch}/{_MEETING}",
        rank=rank,
        world_size=grid.world_size,
        timeout=PATIENCE,
    )
    cells = tuple(_reduce(grid, num_bytes) for num_bytes in _sizes(grid))
    if rank == 0:
        write_atomically(Path(scratch) / _RESULT, msgspec.json.encode(cells))
    dist.destroy_process_group()


def _reduce(grid: CeilingsGrid, num_bytes: int) -> ReduceCell:
    tensor = torch.rand(num_bytes // FP32_BYTES, device=grid.device.value)
    timer = device_timer if grid.device is Device.CUDA else host_timer

    def run() -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # sums would grow from one to the next until they overflow

    timer(run, 1)
    probe_s = torch.tensor(timer(run, PROBES) / PROBES, device=grid.device.value)
    dist.all_reduce(probe_s, op=dist.ReduceOp.MAX)  # all must go round as often
    count = max(1, math.ceil(grid.loop_s / float(probe_s)))
    own_gpu = [tensor.device.index] if tensor.is_cuda else None  # unless told, NCCL guesses, and PyTorch warns
    times_s = []
    for _ in range(grid.loops):
        dist.barrier(device_ids=own_gpu)
        times_s.append(timer(run, count))
    loops = Loops(count=count, times_s=tuple(times_s))
    timing = Timing(status=CellStatus.OK, loops=loops)
    return ReduceCell(num_bytes=num_bytes, world_size=grid.world_size, timing=timing)
