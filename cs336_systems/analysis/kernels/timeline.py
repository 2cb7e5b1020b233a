"""Look up which of many intervals contains a time."""

import numpy as np

from cs336_systems.analysis.columns import Ints


class Timeline:
    """Looks up the innermost interval at a time: of those that contain it, the one that started last.

    An interval contains its start but not its end. Intervals may cross; of two with one start the shorter is inner.
    """

    __slots__ = ("_owner", "_time", "parent")

    def __init__(self, start: Ints, end: Ints) -> None:
        self.parent: Ints = np.full(len(start), -1, dtype=np.int64)
        starts, ends, parent = start.tolist(), end.tolist(), self.parent
        times, owners, stack = [], [], list[int]()

        def close_until(now: int | None) -> None:
            while stack and (now is None or ends[stack[-1]] <= now):
                time = ends[stack.pop()]
                while stack and ends[stack[-1]] <= time:
                    stack.pop()
                times.append(time)
                owners.append(stack[-1] if stack else -1)

        for index in np.lexsort((-end, start)).tolist():
            close_until(starts[index])
            if stack:
                parent[index] = stack[-1]
            stack.append(index)
            times.append(starts[index])
            owners.append(index)
        close_until(None)
        self._time: Ints = np.array(times, dtype=np.int64)
        self._owner: Ints = np.array([*owners, -1], dtype=np.int64)  # before the first time: the last element

    def at(self, time: Ints) -> Ints:
        """Index of the innermost interval at each time, -1 for none."""
        found: Ints = self._owner[np.searchsorted(self._time, time, side="right") - 1]
        return found
