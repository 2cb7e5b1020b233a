"""Collectives: how long they ran, what of that is exposed, whether gathers came in time, and the times of all ranks.

Ranges show when parameters were gathered and needed: `gather UNIT` around the launch of a gather, and `wait UNIT` where
the program makes its stream wait for the gather, because the next kernels compute with the unit's parameters. PyTorch's
fully_shard has such ranges for torch.profiler: FSDP::all_gather, and FSDP::all_gather_copy_out, whose kernels need the
gather.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import Ints, Mask, chosen, groups
from cs336_systems.analysis.kernels.attribution import Attribution, HostSteps, Selection, by_phase, select
from cs336_systems.analysis.kernels.classes import COLLECTIVES, NO_COLLECTIVE, Collective, collective_codes
from cs336_systems.analysis.kernels.device_time import Busy, DeviceWindows, Jobs
from cs336_systems.analysis.kernels.phases import NO_ROWS, PHASES, Codes
from cs336_systems.analysis.kernels.step_profile import CommunicationTimes, GatherTimes, RankTimes, StepProfile, Work
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, Trace, Union
from cs336_systems.config import MAX_RANKS


def communication_times(
    jobs: Jobs, devices: Sequence[Busy], num_devices: Ints, steps: HostSteps, windows: DeviceWindows
) -> tuple[CommunicationTimes, ...]:
    """The times of collectives in each phase: of each kind, then (`collective` None) of all kinds together.

    Total time is the part of the phase on the device in which at least one kernel of the kind runs; exposed time is the
    part of that in which no kernel that computes and no copy runs. The time of an NCCL kernel includes its wait for the
    other ranks. If a step uses several devices, times are the mean over them, as busy times are.
    """
    kinds = np.unique(jobs.collective[jobs.collective != NO_COLLECTIVE]).tolist()
    chosen: list[tuple[Collective | None, Mask]] = [(COLLECTIVES[kind], jobs.collective == kind) for kind in kinds]
    if kinds:
        chosen.append((None, jobs.collective != NO_COLLECTIVE))
    found = [
        times
        for kind, is_chosen in chosen
        for times in _of_kind(kind, _in_windows(jobs, is_chosen, devices, num_devices, steps, windows), len(steps))
    ]
    return tuple(sorted(found, key=lambda times: PHASES.index(times.phase)))


def _in_windows(
    jobs: Jobs, is_chosen: Mask, devices: Sequence[Busy], num_devices: Ints, steps: HostSteps, windows: DeviceWindows
) -> pd.DataFrame:
    """For each window, how many of the chosen kernels begin in it, how long they run, and the exposed part of that."""
    launches, total, exposed = (np.zeros(len(windows), dtype=np.int64) for _ in range(3))
    for busy in devices:
        mine = (steps.process == busy.process)[windows.step]
        rows, computing = busy.rows[is_chosen[busy.rows]], busy.rows[_computes(jobs, busy.rows)]
        either = np.append(rows, computing)
        ran, computed, worked = (Union(jobs.start_ns[own], jobs.end_ns[own]) for own in (rows, computing, either))
        total += mine * _covered(ran, windows)
        exposed += mine * (_covered(worked, windows) - _covered(computed, windows))
        start = np.sort(jobs.start_ns[rows])
        launches += mine * (np.searchsorted(start, windows.end_ns) - np.searchsorted(start, windows.start_ns))
    count = np.maximum(num_devices, 1)[windows.step]
    return pd.DataFrame(
        {
            "phase": windows.phase,
            "step": windows.step,
            "launches": launches,
            "total_s": total / count / 1e9,
            "exposed_s": exposed / count / 1e9,
        }
    )


def _covered(union: Union, windows: DeviceWindows) -> Ints:
    return union.until(windows.end_ns) - union.until(windows.start_ns)


def _computes(jobs: Jobs, rows: Ints) -> Mask:
    """Whether each job of a device computes or copies for the program, and is not part of a collective.

    A collective may copy too: copies count as part of collectives if their stream runs these and no other kernels.
    """
    is_collective = jobs.collective[rows] != NO_COLLECTIVE
    is_kernel = ~is_collective & ~jobs.is_copy[rows]
    of_collectives = np.setdiff1d(jobs.stream[rows[is_collective]], jobs.stream[rows[is_kernel]])
    computes: Mask = ~is_collective & ~(jobs.is_copy[rows] & np.isin(jobs.stream[rows], of_collectives))
    return computes


def _of_kind(kind: Collective | None, found: pd.DataFrame, num_steps: int) -> Iterator[CommunicationTimes]:
    """The times of each phase in which collectives of this kind ran."""
    for phase, rows in by_phase(found):
        sums = rows.drop(columns="phase").groupby("step").sum().reindex(range(num_steps), fill_value=0)
        if sums.to_numpy().any():
            yield CommunicationTimes(
                phase=phase,
                collective=kind,
                launches=tuple(sums["launches"].astype(int).tolist()),
                total_s=tuple(sums["total_s"].tolist()),
                exposed_s=tuple(sums["exposed_s"].tolist()),
            )


_UNIT_OF_PYTORCH = r"(?: \((?:model\.)?(?P<path>.+)\))?"
"""The unit in the name of PyTorch's range; the prefix `model.` comes from this project's LossModule."""
_GATHER_RANGE = re.compile(
    rf"(?P<kind>gather|wait) (?P<unit>.+)|FSDP::all_gather(?P<copies>_copy_out)?{_UNIT_OF_PYTORCH}", re.DOTALL
)
_GATHER, _WAIT = 0, 1
REST = "rest"
"""The unit of parameters that belong to no other unit."""


def gather_times(jobs: Jobs, attribution: Attribution, selection: Selection) -> tuple[GatherTimes, ...]:
    """The gathers of each unit in each phase that needed them, in the order in which they were first needed.

    The job that needs a gather is the first kernel or copy, except those of collectives, launched after the wait. The
    job is ready when the job before it on its stream has ended or, if later, when the host begins to launch it: without
    the gather it could start then. A gather without a wait, or whose kernels are not in the file, is left out.
    """
    found = _gathers(jobs, attribution.trace, selection)
    found = found[found["step"] >= 0].sort_values("needed_ns", kind="stable")
    return tuple(_of_module(own, len(selection.steps)) for _, own in found.groupby(["unit", "phase"], sort=False))


def _of_module(found: pd.DataFrame, num_steps: int) -> GatherTimes:
    """The times of gathers of one unit that one phase needed."""
    by_step = found.groupby("step").agg({"ran_ns": "sum", "lead_ns": "min", "waited_ns": "sum"}) / 1e9
    by_step = by_step.reindex(range(num_steps))
    return GatherTimes(
        unit=found["unit"].iloc[0],
        phase=PHASES[found["phase"].iloc[0]],
        ran_s=tuple(by_step["ran_ns"].fillna(0.0).tolist()),
        lead_s=tuple(None if math.isnan(lead_s) else lead_s for lead_s in by_step["lead_ns"].tolist()),
        waited_s=tuple(by_step["waited_ns"].fillna(0.0).tolist()),
    )


def _gathers(jobs: Jobs, trace: Trace, selection: Selection) -> pd.DataFrame:
    """All gathers that the program waited for and whose kernels are known, with the step and phase that needed them."""
    found = _pairs(trace)
    needed, ready = _needs(
        jobs, selection.process_of(trace.ranges.process[found["gather"]]), trace.ranges.start_ns[found["wait"]]
    )
    rows = np.flatnonzero(jobs.collective != NO_COLLECTIVE)
    kernels = pd.DataFrame({"gather": jobs.module[rows], "start": jobs.start_ns[rows], "end": jobs.end_ns[rows]})
    ran = kernels.groupby("gather").agg({"start": "min", "end": "max"})
    found = found.assign(needed=needed, ready=ready).join(ran, on="gather", how="inner")
    found = found[found["needed"] >= 0]
    needed, ready, end = (found[name].to_numpy() for name in ("needed", "ready", "end"))
    most = jobs.start_ns[needed] - ready
    return pd.DataFrame(
        {
            "unit": found["unit"].to_numpy(),
            "phase": jobs.phase[needed],
            "step": jobs.step[needed],
            "needed_ns": jobs.launch_ns[needed],
            "ran_ns": end - found["start"].to_numpy(),
            "lead_ns": ready - end,
            "waited_ns": np.clip(end - ready, 0, np.maximum(most, 0)),
        }
    )


def _pairs(trace: Trace) -> pd.DataFrame:
    """The unit and the range of each gather, and the range of the first wait for it before the unit's next gather."""
    ranges, kinds = trace.ranges, dict(_names(trace.strings))
    rows = np.flatnonzero(np.isin(ranges.name, list(kinds)))
    marks = pd.DataFrame(
        {
            "process": ranges.process[rows],
            "unit": [kinds[name][1] for name in ranges.name[rows].tolist()],
            "start": ranges.start_ns[rows],
            "kind": [kinds[name][0] for name in ranges.name[rows].tolist()],
            "gather": rows,
        }
    )
    marks = marks.sort_values(["process", "unit", "start", "kind"], kind="stable")
    following = marks.groupby(["process", "unit"])[["kind", "gather"]].shift(-1, fill_value=-1)
    is_awaited = (marks["kind"] == _GATHER) & (following["kind"] == _WAIT)
    return marks.assign(wait=following["gather"])[is_awaited][["unit", "gather", "wait"]]


