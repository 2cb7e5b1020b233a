"""Times one kernel of a step: a matmul with the step's memory layout, fused attention, or a pass over memory."""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cs336_systems.config import Precision
from cs336_systems.costs.tape import Form, Pass
from cs336_systems.measure.precision import apply_math_mode
from cs336_systems.studies import cell
from cs336_systems.studies.ceilings_records import CeilingsGrid
from cs336_systems.studies.kernel_records import D_HEAD, HEADS, MASK_SIDE, KernelCell, PassCell, is_attention
from cs336_systems.studies.loops import MIN_TIME_S
from cs336_systems.studies.timing import Run, measure

LOOPS, LOOP_S = 3, 0.01
"""Number and least time of the loops of each kernel: few and short, because there are hundreds of kernels."""


def measure_kernel(grid: CeilingsGrid, row: KernelCell) -> KernelCell:
    """Time one matmul or one kernel of attention; its backward is the time of both passes less that of forward."""
    apply_math_mode(Precision.TF32 if row.precision is Precision.TF32 else Precision.FP32)
    brief = replace(grid, loops=LOOPS, loop_s=min(grid.loop_s, LOOP_S))
    if not is_attention(row.form):
        return row.with_loops(measure(make_matmul(grid, row), brief))
    forward = measure(make_attention(grid, row, with_backward=False), brief)
    if row.form is Form.ATTENTION:
        return row.with_loops(forward)
    both = measure(make_attention(grid, row, with_backward=True), brief)
    times_s = (max(MIN_TIME_S, time_s - both.count * forward.median_s) for time_s in both.times_s)
    return row.with_loops(replace(both, times_s=tuple(times_s)))


def measure_pass(grid: CeilingsGrid, row: PassCell) -> PassCell:
    """Time one pass over memory."""
    brief = replace(grid, loops=LOOPS, loop_s=min(grid.loop_s, LOOP_S))
    return row.with_loops(measure(make_pass(grid, row), brief))


def make_matmul(grid: CeilingsGrid, row: KernelCell) -> Run:
    """The matmul of random matrices, batched if the row is."""
    left = _random(grid, row, row.rows, row.inner, is_transposed=row.form is Form.WEIGHT)
    right = _random(grid, row, row.inner, row.columns, is_transposed=row.form is Form.FORWARD)
    return lambda: left @ right


def _random(grid: CeilingsGrid, row: KernelCell, rows: int, columns: int, is_transposed: bool) -> Tensor:
    """Random matrices of this shape, row-major, or column-major if `is_transposed`."""
    sides = (columns, rows) if is_transposed else (rows, columns)
    shape = sides if row.batch == 1 else (row.batch, *sides)
    generator, dtype = cell.make_generator(grid), cell.DTYPES[row.precision]
    made = torch.randn(shape, generator=generator, device=grid.device.value, dtype=dtype)
    return made.transpose(-2, -1) if is_transposed else made


def make_attention(grid: CeilingsGrid, row: KernelCell, *, with_backward: bool) -> Run:
    """Causal attention of all heads by the kernel that PyTorch chooses."""
    generator, dtype = cell.make_generator(grid), cell.DTYPES[row.precision]
    shape = (1, row.batch, row.rows, row.inner)
    q, k, v, upstream = (
        torch.randn(shape, generator=generator, device=grid.device.value, dtype=dtype) for _ in range(4)
    )
    if not with_backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    inputs = tuple(each.requires_grad_() for each in (q, k, v))
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, upstream)


def make_pass(grid: CeilingsGrid, row: PassCell) -> Run:
    """One pass over this many elements."""
    generator = cell.make_generator(grid)
    source = torch.rand(row.elements, generator=generator, device=grid.device.value)
    if row.how is Pass.COPY:
        return source.clone
    if row.how is Pass.WIDEN:
        narrow = source.bfloat16()
        return lambda: source.copy_(narrow)
    if row.how is Pass.STRIDED:
        heads = source.view(-1, HEADS, MASK_SIDE, D_HEAD).transpose(1, 2)
        target = torch.empty_like(heads, memory_format=torch.contiguous_format)
        return lambda: target.copy_(heads)
    scores = source.view(-1, MASK_SIDE, MASK_SIDE)
    if row.how is Pass.MASKED:
        mask = torch.ones(MASK_SIDE, MASK_SIDE, device=grid.device.value).triu(1).bool()
        return lambda: scores.masked_fill_(mask, -1.0)
    return lambda: scores.softmax(dim=-1)
