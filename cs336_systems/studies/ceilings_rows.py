"""Cells of the study of ceilings, with their times: matmuls, memory, launches, collectives, kernels of steps."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean, median, stdev
from typing import Annotated, Self

import msgspec

from cs336_systems.analysis.warnings import LOOPS, timing_warnings
from cs336_systems.config import SIZES, Attention, Device, Precision, RunConfig
from cs336_systems.costs.calls import Collective, sent_share
from cs336_systems.costs.forecast.fast import is_fast_step
from cs336_systems.costs.forecast.tape import MATMULS_OF, Form, Kind, Pass
from cs336_systems.costs.shards import FP32_BYTES
from cs336_systems.costs.time import operations
from cs336_systems.model.fast.choose import fastest
from cs336_systems.record import MAX_TIME_S, Count, Failure, RunWarning, Status
from cs336_systems.studies.records import ELEMENT_BYTES, Row

MIN_TIME_S = 1e-9
MAX_SIDE = 2**20
"""Most rows or columns of a matrix, so that a typing error does not ask for a petabyte."""
QUEUED_BYTES = 2**28
"""Bytes moved by the copies that show the gap between two kernels: each takes that much longer than in a CUDA graph."""
MASK_SIDE = 512
"""Number of positions in masked passes, and width of the rows in softmax passes."""
HEADS, D_HEAD = 16, 64
"""Shape of the tensors in strided passes, which transpose heads and MASK_SIDE positions."""
PASS_BYTES = dict.fromkeys(Pass, 4 + 4) | {Pass.WIDEN: 2 + 4}
"""Bytes moved per element: bf16 read and fp32 written, or fp32 both."""
PASS_UNIT = HEADS * MASK_SIDE * D_HEAD
"""The elements of a pass are a multiple of this: one sequence of heads, or two masked matrices of scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """Raw times of loops of `count` repetitions each. Statistics are derived from them, never stored."""

    count: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times_s or not all(MIN_TIME_S <= time_s <= MAX_TIME_S for time_s in self.times_s):
            raise ValueError(f"loops need at least one time, each from {MIN_TIME_S:g} to {MAX_TIME_S:g} s")

    def __add__(self, others: "Loops") -> "Loops":
        """The loops of both; where their counts differ, as if each loop were one repetition of mean time."""
        if self.count == others.count:
            return replace(self, times_s=(*self.times_s, *others.times_s))
        times_s = (max(MIN_TIME_S, time_s / each.count) for each in (self, others) for time_s in each.times_s)
        return Loops(count=1, times_s=tuple(times_s))

    @property
    def median_s(self) -> float:
        """Time of one repetition in the median loop, in seconds."""
        return median(self.times_s) / self.count

    @property
    def stdev_s(self) -> float | None:
        """Sample standard deviation over the loops of the time of one repetition; None for a single loop."""
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
    def cv(self) -> float | None:
        """Relative standard deviation of the time, and so of a rate; None if it is not known."""
        return None if self.loops is None else self.loops.cv

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """Reasons to doubt the time."""
        return () if self.loops is None else timing_warnings(self.loops.times_s, repeated=LOOPS)

    def rate(self, amount: float) -> float | None:
        """`amount` per repetition, as a rate per second; None without a time."""
        return None if self.loops is None else amount / self.loops.median_s


UNTIMED = Timing(status=Status.OK)
"""Of cells that are yet to be measured."""


class TimedRow(Row):
    """A cell, which is a data class with what is timed, and its timing."""

    __slots__ = ()
    timing: Timing

    def failed(self, status: Status, failure: Failure) -> Self:
        """The row with the failure in place of a measurement."""
        return replace(self, timing=Timing(status=status, failure=failure))  # type: ignore[type-var]

    def with_loops(self, loops: Loops) -> Self:
        """The row with the times of these loops."""
        return replace(self, timing=Timing(status=Status.OK, loops=loops))  # type: ignore[type-var]

    def joined(self, other: Self) -> Self:
        """The row with the loops of both rows; if one of them failed, the row with its failure."""
        mine, theirs = self.timing.loops, other.timing.loops
        if mine is None or theirs is None:
            return self if mine is None else other
        return self.with_loops(mine + theirs)


class ProductPrecision(StrEnum):
    """Data type of the factors of a matmul. Sums are in fp32; fp8 is e4m3 with one scale for each matrix."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


FACTOR_BYTES = ELEMENT_BYTES | {ProductPrecision.FP8: 1}
RESULT_BYTES = ELEMENT_BYTES | {ProductPrecision.FP8: 2}
"""Bytes per element of a matmul's result; that of an fp8 matmul is in bf16."""


ONLY_ON_GPUS = (ProductPrecision.TF32, ProductPrecision.FP8)
"""Precisions in which a CPU has no matmuls."""


class Stream(StrEnum):
    """A pass over memory: a copy, a sum (which only reads), or PyTorch's fused AdamW on one flat tensor."""

    COPY = "copy"
    READ = "read"
    ADAMW = "adamw"


STREAM_BYTES = {Stream.COPY: 2 * FP32_BYTES, Stream.READ: FP32_BYTES, Stream.ADAMW: 7 * FP32_BYTES}
"""Bytes moved per element. AdamW reads parameter, gradient and both moments, and writes all but the gradient."""


