"""Ceilings of this machine, measured in this process: products, passes over memory, launches; all-reduce in others."""

import contextlib
import gc
import os
from collections.abc import Callable
from itertools import product

import torch

from cs336_systems.config import FP8_MULTIPLE, Device, Precision
from cs336_systems.measure.environment import environment
from cs336_systems.measure.failure import classify, describe
from cs336_systems.measure.nvml import visible_gpus
from cs336_systems.measure.precision import apply_math_mode
from cs336_systems.measure.progress import Say, say_nothing
from cs336_systems.record import Failure
from cs336_systems.studies.attention_records import CellStatus
from cs336_systems.studies.ceilings_ranks import measure_reductions
from cs336_systems.studies.ceilings_records import (
    ONLY_ON_GPUS,
    STREAM_BYTES,
    CeilingsGrid,
    CeilingsStudy,
    Launch,
    LaunchCell,
    Loops,
    ProductCell,
    ProductPrecision,
    Shape,
    Stream,
    StreamCell,
    Timing,
)
from cs336_systems.studies.ceilings_timing import Run, host_timer, launch_timer, measure, replayed, timed_loops
from cs336_systems.sweep.locks import exclusive, gpu_lock_path

DTYPES = {
    ProductPrecision.FP32: torch.float32,
    ProductPrecision.TF32: torch.float32,
    ProductPrecision.BF16: torch.bfloat16,
    ProductPrecision.FP16: torch.float16,
    ProductPrecision.FP8: torch.float8_e4m3fn,
}
LEAST_CAPABILITY = {
    ProductPrecision.TF32: (8, 0),
    ProductPrecision.BF16: (8, 0),
    ProductPrecision.FP8: (8, 9),
}
"""Compute capability from which NVIDIA GPUs multiply such numbers; older ones only seem to."""
LAUNCHES_IN_GRAPH = 1000


def run_ceilings_study(grid: CeilingsGrid, say: Say = say_nothing) -> CeilingsStudy:
    """Measure everything; a cell that fails says so. Raises LockedError where a sweep is at work on a GPU.

    `say` is told of each cell before it begins.
    """
    shapes = list(product(dict.fromkeys(grid.precisions), dict.fromkeys(grid.shapes)))
    passes = list(product(Stream, sorted(set(grid.stream_bytes))))
    total = len(shapes) + len(passes) + 2
    products: list[ProductCell] = []
    streams: list[StreamCell] = []
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which NVML names them
    gpus = visible_gpus()[: grid.world_size] if grid.device is Device.CUDA else ()
    with contextlib.ExitStack() as stack:
        for gpu in gpus:
            stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})"))
        for precision, shape in shapes:
            say(f"{precision} product {shape.label}", len(products), total)
            products.append(measure_product(grid, precision, shape))
        for stream, num_bytes in passes:
            say(f"{stream} of {num_bytes / 2**20:g} MiB", len(shapes) + len(streams), total)
            streams.append(measure_stream(grid, stream, num_bytes))
        say("launches", total - 2, total)
        launches = measure_launches(grid)
        _tidy(grid.device)  # the others need the memory
        say(f"all-reduce of {grid.world_size} process(es)", total - 1, total)
        return CeilingsStudy(
            grid=grid,
            products=tuple(products),
            streams=tuple(streams),
            launches=launches,
            reductions=measure_reductions(grid),
            cache_bytes=torch.cuda.get_device_properties().L2_cache_size if gpus else None,
            environment=environment(grid.device, gpus[0] if gpus else None),
        )


def measure_product(grid: CeilingsGrid, precision: ProductPrecision, shape: Shape) -> ProductCell:
    """Time one product of random matrices: zeros would take less power, and be faster. Never raises."""
    if reason := why_unavailable(grid.device, precision, shape):
        timing = Timing(status=CellStatus.UNAVAILABLE, failure=Failure(message=reason))
    else:
        apply_math_mode(Precision.TF32 if precision is ProductPrecision.TF32 else Precision.FP32)
        timing = _attempt(
            grid, f"{precision} {shape.label}", lambda: measure(make_product(grid, precision, shape), grid)
        )
    return ProductCell(precision=precision, shape=shape, timing=timing)


