"""Collectives: how long they ran, what of that is exposed, and the times of all ranks."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from ...config import MAX_RANKS
from ...costs.communication import Collective
from ..columns import Ints, Mask, chosen
from .attribution import Attribution, Jobs, by_step, select
from .collectives import COLLECTIVES, NO_COLLECTIVE
from .device_time import Busy, DeviceWindows, alone_ns
from .phases import PHASES
from .step_profile import CommunicationTimes, RankTimes, StepProfile, Work
from .trace import NOWHERE, Trace


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
    kinds = np.unique(jobs.collective[is_collective]).tolist()
    chosen: list[tuple[Collective | None, Mask]] = [
        (COLLECTIVES[kind], jobs.collective == kind) for kind in kinds
    ]
    found = []
    for kind, is_chosen in [*chosen, (None, is_collective)] if kinds else ():
        times = _in_windows(jobs, is_chosen, devices, num_devices, windows)
        for phase, values in by_step(times, len(num_devices)):
            found.append(CommunicationTimes(phase=phase, collective=kind, **values))
    return tuple(sorted(found, key=lambda times: PHASES.index(times.phase)))


def _in_windows(
    jobs: Jobs, is_chosen: Mask, devices: Sequence[Busy], num_devices: Ints, windows: DeviceWindows
) -> pd.DataFrame:
    """For each window, how many of the chosen kernels begin in it, how long they run, and the
    exposed part, in ns.
    """
    launches, total, exposed = (np.zeros(len(windows), dtype=np.int64) for _ in range(3))
    for busy in devices:
        rows = busy.rows[is_chosen[busy.rows]]
        total += alone_ns(jobs, rows, rows[:0], windows)
        exposed += alone_ns(jobs, rows, busy.rows[_computes(jobs, busy.rows)], windows)
        start = np.sort(jobs.start_ns[rows])
        launches += np.searchsorted(start, windows.end_ns) - np.searchsorted(
            start, windows.start_ns
        )
    count = np.maximum(num_devices, 1)[windows.step]
    times = {"launches": launches, "total_s": total / count, "exposed_s": exposed / count}
    return pd.DataFrame({"phase": windows.phase, "step": windows.step, **times})


def _computes(jobs: Jobs, rows: Ints) -> Mask:
    """Whether each job of a device computes or copies for the program, and is not part of a
    collective.

    A collective may copy too: copies count as part of collectives if their stream runs these and no
    other kernels.
    """
    is_collective = jobs.collective[rows] != NO_COLLECTIVE
    is_kernel = ~is_collective & ~jobs.is_copy[rows]
    of_collectives = np.setdiff1d(jobs.stream[rows[is_collective]], jobs.stream[rows[is_kernel]])
    computes: Mask = ~is_collective & ~(
        jobs.is_copy[rows] & np.isin(jobs.stream[rows], of_collectives)
    )
    return computes


MIN_SHARE_OF_RANK = 0.25
"""Smallest kernel time of a rank whose ranges do not name it, as a share of the largest."""
_RANK_RANGE = re.compile(r"rank (\d{1,6})", re.ASCII)
"""Name of the range that each rank puts around its measured steps (`ranges.rank_range`)."""
_FILE = re.compile(r"rank(\d{1,6})_(.+)", re.ASCII | re.DOTALL)
"""Name of the file of a rank that is not the first, beside that of the first."""


def files_of_others(path: Path) -> dict[int, Path]:
    """By rank, the paths of the other ranks' traces, which are beside that of rank 0."""
    found = {}
    for beside in path.parent.iterdir():
        name = _FILE.fullmatch(beside.name)
        if name and name[2] == path.name and beside.is_file():
            found[int(name[1])] = beside
    return dict(sorted(found.items()))


def without_rank(name: str) -> str:
    """Rank 0's name for the file that some rank calls `name`."""
    found = _FILE.fullmatch(name)
    return found[2] if found else name


