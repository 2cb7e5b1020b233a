"""The operations after a block's packed matmuls, written in Triton: a program handles a part of one
token's row.

Everything is read once and written once: SwiGLU moves 3 times the bytes of its result in forward
and 5 times in backward, and the heads take twice the bytes of q, k and v, or only of q and k where
these are rotated in place. If q, k and v have biases, a program of the backward kernel handles the
same columns of many rows, and sums the gradients of the biases (fused_blocks_kernel.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fused_blocks_kernel import STAGES, block_columns, magnitude, num_programs, summed

BLOCK = 1024
"""Elements of a part in one program; each thread has 8, which are 16 bytes."""
NUM_WARPS = 4
BIASED_BLOCK = 256
"""Elements of a part in one program that also sums the gradients of biases."""
SUM_TILE, SUM_WARPS = (8, 512), 2
"""Rows and columns that a program reads at once where it sums gradients of biases alone, and its
warps.
"""


def swiglu(packed: Tensor) -> Tensor:
    """silu(gate) x up for `packed`, whose last axis has the columns of the gate and then those of
    up.
    """
    packed = packed.contiguous()
    width = packed.shape[-1] // 2
    result = packed.new_empty(*packed.shape[:-1], width)
    _swiglu_values[_grid(result, width)](packed, result, width, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return result


def swiglu_backward(packed: Tensor, gradient: Tensor) -> Tensor:
    """Gradient of `packed` from the gradient of `swiglu(packed)`."""
    packed, gradient = packed.contiguous(), gradient.contiguous()
    width = gradient.shape[-1]
    result = torch.empty_like(packed)
    _swiglu_grads[_grid(gradient, width)](
        packed, gradient, result, width, BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return result


def rope_heads(packed: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split `packed` (batch, seq, 3 d_model) into q, k and v by heads, and rotate q and k by
    RoPE.
    """
    packed = packed.contiguous()
    d_head = 2 * rotations.shape[1]
    shape = (*packed.shape[:2], packed.shape[-1] // (3 * d_head), d_head)
    q, k, v = (packed.new_empty(shape) for _ in range(3))
    _launch_rope(packed, q, k, v, rotations, back=False)
    return q, k, v


def rope_heads_backward(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor) -> Tensor:
    """Gradient of `packed`, a row of q, k and v for each token; the gradients of q and k are
    rotated back.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    packed = q.new_empty(*q.shape[:2], 3 * q.shape[2] * q.shape[3])
    _launch_rope(packed, q, k, v, rotations, back=True)
    return packed


def rotate(packed: Tensor, rotations: Tensor, *, back: bool = False) -> None:
    """Rotate q and k in place, or back."""
    assert packed.is_contiguous()
    width = packed.shape[-1] // 3
    _rope_packed[packed.numel() // (3 * width), triton.cdiv(2 * width, BLOCK)](
        packed,
        rotations.contiguous(),
        packed.shape[1],
        width,
        D_HEAD=2 * rotations.shape[1],
        BACK=back,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def cut_heads_backward(
    q: Tensor, k: Tensor, v: Tensor, bias_type: torch.dtype, measures: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `packed` (a row of q, k and v for each token) and of its bias; with
    `measures` the first's scale.
    """
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
        MEASURES=measures,
        BLOCK=BIASED_BLOCK,
        STAGES=STAGES,
        num_warps=NUM_WARPS // 4,
    )
    return packed, *summed(partial, bias_type, maxima)[1:]


def packed_bias_backward(
    of_packed: Tensor, gradient: Tensor, bias_type: torch.dtype, *, measures: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of the bias of q, k and v from that of `packed`; with `measures` also the fp8 scale
    of the latter.

    `gradient` is that of the outputs of all heads. A query's weights sum to 1, so its sum is that
    of v's gradient; a bias of k adds the same to all scores of a query, which changes no weight, so
    that its gradient is 0.
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
        MEASURES=measures,
        ROWS=tile_rows,
        BLOCK=block,
        STAGES=STAGES,
        num_warps=SUM_WARPS,
    )
    return summed(partial, bias_type, maxima)[1:]


