"""Joining and leaving the group of ranks that share a step: over NCCL on GPUs, over gloo on a CPU."""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from cs336_systems.config import Device
from cs336_systems.parallel.rank import Rank

_LOOK_S = 1e-3


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


def meet_on_host(name: str) -> None:
    """Wait until every rank has come to the place of this name, while nothing runs on the devices."""
    store = dist.distributed_c10d._get_default_store()
    store.add(name, 1)
    while store.add(name, 0) < dist.get_world_size():
        time.sleep(_LOOK_S)
