"""How the ranks exchange parts of parameters and gradients: by collectives, or by copies into each
other's memory.

On GPUs copy engines write into the memory of another rank of this host over NVLink or PCIe. Unlike
a kernel of NCCL, they take no multiprocessor from the matmuls that run at the same time.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions

from ..model.fast.weights import READ_BYTES
from .collectives import Averaging, all_gather, push, start_grouped


def shared_rows(like: Tensor, count: int) -> Tensor:
    """`count` rows for other ranks to write, each as long as `like` or slightly longer, so that
    all begin aligned.
    """
    multiple = READ_BYTES // like.itemsize
    return like.new_empty(count, -(-like.numel() // multiple) * multiple)


def of_all_ranks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors that every rank passed, by rank, as views of that rank's memory; all must pass
    the same number.
    """
    handles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(handles, [_handle(tensor) for tensor in tensors])
    by_rank = [[*tensors] for _ in handles]
    for rank in other_ranks():
        by_rank[rank] = [make(*arguments) for make, arguments in handles[rank]]
    return by_rank


def other_ranks() -> list[int]:
    """All ranks but this one, in order."""
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def row_from_here(rows: Tensor, other: int) -> Tensor:
    """The row that this rank writes, of those that rank `other` keeps for all ranks but itself, in
    their order.
    """
    rank = dist.get_rank()
    return rows[rank - (rank > other)]


def _handle(tensor: Tensor) -> Any:  # noqa: ANN401
    """A function and its arguments by which another process opens the same memory as a tensor.

    CPU memory is moved to an unnamed shared file, which disappears with the last process that has
    it open. Raises RuntimeError if /dev/shm has no room, of which containers often have 64 MiB.
    """
    if tensor.is_cuda:
        return reductions.reduce_tensor(tensor.detach())
    try:
        descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
    except RuntimeError as error:
        hint = (
            "give the container more of /dev/shm (docker run --shm-size), or use --parallel "
            "ddp-overlap or fsdp"
        )
        raise RuntimeError(f"{error}; {hint}") from error
    layout = tensor.dtype, tensor.shape, tensor.storage_offset()
    return _opened, (os.getpid(), descriptor, size, *layout)


def _opened(
    pid: int, descriptor: int, size: int, dtype: torch.dtype, shape: torch.Size, offset: int
) -> Tensor:
    """A tensor of another process's memory, which `_handle` describes."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        storage = cast(Any, torch.UntypedStorage)._new_shared_fd_cpu(opened, size)
    finally:
        os.close(opened)
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, offset, shape)  # type: ignore[call-overload]
    return tensor


class Pushes:
    """Copies to or from other ranks' memory, on a stream of their own until `finish`.

    With `waits`, the first copy after a `finish` waits until every rank has reached it, so that no
    rank overwrites what another still reads. Without `waits` the caller must ensure that.
    """

    def __init__(self, device: torch.device, *, waits: bool = False) -> None:
        """On a GPU, check that ranks can read each other's memory, and make a stream for the
        copies.
        """
        if device.type == "cuda":
            _check_access()
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._flag = torch.zeros(1, device=device)
        self._waits, self._has_begun = waits, False

    def start(
        self, pairs: Sequence[tuple[Tensor, Tensor]], local: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> "Copied":
        """Start to copy each source to its target: to or from another rank's memory, and for
        `local` pairs within this rank's.

        On a GPU the copies begin once the current stream has made the sources, and run beside what
        it does next; what reads the targets on this rank first calls `wait` of the result. On a CPU
        the copies are made when this returns.
        """
        on_stream: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            on_stream = torch.cuda.stream(self._stream)
        with on_stream:
            if self._waits and not self._has_begun:
                self._has_begun = True
                self.barrier()  # other ranks may still read what these copies overwrite
            for source, target in pairs:
                push(source, target)
            for source, target in local:
                target.copy_(source)
        if self._stream is None:
            return Copied(None, ())
        return Copied(self._stream.record_event(), [source for source, _ in (*pairs, *local)])

    def finish(self) -> None:
        """Wait until every rank has made its copies. On a GPU the current stream waits, and the
        host does not.
        """
        self._has_begun = False
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self.barrier()

    def barrier(self) -> None:
        """Wait until every rank has called this; on a GPU the current stream waits, and the host
        does not.
        """
        dist.all_reduce(self._flag)


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies that have been started on a stream of their own."""

    event: torch.cuda.Event | None
    """Passed when the copies are made; None on a CPU, where they are made at once."""
    sources: Sequence[Tensor]
    """What is copied, kept alive: its memory could be given out again before the copies are
    made.
    """

    def wait(self) -> None:
        """Let what is launched later on the current stream begin after the copies are made. The
        host does not wait, and on a CPU there is nothing to wait for.
        """
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


