"""Tables of events as numpy arrays of equal length, and the error for a file that holds no profile."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cs336_systems.files import FileError

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class ProfileError(FileError):
    """The file `path` holds no profile, or a damaged one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Base of tables whose columns are numpy arrays of equal length; row i of all columns describes event i."""

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__} needs columns of one length, got {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))


SomeColumns = TypeVar("SomeColumns", bound=Columns)


def joined(first: SomeColumns, second: SomeColumns) -> SomeColumns:
    """The rows of `first`, followed by those of `second`."""
    both = {field.name: (getattr(first, field.name), getattr(second, field.name)) for field in fields(first)}
    return type(first)(**{name: np.concatenate(columns) for name, columns in both.items()})


def chosen(columns: SomeColumns, rows: Mask | Ints) -> SomeColumns:
    """The rows of the table for which the mask is true, or those with these numbers, in their order."""
    return type(columns)(**{field.name: getattr(columns, field.name)[rows] for field in fields(columns)})


def groups(ids: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each id and the indices of the rows that have it, in ascending order."""
    order = np.argsort(ids, kind="stable")
    values, first = np.unique(ids[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, first[1:]), strict=False)
