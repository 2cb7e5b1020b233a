"""One cell of the ceilings: a matmul, a pass over memory, a launch, or a kernel of a step."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ..config import (
    FP8_MULTIPLE,
    Attention,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Phase,
    Precision,
    RunConfig,
)
from ..costs.kernels import ProductPrecision
from ..costs.tape import MATMULS_OF, Form, Pass
from ..costs.time import host_calls
from ..measure.precision import apply_math_mode
from ..measure.run import measure as measure_run
from ..record import Failure, Status
from .ceilings_collectives import measure_collectives
from .ceilings_records import D_HEAD, HEADS, MASK_SIDE, ONLY_ON_GPUS, PASS_BYTES, CeilingsGrid
from .ceilings_rows import (
    MIN_TIME_S,
    QUEUED_BYTES,
    STREAM_BYTES,
    CacheRow,
    CollectiveCell,
    KernelCell,
    LaunchCell,
    LaunchKind,
    Loops,
    PassCell,
    ProductCell,
    Shape,
    Stream,
    StreamCell,
)
from .cell import DTYPES, make_generator, normal
from .loops import Run, device_timer, host_timer, launch_timer, measure, replayed, timed_loops
from .records import StudyRow

PRODUCT_DTYPES = {ProductPrecision(name): dtype for name, dtype in DTYPES.items()}
FP8_CAPABILITY = (8, 9)
"""Compute capability from which NVIDIA GPUs multiply fp8 in hardware."""
LAUNCHES_IN_GRAPH = 1000
LOOPS, LOOP_S = 3, 0.005
"""Number and least time of the loops of each kernel of a step: few and short, because there are
hundreds of them.
"""
NARROW = RunConfig(
    size="narrow",
    model=ModelConfig(
        vocab_size=256, context_length=16, d_model=64, d_ff=128, num_layers=12, num_heads=4
    ),
    batch_size=1,
    warmup_steps=5,
    measured_steps=25,
)
"""A training step with the operations of `small`, each of which a GPU ends long before the host
launches the next.
"""
NARROW_STEPS = {
    LaunchKind.STEP: NARROW,
    LaunchKind.MIXED_STEP: replace(
        NARROW,
        model=replace(NARROW.model, attention=Attention.SDPA),
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
    ),
    LaunchKind.INFERENCE: replace(NARROW, mode=Mode.INFERENCE),
}


def measure_rows(grid: CeilingsGrid, rows: Sequence[StudyRow]) -> list[StudyRow]:
    """Each row with its timing; after launches on a GPU, also the size of its cache. Raises
    whatever running them raises.
    """
    collectives = [row for row in rows if isinstance(row, CollectiveCell)]
    if collectives:
        return [*measure_collectives(grid, collectives)]
    if grid.device is Device.CPU:  # measured in rounds
        grid = replace(grid, loops=1)
    [row] = rows
    if isinstance(row, ProductCell):
        if reason := why_unavailable(grid.device, row.precision, row.shape):
            return [row.failed(Status.UNAVAILABLE, Failure(message=reason))]
        _apply(row.precision)
        return [row.with_loops(measure(make_product(grid, row.precision, row.shape), grid))]
    if isinstance(row, KernelCell):
        return [measure_kernel(grid, row)]
    if isinstance(row, PassCell):
        return [row.with_loops(measure(make_pass(grid, row), _brief(grid)))]
    if isinstance(row, StreamCell):
        elements = row.moved_bytes // STREAM_BYTES[row.stream]
        return [row.with_loops(measure(make_stream(grid, row.stream, elements), grid))]
    assert isinstance(row, LaunchCell)
    measured: list[StudyRow] = [row.with_loops(measure_launch(grid, row.launch))]
    if grid.device is Device.CUDA and row.launch is LaunchKind.EAGER:
        measured.append(CacheRow(torch.cuda.get_device_properties().L2_cache_size))
    return measured


def why_unavailable(device: Device, precision: ProductPrecision, shape: Shape) -> str | None:
    """Why the device has no such matmul; None if it has."""
    if device is Device.CPU:
        if precision in ONLY_ON_GPUS:
            return f"{precision} products are measured on NVIDIA GPUs, got device cpu"
        return None
    if precision is not ProductPrecision.FP8:
        return None
    major, minor = capability = torch.cuda.get_device_capability()
    if capability < FP8_CAPABILITY:
        return f"fp8 needs compute capability 8.9, the device has {major}.{minor}"
    if shape.inner % FP8_MULTIPLE or shape.columns % FP8_MULTIPLE:
        return (
            f"fp8 needs inner and last sides that are multiples of {FP8_MULTIPLE}, got "
            f"{shape.label}"
        )
    return None


def make_product(grid: CeilingsGrid, precision: ProductPrecision, shape: Shape) -> Run:
    """The matmul of a (rows, inner) matrix with the transpose of a (columns, inner) one, as in a
    linear layer.

    Both are random; zeros would take less power and be faster.
    """
    if precision is ProductPrecision.FP8:
        return _fp8_product(grid, shape)
    dtype = PRODUCT_DTYPES[precision]
    sides = [(shape.rows, shape.inner), (shape.columns, shape.inner)]
    left, right = normal(make_generator(grid), sides, dtype)
    out = torch.empty(shape.rows, shape.columns, device=grid.device.value, dtype=dtype)
    return lambda: torch.mm(left, right.t(), out=out)


def _fp8_product(grid: CeilingsGrid, shape: Shape, has_fast_sums: bool = True) -> Run:
    """The same in fp8, whose sums are in fp32 or, faster, with fewer bits."""
    sides = [(shape.rows, shape.inner), (shape.columns, shape.inner)]
    # random numbers cannot be drawn in fp8
    drawn = normal(make_generator(grid), sides, torch.bfloat16)
    left, right = (matrix.to(torch.float8_e4m3fn) for matrix in drawn)
    one = torch.ones((), device=grid.device.value)
    return lambda: torch._scaled_mm(
        left,
        right.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.bfloat16,
        use_fast_accum=has_fast_sums,
    )


def _uniform(grid: CeilingsGrid, elements: int) -> Tensor:
    """Random numbers from 0 to 1 in fp32."""
    return torch.rand(elements, generator=make_generator(grid), device=grid.device.value)


def make_stream(grid: CeilingsGrid, stream: Stream, elements: int) -> Run:
    """One pass over this many elements in fp32."""
    source = _uniform(grid, elements)
    if stream is Stream.READ:
        return source.sum
    target = torch.empty_like(source)
    if stream is Stream.COPY:
        return lambda: target.copy_(source)
    mean, square = torch.zeros_like(source), torch.zeros_like(source)
    step = torch.ones((), device=grid.device.value)
    target.copy_(source)
    return lambda: torch._fused_adamw_(
        [target],
        [source],
        [mean],
        [square],
        [],
        [step],
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.01,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def measure_launch(grid: CeilingsGrid, launch: LaunchKind) -> Loops:
    """Time launches of a kernel on one element, one by one or in a CUDA graph; of copies; or
    calls of a narrow step.
    """
    if launch in NARROW_STEPS:
        return time_calls(replace(NARROW_STEPS[launch], device=grid.device, seed=grid.seed))
    if launch is LaunchKind.QUEUED:
        elements = QUEUED_BYTES // STREAM_BYTES[Stream.COPY]
        return timed_loops(make_stream(grid, Stream.COPY, elements), device_timer, grid)
    element = torch.zeros(1, device=grid.device.value)

    def run() -> object:
        """Launch one kernel on a tensor of one element."""
        return element.add_(1)

    if launch is LaunchKind.EAGER:
        return timed_loops(run, host_timer if grid.device is Device.CPU else launch_timer, grid)
    run()
    return timed_loops(
        replayed(run, LAUNCHES_IN_GRAPH), launch_timer, grid, runs_per_call=LAUNCHES_IN_GRAPH
    )


def time_calls(config: RunConfig) -> Loops:
    """The measured steps of a run as loops of the calls that the host makes in one; raise
    RuntimeError if it failed.
    """
    record = measure_run(config)
    step = record.measurement(Phase.STEP)
    if step is None:
        reason = "it has no times" if record.failure is None else record.failure.message
        raise RuntimeError(f"the step whose calls are timed did not run: {reason}")
    return Loops(count=host_calls(config), times_s=step.times_s)


def measure_kernel(grid: CeilingsGrid, row: KernelCell) -> KernelCell:
    """Time one matmul or one kernel of attention; its backward is the time of both passes less
    that of forward.
    """
    shape = Shape(rows=row.rows, inner=row.inner, columns=row.columns)
    if reason := why_unavailable(grid.device, row.precision, shape):
        return row.failed(Status.UNAVAILABLE, Failure(message=reason))
    _apply(row.precision)
    brief = _brief(grid)
    if row.precision is ProductPrecision.FP8:
        return row.with_loops(measure(_fp8_product(grid, shape, row.form is Form.FORWARD), brief))
    if row.form not in MATMULS_OF:
        return row.with_loops(measure(make_matmul(grid, row), brief))
    forward = measure(make_fused_attention(grid, row, with_backward=False), brief)
    if row.form is Form.ATTENTION:
        return row.with_loops(forward)
    both = measure(make_fused_attention(grid, row, with_backward=True), brief)
    times_s = (max(MIN_TIME_S, time_s - both.count * forward.median_s) for time_s in both.times_s)
    return row.with_loops(replace(both, times_s=tuple(times_s)))


def _apply(precision: ProductPrecision) -> None:
    """Let fp32 matmuls run in TF32, if that is the precision."""
    is_tf32 = precision is ProductPrecision.TF32
    apply_math_mode(Precision.TF32 if is_tf32 else Precision.FP32)


def _brief(grid: CeilingsGrid) -> CeilingsGrid:
    """The grid with fewer and shorter loops, for the hundreds of kernels of steps."""
    return replace(grid, loops=LOOPS, loop_s=min(grid.loop_s, LOOP_S))


def make_matmul(grid: CeilingsGrid, row: KernelCell) -> Run:
    """The matmul of random matrices, batched if the row is."""
    left = _random(grid, row, row.rows, row.inner, is_transposed=row.form is Form.WEIGHT)
    right = _random(grid, row, row.inner, row.columns, is_transposed=row.form is Form.FORWARD)
    return lambda: left @ right


def _random(
    grid: CeilingsGrid, row: KernelCell, rows: int, columns: int, is_transposed: bool
) -> Tensor:
    """Random matrices of this shape, row-major, or column-major if `is_transposed`."""
    sides = (columns, rows) if is_transposed else (rows, columns)
    shape = sides if row.batch == 1 else (row.batch, *sides)
    (matrices,) = normal(make_generator(grid), [shape], PRODUCT_DTYPES[row.precision])
    return matrices.transpose(-2, -1) if is_transposed else matrices


def make_fused_attention(grid: CeilingsGrid, row: KernelCell, *, with_backward: bool) -> Run:
    """Causal attention of all heads by the kernel that PyTorch chooses."""
    queries = (1, row.batch, row.rows, row.inner)
    keys = (1, row.batch // row.queries_per_key, row.rows, row.inner)
    shapes = [queries, keys, keys, queries]
    q, k, v, upstream = normal(make_generator(grid), shapes, PRODUCT_DTYPES[row.precision])
    is_grouped = row.queries_per_key > 1

    def attend() -> Tensor:
        """The values that each query attends to."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

    if not with_backward:
        return attend
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    return lambda: torch.autograd.grad(attend(), inputs, upstream)


def make_pass(grid: CeilingsGrid, row: PassCell) -> Run:
    """One pass over memory as a step makes them: a copy, a cast to fp32, a transposition, a mask or
    a softmax.
    """
    source = _uniform(grid, row.moved_bytes // PASS_BYTES[row.how])
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
