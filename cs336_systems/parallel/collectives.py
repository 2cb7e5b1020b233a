"""Collectives that the ways are made of: averages over the ranks, and rank 0's tensors for all."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Averaging:
    """An average of a tensor over all ranks, in place, which runs while the caller goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._divides = dist.get_backend() != "nccl"  # gloo has no average
        op = dist.ReduceOp.SUM if self._divides else dist.ReduceOp.AVG
        self._work = dist.all_reduce(tensor, op=op, async_op=True)

    def wait(self) -> Tensor:
        """The average. On a GPU the current stream waits for it, and the host does not."""
        wait(self._work)
        return self._tensor.div_(dist.get_world_size()) if self._divides else self._tensor


def wait(work: dist.Work | None) -> None:
    """Wait for a collective."""
    if work is not None:
        work.wait()


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors, of one type, one after the other; of a single contiguous one, itself."""
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts_of(flat: Tensor, shaped_like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat`, one after the other, with the shapes of the given tensors."""
    parts = flat.split([tensor.numel() for tensor in shaped_like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, shaped_like, strict=True)]


@torch.no_grad()
def take_from_rank_0(module: nn.Module) -> None:
    """Give the parameters and buffers of the module, each once, the values that they have on rank 0."""
    for tensor in (*module.parameters(), *module.buffers()):
        values = tensor.detach().contiguous()
        # as bytes, because not every backend knows every type
        dist.broadcast(values.view(-1).view(torch.uint8) if values.numel() else values, src=0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)


def check_same_gradients(names: Iterable[str], parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError if a parameter has a gradient on some ranks and none on others, which no average takes in."""
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
