"""A layer of experts that two ranks divide, each of which has half of the experts and of the
tokens.
"""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _ToExperts(torch.autograd.Function):
    """Sends equal parts of the rows to all ranks, and in backward their gradients back."""

    @staticmethod
    def forward(_: Any, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


def bytes_sent(shape: Mapping[str, int], tokens: int, checkpoints: int) -> float:
    """Bytes that leave this rank in forward and backward of one layer, whose tokens choose all
    experts equally often.
    """
    experts, chosen, width = (
        shape[name] for name in ("num_local_experts", "num_experts_per_tok", "hidden_size")
    )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    here = nn.ModuleList(
        nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(experts // ranks)
    )
    # token n chooses the experts n, n + 1, ...; rows are sorted by expert
    choices = (torch.arange(tokens)[:, None] + torch.arange(chosen)) % experts
    order = choices.flatten().argsort(stable=True)
    sent = 0.0
    usual = dist.all_to_all_single

    def counted(received: Tensor, rows: Tensor, *others: Any, **named: Any) -> Any:
        nonlocal sent
        parts = rows.chunk(ranks)
        sent += sum(part.nbytes for other, part in enumerate(parts) if other != rank)
        return usual(received, rows, *others, **named)

    def layer(hidden: Tensor) -> Tensor:
        rows = hidden.repeat_interleave(chosen, dim=0)[order]
        arrived = _ToExperts.apply(rows).view(ranks, experts // ranks, -1, width)
        results = torch.stack([expert(arrived[:, place]) for place, expert in enumerate(here)], 1)
        returned = _ToExperts.apply(results.reshape_as(rows))
        unsorted = torch.empty_like(returned)
        unsorted[order] = returned
        return unsorted.view(tokens, chosen, width).sum(1)

    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with mock.patch.object(dist, "all_to_all_single", counted):
        out = checkpoint(layer, hidden, use_reentrant=False) if checkpoints else layer(hidden)
        out.float().square().sum().backward()
    assert hidden.grad is not None
    return sent