def by_rank(trace: Trace) -> dict[int, Trace]:
    """The trace of each rank of several, which ranges name; without names, each GPU of each process
    is one.

    Where one process or GPU has most of the work, the others are no ranks, and its process is the
    only one.
    """
    named = {
        index: int(found[1])
        for index, name in enumerate(trace.strings)
        if (found := _RANK_RANGE.fullmatch(name))
    }
    of_ranks = np.isin(trace.ranges.name, list(named))
    pairs = zip(
        trace.ranges.name[of_ranks].tolist(), trace.ranges.process[of_ranks].tolist(), strict=True
    )
    process_of = dict(sorted((named[name], process) for name, process in pairs))
    if 2 <= len(set(process_of.values())) <= MAX_RANKS:
        return {rank: _of_rank(trace, rank, process) for rank, process in process_of.items()}
    work = pd.DataFrame({"process": trace.kernels.process, "device": trace.kernels.device})
    time_ns = work.assign(ns=trace.kernels.duration_ns).groupby(["process", "device"])["ns"].sum()
    if not len(time_ns):
        return {trace.rank or 0: trace}
    if (
        trace.is_of_host
        or not 2 <= len(time_ns) <= MAX_RANKS
        or time_ns.min() < MIN_SHARE_OF_RANK * time_ns.max()
    ):
        of_process = time_ns.groupby(level="process").sum()
        alone = _of_rank(
            trace, trace.rank, int(np.asarray(of_process.index)[of_process.to_numpy().argmax()])
        )
        if (left := len(trace.kernels) - len(alone.kernels)) > 0:
            note = f"{left} kernels of {len(of_process) - 1} processes with less work are left out."
            alone = replace(alone, notes=(*alone.notes, note))
        return {trace.rank or 0: alone}
    return {
        rank: _of_rank(trace, rank, *place) for rank, place in enumerate(time_ns.index.tolist())
    }


def _of_rank(trace: Trace, rank: int | None, process: int, device: int | None = None) -> Trace:
    """The events of the process, and of its work that on the device if one is given."""
    calls, ranges = (
        trace.api_calls.process == process,
        np.isin(trace.ranges.process, (process, NOWHERE)),
    )
    call, mark = _new_rows(calls), _new_rows(ranges)
    kernels, copies = (
        chosen(work, (work.process == process) & ((work.device == device) | (device is None)))
        for work in (trace.kernels, trace.copies)
    )
    return replace(
        trace,
        rank=rank,
        kernels=replace(kernels, call=call[kernels.call], mark=mark[kernels.mark]),
        copies=replace(copies, call=call[copies.call], mark=mark[copies.mark]),
        ranges=chosen(trace.ranges, ranges),
        api_calls=chosen(trace.api_calls, calls),
        nodes=chosen(trace.nodes, trace.nodes.process == process),
    )


def _new_rows(is_kept: Mask) -> Ints:
    """The number of each row among those that are kept; -1 for the others, and at the end."""
    return np.append(np.where(is_kept, np.cumsum(is_kept) - 1, -1), -1)


def collectives_of(attribution: Attribution) -> list[Jobs]:
    """The kernels of collectives of each profiled step, in the order in which they began."""
    jobs, selection = attribution.jobs, select(attribution)
    step = selection.step_of(jobs.step)
    rows = np.flatnonzero((jobs.collective != NO_COLLECTIVE) & ~jobs.is_copy & (step >= 0))
    rows = rows[np.lexsort((jobs.start_ns[rows], step[rows]))]
    bounds = np.searchsorted(step[rows], np.arange(1, len(selection.steps)))
    return [chosen(jobs, own) for own in np.split(rows, bounds)]


def rank_times(
    profiles: Sequence[tuple[int, StepProfile]], collectives: Sequence[Sequence[Jobs]]
) -> tuple[RankTimes, ...]:
    """The times of all ranks, from the profile and the collectives of each.

    On a CPU the time that a rank waited is not known, because operators there only start a
    collective.
    """
    is_on_device = all(profile.work is Work.KERNELS for _, profile in profiles)
    waited = _waited(collectives) if is_on_device else None
    return tuple(
        RankTimes(
            rank=rank,
            step_s=profile.step_s,
            phases=profile.phases,
            communication=profile.communication,
            waited_s=None if waited is None else waited[number],
        )
        for number, (rank, profile) in enumerate(profiles)
    )


def _waited(ranks: Sequence[Sequence[Jobs]]) -> list[tuple[float, ...]] | None:
    """For each rank, how long it waited for others in each step; None if ranks ran different
    collectives, or none.
    """
    if len({len(steps) for steps in ranks}) > 1 or not any(
        len(own) for steps in ranks for own in steps
    ):
        return None
    found: list[list[float]] = [[] for _ in ranks]
    for same in zip(*ranks, strict=True):
        if any(not np.array_equal(own.collective, same[0].collective) for own in same):
            return None
        durations = np.stack([own.duration_ns for own in same])
        waits_ns = (durations - durations.min(axis=0)).sum(axis=1)
        for waits_s, wait_ns in zip(found, waits_ns.tolist(), strict=True):
            waits_s.append(wait_ns / 1e9)
    return [tuple(waits_s) for waits_s in found]
