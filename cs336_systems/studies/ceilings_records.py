"""The study of ceilings: what a machine reaches at its best in matmuls, memory, launches and
collectives.

The fastest matmul and the largest copy of a study are its ceilings, of which other results are
reported as shares.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from typing import Annotated, Any, ClassVar

from ..config import SIZES, Attention, Device, Precision, RunConfig
from ..costs.communication import TIMED, Collective
from ..costs.curves import Curves
from ..costs.hardware import find_device
from ..costs.kernels import Matmul, ProductPrecision
from ..costs.memory import is_fast_step
from ..costs.shards import FP32_BYTES
from ..costs.tape import MATMULS_OF, Pass
from ..costs.time import factors_of, operations, prepare_forecasts
from ..costs.traces import has_tape
from ..files import CEILINGS
from ..model.fast.choose import fastest
from ..record import Count, Environment, Status
from ..settings import ByDevice, Setting, check
from .ceilings_design import attention_shapes, drawn_matmuls
from .ceilings_rows import (
    MAX_SIDE,
    QUEUED_BYTES,
    STREAM_BYTES,
    TIMED_ROWS,
    UNTIMED,
    CacheRow,
    CollectiveCell,
    KernelCell,
    LaunchCell,
    LaunchKind,
    PassCell,
    ProductCell,
    Shape,
    Stream,
    StreamCell,
    TimedRow,
    Timing,
    by_bytes,
    joined,
)
from .records import FORMAT_VERSION, Cell, Grid, StudyRow

MAX_BYTES = 2**42
PADDED = ", padded"
"""Suffix of the name of a matmul whose columns are those of another one, rounded up."""
SMALL_COLLECTIVES_BYTES = (2**12, 2**16)
"""Bytes of small collectives, such as those of a model's vectors, in addition to the sizes of
passes over memory.
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


STEP_PRECISIONS = (Precision.FP32, Precision.TF32, Precision.BF16)
"""Precisions of the steps whose kernels are measured."""
DRAWN_PRECISIONS = (*map(ProductPrecision, STEP_PRECISIONS), ProductPrecision.FP8)
"""Precisions of the matmuls that are spread over what people train."""
ONLY_ON_GPUS = (ProductPrecision.TF32, ProductPrecision.FP8)
"""Precisions in which a CPU has no matmuls."""


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
    """Passes that move about so many bytes, of all kinds but copies and those that torch.compile
    makes; on a CPU also copies into a new tensor.
    """
    for how in Pass:
        if how is Pass.FUSED:
            continue
        # where a step makes tensors in memory that it has already
        if how is Pass.COPY and device is not Device.CPU:
            continue
        unit_bytes = PASS_BYTES[how] * PASS_UNIT
        for count in dict.fromkeys(max(1, size // unit_bytes) for size in sizes):
            yield PassCell(how=how, moved_bytes=count * unit_bytes, timing=UNTIMED)


def check_presets(names: Iterable[str]) -> None:
    """Raise ValueError for a name that no size has."""
    for name in names:
        if name not in SIZES:
            raise ValueError(f"unknown preset {name!r}. Presets: {', '.join(SIZES)}")


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
        check_presets(self.step_presets or ())

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
            label = f"{precision} product {shape.label}"
            part = f"{precision} products"
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
        queued_s = self.launch_s(LaunchKind.QUEUED)
        in_graph_s = copies.get(QUEUED_BYTES)
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
            time_s = kernel.timing.time_s
            if kernel.precision is precision and time_s is not None:
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
