"""Cross-entropy that turns logits into their own gradient, in place: no copy in fp32, no slice without the padding.

PyTorch's goes over logits in low precision several times, widens them, and cuts a padded vocabulary out of gradients
that it must fill with zeros first. Here they are read once in forward, read once and written once in backward.
"""

from typing import Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor


def fused_cross_entropy(
    logits: Float[Tensor, "batch seq padded"], targets: Int[Tensor, "batch seq"], vocab_size: int
) -> Float[Tensor, ""]:
    """Mean over all targets, computed in fp32; logits from `vocab_size` on are padding and left out.

    Backward overwrites `logits`, which nobody else may need: a linear layer does not need what it returned.
    """
    return cast(Tensor, _FusedCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), vocab_size))  # type: ignore[no-untyped-call]


class _Context(Protocol):
    """What forward leaves for backward."""

    vocab_size: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        losses, log_sums = (_kernel_losses if logits.is_cuda else _losses)(logits, targets, vocab_size)
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.vocab_size = vocab_size
        return losses.mean()

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_sums = ctx.saved_tensors
        scale = gradient / len(targets)
        (_kernel_gradients if logits.is_cuda else _gradients)(logits, targets, log_sums, scale, ctx.vocab_size)
        return logits, None, None


def _losses(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Of each row: -log softmax at its target, and the logarithm of the sum of exponentials; both in fp32."""
    real = logits[:, :vocab_size].float()
    log_sums = real.logsumexp(dim=1)
    return log_sums - real.gather(1, targets[:, None])[:, 0], log_sums


def _gradients(logits: Tensor, targets: Tensor, log_sums: Tensor, scale: Tensor, vocab_size: int) -> None:
    """Overwrite logits: `scale` times softmax less one at the target, 0 where padded."""
    real = logits[:, :vocab_size]
    gradients = (real.float() - log_sums[:, None]).exp_()
    gradients[torch.arange(len(targets), device=targets.device), targets] -= 1
    real.copy_(gradients * scale)
    logits[:, vocab_size:] = 0


def _kernel_losses(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    from cs336_systems import cross_entropy_kernel  # Triton, which only comes with PyTorch for GPUs

    return cross_entropy_kernel.losses(logits, targets, vocab_size)


def _kernel_gradients(logits: Tensor, targets: Tensor, log_sums: Tensor, scale: Tensor, vocab_size: int) -> None:
    from cs336_systems import cross_entropy_kernel

    cross_entropy_kernel.write_gradients(logits, targets, log_sums, scale, vocab_size)