def _check_access() -> None:
    """Raise RuntimeError unless this rank can write to the GPUs of all ranks."""
    here = torch.cuda.current_device()
    visible = torch.cuda.device_count()
    others = [device for device in range(visible) if device != here]
    # a GPU is no peer of itself
    reached = 1 + sum(torch.cuda.can_device_access_peer(here, other) for other in others)
    if reached < dist.get_world_size():
        raise RuntimeError(
            f"each of the {dist.get_world_size()} ranks must see the GPUs of all and be able to "
            f"write to their memory; this one sees {visible} and can write to {reached} "
            "with its own; use --parallel ddp-overlap"
        )


class Started(Protocol):
    """An exchange that has been started; on a GPU `wait` makes the current stream wait, without
    blocking the host.
    """

    def wait(self) -> object: ...


class Parts(Protocol):
    """Parameters of one type; each rank keeps an equally long part of every one of them."""

    masters: Tensor
    """This rank's parts."""
    dtype: torch.dtype
    """The type in which the parts are gathered."""
    wholes: list[Tensor]
    """For each parameter, memory for the parts of all ranks, one after the other."""

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor that has the same layout as `masters`, as
        views.
        """


class CollectiveExchange:
    """Exchange by NCCL on GPUs, by gloo on a CPU."""

    is_late = False
    """Whether scattered gradients are complete only after `receive`."""
    averages = True
    """Whether this class divides gradients by the number of ranks; otherwise the caller must."""

    def __init__(self) -> None:
        """Choose how gradients are averaged: NCCL averages itself; gloo adds, so the sum is
        divided.
        """
        is_nccl = dist.get_backend() == "nccl"
        self._divisor = 1 if is_nccl else dist.get_world_size()  # gloo has no average
        self._op = dist.ReduceOp.AVG if is_nccl else dist.ReduceOp.SUM

    def zeros(self, like: Tensor, length: int) -> Tensor:
        """Zeros of `length` elements, of the type and on the device of `like`, for the parts that
        this rank keeps.
        """
        return like.new_zeros(length)

    def connect(self, every: Sequence[Parts]) -> None:
        """Do nothing: collectives need no preparation."""

    def begin(self) -> None:
        """Do nothing: a gather itself waits for the parts of all ranks."""

    def gather(self, parts: Parts) -> Sequence[Started]:
        """Start to gather the whole parameters."""
        sent = parts.masters
        if sent.dtype is not parts.dtype:
            sent = sent.to(parts.dtype)
        return start_gather(parts.wholes, parts.parts_of(sent))

    def scatter(self, parts: Parts, wholes: dict[int, Tensor], means: Tensor) -> Started:
        """Start to average the whole gradients in `wholes`, by parameter number; this rank's
        parts go to `means`.
        """
        options = ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(self._op)
        options.asyncOp = True
        results = parts.parts_of(means)
        group = c10d._get_default_group()
        return group.reduce_scatter_tensor_coalesced(
            [results[number] for number in wholes], [*wholes.values()], options
        )

    def receive(self) -> None:
        """Do nothing: whoever waits for `scatter` has the gradients of all ranks."""

    def complete(self, parts: Parts, means: Tensor) -> None:
        """Turn this rank's scattered sums into averages, if the backend has only summed."""
        del parts
        if self._divisor > 1:
            means.div_(self._divisor)

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average over all ranks, in place, gradients that every rank needs whole."""
        Averaging(gradients).wait()


class PeerCopies:
    """Exchange by copies from and to the other ranks' memory, which occupy no multiprocessor of a
    GPU.

    Ranks wait for each other when forward begins, so that all parts are up to date, and at the end
    of backward. Gradients must have been divided by the number of ranks. Without `adds` the
    optimizer adds them up.
    """

    is_late = True
    averages = False

    def __init__(self, device: torch.device, *, adds: bool) -> None:
        """With `adds`, gradients received from other ranks are added up here; without, the
        optimizer adds them.
        """
        self._adds = adds
        self._rank = dist.get_rank()
        self._ranks = dist.get_world_size()
        self._others = other_ranks()
        self._pulls, self._pushes = Pushes(device), Pushes(device)
        self._cast: list[tuple[Parts, Tensor]] = []
        """Parts that are gathered in another type than their masters', each with a buffer in
        that type.
        """
        self._sources: dict[int, list[list[Tensor]]] = {}
        """By id of the Parts: for each rank, its part of every parameter."""
        self._received: dict[int, list[Tensor]] = {}
        """By id of the Parts: buffers for the gradients of the other ranks, in the order of the
        ranks.
        """
        self._targets: dict[int, dict[int, list[Tensor]]] = {}
        """By id of the Parts and other rank: where that rank's part of every gradient goes."""

    def zeros(self, like: Tensor, length: int) -> Tensor:
        """Zeros of `length` elements, of the type and on the device of `like`, for the parts that
        this rank keeps, in memory that other ranks can read.
        """
        return shared_rows(like.new_empty(length), 1)[0, :length].zero_()

    def connect(self, every: Sequence[Parts]) -> None:
        """Prepare to exchange these; every rank must call it once."""
        sent = [self._in_sent_type(parts) for parts in every]
        buffers = [shared_rows(masters, self._ranks - 1) for masters in sent]
        by_rank = of_all_ranks([*sent, *buffers])
        for number, parts in enumerate(every):
            length = len(parts.masters)
            self._received[id(parts)] = list(buffers[number][:, :length])
            self._sources[id(parts)] = [parts.parts_of(tensors[number]) for tensors in by_rank]
            self._targets[id(parts)] = targets = {}
            for other in self._others:
                rows = by_rank[other][len(every) + number]
                targets[other] = parts.parts_of(row_from_here(rows, other)[:length])

    def _in_sent_type(self, parts: Parts) -> Tensor:
        """This rank's masters as other ranks copy them: the masters themselves, or a buffer if they
        are gathered in another type.
        """
        if parts.masters.dtype is parts.dtype:
            return parts.masters
        copy = self.zeros(parts.masters.to(parts.dtype), len(parts.masters))
        self._cast.append((parts, copy))
        return copy

    def begin(self) -> None:
        """Cast the parts that are sent in another type, and wait until all ranks have done so."""
        for parts, sent in self._cast:
            sent.copy_(parts.masters)
        self._pulls.barrier()

    def gather(self, parts: Parts) -> Sequence[Started]:
        """Start to copy the parts of all ranks."""
        pairs: list[tuple[Tensor, Tensor]] = []
        local: list[tuple[Tensor, Tensor]] = []
        for rank, sources in enumerate(self._sources[id(parts)]):
            targets = [whole.view(self._ranks, -1)[rank] for whole in parts.wholes]
            of_rank = local if rank == self._rank else pairs
            of_rank += zip(sources, targets, strict=True)
        return [self._pulls.start(pairs, local)]

    def scatter(self, parts: Parts, wholes: dict[int, Tensor], means: Tensor) -> Started:
        """Start to send the other ranks their parts of gradients, by parameter number; copy this
        rank's to `means`.
        """
        by_rank = {number: whole.view(self._ranks, -1) for number, whole in wholes.items()}
        results = parts.parts_of(means)
        targets = self._targets[id(parts)]
        pairs: list[tuple[Tensor, Tensor]] = []
        for other in self._others:
            pairs += [(rows[other], targets[other][number]) for number, rows in by_rank.items()]
        local = [(rows[self._rank], results[number]) for number, rows in by_rank.items()]
        return self._pushes.start(pairs, local)

    def receive(self) -> None:
        """Wait until gradients from all ranks are there."""
        self._pushes.finish()

    def complete(self, parts: Parts, means: Tensor) -> None:
        """Add the gradients that the other ranks have sent to this rank's parts, unless the
        optimizer does.
        """
        for row in self._received[id(parts)] if self._adds else ():
            means += row

    def received(self, parts: Parts) -> list[tuple[Tensor, ...]]:
        """For each parameter, buffers with the other ranks' gradients of this rank's part, in
        rank order.
        """
        rows = [parts.parts_of(row) for row in self._received[id(parts)]]
        return list(zip(*rows, strict=True))

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Sum over all ranks, in place, gradients that every rank needs whole; backward has divided
        them by the number of ranks already. They are few, so that collectives are used.
        """
        for group in start_grouped(dist.all_reduce, gradients):
            group.wait()


Exchange = CollectiveExchange | PeerCopies


def start_gather(wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Started]:
    """Start to gather each of `parts` from all ranks into its place in `wholes`, all in one kernel
    of NCCL.

    With gloo each is gathered by itself (see start_grouped).
    """
    if dist.get_backend() != "nccl":
        works = []
        for whole, part in zip(wholes, parts, strict=True):
            work = all_gather(whole, part, async_op=True)
            if work is not None:
                works.append(work)
        return works
    options = AllgatherOptions()
    options.asyncOp = True
    return [c10d._get_default_group().allgather_into_tensor_coalesced([*wholes], [*parts], options)]
