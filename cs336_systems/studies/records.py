"""What all studies share: a grid of cells to measure, the rows that come of a cell, and the file that keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import msgspec

from cs336_systems.config import Device, Precision
from cs336_systems.files import read_json
from cs336_systems.record import Environment, Failure, RecordError, Status

FORMAT_VERSION = 1
ELEMENT_BYTES = {Precision.FP32: 4, Precision.TF32: 4, Precision.BF16: 2, Precision.FP16: 2}
"""Bytes of one element of the inputs: they have the precision's own data type, there is no autocast."""
PRECISIONS_HELP = "Of inputs and products, without autocast: fp32, tf32, bf16, fp16."


class Row:
    """One row of a record, a data class: parameters, and what was measured with them or why that failed."""

    __slots__ = ()

    def failed(self, status: Status, failure: Failure) -> Self:
        """The row with the failure in place of a measurement."""
        return replace(self, status=status, failure=failure)  # type: ignore[type-var]


RowT = TypeVar("RowT", bound=Row)
AT_LEAST_ONE = msgspec.Meta(min_length=1)
"""Of the rows in a study's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Generic[RowT]):
    """What is measured in one go: rows that have only their parameters until then."""

    label: str
    """A few words for people."""
    rows: tuple[RowT, ...]

    def failed(self, status: Status, failure: Failure) -> tuple[RowT, ...]:
        """The rows with the failure in place of a measurement."""
        return tuple(row.failed(status, failure) for row in self.rows)


class Study(Protocol):
    """Everything kept of a study, in one JSON file; its tables and plots are made from it alone."""

    WHAT: ClassVar[str]
    """What the file holds, with its article."""


StudyT = TypeVar("StudyT", bound=Study)


class Grid(Generic[RowT, StudyT]):
    """What a study measures; each kind of study has a data class of this kind."""

    __slots__ = ()
    MEASURE: ClassVar[str]
    """Function that measures a cell in a worker, as `module:function`.

    It gets the grid and the rows of a cell, and returns the rows with what it measured."""
    device: Device
    timeout_s: float | None = None
    """Longest time for one cell; None for no limit."""
    world_size: int = 1
    """GPUs that a worker sees."""
    seed: int = 0
    """Seed of the inputs."""

    def groups(self) -> Sequence[Sequence[Cell[RowT]]]:
        """All cells. Those of a group share a worker as long as none of them fails."""
        raise NotImplementedError

    def study(self, rows: tuple[RowT, ...], environment: Environment) -> StudyT:
        """The study with these rows, which were measured in this environment."""
        raise NotImplementedError


def read_study(path: Path, kind: type[StudyT]) -> StudyT:
    """Read and check a study; raise RecordError naming the file and the first thing wrong in it."""
    return read_json(path, kind, kind.WHAT, version=FORMAT_VERSION, error=RecordError)
