"""What all studies share: a grid of cells, their rows, the file that keeps them; and the record
of precision's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from ..config import Device, Precision
from ..files import read_json
from ..record import Environment, Failure, Input, RecordError, Status

FORMAT_VERSION = 1
PRECISIONS_HELP = "Of inputs and products, without autocast: fp32, tf32, bf16, fp16."


class StudyRow:
    """One row of a record, a data class: parameters, and what was measured with them or why that
    failed.
    """

    __slots__ = ()

    def failed(self, status: Status, failure: Failure) -> Self:
        """The row with the failure in place of a measurement."""
        return replace(self, status=status, failure=failure)  # type: ignore[type-var]


RowT = TypeVar("RowT", bound=StudyRow)
AT_LEAST_ONE = msgspec.Meta(min_length=1)
"""Of the rows in a study's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Generic[RowT]):
    """What is measured in one go: rows that have only their parameters until then."""

    label: str
    """A few words for people."""
    rows: tuple[RowT, ...]
    part: str = ""
    """The part of the study by which its seconds are summed up; empty if it has no parts."""

    def failed(self, status: Status, failure: Failure) -> tuple[RowT, ...]:
        """The rows with the failure in place of a measurement."""
        return tuple(row.failed(status, failure) for row in self.rows)


class Answer(NamedTuple, Generic[RowT]):
    """What a worker sends when it has measured a cell."""

    rows: tuple[RowT, ...]
    is_fit: bool
    """Whether the worker can measure another cell."""


class StudyRecord(Protocol):
    """Everything kept of a study, in one JSON file; its tables and plots are made from it alone."""

    WHAT: ClassVar[str]
    """What the file holds, with its article."""


StudyT = TypeVar("StudyT", bound=StudyRecord)


class Grid(Generic[RowT, StudyT]):
    """What a study measures; each kind of study has a data class of this kind."""

    __slots__ = ()
    MEASURE: ClassVar[str]
    """Function that measures a cell in a worker, as `module:function`.

    It gets the grid and the rows of a cell, and returns the rows with what it measured."""
    SELECTING: ClassVar[frozenset[str]] = frozenset({"timeout_s", "world_size"})
    """Fields with one value that only say which cells the grid has, and do not influence what is
    measured.
    """
    device: Device
    timeout_s: float | None = None
    """Longest time for one cell; None for no limit."""
    world_size: int = 1
    """GPUs that a worker sees."""
    seed: int = 0
    """Seed of the inputs."""
    own: str | None = None
    source: Input | None = None
    """The user's code that the study measures, and its source as it was when the study began."""

    def groups(self) -> Sequence[Sequence[Cell[RowT]]]:
        """All cells. Those of a group share a worker as long as none of them fails."""
        raise NotImplementedError

    def study(self, rows: tuple[RowT, ...], environment: Environment) -> StudyT:
        """The study with these rows, which were measured in this environment."""
        raise NotImplementedError


def read_study(path: Path, kind: type[StudyT], data: bytes | None = None) -> StudyT:
    """Read and check a study; raise RecordError naming the file and the first thing wrong in it.

    `data` is the content of the file, if the file is compressed.
    """
    return read_json(path, kind, kind.WHAT, version=FORMAT_VERSION, error=RecordError, data=data)


MIXED_PRECISIONS = (Precision.FP16, Precision.BF16)
NORM_INPUT, NORM_OUTPUT = "layer norm's input", "layer norm's output (ln)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """A number added up `count` times, one addition after the other."""

    sum_dtype: str
    addend_dtype: str
    cast: bool
    """Whether each addend was cast to the sum's type before it was added."""
    addend: float
    count: int
    total: float
    stored_addend: float
    """The addend as its type holds it."""
    growing_additions: int
    """Number of the last addition that changed the sum."""

    @property
    def exact(self) -> float:
        """The exact sum in real numbers: the addend times the number of additions."""
        return self.addend * self.count

    @property
    def error(self) -> float:
        """The sum minus the exact sum."""
        return self.total - self.exact

    @property
    def storage_error(self) -> float:
        """The part of the error that an exact sum of the stored addends would have too."""
        return self.stored_addend * self.count - self.exact

    @property
    def rounding_error(self) -> float:
        """The part of the error that comes from rounding the sum after every addition."""
        return self.error - self.storage_error


@dataclass(frozen=True, slots=True)
class ObservedDtype:
    """Data type of one quantity of a training step under autocast."""

    model: str
    device: Device
    precision: Precision
    quantity: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalisedActivations:
    """Activations `centre + scale` and `centre - scale`, in equal numbers, normalised in one
    data type throughout.
    """

    centre: float
    scale: float
    dtype: str
    variance: float | None
    """Variance as computed in the data type, of activations rounded to it; None beyond its
    range.
    """
    exact_variance: float
    """Variance as computed in fp64."""
    output: float | None
    """Normalised value of `centre + scale`, as computed in the data type; None beyond its range."""
    exact_output: float
    """Normalised value as computed in fp64."""
    library_output: float | None
    """Normalised value from torch.nn.functional.layer_norm, for activations in the data type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionStudy:
    """Everything kept of a study of precision."""

    WHAT: ClassVar[str] = "a study of precision"

    torch: str
    """Version."""
    gpu: str | None
    """Name of the GPU on which autocast was observed, or None."""
    accumulation: Annotated[tuple[Accumulation, ...], AT_LEAST_ONE]
    dtypes: Annotated[tuple[ObservedDtype, ...], AT_LEAST_ONE]
    layer_norm: tuple[NormalisedActivations, ...] = ()
    """Empty in records of earlier versions."""
    format_version: int = FORMAT_VERSION