def why_unavailable(device: Device, precision: ProductPrecision, shape: Shape) -> str | None:
    """Why there is no such product on the device; None where there is one."""
    if device is Device.CPU:
        is_missing = precision in ONLY_ON_GPUS
        return f"{precision} products are measured on NVIDIA GPUs, got device cpu" if is_missing else None
    least = LEAST_CAPABILITY.get(precision, (0, 0))
    if (capability := torch.cuda.get_device_capability()) < least:
        return f"{precision} needs compute capability {_dotted(least)}, the device has {_dotted(capability)}"
    if precision is ProductPrecision.FP8 and (shape.inner % FP8_MULTIPLE or shape.columns % FP8_MULTIPLE):
        return f"fp8 needs inner and last sides that are multiples of {FP8_MULTIPLE}, got {shape.label}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def make_product(grid: CeilingsGrid, precision: ProductPrecision, shape: Shape) -> Run:
    """The product of a (rows, inner) matrix with the transpose of a (columns, inner) one, as of a linear layer."""
    generator = torch.Generator(grid.device.value).manual_seed(grid.seed)
    dtype = DTYPES[precision]
    drawn = torch.bfloat16 if precision is ProductPrecision.FP8 else dtype
    left, right = (
        torch.randn(rows, shape.inner, generator=generator, device=grid.device.value, dtype=drawn).to(dtype)
        for rows in (shape.rows, shape.columns)
    )
    if precision is ProductPrecision.FP8:
        one = torch.ones((), device=grid.device.value)
        return lambda: torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = torch.empty(shape.rows, shape.columns, device=grid.device.value, dtype=dtype)
    return lambda: torch.mm(left, right.t(), out=out)


def measure_stream(grid: CeilingsGrid, stream: Stream, num_bytes: int) -> StreamCell:
    """Time one pass that moves `num_bytes`, or the little less that is a whole number of elements. Never raises."""
    elements = num_bytes // STREAM_BYTES[stream]
    timing = _attempt(
        grid, f"{stream} of {num_bytes} bytes", lambda: measure(make_stream(grid, stream, elements), grid)
    )
    return StreamCell(stream=stream, moved_bytes=elements * STREAM_BYTES[stream], timing=timing)


def make_stream(grid: CeilingsGrid, stream: Stream, elements: int) -> Run:
    """One pass over so many elements in fp32."""
    generator = torch.Generator(grid.device.value).manual_seed(grid.seed)
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
        [target], [source], [moments[0]], [moments[1]], [], [step], lr=1e-3, beta1=0.9, beta2=0.999,
        weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def measure_launches(grid: CeilingsGrid) -> tuple[LaunchCell, ...]:
    """Time a kernel on one element, launched over and over, and as a CUDA graph where there is a GPU."""
    element = torch.zeros(1, device=grid.device.value)

    def run() -> object:
        return element.add_(1)

    def eager() -> Loops:
        return timed_loops(run, host_timer if grid.device is Device.CPU else launch_timer, grid)

    def graph() -> Loops:
        run()
        return timed_loops(replayed(run, LAUNCHES_IN_GRAPH), launch_timer, grid, runs_per_call=LAUNCHES_IN_GRAPH)

    ways = {Launch.EAGER: eager} if grid.device is Device.CPU else {Launch.EAGER: eager, Launch.GRAPH: graph}
    return tuple(
        LaunchCell(launch=launch, timing=_attempt(grid, f"launches, {launch}", way)) for launch, way in ways.items()
    )


def _attempt(grid: CeilingsGrid, where: str, measured: Callable[[], Loops]) -> Timing:
    """The loops, or the failure that took their place."""
    _tidy(grid.device)
    try:
        return Timing(status=CellStatus.OK, loops=measured())
    except Exception as error:  # whatever it is, the other cells have their chance
        status = classify(error)
        return Timing(status=CellStatus(status), failure=describe(error, status, where, grid.device))


def _tidy(device: Device) -> None:
    """Give back the memory of the last cell."""
    gc.collect()
    if device is Device.CUDA:
        torch.cuda.empty_cache()
