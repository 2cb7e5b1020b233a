"""Memory of the other ranks on this host, which a rank writes itself.

On GPUs copy engines do this over NVLink or PCIe. Unlike a kernel of NCCL, they take no multiprocessor from the matmuls
that run at the same time.
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
    """`count` rows for other ranks to write, each as long as `like` or slightly longer, so that all begin aligned."""
    multiple = ALIGNMENT // like.itemsize
    return like.new_empty(count, -(-like.numel() // multiple) * multiple)


def of_all_ranks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors that every rank passed, by rank, as views of that rank's memory; all must pass the same number."""
    handles = [_handle(tensor) for tensor in tensors]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, handles)
    return [
        [*tensors] if rank == dist.get_rank() else [make(*arguments) for make, arguments in theirs]
        for rank, theirs in enumerate(found)
    ]


def _handle(tensor: Tensor) -> Any:  # noqa: ANN401
    """A function and its arguments by which another process opens the same memory as a tensor.

    CPU memory is moved to an unnamed shared file, which disappears with the last process that has it open.
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
    """Copies to other ranks' memory, on a stream of their own until `finish`.

    With `waits`, the first copy after a `finish` waits until every rank has reached it, so that no rank overwrites what
    another still reads. Without `waits` the caller must ensure that.
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
        """Wait until every rank has called this; on a GPU the current stream waits, and the host does not."""
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
