"""Timers of the studies: by the host's clock, by CUDA events, and of repetitions from a CUDA graph.

`timed_loops` times the steady state: it repeats until a loop is long enough, then times several such loops.
`timed_pairs` times the two halves of a pass on their own. Both keep every time.
"""

import math
from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeVar

import torch

from cs336_systems.config import Device
from cs336_systems.studies.ceilings_records import CeilingsGrid, Loops

GRAPH_BELOW_S = 1e-4
"""What takes less is repeated from a CUDA graph, so that its time is the device's and not that of launching it."""
GRAPH_RUNS = 100
PROBES = 3
MOST_GROWTH = 100
"""How many times more repetitions to try next: a first time may mislead."""
SPARE = 1.1
"""So much longer than asked for, so that the next loop is not just too short again."""

T = TypeVar("T")
Run = Callable[[], object]
Timer = Callable[[Run, int], float]
"""Seconds of so many calls, until all that they launched is done."""


def host_timer(run: Run, count: int) -> float:
    """By the host's clock."""
    start = perf_counter_ns()
    for _ in range(count):
        run()
    return (perf_counter_ns() - start) / 1e9


def device_timer(run: Run, count: int) -> float:
    """By CUDA events around the whole loop."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def launch_timer(run: Run, count: int) -> float:
    """By the host's clock from an idle device to an idle device: where the host is the slower, its time per launch."""
    torch.cuda.synchronize()
    start = perf_counter_ns()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (perf_counter_ns() - start) / 1e9


def measure(run: Run, grid: CeilingsGrid) -> Loops:
    """Times of `run` on the grid's device. Raises whatever it raises."""
    if grid.device is Device.CPU:
        return timed_loops(run, host_timer, grid)
    device_timer(run, 1)  # libraries load, memory is allocated
    if min(device_timer(run, 1) for _ in range(PROBES)) < GRAPH_BELOW_S:
        return timed_loops(replayed(run, GRAPH_RUNS), device_timer, grid, runs_per_call=GRAPH_RUNS)
    return timed_loops(run, device_timer, grid)


def replayed(run: Run, count: int) -> Run:
    """A CUDA graph of so many runs; calling it runs them all with one launch. `run` must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph.replay


def timed_loops(run: Run, timer: Timer, grid: CeilingsGrid, runs_per_call: int = 1) -> Loops:
    """Warm up while looking for the number of calls that takes grid.loop_s, then time grid.loops such loops.

    `runs_per_call`: repetitions in one call of `run`, such as a graph's.
    """
    timer(run, 1)
    count = 1
    # the shorter of two, because a machine that is interrupted once makes a short loop look long
    while (elapsed_s := min(timer(run, count), timer(run, count))) < grid.loop_s:
        count = next_count(count, elapsed_s, grid.loop_s)
    return Loops(count=count * runs_per_call, times_s=tuple(timer(run, count) for _ in range(grid.loops)))


def next_count(count: int, elapsed_s: float, wanted_s: float) -> int:
    """How many repetitions should take `wanted_s`, where `count` took less; always more than `count`."""
    most = MOST_GROWTH * count
    guess = most if elapsed_s * MOST_GROWTH < wanted_s else math.ceil(SPARE * count * wanted_s / elapsed_s)
    return max(count + 1, min(most, guess))


HEAD_START_CYCLES = 4_000_000
"""The device pauses so long, about 2 ms, for the host to launch one pass forward and backward."""


def timed_pairs(
    first: Callable[[int], T], second: Callable[[T, int], object], count: int, device: Device
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds that `first`, and then `second` with its result, take in each of `count` turns, which they are told.

    On a GPU the device pauses before each turn while the host launches it, so that the times are the device's own.
    """
    on_gpu = device is Device.CUDA
    stamps = [[_Stamp(on_gpu) for _ in range(3)] for _ in range(count)]
    for turn, (start, middle, end) in enumerate(stamps):
        if on_gpu:
            torch.cuda._sleep(HEAD_START_CYCLES)
        start.set()
        result = first(turn)
        middle.set()
        second(result, turn)
        end.set()
    if on_gpu:
        torch.cuda.synchronize()
    return (
        tuple(start.seconds_until(middle) for start, middle, _ in stamps),
        tuple(middle.seconds_until(end) for _, middle, end in stamps),
    )


class _Stamp:
    """A moment on the GPU's stream, or by the host's clock."""

    def __init__(self, on_gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None

    def set(self) -> None:
        if self._event is None:
            self._time_ns = perf_counter_ns()
        else:
            self._event.record()

    def seconds_until(self, end: "_Stamp") -> float:
        if self._event is None or end._event is None:
            return (end._time_ns - self._time_ns) / 1e9
        return float(self._event.elapsed_time(end._event)) / 1e3
