"""Memory that rises from step to step of a watched loop, and what holds it."""

import gc
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from time import monotonic

import torch
from torch import Tensor

from ..loop_record import MemoryGrowth
from .observer import Observer

MOST_KEPT = 128
"""Most readings that are kept; beyond, every other one goes, and half as many are made."""
SPACING_S = 0.05
"""Least time between two readings, of which each takes some 50 us: a thousandth of it."""
PARTS, FEWEST = 8, 32
"""Equal parts of the readings whose minima are compared, and the fewest readings to do so."""
RISING_PARTS = 4
"""Fewest parts at the end whose minima rise: fewer may be the loop's own beginning."""
LEAST_BYTES = 2**20
"""Least rise in all that is named."""
MOST_IN_SLOPE = 64
"""Most readings between which slopes are taken: each pair has one."""
HELD_SHARE = 0.5
"""Least number of tensors alike, relative to the steps, to say that each step leaves one."""


def allocated_on_gpu() -> int:
    """Bytes that PyTorch's allocator has given out, by the call that makes the fewest objects."""
    counters = torch.cuda.memory_stats_as_nested_dict()
    return counters["allocated_bytes"]["all"]["current"] if counters else 0


class Growth(Observer):
    """Reads the allocated bytes at the end of measured steps, ever more rarely."""

    def __init__(self, read: Callable[[], int], spacing_s: float = SPACING_S) -> None:
        self._read, self._spacing_s = read, spacing_s
        self._due_s = -math.inf
        self._every = 1
        self._readings: list[tuple[int, int]] = []
        """Numbers of steps, and the bytes at their ends."""

    def step_ended(self, number: int) -> None:
        """Read the bytes of some steps."""
        if number < 0 or number % self._every:
            return
        now_s = monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._spacing_s
        self._readings.append((number, self._read()))
        if len(self._readings) == MOST_KEPT:
            self._every *= 2
            del self._readings[1::2]

    def growth(self, first: int) -> MemoryGrowth | None:
        """How the bytes rise; `first` is the number of the record's first step. None where they do
        not rise, or that was not seen.
        """
        rising = rising_from(self._readings)
        if rising is None:
            return None
        readings = self._readings[rising:]
        since, to = readings[0][0], readings[-1][0]
        return MemoryGrowth(
            bytes_per_step=slope(readings),
            since_step=max(0, since - first),
            to_step=max(0, to - first),
            holders=holders(to - since),
        )


def rising_from(readings: Sequence[tuple[int, int]]) -> int | None:
    """The index of the reading from which on the bytes rise; None if they do not to the end.

    Batches of unequal length move single readings, so that minima of parts are compared.
    """
    if len(readings) < FEWEST:
        return None
    size = len(readings) // PARTS
    begins = [len(readings) - size * part for part in range(PARTS, 0, -1)]
    floors = [min(count for _, count in readings[begin : begin + size]) for begin in begins]
    rising = 0
    for earlier, later in pairwise(floors):
        rising = rising + 1 if later > earlier else 0
    if rising < RISING_PARTS or floors[-1] - floors[-1 - rising] < LEAST_BYTES:
        return None
    # the last reading that is as low as before
    low = floors[-1 - rising]
    return max(index for index, (_, count) in enumerate(readings) if count <= low)


def slope(readings: Sequence[tuple[int, int]]) -> float:
    """Bytes a step: the median of the slopes between all readings (Theil 1950, Sen 1968), of which
    some are taken.
    """
    stride = -(-len(readings) // MOST_IN_SLOPE)
    slopes = []
    for (step, count), (later_step, later_count) in combinations(readings[::-stride], 2):
        slopes.append((later_count - count) / (later_step - step))
    return statistics.median(slopes)


def holders(steps: int) -> tuple[str, ...]:
    """What is alive about as often as there were steps, the most first: tensors with their graphs,
    and tensors of one shape.
    """
    alike = Counter[str]()
    for thing in gc.get_objects():
        # isinstance would ask proxies for their class, which may do anything
        if issubclass(type(thing), Tensor):
            alike[_kind(thing)] += 1
    few = max(2, HELD_SHARE * steps)
    return tuple(f"{count} {kind}" for kind, count in alike.most_common(2) if count >= few)


def _kind(tensor: Tensor) -> str:
    shape = " x ".join(map(str, tensor.shape))
    node = tensor.grad_fn
    if node is None:
        return f"tensors of {shape or 'one number'}"
    if not shape:
        return f"numbers kept with their graphs ({node.name()})"
    return f"tensors of {shape} kept with their graphs ({node.name()})"
