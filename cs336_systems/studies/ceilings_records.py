"""The study of ceilings: what a machine reaches at its best in matmuls, memory, launches and
collectives.

The fastest matmul and the largest copy of a study are its ceilings, of which other results are
reported as shares.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import chain, product
from statistics import fmean, median, stdev
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec

from ..analysis.warnings import LOOPS, timing_warnings
from ..config import SIZES, Attention, Device, Precision, RunConfig
from ..costs.communication import TIMED, Collective
from ..costs.curves import Curves
from ..costs.hardware import find_device
from ..costs.kernels import FACTOR_BYTES, Matmul, ProductPrecision
from ..costs.memory import is_fast_step
from ..costs.shards import FP32_BYTES
from ..costs.tape import MATMULS_OF, RESULT_BYTES, Form, Pass
from ..costs.time import factors_of, operations, prepare_forecasts
from ..costs.traces import has_tape
from ..files import CEILINGS
from ..model.fast.choose import fastest
from ..record import MAX_TIME_S, Count, Environment, Failure, RunWarning, Status
from ..settings import ByDevice, Setting, check
from .ceilings_design import attention_shapes, drawn_matmuls
from .records import AT_LEAST_ONE, FORMAT_VERSION, Cell, Grid, StudyRow

MIN_TIME_S = 1e-9
MAX_BYTES = 2**42
PADDED = ", padded"
"""Suffix of the name of a matmul whose columns are those of another one, rounded up."""
SMALL_COLLECTIVES_BYTES = (2**12, 2**16)
"""Bytes of small collectives, such as those of a model's vectors, in addition to the sizes of
passes over memory.
"""
MAX_SIDE = 2**20
"""Most rows or columns of a matrix, so that a typing error does not ask for a petabyte."""
QUEUED_BYTES = 2**28
"""Bytes moved by the copies that show the gap between two kernels: each takes that much longer
than in a CUDA graph.
"""
MASK_SIDE = 512
"""Number of positions in masked passes, and width of the rows in softmax passes."""
HEADS, D_HEAD = 16, 64
"""Shape of the tensors in strided passes, which transpose heads and MASK_SIDE positions."""
PASS_BYTES = dict.fromkeys(Pass, 4 + 4) | {Pass.WIDEN: 2 + 4}
"""Bytes moved per element: bf16 read and fp32 written, or fp32 both."""
PASS_UNIT = HEADS * MASK_SIDE * D_HEAD
"""The elements of a pass are a multiple of this: one sequence of heads, or two masked matrices
of scores.
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


STEP_PRECISIONS = (Precision.FP32, Precision.TF32, Precision.BF16)
"""Precisions of the steps whose kernels are measured."""
DRAWN_PRECISIONS = (*map(ProductPrecision, STEP_PRECISIONS), ProductPrecision.FP8)
"""Precisions of the matmuls that are spread over what people train."""
ONLY_ON_GPUS = (ProductPrecision.TF32, ProductPrecision.FP8)
"""Precisions in which a CPU has no matmuls."""


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


def kernel_cells(
    presets: Sequence[str],
    contexts: Sequence[int],
    precisions: Sequence[Precision],
    batch_size: int,
) -> Iterator[KernelCell]:
    """The matmuls and the attention kernels of training steps of these sizes, each once."""
    configs: list[RunConfig] = []
    for precision, preset, context_length in product(precisions, presets, contexts):
        configs += _configs(preset, context_length, precision, batch_size)
    prepare_forecasts(configs)
    cells: dict[KernelCell, None] = {}  # a set that keeps the order
    for config in filter(has_tape, configs):  # --fast has none where Triton is not installed
        for operation in chain.from_iterable(operations(config).values()):
            if operation.is_matmul:
                rows, inner, columns = operation.sides
                cell = KernelCell(
                    precision=factors_of(operation, config.precision),
                    form=operation.form,
                    batch=operation.batch,
                    rows=rows,
                    inner=inner,
                    columns=columns,
                    timing=UNTIMED,
                )
                cells[cell] = None
    yield from cells


def _configs(
    preset: str, context_length: int, precision: Precision, batch_size: int
) -> list[RunConfig]:
    """Steps of one block: eager with each attention, and in bf16 as `--fast` computes it."""
    model = replace(SIZES[preset], context_length=context_length, num_layers=1)
    eager = [
        RunConfig(
            size=preset,
            model=replace(model, attention=attention),
            precision=precision,
            batch_size=batch_size,
            device=Device.CUDA,
        )
        for attention in Attention
    ]
    fast = fastest(eager[0], None)
    return [*eager, fast] if is_fast_step(fast) and fast.precision is precision else eager