def _names(strings: tuple[str, ...]) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield the index of each string that names a gather or a wait, the kind of range, and the unit."""
    for index, text in enumerate(strings):
        if found := _GATHER_RANGE.fullmatch(text):
            is_wait = found["kind"] == "wait" or found["copies"] is not None
            yield index, (_WAIT if is_wait else _GATHER, found["unit"] or found["path"] or REST)


def _needs(jobs: Jobs, process: Ints, time_ns: Ints) -> tuple[Ints, Ints]:
    """The first job that each process launched at or after a time (-1 for none), and when that job was ready."""
    rows = np.flatnonzero(jobs.is_launched & (jobs.collective == NO_COLLECTIVE))
    rows = rows[np.lexsort((jobs.start_ns[rows], jobs.launch_ns[rows]))]
    by_process = {number: rows[own] for number, own in groups(jobs.process[rows])}
    needed = np.full(len(process), -1, dtype=np.int64)
    for number, asked in groups(process):
        own = by_process.get(number, NO_ROWS)
        needed[asked] = np.append(own, -1)[np.searchsorted(jobs.launch_ns[own], time_ns[asked])]
    ready = np.maximum(_ended_before(jobs), jobs.launch_ns)
    return needed, np.append(ready, 0)[needed]


def _ended_before(jobs: Jobs) -> Ints:
    """End of the previous job on each job's stream; -MAX_TIME_NS for the first job."""
    order = np.lexsort((jobs.start_ns, jobs.stream, jobs.device, jobs.process))
    is_same = np.ones(max(len(order) - 1, 0), dtype=np.bool_)
    for column in (jobs.stream, jobs.device, jobs.process):
        is_same &= column[order[1:]] == column[order[:-1]]
    ended = np.full(len(order), -MAX_TIME_NS, dtype=np.int64)
    ended[order[1:]] = np.where(is_same, jobs.end_ns[order[:-1]], -MAX_TIME_NS)
    return ended


_RANK_RANGE = re.compile(r"rank (\d{1,6})", re.ASCII)
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
    named = {index: int(found[1]) for index, name in enumerate(trace.strings) if (found := _RANK_RANGE.fullmatch(name))}
    of_ranks = np.isin(trace.ranges.name, list(named))
    pairs = zip(trace.ranges.name[of_ranks].tolist(), trace.ranges.process[of_ranks].tolist(), strict=True)
    process_of = dict(sorted((named[name], process) for name, process in pairs))
    if not 2 <= len(set(process_of.values())) <= MAX_RANKS:
        return {}
    return {rank: _of_process(trace, process) for rank, process in process_of.items()}


def _of_process(trace: Trace, process: int) -> Trace:
    is_kept = trace.api_calls.process == process
    number = np.append(np.where(is_kept, np.cumsum(is_kept) - 1, -1), -1)  # new rows of calls
    kernels, copies = (chosen(work, work.process == process) for work in (trace.kernels, trace.copies))
    return replace(
        trace,
        kernels=replace(kernels, call=number[kernels.call]),
        copies=replace(copies, call=number[copies.call]),
        ranges=chosen(trace.ranges, trace.ranges.process == process),
        api_calls=chosen(trace.api_calls, is_kept),
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
