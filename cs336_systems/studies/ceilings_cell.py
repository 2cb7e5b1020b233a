"""One cell of the ceilings: a matmul, a pass over memory, a launch, a kernel of a step, or
collectives of processes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from time import perf_counter_ns

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ..config import FP8_MULTIPLE, Device, ModelConfig, Phase, Precision, RunConfig
from ..costs.communication import Collective
from ..costs.shards import FP32_BYTES
from ..costs.tape import MATMULS_OF, Form, Pass
from ..costs.time import host_calls
from ..measure.failure import classify, describe
from ..measure.nvml import visible_gpus
from ..measure.precision import apply_math_mode
from ..measure.run import measure as measure_run
from ..parallel.collectives import Rank, all_gather, devices_of, group_of, reduce_scatter
from ..parallel.exchange import of_all_ranks, shared_rows
from ..record import Failure, Status
from ..sweep.ranks import first_failed, run_ranks
from .ceilings_records import (
    D_HEAD,
    HEADS,
    MASK_SIDE,
    MIN_TIME_S,
    ONLY_ON_GPUS,
    PASS_BYTES,
    QUEUED_BYTES,
    STREAM_BYTES,
    CacheRow,
    CeilingsGrid,
    CollectiveCell,
    KernelCell,
    Launch,
    LaunchCell,
    Loops,
    PassCell,
    ProductCell,
    ProductPrecision,
    Shape,
    Stream,
    StreamCell,
)
from .cell import DTYPES, make_generator, normal
from .records import Row

GRAPH_BELOW_S = 1e-3
"""A run shorter than this is repeated within a CUDA graph; otherwise its launch may take longer
than the run itself.

The host needs 6 to 10 us for one kernel, and up to 0.3 ms for a backward pass of autograd.
"""
GRAPH_S = 0.01
MAX_GRAPH_RUNS = 100
"""Most runs in one graph; a graph has as many as take GRAPH_S."""
PROBES = 3
MAX_GROWTH = 100
"""Largest factor from one number of repetitions to the next, because a first measured time may
be far too short.
"""
MARGIN = 1.1
"""The next loop is planned to take this many times the wanted time, so that it does not narrowly
miss it again.
"""

Run = Callable[[], object]
Timer = Callable[[Run, int], float]
"""Time in seconds of a number of calls, until everything that they launched is done."""


def host_timer(run: Run, count: int, synchronize: Callable[[], None] = lambda: None) -> float:
    """Time `count` calls by the host's clock."""
    synchronize()
    start = perf_counter_ns()
    for _ in range(count):
        run()
    synchronize()
    return (perf_counter_ns() - start) / 1e9


launch_timer = partial(host_timer, synchronize=torch.cuda.synchronize)
"""Time `count` calls by the host's clock, from an idle device to an idle device.

Where the host is slower than the device, this is the time of the launches."""


def device_timer(run: Run, count: int) -> float:
    """Time `count` calls by CUDA events around all of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(run: Run, grid: CeilingsGrid, agree: Callable[[float], float] = float) -> Loops:
    """Time `run` on the grid's device. Raises whatever `run` raises.

    Where several processes run it together, `agree` makes one time of theirs, so that all decide
    alike.
    """

    def timer(run: Run, count: int) -> float:
        return agree((host_timer if grid.device is Device.CPU else device_timer)(run, count))

    if grid.device is Device.CPU:
        return timed_loops(run, timer, grid)
    timer(run, 1)  # libraries load, memory is allocated
    time_s = min(timer(run, 1) for _ in range(PROBES))
    if time_s >= GRAPH_BELOW_S:
        return timed_loops(run, timer, grid)
    runs = min(MAX_GRAPH_RUNS, math.ceil(GRAPH_S / time_s))
    return timed_loops(replayed(run, runs), timer, grid, runs_per_call=runs)


def replayed(run: Run, count: int) -> Run:
    """A function that launches `count` runs at once, as a CUDA graph. `run` must have been called
    before.

    The function keeps `run` alive, and so all memory that `run` uses, because a graph stores only
    addresses.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, _captured: Run) -> None:
    graph.replay()


