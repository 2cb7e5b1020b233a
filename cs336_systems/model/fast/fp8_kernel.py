"""The cast of a matrix to fp8, row by row and column by column at once, written in Triton.

Forward multiplies a matrix by rows and backward by columns, and Hopper's fp8 matmul needs the inner axis contiguous in
both factors. Made apart, the transpose is read from memory once more.
"""

# ruff: noqa: ANN001, ANN202, N803  (Triton reads the annotations of a kernel as its own)

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 128
"""Of the part of the matrix that one program casts."""
NUM_WARPS = 8


def casts(x: Tensor, unit: Tensor, dtype: torch.dtype, *, transposes: bool) -> tuple[Tensor, Tensor]:
    """A matrix over its unit in `dtype`, and its transpose, which is empty unless it `transposes`; row-major both."""
    x = x.contiguous()
    num_rows, num_columns = x.shape
    by_rows = torch.empty_like(x, dtype=dtype)
    by_columns = by_rows.new_empty((num_columns, num_rows) if transposes else (0, 0))
    _cast_part[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))](
        x, unit, by_rows, by_columns, num_rows, num_columns, TRANSPOSES=transposes, ROWS=ROWS, COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return by_rows, by_columns


@triton.jit  # type: ignore[untyped-decorator]
def _cast_part(  # type: ignore[no-untyped-def]
    x, unit, by_rows, by_columns, num_rows, num_columns,
    TRANSPOSES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row[:, None] * num_columns + column[None, :]
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(unit))
    found = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor).to(by_rows.dtype.element_ty)
    tl.store(by_rows + at, found, mask=inside)
    if TRANSPOSES:
        tl.store(by_columns + column[:, None] * num_rows + row[None, :], tl.trans(found), mask=tl.trans(inside))
