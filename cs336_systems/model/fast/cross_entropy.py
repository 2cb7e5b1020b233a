"""Cross-entropy that replaces logits by their own gradient, in place, without a copy in fp32.

PyTorch's cross-entropy reads low-precision logits several times, converts them to fp32, and slices a padded vocabulary
out of gradients that it first fills with zeros. Here forward reads the logits from memory once, and overwrites them.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor


def fused_cross_entropy(
    logits: Float[Tensor, "batch seq padded"], targets: Int[Tensor, "batch seq"], vocab_size: int
) -> Float[Tensor, ""]:
    """Mean over all targets, computed in fp32; logits from `vocab_size` on are padding and left out.

    If a gradient is needed, forward already writes it over `logits`, which must not be read again: the linear layer
    that returned them does not need them for its backward.
    """
    return cast(Tensor, _FusedCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), vocab_size))  # type: ignore[no-untyped-call]


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:  # noqa: ANN401
        compute = _kernel_losses if logits.is_cuda else _losses
        needs_gradient = ctx.needs_input_grad[0]
        loss = compute(logits, targets, vocab_size, write_gradients=needs_gradient).mean()
        if needs_gradient:
            ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        (_kernel_scale if gradient.is_cuda else _scale)(gradient, factor)
        return gradient, None, None


def _losses(logits: Tensor, targets: Tensor, vocab_size: int, *, write_gradients: bool) -> Tensor:
    """The same as the kernel of that name, in PyTorch's operators."""
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
        _report_write(logits)
    return found


def _kernel_scale(rows: Tensor, factor: Tensor) -> None:
    from cs336_systems.model.fast import cross_entropy_kernel

    cross_entropy_kernel.scale_rows(rows, factor)
    _report_write(rows)


def _report_write(rows: Tensor) -> None:
    """Report the write to autograd, which does not see what a kernel writes, so that it refuses later reads."""
    torch.autograd.graph.increment_version(rows)
