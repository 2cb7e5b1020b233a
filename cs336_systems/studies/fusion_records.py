"""What fusing does to single operations: what to run, and what came of it."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cs336_systems.analysis.warnings import PASSES, measurement_warnings
from cs336_systems.config import MAX_ELEMENTS, Device, Phase, Precision
from cs336_systems.files import encode_json, read_json
from cs336_systems.record import Count, Environment, Failure, Measurement, RecordError, RunWarning, Status

FORMAT_VERSION = 1


class Op(StrEnum):
    """An operation of a Transformer that is written out in many small ones, and can be one."""

    GELU = "gelu"
    SOFTMAX = "softmax"
    RMS_NORM = "rms_norm"
    ATTENTION = "attention"


class Version(StrEnum):
    """Who fuses: nobody, torch.compile, or whoever wrote PyTorch's own operation."""

    EAGER = "eager"
    COMPILED = "compiled"
    FUSED = "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionGrid:
    """What to run. gelu, softmax and rms_norm work on (batch_size, context_length, width), the last two along width."""

    device: Device
    ops: tuple[Op, ...] = tuple(Op)
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    batch_size: int
    context_length: int
    width: int
    num_heads: int
    """Heads of attention, whose tensors are (batch_size, num_heads, context_length, d_head)."""
    d_head: int
    passes: int = 50
    """Timed passes, each one forward and one backward."""
    warmup_passes: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if empty := [name for name in ("ops", "precisions") if not getattr(self, name)]:
            raise ValueError(f"{empty[0]} needs at least one value")
        names = ("batch_size", "context_length", "width", "num_heads", "d_head", "passes", "warmup_passes")
        if low := [name for name in names if getattr(self, name) < 1]:
            raise ValueError(f"{low[0]} must be at least 1, got {getattr(self, low[0])}")
        rows = self.batch_size * self.context_length
        if rows * max(self.width, self.num_heads * max(self.d_head, self.context_length)) > MAX_ELEMENTS:
            raise ValueError(f"the tensors would have more than {MAX_ELEMENTS:.0e} elements; use smaller sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRow:
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
    """Kernels of one pass in the order of their launch; on a CPU, operators that make new values."""
    must_move_bytes: Count
    """Inputs and upstream gradient read once, outputs and gradients written once: no version can do with less."""
    moved_bytes: Count | None = None
    """Operands read and results written by all operations of the pass, one by one; None for what a compiler wrote."""
    matmul_flops: Count = 0
    """Of the matrix products, a multiply-add counting as 2."""
    max_error: float | None = None
    """Largest distance from the same mathematics in float64, over the first of the batch; None if not finite."""

    @property
    def warnings(self) -> tuple[RunWarning, ...]:
        """What puts the times in doubt."""
        return measurement_warnings(self.measurement, PASSES)

    @property
    def must_move_bytes_per_s(self) -> float | None:
        """Rate at which the bytes that must move did; None without a time."""
        if self.measurement is None or not self.measurement.median_s:
            return None
        return self.must_move_bytes / self.measurement.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionStudy:
    """Everything kept of a study; tables and pictures are made from it alone."""

    grid: FusionGrid
    rows: tuple[FusionRow, ...]
    environment: Environment
    format_version: int = FORMAT_VERSION

    def eager(self, row: FusionRow) -> FusionRow:
        """The row of the same operation, precision and phase that nobody fused."""
        return next(
            other
            for other in self.rows
            if other.version is Version.EAGER
            and (other.op, other.precision, other.phase) == (row.op, row.precision, row.phase)
        )


def encode_study(study: FusionStudy) -> bytes:
    """The study as indented JSON."""
    return encode_json(study)


def read_study(path: Path) -> FusionStudy:
    """Read and check a study; raise RecordError naming the file and the first thing wrong in it."""
    return read_json(path, FusionStudy, "a study of fusion", version=FORMAT_VERSION, error=RecordError)
