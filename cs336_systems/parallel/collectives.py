"""The group of ranks that share a step, its collectives, and counts of the bytes that they send."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager, _CoalescingManager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config import Device
from ..costs.communication import Collective, sent_share
from ..record import Traffic

_POLL_S = 1e-3
"""Time between two looks whether all ranks have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of the processes that share each step of a run."""

    rank: int
    """From 0."""
    ranks: int
    meeting: str
    """Where they meet, as torch.distributed wants it: a file that none of them has made yet."""
    timeout_s: float = 600.0
    """How long a collective waits for the other ranks."""


def devices_of(gpu_uuids: Sequence[str], *, all_of_them: bool) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each rank: its own GPU, which comes first, and the others if it
    writes to them.
    """
    others = gpu_uuids if all_of_them else ()
    return [",".join(dict.fromkeys([uuid, *others])) for uuid in gpu_uuids]


@contextlib.contextmanager
def group_of(rank: Rank, device: Device) -> Iterator[None]:
    """Join the other ranks on entry, and leave them on exit.

    A rank sees one GPU, its own, which becomes its device first: otherwise NCCL guesses, and all
    ranks would make a context on the same GPU. After an error the group is left without waiting for
    the others, which may not come. Over gloo, ranks listen on the loopback interface only, unless
    GLOO_SOCKET_IFNAME names another.
    """
    on_gpu = device is Device.CUDA
    if on_gpu:
        torch.cuda.set_device(0)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
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


def barrier_on_host(name: str) -> None:
    """Wait until every rank has called this with the same name; no device takes part."""
    store = dist.distributed_c10d._get_default_store()
    store.add(name, 1)
    while store.add(name, 0) < dist.get_world_size():
        time.sleep(_POLL_S)


COLLECTIVE_OF_OPERATOR = {
    "allreduce_": Collective.ALL_REDUCE,
    "allreduce_coalesced_": Collective.ALL_REDUCE,
    "allgather_": Collective.ALL_GATHER,
    "_allgather_base_": Collective.ALL_GATHER,
    "allgather_into_tensor_coalesced_": Collective.ALL_GATHER,
    "reduce_scatter_": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": Collective.REDUCE_SCATTER,
    "broadcast_": Collective.BROADCAST,
}
"""Collectives by the names of their operators."""