def _launch_rope(
    packed: Tensor, q: Tensor, k: Tensor, v: Tensor, rotations: Tensor, *, back: bool
) -> None:
    """Split `packed` into rotated q and k, and v; with `back` assemble it from these."""
    width = packed.shape[-1] // 3
    _rope_heads[_grid(q, width)](
        packed,
        q,
        k,
        v,
        rotations.contiguous(),
        packed.shape[1],
        width,
        D_HEAD=2 * rotations.shape[1],
        BACK=back,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def _grid(part: Tensor, width: int) -> tuple[int, int]:
    """One program for each row and each BLOCK of its columns."""
    return part.numel() // width, triton.cdiv(width, BLOCK)


@triton.jit
def _swiglu_values(packed, result, width, BLOCK: tl.constexpr):
    """SwiGLU of a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(width, BLOCK)
    at = packed + row * 2 * width + column
    gate = tl.load(at, mask=inside).to(tl.float32)
    up = tl.load(at + width, mask=inside).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(result + row * width + column, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_grads(packed, gradient, result, width, BLOCK: tl.constexpr):
    """Gradients of gate and up of a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(width, BLOCK)
    whole = row * 2 * width + column
    gate = tl.load(packed + whole, mask=inside).to(tl.float32)
    up = tl.load(packed + whole + width, mask=inside).to(tl.float32)
    of_result = tl.load(gradient + row * width + column, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = of_result * up * share * (1 + gate * (1 - share))
    tl.store(result + whole, of_gate.to(result.dtype.element_ty), mask=inside)
    tl.store(
        result + whole + width, (of_result * gate * share).to(result.dtype.element_ty), mask=inside
    )


@triton.jit
def _rope_heads(
    packed,
    q,
    k,
    v,
    rotations,
    length,
    width,
    D_HEAD: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split and rotate a part of one row, or put it together and rotate it back."""
    row = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(width, BLOCK)
    cos, sin = _rotation(rotations, row % length, column, inside, D_HEAD, BACK, BLOCK)
    whole, part = packed + row * 3 * width + column, row * width + column
    _rope_part(whole, q + part, cos, sin, inside, BACK, BLOCK)
    _rope_part(whole + width, k + part, cos, sin, inside, BACK, BLOCK)
    if BACK:
        tl.store(whole + 2 * width, tl.load(v + part, mask=inside), mask=inside)
    else:
        tl.store(v + part, tl.load(whole + 2 * width, mask=inside), mask=inside)


@triton.jit
def _rope_packed(
    packed, rotations, length, width, D_HEAD: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate a part of the q and k of one row in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < 2 * width
    cos, sin = _rotation(rotations, row % length, column, inside, D_HEAD, BACK, BLOCK)
    at = packed + row * 3 * width + column
    _rope_part(at, at, cos, sin, inside, BACK, BLOCK)


@triton.jit
def _cut_heads_grads(
    q,
    k,
    v,
    packed,
    partial,
    maxima,
    rows,
    width,
    MEASURES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
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
        if MEASURES:
            largest = tl.maximum(largest, magnitude(own_q, packed))
            of_k_and_v = tl.maximum(magnitude(own_k, packed), magnitude(own_v, packed))
            largest = tl.maximum(largest, of_k_and_v)
        part += programs.to(tl.int64) * width
        whole += programs.to(tl.int64) * 3 * width
    at = partial + program * 3 * width + column
    tl.store(at, of_q, mask=inside)
    tl.store(at + width, of_k, mask=inside)
    tl.store(at + 2 * width, of_v, mask=inside)
    if MEASURES:
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
    MEASURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum one of the three parts over every n-th tile of rows, for the bias, and find its largest
    magnitude.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    part = tl.program_id(2)
    column, is_column = block_columns(width, BLOCK)
    source = packed + part * width
    stride = 3 * width
    end = rows
    if not MEASURES:
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
        if MEASURES:
            largest = tl.maximum(largest, magnitude(values, packed))
    sums = tl.where(part == 1, 0.0, tl.sum(total, 0))
    tl.store(partial + (program * 3 + part) * width + column, sums, mask=is_column)
    if MEASURES:
        at = (program * tl.num_programs(1) + tl.program_id(1)) * 3 + part
        tl.store(maxima + at, tl.max(tl.max(largest, 1), 0))


@triton.jit
def _rotation(
    rotations,
    position,
    column,
    inside,
    D_HEAD: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cosines and sines of the angles of these columns' pairs at one position; of the opposite
    angles with BACK.
    """
    at = rotations + position * D_HEAD + column % D_HEAD
    cos, sin = _pairs(tl.load(at, mask=inside), BLOCK)
    if BACK:
        sin = -sin
    return cos, sin


@triton.jit
def _rope_part(whole, part, cos, sin, inside, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate one part of a row from `whole` to `part`, or from `part` to `whole`."""
    even, odd = _pairs(tl.load(part if BACK else whole, mask=inside).to(tl.float32), BLOCK)
    turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK,))
    tl.store(whole if BACK else part, turned.to(whole.dtype.element_ty), mask=inside)


@triton.jit
def _pairs(x, BLOCK: tl.constexpr):
    """First and second elements of pairs, split after loading, so that a thread reads several
    pairs at once.
    """
    return tl.split(tl.reshape(x, (BLOCK // 2, 2)))
