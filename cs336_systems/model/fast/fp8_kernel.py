"""The cast of a matrix to fp8 together with its transpose, written in Triton.

Forward multiplies a matrix by rows and backward by columns, and Hopper's fp8 matmul needs the inner axis contiguous in
both factors. If the transpose were made on its own, the matrix would be read from memory once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.model.fast.fp8 import DTYPE

ROWS, COLUMNS = 64, 128
"""Rows and columns of the tile that one program casts."""
NUM_WARPS = 8
TRANSPOSED_TYPES = torch.bfloat16, torch.float16
"""Types that the kernel can transpose: for fp32, Triton 3.6 writes a fourth of the transpose to wrong places."""


def casts(x: Tensor, unit: Tensor, transposes: bool) -> tuple[Tensor, Tensor]:
    """A matrix over its unit in fp8, and its transpose, which is empty unless `transposes`; both row-major."""
    x = x.contiguous()
    num_rows, num_columns = x.shape
    result = torch.empty_like(x, dtype=DTYPE)
    in_kernel = transposes and x.dtype in TRANSPOSED_TYPES
    transpose = result.new_empty((num_columns, num_rows) if in_kernel else (0, 0))
    _cast_part[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))](
        x, unit, result, transpose, num_rows, num_columns, TRANSPOSES=in_kernel, ROWS=ROWS, COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return result, result.t().contiguous() if transposes and not in_kernel else transpose


@triton.jit
def _cast_part(
    x, unit, result, transpose, num_rows, num_columns,
    TRANSPOSES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row[:, None] * num_columns + column[None, :]
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(unit))
    found = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor).to(result.dtype.element_ty)
    tl.store(result + at, found, mask=inside)
    if TRANSPOSES:
        tl.store(transpose + column[:, None] * num_rows + row[None, :], tl.trans(found), mask=tl.trans(inside))
