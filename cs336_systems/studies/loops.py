"""Times operations that are too short for a clock, in loops of calls or in CUDA graphs."""

import math
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import torch

from ..config import Device
from .ceilings_records import CeilingsGrid
from .ceilings_rows import MIN_TIME_S, Loops

GRAPH_BELOW_S = 1e-3
"""A run shorter than this is repeated within a CUDA graph; otherwise its launch may take longer
than the run itself.

The host needs 6 to 10 us for one kernel, and up to 0.3 ms for a backward pass of autograd.
"""
GRAPH_S = 0.01
MAX_GRAPH_RUNS = 100
"""Most runs in one graph; a graph has as many as take GRAPH_S."""
PROBES = 3
MAX_GROWTH = 100
"""Largest factor from one number of repetitions to the next, because a first measured time may
be far too short.
"""
MARGIN = 1.1
"""The next loop is planned to take this many times the wanted time, so that it does not narrowly
miss it again.
"""

Run = Callable[[], object]
Timer = Callable[[Run, int], float]
"""Time in seconds of a number of calls, until everything that they launched is done."""


def host_timer(run: Run, count: int, synchronize: Callable[[], None] = lambda: None) -> float:
    """Time `count` calls by the host's clock."""
    synchronize()
    start = perf_counter_ns()
    for _ in range(count):
        run()
    synchronize()
    return (perf_counter_ns() - start) / 1e9


launch_timer = partial(host_timer, synchronize=torch.cuda.synchronize)
"""Time `count` calls by the host's clock, from an idle device to an idle device.

Where the host is slower than the device, this is the time of the launches."""


def device_timer(run: Run, count: int) -> float:
    """Time `count` calls by CUDA events around all of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(run: Run, grid: CeilingsGrid, agree: Callable[[float], float] = float) -> Loops:
    """Time `run` on the grid's device. Raises whatever `run` raises.

    If several processes run it together, `agree` turns their times into one, so that all choose the
    same number of repetitions.
    """
    clock = host_timer if grid.device is Device.CPU else device_timer

    def timer(run: Run, count: int) -> float:
        """Time in seconds of `count` repetitions, on which all processes agree."""
        return agree(clock(run, count))

    if grid.device is Device.CPU:
        return timed_loops(run, timer, grid)
    timer(run, 1)  # the first run loads libraries and allocates memory
    time_s = min(timer(run, 1) for _ in range(PROBES))
    if time_s >= GRAPH_BELOW_S:
        return timed_loops(run, timer, grid)
    runs = min(MAX_GRAPH_RUNS, math.ceil(GRAPH_S / time_s))
    return timed_loops(replayed(run, runs), timer, grid, runs_per_call=runs)


def replayed(run: Run, count: int) -> Run:
    """A function that launches `count` runs at once, as a CUDA graph. `run` must have been called
    before.

    The function keeps `run` alive, and so all memory that `run` uses, because a graph stores only
    addresses.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, _captured: Run) -> None:
    """Launch a captured CUDA graph. The second argument only keeps the captured function, and so
    the memory that the graph uses, alive.
    """
    graph.replay()


def timed_loops(run: Run, timer: Timer, grid: CeilingsGrid, runs_per_call: int = 1) -> Loops:
    """Find the number of calls that takes `grid.loop_s`, which also warms up, then time
    `grid.loops` such loops.

    `runs_per_call` is the number of repetitions in one call of `run`, such as those of a CUDA
    graph.
    """
    timer(run, 1)
    count = 1
    elapsed_s = timer(run, 1)
    while True:
        if elapsed_s >= grid.loop_s:
            # a second loop must take as long too, because an interruption can make one short loop
            # look long
            elapsed_s = timer(run, count)
            if elapsed_s >= grid.loop_s:
                break
        growth = min(MAX_GROWTH, MARGIN * grid.loop_s / max(elapsed_s, MIN_TIME_S))
        count = max(count + 1, math.ceil(growth * count))
        elapsed_s = timer(run, count)
    others_s = (timer(run, count) for _ in range(grid.loops - 1))
    return Loops(count=count * runs_per_call, times_s=(elapsed_s, *others_s))
