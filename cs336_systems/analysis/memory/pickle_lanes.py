"""Reads dicts of equal keys in the bytes of a pickle, all in step: a step is one key and its value, in every dict."""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Ints, Mask

Words = NDArray[np.uint64]
"""Every eight bytes that follow each other, at any position."""

PREFIX = b"}\x94("
"""A new dict and the mark of its first batch."""
MAX_ITEMS = 1000
"""Of a list that is read here; a pickle hands longer ones over in batches."""


class Kind(Enum):
    """How a value is written."""

    NUMBER = auto()
    SHARED = auto()
    """An object that was there before."""
    TEXT = auto()
    LIST = auto()
    PAIR = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of the dicts."""

    name: str
    code: bytes
    """How the key is written."""
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSpans:
    """Lists of the pickle that were passed over: where the references to their items stand."""

    number: Ints
    begin: Ints
    end: Ints


class Lanes:
    """One dict in each lane, and all of them read in step."""

    def __init__(self, content: NDArray[np.uint8], words: Words, starts: Ints) -> None:
        self.starts = starts
        self.at = starts + len(PREFIX)
        """Where each lane stands."""
        self.is_read = np.ones(len(starts), dtype=np.bool_)
        """So far, the lane held what was expected."""
        self.num_objects = np.ones(len(starts), dtype=np.int64)
        """In the memo: the dict itself to begin with."""
        self.numbers: dict[str, Ints] = {}
        self.references: dict[str, Ints] = {}
        """Numbers in the memo; of the lane's own object k, -1 - k."""
        self.spans: list[Spans] = []
        self._content, self._words = content, words

    def expect(self, code: bytes) -> None:
        """The lanes continue with these bytes."""
        self.is_read &= matches(self._words[self.at], code)
        self._advance(len(code))

    def _advance(self, num_bytes: Ints | int) -> None:
        self.at = np.minimum(self.at + num_bytes, len(self._words) - 1)

    def read(self, field: Field) -> None:
        """The lanes continue with this key and a value of its kind."""
        self.expect(field.code)
        if field.kind is Kind.NUMBER:
            self.numbers[field.name], length = _whole_numbers(self._words, self.at)
            self.is_read &= length > 0
            self._advance(length)
            return
        column, length = _gets(self._words[self.at])
        own = np.flatnonzero(length == 0)
        self._advance(length)
        is_known = np.zeros(len(own), dtype=np.bool_)
        if field.kind is Kind.TEXT:
            is_known = self._text(own)
        elif field.kind is Kind.PAIR:
            is_known = self._pair(own)
        elif field.kind is Kind.LIST:
            is_known = self._list(own)
        self.is_read[own] &= is_known
        column[own] = -1 - self.num_objects[own]
        self.num_objects[own] += 1
        self.references[field.name] = column

    def _text(self, own: Ints) -> Mask:
        word = self._words[self.at[own]]
        after = np.minimum(self.at[own] + 2 + _bits(word, 8, 8), len(self._words) - 1)
        self.at[own] = np.minimum(after + 1, len(self._words) - 1)
        is_text: Mask = (_bits(word, 0, 8) == _TEXT) & (self._content[after] == _MEMOISE)
        return is_text

    def _pair(self, own: Ints) -> Mask:
        _, first = _whole_numbers(self._words, self.at[own])
        middle = np.minimum(self.at[own] + first, len(self._words) - 1)
        _, second = _whole_numbers(self._words, middle)
        after = np.minimum(middle + second, len(self._words) - 1)
        self.at[own] = np.minimum(after + 2, len(self._words) - 1)
        return (first > 0) & (second > 0) & matches(self._words[after], b"\x86\x94")

    def _list(self, own: Ints) -> Mask:
        """Lists of references: a batch, a single one, or none."""
        is_list = matches(self._words[self.at[own]], b"]\x94")
        begin = self.at[own] + 2 * is_list
        word = self._words[begin]
        is_batch = is_list & (_bits(word, 0, 8) == _MARK)
        _, single = _gets(word)
        is_single = is_list & (single > 0) & (self._content[begin + single] == _APPEND)
        end = np.where(is_single, begin + single, begin)
        begin[is_batch] += 1
        end[is_batch] = self._end_of_gets(begin[is_batch])
        is_list &= ~is_batch | (self._content[end] == _APPENDS)
        self.at[own] = np.minimum(end + (is_batch | is_single), len(self._words) - 1)
        self.spans.append(Spans(self, own[is_list], self.num_objects[own[is_list]], begin[is_list], end[is_list]))
        return is_list

    def _end_of_gets(self, at: Ints) -> Ints:
        ends = at.copy()
        rows = np.arange(len(at))
        for _ in range(MAX_ITEMS):
            step = _GET_BYTES[self._content[at]]
            if not step.all():
                ends[rows] = at
                rows, at, step = rows[step > 0], at[step > 0], step[step > 0]
            if not len(rows):
                break
            at = np.minimum(at + step, len(self._words) - 1)
        return ends


