"""Columns of tables: what stands above each, and how a value below it is said."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cs336_systems.report.numbers import mean_and_std, significant

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table. A row is a mapping with the value under `key`, or any object that `says` turns to text."""

    name: str
    unit: str = ""
    numeric: bool = True
    """Numbers stand to the right."""
    spare: int = 0
    """Above 0, a terminal too narrow for the table leaves the column out, the highest number first."""
    says: Callable[[Row], str] | None = None
    """The cell of a row, where it is not the value of `key` alone; unknown is an empty text."""
    key: str = ""
    """Name of the value in a row and in CSV files."""
    scale: float = 1
    """What the value is multiplied by to be in `unit`."""
    write: Callable[[Any], str] = significant
    """How the scaled value is written."""
    std: str = ""
    """Key of the standard deviation, in the unit of the value, where the cell has it too."""
    about: str = ""
    """What it is, in a sentence."""

    @property
    def label(self) -> str:
        """Name and unit on one line."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def cell(self, row: Row) -> str:
        """What a row has below this heading; empty for unknown."""
        if self.says is not None:
            return self.says(row)
        if not isinstance(row, Mapping):
            raise TypeError(f"column {self.name!r} needs rows with values by key, or says, got {type(row).__name__}")
        value, std = row[self.key], row[self.std] if self.std else None
        if value is None:
            return ""
        if self.std:
            return mean_and_std(value * self.scale, None if std is None else std * self.scale)
        return self.write(value if self.scale == 1 else value * self.scale)


STEP_INTERVAL: Column[Any] = Column("95 % interval", "ms, over processes", spare=1)
"""Of the mean step, over the means of fresh processes (Student's t)."""
