"""Call stacks of a memory snapshot, read only where somebody asks: there are hundreds of thousands, and few differ."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cs336_systems.analysis.columns import Ints, ProfileError
from cs336_systems.analysis.memory.pickle_lanes import ListSpans
from cs336_systems.analysis.memory.unpickle import Machine, Reference

NO_STACK = -1
"""The number of a stack that was not recorded."""


class Frame(NamedTuple):
    """One call, the innermost first in its stack."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]


class Stacks:
    """Stacks by the number that columns of a snapshot hold. Equal stacks may have different numbers."""

    def __init__(self, machine: Machine, spans: Sequence[ListSpans]) -> None:
        """From lists that the machine read, and those that it passed over."""
        self._machine = machine
        self._frames: dict[int, Frame] = {}
        self._stacks: dict[bytes | int, Stack] = {NO_STACK: ()}
        empty = ListSpans(number=_EMPTY, begin=_EMPTY, end=_EMPTY)
        self._number, self._begin, self._end = (
            np.concatenate([getattr(span, name) for span in (empty, *spans)]) for name in ("number", "begin", "end")
        )  # in the order of the file, so sorted by number

    def number_of(self, frames: object) -> int | None:
        """The number of the list of frames in an event or a block; None for what is no such list."""
        if frames is None or frames == []:
            return NO_STACK
        if isinstance(frames, Reference):
            return frames.number
        if not isinstance(frames, list):
            return None
        return self._machine.number_of_list(frames)

    def __getitem__(self, number: int) -> Stack:
        """The stack with this number, empty for NO_STACK; raise ProfileError where it is no list of frames."""
        (key,) = self._keys(np.array([number], dtype=np.int64))
        return self._stack(key)

    def distinct(self, numbers: Ints) -> tuple[Ints, tuple[Stack, ...]]:
        """The stacks with these numbers, each once, and for each number the index of its stack among them."""
        unique, inverse = np.unique(numbers, return_inverse=True)
        index_of_key: dict[bytes | int, int] = {}
        index_of: dict[Stack, int] = {}
        indices = np.empty(len(unique), dtype=np.int64)
        for row, key in enumerate(self._keys(unique)):
            if key not in index_of_key:
                index_of_key[key] = index_of.setdefault(self._stack(key), len(index_of))
            indices[row] = index_of_key[key]
        return indices[inverse], tuple(index_of)

    def _keys(self, numbers: Ints) -> Iterator[bytes | int]:
        """For each number the code of its list, where that was passed over, or else the number. Equal code means equal
        stacks, for it refers to frames."""
        row = np.searchsorted(self._number, numbers)
        is_span = np.append(self._number, NO_STACK)[row] == numbers
        begin, end = (np.append(column, 0)[row] for column in (self._begin, self._end))
        for number, known, first, last in zip(
            *(column.tolist() for column in (numbers, is_span, begin, end)), strict=True
        ):
            yield bytes(self._machine.content[first:last]) if known and number != NO_STACK else number

    def _stack(self, key: bytes | int) -> Stack:
        if key not in self._stacks:
            content = self._machine.references(key) if isinstance(key, bytes) else self._machine.remembered(key)
            if not isinstance(content, list):
                raise self._error("a stack", content)
            self._stacks[key] = tuple(self._frame(frame) for frame in content)
        return self._stacks[key]

    def _frame(self, content: object) -> Frame:
        if id(content) not in self._frames:  # frames are in the memo, so their ids stay theirs
            if not isinstance(content, dict):
                raise self._error("a frame", content)
            filename, line, name = (content.get(key) for key in Frame._fields)
            if not (isinstance(filename, str) and isinstance(line, int) and isinstance(name, str)):
                raise self._error("a frame with a filename, a line and a name", content)
            self._frames[id(content)] = Frame(filename, line, name)
        return self._frames[id(content)]

    def _error(self, needed: str, got: object) -> ProfileError:
        return ProfileError(self._machine.path, f"needed {needed}, got {type(got).__name__}: the snapshot is damaged")


_EMPTY = np.zeros(0, dtype=np.int64)
