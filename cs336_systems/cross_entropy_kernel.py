"""Cross-entropy over rows of logits, written in Triton: one program to a row, which it reads once."""

# ruff: noqa: ANN001, ANN202, N803  (Triton reads the annotations of a kernel as its own)

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program holds at once."""
NUM_WARPS = 8
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)
"""Below all logits, and finite: infinity less infinity is not a number."""


def losses(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Of each row of logits: -log softmax at its target, and the logarithm of the sum of exponentials; both in fp32."""
    found, log_sums = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    _write_losses[(len(logits),)](
        logits, logits.stride(0), targets, found, log_sums, vocab_size, BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return found, log_sums


def write_gradients(logits: Tensor, targets: Tensor, log_sums: Tensor, scale: Tensor, vocab_size: int) -> None:
    """Overwrite logits: `scale` times softmax less one at the target, 0 where padded."""
    _write_gradients[(len(logits),)](
        logits, logits.stride(0), targets, log_sums, scale, vocab_size, logits.shape[1],
        BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _write_losses(logits, stride, targets, losses, log_sums, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    columns = tl.arange(0, BLOCK)
    # a running maximum and sum in every lane: no lane waits for another before the end
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    whole = vocab_size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(at + start + columns).to(tl.float32)
        larger = tl.maximum(largest, x)
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    if whole < vocab_size:  # only here is there a mask, with which a thread may have to read element by element
        x = tl.load(at + whole + columns, mask=whole + columns < vocab_size, other=LOWEST).to(tl.float32)
        larger = tl.maximum(largest, x)
        is_real = whole + columns < vocab_size
        total = total * tl.exp(largest - larger) + tl.where(is_real, tl.exp(x - larger), 0.0)
        largest = larger
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    own = tl.load(at + tl.load(targets + row)).to(tl.float32)
    tl.store(losses + row, log_sum - own)
    tl.store(log_sums + row, log_sum)


@triton.jit  # type: ignore[untyped-decorator]
def _write_gradients(  # type: ignore[no-untyped-def]
    logits, stride, targets, log_sums, scale, vocab_size, padded_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    columns = tl.arange(0, BLOCK)
    log_sum = tl.load(log_sums + row)
    target = tl.load(targets + row)
    factor = tl.load(scale)
    whole = vocab_size // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(at + start + columns).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(start + columns == target, 1.0, 0.0)
        tl.store(at + start + columns, (gradient * factor).to(logits.dtype.element_ty))
    for start in range(whole, padded_size, BLOCK):
        inside = start + columns < padded_size
        x = tl.load(at + start + columns, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(start + columns == target, 1.0, 0.0)
        gradient = tl.where(start + columns < vocab_size, gradient * factor, 0.0)
        tl.store(at + start + columns, gradient.to(logits.dtype.element_ty), mask=inside)
