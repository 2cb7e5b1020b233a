"""Whether sharded parameters were gathered before they were needed.

Ranges show this: `gather UNIT` around the launch of a gather, and `wait UNIT` where the program makes its stream wait
for the gather, because the next kernels compute with the unit's parameters. PyTorch's fully_shard has such ranges for
torch.profiler: FSDP::all_gather, and FSDP::all_gather_copy_out, whose kernels need the gather.
"""

import math
import re
from collections.abc import Iterator

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import Ints, groups
from cs336_systems.analysis.kernels.attribution import Attribution
from cs336_systems.analysis.kernels.collectives import NO_COLLECTIVE
from cs336_systems.analysis.kernels.device_time import Jobs
from cs336_systems.analysis.kernels.phases import NO_ROWS, PHASES
from cs336_systems.analysis.kernels.step_profile import GatherTimes
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, Trace
from cs336_systems.analysis.kernels.windows import Selection

_UNIT_OF_PYTORCH = r"(?: \((?:model\.)?(?P<path>.+)\))?"
"""The unit in the name of PyTorch's range; the prefix `model.` comes from this project's LossModule."""
_RANGE = re.compile(
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
    return tuple(_times(own, len(selection.steps)) for _, own in found.groupby(["unit", "phase"], sort=False))


def _times(found: pd.DataFrame, num_steps: int) -> GatherTimes:
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
        if found := _RANGE.fullmatch(text):
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
