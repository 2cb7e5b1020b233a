"""Joining and leaving the group of ranks that share a step: over NCCL on GPUs, over gloo on a CPU."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from cs336_systems.config import Device
from cs336_systems.parallel.rank import Rank


@contextlib.contextmanager
def group_of(rank: Rank, device: Device) -> Iterator[None]:
    """Join the other ranks on entry, and leave them on exit.

    A rank sees one GPU, its own, which becomes its device first: otherwise NCCL guesses, and all ranks would make a
    context on the same GPU. After an error the group is left without waiting for the others, which may not come.
    """
    on_gpu = device is Device.CUDA
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=rank.meeting,
        rank=rank.rank,
        world_size=rank.ranks,
        timeout=timedelta(seconds=rank.timeout_s),
        device_id=torch.device("cuda", 0) if on_gpu else None,
    )
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()
        raise
    dist.destroy_process_group()
