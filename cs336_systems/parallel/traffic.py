"""Counts the collectives that are called within a context, and the bytes that each rank sends for them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.record import Traffic

SENDS = {
    "allreduce_": 2.0,
    "allreduce_coalesced_": 2.0,
    "allgather_": 1.0,
    "_allgather_base_": 1.0,
    "allgather_into_tensor_coalesced_": 1.0,
    "reduce_scatter_": 1.0,
    "_reduce_scatter_base_": 1.0,
    "reduce_scatter_tensor_coalesced_": 1.0,
    "broadcast_": 1.0,
}
"""How often each of n ranks of a ring sends (n - 1) / n of a collective's whole tensors."""
_OUTPUT_FIRST = ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
"""Reduce-scatters: their first argument is the output, and their second the whole tensors."""


@torch.library.custom_op("cs336_systems::push", mutates_args=("target",))
def push(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to another rank's memory; an operator of its own so that it is counted."""
    target.copy_(source, non_blocking=True)


class TrafficCounter(TorchDispatchMode):
    """Counts in its context every collective that this process calls, on any thread of autograd.

    It sees the operators of torch.distributed's C++ library, so it also counts those that PyTorch's DDP and FSDP call.
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
        if func.namespace == "c10d" and (name := func.__name__.partition(".")[0]) in SENDS:
            whole = tree_leaves(args[1 if name in _OUTPUT_FIRST else 0])
            self._payloads.setdefault(name, []).append(_bytes(whole))
        if func is torch.ops.cs336_systems.push.default:
            self._payloads.setdefault("push", []).append(_bytes([args[0]]))
        return func(*args, **(kwargs or {}))

    def traffic(self) -> tuple[Traffic, ...]:
        """What has been counted, by the kind of collective."""
        ranks = dist.get_world_size()
        return tuple(
            Traffic(
                collective=name.strip("_").removesuffix("_base"),
                count=len(payloads),
                payload_bytes=sum(payloads),
                sent_bytes=sum(payloads)
                if name == "push"
                else round(SENDS[name] * sum(payloads) * (ranks - 1) / ranks),
            )
            for name, payloads in sorted(self._payloads.items())
        )


def _bytes(tensors: Iterable[object]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
