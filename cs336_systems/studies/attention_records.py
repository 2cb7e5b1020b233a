"""The study of attention alone: its grid, its record, and the cost of the written-out form in closed form.

There are no heads, as in the course's exercise: queries, keys and values each have the shape (batch, context, d_head).
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Annotated, ClassVar

from cs336_systems.analysis.warnings import PASSES, measurement_warnings
from cs336_systems.config import MAX_ELEMENTS, Device, Phase, Precision
from cs336_systems.record import Count, Environment, Failure, Measurement, RunWarning, Status
from cs336_systems.settings import ByDevice, Setting, check
from cs336_systems.studies.records import ELEMENT_BYTES, FORMAT_VERSION, PRECISIONS_HELP, Cell, Grid, Row


class Implementation(StrEnum):
    """How attention is computed: operation by operation, these compiled, PyTorch's choice, or one of its kernels."""

    NAIVE = "naive"
    COMPILED = "compiled"
    SDPA = "sdpa"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"

    @property
    def keeps_weights(self) -> bool:
        """Whether forward keeps the T x T weights for backward; fused kernels compute them again."""
        return self in (Implementation.NAIVE, Implementation.COMPILED, Implementation.MATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCell:
    """The parameters of one cell."""

    implementation: Implementation
    precision: Precision
    d_head: int
    context_length: int

    @property
    def label(self) -> str:
        """A few words for people."""
        return f"{self.implementation} {self.precision}, width {self.d_head}, context {self.context_length}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGrid(Grid["CellResult", "AttentionStudy"]):
    """What to run: every implementation at every precision, head dimension and context length."""

    MEASURE: ClassVar[str] = "cs336_systems.studies.attention_cell:measure_rows"

    # fmt: off
    device: Device
    batch_size: Annotated[int, Setting("Sequences in a batch.", least=1)] = 8
    d_heads: Annotated[
        tuple[int, ...],
        Setting(
            "Width of queries, keys and values (elements).", least=1,
            by_device=ByDevice(gpu=(16, 32, 64, 128), cpu=(16, 32)),
        ),
    ]
    context_lengths: Annotated[
        tuple[int, ...],
        Setting(
            "Tokens in a sequence.", least=1,
            by_device=ByDevice(gpu=(256, 1024, 4096, 8192, 16384), cpu=(64, 256)),
        ),
    ]
    implementations: Annotated[
        tuple[Implementation, ...],
        Setting(
            "naive: written out. compiled: naive under torch.compile. sdpa: the kernel that PyTorch chooses. "
            "flash, efficient, cudnn, math: that kernel of PyTorch's.", metavar="NAME",
            by_device=ByDevice(
                gpu=tuple(name for name in Implementation if name is not Implementation.SDPA),
                cpu=(Implementation.NAIVE, Implementation.COMPILED, Implementation.SDPA),
            ),
        ),
    ]
    precisions: Annotated[tuple[Precision, ...], Setting(PRECISIONS_HELP)] = (Precision.FP32,)
    causal: Annotated[bool, Setting("Hide from each token those that follow it.")] = False
    passes: Annotated[
        int,
        Setting(
            "Timed passes of each cell, one forward and one backward each.", least=1,
            by_device=ByDevice(gpu=100, cpu=10),
        ),
    ] = 100
    warmup_passes: Annotated[int, Setting("Passes before the timed ones.", least=1)] = 10
    timeout_s: Annotated[float, Setting("Longest time for one cell (seconds).")] = 600.0
    seed: int = 0
    # fmt: on

    def __post_init__(self) -> None:
        check(self)
        longest = max(self.context_lengths)
        if self.batch_size * longest * max(longest, *self.d_heads) > MAX_ELEMENTS:
            raise ValueError(
                f"batch_size {self.batch_size} and context_length {longest} make more than {MAX_ELEMENTS:.0e} "
                "attention scores; use smaller ones"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be positive and finite, got {self.timeout_s}")

    def groups(self) -> list[list[Cell["CellResult"]]]:
        """One group for each precision and implementation, the smallest cells first."""
        groups = []
        for precision, implementation in product(dict.fromkeys(self.precisions), dict.fromkeys(self.implementations)):
            cells = [
                AttentionCell(implementation=implementation, precision=precision, d_head=d_head, context_length=length)
                for length, d_head in product(sorted(set(self.context_lengths)), sorted(set(self.d_heads)))
            ]
            groups.append([Cell(label=cell.label, rows=(CellResult(cell=cell, status=Status.OK),)) for cell in cells])
        return groups

    def study(self, rows: tuple["CellResult", ...], environment: Environment) -> "AttentionStudy":
        """The study with these results."""
        return AttentionStudy(grid=self, results=rows, environment=environment)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult(Row):
    """Raw times and memory of one cell, or its failure."""

    cell: AttentionCell
    status: Status
    failure: Failure | None = None
    measurements: tuple[Measurement, ...] = ()
    """Times of forward and of backward; empty unless status is ok."""
    first_pass_s: float | None = None
    """First forward and backward by the host's clock, which includes compiling, loading libraries and autotuning."""
    memory: CellMemory | None = None
    """None on a CPU, which has no CUDA allocator."""

    def measurement(self, phase: Phase) -> Measurement | None:
        """Times of forward or backward, or None where the cell has none."""
        return next((m for m in self.measurements if m.phase is phase), None)

    def warnings(self, phase: Phase) -> tuple[RunWarning, ...]:
        """Reasons to doubt the times of forward or backward."""
        return measurement_warnings(self.measurement(phase), PASSES)

    @property
    def compile_s(self) -> float | None:
        """Time of the first pass if it compiles; None otherwise."""
        return self.first_pass_s if self.cell.implementation is Implementation.COMPILED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStudy:
    """Everything kept of a grid."""

    WHAT: ClassVar[str] = "a study of attention"

    grid: AttentionGrid
    results: tuple[CellResult, ...] = ()
    """In the order in which they were measured."""
    environment: Environment | None = None
    """Where the cells were measured; None in records of an interrupted study that earlier versions wrote."""
    format_version: int = FORMAT_VERSION

    @property
    def precisions(self) -> list[Precision]:
        """Precisions of the results so far."""
        return list(dict.fromkeys(result.cell.precision for result in self.results))

    def available(self, precision: Precision) -> list[Implementation]:
        """Implementations with a kernel for at least one cell at this precision, in the order of the grid."""
        results = [result for result in self.results if result.cell.precision is precision]
        found = {result.cell.implementation for result in results if result.status is not Status.UNAVAILABLE}
        return [name for name in dict.fromkeys(self.grid.implementations) if name in found]


def matmul_flops(grid: AttentionGrid, cell: AttentionCell, phase: Phase) -> int:
    """FLOPs of the matmuls of forward (scores and values) or of backward (the gradients of their factors).

    A multiply-add counts as 2; causal attention counts as full. Backward is 2 x forward if the weights are kept and
    2.5 x if the kernel computes the scores again (Dao 2023); softmax is left out.
    """
    matmul = 2 * grid.batch_size * cell.context_length**2 * cell.d_head
    return matmul * (2 if phase is Phase.FORWARD else 4 if cell.implementation.keeps_weights else 5)


def weights_bytes(grid: AttentionGrid, cell: AttentionCell) -> int:
    """Size of one batch x T x T matrix: the scores, the weights, or the gradient of either."""
    return grid.batch_size * cell.context_length**2 * ELEMENT_BYTES[cell.precision]


def rows_bytes(grid: AttentionGrid, cell: AttentionCell) -> int:
    """Size of one batch x T x d matrix: the queries, the keys, the values, or the output."""
    return grid.batch_size * cell.context_length * cell.d_head * ELEMENT_BYTES[cell.precision]


def naive_saved_bytes(grid: AttentionGrid, cell: AttentionCell) -> int:
    """What written-out attention keeps from forward to backward, besides its inputs.

    These are the weights, which softmax and the matmul with the values share, the scaled queries, and the output.
    """
    return weights_bytes(grid, cell) + 2 * rows_bytes(grid, cell)
