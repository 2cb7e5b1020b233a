"""The process that measures the cells of a study, one by one, and what its measurements have in
common.
"""

import contextlib
import gc
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import Device, Precision
from ..measure.environment import environment
from ..measure.failure import classify, describe
from ..measure.nvml import visible_gpus
from .records import Answer, Cell, Grid, RowT, StudyT

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


class OperationObserver(TorchDispatchMode):
    """Within its context, calls `observe` after each operation, below autograd and autocast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks here whether torch.compile must be kept away from code under this mode."""
        return False  # nothing here is compiled; True would import torch.compile, which takes 2 s

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation and observe it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.observe(func, (*args, *kwargs.values()), output)
        return output

    def observe(
        self, func: OpOverload[..., object], operands: Sequence[object], output: object
    ) -> None:
        """Take note of an operation, its operands and its result."""
        raise NotImplementedError


def make_generator(grid: Grid[RowT, StudyT]) -> torch.Generator:
    """A random number generator on the grid's device, which gives the same numbers for every
    cell.
    """
    return torch.Generator(grid.device.value).manual_seed(grid.seed)


def normal(
    generator: torch.Generator, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Normally distributed tensors of these shapes, on the generator's device."""
    return (
        torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
        for shape in shapes
    )


def serve(connection: Connection, grid: Grid[RowT, StudyT]) -> None:
    """Send the environment, then measure the cells that come over the connection until it is
    closed.
    """
    function = pkgutil.resolve_name(grid.MEASURE)
    gpu = next(iter(visible_gpus()), None) if grid.device is Device.CUDA else None
    connection.send(environment(grid.device, gpu))
    gc.disable()  # a collection during a timed pass would lengthen its time
    num_modules = 0
    with contextlib.suppress(EOFError):
        while True:
            answer = attempt(grid, connection.recv(), function)
            if len(sys.modules) > num_modules:
                # frozen, because collecting all of PyTorch's objects before each cell takes longer
                # than some cells
                gc.collect()
                gc.freeze()
                num_modules = len(sys.modules)
            connection.send(answer)


def attempt(
    grid: Grid[RowT, StudyT],
    cell: Cell[RowT],
    measure: Callable[[Any, tuple[RowT, ...]], Sequence[RowT]],
) -> Answer[RowT]:
    """The rows of the cell as `measure` returns them, given the grid, or rows of its failure, after
    which this process is not fit for another cell.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        # the next cell may need the memory that the last one left in the cache
        torch.cuda.empty_cache()
    try:
        return Answer(tuple(measure(grid, cell.rows)), is_fit=True)
    except Exception as error:
        status = classify(error)
        failure = describe(error, status, cell.label, grid.device)
        return Answer(cell.failed(status, failure), is_fit=False)