def timed_loops(run: Run, timer: Timer, grid: CeilingsGrid, runs_per_call: int = 1) -> Loops:
    """Find the number of calls that takes `grid.loop_s`, which also warms up, then time
    `grid.loops` such loops.

    `runs_per_call` is the number of repetitions in one call of `run`, such as those of a CUDA
    graph.
    """
    timer(run, 1)
    count, elapsed_s = 1, timer(run, 1)
    while True:
        if elapsed_s >= grid.loop_s:
            # a second loop must take as long too, because an interruption can make one short loop
            # look long
            first_s = timer(run, count)
            if first_s >= grid.loop_s:
                break
            elapsed_s = first_s
        count = next_count(count, elapsed_s, grid.loop_s)
        elapsed_s = timer(run, count)
    others_s = (timer(run, count) for _ in range(grid.loops - 1))
    return Loops(count=count * runs_per_call, times_s=(first_s, *others_s))


def next_count(count: int, elapsed_s: float, wanted_s: float) -> int:
    """A larger number of repetitions, which should take `wanted_s`, given that `count` took the
    shorter `elapsed_s`.
    """
    most = MAX_GROWTH * count
    guess = (
        most
        if elapsed_s * MAX_GROWTH < wanted_s
        else math.ceil(MARGIN * count * wanted_s / elapsed_s)
    )
    return max(count + 1, min(most, guess))


PATIENCE_S = 120.0
"""How long a process waits for the others before it fails."""
LOOP_SHARE = 0.5
"""Share of the grid's least time of a loop that suffices here: there are many cells, and all
processes repeat.
"""
NO_ACCESS = "the GPUs cannot write to each other's memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one of the processes sends: the loops of each row, as it has timed them."""

    status: Status = Status.OK
    failure: Failure | None = None
    loops: tuple[Loops, ...] = ()


def measure_collectives(grid: CeilingsGrid, rows: Sequence[CollectiveCell]) -> list[CollectiveCell]:
    """Time collectives of one kind, by the slowest process; if a process fails, all rows get the
    failure.
    """
    assert not torch.cuda.is_initialized(), "forked processes could not use CUDA"
    gpus = [gpu.uuid for gpu in visible_gpus()] if grid.device is Device.CUDA else []
    ranks = rows[0].world_size
    devices = devices_of(gpus[:ranks], all_of_them=True)
    first, *_ = ends = run_ranks(partial(_serve, grid, rows), _Answer, ranks, devices, PATIENCE_S)
    if (failed := first_failed(ends)) is not None:
        return [row.failed(failed.status, failed.failure) for row in rows]
    assert first.answer is not None
    return [row.with_loops(loops) for row, loops in zip(rows, first.answer.loops, strict=True)]


def _serve(grid: CeilingsGrid, rows: Sequence[CollectiveCell], rank: Rank) -> _Answer:
    """What one process does."""
    kind = rows[0].collective
    # the processes share the cores, and OpenMP's threads do not survive a fork
    torch.set_num_threads(1)
    try:
        with group_of(rank, grid.device):
            pairs = permutations(range(rank.ranks), 2) if kind is Collective.PUSH else ()
            # alike in all processes
            if not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
                return _Answer(status=Status.UNAVAILABLE, failure=Failure(message=NO_ACCESS))
            brief, agree = (
                replace(grid, loop_s=LOOP_SHARE * grid.loop_s),
                partial(_agreed, grid.device),
            )
            made = partial(make_collective, grid.device, kind)
            return _Answer(loops=tuple(measure(made(row.num_bytes), brief, agree) for row in rows))
    except Exception as error:
        status = classify(error)
        return _Answer(status=status, failure=describe(error, status, "collectives", grid.device))


