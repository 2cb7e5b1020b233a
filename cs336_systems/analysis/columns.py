"""What every reader of profiles makes: arrays of one length. And the error of a file that holds none."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from cs336_systems.files import FileError

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class ProfileError(FileError):
    """The file `path` should hold a profile and does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Arrays of one length; row i of all of them is event i."""

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__} needs columns of one length, got {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))