@torch.library.custom_op("cs336::push", mutates_args=("target",))
def push(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to another rank's memory; an operator of its own so that it is counted."""
    target.copy_(source, non_blocking=True)


class TrafficCounter(TorchDispatchMode):
    """Counts in its context every collective that this process calls, on any thread of autograd.

    It sees the operators of torch.distributed's C++ library, so it also counts those that PyTorch's
    DDP and FSDP call.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._payloads: dict[str, list[int]] = {}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operation and, if it is a collective, count the bytes of its whole tensor."""
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name in COLLECTIVE_OF_OPERATOR:
            # the output of a reduce-scatter comes first, and is a part
            whole = args[1 if COLLECTIVE_OF_OPERATOR[name] is Collective.REDUCE_SCATTER else 0]
            self._payloads.setdefault(name, []).append(_bytes(whole))
        elif func is torch.ops.cs336.push.default:
            self._payloads.setdefault("push", []).append(_bytes(args[0]))
        return func(*args, **(kwargs or {}))

    def traffic(self) -> tuple[Traffic, ...]:
        """What has been counted, by the kind of collective."""
        ranks = dist.get_world_size()
        traffic = []
        for name, payloads in sorted(self._payloads.items()):
            payload_bytes = sent_bytes = sum(payloads)
            if name != "push":
                sent_bytes = round(sent_share(COLLECTIVE_OF_OPERATOR[name], ranks) * payload_bytes)
            traffic.append(
                Traffic(
                    collective=name.strip("_").removesuffix("_base"),
                    count=len(payloads),
                    payload_bytes=payload_bytes,
                    sent_bytes=sent_bytes,
                )
            )
        return tuple(traffic)


def _bytes(tensors: object) -> int:
    """Bytes of all tensors in a tensor, list or tuple."""
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


if hasattr(dist, "all_gather_single"):  # their names since PyTorch 2.13
    all_gather, reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather, reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


class Averaging:
    """Averages of tensors over all ranks, in place, by one group of asynchronous collectives.

    Of the tensors in `shared_out`, each rank gets the average of its own part only (see own_part).
    """

    def __init__(self, tensors: Sequence[Tensor], shared_out: Sequence[Tensor] = ()) -> None:
        """Start an all-reduce of each of `tensors`, and of each of `shared_out` a reduce-scatter,
        by which this rank gets the average of its own part only.
        """
        is_nccl = dist.get_backend() == "nccl"
        op = dist.ReduceOp.AVG if is_nccl else dist.ReduceOp.SUM  # gloo has no average
        self._divided = [] if is_nccl else [*tensors, *map(own_part, shared_out)]
        self._works = [
            *start_grouped(lambda tensor: dist.all_reduce(tensor, op=op, async_op=True), tensors),
            *start_grouped(
                lambda whole: reduce_scatter(own_part(whole), whole, op=op, async_op=True),
                shared_out,
            ),
        ]

    def wait(self) -> None:
        """Wait for the averages. On a GPU the current stream waits for them, and the host does
        not.
        """
        for work in self._works:
            work.wait()
        for tensor in self._divided:
            tensor.div_(dist.get_world_size())


def own_part(whole: Tensor) -> Tensor:
    """This rank's part of a tensor of one axis, whose length the number of ranks divides."""
    length = len(whole) // dist.get_world_size()
    return whole[dist.get_rank() * length :][:length]


def start_grouped(
    collective: Callable[[Tensor], dist.Work | None], tensors: Sequence[Tensor]
) -> list["dist.Work | _CoalescingManager"]:
    """Start the asynchronous collective for all tensors, and return works to wait for; NCCL runs
    one kernel per type.

    With gloo every tensor has a collective of its own: gloo's two threads record the names of
    completed collectives without a lock (PyTorch 2.13), and names as long as those of coalesced
    ones are then freed twice.
    """
    if dist.get_backend() != "nccl":
        return [work for tensor in tensors if (work := collective(tensor)) is not None]
    started: list[dist.Work | _CoalescingManager] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        with _coalescing_manager(async_ops=True) as group:
            for tensor in tensors:
                if tensor.dtype is dtype:
                    collective(tensor)
        started.append(group)
    return started


@torch.no_grad()
def take_from_rank_0(module: nn.Module) -> None:
    """Broadcast rank 0's values of the module's parameters and buffers, each once."""
    for tensor in (*module.parameters(), *module.buffers()):
        values = tensor.detach().contiguous()
        # as bytes, because not every backend knows every type
        dist.broadcast(values.view(-1).view(torch.uint8) if values.numel() else values, src=0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)


def divide_gradients(output: object) -> None:
    """Have backward divide the gradients of a module's output by the number of ranks."""
    ranks = dist.get_world_size()
    for tensor in graded(output):
        tensor.register_hook(lambda gradient: gradient / ranks)


def graded(output: object) -> Iterator[Tensor]:
    """The tensors of an output that have a gradient."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            yield leaf


def check_same_gradients(names: Iterable[str], parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if a parameter has a gradient on some ranks and none on others: those
    cannot be averaged.
    """
    if not parameters:
        return
    have = torch.tensor(
        [parameter.grad is not None for parameter in parameters],
        dtype=torch.int32,
        device=parameters[0].device,
    )
    dist.all_reduce(have)
    ranks = dist.get_world_size()
    for name, count in zip(names, have.tolist(), strict=True):
        if count not in (0, ranks):
            raise ValueError(
                f"parameter {name} has a gradient on {count} of {ranks} ranks: a model must use "
                "the same parameters for every batch"
            )