class Launch(StrEnum):
    """What is launched, and how."""

    EAGER = "eager"
    """A kernel on one element, many times, each launched by the host."""
    STEP = "step"
    """The calls of a training step so narrow that the device always waits for the next one."""
    GRAPH = "graph"
    """The kernel of EAGER, many times in one CUDA graph."""
    QUEUED = "queued"
    """A copy of QUEUED_BYTES, which takes so long that the host launches the next one in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A matmul of (rows, inner) by (inner, columns), as in a linear layer: the second matrix is transposed."""

    rows: int
    inner: int
    columns: int
    name: str = "square"

    def __post_init__(self) -> None:
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

    @property
    def cube_side(self) -> float:
        """Side of the square matmul with as many FLOPs."""
        return float((self.flops // 2) ** (1 / 3))

    @property
    def is_square(self) -> bool:
        return self.rows == self.inner == self.columns

    def moved_bytes(self, precision: ProductPrecision) -> int:
        """Both factors read once and the result written once: the least that any matmul moves."""
        factors = self.rows * self.inner + self.inner * self.columns
        return FACTOR_BYTES[precision] * factors + RESULT_BYTES[precision] * self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCell(TimedRow):
    """One matmul."""

    precision: ProductPrecision
    shape: Shape
    timing: Timing

    @property
    def flops_per_s(self) -> float | None:
        return self.timing.rate(self.shape.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCell(TimedRow):
    """One pass over memory."""

    stream: Stream
    moved_bytes: Count
    timing: Timing

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes read plus bytes written, per second."""
        return self.timing.rate(self.moved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCell(TimedRow):
    """One of many launches, by the host's clock; on a CPU, one operation."""

    launch: Launch
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCell(TimedRow):
    """One collective of a tensor in fp32, timed by the first process."""

    collective: Collective = Collective.ALL_REDUCE
    num_bytes: Count
    """Bytes of the whole tensor: of all parts together, if each process has a part."""
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2**20)]
    timing: Timing

    @property
    def algorithm_bytes_per_s(self) -> float | None:
        """Bytes of the tensor per second."""
        return self.timing.rate(self.num_bytes)

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bytes that each process sends in a ring, per second (as in nccl-tests, except for the broadcast)."""
        return self.timing.rate(self.num_bytes * sent_share(self.collective, self.world_size))


@dataclass(frozen=True, slots=True)
class CacheRow(Row):
    """Row that the worker adds to those of launches on a GPU."""

    num_bytes: int
    """Size of the GPU's last cache before its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCell(TimedRow):
    """One matmul of a step, or one kernel of fused attention with the sides of its scores."""

    precision: Precision
    form: Form
    batch: Count
    """Number of matmuls in a batched one; for attention, heads of all sequences."""
    rows: Count
    inner: Count
    columns: Count
    timing: Timing

    @property
    def flops(self) -> int:
        """A multiply-add counts as 2; causal attention counts in full."""
        return MATMULS_OF.get(self.form, 1) * 2 * self.batch * self.rows * self.inner * self.columns

    @property
    def label(self) -> str:
        """The kind of kernel and its sides."""
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.precision} {self.form} {batch}{self.rows} x {self.inner} x {self.columns}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCell(TimedRow):
    """One pass over memory as a step makes them."""

    how: Pass
    moved_bytes: Count
    timing: Timing

    @property
    def elements(self) -> int:
        return self.moved_bytes // PASS_BYTES[self.how]


def kernel_cells(
    presets: Sequence[str], contexts: Sequence[int], precisions: Sequence[Precision], batch_size: int
) -> Iterator[KernelCell]:
    """The matmuls and the attention kernels of training steps of these sizes, each once."""
    found = dict.fromkeys(
        (precision, each.form, each.batch, *each.sides)
        for precision in precisions
        for preset in presets
        for context_length in contexts
        for config in _configs(preset, context_length, precision, batch_size)
        for of_phase in operations(config).values()
        for each in of_phase
        if each.kind in (Kind.MATMUL, Kind.ATTENTION)
    )
    for precision, form, batch, rows, inner, columns in found:
        yield KernelCell(
            precision=precision, form=form, batch=batch, rows=rows, inner=inner, columns=columns, timing=UNTIMED
        )


def _configs(preset: str, context_length: int, precision: Precision, batch_size: int) -> list[RunConfig]:
    """Steps of one block: eager with each attention, and in bf16 as `--fast` computes it."""
    model = replace(SIZES[preset], context_length=context_length, num_layers=1)
    eager = [
        RunConfig(
            size=preset, model=replace(model, attention=attention), precision=precision, batch_size=batch_size,
            device=Device.CUDA,
        )
        for attention in Attention
    ]  # fmt: skip
    fast = fastest(eager[0], None)
    return [*eager, fast] if is_fast_step(fast) and fast.precision is precision else eager


def pass_cells(device: Device, sizes: Sequence[int]) -> Iterator[PassCell]:
    """Passes that move about so many bytes, of all kinds but copies; on a CPU also copies into a new tensor."""
    for how in Pass:
        if how is Pass.COPY and device is not Device.CPU:  # where a step makes tensors in memory that it has already
            continue
        units = dict.fromkeys(max(1, size // (PASS_BYTES[how] * PASS_UNIT)) for size in sizes)
        for count in units:
            yield PassCell(how=how, moved_bytes=count * PASS_UNIT * PASS_BYTES[how], timing=UNTIMED)


TIMED_ROWS = {
    "products": ProductCell, "streams": StreamCell, "launches": LaunchCell, "reductions": CollectiveCell,
    "kernels": KernelCell, "passes": PassCell,
}  # fmt: skip
"""The cells of a study by the field that holds them."""


def joined(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows, with those of the same cell joined into one."""
    found: dict[Row, Row] = {}
    for row in rows:
        cell = row.with_loops(Loops(count=1, times_s=(1.0,))) if isinstance(row, TimedRow) else row
        known = found.get(cell)
        found[cell] = known.joined(row) if isinstance(known, TimedRow) and isinstance(row, TimedRow) else row
    return tuple(found.values())
