"""A block that PyTorch divides among a tensor group, traced without devices."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cs336.config import Arch, RunConfig


class Attention(nn.Module):
    """Projections around attention, whose own matmuls are fused."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.d_head = width // heads
        for name in ("q_proj", "k_proj", "v_proj", "output_proj"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, self.d_head)).transpose(1, 2)

        q, k, v = (heads(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.output_proj((q + k + v).transpose(1, 2).flatten(-2))


class Network(nn.Module):
    """A feed-forward network with or without a gate."""

    def __init__(self, width: int, hidden: int, is_gated: bool) -> None:
        super().__init__()
        self.w1, self.w2 = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )
        self.w3 = nn.Linear(width, hidden, bias=False) if is_gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.w1(x))
        return self.w2(y if self.w3 is None else y * self.w3(x))


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        model = config.model
        self.attn = Attention(model.d_model, model.num_heads)
        self.ffn = Network(model.d_model, model.d_ff, model.arch is Arch.CS336)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


class Recorder(TorchDispatchMode):
    """Counts matmuls by their sides, and collectives, of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = Counter[tuple[int, ...]]()
        self.collectives = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = function._opname
        # fake ones are whole tensors, from which DTensor knows the shapes of results
        if name == "mm" and not isinstance(args[0], FakeTensor):
            (rows, inner), (_, columns) = args[0].shape, args[1].shape
            self.matmuls[tuple(sorted((rows, inner, columns)))] += 1
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            if name.startswith(kind):
                self.collectives[kind] += 1
        return function(*args, **(kwargs or {}))


def parallelized_block(
    config: RunConfig, *, micro_batch: int, tensor: int
) -> tuple[list[Counter[tuple[int, ...]]], list[dict[str, int]]]:
    """Matmuls by their sorted sides, and collectives, of one rank: in forward and in backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
    try:
        mesh = dist.init_device_mesh("cpu", (tensor,))
        with torch.device("meta"):
            block = Block(config)
            x = torch.empty(micro_batch, config.model.context_length, config.model.d_model)
        columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = {"attn": whole, "ffn": whole}
        for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "ffn.w1", "ffn.w3"):
            plan[name] = columns
        plan |= {"attn.output_proj": rows, "ffn.w2": rows}
        if block.ffn.w3 is None:
            del plan["ffn.w3"]
        parallelize_module(block, mesh, plan)
        local = x[:, : config.model.context_length // tensor].requires_grad_()
        with Recorder() as forward:
            out = block(local)
        with Recorder() as backward:
            out.sum().backward()
    finally:
        dist.destroy_process_group()
    return [forward.matmuls, backward.matmuls], [
        dict(forward.collectives),
        dict(backward.collectives),
    ]
