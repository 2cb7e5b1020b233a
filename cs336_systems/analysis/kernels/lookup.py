"""Strings and launches, found by the numbers that a file knows them by."""

from collections.abc import Iterable, Mapping

import numpy as np

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.kernels.trace import ApiCalls


class Strings:
    """The trace's own table of strings, filled as they are met; `known` are those that the file numbers."""

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        self._known = {} if known is None else known
        self._ids: dict[str, int] = {}

    def id(self, text: str) -> int:
        """Our number of the string."""
        return self._ids.setdefault(text, len(self._ids))

    def ids(self, texts: Iterable[str]) -> Ints:
        """Our numbers of the strings."""
        known = self._ids
        return np.array([known.setdefault(text, len(known)) for text in texts], dtype=np.int64)

    def column(self, keys: Ints, known: Mapping[int, str] | None = None, unknown: str = "") -> Ints:
        """Our ids of the file's ids, which are those of its strings unless `known` says otherwise."""
        known = self._known if known is None else known
        unique, inverse = np.unique(keys, return_inverse=True)
        mine = np.array([self.id(known.get(key, unknown)) for key in unique.tolist()], dtype=np.int64)
        return mine[inverse]

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self._ids)


class Launches:
    """Calls to look up by process and correlation id, each found once however often it is in the file."""

    def __init__(self, calls: ApiCalls) -> None:
        self._processes = np.unique(calls.process)
        key = self._key(calls.process, calls.correlation)
        order = np.lexsort((calls.start_ns, key))
        self._key_sorted, self._order, self._calls = key[order], order, calls

    def _key(self, process: Ints, correlation: Ints) -> Ints:
        """One number for both; -1 where there is nothing to look up. CUPTI counts from 1 in 32 bits."""
        at = np.searchsorted(self._processes, process)
        known = np.append(self._processes, -1)[at] == process
        return np.where(known & (correlation > 0) & (correlation < 2**32), (at << 32) | correlation, -1)

    def find(self, process: Ints, correlation: Ints) -> Ints:
        """The row of each one's call, -1 for none."""
        key = self._key(process, correlation)
        at = np.searchsorted(self._key_sorted, key)
        found = (np.append(self._key_sorted, -1)[at] == key) & (key >= 0)
        return np.where(found, np.append(self._order, -1)[at], -1)

    def columns(self, rows: Ints) -> tuple[Mask, Ints, Ints]:
        """Of calls as `find` gives them: whether each was found, and its time and thread."""
        return rows >= 0, np.append(self._calls.start_ns, 0)[rows], np.append(self._calls.thread, 0)[rows]
