"""The rows of a study of ceilings: what is timed in a cell, and the loops in which it was timed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean, median, stdev
from typing import Annotated, Self, TypeVar

import msgspec

from ..analysis.warnings import LOOPS, timing_warnings
from ..costs.communication import Collective
from ..costs.kernels import FACTOR_BYTES, ProductPrecision
from ..costs.shards import FP32_BYTES
from ..costs.tape import RESULT_BYTES, Form, Pass
from ..record import MAX_TIME_S, Count, Failure, RunWarning, Status
from .records import AT_LEAST_ONE, StudyRow

MIN_TIME_S = 1e-9
MAX_SIDE = 2**20
"""Most rows or columns of a matrix, so that a typing error does not ask for a petabyte."""
QUEUED_BYTES = 2**28
"""Bytes moved by the copies that show the gap between two kernels: each takes that much longer
than in a CUDA graph.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """Raw times of loops of `count` repetitions each. Statistics are derived from them, never
    stored.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    times_s: Annotated[
        tuple[Annotated[float, msgspec.Meta(ge=MIN_TIME_S, le=MAX_TIME_S)], ...], AT_LEAST_ONE
    ]

    @property
    def median_s(self) -> float:
        """Time of one repetition in the median loop, in seconds."""
        return median(self.times_s) / self.count

    @property
    def stdev_s(self) -> float | None:
        """Sample standard deviation over the loops of the time of one repetition; None for a
        single loop.
        """
        return stdev(self.times_s) / self.count if len(self.times_s) > 1 else None

    @property
    def cv(self) -> float | None:
        """Standard deviation of the loops over their mean; None for a single loop."""
        return stdev(self.times_s) / fmean(self.times_s) if len(self.times_s) > 1 else None

    @property
    def spread(self) -> float:
        """Slowest loop over fastest, minus 1."""
        return max(self.times_s) / min(self.times_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Loops of one cell, or its failure."""

    status: Status
    failure: Failure | None = None
    loops: Loops | None = None

    @property
    def time_s(self) -> float | None:
        """Time of one repetition; None unless status is ok."""
        return None if self.loops is None else self.loops.median_s

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """Reasons to doubt the time."""
        return () if self.loops is None else timing_warnings(self.loops.times_s, repeated=LOOPS)

    def rate(self, amount: float) -> float | None:
        """`amount` per repetition, as a rate per second; None without a time."""
        return None if self.loops is None else amount / self.loops.median_s


UNTIMED = Timing(status=Status.OK)
"""Of cells that are yet to be measured."""
KeyT = TypeVar("KeyT")


def by_bytes(cells: Iterable[tuple[KeyT, int, Timing]]) -> dict[KeyT, dict[int, float]]:
    """Times in seconds by key and number of bytes, of those of the cells (key, bytes and timing)
    that have a time.
    """
    times_s: dict[KeyT, dict[int, float]] = {}
    for key, num_bytes, timing in cells:
        if timing.time_s is not None:
            times_s.setdefault(key, {})[num_bytes] = timing.time_s
    return times_s


class TimedRow(StudyRow):
    """A cell, which is a data class with what is timed, and its timing."""

    __slots__ = ()
    timing: Timing

    def failed(self, status: Status, failure: Failure) -> Self:
        """The row with the failure in place of a measurement."""
        timing = Timing(status=status, failure=failure)
        return replace(self, timing=timing)  # type: ignore[type-var]

    def with_loops(self, loops: Loops) -> Self:
        """The row with the times of these loops."""
        return replace(self, timing=Timing(status=Status.OK, loops=loops))  # type: ignore[type-var]


class Stream(StrEnum):
    """A pass over memory: a copy, a sum (which only reads), or PyTorch's fused AdamW on one flat
    tensor.
    """

    COPY = "copy"
    READ = "read"
    ADAMW = "adamw"


STREAM_BYTES = {Stream.COPY: 2 * FP32_BYTES, Stream.READ: FP32_BYTES, Stream.ADAMW: 7 * FP32_BYTES}
"""Bytes moved per element. AdamW reads parameter, gradient and both moments, and writes all but
the gradient.
"""


