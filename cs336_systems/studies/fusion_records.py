"""What fusing does to single operations: what to run, and what came of it."""

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Annotated, ClassVar

from cs336_systems.analysis.warnings import PASSES, measurement_warnings
from cs336_systems.config import MAX_ELEMENTS, Device, Phase, Precision
from cs336_systems.record import Count, Environment, Failure, Measurement, RunWarning, Status
from cs336_systems.settings import ByDevice, Setting, check
from cs336_systems.studies.records import ELEMENT_BYTES, FORMAT_VERSION, PRECISIONS_HELP, Cell, Grid, Row

PHASES = (Phase.FORWARD, Phase.BACKWARD)


class Op(StrEnum):
    """An operation of a Transformer that can be written out as several operations, or be one."""

    GELU = "gelu"
    SOFTMAX = "softmax"
    RMS_NORM = "rms_norm"
    ATTENTION = "attention"


class Version(StrEnum):
    """What is run: the written-out operations one by one, these under torch.compile, or PyTorch's fused operation."""

    EAGER = "eager"
    COMPILED = "compiled"
    FUSED = "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGrid(Grid["FusionRow", "FusionStudy"]):
    """What to run.

    The inputs of gelu, softmax and rms_norm have the shape (batch_size, context_length, width), those of attention
    (batch_size, num_heads, context_length, d_head).
    """

    MEASURE: ClassVar[str] = "cs336_systems.studies.fusion_cell:measure_rows"

    # fmt: off
    device: Device
    ops: Annotated[tuple[Op, ...], Setting("gelu (its tanh form), softmax, rms_norm, attention.")] = tuple(Op)
    precisions: Annotated[tuple[Precision, ...], Setting(PRECISIONS_HELP)] = (Precision.FP32,)
    batch_size: Annotated[int, Setting("Sequences in a batch.", least=1, by_device=ByDevice(gpu=16, cpu=2))]
    context_length: Annotated[int, Setting("Tokens in a sequence.", least=1, by_device=ByDevice(gpu=1024, cpu=64))]
    width: Annotated[
        int,
        Setting(
            "Elements of a token for gelu, softmax and rms_norm; softmax and rms_norm work along them.", least=1,
            by_device=ByDevice(gpu=6400, cpu=512),
        ),
    ]
    num_heads: Annotated[int, Setting("Attention heads.", least=1, by_device=ByDevice(gpu=25, cpu=2))]
    d_head: Annotated[
        int, Setting("Width of one attention head (elements).", least=1, by_device=ByDevice(gpu=64, cpu=16))
    ]
    passes: Annotated[
        int,
        Setting("Timed passes, one forward and one backward each.", least=1, by_device=ByDevice(gpu=50, cpu=10)),
    ] = 50
    warmup_passes: Annotated[int, Setting("Passes before the timed ones.", least=1)] = 5
    seed: int = 0
    # fmt: on

    def __post_init__(self) -> None:
        check(self)
        rows = self.batch_size * self.context_length
        if rows * max(self.width, self.num_heads * max(self.d_head, self.context_length)) > MAX_ELEMENTS:
            raise ValueError(f"the tensors would have more than {MAX_ELEMENTS:.0e} elements; use smaller sizes")

    def groups(self) -> list[list[Cell["FusionRow"]]]:
        """One group of all versions of all operations."""
        cells = [
            Cell(label=f"{op} {version} {precision}", rows=version_rows(self, op, precision, version))
            for precision, op, version in product(dict.fromkeys(self.precisions), dict.fromkeys(self.ops), Version)
        ]
        return [cells]

    def study(self, rows: tuple["FusionRow", ...], environment: Environment) -> "FusionStudy":
        """The study with these rows."""
        return FusionStudy(grid=self, rows=rows, environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRow(Row):
    """Forward or backward of one version of one operation."""

    op: Op
    precision: Precision
    version: Version
    phase: Phase
    status: Status
    failure: Failure | None = None
    measurement: Measurement | None = None
    """Raw times; None unless status is ok."""
    kernels: tuple[str, ...] = ()
    """Kernels of one pass in the order of their launch; on a CPU, the operators that compute new values."""
    must_move_bytes: Count
    """Inputs and upstream gradient read once, outputs and gradients written once: the least that any version moves."""
    moved_bytes: Count | None = None
    """Sum over all operations of the pass of operands read and results written; None for compiled code."""
    matmul_flops: Count = 0
    """FLOPs of the matmuls; a multiply-add counts as 2."""
    max_error: float | None = None
    """Largest distance from the written-out form in float64, for the first of the batch; None if not finite."""

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """Reasons to doubt the times."""
        return measurement_warnings(self.measurement, PASSES)

    @property
    def must_move_bytes_per_s(self) -> float | None:
        """The bytes that must move, over the median time; None without a time."""
        if self.measurement is None or not self.measurement.median_s:
            return None
        return self.must_move_bytes / self.measurement.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionStudy:
    """Everything kept of a study of fusion."""

    WHAT: ClassVar[str] = "a study of fusion"

    grid: FusionGrid
    rows: tuple[FusionRow, ...]
    environment: Environment
    format_version: int = FORMAT_VERSION

    def eager(self, row: FusionRow) -> FusionRow:
        """The row of the same operation, precision and phase for the written-out version."""
        return next(
            other
            for other in self.rows
            if other.version is Version.EAGER
            and (other.op, other.precision, other.phase) == (row.op, row.precision, row.phase)
        )


def version_rows(grid: FusionGrid, op: Op, precision: Precision, version: Version) -> tuple[FusionRow, ...]:
    """The rows of forward and backward of one version of an operation, with nothing measured."""
    return tuple(
        FusionRow(
            op=op,
            precision=precision,
            version=version,
            phase=phase,
            status=Status.OK,
            must_move_bytes=ELEMENT_BYTES[precision] * must_move_elements(grid, op, phase),
            matmul_flops=matmul_flops(grid, op, phase),
        )
        for phase in PHASES
    )


def input_shapes(grid: FusionGrid, op: Op) -> list[tuple[int, ...]]:
    """Shapes of the inputs of an operation; the first is also the output's. All but weights have a batch axis first."""
    rows = (grid.batch_size, grid.context_length, grid.width)
    heads = (grid.batch_size, grid.num_heads, grid.context_length, grid.d_head)
    inputs: dict[Op, list[tuple[int, ...]]] = {
        Op.GELU: [rows],
        Op.SOFTMAX: [rows],
        Op.RMS_NORM: [rows, (grid.width,)],
        Op.ATTENTION: [heads, heads, heads],
    }
    return inputs[op]


def must_move_elements(grid: FusionGrid, op: Op, phase: Phase) -> int:
    """Elements of forward (inputs in, output out) or backward (inputs and upstream gradient in, gradients out)."""
    shapes = input_shapes(grid, op)
    inputs, output = sum(map(math.prod, shapes)), math.prod(shapes[0])
    return inputs + output if phase is Phase.FORWARD else 2 * inputs + output


def matmul_flops(grid: FusionGrid, op: Op, phase: Phase) -> int:
    """FLOPs of the matmuls of forward, or of backward, which has one for the gradient of each factor."""
    if op is not Op.ATTENTION:
        return 0
    forward = 4 * grid.batch_size * grid.num_heads * grid.context_length**2 * grid.d_head
    return forward if phase is Phase.FORWARD else 2 * forward
