"""Whether sharded parameters were gathered before they were needed.

Ranges tell: one named `gather UNIT` around the launch of a gather, and one named `wait UNIT` where the program makes
its stream wait for the gather, because what it launches next computes with the unit's parameters. PyTorch's fully_shard
has such ranges for torch.profiler: FSDP::all_gather, and FSDP::all_gather_copy_out, whose kernels need the gather.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cs336_systems.analysis.columns import Ints, groups
from cs336_systems.analysis.kernels.attribution import Attribution
from cs336_systems.analysis.kernels.collectives import NO_COLLECTIVE
from cs336_systems.analysis.kernels.device_time import Jobs
from cs336_systems.analysis.kernels.phases import PHASES, LaunchPhase
from cs336_systems.analysis.kernels.step_profile import GatherTimes
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, Trace
from cs336_systems.analysis.kernels.windows import Selection

_UNIT_OF_PYTORCH = r"(?: \((?:model\.)?(.+)\))?"
"""The unit in the name of a range of PyTorch; `model` is the one in this project's module of model and loss."""
_GATHER = re.compile(rf"gather (.+)|FSDP::all_gather{_UNIT_OF_PYTORCH}")
_WAIT = re.compile(rf"wait (.+)|FSDP::all_gather_copy_out{_UNIT_OF_PYTORCH}")
REST = "rest"
"""The unit of what belongs to no other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """One gather that the program waited for."""

    unit: str
    needed: int
    """Row of `Jobs` of what was launched first after the wait."""
    ran_ns: int
    lead_ns: int
    waited_ns: int


def gather_times(jobs: Jobs, attribution: Attribution, selection: Selection) -> tuple[GatherTimes, ...]:
    """The gathers of each unit in each phase that needed them, in the order in which they were first needed.

    What needs a gather is the first kernel or copy, of no collective, that is launched from the wait on. It is ready
    when the job before it on its stream has ended or, if that is later, when the host begins to launch it: without the
    gather it could start then. A gather that nothing waits for, or whose kernels are not in the file, is left out.
    """
    found: dict[tuple[str, LaunchPhase], list[_Gather]] = {}
    for gather in _gathers(jobs, attribution.trace, selection):
        if jobs.step[gather.needed] >= 0:
            found.setdefault((gather.unit, PHASES[jobs.phase[gather.needed]]), []).append(gather)
    steps = range(len(selection.steps))
    return tuple(
        _times(unit, phase, [[each for each in own if jobs.step[each.needed] == step] for step in steps])
        for (unit, phase), own in found.items()
    )


def _times(unit: str, phase: LaunchPhase, steps: Sequence[Sequence[_Gather]]) -> GatherTimes:
    return GatherTimes(
        unit=unit,
        phase=phase,
        ran_s=tuple(sum(each.ran_ns for each in own) / 1e9 for own in steps),
        lead_s=tuple(min(each.lead_ns for each in own) / 1e9 if own else None for own in steps),
        waited_s=tuple(sum(each.waited_ns for each in own) / 1e9 for own in steps),
    )


def _gathers(jobs: Jobs, trace: Trace, selection: Selection) -> list[_Gather]:
    """All gathers that the program waited for, in the order in which they were needed."""
    sending = np.flatnonzero(jobs.collective != NO_COLLECTIVE)
    kernels_of = {index: sending[rows] for index, rows in groups(jobs.module[sending])}
    needs, found = _Needs(jobs), []
    for unit, gathers, waits in _by_unit(trace):
        start, wait = trace.ranges.start_ns[gathers], trace.ranges.start_ns[waits]
        following = np.append(start[1:], MAX_TIME_NS)
        at = np.searchsorted(wait, start)
        has_wait = np.append(wait, MAX_TIME_NS)[at] < following
        for gather, index in zip(gathers[has_wait].tolist(), at[has_wait].tolist(), strict=True):
            process = int(selection.process_of(trace.ranges.process[[gather]])[0])
            needed, ready_ns = needs.after(process, int(trace.ranges.start_ns[waits[index]]))
            if gather in kernels_of and needed >= 0:
                start_ns, end_ns = jobs.start_ns[kernels_of[gather]].min(), jobs.end_ns[kernels_of[gather]].max()
                lead_ns, most_ns = int(ready_ns - end_ns), int(jobs.start_ns[needed] - ready_ns)
                waited_ns = max(min(-lead_ns, most_ns), 0)
                found.append(
                    _Gather(
                        unit=unit, needed=needed, ran_ns=int(end_ns - start_ns), lead_ns=lead_ns, waited_ns=waited_ns
                    )
                )
    return sorted(found, key=lambda gather: int(jobs.launch_ns[gather.needed]))


def _by_unit(trace: Trace) -> Iterator[tuple[str, Ints, Ints]]:
    """Yield each unit of each process, its ranges of gathers and those of waits, both in the order of their start."""
    ranges = trace.ranges
    order = np.argsort(ranges.start_ns, kind="stable")
    waits_of = {_unit(found): name for name, found in _matching(_WAIT, trace.strings)}
    for name, found in _matching(_GATHER, trace.strings):
        unit = _unit(found)
        gathers, waits = order[ranges.name[order] == name], order[ranges.name[order] == waits_of.get(unit, -1)]
        for process, rows in groups(ranges.process[gathers]):
            yield unit, gathers[rows], waits[ranges.process[waits] == process]


def _matching(pattern: re.Pattern[str], strings: Sequence[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield the indices of the strings that match, with their matches."""
    for index, text in enumerate(strings):
        if found := pattern.fullmatch(text):
            yield index, found


def _unit(found: re.Match[str]) -> str:
    return found[1] or found[2] or REST


class _Needs:
    """Looks up what a process launched first after a time, and when that was ready."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        by_stream = np.lexsort((jobs.start_ns, jobs.stream, jobs.device, jobs.process))
        same = np.ones(len(by_stream), dtype=np.bool_)
        for column in (jobs.stream, jobs.device, jobs.process):
            same[1:] &= column[by_stream[1:]] == column[by_stream[:-1]]
        self._before_ns = np.full(len(by_stream), -MAX_TIME_NS, dtype=np.int64)
        """End of the job before each one on its stream."""
        self._before_ns[by_stream[1:]] = np.where(same[1:], jobs.end_ns[by_stream[:-1]], -MAX_TIME_NS)
        rows = np.flatnonzero(jobs.is_launched & (jobs.collective == NO_COLLECTIVE))
        rows = rows[np.lexsort((jobs.start_ns[rows], jobs.launch_ns[rows]))]
        self._by_process = {process: rows[own] for process, own in groups(jobs.process[rows])}

    def after(self, process: int, time_ns: int) -> tuple[int, int]:
        """The row of the job, -1 if there is none, and when it could have started but for a collective."""
        rows = self._by_process.get(process, np.zeros(0, dtype=np.int64))
        at = int(np.searchsorted(self._jobs.launch_ns[rows], time_ns))
        if at == len(rows):
            return -1, 0
        row = int(rows[at])
        return row, int(max(self._before_ns[row], self._jobs.launch_ns[row]))