class LaunchKind(StrEnum):
    """What is launched, and how."""

    EAGER = "eager"
    """A kernel on one element, many times, each launched by the host."""
    STEP = "step"
    """The calls of a training step so narrow that the device always waits for the next one."""
    MIXED_STEP = "mixed step"
    """The calls of such a step in bf16, with PyTorch's attention and its fused optimizer."""
    INFERENCE = "inference"
    """The calls of a forward pass so narrow, without gradients."""
    GRAPH = "graph"
    """The kernel of EAGER, many times in one CUDA graph."""
    QUEUED = "queued"
    """A copy of QUEUED_BYTES, which takes so long that the host launches the next one in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A matmul of (rows, inner) by (inner, columns), as in a linear layer: the second matrix is
    transposed.
    """

    rows: int
    inner: int
    columns: int
    name: str = "square"

    def __post_init__(self) -> None:
        """Raise ValueError for a side of the matrices that is out of range."""
        sides = (self.rows, self.inner, self.columns)
        if not 1 <= min(sides) <= max(sides) <= MAX_SIDE:
            raise ValueError(f"sides of a product must be from 1 to {MAX_SIDE}, got {self.label}")

    @property
    def label(self) -> str:
        """`rows x inner x columns`."""
        return f"{self.rows} x {self.inner} x {self.columns}"

    @property
    def flops(self) -> int:
        """A multiply-add counts as 2."""
        return 2 * self.rows * self.inner * self.columns

    def moved_bytes(self, precision: ProductPrecision) -> int:
        """Both factors read once and the result written once: the least that any matmul moves."""
        factor_bytes = FACTOR_BYTES[precision]
        result_bytes = max(RESULT_BYTES, factor_bytes)
        factors = self.rows * self.inner + self.inner * self.columns
        return factor_bytes * factors + result_bytes * self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCell(TimedRow):
    """One matmul."""

    precision: ProductPrecision
    shape: Shape
    timing: Timing

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs per second of the matmul; None without a time."""
        return self.timing.rate(self.shape.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCell(TimedRow):
    """One pass over memory."""

    stream: Stream
    moved_bytes: Count
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCell(TimedRow):
    """One of many launches, by the host's clock; on a CPU, one operation."""

    launch: LaunchKind
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCell(TimedRow):
    """One collective of a tensor in fp32, timed by the slowest process."""

    collective: Collective = Collective.ALL_REDUCE
    num_bytes: Count
    """Bytes of the whole tensor: of all parts together, if each process has a part."""
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2**20)]
    timing: Timing


@dataclass(frozen=True, slots=True)
class CacheRow(StudyRow):
    """The size of a GPU's cache, which the worker adds to the rows of launches."""

    num_bytes: int
    """Of the last cache before the GPU's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCell(TimedRow):
    """One matmul of a step, or one kernel of fused attention with the sides of its scores."""

    precision: ProductPrecision
    form: Form
    batch: Count
    """Number of matmuls in a batched one; for attention, heads of all sequences."""
    rows: Count
    inner: Count
    columns: Count
    queries_per_key: Count = 1
    """Heads of queries that share a head of keys and values."""
    timing: Timing

    @property
    def label(self) -> str:
        """The kind of kernel and its sides."""
        batch = f"{self.batch} x " if self.batch > 1 else ""
        sides = f"{batch}{self.rows} x {self.inner} x {self.columns}"
        shared = f", {self.queries_per_key} queries a key" if self.queries_per_key > 1 else ""
        return f"{self.precision} {self.form} {sides}{shared}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCell(TimedRow):
    """One pass over memory as a step makes them."""

    how: Pass
    moved_bytes: Count
    timing: Timing


TIMED_ROWS = {
    "products": ProductCell,
    "streams": StreamCell,
    "launches": LaunchCell,
    "reductions": CollectiveCell,
    "kernels": KernelCell,
    "passes": PassCell,
}
"""The cells of a study by the field that holds them."""


def joined(rows: Iterable[StudyRow]) -> Iterator[StudyRow]:
    """Merge the rows of several rounds: one row for each cell, with the loops of all its rounds, or
    with the failure of one of them.
    """
    rounds: dict[TimedRow, list[TimedRow]] = {}
    for row in rows:
        assert isinstance(row, TimedRow)
        rounds.setdefault(replace(row, timing=UNTIMED), []).append(row)  # type: ignore[type-var]
    for cell, repeats in rounds.items():
        failed = [row for row in repeats if row.timing.loops is None]
        if failed:
            yield failed[0]
            continue
        # rounds may differ in their number of repetitions, so the joint loops have one each
        times_s: list[float] = []
        for row in repeats:
            assert row.timing.loops is not None
            loops = row.timing.loops
            times_s += [max(MIN_TIME_S, time_s / loops.count) for time_s in loops.times_s]
        yield cell.with_loops(Loops(count=1, times_s=tuple(times_s)))
