"""Tables of events as numpy arrays of equal length, and what a file is that holds none."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from ..files import FileError

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


class ProfileError(FileError):
    """The file `path` holds no profile, or a damaged one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Base of tables whose columns are numpy arrays of equal length; row i of all columns
    describes event i.
    """

    def __post_init__(self) -> None:
        """Raise ValueError unless all columns have the same length."""
        lengths = {name: len(column) for name, column in self.by_name().items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__} needs columns of one length, got {lengths}")

    @classmethod
    def empty(cls) -> Self:
        """The table without rows; its columns have the types that they are declared with."""
        columns = {}
        for field in fields(cls):
            columns[field.name] = np.zeros(0, dtype=_element_type(field.type))
        return cls(**columns)

    def by_name(self) -> dict[str, NDArray[Any]]:
        """The columns by their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        """The number of rows."""
        return len(getattr(self, fields(self)[0].name))


def _element_type(alias: Any) -> Any:  # noqa: ANN401 (a type as it is declared)
    """The type of the elements of an NDArray: numpy before 2.5 tells it within that of the array's
    dtype, as (shape, dtype[element]), and later versions as (element,).
    """
    declared = get_args(alias)[-1]
    within = get_args(declared)
    return within[0] if within else declared


SomeColumns = TypeVar("SomeColumns", bound=Columns)


def joined(first: SomeColumns, *others: SomeColumns) -> SomeColumns:
    """One table of the rows of `first` followed by those of the others."""
    columns = {}
    for name in first.by_name():
        columns[name] = np.concatenate([getattr(table, name) for table in (first, *others)])
    return type(first)(**columns)


def chosen(columns: SomeColumns, rows: Mask | Ints) -> SomeColumns:
    """The rows of the table for which the mask is true, or those with these numbers, in their
    order.
    """
    return type(columns)(**{name: column[rows] for name, column in columns.by_name().items()})


def groups(ids: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each id and the indices of the rows that have it, in ascending order."""
    order = np.argsort(ids, kind="stable")
    values, first = np.unique(ids[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, first[1:]), strict=False)


def runs(codes: Ints) -> tuple[Ints, Ints]:
    """The first and the last row of each run of equal codes, which are not negative."""
    first = np.flatnonzero(np.diff(codes, prepend=-1))
    behind = np.append(first, len(codes))[1:]
    return first, behind - 1


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """A table with as many rows for each count: to which count a row belongs, and its place among
    the rows of that.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner]


SQLITE_MAGIC = b"SQLite format 3\0"
GZIP_MAGIC = b"\x1f\x8b"
ZIP_MAGIC = b"PK\x03\x04"
_COMPRESSORS = {b"\xfd7zXZ\0": "xz", GZIP_MAGIC: "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def read_head(path: Path, num_bytes: int, needed: str) -> bytes:
    """The first bytes of a regular file; raise ProfileError, which says what was `needed`, for
    anything else.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise ProfileError(path, f"needed {needed}, got {kind}")
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise (
            error
            if isinstance(error, ProfileError)
            else ProfileError(path, f"no name of a file: {error}")
        ) from error


def what_it_is(path: Path, head: bytes) -> str:
    """What kind of file this is, in words, and what to do with it if that is known; for a file
    of the wrong kind.
    """
    if path.suffix == ".nsys-rep":
        return f"it is the report itself: export it with `nsys export --type=sqlite {path.name}`"
    for magic, compressor in _COMPRESSORS.items():
        if head.startswith(magic):
            remedy = f"decompress it first, with `{compressor} -dk`"
            return f"it is compressed with {compressor}: {remedy}"
    if head[:1] == b"\x80":
        return "it is a pickle, as PyTorch's memory snapshots are: `cs336 memory` explains those"
    return "it is something else" if head else "it is empty"