def make_collective(device: Device, collective: Collective, num_bytes: int) -> Callable[[], object]:
    """The collective of a tensor of so many bytes among the processes of the group, of which
    each has its part.
    """
    whole = torch.rand(num_bytes // FP32_BYTES, device=device.value)
    greatest = dist.ReduceOp.MAX  # repeated sums would overflow
    if collective is Collective.ALL_REDUCE:
        return lambda: dist.all_reduce(whole, op=greatest)
    if collective is Collective.BROADCAST:
        return lambda: dist.broadcast(whole, src=0)
    if collective is Collective.PUSH:
        here = dist.get_rank()
        rows = [
            rank_rows for [rank_rows] in of_all_ranks([shared_rows(whole, dist.get_world_size())])
        ]
        # the function keeps this rank's rows alive, because the other ranks write to them
        return lambda: [
            rank_rows[here, : len(whole)].copy_(whole, non_blocking=True)
            for rank, rank_rows in enumerate(rows)
            if rank != here
        ]
    part = torch.rand(len(whole) // dist.get_world_size(), device=device.value)
    if collective is Collective.ALL_GATHER:
        return lambda: all_gather(whole, part)
    return lambda: reduce_scatter(part, whole, op=greatest)


def _agreed(device: Device, time_s: float) -> float:
    """The longest of the processes' times; none goes on before all have measured theirs."""
    longest = torch.tensor(time_s, device=device.value)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


PRODUCT_DTYPES = DTYPES | {ProductPrecision.FP8: torch.float8_e4m3fn}
FP8_CAPABILITY = (8, 9)
"""Compute capability from which NVIDIA GPUs multiply fp8 in hardware."""
LAUNCHES_IN_GRAPH = 1000
LOOPS, LOOP_S = 3, 0.01
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
    measured_steps=40,
)
"""A training step with the operations of `small`, each of which a GPU ends long before the host
launches the next.
"""


def measure_rows(grid: CeilingsGrid, rows: Sequence[Row]) -> list[Row]:
    """Each row with its timing; after launches on a GPU, also its cache. Raises whatever running
    them raises.
    """
    collectives = [row for row in rows if isinstance(row, CollectiveCell)]
    if collectives:
        return [*measure_collectives(grid, collectives)]
    if grid.device is Device.CPU:  # measured in rounds
        grid = replace(grid, loops=1)
    measured: list[Row] = []
    for row in rows:
        if isinstance(row, ProductCell):
            measured.append(measure_product(grid, row))
        elif isinstance(row, StreamCell):
            elements = row.moved_bytes // STREAM_BYTES[row.stream]
            measured.append(row.with_loops(measure(make_stream(grid, row.stream, elements), grid)))
        elif isinstance(row, KernelCell):
            measured.append(measure_kernel(grid, row))
        elif isinstance(row, PassCell):
            measured.append(row.with_loops(measure(make_pass(grid, row), _brief(grid))))
        elif isinstance(row, LaunchCell):
            measured.append(row.with_loops(measure_launch(grid, row.launch)))
            if grid.device is Device.CUDA and row.launch is Launch.EAGER:
                measured.append(CacheRow(torch.cuda.get_device_properties().L2_cache_size))
    return measured


def measure_product(grid: CeilingsGrid, row: ProductCell) -> ProductCell:
    """Time one matmul of random matrices; zeros would take less power and be faster."""
    if reason := why_unavailable(grid.device, row.precision, row.shape):
        return row.failed(Status.UNAVAILABLE, Failure(message=reason))
    apply_math_mode(Precision.TF32 if row.precision is ProductPrecision.TF32 else Precision.FP32)
    return row.with_loops(measure(make_product(grid, row.precision, row.shape), grid))


def why_unavailable(device: Device, precision: ProductPrecision, shape: Shape) -> str | None:
    """Why the device has no such matmul; None if it has."""
    if device is Device.CPU:
        is_missing = precision in ONLY_ON_GPUS
        return (
            f"{precision} products are measured on NVIDIA GPUs, got device cpu"
            if is_missing
            else None
        )
    if precision is not ProductPrecision.FP8:
        return None
    if (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        return f"fp8 needs compute capability 8.9, the device has {'.'.join(map(str, capability))}"
    if shape.inner % FP8_MULTIPLE or shape.columns % FP8_MULTIPLE:
        return (
            f"fp8 needs inner and last sides that are multiples of {FP8_MULTIPLE}, got "
            f"{shape.label}"
        )
    return None


def make_product(grid: CeilingsGrid, precision: ProductPrecision, shape: Shape) -> Run:
    """The matmul of a (rows, inner) matrix with the transpose of a (columns, inner) one, as in a
    linear layer.
    """
    dtype, sides = (
        PRODUCT_DTYPES[precision],
        [(shape.rows, shape.inner), (shape.columns, shape.inner)],
    )
    drawn = normal(
        make_generator(grid), sides, torch.bfloat16 if precision is ProductPrecision.FP8 else dtype
    )
    left, right = (each.to(dtype) for each in drawn)
    if precision is ProductPrecision.FP8:
        one = torch.ones((), device=grid.device.value)
        return lambda: torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = torch.empty(shape.rows, shape.columns, device=grid.device.value, dtype=dtype)
    return lambda: torch.mm(left, right.t(), out=out)


def make_stream(grid: CeilingsGrid, stream: Stream, elements: int) -> Run:
    """One pass over this many elements in fp32."""
    generator = make_generator(grid)
    source = torch.rand(elements, generator=generator, device=grid.device.value)
    if stream is Stream.READ:
        return source.sum
    target = torch.empty_like(source)
    if stream is Stream.COPY:
        return lambda: target.copy_(source)
    moments = [torch.zeros_like(source) for _ in range(2)]
    step = torch.ones((), device=grid.device.value)
    target.copy_(source)
    return lambda: torch._fused_adamw_(
        [target],
        [source],
        [moments[0]],
        [moments[1]],
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


def measure_launch(grid: CeilingsGrid, launch: Launch) -> Loops:
    """Time launches of a kernel on one element, one by one or in a CUDA graph; of copies; or
    calls of a narrow step.
    """
    if launch is Launch.STEP:
        return time_calls(replace(NARROW, device=grid.device, seed=grid.seed))
    if launch is Launch.QUEUED:
        elements = QUEUED_BYTES // STREAM_BYTES[Stream.COPY]
        return timed_loops(make_stream(grid, Stream.COPY, elements), device_timer, grid)
    element = torch.zeros(1, device=grid.device.value)

    def run() -> object:
        return element.add_(1)

    if launch is Launch.EAGER:
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
    apply_math_mode(Precision.TF32 if row.precision is Precision.TF32 else Precision.FP32)
    brief = _brief(grid)
    if row.form not in MATMULS_OF:
        return row.with_loops(measure(make_matmul(grid, row), brief))
    forward = measure(make_fused_attention(grid, row, with_backward=False), brief)
    if row.form is Form.ATTENTION:
        return row.with_loops(forward)
    both = measure(make_fused_attention(grid, row, with_backward=True), brief)
    times_s = (max(MIN_TIME_S, time_s - both.count * forward.median_s) for time_s in both.times_s)
    return row.with_loops(replace(both, times_s=tuple(times_s)))


def _brief(grid: CeilingsGrid) -> CeilingsGrid:
    """The grid with the loops of kernels of steps."""
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
    (made,) = normal(make_generator(grid), [shape], DTYPES[row.precision])
    return made.transpose(-2, -1) if is_transposed else made


def make_fused_attention(grid: CeilingsGrid, row: KernelCell, *, with_backward: bool) -> Run:
    """Causal attention of all heads by the kernel that PyTorch chooses."""
    shape = (1, row.batch, row.rows, row.inner)
    q, k, v, upstream = normal(make_generator(grid), [shape] * 4, DTYPES[row.precision])
    if not with_backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    inputs = tuple(each.requires_grad_() for each in (q, k, v))
    return lambda: torch.autograd.grad(
        F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, upstream
    )


def make_pass(grid: CeilingsGrid, row: PassCell) -> Run:
    """One pass over this many elements."""
    generator = make_generator(grid)
    source = torch.rand(
        row.moved_bytes // PASS_BYTES[row.how], generator=generator, device=grid.device.value
    )
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
