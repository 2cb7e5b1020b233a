"""The operations after a block's packed matmuls, written in Triton: a program handles a part of one
token's row. Functions have the names of the operators in packed.py, which say what they return.

Everything is read once and written once: SwiGLU moves 3 times the bytes of its result in forward
and 5 times in backward, and the heads take twice the bytes of q, k and v, or only of q and k where
these are rotated in place. If q, k and v have biases, a program of the backward kernel handles the
same columns of many rows, and sums the gradients of the biases (fused_blocks_kernel.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import scale_of
from .fused_blocks_kernel import STAGES, block_columns, magnitude, num_programs, summed
from .packed import PART, num_parts

COLUMNS: tl.constexpr = tl.constexpr(PART)
NUM_WARPS = 4
"""Warps of a program of PART columns: each thread has 8, which are 16 bytes."""
BIASED_BLOCK = 256
"""Elements of a part in one program that also sums the gradients of biases."""
SUM_TILE, SUM_WARPS = (8, 512), 2
"""Rows and columns that a program reads at once for the gradients of biases; its warps."""


def swiglu(packed: Tensor, tag: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel of `_swiglu`."""
    measures = tag is not None
    packed = packed.contiguous()
    width = packed.shape[-1] // 2
    result = packed.new_empty(*packed.shape[:-1], width)
    largest = _unmeasured(result, num_parts(result, measures))
    _swiglu_values[_grid(result, width)](
        packed, result, largest if measures else None, width, num_warps=NUM_WARPS
    )
    return result, largest


def swiglu_backward(packed: Tensor, gradient: Tensor, measures: bool) -> tuple[Tensor, Tensor]:
    """The kernel of `_swiglu_backward`."""
    packed, gradient = packed.contiguous(), gradient.contiguous()
    width = gradient.shape[-1]
    result = torch.empty_like(packed)
    largest = _unmeasured(result, num_parts(gradient, measures))
    _swiglu_grads[_grid(gradient, width)](
        packed, gradient, result, largest if measures else None, width, num_warps=NUM_WARPS
    )
    return result, largest


