"""All-reduce between processes of this machine, each with a GPU of its own; with device cpu, over gloo."""

import math
import signal
import tempfile
from collections.abc import Sequence
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
from cs336_systems.studies.ceilings_records import FP32_BYTES, CeilingsGrid, ReduceCell
from cs336_systems.studies.loops import Loops
from cs336_systems.studies.timing import PROBES, device_timer, host_timer
from cs336_systems.sweep.process import die_with_forker

PATIENCE = timedelta(seconds=120)
"""How long a process waits for the others before it fails."""
_RESULT, _MEETING = "reductions.json", "rendezvous"


def measure_reductions(grid: CeilingsGrid, rows: Sequence[ReduceCell]) -> list[ReduceCell]:
    """Time all-reduces of the sizes of the rows among grid.world_size processes.

    If a process fails, the others are ended, and every row has the failure.
    """
    with tempfile.TemporaryDirectory(prefix="cs336-") as scratch:
        try:
            spawn(_serve, args=(grid, [row.num_bytes for row in rows], scratch), nprocs=grid.world_size)
        except ProcessException as error:
            failure = Failure(message=str(error).strip().splitlines()[-1], traceback=str(error))
            return [row.failed(classify(error), failure) for row in rows]
        found = msgspec.json.decode((Path(scratch) / _RESULT).read_bytes(), type=list[Loops])
    return [row.with_loops(loops) for row, loops in zip(rows, found, strict=True)]


def _serve(rank: int, grid: CeilingsGrid, sizes: Sequence[int], scratch: str) -> None:
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
    loops = [_reduce(grid, num_bytes) for num_bytes in sizes]
    if rank == 0:
        write_atomically(Path(scratch) / _RESULT, msgspec.json.encode(loops))
    dist.destroy_process_group()


def _reduce(grid: CeilingsGrid, num_bytes: int) -> Loops:
    tensor = torch.rand(num_bytes // FP32_BYTES, device=grid.device.value)
    timer = device_timer if grid.device is Device.CUDA else host_timer

    def run() -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # repeated sums would overflow

    timer(run, 1)
    probe_s = torch.tensor(timer(run, PROBES) / PROBES, device=grid.device.value)
    dist.all_reduce(probe_s, op=dist.ReduceOp.MAX)  # all processes must repeat it equally often
    count = max(1, math.ceil(grid.loop_s / float(probe_s)))
    own_gpu = [tensor.device.index] if tensor.is_cuda else None  # without it NCCL guesses the device, and PyTorch warns
    times_s = []
    for _ in range(grid.loops):
        dist.barrier(device_ids=own_gpu)
        times_s.append(timer(run, count))
    return Loops(count=count, times_s=tuple(times_s))
