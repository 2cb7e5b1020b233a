"""Tables of strings and of launching calls, looked up by the numbers that a file uses for them."""

from collections.abc import Iterable, Mapping

import numpy as np

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.kernels.trace import ApiCalls


class Strings:
    """The trace's table of strings, filled as they occur; `known` maps the file's numbers to strings."""

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        self._known = {} if known is None else known
        self._ids: dict[str, int] = {}

    def id(self, text: str) -> int:
        """The string's index in this table."""
        return self._ids.setdefault(text, len(self._ids))

    def ids(self, texts: Iterable[str]) -> Ints:
        """The strings' indices in this table."""
        known = self._ids
        return np.array([known.setdefault(text, len(known)) for text in texts], dtype=np.int64)

    def column(self, keys: Ints, known: Mapping[int, str] | None = None, unknown: str = "") -> Ints:
        """Indices in this table for the file's numbers, looked up in `known` or, by default, in the file's strings."""
        known = self._known if known is None else known
        unique, inverse = np.unique(keys, return_inverse=True)
        mine = np.array([self.id(known.get(key, unknown)) for key in unique.tolist()], dtype=np.int64)
        return mine[inverse]

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self._ids)


class Launches:
    """Finds calls by process and correlation id; of calls with the same ids, the first."""

    def __init__(self, calls: ApiCalls) -> None:
        self._processes = np.unique(calls.process)
        key = self._key(calls.process, calls.correlation)
        order = np.lexsort((calls.start_ns, key))
        self._key_sorted, self._order, self._calls = key[order], order, calls

    def _key(self, process: Ints, correlation: Ints) -> Ints:
        """Process and correlation id in one number; -1 for invalid ids. CUPTI counts ids from 1 in 32 bits."""
        at = np.searchsorted(self._processes, process)
        known = np.append(self._processes, -1)[at] == process
        return np.where(known & (correlation > 0) & (correlation < 2**32), (at << 32) | correlation, -1)

    def find(self, process: Ints, correlation: Ints) -> Ints:
        """The row of the call for each pair of ids, or -1."""
        key = self._key(process, correlation)
        at = np.searchsorted(self._key_sorted, key)
        found = (np.append(self._key_sorted, -1)[at] == key) & (key >= 0)
        return np.where(found, np.append(self._order, -1)[at], -1)

    def columns(self, rows: Ints) -> tuple[Mask, Ints, Ints]:
        """For rows from `find`: whether a call was found, its start and its thread."""
        return rows >= 0, np.append(self._calls.start_ns, 0)[rows], np.append(self._calls.thread, 0)[rows]
