"""Collectives: how long they ran, what of that is exposed, and which rank a trace is of."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from ...config import MAX_RANKS
from ...costs.communication import Collective
from ..columns import Ints, Mask, chosen
from .attribution import Jobs, by_step
from .collectives import COLLECTIVES, NO_COLLECTIVE
from .device_time import Busy, DeviceWindows, alone_ns
from .phases import PHASES
from .step_profile import CommunicationTimes
from .trace import NOWHERE, DeviceWork, Trace


def communication_times(
    jobs: Jobs, devices: Sequence[Busy], num_devices: Ints, windows: DeviceWindows
) -> tuple[CommunicationTimes, ...]:
    """The times of collectives in each phase: of each kind, then (`collective` None) of all kinds
    together.

    Total time is the part of the phase on the device in which at least one kernel of the kind runs;
    exposed time is the part of that in which no kernel that computes and no copy runs. The time of
    an NCCL kernel includes its wait for the other ranks. If a step uses several devices, times are
    the mean over them, as busy times are.
    """
    is_collective = jobs.collective != NO_COLLECTIVE
    kinds: list[tuple[Collective | None, Mask]] = []
    for code in np.unique(jobs.collective[is_collective]).tolist():
        kinds.append((COLLECTIVES[code], jobs.collective == code))
    if kinds:
        kinds.append((None, is_collective))
    rows = []
    for collective, is_kind in kinds:
        times = _in_windows(jobs, is_kind, devices, num_devices, windows)
        for phase, values in by_step(times, len(num_devices)):
            rows.append(CommunicationTimes(phase=phase, collective=collective, **values))
    return tuple(sorted(rows, key=lambda row: PHASES.index(row.phase)))


def _in_windows(
    jobs: Jobs, is_chosen: Mask, devices: Sequence[Busy], num_devices: Ints, windows: DeviceWindows
) -> pd.DataFrame:
    """For each window, how many of the chosen kernels begin in it, how long they run, and the
    exposed part, in ns.
    """
    launches = np.zeros(len(windows), dtype=np.int64)
    total, exposed = launches.copy(), launches.copy()
    for busy in devices:
        rows = busy.rows[is_chosen[busy.rows]]
        total += alone_ns(jobs, rows, rows[:0], windows)
        exposed += alone_ns(jobs, rows, busy.rows[computes(jobs, busy.rows)], windows)
        launches += windows.number_of(jobs.start_ns[rows])
    count = np.maximum(num_devices, 1)[windows.step]
    times = {"launches": launches, "total_s": total / count, "exposed_s": exposed / count}
    return pd.DataFrame({"phase": windows.phase, "step": windows.step, **times})


def computes(jobs: Jobs, rows: Ints) -> Mask:
    """Whether each job of a device computes or copies for the program, and is not part of a
    collective.

    A collective may copy too: copies count as part of collectives if their stream runs these and no
    other kernels.
    """
    stream, is_copy = jobs.stream[rows], jobs.is_copy[rows]
    is_collective = jobs.collective[rows] != NO_COLLECTIVE
    of_collectives = np.setdiff1d(stream[is_collective], stream[~is_collective & ~is_copy])
    computes: Mask = ~is_collective & ~(is_copy & np.isin(stream, of_collectives))
    return computes


MIN_SHARE_OF_RANK = 0.25
"""Smallest kernel time of a rank whose ranges do not name it, as a share of the largest."""
_RANK_RANGE = re.compile(r"rank (\d{1,6})", re.ASCII)
"""Name of the range that each rank puts around its measured steps (`ranges.rank_range`)."""
_FILE = re.compile(r"rank(\d{1,6})_(.+)", re.ASCII | re.DOTALL)
"""Name of the file of a rank that is not the first, beside that of the first."""


def files_of_others(path: Path) -> dict[int, Path]:
    """By rank, the paths of the other ranks' traces, which are beside that of rank 0."""
    others = {}
    for beside in path.parent.iterdir():
        name = _FILE.fullmatch(beside.name)
        if name and name[2] == path.name and beside.is_file():
            others[int(name[1])] = beside
    return dict(sorted(others.items()))


