"""The study of ceilings, from what to run to what came of it. Needs no torch: the worker has it."""

from collections.abc import Iterator
from itertools import product

from cs336_systems.config import Device
from cs336_systems.studies.ceilings_records import (
    FP32_BYTES,
    STREAM_BYTES,
    CacheRow,
    CeilingsGrid,
    CeilingsRow,
    CeilingsStudy,
    Launch,
    LaunchCell,
    ProductCell,
    ReduceCell,
    Stream,
    StreamCell,
    Timing,
)
from cs336_systems.studies.records import Cell, CellStatus
from cs336_systems.studies.runner import Say, run_cells

MEASURE = "cs336_systems.studies.ceilings_cell:measure_rows"


def run_ceilings_study(grid: CeilingsGrid, say: Say | None = None, measure: str = MEASURE) -> CeilingsStudy:
    """Measure everything; a cell that fails says so."""
    rows, environment = run_cells(grid, [[*ceilings_cells(grid)]], measure, say, num_gpus=grid.world_size)
    return CeilingsStudy(
        grid=grid,
        products=tuple(row for row in rows if isinstance(row, ProductCell)),
        streams=tuple(row for row in rows if isinstance(row, StreamCell)),
        launches=tuple(row for row in rows if isinstance(row, LaunchCell)),
        reductions=tuple(row for row in rows if isinstance(row, ReduceCell)),
        cache_bytes=next((row.num_bytes for row in rows if isinstance(row, CacheRow)), None),
        environment=environment,
    )


def ceilings_cells(grid: CeilingsGrid) -> Iterator[Cell[CeilingsRow | CacheRow]]:
    """Products, passes over memory, launches, and all-reduces where there are several processes."""
    timing = Timing(status=CellStatus.OK)
    for precision, shape in product(dict.fromkeys(grid.precisions), dict.fromkeys(grid.shapes)):
        row = ProductCell(precision=precision, shape=shape, timing=timing)
        yield Cell(label=f"{precision} product {shape.label}", rows=(row,))
    for stream, num_bytes in product(Stream, sorted(set(grid.stream_bytes))):
        moved_bytes = num_bytes // STREAM_BYTES[stream] * STREAM_BYTES[stream]  # of whole elements
        passes = StreamCell(stream=stream, moved_bytes=moved_bytes, timing=timing)
        yield Cell(label=f"{stream} of {num_bytes / 2**20:g} MiB", rows=(passes,))
    for launch in Launch if grid.device is Device.CUDA else (Launch.EAGER,):
        caches = (CacheRow(),) if launch is Launch.EAGER else ()
        yield Cell(label=f"launches, {launch}", rows=(LaunchCell(launch=launch, timing=timing), *caches))
    if grid.world_size > 1:
        sizes = sorted({num_bytes // FP32_BYTES * FP32_BYTES for num_bytes in grid.stream_bytes})
        reductions = (ReduceCell(num_bytes=size, world_size=grid.world_size, timing=timing) for size in sizes)
        yield Cell(label=f"all-reduce of {grid.world_size} processes", rows=tuple(reductions))
