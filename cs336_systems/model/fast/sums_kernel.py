"""Sums over all rows, such as gradients of gains and biases, computed in two stages.

Each program of a kernel that reads the rows anyway keeps the sum of its rows; a last kernel adds up the programs' sums.
The largest magnitude of what a kernel writes is found in the same way.
"""

# ruff: noqa: ANN001, ANN202, N803  (Triton reads the annotations of a kernel as its own)

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.model.fast.fp8 import MAX, TINY

STAGES = 3
"""Pipeline stages of the loop over rows: prefetching rows takes a fourth less time than not prefetching."""
COLUMNS, ROWS = 16, 256
"""Columns and rows of partial sums in one program of the last kernel."""
NUM_WARPS = 8
LEAST: tl.constexpr = tl.constexpr(TINY)
MOST: tl.constexpr = tl.constexpr(MAX)


def num_programs(rows: int, block: int, device: torch.device) -> int:
    """Number of programs: enough to keep the memory busy, few enough that each has several rows."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    per_processor = min(4096 // block, rows // (8 * processors))
    return min(rows, processors * max(2, per_processor))


def summed(
    partial: Tensor, last_type: torch.dtype | None, maxima: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up `partial`, of shape (sums, programs, width), over the programs: rows in fp32, and the last in `last_type`.

    If `last_type` is None, the last sum is a row too, and the second result is empty. Rows begin at multiples of 16
    bytes, as AdamW's kernel needs. The third result is the fp8 unit of a tensor with these `maxima`; empty if None.
    """
    num_sums, programs, width = partial.shape
    num_rows = num_sums if last_type is None else num_sums - 1
    rows = partial.new_empty(num_rows, triton.cdiv(width, 4) * 4)[:, :width]
    last = partial.new_empty(0 if last_type is None else width, dtype=last_type)
    unit = partial.new_empty(0 if maxima is None else 1)
    _reduce_sums[(triton.cdiv(width, COLUMNS), num_sums)](
        partial, rows, last, maxima, unit, programs, width, rows.stride(0), num_rows,
        0 if maxima is None else maxima.numel(), HAS_MAXIMA=maxima is not None, ROWS=ROWS, COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return rows, last, unit


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_sums(  # type: ignore[no-untyped-def]
    partial, rows, last, maxima, unit, programs, width, stride, num_rows, num_maxima,
    HAS_MAXIMA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    first = partial + which * programs * width
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)
        here = (program < programs)[:, None] & inside[None, :]
        found += tl.load(first + program[:, None] * width + column[None, :], mask=here, other=0.0)
    result = tl.sum(found, 0)
    of_rows = tl.where(which < num_rows, width, 0)
    tl.store(rows + which * stride + column, result, mask=column < of_rows)
    tl.store(last + column, result.to(last.dtype.element_ty), mask=(column >= of_rows) & inside)
    if HAS_MAXIMA:  # noqa: SIM102  (known when it is compiled, unlike what follows)
        if (tl.program_id(0) == 0) & (which == 0):
            item = tl.arange(0, ROWS * COLUMNS)
            seen = tl.zeros((ROWS * COLUMNS,), tl.float32)
            for start in range(0, num_maxima, ROWS * COLUMNS):
                seen = tl.maximum(seen, tl.load(maxima + start + item, mask=start + item < num_maxima, other=0.0))
            tl.store(unit, tl.maximum(tl.max(seen, 0), LEAST) / MOST)


@triton.jit
def magnitude(x, like):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """|x|, rounded to the element type of the pointer `like`, in fp32; infinite if x is NaN."""
    size = tl.abs(x.to(like.dtype.element_ty).to(tl.float32))
    return tl.where(size == size, size, float("inf"))
