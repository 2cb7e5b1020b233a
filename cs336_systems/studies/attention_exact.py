"""Attention in float64, forward and backward, in blocks of queries, and how far other results are from it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cs336_systems.model.transformer import naive_attention
from cs336_systems.studies.attention_records import ExactError, Quantity
from cs336_systems.studies.cell import Inputs

BLOCK_BYTES = 2**27
"""Most bytes of the scores of one block of queries; a few tensors of this size exist at the same time."""


def exact_attention(inputs: Inputs, *, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and the gradients of queries, keys and values, each (batch, seq, d_head) in float64.

    Keys that no query of a block attends to are left out, which halves the work of causal attention.
    """
    q, k, v, upstream = (tensor.detach().double() for tensor in (*inputs.forward, inputs.upstream))
    batch, length, _ = q.shape
    rows = max(1, BLOCK_BYTES // (length * torch.float64.itemsize))
    output, dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, q, k, v))
    positions = torch.arange(length, device=q.device)
    for sequence in range(batch):
        for first in range(0, length, rows):
            queries = slice(first, min(first + rows, length))
            keys = slice(0, queries.stop if causal else length)
            mask = positions[queries, None] >= positions[keys] if causal else torch.ones_like(positions[keys]).bool()
            here = tuple(part.requires_grad_() for part in (q[sequence, queries], k[sequence, keys], v[sequence, keys]))
            block = naive_attention(here[0], here[1], here[2], mask.expand(queries.stop - first, -1))
            gradients = torch.autograd.grad(block, here, upstream[sequence, queries])
            output[sequence, queries], dq[sequence, queries] = block.detach(), gradients[0]
            dk[sequence, keys] += gradients[1]
            dv[sequence, keys] += gradients[2]
    return output, dq, dk, dv


def exact_errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[ExactError, ...]:
    """How far the output and the gradients of queries, keys and values are from those in float64.

    `found` may be the output alone.
    """
    return tuple(
        _error(quantity, tensor.detach(), right)
        for quantity, tensor, right in zip(Quantity, found, exact, strict=False)
    )


def _error(quantity: Quantity, found: Tensor, exact: Tensor) -> ExactError:
    distance = float((found.double() - exact).abs().max())  # NaN if any is
    return ExactError(
        quantity=quantity,
        max_error=distance if math.isfinite(distance) else None,
        max_exact=float(exact.abs().max()),
    )