@dataclass(frozen=True, slots=True)
class Spans:
    """Lists that lanes hold: object k of the lane each."""

    lanes: Lanes
    lane: Ints
    k: Ints
    begin: Ints
    end: Ints

    def numbered(self, first_number: Ints) -> ListSpans:
        """With their numbers in the memo, given that of each lane's first object."""
        kept = np.flatnonzero((self.lane < len(first_number)) & self.lanes.is_read[self.lane])
        number = first_number[self.lane[kept]] + self.k[kept]
        return ListSpans(number=number, begin=self.begin[kept], end=self.end[kept])


def _bits(words: Words, begin: int, num_bits: int) -> Ints:
    return (words >> np.uint64(begin) & np.uint64(2**num_bits - 1)).astype(np.int64)


def matches(words: Words, code: bytes) -> Mask:
    """Which of the words begin with these bytes, eight at most."""
    shift = 64 - 8 * len(code)
    begins: Mask = words << np.uint64(shift) == np.uint64(int.from_bytes(code, "little") << shift)
    return begins


def _whole_numbers(words: Words, at: Ints) -> tuple[Ints, Ints]:
    """The numbers that stand there, and the bytes that each takes: 0 where there is none."""
    word = words[at]
    code, length_bytes = _bits(word, 0, 8), _bits(word, 8, 8)
    values, num_bytes = np.zeros_like(at), np.zeros_like(at)
    for wanted, num_bits in ((b"K", 8), (b"M", 16), (b"J", 32)):
        rows = np.flatnonzero(code == ord(wanted))
        values[rows], num_bytes[rows] = _bits(word[rows], 8, num_bits), 1 + num_bits // 8
    signed = np.flatnonzero(num_bytes == 5)
    values[signed] = values[signed].astype(np.int32)
    rows = np.flatnonzero((code == _LONG) & (length_bytes > 0) & (length_bytes <= 8))
    shift = (64 - 8 * length_bytes[rows]).astype(np.uint64)
    values[rows] = (words[at[rows] + 2] << shift).view(np.int64) >> shift.view(np.int64)
    num_bytes[rows] = 2 + length_bytes[rows]
    return values, num_bytes


def _gets(word: Words) -> tuple[Ints, Ints]:
    """The numbers that these words refer to, and the bytes that each takes: 0 where it is no reference."""
    num_bytes = _GET_BYTES[_bits(word, 0, 8)]
    return np.where(num_bytes == 5, _bits(word, 8, 32), _bits(word, 8, 8)), num_bytes


_LONG, _TEXT, _MEMOISE, _MARK, _APPEND, _APPENDS = b"\x8a\x8c\x94(ae"
_GET_BYTES = np.zeros(256, dtype=np.int64)
_GET_BYTES[[ord("h"), ord("j")]] = 2, 5
