"""Page faults of steps on a CPU, which take time where malloc returns the memory of large tensors to the system."""

import resource
import statistics
from collections.abc import Sequence
from time import perf_counter

import torch

from cs336_systems.record import RunWarning, WarningCode

MIN_SHARE, MIN_FRESH_BYTES = 0.05, 2**20
"""Least share of a step that page faults must take, and least bytes that they must provide, for a warning."""
KEEP_MEMORY = "MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=4294967296"
"""With these in the environment, glibc's malloc returns no memory to the system."""
_ELEMENTS, _TIMES = 10 * 2**20, 5
"""Size of the tensor whose page faults are timed (40 MiB, which malloc maps anew each time), and how often."""


def count_page_faults() -> int:
    """How many pages of memory the system has given this process so far, each when it was first touched."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def page_fault_s() -> float:
    """The least time of a page fault of a large tensor, with all threads at work; 0.0 if such a tensor has none.

    This is how much longer a tensor takes to allocate, fill and free than to fill again, divided by its page faults.
    """
    found = []
    for _ in range(_TIMES):
        before, begin = count_page_faults(), perf_counter()
        fresh = torch.empty(_ELEMENTS)
        fresh.fill_(1.0)
        filled = perf_counter()
        fresh.fill_(1.0)
        again = perf_counter()
        del fresh
        more_s = (filled - begin) - (again - filled) + (perf_counter() - again)
        faults = count_page_faults() - before
        found.append(more_s / faults if faults else 0.0)
    return max(0.0, min(found))


def page_fault_warnings(faults: Sequence[int], times_s: Sequence[float]) -> list[RunWarning]:
    """A warning if page faults take much of most steps; `faults` and `times_s` (s) are those of each step."""
    typical = statistics.median(faults)
    fresh_bytes = typical * resource.getpagesize()
    if fresh_bytes < MIN_FRESH_BYTES:
        return []
    share = typical * page_fault_s() / statistics.median(times_s)
    if share < MIN_SHARE:
        return []
    message = (
        f"page faults took about {share:.0%} of the step: malloc returns the memory of large tensors to the system, "
        f"and asks for {fresh_bytes / 2**20:.0f} MiB again in each step; with glibc, put {KEEP_MEMORY} before the "
        "command, and malloc keeps the memory"
    )
    return [RunWarning(code=WarningCode.PAGE_FAULTS, message=message)]