def missing_ranks(num_ranks: int, world_size: int) -> str:
    """The sentence about ranks whose traces are not there."""
    are = "This is 1" if num_ranks == 1 else f"These are {num_ranks}"
    return (
        f"{are} of {world_size} ranks: waiting for the others cannot be told from sending, and "
        "both are in the time of communication."
    )


def without_rank(name: str) -> str:
    """Rank 0's name for the file that some rank calls `name`."""
    of_rank = _FILE.fullmatch(name)
    return of_rank[2] if of_rank else name


def by_rank(trace: Trace) -> dict[int, Trace]:
    """The trace of each rank of several, which ranges name; without names, each GPU of each process
    is one.

    Where one process or GPU has most of the work, the others are no ranks, and its process is the
    only one.
    """
    process_of = _named_ranks(trace)
    if 2 <= len(set(process_of.values())) <= MAX_RANKS:
        return {rank: _of_rank(trace, rank, process) for rank, process in process_of.items()}
    kernels = trace.kernels
    frame = pd.DataFrame({"process": kernels.process, "device": kernels.device})
    time_ns = frame.assign(ns=kernels.duration_ns).groupby(["process", "device"])["ns"].sum()
    if not len(time_ns):
        return {trace.rank or 0: trace}
    is_balanced = time_ns.min() >= MIN_SHARE_OF_RANK * time_ns.max()
    if not trace.is_of_host and 2 <= len(time_ns) <= MAX_RANKS and is_balanced:
        places = enumerate(time_ns.index.tolist())
        return {rank: _of_rank(trace, rank, *place) for rank, place in places}
    of_process = time_ns.groupby(level="process").sum()
    (busiest,) = of_process.nlargest(1).index.tolist()
    alone = _of_rank(trace, trace.rank, busiest)
    left = len(kernels) - len(alone.kernels)
    if left:
        note = f"{left} kernels of {len(of_process) - 1} processes with less work are left out."
        alone = replace(alone, notes=(*alone.notes, note))
    return {trace.rank or 0: alone}


def _named_ranks(trace: Trace) -> dict[int, int]:
    """The process of each rank that a range names, by rank."""
    ranges, process_of = trace.ranges, {}
    for name, text in enumerate(trace.strings):
        if rank := _RANK_RANGE.fullmatch(text):
            for process in ranges.process[ranges.name == name].tolist():
                process_of[int(rank[1])] = process
    return dict(sorted(process_of.items()))


def _of_rank(trace: Trace, rank: int | None, process: int, device: int | None = None) -> Trace:
    """The part of a trace of several ranks that belongs to one of them: all events of its process.

    Where one process has several GPUs, each is a rank, and `device` is this one's. The kernels and
    copies of the others are then left out, and the calls that launched them. The process's other
    calls, its ranges and its nodes of autograd stay: nothing says for which device they are. Ranges
    that a profiler marked belong to every rank.
    """
    is_call = trace.api_calls.process == process
    if device is not None:
        for work in (trace.kernels, trace.copies):
            is_launched_elsewhere = (work.device != device) & (work.call >= 0)
            is_call[work.call[is_launched_elsewhere]] = False
    is_range = np.isin(trace.ranges.process, (process, NOWHERE))
    # kernels and copies refer to calls and ranges by row numbers, which change
    call, mark = _new_rows(is_call), _new_rows(is_range)

    def of_rank(work: DeviceWork) -> DeviceWork:
        is_of_device = device is None or work.device == device
        kept = chosen(work, (work.process == process) & is_of_device)
        return replace(kept, call=call[kept.call], mark=mark[kept.mark])

    return replace(
        trace,
        rank=rank,
        kernels=of_rank(trace.kernels),
        copies=of_rank(trace.copies),
        ranges=chosen(trace.ranges, is_range),
        api_calls=chosen(trace.api_calls, is_call),
        nodes=chosen(trace.nodes, trace.nodes.process == process),
    )


def _new_rows(is_kept: Mask) -> Ints:
    """The number of each row among those that are kept; -1 for the others, and at the end."""
    return np.append(np.where(is_kept, np.cumsum(is_kept) - 1, -1), -1)
