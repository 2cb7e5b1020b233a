"""The operations between matmuls, written in Triton: residual addition with norm, bias with GELU,
embedding, fp8 casts.

Everything is read once and written once. Gradients of gains and biases are sums over all rows, in
two stages: each program of a kernel that reads the rows anyway keeps the sum of its rows, and a
last kernel adds up the programs' sums. The largest magnitude of what a kernel writes is found in
the same way. Functions have the names of operators in fused_blocks.py and fp8.py, which say what
they return.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import DTYPE, MAX, TINY
from .fused_blocks import GELU_PART

NUM_WARPS = 4
MAX_STAGED = 4096
"""Widest row of which STAGES fit into a program's shared memory; wider ones are not prefetched."""
TWICE_ROOT: tl.constexpr = tl.constexpr(1.5957691216057308)
"""Factor 2 sqrt(2 / pi) in GELU's tanh approximation."""
CUBIC: tl.constexpr = tl.constexpr(0.044715)
PROPAGATE_NAN: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)
"""Makes a maximum NaN if either argument is; by default the maximum is then the other argument."""
GELU_COLUMNS = 1024
"""Columns of one program of GELU's backward, and of its forward unless that measures magnitudes."""
GELU_COLUMNS_PER_WARP = 512
"""Columns that one warp of GELU computes, 16 in each thread."""
LOOKUP_COLUMNS = 512
"""Columns of one program of the embedding's backward: 16 bytes of fp32 in each thread."""
STAGES = 3
"""Stages of the pipeline over rows: with prefetching it takes a fourth less time."""
SUM_ROWS, SUM_COLUMNS = 256, 16
"""Rows and columns of partial sums in one program of the last kernel."""
SUM_WARPS = 8
CAST_ROWS, CAST_COLUMNS, CAST_WARPS = 64, 128, 8
"""Rows and columns of the tile that one program casts to fp8, and its warps."""
TRANSPOSED_TYPES = torch.bfloat16, torch.float16
"""Types that can be transposed: of fp32, Triton 3.6 writes a fourth to wrong places."""
FP8_TINY: tl.constexpr = tl.constexpr(TINY)
FP8_MAX: tl.constexpr = tl.constexpr(MAX)


