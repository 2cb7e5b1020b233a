"""Embedding lookup whose backward adds each token's gradient to its row in one pass.

PyTorch's backward of an embedding sorts the tokens, or gives each row to one thread block, and takes 3 to 6 times the
time that its memory traffic needs. Here the gradients of equal tokens are added in no fixed order, as cuDNN's attention
adds the gradients of queries. On a CPU PyTorch's operators compute the same.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor


def lookup(weight: Float[Tensor, "vocab d_model"], tokens: Int[Tensor, "..."]) -> Float[Tensor, "... d_model"]:
    """The rows of `weight` that `tokens` index; like PyTorch's embedding it needs indices within the table."""
    return cast(Tensor, _lookup(weight, tokens))


@torch.library.custom_op("cs336_systems::lookup", mutates_args=())
def _lookup(weight: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


@torch.library.custom_op("cs336_systems::lookup_backward", mutates_args=())
def _lookup_backward(gradient: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    result = gradient.new_zeros(num_rows, gradient.shape[-1])
    if gradient.is_cuda:
        from cs336_systems.model.fast import lookup_kernel  # Triton, which only comes with PyTorch for GPUs

        lookup_kernel.add_rows(result, tokens, gradient)
        return result
    return result.index_add_(0, tokens.flatten(), gradient.flatten(0, -2))


@_lookup.register_fake
def _(weight: Tensor, tokens: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[-1])


@_lookup_backward.register_fake
def _(gradient: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    del tokens
    return gradient.new_empty(num_rows, gradient.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401
    del output
    weight, tokens = inputs
    ctx.save_for_backward(tokens)
    ctx.num_rows = len(weight)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
    (tokens,) = ctx.saved_tensors
    return cast(Tensor, _lookup_backward(gradient, tokens, ctx.num_rows)), None


_lookup.register_autograd(_differentiate, setup_context=_keep)
