"""Cross-entropy over rows of logits, written in Triton: a program handles one row at a time, read
from memory once.

A program reads its row again for the gradient. The row is still in the cache then, if the rows of
all programs fit: 40 MB for 50,304 logits in bf16 on 132 processors. With one program per row, every
row was read from memory twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program holds at once."""
COLUMNS: tl.constexpr = tl.constexpr(BLOCK)
LONG_ROW = 16_384
"""From this many logits in a row on, fewer programs with more threads each are faster."""
VECTOR: tl.constexpr = tl.constexpr(8)
"""Logits of one thread: 16 bytes in low precision."""
LOWEST: tl.constexpr = tl.constexpr(-1.0e38)
"""Below all logits, and finite even times LOG2_E, because infinity minus infinity is NaN."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


def losses(
    logits: Tensor, targets: Tensor, vocab_size: int, count: int, *, write_gradients: bool
) -> Tensor:
    """The loss of each row, in fp32: -log softmax of its first `vocab_size` logits, at its target.

    With `write_gradients` the logits are overwritten with the gradient of sum(losses) / count, and
    with 0 in the padding. Logits must lie within 1e38. For a target outside of the vocabulary, the
    loss is NaN, and 1 is subtracted nowhere.
    """
    result = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    programs, num_warps = (3, 16) if vocab_size >= LONG_ROW else (6, 8)
    processors = (
        torch.cuda.get_device_properties(logits.device).multi_processor_count
        if logits.is_cuda
        else 1
    )
    _cross_entropy_losses[(min(len(logits), processors * programs),)](
        logits,
        logits.stride(0),
        targets,
        result,
        len(logits),
        1 / count,
        vocab_size,
        logits.shape[1],
        WRITE_GRADIENTS=write_gradients,
        num_warps=num_warps,
    )
    return result


def multiply_rows(rows: Tensor, factor: Tensor) -> None:
    """Multiply in place by a factor on the device; rows are left alone if it is 1."""
    _cross_entropy_scale[(len(rows),)](rows, rows.stride(0), factor, rows.shape[1], num_warps=8)


@triton.jit
def _cross_entropy_losses(
    logits,
    stride,
    targets,
    losses,
    rows,
    share,
    vocab_size,
    padded_size,
    WRITE_GRADIENTS: tl.constexpr,
):
    """Write the losses of every n-th row of n programs; with WRITE_GRADIENTS overwrite its logits
    with their gradient, times `share`.
    """
    at = logits + tl.program_id(0).to(tl.int64) * stride
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        _cross_entropy_row(
            at,
            tl.load(targets + row),
            losses + row,
            share,
            vocab_size,
            padded_size,
            WRITE_GRADIENTS,
        )
        at += tl.num_programs(0).to(tl.int64) * stride


@triton.jit
def _cross_entropy_row(
    at, target, loss, share, vocab_size, padded_size, WRITE_GRADIENTS: tl.constexpr
):
    """One row's loss by an online softmax (Milakov and Gimelshein 2018), then its gradient."""
    is_known = (target >= 0) & (target < vocab_size)
    # before it is overwritten
    target_logit = tl.load(at + target, mask=is_known, other=float("nan")).to(tl.float32)
    columns = tl.arange(0, COLUMNS // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # every thread keeps its own running maximum and sum, so threads synchronise only after the last
    # block
    largest = tl.full((COLUMNS // VECTOR,), LOWEST, tl.float32)
    total = tl.zeros((COLUMNS // VECTOR,), tl.float32)
    whole = vocab_size // COLUMNS * COLUMNS
    for start in range(0, whole, COLUMNS):
        x = tl.load(at + start + columns, eviction_policy="evict_last").to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 1))
        powers = tl.exp2(x * LOG2_E - (larger * LOG2_E)[:, None])
        total = total * tl.exp2((largest - larger) * LOG2_E) + tl.sum(powers, 1)
        largest = larger
    # only the last part is masked, because masked loads may read element by element
    if whole < vocab_size:
        is_real = whole + columns < vocab_size
        x = tl.load(at + whole + columns, mask=is_real, other=LOWEST).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 1))
        powers = tl.where(is_real, tl.exp2(x * LOG2_E - (larger * LOG2_E)[:, None]), 0.0)
        total = total * tl.exp2((largest - larger) * LOG2_E) + tl.sum(powers, 1)
        largest = larger
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp2((largest - top) * LOG2_E), 0))
    tl.store(loss, log_sum - target_logit)
    if WRITE_GRADIENTS:
        # softmax x share = 2 ** (x log2 e - this)
        shift = log_sum * LOG2_E - tl.log2(share)
        for start in range(0, whole, COLUMNS):
            x = tl.load(at + start + columns, eviction_policy="evict_first").to(tl.float32)
            gradient = tl.exp2(x * LOG2_E - shift).to(at.dtype.element_ty)
            tl.store(at + start + columns, gradient, eviction_policy="evict_first")
        for start in range(whole, padded_size, COLUMNS):
            inside = start + columns < padded_size
            x = tl.load(at + start + columns, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.where(start + columns < vocab_size, tl.exp2(x * LOG2_E - shift), 0.0)
            tl.store(at + start + columns, gradient.to(at.dtype.element_ty), mask=inside)
        # another thread has written the target's element, which is overwritten here
        tl.debug_barrier()
        wanted = (tl.exp2((target_logit - log_sum) * LOG2_E) - 1) * share
        tl.store(at + target, wanted.to(at.dtype.element_ty), mask=is_known)


@triton.jit
def _cross_entropy_scale(rows, stride, factor, size):
    """Multiply one row in place, unless the factor is 1."""
    by = tl.load(factor)
    if by != 1:
        at = rows + tl.program_id(0).to(tl.int64) * stride
        for start in range(0, size, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            x = tl.load(at + columns, mask=columns < size).to(tl.float32)
            tl.store(at + columns, (x * by).to(rows.dtype.element_ty), mask=columns < size)