def rope_heads(
    packed: Tensor, rotations: Tensor, tag: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `rope_heads`."""
    del tag
    packed = packed.contiguous()
    d_head = 2 * rotations.shape[1]
    shape = (*packed.shape[:2], packed.shape[-1] // (3 * d_head), d_head)
    q, k, v = (packed.new_empty(shape) for _ in range(3))
    _launch_rope(packed, q, k, v, rotations, None, back=False)
    return q, k, v


def rope_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, rotations: Tensor, measures: bool
) -> tuple[Tensor, Tensor]:
    """The kernel of `_rope_heads_backward`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    packed = q.new_empty(*q.shape[:2], 3 * q.shape[2] * q.shape[3])
    largest = _unmeasured(q, num_parts(q.flatten(2), measures))
    _launch_rope(packed, q, k, v, rotations, largest if measures else None, back=True)
    return packed, largest


def rotate(packed: Tensor, rotations: Tensor) -> None:
    """The kernel of `_rotate`."""
    _launch_rotation(packed, rotations, None, back=False)


def rotate_back(packed: Tensor, rotations: Tensor, measures: bool) -> Tensor:
    """Rotate q and k back in place; the fp8 scale of the result, empty unless `measures`."""
    largest = _unmeasured(packed, num_parts(packed, measures))
    _launch_rotation(packed, rotations, largest if measures else None, back=True)
    return scale_of(largest).view(1) if measures else largest


def cut_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, bias_type: torch.dtype, measures: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `_cut_heads_backward`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    width = q.shape[2] * q.shape[3]
    rows = q.shape[0] * q.shape[1]
    blocks = triton.cdiv(width, BIASED_BLOCK)
    programs = num_programs(rows, 4 * BIASED_BLOCK, q.device)
    packed = q.new_empty(*q.shape[:2], 3 * width)
    partial = q.new_empty(1, programs, 3 * width, dtype=torch.float32)
    maxima = partial.new_empty(programs * blocks) if measures else None
    _cut_heads_grads[(programs, blocks)](
        q,
        k,
        v,
        packed,
        partial,
        maxima,
        rows,
        width,
        BLOCK=BIASED_BLOCK,
        STAGES=STAGES,
        num_warps=NUM_WARPS // 4,
    )
    return packed, *summed(partial, bias_type, maxima)[1:]


def packed_bias_backward(
    of_packed: Tensor, gradient: Tensor, bias_type: torch.dtype, *, measures: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of the bias of q, k and v from that of `packed`; with `measures` also the latter's
    fp8 scale.

    `gradient` is that of all heads' outputs. A query's weights sum to 1, so its sum is that of v's
    gradient; a bias of k adds the same to all scores of a query, which changes no weight, so its
    gradient is 0.
    """
    assert of_packed.is_contiguous()
    gradient = gradient.contiguous()
    width = gradient.shape[-1]
    rows = gradient.numel() // width
    tile_rows, block = SUM_TILE
    grid = (
        num_programs(triton.cdiv(rows, tile_rows), tile_rows * block, gradient.device),
        triton.cdiv(width, block),
        3,
    )
    partial = gradient.new_empty(1, grid[0], 3 * width, dtype=torch.float32)
    maxima = partial.new_empty(grid[0] * grid[1] * grid[2]) if measures else None
    _reduce_packed[grid](
        of_packed,
        gradient,
        partial,
        maxima,
        rows,
        width,
        ROWS=tile_rows,
        BLOCK=block,
        STAGES=STAGES,
        num_warps=SUM_WARPS,
    )
    return summed(partial, bias_type, maxima)[1:]


def _unmeasured(like: Tensor, parts: int) -> Tensor:
    """Room for as many magnitudes, on the device of another tensor."""
    return torch.empty(parts, dtype=torch.float32, device=like.device)


def _launch_rope(
    packed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotations: Tensor,
    largest: Tensor | None,
    *,
    back: bool,
) -> None:
    """Split `packed` into q, k and v, or assemble it from them; `largest` gets its magnitudes."""
    width = packed.shape[-1] // 3
    _rope_heads[_grid(q, width)](
        packed,
        q,
        k,
        v,
        rotations.contiguous(),
        largest,
        packed.shape[1],
        width,
        D_HEAD=2 * rotations.shape[1],
        BACK=back,
        num_warps=NUM_WARPS,
    )


def _launch_rotation(
    packed: Tensor, rotations: Tensor, largest: Tensor | None, *, back: bool
) -> None:
    """Rotate q and k in place, or back; `largest` gets the magnitudes of all three parts."""
    assert packed.is_contiguous()
    width = packed.shape[-1] // 3
    columns = (2 if largest is None else 3) * width
    _rope_packed[packed.numel() // (3 * width), triton.cdiv(columns, PART)](
        packed,
        rotations.contiguous(),
        largest,
        packed.shape[1],
        width,
        D_HEAD=2 * rotations.shape[1],
        BACK=back,
        num_warps=NUM_WARPS,
    )


def _grid(part: Tensor, width: int) -> tuple[int, int]:
    """One program for each row and each PART of its columns."""
    return part.numel() // width, triton.cdiv(width, PART)


@triton.jit
def _keep_largest(largest, sizes, inside):
    """Store the largest of a program's magnitudes, in the order of the grid."""
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest + part, tl.max(tl.where(inside, sizes, 0.0), 0))


@triton.jit
def _swiglu_values(packed, result, largest, width):
    """SwiGLU of a part of one row, and its largest magnitude."""
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(width, COLUMNS)
    at = packed + row * 2 * width + column
    gate = tl.load(at, mask=inside).to(tl.float32)
    up = tl.load(at + width, mask=inside).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(result + row * width + column, value.to(result.dtype.element_ty), mask=inside)
    if largest is not None:
        _keep_largest(largest, magnitude(value, result), inside)


@triton.jit
def _swiglu_grads(packed, gradient, result, largest, width):
    """Gradients of gate and up of a part of one row, and their largest magnitude."""
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(width, COLUMNS)
    whole = row * 2 * width + column
    gate = tl.load(packed + whole, mask=inside).to(tl.float32)
    up = tl.load(packed + whole + width, mask=inside).to(tl.float32)
    of_result = tl.load(gradient + row * width + column, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = of_result * up * share * (1 + gate * (1 - share))
    of_up = of_result * gate * share
    tl.store(result + whole, of_gate.to(result.dtype.element_ty), mask=inside)
    tl.store(result + whole + width, of_up.to(result.dtype.element_ty), mask=inside)
    if largest is not None:
        sizes = tl.maximum(magnitude(of_gate, result), magnitude(of_up, result))
        _keep_largest(largest, sizes, inside)


@triton.jit
def _rope_heads(
    packed, q, k, v, rotations, largest, length, width, D_HEAD: tl.constexpr, BACK: tl.constexpr
):
    """Split and rotate a part of a row, or put it together, rotated back, and measure it."""
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(width, COLUMNS)
    cos, sin = _rotation(rotations, row % length, column, inside, D_HEAD, BACK)
    whole, part = packed + row * 3 * width + column, row * width + column
    turned_q = _rope_part(whole, q + part, cos, sin, inside, BACK)
    turned_k = _rope_part(whole + width, k + part, cos, sin, inside, BACK)
    value = tl.load(v + part if BACK else whole + 2 * width, mask=inside)
    tl.store(whole + 2 * width if BACK else v + part, value, mask=inside)
    if largest is not None:
        sizes = tl.maximum(magnitude(turned_q, packed), magnitude(turned_k, packed))
        _keep_largest(largest, tl.maximum(sizes, magnitude(value, packed)), inside)


@triton.jit
def _rope_packed(
    packed, rotations, largest, length, width, D_HEAD: tl.constexpr, BACK: tl.constexpr
):
    """Rotate a part of the q and k of one row in place; find the largest magnitude of q, k or v."""
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(2 * width, COLUMNS)
    cos, sin = _rotation(rotations, row % length, column, inside, D_HEAD, BACK)
    at = packed + row * 3 * width + column
    turned = _rope_part(at, at, cos, sin, inside, BACK)
    if largest is not None:
        is_value = (column >= 2 * width) & (column < 3 * width)
        value = tl.load(at, mask=is_value, other=0.0)
        sizes = tl.where(inside, magnitude(turned, packed), magnitude(value, packed))
        _keep_largest(largest, sizes, inside | is_value)


@triton.jit
def _cut_heads_grads(
    q, k, v, packed, partial, maxima, rows, width, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Put together a part of every n-th row of n programs; `partial` gets its sum for the bias."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column, inside = block_columns(width, BLOCK)
    of_q = tl.zeros((BLOCK,), tl.float32)
    of_k = tl.zeros((BLOCK,), tl.float32)
    of_v = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    part = program.to(tl.int64) * width + column
    whole = packed + program.to(tl.int64) * 3 * width + column
    for _ in tl.range(program, rows, programs, num_stages=STAGES):
        own_q = tl.load(q + part, mask=inside, other=0.0)
        own_k = tl.load(k + part, mask=inside, other=0.0)
        own_v = tl.load(v + part, mask=inside, other=0.0)
        tl.store(whole, own_q, mask=inside)
        tl.store(whole + width, own_k, mask=inside)
        tl.store(whole + 2 * width, own_v, mask=inside)
        of_q += own_q.to(tl.float32)
        of_k += own_k.to(tl.float32)
        of_v += own_v.to(tl.float32)
        if maxima is not None:
            largest = tl.maximum(largest, magnitude(own_q, packed))
            of_k_and_v = tl.maximum(magnitude(own_k, packed), magnitude(own_v, packed))
            largest = tl.maximum(largest, of_k_and_v)
        part += programs.to(tl.int64) * width
        whole += programs.to(tl.int64) * 3 * width
    at = partial + program * 3 * width + column
    tl.store(at, of_q, mask=inside)
    tl.store(at + width, of_k, mask=inside)
    tl.store(at + 2 * width, of_v, mask=inside)
    if maxima is not None:
        part = program * tl.num_programs(1) + tl.program_id(1)
        tl.store(maxima + part, tl.max(largest, 0))


@triton.jit
def _reduce_packed(
    packed,
    gradient,
    partial,
    maxima,
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum one of q, k and v over every n-th tile of rows, and find its largest magnitude."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    part = tl.program_id(2)
    column, is_column = block_columns(width, BLOCK)
    source = packed + part * width
    stride = 3 * width
    end = rows
    if maxima is None:
        if part == 1:
            end = 0
        if part == 2:
            source = gradient
            stride = width
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    largest = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(program * ROWS, end, programs * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & is_column[None, :]
        values = tl.load(source + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        total += values.to(tl.float32)
        if maxima is not None:
            largest = tl.maximum(largest, magnitude(values, packed))
    sums = tl.where(part == 1, 0.0, tl.sum(total, 0))
    tl.store(partial + (program * 3 + part) * width + column, sums, mask=is_column)
    if maxima is not None:
        at = (program * tl.num_programs(1) + tl.program_id(1)) * 3 + part
        tl.store(maxima + at, tl.max(tl.max(largest, 1), 0))


@triton.jit
def _rotation(rotations, position, column, inside, D_HEAD: tl.constexpr, BACK: tl.constexpr):
    """Cosines and sines of these columns' angles at one position; with BACK of the opposite."""
    at = rotations + position * D_HEAD + column % D_HEAD
    cos, sin = _pairs(tl.load(at, mask=inside))
    if BACK:
        sin = -sin
    return cos, sin


@triton.jit
def _rope_part(whole, part, cos, sin, inside, BACK: tl.constexpr):
    """Rotate one part of a row from `whole` to `part`, or from `part` to `whole`, and return it."""
    even, odd = _pairs(tl.load(part if BACK else whole, mask=inside).to(tl.float32))
    turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (COLUMNS,))
    tl.store(whole if BACK else part, turned.to(whole.dtype.element_ty), mask=inside)
    return turned


@triton.jit
def _pairs(x):
    """First and second elements of pairs, split after they are loaded together."""
    return tl.split(tl.reshape(x, (COLUMNS // 2, 2)))
