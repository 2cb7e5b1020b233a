"""Cross-entropy that overwrites the logits with their gradient, without a copy in fp32.

PyTorch's cross-entropy reads low-precision logits several times, converts them to fp32, and slices
a padded vocabulary out of gradients that it first fills with zeros. Here forward reads the logits
from memory once, and overwrites them.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor


def fused_cross_entropy(
    logits: Float[Tensor, "batch seq padded"],
    targets: Int[Tensor, "batch seq"],
    vocab_size: int,
    divisor: int = 1,
) -> Float[Tensor, ""]:
    """Mean over all targets, computed in fp32; logits from `vocab_size` on are padding and left
    out.

    If a gradient is needed, forward already writes it over `logits`, which must not be read again:
    the linear layer that returned them does not need them for its backward. It is right if backward
    begins with 1 / `divisor`; for another gradient of the loss, backward multiplies all of it.
    """
    arguments = logits.flatten(0, 1), targets.flatten(), vocab_size, divisor
    return cast(Tensor, _FusedCrossEntropy.apply(*arguments))  # type: ignore[no-untyped-call]


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, divisor: int) -> Tensor:
        needs_gradient = ctx.needs_input_grad[0]
        count = len(logits) * divisor
        loss = _losses(logits, targets, vocab_size, count, needs_gradient).mean()
        ctx.divisor = divisor
        if needs_gradient:
            ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        _multiply(factor, ctx.divisor, gradient)
        return gradient, None, None, None


def chunked_cross_entropy(
    x: Float[Tensor, "batch seq d_model"],
    weight: Float[Tensor, "padded d_model"],
    targets: Int[Tensor, "batch seq"],
    vocab_size: int,
    chunks: int,
    divisor: int = 1,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of the logits x W^T, computed for one of `chunks` parts of the tokens at a
    time.

    If gradients are needed, forward already computes those of x and W, as `fused_cross_entropy`
    does. That of W is summed over the parts, and rounded to the type of W after each. After Liger
    Kernel (Hsu et al. 2024).
    """
    arguments = x.flatten(0, -2), weight, targets.flatten(), vocab_size, chunks, divisor
    return cast(Tensor, _ChunkedCrossEntropy.apply(*arguments))  # type: ignore[no-untyped-call]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunks: int,
        divisor: int,
    ) -> Tensor:
        needs_gradient = any(ctx.needs_input_grad[:2])
        count = len(x) * divisor
        ctx.divisor = divisor
        of_x = torch.empty_like(x) if needs_gradient else None
        of_weight: Tensor | None = None
        losses = []
        parts = zip(x.chunk(chunks), targets.chunk(chunks), strict=True)
        for number, (part, wanted) in enumerate(parts):
            rows = part.to(weight.dtype)
            logits = rows @ weight.t()
            losses.append(_losses(logits, wanted, vocab_size, count, needs_gradient))
            if of_x is not None:
                of_x.chunk(chunks)[number].copy_(logits @ weight)
                if of_weight is None:
                    of_weight = logits.t() @ rows
                else:
                    of_weight.addmm_(logits.t(), rows)
            del logits  # before the next part's are allocated
        if needs_gradient:
            ctx.save_for_backward(of_x, of_weight)
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.saved_tensors
        _multiply(factor, ctx.divisor, of_x, of_weight)
        return of_x, of_weight, None, None, None, None


def _losses(
    logits: Tensor, targets: Tensor, vocab_size: int, count: int, write_gradients: bool
) -> Tensor:
    """Cross-entropy of each row of `logits`; columns from `vocab_size` on are padding.

    With `write_gradients` the logits are overwritten by the gradient of sum(losses) / `count`.
    """
    if logits.is_cuda:
        # Triton, which only comes with PyTorch for GPUs
        from . import cross_entropy_kernel

        losses = cross_entropy_kernel.losses(
            logits, targets, vocab_size, count, write_gradients=write_gradients
        )
        if write_gradients:
            # so that backward raises if it needs the old values
            torch.autograd.graph.increment_version(logits)
        return losses
    real = logits[:, :vocab_size]
    wide = real.float()
    log_sums = wide.logsumexp(dim=1)
    losses = log_sums - wide.gather(1, targets[:, None])[:, 0]
    if write_gradients:
        gradient = wide.sub_(log_sums[:, None]).exp_()
        gradient[torch.arange(len(targets)), targets] -= 1
        real.copy_(gradient / count)
        logits[:, vocab_size:] = 0
    return losses


def _multiply(factor: Tensor, divisor: int, *gradients: Tensor) -> None:
    """Multiply in place gradients, computed for a gradient of the loss of 1 / `divisor`, so that
    they are right for a gradient of `factor`.
    """
    if divisor != 1:
        factor = factor * divisor
    for rows in gradients:
        if rows.is_cuda:
            from . import cross_entropy_kernel

            cross_entropy_kernel.multiply_rows(rows, factor)
            torch.autograd.graph.increment_version(rows)
        else:
            rows.mul_(factor)