def add_norm(
    stream: Tensor,
    branch: Tensor | None,
    branch_bias: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    tag: Tensor | None,
    measures: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `_add_norm`."""
    del tag
    stream, gain = stream.contiguous(), gain.contiguous()
    branch, branch_bias, bias = map(_contiguous, (branch, branch_bias, bias))
    width = stream.shape[-1]
    rows = stream.numel() // width
    total = stream.new_empty(0 if branch is None else stream.shape)
    normed = torch.empty_like(stream, dtype=dtype)
    statistics = torch.empty(
        1 if bias is None else 2, rows, dtype=torch.float32, device=stream.device
    )
    largest = statistics.new_empty(rows if measures else 0)
    _add_norm_values[(rows,)](
        stream,
        branch,
        branch_bias,
        gain,
        bias,
        total,
        normed,
        statistics,
        largest if measures else None,
        rows,
        width,
        eps,
        BLOCK=triton.next_power_of_2(width),
        num_warps=NUM_WARPS if width <= 2048 else 2 * NUM_WARPS,
    )
    return total, normed, statistics, largest


def add_norm_backward(
    stream_gradient: Tensor | None,
    gradient: Tensor,
    total: Tensor,
    statistics: Tensor,
    gain: Tensor,
    is_centred: bool,
    branch_bias_type: torch.dtype | None,
    measures: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `_add_norm_backward`."""
    gradient, total, statistics, gain = (
        tensor.contiguous() for tensor in (gradient, total, statistics, gain)
    )
    width = total.shape[-1]
    rows = total.numel() // width
    block = triton.next_power_of_2(width)
    programs = num_programs(rows, block, total.device)
    has_branch_bias = branch_bias_type is not None
    of_stream = torch.empty_like(total)
    is_shared = total.dtype == gradient.dtype
    of_branch = of_stream if is_shared else torch.empty_like(gradient)
    partial = torch.empty(
        1 + is_centred + has_branch_bias, programs, width, dtype=torch.float32, device=total.device
    )
    maxima = partial.new_empty(programs) if measures else None
    _add_norm_grads[(programs,)](
        _contiguous(stream_gradient),
        gradient,
        total,
        statistics,
        gain,
        of_stream,
        of_branch,
        partial,
        maxima,
        rows,
        width,
        IS_SHARED=is_shared,
        IS_CENTRED=is_centred,
        HAS_BRANCH_BIAS=has_branch_bias,
        BLOCK=block,
        STAGES=STAGES if block <= MAX_STAGED else 1,
        num_warps=NUM_WARPS if block <= MAX_STAGED else 4 * NUM_WARPS,
    )
    if is_shared:
        of_branch = of_stream.new_empty(0)
    return of_stream, of_branch, *summed(partial, branch_bias_type, maxima)


def bias_gelu(x: Tensor, bias: Tensor, tag: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel of `_bias_gelu`."""
    measures = tag is not None
    x, bias = x.contiguous(), bias.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    result = torch.empty_like(x)
    rows_of_part, block = GELU_PART if measures else (1, GELU_COLUMNS)
    grid = (triton.cdiv(rows, rows_of_part), triton.cdiv(width, block))
    largest = torch.empty(
        grid[0] * grid[1] if measures else 0, dtype=torch.float32, device=x.device
    )
    _bias_gelu_values[grid](
        x,
        bias,
        result,
        largest if measures else None,
        rows,
        width,
        ROWS=rows_of_part,
        BLOCK=block,
        num_warps=block // GELU_COLUMNS_PER_WARP,
    )
    return result, largest


def bias_gelu_backward(
    x: Tensor, bias: Tensor, gradient: Tensor, measures: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `_bias_gelu_backward`."""
    x, bias, gradient = x.contiguous(), bias.contiguous(), gradient.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    programs = num_programs(rows, triton.next_power_of_2(width), x.device)
    result = torch.empty_like(x)
    partial = torch.empty(1, programs, width, dtype=torch.float32, device=x.device)
    grid = (programs, triton.cdiv(width, GELU_COLUMNS))
    maxima = partial.new_empty(grid[0] * grid[1]) if measures else None
    _bias_gelu_grads[grid](
        x,
        bias,
        gradient,
        result,
        partial,
        maxima,
        rows,
        width,
        BLOCK=GELU_COLUMNS,
        STAGES=STAGES,
        num_warps=NUM_WARPS,
    )
    return result, *summed(partial, bias.dtype, maxima)[1:]


def lookup_backward(gradient: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """The kernel of `_lookup_backward`."""
    result = gradient.new_zeros(num_rows, gradient.shape[-1], dtype=torch.float32)
    gradient, tokens = gradient.contiguous(), tokens.contiguous()
    width = gradient.shape[-1]
    _lookup_grads[tokens.numel(), triton.cdiv(width, LOOKUP_COLUMNS)](
        result, tokens, gradient, width, BLOCK=LOOKUP_COLUMNS, num_warps=NUM_WARPS
    )
    return result


def casts(x: Tensor, scale: Tensor, transposes: bool) -> tuple[Tensor, Tensor]:
    """The kernel of `_fp8_casts`.

    Forward multiplies by rows, and backward by columns. If the transpose were made on its own, the
    matrix would be read from memory once more.
    """
    x = x.contiguous()
    num_rows, num_columns = x.shape
    result = torch.empty_like(x, dtype=DTYPE)
    in_kernel = transposes and x.dtype in TRANSPOSED_TYPES
    transpose = result.new_empty((num_columns, num_rows) if in_kernel else (0, 0))
    _cast_part[(triton.cdiv(num_rows, CAST_ROWS), triton.cdiv(num_columns, CAST_COLUMNS))](
        x,
        scale,
        result,
        transpose,
        num_rows,
        num_columns,
        TRANSPOSES=in_kernel,
        ROWS=CAST_ROWS,
        COLUMNS=CAST_COLUMNS,
        num_warps=CAST_WARPS,
    )
    return result, result.t().contiguous() if transposes and not in_kernel else transpose


def _contiguous(x: Tensor | None) -> Tensor | None:
    """The tensor with its elements in order, if there is one."""
    return None if x is None else x.contiguous()


def num_programs(rows: int, block: int, device: torch.device) -> int:
    """Programs of a kernel that loops over rows: enough to keep the memory busy, few enough that
    each has several rows. A program holds `block` elements in registers.
    """
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 2
    )
    per_processor = min(4096 // block, rows // (8 * processors))
    return min(rows, processors * max(2, per_processor))


def summed(
    partial: Tensor, last_type: torch.dtype | None, maxima: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up `partial` (sums, programs, width) over the programs: rows in fp32, and the last in
    `last_type`.

    If `last_type` is None, the last sum is a row too, and the second result is empty. The third is
    the fp8 scale of a tensor with these `maxima`; empty if None.
    """
    num_sums, programs, width = partial.shape
    num_rows = num_sums if last_type is None else num_sums - 1
    rows = partial.new_empty(num_rows, width)
    last = partial.new_empty(0 if last_type is None else width, dtype=last_type)
    scale = partial.new_empty(0 if maxima is None else 1)
    _reduce_sums[(triton.cdiv(width, SUM_COLUMNS), num_sums)](
        partial,
        rows,
        last,
        maxima,
        scale,
        programs,
        width,
        num_rows,
        0 if maxima is None else maxima.numel(),
        ROWS=SUM_ROWS,
        COLUMNS=SUM_COLUMNS,
        num_warps=SUM_WARPS,
    )
    return rows, last, scale


@triton.jit
def _add_norm_values(
    stream,
    branch,
    branch_bias,
    gain,
    bias,
    total,
    normed,
    statistics,
    largest,
    rows,
    width,
    eps,
    BLOCK: tl.constexpr,
):
    """Forward of one row: add the branch if there is one, and norm the sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    x = wide(stream + at, inside)
    if branch is not None:
        x += wide(branch + at, inside)
        if branch_bias is not None:
            x += wide(branch_bias + column, inside)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if bias is not None:
        mean = tl.sum(x, 0) / width
        tl.store(statistics + rows + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(statistics + row, scale)
    y = x * scale * wide(gain + column, inside)
    if bias is not None:
        y += wide(bias + column, inside)
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=inside)
    if largest is not None:
        tl.store(largest + row, tl.max(tl.where(inside, magnitude(y, normed), 0.0), 0))


@triton.jit
def _add_norm_grads(
    stream_gradient,
    gradient,
    total,
    statistics,
    gain,
    of_stream,
    of_branch,
    partial,
    maxima,
    rows,
    width,
    IS_SHARED: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HAS_BRANCH_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Backward of every n-th row of n programs; `partial` gets their sums for gain and biases."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gains = wide(gain + column, inside)
    of_gain = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    of_branch_bias = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    at = program.to(tl.int64) * width + column
    for row in tl.range(program, rows, programs, num_stages=STAGES):
        x = wide(total + at, inside)
        of_normed = wide(gradient + at, inside)
        scale = tl.load(statistics + row)
        if IS_CENTRED:
            x = tl.where(inside, x - tl.load(statistics + rows + row), 0.0)
            of_bias += of_normed
        x *= scale
        of_gain += of_normed * x
        of_normed *= gains
        result = of_normed - x * (tl.sum(of_normed * x, 0) / width)
        if IS_CENTRED:
            result -= tl.sum(of_normed, 0) / width
        result *= scale
        if stream_gradient is not None:
            result += wide(stream_gradient + at, inside)
        tl.store(of_stream + at, result.to(of_stream.dtype.element_ty), mask=inside)
        if not IS_SHARED:
            tl.store(of_branch + at, result.to(of_branch.dtype.element_ty), mask=inside)
        if HAS_BRANCH_BIAS:
            of_branch_bias += result
        if maxima is not None:
            largest = tl.maximum(largest, tl.abs(result), propagate_nan=PROPAGATE_NAN)
        at += programs.to(tl.int64) * width
    at = partial + program * width + column
    tl.store(at, of_gain, mask=inside)
    if IS_CENTRED:
        tl.store(at + programs * width, of_bias, mask=inside)
    if HAS_BRANCH_BIAS:
        tl.store(at + (1 + IS_CENTRED) * programs * width, of_branch_bias, mask=inside)
    if maxima is not None:
        tl.store(maxima + program, tl.max(tl.where(inside, magnitude(largest, of_branch), 0.0), 0))


@triton.jit
def _bias_gelu_values(
    x, bias, result, largest, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Forward of a tile of ROWS rows and BLOCK columns, and its largest magnitude."""
    column, is_column = block_columns(width, BLOCK)
    biases = wide(bias + column, is_column)
    maxima = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + number
        inside = is_column & (row < rows) if ROWS > 1 else is_column
        at = row * width + column
        value = wide(x + at, inside) + biases
        value *= _gelu_share(value)
        tl.store(result + at, value.to(result.dtype.element_ty), mask=inside)
        if largest is not None:
            maxima = tl.maximum(
                maxima, tl.where(inside, tl.abs(value), 0.0), propagate_nan=PROPAGATE_NAN
            )
    if largest is not None:
        part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(largest + part, tl.max(magnitude(maxima, result), 0))


@triton.jit
def _bias_gelu_grads(
    x,
    bias,
    gradient,
    result,
    partial,
    maxima,
    rows,
    width,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Backward of BLOCK columns of every n-th row; `partial` gets their sum for the bias."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column, inside = block_columns(width, BLOCK)
    biases = wide(bias + column, inside)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    at = program.to(tl.int64) * width + column
    for _ in tl.range(program, rows, programs, num_stages=STAGES):
        value = wide(x + at, inside) + biases
        of_x = wide(gradient + at, inside)
        share = _gelu_share(value)
        slope = (value * value * (3 * CUBIC) + 1) * TWICE_ROOT
        of_x *= share * (1 + value * slope * (1 - share))
        tl.store(result + at, of_x.to(result.dtype.element_ty), mask=inside)
        of_bias += of_x
        if maxima is not None:
            largest = tl.maximum(largest, tl.abs(of_x), propagate_nan=PROPAGATE_NAN)
        at += programs.to(tl.int64) * width
    tl.store(partial + program * width + column, of_bias, mask=inside)
    if maxima is not None:
        part = program * tl.num_programs(1) + tl.program_id(1)
        tl.store(maxima + part, tl.max(tl.where(inside, magnitude(largest, result), 0.0), 0))


@triton.jit
def _gelu_share(x):
    """GELU(x) / x: (1 + tanh u) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return tl.sigmoid((x + x * x * x * CUBIC) * TWICE_ROOT)


@triton.jit
def _lookup_grads(result, tokens, gradient, width, BLOCK: tl.constexpr):
    """Add LOOKUP_COLUMNS of one token's gradient to its row of the table."""
    position = tl.program_id(0).to(tl.int64)
    column, inside = block_columns(width, BLOCK)
    row = tl.load(tokens + position).to(tl.int64)
    of_token = tl.load(gradient + position * width + column, mask=inside, other=0.0)
    target = result + row * width + column
    tl.atomic_add(target, of_token.to(tl.float32), mask=inside, sem="relaxed")


@triton.jit
def _cast_part(
    x,
    scale,
    result,
    transpose,
    num_rows,
    num_columns,
    TRANSPOSES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast one tile to fp8, and write it to the result and, if wanted, to the transpose."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row[:, None] * num_columns + column[None, :]
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(scale))
    values = (wide(x + at, inside) * factor).to(result.dtype.element_ty)
    tl.store(result + at, values, mask=inside)
    if TRANSPOSES:
        tl.store(
            transpose + column[:, None] * num_rows + row[None, :],
            tl.trans(values),
            mask=tl.trans(inside),
        )


@triton.jit
def _reduce_sums(
    partial,
    rows,
    last,
    maxima,
    scale,
    programs,
    width,
    num_rows,
    num_maxima,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the programs' sums for some columns; the first program also computes the scale."""
    which = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    first = partial + which * programs * width
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)
        here = (program < programs)[:, None] & inside[None, :]
        sums += tl.load(first + program[:, None] * width + column[None, :], mask=here, other=0.0)
    result = tl.sum(sums, 0)
    of_rows = tl.where(which < num_rows, width, 0)
    tl.store(rows + which * width + column, result, mask=column < of_rows)
    tl.store(last + column, result.to(last.dtype.element_ty), mask=(column >= of_rows) & inside)
    if maxima is not None:  # noqa: SIM102  (known when it is compiled, unlike what follows)
        if (tl.program_id(0) == 0) & (which == 0):
            item = tl.arange(0, ROWS * COLUMNS)
            seen = tl.zeros((ROWS * COLUMNS,), tl.float32)
            for start in range(0, num_maxima, ROWS * COLUMNS):
                seen = tl.maximum(
                    seen, tl.load(maxima + start + item, mask=start + item < num_maxima, other=0.0)
                )
            tl.store(scale, tl.maximum(tl.max(seen, 0), FP8_TINY) / FP8_MAX)


@triton.jit
def wide(at, inside):
    """The values at these pointers, in fp32; 0 outside."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def block_columns(width, BLOCK: tl.constexpr):
    """Numbers of the columns of this program's block, and which of them are columns of the row."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return column, column < width


@triton.jit
def magnitude(x, like):
    """|x|, rounded to the element type of the pointer `like`, in fp32; infinite if x is NaN."""
    size = tl.abs(x.to(like.dtype.element_ty).to(tl.float32))
    return tl.where(size == size, size, float("inf"))