def pass_cells(device: Device, sizes: Sequence[int]) -> Iterator[PassCell]:
    """Passes that move about so many bytes, of all kinds but copies; on a CPU also copies into a
    new tensor.
    """
    for how in Pass:
        # where a step makes tensors in memory that it has already
        if how is Pass.COPY and device is not Device.CPU:
            continue
        unit_bytes = PASS_BYTES[how] * PASS_UNIT
        for count in dict.fromkeys(max(1, size // unit_bytes) for size in sizes):
            yield PassCell(how=how, moved_bytes=count * unit_bytes, timing=UNTIMED)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingsGrid(Grid[StudyRow, "CeilingsStudy"]):
    """What to run."""

    MEASURE: ClassVar[str] = "cs336.studies.ceilings_cell:measure_rows"
    SELECTING: ClassVar[frozenset[str]] = Grid.SELECTING | {"drawn_matmuls"}

    device: Device
    shapes: tuple[Shape, ...]
    precisions: Annotated[
        tuple[ProductPrecision, ...],
        Setting(
            "fp32, tf32, bf16, fp16, fp8 (e4m3).",
            metavar="NAME",
            by_device=ByDevice(
                gpu=tuple(ProductPrecision), cpu=(ProductPrecision.FP32, ProductPrecision.BF16)
            ),
        ),
    ]
    stream_bytes: Annotated[
        tuple[int, ...], Setting(least=STREAM_BYTES[Stream.ADAMW], most=MAX_BYTES)
    ]
    """Bytes that a pass over memory moves; also, with smaller ones, the sizes of the tensors of
    collectives.
    """
    loops: Annotated[
        int, Setting("Timed loops of each cell, whose median counts.", least=1, most=1000)
    ] = 5
    loop_s: Annotated[
        float, Setting("Least time of one loop (seconds).", by_device=ByDevice(gpu=0.02, cpu=0.005))
    ] = 0.02
    """Repetitions are added until a loop takes this long."""
    world_size: Annotated[
        int,
        Setting(
            "Most processes of a collective, each on a GPU of its own. 2, 4 and so on up to it "
            "are measured too; 1 leaves them out.",
            least=1,
            default="all GPUs, 1 on a CPU",
        ),
    ] = 1
    seed: int = 0
    step_presets: tuple[str, ...] | None = None
    """Model sizes of which the kernels of steps are measured; None for none."""
    step_contexts: Annotated[
        tuple[int, ...],
        Setting(
            "Context lengths of the steps of --step-presets.",
            least=1,
            most=MAX_SIDE,
            by_device=ByDevice(gpu=(128, 256, 512), cpu=(64, 128, 256)),
        ),
    ] = (128, 256, 512)
    step_batch_size: Annotated[
        int, Setting("Sequences in a batch of these steps.", least=1, most=MAX_SIDE)
    ] = 4
    drawn_matmuls: Annotated[
        int,
        Setting(
            "Matmuls of each form and precision that are spread evenly over common sides.",
            least=0,
            most=1000,
            by_device=ByDevice(gpu=20, cpu=0),
        ),
    ] = 0
    attention_contexts: tuple[int, ...] | None = None
    """Context lengths at which fused attention is measured; None for none."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings out of range and for unknown presets."""
        check(self)
        if not 0 < self.loop_s <= 60:
            raise ValueError(f"loop_s must be above 0 and at most 60, got {self.loop_s}")
        if unknown := [name for name in self.step_presets or () if name not in SIZES]:
            raise ValueError(f"unknown preset {unknown[0]!r}. Presets: {', '.join(SIZES)}")

    def groups(self) -> list[list[Cell[StudyRow]]]:
        """One group of all cells of one process; on a CPU each occurs once per loop, in rounds.

        Other programs, or other guests of the host, take a CPU for seconds at a time. That would
        slow all loops of a cell if they were measured in a row; in rounds it slows one loop of each
        cell, and the medians stay the same. Collectives have groups of their own: a worker that has
        used CUDA could not fork their processes.
        """
        of_one_process: list[Cell[StudyRow]] = []
        collectives: list[Cell[StudyRow]] = []
        for cell in self.cells():
            is_shared = isinstance(cell.rows[0], CollectiveCell)
            (collectives if is_shared else of_one_process).append(cell)
        rounds = self.loops if self.device is Device.CPU else 1
        return [of_one_process * rounds, *([cell] for cell in collectives)]

    def cells(self) -> Iterator[Cell[StudyRow]]:
        """Matmuls, passes over memory, launches, and collectives if there are several processes."""
        for precision, shape in product(dict.fromkeys(self.precisions), dict.fromkeys(self.shapes)):
            row = ProductCell(precision=precision, shape=shape, timing=UNTIMED)
            label, part = f"{precision} product {shape.label}", f"{precision} products"
            yield Cell(label=label, rows=(row,), part=part)
        for stream, num_bytes in product(Stream, sorted(set(self.stream_bytes))):
            # a whole number of elements
            moved_bytes = num_bytes - num_bytes % STREAM_BYTES[stream]
            passes = StreamCell(stream=stream, moved_bytes=moved_bytes, timing=UNTIMED)
            label = f"{stream} of {num_bytes / 2**20:g} MiB"
            yield Cell(label=label, rows=(passes,), part="streams")
        for launch in LaunchKind if self.device is Device.CUDA else (LaunchKind.EAGER,):
            launches = LaunchCell(launch=launch, timing=UNTIMED)
            yield Cell(label=f"launches, {launch}", rows=(launches,), part="launches")
        yield from self._step_cells()
        powers = (2**power for power in range(1, self.world_size.bit_length()))
        for ranks in sorted({*powers, self.world_size} - {1}):
            yield from self._collective_cells(ranks)

    def _collective_cells(self, ranks: int) -> Iterator[Cell[StudyRow]]:
        """The sizes of each collective among so many ranks, as one cell."""
        multiple = FP32_BYTES * ranks  # all ranks have equal parts of the tensor
        sizes = {
            size // multiple * multiple for size in (*SMALL_COLLECTIVES_BYTES, *self.stream_bytes)
        }
        for collective in TIMED:
            if collective is Collective.PUSH and self.device is not Device.CUDA:
                continue  # pushes use a GPU's copy engines
            rows = [
                CollectiveCell(
                    collective=collective, num_bytes=size, world_size=ranks, timing=UNTIMED
                )
                for size in sorted(sizes - {0})
            ]
            label = f"{collective} of {ranks} processes"
            yield Cell(label=label, rows=tuple(rows), part="collectives")

    def _step_cells(self) -> Iterator[Cell[StudyRow]]:
        """The kernels of steps of `step_presets` and those of the design, and the passes over
        memory that are no copies.
        """
        kernels = dict.fromkeys(chain(self._preset_kernels(), self._designed_kernels()))
        for kernel in kernels:
            what = "attention" if kernel.form in MATMULS_OF else "matmuls"
            part = f"{kernel.precision} {what}"
            yield Cell(label=kernel.label, rows=(kernel,), part=part)
        if kernels:
            for cell in pass_cells(self.device, sorted(set(self.stream_bytes))):
                mib = cell.moved_bytes / 2**20
                label = f"{cell.how} pass of {mib:g} MiB"
                yield Cell(label=label, rows=(cell,), part="passes")

    @property
    def _step_precisions(self) -> list[Precision]:
        """The precisions of the grid in which steps run."""
        return [name for name in STEP_PRECISIONS if ProductPrecision(name) in self.precisions]

    def _preset_kernels(self) -> Iterator[KernelCell]:
        """The kernels of steps of `step_presets`."""
        if self.step_presets:
            yield from kernel_cells(
                self.step_presets, self.step_contexts, self._step_precisions, self.step_batch_size
            )

    def _designed_kernels(self) -> Iterator[KernelCell]:
        """Matmuls and attention that are spread over what people train."""
        for precision in DRAWN_PRECISIONS:
            if precision not in self.precisions:
                continue
            shapes = chain(
                drawn_matmuls(precision, self.drawn_matmuls),
                attention_shapes(precision, self.attention_contexts or ()),
            )
            for shape in shapes:
                yield KernelCell(precision=precision, **asdict(shape), timing=UNTIMED)

    def study(self, rows: tuple[StudyRow, ...], environment: Environment) -> "CeilingsStudy":
        """The study with these rows, each kind in a field of its own."""
        rows = tuple(joined(rows)) if self.device is Device.CPU else rows
        by_field: dict[str, Any] = {
            name: tuple(row for row in rows if isinstance(row, kind))
            for name, kind in TIMED_ROWS.items()
        }
        cache_bytes = next((row.num_bytes for row in rows if isinstance(row, CacheRow)), None)
        return CeilingsStudy(
            grid=self, **by_field, cache_bytes=cache_bytes, environment=environment
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingsStudy:
    """Everything kept of a study of ceilings."""

    WHAT: ClassVar[str] = CEILINGS

    grid: CeilingsGrid
    products: tuple[ProductCell, ...] = ()
    streams: tuple[StreamCell, ...] = ()
    launches: tuple[LaunchCell, ...] = ()
    reductions: tuple[CollectiveCell, ...] = ()
    """Collectives; earlier studies have all-reduces alone."""
    kernels: tuple[KernelCell, ...] = ()
    passes: tuple[PassCell, ...] = ()
    """Kernels of steps, and passes over memory as steps make them; empty without `step_presets`."""
    cache_bytes: Count | None = None
    """Last cache of a GPU before its memory; None on a CPU."""
    environment: Environment
    other_environments: tuple[Environment, ...] = ()
    """Of cells that were measured under other conditions, each once."""
    format_version: int = FORMAT_VERSION

    @property
    def device_name(self) -> str:
        """Name of the device that was measured; None if it is unknown."""
        return self.environment.identity.device_name

    @property
    def rows(self) -> tuple[StudyRow, ...]:
        """All cells, and the size of the cache."""
        cache = () if self.cache_bytes is None else (CacheRow(self.cache_bytes),)
        return (*(cell for name in TIMED_ROWS for cell in getattr(self, name)), *cache)

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Timings of all cells."""
        return tuple(cell.timing for cell in self.rows if isinstance(cell, TimedRow))

    @property
    def statuses(self) -> list[Status]:
        """How each cell of the study ended."""
        return [timing.status for timing in self.timings]

    def collective_times(self) -> dict[tuple[int, Collective], dict[int, float]]:
        """Times by bytes, of each number of processes and kind of collective."""
        return by_bytes(
            ((cell.world_size, cell.collective), cell.num_bytes, cell.timing)
            for cell in self.reductions
        )

    def curves(self) -> Curves | None:
        """The measured times from which steps are predicted.

        None unless launches, copies and AdamW were measured. Times of matmuls, of other passes and
        of the gap between kernels may be missing.
        """
        on_host = self.grid.device is Device.CPU
        launch_s = self.host_call_s
        # a CPU runs a kernel as soon as it is called, so a launch and an empty kernel are the same
        kernel_s = launch_s if on_host else self.launch_s(LaunchKind.GRAPH)
        device = find_device(self.device_name or "")
        streams = by_bytes((cell.stream, cell.moved_bytes, cell.timing) for cell in self.streams)
        copies, adamw = streams.get(Stream.COPY), streams.get(Stream.ADAMW)
        if launch_s is None or kernel_s is None or copies is None or adamw is None:
            return None
        # one copy of the same size, launched by the host and in a CUDA graph
        queued_s, in_graph_s = self.launch_s(LaunchKind.QUEUED), copies.get(QUEUED_BYTES)
        gap_s = None if queued_s is None or in_graph_s is None else max(0.0, queued_s - in_graph_s)
        return Curves(
            matmuls={precision: tuple(self._matmuls(precision)) for precision in ProductPrecision},
            copies=copies,
            adamw=adamw,
            passes=by_bytes((cell.how, cell.moved_bytes, cell.timing) for cell in self.passes),
            launch_s=launch_s,
            mixed_launch_s=self.launch_s(LaunchKind.MIXED_STEP),
            inference_launch_s=self.launch_s(LaunchKind.INFERENCE),
            kernel_s=kernel_s,
            multiprocessors=1 if device is None else device.multiprocessors,
            queued_gap_s=0.0 if on_host else gap_s,
            on_host=on_host,
        )

    def _matmuls(self, precision: ProductPrecision) -> Iterator[Matmul]:
        """The matmuls of layers, which stand for all forms, and those of steps."""
        for cell in self.products:
            shape, time_s = cell.shape, cell.timing.time_s
            if cell.precision is precision and time_s is not None:
                yield Matmul(
                    rows=shape.rows, inner=shape.inner, columns=shape.columns, time_s=time_s
                )
        for kernel in self.kernels:
            if kernel.precision is precision and (time_s := kernel.timing.time_s) is not None:
                yield Matmul(
                    rows=kernel.rows,
                    inner=kernel.inner,
                    columns=kernel.columns,
                    batch=kernel.batch,
                    form=kernel.form,
                    time_s=time_s,
                )

    @property
    def host_call_s(self) -> float | None:
        """Time of one call of the host in a step, or of a launch if no step was timed; None if
        neither was.
        """
        return self.launch_s(LaunchKind.STEP) or self.launch_s(LaunchKind.EAGER)

    def launch_s(self, launch: LaunchKind) -> float | None:
        """Time of one launch, or None if it was not measured."""
        return next((cell.timing.time_s for cell in self.launches if cell.launch is launch), None)
