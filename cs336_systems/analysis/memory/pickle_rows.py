"""Reads the long lists of equal dicts in a pickle in columns, without making a single dict: a million in half a second.

Where a dict begins is guessed from the bytes that all of them begin with, and all are then read in step. The guess is
proven: each must end where the next begins. Dicts that differ are left to the machine, in their turn.
"""

import pickletools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.memory.pickle_lanes import PREFIX, Field, Kind, Lanes, ListSpans, Words, matches
from cs336_systems.analysis.memory.unpickle import PASSED_OVER, Machine, Reference

CHUNK_BYTES = 2**22
"""Read at a time, so that its columns stay in the processor's cache."""
PATIENCE = 64
"""Chunks that may end early before no more is guessed: in a file made to mislead, every one does."""
FRAME = b"\x95"
"""It means nothing, and may begin before any key or value."""
_BETWEEN = re.compile(rb"(?:\x95.{8})?(?:e(?:\x95.{8})?\((?:\x95.{8})?)?", re.DOTALL)
"""Between two items of a list: the end of a batch and the mark of the next, and frames, which mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Dicts that follow each other in a list."""

    length: int
    numbers: Mapping[str, Ints]
    """Values of the keys that have whole numbers."""
    references: Mapping[str, Ints]
    """Of the other keys, the number of each value in the memo."""
    others: Mapping[int, Mapping[str, Any]]
    """Rows that were not like that, by their index; the columns mean nothing there."""


class RowReader:
    """A shortcut for a `Machine`: puts `Rows` in the place of dicts."""

    def __init__(self, content: bytearray, texts: Collection[str]) -> None:
        """For dicts with the keys `texts`: their texts matter, so a new one is left to the machine, which keeps it."""
        self._texts = texts
        self._bytes = np.frombuffer(content, dtype=np.uint8)
        self._words: Words = np.ndarray(shape=(len(content) - 7,), dtype="<u8", buffer=content, strides=(1,))
        self._patience = PATIENCE
        self.spans: list[ListSpans] = []

    def __call__(self, machine: Machine, items: list[Any]) -> None:
        """Read dicts like the first that follows."""
        begin = machine.position + 1
        if self._patience <= 0 or machine.content[begin : begin + len(PREFIX)] != PREFIX:
            return
        items.append(machine.load_dict(begin))
        machine.open_batch()
        fields = _fields(bytes(machine.content[begin : machine.position]), items[-1], self._texts)
        while fields and self._patience > 0 and (rows := self._rows(machine, fields)):
            items.append(rows)

    def _rows(self, machine: Machine, fields: list[Field]) -> Rows | None:
        starts = self._starts(machine.position, PREFIX + fields[0].code)
        if not len(starts) or not _follows(machine.content, machine.position, int(starts[0])):
            return None
        lanes = Lanes(self._bytes, self._words, starts)
        for field in fields:
            lanes.read(field)
        lanes.expect(b"u")
        first, others = _read_others(machine, lanes)
        self._patience -= len(first) < len(starts)
        self.spans += [span.numbered(first) for span in lanes.spans]
        return Rows(
            length=len(first),
            numbers={name: column[: len(first)] for name, column in lanes.numbers.items()},
            references={
                name: np.where(column[: len(first)] < 0, first - 1 - column[: len(first)], column[: len(first)])
                for name, column in lanes.references.items()
            },
            others=others,
        )

    def _starts(self, begin: int, signature: bytes) -> Ints:
        found = np.flatnonzero(self._bytes[begin : begin + CHUNK_BYTES] == PREFIX[0]) + begin
        word = self._words[found[found < len(self._words)]]
        return found[: len(word)][matches(word, signature) | matches(word, PREFIX + FRAME)]


def _read_others(machine: Machine, lanes: Lanes) -> tuple[Ints, dict[int, dict[str, Any]]]:
    """The number of the first object in each lane, up to the last that another lane follows; and the lanes that differ.

    The machine reads the latter, and stands behind the last lane then.
    """
    starts, ends = lanes.starts, lanes.at.copy()
    is_followed = np.append(ends[:-1] == starts[1:], True)
    for lane in np.flatnonzero(lanes.is_read & ~is_followed).tolist():
        is_followed[lane] = _follows(machine.content, int(ends[lane]), int(starts[lane + 1]))
    alone = np.flatnonzero(lanes.is_read & ~is_followed)
    length = int(alone[0]) + 1 if len(alone) else len(starts)
    num_objects = np.where(lanes.is_read, lanes.num_objects, 0)
    first_number, done = len(machine.memo), 0
    others: dict[int, dict[str, Any]] = {}
    for lane in np.flatnonzero(~lanes.is_read[:length]).tolist():
        _pass_over(machine, num_objects[done:lane])
        num_before, done = len(machine.memo), lane + 1
        others[lane] = machine.load_dict(int(starts[lane]))
        num_objects[lane], ends[lane] = len(machine.memo) - num_before, machine.position
        if lane + 1 < length and not _follows(machine.content, machine.position, int(starts[lane + 1])):
            length = lane + 1
            break
    _pass_over(machine, num_objects[done:length])
    machine.position = int(ends[length - 1])
    return first_number + np.cumsum(num_objects[:length]) - num_objects[:length], others


def _pass_over(machine: Machine, num_objects: Ints) -> None:
    machine.memo.extend([PASSED_OVER] * int(num_objects.sum()))


def _follows(content: bytearray, end: int, start: int) -> bool:
    """Whether the item that starts there is the next in the list."""
    between = _BETWEEN.match(content, end)
    return between is not None and between.end() == start


def _fields(code: bytes, template: Mapping[str, Any], texts: Collection[str]) -> list[Field]:
    """How the dict is written, of which this is the code; empty where it is not wanted, or not as `Kind` knows it."""
    if not template.keys() >= set(texts):
        return []
    opcodes = [(opcode.name, position) for opcode, _, position in pickletools.genops(code + b".")]
    fields, at = [], 3
    for name, value in template.items():
        (key, begin), (_, end) = opcodes[at], opcodes[at + 1]
        kind, length = _kind([name for name, _ in opcodes[at + 1 :]], value)
        if not key.endswith("BINGET") or kind is None:
            return []
        if kind is Kind.TEXT and name in texts:
            kind = Kind.SHARED
        fields.append(Field(name=name, code=code[begin:end], kind=kind))
        at += 1 + length
    return fields if opcodes[at][0] == "SETITEMS" else []


def _kind(written: list[str], value: object) -> tuple[Kind | None, int]:
    """Of a value, and how many opcodes it has."""
    if written[0].endswith("BINGET"):
        kinds = {str: Kind.SHARED, tuple: Kind.PAIR, list: Kind.LIST, Reference: Kind.LIST}
        return kinds.get(type(value)), 1
    if type(value) is int:
        return Kind.NUMBER, 1
    if written[:2] == ["SHORT_BINUNICODE", "MEMOIZE"]:
        return Kind.TEXT, 2
    if written[2:4] == ["TUPLE2", "MEMOIZE"]:
        return Kind.PAIR, 4
    if written[:2] == ["EMPTY_LIST", "MEMOIZE"]:
        return Kind.LIST, 2 + _list_length(written[2:])
    return None, 0


def _list_length(written: list[str]) -> int:
    """Opcodes of the items of a list."""
    if written[0] == "MARK":
        num_open = np.cumsum([(name == "MARK") - (name in ("APPENDS", "SETITEMS", "TUPLE")) for name in written])
        return int(np.flatnonzero(num_open == 0)[0]) + 1
    return 2 if written[1] == "APPEND" else 0
