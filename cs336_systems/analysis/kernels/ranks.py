"""The ranks that share a step: the rank of a process or a file, and the times of all ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cs336_systems.analysis.columns import Ints, chosen
from cs336_systems.analysis.kernels.attribution import Attribution
from cs336_systems.analysis.kernels.collectives import NO_COLLECTIVE, collective_codes
from cs336_systems.analysis.kernels.phases import Codes
from cs336_systems.analysis.kernels.step_profile import RankTimes, StepProfile, Work
from cs336_systems.analysis.kernels.trace import Trace
from cs336_systems.analysis.kernels.windows import select
from cs336_systems.config import MAX_RANKS

_RANGE = re.compile(r"rank (\d{1,6})", re.ASCII)
"""Name of the range that each rank puts around its measured steps (`ranges.rank_range`)."""
_FILE = re.compile(r"rank(\d{1,6})_(.+)", re.ASCII | re.DOTALL)
"""Name of the file of a rank that is not the first, beside that of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The kernels of collectives of one step, in the order in which they began."""

    kind: Codes
    duration_ns: Ints


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
    """The trace of each rank, if ranges name the ranks of several processes; empty otherwise."""
    named = {index: int(found[1]) for index, name in enumerate(trace.strings) if (found := _RANGE.fullmatch(name))}
    of_ranks = np.isin(trace.ranges.name, list(named))
    pairs = zip(trace.ranges.name[of_ranks].tolist(), trace.ranges.process[of_ranks].tolist(), strict=True)
    process_of = dict(sorted((named[name], process) for name, process in pairs))
    if not 2 <= len(set(process_of.values())) <= MAX_RANKS:
        return {}
    return {rank: _of_process(trace, process) for rank, process in process_of.items()}


def _of_process(trace: Trace, process: int) -> Trace:
    return Trace(
        strings=trace.strings,
        kernels=chosen(trace.kernels, trace.kernels.process == process),
        copies=chosen(trace.copies, trace.copies.process == process),
        ranges=chosen(trace.ranges, trace.ranges.process == process),
        api_calls=chosen(trace.api_calls, trace.api_calls.process == process),
        device_names=trace.device_names,
        is_of_host=trace.is_of_host,
        notes=trace.notes,
    )


def collectives_of(attribution: Attribution) -> list[Collectives]:
    """The collectives of each profiled step."""
    work, selection = attribution.trace.kernels, select(attribution)
    kind, step = collective_codes(work.name, attribution.trace.strings), selection.step_of(attribution.kernels.step)
    rows = np.flatnonzero((kind != NO_COLLECTIVE) & (step >= 0))
    rows = rows[np.lexsort((work.start_ns[rows], step[rows]))]
    bounds = np.searchsorted(step[rows], np.arange(1, len(selection.steps)))
    return [Collectives(kind=kind[own], duration_ns=work.duration_ns[own]) for own in np.split(rows, bounds)]


def rank_times(
    profiles: Sequence[tuple[int, StepProfile]], collectives: Sequence[Sequence[Collectives]]
) -> tuple[RankTimes, ...]:
    """The times of all ranks, from the profile and the collectives of each.

    On a CPU the time that a rank waited is not known, because operators there only start a collective.
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


def _waited(ranks: Sequence[Sequence[Collectives]]) -> list[tuple[float, ...]] | None:
    """For each rank, how long it waited for others in each step; None if ranks ran different collectives, or none."""
    if len({len(steps) for steps in ranks}) > 1 or not any(len(own.kind) for steps in ranks for own in steps):
        return None
    found: list[list[float]] = [[] for _ in ranks]
    for same in zip(*ranks, strict=True):
        if any(not np.array_equal(own.kind, same[0].kind) for own in same):
            return None
        durations = np.stack([own.duration_ns for own in same])
        waits_ns = (durations - durations.min(axis=0)).sum(axis=1)
        for waits_s, wait_ns in zip(found, waits_ns.tolist(), strict=True):
            waits_s.append(wait_ns / 1e9)
    return [tuple(waits_s) for waits_s in found]
