"""PyTorch's DDP and FSDP with the interface of this project's; they average during backward, and wait at its end."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.collectives import take_from_rank_0
from cs336_systems.parallel.units import blocks_of


class TorchDDP(nn.Module):
    """PyTorch's DistributedDataParallel in buckets."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        take_from_rank_0(module)  # without broadcast_buffers, the wrapper does not send buffers at all
        # static_graph: the same parameters have gradients in every step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 has another name for broadcast_buffers
            self.module = nn.parallel.DistributedDataParallel(
                module, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
            )

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        return self.module(*inputs, **named_inputs)

    def finish_gradient_synchronization(self) -> None:
        """Nothing: the gradients are averaged when backward returns."""


class TorchFSDP(nn.Module):
    """PyTorch's fully_shard of each block and of the rest."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__()
        take_from_rank_0(module)
        device = next(module.parameters()).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # the inputs of blocks keep their type: the residual stream is in fp32 under autocast
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, cast_forward_inputs=False)
        for block in blocks_of(module):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        self.module = module

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        return self.module(*inputs, **named_inputs)

    def finish_gradient_synchronization(self) -> None:
        """Nothing: the gradients are averaged when backward returns."""

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """All parameters whole, by their names in the module; every rank must call it."""
        return {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each.detach().clone()
            for name, each in self.module.named_parameters(remove_duplicate=False)
        }
