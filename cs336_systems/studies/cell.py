"""The process that measures the cells of a study, one by one, and the inputs that it makes for them."""

import contextlib
import gc
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cs336_systems.config import Device, Precision
from cs336_systems.measure.environment import environment
from cs336_systems.measure.failure import classify, describe
from cs336_systems.measure.nvml import visible_gpus
from cs336_systems.studies.records import Cell, CellStatus, Grid, RowT, StudyT

Measure: TypeAlias = Callable[[Any, tuple[RowT, ...]], Sequence[RowT]]
"""Takes a grid and the rows of one of its cells, and returns them with what it measured. Raises what running raises."""

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What goes into one pass: the inputs of forward, and the gradient of its output."""

    forward: tuple[Tensor, ...]
    upstream: Tensor


def make_generator(grid: Grid[RowT, StudyT]) -> torch.Generator:
    """Random numbers on the grid's device, the same for every cell."""
    return torch.Generator(grid.device.value).manual_seed(grid.seed)


def make_inputs(shapes: Sequence[tuple[int, ...]], precision: Precision, generator: torch.Generator) -> Inputs:
    """Normally distributed inputs of these shapes; the output is taken to have the first shape."""
    *inputs, upstream = (
        torch.randn(shape, generator=generator, device=generator.device, dtype=DTYPES[precision])
        for shape in (*shapes, shapes[0])
    )
    return Inputs(tuple(tensor.requires_grad_() for tensor in inputs), upstream)


def serve(connection: Connection, grid: Grid[RowT, StudyT]) -> None:
    """Measure the cells that come over the connection until it is closed."""
    function = pkgutil.resolve_name(grid.MEASURE)
    gpu = next(iter(visible_gpus()), None) if grid.device is Device.CUDA else None
    gc.disable()  # a collection during a timed pass would lengthen its time
    with contextlib.suppress(EOFError):
        while True:
            rows, is_fit = attempt(grid, connection.recv(), function)
            connection.send((rows, is_fit, environment(grid.device, gpu)))


def attempt(grid: Grid[RowT, StudyT], cell: Cell[RowT], measure: Measure[RowT]) -> tuple[tuple[RowT, ...], bool]:
    """The rows that `measure` returns, or rows of its failure; and whether this process is fit for another cell."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the next cell may need the memory that the last one left in the cache
    try:
        return tuple(measure(grid, cell.rows)) if cell.rows else (), True
    except Exception as error:
        status = classify(error)
        return cell.failed(CellStatus(status), describe(error, status, cell.label, grid.device)), False
