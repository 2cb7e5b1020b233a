"""Memory of the other ranks on this host, which a rank writes itself.

On GPUs the copies are made by copy engines over NVLink or PCIe. They take no multiprocessor from the matrix products
that run beside them, as a kernel of NCCL does for as long as it runs.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from cs336_systems.model.fast.weights import ALIGNMENT
from cs336_systems.parallel.traffic import push


def shared_rows(like: Tensor, count: int) -> Tensor:
    """Rows for other ranks to write, of as many elements as `like` has and some more, so that all begin aligned."""
    multiple = ALIGNMENT // like.itemsize
    return like.new_empty(count, -(-like.numel() // multiple) * multiple)


def of_all_ranks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors that each rank has given, by rank, in its own memory; every rank must give as many."""
    handles = [_handle(tensor) for tensor in tensors]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, handles)
    return [
        [*tensors] if rank == dist.get_rank() else [make(*arguments) for make, arguments in theirs]
        for rank, theirs in enumerate(found)
    ]


def _handle(tensor: Tensor) -> Any:  # noqa: ANN401
    """A function and its arguments by which another process makes a tensor in the same memory.

    Memory of a CPU is moved to a shared file without a name, which is gone with the processes that have it open.
    """
    if tensor.is_cuda:
        return reductions.reduce_tensor(tensor.detach())
    descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
    return _opened, (os.getpid(), descriptor, size, tensor.dtype, tensor.shape, tensor.storage_offset())


def _opened(pid: int, descriptor: int, size: int, dtype: torch.dtype, shape: torch.Size, offset: int) -> Tensor:
    own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(own, size)  # type: ignore[attr-defined]
    finally:
        os.close(own)
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape)  # type: ignore[call-overload,no-any-return]


class Pushes:
    """Copies to other ranks' memory, which run beside the current stream until `finish`.

    With `waits`, the first copy after a `finish` waits until every rank has come as far, so that no rank writes what
    another still reads. Without, the caller sees to that.
    """

    def __init__(self, device: torch.device, *, waits: bool = False) -> None:
        if device.type == "cuda":
            _check_access()
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._flag = torch.zeros(1, device=device)
        self._waits, self._has_begun = waits, False

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]], own: Sequence[tuple[Tensor, Tensor]] = ()) -> "Copied":
        """Copy each source to its target, once the current stream has made the sources; `own` stay on this rank."""
        if self._stream is None:
            self._begin()
            _copy(pairs, own)
            return Copied(None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._begin()
            _copy(pairs, own)
        return Copied(self._stream.record_event())

    def _begin(self) -> None:
        if self._waits and not self._has_begun:
            self._has_begun = True
            self.meet()

    def finish(self) -> None:
        """Wait until every rank has made its copies. On a GPU the current stream waits, and the host does not."""
        self._has_begun = False
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self.meet()

    def meet(self) -> None:
        """Wait until every rank has come here; what it has been copied may be written anew after it has been read."""
        dist.all_reduce(self._flag)


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies that have been started."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Have the current stream wait for them."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]], own: Sequence[tuple[Tensor, Tensor]]) -> None:
    for source, target in pairs:
        push(source, target)
    for source, target in own:
        target.copy_(source)


def _check_access() -> None:
    """Raise RuntimeError unless this rank can write to the GPUs of all ranks."""
    here, there = torch.cuda.current_device(), range(torch.cuda.device_count())
    reached = [other for other in there if other == here or torch.cuda.can_device_access_peer(here, other)]
    if len(reached) < dist.get_world_size():
        raise RuntimeError(
            f"each of the {dist.get_world_size()} ranks must see the GPUs of all and be able to write to their memory; "
            f"this one sees {len(there)} and can write to {len(reached)} with its own; use --parallel ddp-overlap"
        )
