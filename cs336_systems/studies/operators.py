"""The two grids of the study of operators, and their records: attention alone, and what fusing does
to operations.

Attention alone has no heads, as in the course's exercise: q, k and v have the shape (batch,
context, d_head).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from operator import add
from typing import Annotated, ClassVar

from ..config import Device, Phase, Precision
from ..costs.kernels import FACTOR_BYTES
from ..record import Count, Environment, Failure, Input, Measurement, Seconds, Status
from ..rules import is_import_name
from ..settings import ByDevice, Rule, Setting, check
from .records import AT_LEAST_ONE, FORMAT_VERSION, PRECISIONS_HELP, Cell, Grid, StudyRow

PHASES = (Phase.FORWARD, Phase.BACKWARD)
TOLERANCE = 10
"""An own implementation is wrong if it is more than this many times as far from float64 as
PyTorch's kernel.
"""
ROUNDING = {
    Precision.FP32: 2**-23,
    Precision.TF32: 2**-10,
    Precision.BF16: 2**-7,
    Precision.FP16: 2**-10,
}
"""Distance from 1 to the next larger number of the type that inputs and results have; for tf32, of
the type that matmuls round their inputs to.
"""


class Implementation(StrEnum):
    """How attention is computed: op by op, these compiled, PyTorch's choice, one of its kernels,
    or the user's own.
    """

    NAIVE = "naive"
    COMPILED = "compiled"
    SDPA = "sdpa"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class AttentionCell:
    """The parameters of one cell."""

    implementation: Implementation
    precision: Precision
    d_head: int
    context_length: int

    @property
    def label(self) -> str:
        """A few words for people."""
        return (
            f"{self.implementation} {self.precision}, width {self.d_head}, context "
            f"{self.context_length}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGrid(Grid["CellResult", "AttentionStudy"]):
    """What to run: every implementation at every precision, head dimension and context length."""

    MEASURE: ClassVar[str] = "cs336.studies.attention_cell:measure_attention"

    device: Device
    batch_size: Annotated[int, Setting("Sequences in a batch.", least=1)] = 8
    d_heads: Annotated[
        tuple[int, ...],
        Setting(
            "Width of queries, keys and values (elements).",
            least=1,
            by_device=ByDevice(gpu=(16, 32, 64, 128), cpu=(16, 32)),
        ),
    ]
    context_lengths: Annotated[
        tuple[int, ...],
        Setting(
            "Tokens in a sequence.",
            least=1,
            by_device=ByDevice(gpu=(256, 1024, 4096, 8192, 16384), cpu=(64, 256)),
        ),
    ]
    implementations: Annotated[
        tuple[Implementation, ...],
        Setting(
            "naive: written out. compiled: naive under torch.compile. sdpa: the kernel that "
            "PyTorch chooses. flash, efficient, cudnn, math: that kernel of PyTorch's. own: "
            "yours, which --own adds.",
            metavar="NAME",
            by_device=ByDevice(
                gpu=tuple(
                    name
                    for name in Implementation
                    if name not in (Implementation.SDPA, Implementation.OWN)
                ),
                cpu=(Implementation.NAIVE, Implementation.COMPILED, Implementation.SDPA),
            ),
        ),
    ]
    own: Annotated[
        str | None,
        Setting(
            "Your own attention as package.module:name, a function or a torch.autograd.Function, "
            "as one more implementation. Function or Function.apply is called as own(q, k, v, "
            "is_causal) with three tensors (batch, seq, d_head) of the precision's data type and "
            "a bool; it returns one such tensor, which has gradients with respect to q, k and v. "
            "Then all implementations are compared with float64 too.",
            metavar="MODULE:NAME",
            default="none",
            rules=(
                Rule(
                    lambda grid: is_import_name(grid.own),
                    "{flag} must be package.module:name, got {config.own!r}",
                ),
            ),
        ),
    ] = None
    source: Input | None = None
    """The source of `own`, as it was when the study began."""
    precisions: Annotated[tuple[Precision, ...], Setting(PRECISIONS_HELP)] = (Precision.FP32,)
    causal: Annotated[bool, Setting("Hide from each token those that follow it.")] = False
    passes: Annotated[
        int,
        Setting(
            "Timed passes of each cell, one forward and one backward each.",
            least=1,
            by_device=ByDevice(gpu=100, cpu=10),
        ),
    ] = 100
    warmup_passes: Annotated[int, Setting("Passes before the timed ones.", least=1)] = 10
    timeout_s: Annotated[float, Setting("Longest time for one cell (seconds).")] = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Add the user's own implementation if one is named; raise ValueError for settings out of
        range.
        """
        check(self)
        if self.own is not None and Implementation.OWN not in self.implementations:
            object.__setattr__(self, "implementations", (*self.implementations, Implementation.OWN))
        if self.own is None and Implementation.OWN in self.implementations:
            raise ValueError("implementation own needs --own MODULE:NAME, which says what it is")
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be positive and finite, got {self.timeout_s}")

    def groups(self) -> list[list[Cell["CellResult"]]]:
        """One group for each precision and implementation, the smallest cells first.

        The user's own implementation comes first: where it fails, that is seen at once.
        """
        lengths, d_heads = sorted(set(self.context_lengths)), sorted(set(self.d_heads))
        own_first = sorted(
            dict.fromkeys(self.implementations), key=lambda name: name is not Implementation.OWN
        )
        ways = product(dict.fromkeys(self.precisions), own_first)
        groups = []
        for precision, implementation in ways:
            group = []
            for length, d_head in product(lengths, d_heads):
                cell = AttentionCell(implementation, precision, d_head, length)
                row = CellResult(cell=cell, status=Status.OK)
                group.append(Cell(label=cell.label, rows=(row,)))
            groups.append(group)
        return groups

    def study(self, rows: tuple["CellResult", ...], environment: Environment) -> "AttentionStudy":
        """The study with these results, in the order in which the grid names implementations."""
        ways = [*product(self.precisions, self.implementations)]
        ordered = sorted(
            rows, key=lambda row: ways.index((row.cell.precision, row.cell.implementation))
        )
        return AttentionStudy(grid=self, results=tuple(ordered), environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellMemory:
    """What PyTorch's CUDA allocator held in one pass after the warm-up."""

    before_forward_bytes: Count
    """With the inputs, the upstream gradient and workspaces of libraries in place."""
    before_backward_bytes: Count
    peak_bytes: Count

    @property
    def saved_bytes(self) -> int:
        """What forward keeps for backward, including its output."""
        return self.before_backward_bytes - self.before_forward_bytes


class Quantity(StrEnum):
    """What is compared with attention in float64: the output, and the gradients of queries, keys
    and values.
    """

    OUTPUT = "output"
    DQ = "dq"
    DK = "dk"
    DV = "dv"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactError:
    """How far one quantity is from the same mathematics in float64, on the same inputs."""

    quantity: Quantity
    max_error: float | None
    """Largest distance of an element; None if an element is not finite."""
    max_exact: float
    """Largest magnitude of an element in float64."""

    @property
    def relative(self) -> float | None:
        """Largest distance over largest magnitude; None where either is not known, or all
        elements are 0.
        """
        if self.max_error is None or not self.max_exact:
            return None
        return self.max_error / self.max_exact


def wrong_quantities(
    cell: AttentionCell, errors: Sequence[ExactError], of_kernel: Sequence[ExactError]
) -> dict[Quantity, float]:
    """The quantities whose errors are over TOLERANCE times those of PyTorch's kernel on the same
    inputs, each with the kernel's error, over the largest magnitude.

    A kernel may happen to round hardly at all, so its error counts as at least one rounding of the
    data type, and as at least the error of a sum over the context in fp32, which grows as the root
    of the number of terms.
    """
    least = max(ROUNDING[cell.precision], ROUNDING[Precision.FP32] * math.sqrt(cell.context_length))
    known = {error.quantity: error.relative or 0 for error in of_kernel if error.max_exact}
    wrong = {}
    for error in errors:
        if error.quantity in known:
            of_this = known[error.quantity]
            if error.relative is None or error.relative > TOLERANCE * max(least, of_this):
                wrong[error.quantity] = of_this
    return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult(StudyRow):
    """Raw times and memory of one cell, or its failure."""

    cell: AttentionCell
    status: Status
    failure: Failure | None = None
    """Why the cell failed; with status ok, why the user's own has no times of backward."""
    measurements: tuple[Measurement, ...] = ()
    """Times of forward and, if there is one, of backward. Those of an invalid cell are kept, and
    belong in no table.
    """
    first_pass_s: Seconds | None = None
    """First forward and backward by the host's clock, which includes compiling, loading
    libraries and autotuning.
    """
    memory: CellMemory | None = None
    """None on a CPU, which has no CUDA allocator."""
    errors: tuple[ExactError, ...] = ()
    """Of every quantity, in studies of an own implementation; empty also where float64 does not
    fit into memory.
    """

    def measurement(self, phase: Phase) -> Measurement | None:
        """Times of forward, backward, or with `Phase.STEP` both together; None where the cell
        has none that count.
        """
        if self.status is not Status.OK:
            return None
        if phase is Phase.STEP and len(self.measurements) > 1:
            forward, backward = (measurement.times_s for measurement in self.measurements)
            return Measurement(phase, tuple(map(add, forward, backward)))
        return next((one for one in self.measurements if one.phase is phase), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStudy:
    """Everything kept of a grid."""

    WHAT: ClassVar[str] = "a study of attention"

    grid: AttentionGrid
    results: tuple[CellResult, ...] = ()
    """In the order in which they were measured."""
    environment: Environment | None = None
    """Where the cells were measured; None in records of an interrupted study that earlier
    versions wrote.
    """
    other_environments: tuple[Environment, ...] = ()
    """Of cells that were measured under other conditions, each once."""
    format_version: int = FORMAT_VERSION

    @property
    def rows(self) -> tuple[CellResult, ...]:
        """The results of all cells, under the name that all studies have for them."""
        return self.results

    @property
    def statuses(self) -> list[Status]:
        """How each cell of the study ended."""
        return [result.status for result in self.results]

    def available(self, precision: Precision) -> list[Implementation]:
        """Implementations with a kernel for at least one cell at this precision, in the order of
        the grid.
        """
        available = set()
        for result in self.results:
            cell = result.cell
            if cell.precision is precision and result.status is not Status.UNAVAILABLE:
                available.add(cell.implementation)
        return [name for name in dict.fromkeys(self.grid.implementations) if name in available]


def attention_flops(grid: AttentionGrid, cell: AttentionCell, phase: Phase) -> int:
    """FLOPs of the matmuls of forward (scores and values), of backward (the gradients of their
    factors), or of both.

    A multiply-add counts as 2; causal attention counts as full. Backward is 2 x forward if the
    weights are kept and 2.5 x if the kernel computes the scores again (Dao 2023), which the user's
    own is taken to do; softmax is left out.
    """
    keeps_weights = cell.implementation in (
        Implementation.NAIVE,
        Implementation.COMPILED,
        Implementation.MATH,
    )
    matmul = 2 * grid.batch_size * cell.context_length**2 * cell.d_head
    backward = 4 if keeps_weights else 5
    return matmul * {Phase.FORWARD: 2, Phase.BACKWARD: backward, Phase.STEP: 2 + backward}[phase]


def weights_bytes(grid: AttentionGrid, cell: AttentionCell) -> int:
    """Size of one batch x T x T matrix: the scores, the weights, or the gradient of either."""
    return grid.batch_size * cell.context_length**2 * FACTOR_BYTES[cell.precision]


def rows_bytes(grid: AttentionGrid, cell: AttentionCell) -> int:
    """Size of one batch x T x d matrix: the queries, the keys, the values, or the output."""
    return grid.batch_size * cell.context_length * cell.d_head * FACTOR_BYTES[cell.precision]


def naive_saved_bytes(grid: AttentionGrid, cell: AttentionCell) -> int:
    """What written-out attention keeps from forward to backward, besides its inputs.

    These are the weights, which softmax and the matmul with the values share, the scaled queries,
    and the output.
    """
    return weights_bytes(grid, cell) + 2 * rows_bytes(grid, cell)


class Op(StrEnum):
    """An operation of a Transformer that can be written out as several operations, or be one."""

    GELU = "gelu"
    SOFTMAX = "softmax"
    RMS_NORM = "rms_norm"
    ATTENTION = "attention"


class Version(StrEnum):
    """What is run: the written-out operations one by one, these under torch.compile, or
    PyTorch's fused operation.
    """

    EAGER = "eager"
    COMPILED = "compiled"
    FUSED = "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGrid(Grid["FusionRow", "FusionStudy"]):
    """What to run.

    The inputs of gelu, softmax and rms_norm have the shape (batch_size, context_length, width),
    those of attention (batch_size, num_heads, context_length, d_head).
    """

    MEASURE: ClassVar[str] = "cs336.studies.fusion_cell:measure_fusion"

    device: Device
    ops: Annotated[
        tuple[Op, ...], Setting("gelu (its tanh form), softmax, rms_norm, attention.")
    ] = tuple(Op)
    precisions: Annotated[tuple[Precision, ...], Setting(PRECISIONS_HELP)] = (Precision.FP32,)
    batch_size: Annotated[
        int, Setting("Sequences in a batch.", least=1, by_device=ByDevice(gpu=16, cpu=2))
    ]
    context_length: Annotated[
        int, Setting("Tokens in a sequence.", least=1, by_device=ByDevice(gpu=1024, cpu=64))
    ]
    width: Annotated[
        int,
        Setting(
            "Elements of a token for gelu, softmax and rms_norm; softmax and rms_norm work along "
            "them.",
            least=1,
            by_device=ByDevice(gpu=6400, cpu=512),
        ),
    ]
    num_heads: Annotated[
        int, Setting("Attention heads.", least=1, by_device=ByDevice(gpu=25, cpu=2))
    ]
    d_head: Annotated[
        int,
        Setting(
            "Width of one attention head (elements).", least=1, by_device=ByDevice(gpu=64, cpu=16)
        ),
    ]
    passes: Annotated[
        int,
        Setting(
            "Timed passes, one forward and one backward each.",
            least=1,
            by_device=ByDevice(gpu=50, cpu=10),
        ),
    ] = 50
    warmup_passes: Annotated[int, Setting("Passes before the timed ones.", least=1)] = 5
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for settings out of range."""
        check(self)

    def groups(self) -> list[list[Cell["FusionRow"]]]:
        """One group of all versions of all operations."""
        precisions, ops = dict.fromkeys(self.precisions), dict.fromkeys(self.ops)
        cells = []
        for precision, op, version in product(precisions, ops, Version):
            rows = version_rows(self, op, precision, version)
            cells.append(Cell(label=f"{op} {version} {precision}", rows=rows))
        return [cells]

    def study(self, rows: tuple["FusionRow", ...], environment: Environment) -> "FusionStudy":
        """The study with these rows."""
        return FusionStudy(grid=self, rows=rows, environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRow(StudyRow):
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
    """Kernels of one pass in the order of their launch; on a CPU, the operators that compute new
    values.
    """
    must_move_bytes: Count
    """Inputs and upstream gradient read once, outputs and gradients written once: the least that
    any version moves.
    """
    moved_bytes: Count | None = None
    """Sum over all operations of the pass of operands read and results written; None for
    compiled code.
    """
    matmul_flops: Count = 0
    """FLOPs of the matmuls; a multiply-add counts as 2."""
    max_error: float | None = None
    """Largest distance from the written-out form in float64, for the first of the batch; None if
    not finite.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionStudy:
    """Everything kept of a study of fusion."""

    WHAT: ClassVar[str] = "a study of fusion"

    grid: FusionGrid
    rows: Annotated[tuple[FusionRow, ...], AT_LEAST_ONE]
    environment: Environment
    other_environments: tuple[Environment, ...] = ()
    """Of cells that were measured under other conditions, each once."""
    format_version: int = FORMAT_VERSION

    @property
    def statuses(self) -> list[Status]:
        """How each row of the study ended."""
        return [row.status for row in self.rows]


def version_rows(
    grid: FusionGrid, op: Op, precision: Precision, version: Version
) -> tuple[FusionRow, ...]:
    """The rows of forward and backward of one version of an operation, with nothing measured."""
    shapes = input_shapes(grid, op)
    inputs = sum(map(math.prod, shapes))
    output = math.prod(shapes[0])
    # forward: inputs in, output out; backward: inputs and upstream gradient in, gradients out
    must_move_elements = {Phase.FORWARD: inputs + output, Phase.BACKWARD: 2 * inputs + output}
    attention = 4 * grid.batch_size * grid.num_heads * grid.context_length**2 * grid.d_head
    # backward has a matmul for the gradient of each factor
    flops = attention if op is Op.ATTENTION else 0
    matmul_flops = {Phase.FORWARD: flops, Phase.BACKWARD: 2 * flops}
    return tuple(
        FusionRow(
            op=op,
            precision=precision,
            version=version,
            phase=phase,
            status=Status.OK,
            must_move_bytes=FACTOR_BYTES[precision] * must_move_elements[phase],
            matmul_flops=matmul_flops[phase],
        )
        for phase in PHASES
    )


def input_shapes(grid: FusionGrid, op: Op) -> list[tuple[int, ...]]:
    """Shapes of the inputs of an operation; the first is also the output's. All but weights have
    a batch axis first.
    """
    rows = (grid.batch_size, grid.context_length, grid.width)
    heads = (grid.batch_size, grid.num_heads, grid.context_length, grid.d_head)
    inputs: dict[Op, list[tuple[int, ...]]] = {
        Op.GELU: [rows],
        Op.SOFTMAX: [rows],
        Op.RMS_NORM: [rows, (grid.width,)],
        Op.ATTENTION: [heads, heads, heads],
    }
    return inputs[op]
