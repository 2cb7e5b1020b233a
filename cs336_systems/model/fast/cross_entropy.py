"""Cross-entropy that turns logits into their own gradient, in place: no copy in fp32, no slice without the padding.

PyTorch's goes over logits in low precision several times, widens them, and cuts a padded vocabulary out of gradients
that it must fill with zeros first. Here forward reads them from memory once, and overwrites them once.
"""

from typing import Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor


def fused_cross_entropy(
    logits: Float[Tensor, "batch seq padded"], targets: Int[Tensor, "batch seq"], vocab_size: int
) -> Float[Tensor, ""]:
    """Mean over all targets, computed in fp32; logits from `vocab_size` on are padding and left out.

    Where they need a gradient, forward already writes it in place of `logits`, which nobody else may read then: a
    linear layer does not need what it returned.
    """
    return cast(Tensor, _FusedCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), vocab_size))  # type: ignore[no-untyped-call]


class _Context(Protocol):
    """What forward leaves for backward."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        compute = _kernel_losses if logits.is_cuda else _losses
        needs_gradient = ctx.needs_input_grad[0]
        loss = compute(logits, targets, vocab_size, write_gradients=needs_gradient).mean()
        if needs_gradient:
            ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: _Context, factor: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        (_kernel_scale if gradient.is_cuda else _scale)(gradient, factor)
        return gradient, None, None


def _losses(logits: Tensor, targets: Tensor, vocab_size: int, *, write_gradients: bool) -> Tensor:
    """What the kernel of the same name does."""
    real = logits[:, :vocab_size]
    wide = real.float()
    log_sums = wide.logsumexp(dim=1)
    found = log_sums - wide.gather(1, targets[:, None])[:, 0]
    if write_gradients:
        gradient = wide.sub_(log_sums[:, None]).exp_()
        gradient[torch.arange(len(targets)), targets] -= 1
        real.copy_(gradient / len(targets))
        logits[:, vocab_size:] = 0
    return found


def _scale(rows: Tensor, factor: Tensor) -> None:
    rows.mul_(factor)


def _kernel_losses(logits: Tensor, targets: Tensor, vocab_size: int, *, write_gradients: bool) -> Tensor:
    from cs336_systems.model.fast import cross_entropy_kernel  # Triton, which only comes with PyTorch for GPUs

    found = cross_entropy_kernel.losses(logits, targets, vocab_size, write_gradients=write_gradients)
    if write_gradients:
        _say_overwritten(logits)
    return found


def _kernel_scale(rows: Tensor, factor: Tensor) -> None:
    from cs336_systems.model.fast import cross_entropy_kernel

    cross_entropy_kernel.scale_rows(rows, factor)
    _say_overwritten(rows)


def _say_overwritten(rows: Tensor) -> None:
    """Autograd does not see what a kernel writes; told, it refuses who reads the rows later, as on a CPU."""
    torch.autograd.graph.increment_version(rows)
