"""Collectives shared by the ways to parallelise a step: averages over the ranks, and broadcasts of rank 0's tensors."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager, _CoalescingManager

if hasattr(dist, "all_gather_single"):  # their names since PyTorch 2.13
    all_gather, reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather, reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


class Averaging:
    """Averages of tensors over all ranks, in place, by one group of asynchronous collectives.

    Of the tensors in `shared_out`, each rank gets the average of its own part only (see own_part).
    """

    def __init__(self, tensors: Sequence[Tensor], shared_out: Sequence[Tensor] = ()) -> None:
        is_nccl = dist.get_backend() == "nccl"
        op = dist.ReduceOp.AVG if is_nccl else dist.ReduceOp.SUM  # gloo has no average
        self._divided = [] if is_nccl else [*tensors, *map(own_part, shared_out)]
        self._works = [
            *grouped(lambda tensor: dist.all_reduce(tensor, op=op, async_op=True), tensors),
            *grouped(lambda whole: reduce_scatter(own_part(whole), whole, op=op, async_op=True), shared_out),
        ]

    def wait(self) -> None:
        """Wait for the averages. On a GPU the current stream waits for them, and the host does not."""
        for work in self._works:
            work.wait()
        for tensor in self._divided:
            tensor.div_(dist.get_world_size())


def own_part(whole: Tensor) -> Tensor:
    """This rank's part of a tensor of one axis, whose length the number of ranks divides."""
    length = len(whole) // dist.get_world_size()
    return whole[dist.get_rank() * length :][:length]


def grouped(
    collective: Callable[[Tensor], dist.Work | None], tensors: Sequence[Tensor]
) -> list["dist.Work | _CoalescingManager"]:
    """Start the asynchronous collective for all tensors, and return works to wait for; NCCL runs one kernel per type.

    With gloo every tensor has a collective of its own: gloo's two threads record the names of completed collectives
    without a lock (PyTorch 2.13), and names as long as those of coalesced ones are then freed twice.
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


def wait(work: dist.Work | None) -> None:
    """Wait for a collective."""
    if work is not None:
        work.wait()


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors, which have one type, as one axis; a view if there is only one contiguous tensor."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts_of(flat: Tensor, shaped_like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat`, one after the other, with the shapes of the given tensors."""
    parts = flat.split([tensor.numel() for tensor in shaped_like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, shaped_like, strict=True)]


@torch.no_grad()
def take_from_rank_0(module: nn.Module) -> None:
    """Broadcast rank 0's values of the module's parameters and buffers, each once."""
    for tensor in (*module.parameters(), *module.buffers()):
        values = tensor.detach().contiguous()
        # as bytes, because not every backend knows every type
        dist.broadcast(values.view(-1).view(torch.uint8) if values.numel() else values, src=0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)


def check_same_gradients(names: Iterable[str], parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if a parameter has a gradient on some ranks and none on others: those cannot be averaged."""
    if not parameters:
        return
    have = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(have)
    ranks = dist.get_world_size()
    for name, count in zip(names, have.tolist(), strict=True):
        if count not in (0, ranks):
            raise ValueError(
                f"parameter {name} has a gradient on {count} of {ranks} ranks: a model must use the same parameters "
                "for every batch"
            )
