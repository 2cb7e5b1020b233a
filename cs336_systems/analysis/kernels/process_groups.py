"""The collectives of all ranks beside each other: who waits for whom, and how fast each process
group exchanges its messages.

The kernels of one collective end together on all ranks, so that its duration on a rank says when
that rank began. Clocks are not compared: those of two GPUs of one host were seen to drift apart by
20 us within two steps, and those of hosts differ by more than a step takes. Of the ranks of a
process group, each runs its collectives in the same order; those of different groups may change
places.
"""

from collections.abc import Iterator, Sequence
from math import isnan

import numpy as np
import pandas as pd

from ...costs.communication import TIMED, Collective
from ..columns import Ints, groups
from .attribution import Attribution, Jobs, select_steps
from .collectives import COLLECTIVES, NO_COLLECTIVE
from .communication import computes
from .step_profile import GroupTimes, RankTimes, StepProfile, StepSkew, Work
from .trace import Message

_EVEN = [COLLECTIVES.index(kind) for kind in TIMED if kind is not Collective.PUSH]
"""Collectives whose whole tensors have one size on all ranks."""
_OF_ALL_RANKS = ["key", "step", "place"]
"""What the kernels of one collective on all ranks have in common."""


def collectives_of(attribution: Attribution) -> pd.DataFrame:
    """A row for each kernel of a collective in the profiled steps, in the order in which they
    began. On a CPU there are none, because operators there only start a collective.
    """
    jobs, trace = attribution.jobs, attribution.trace
    step = select_steps(attribution).step_of(jobs.step)
    is_chosen = (jobs.collective != NO_COLLECTIVE) & ~jobs.is_copy & (step >= 0)
    rows = np.flatnonzero(is_chosen & (not trace.is_of_host))
    rows = rows[np.lexsort((jobs.start_ns[rows], step[rows]))]
    said = [*trace.messages, Message()]  # the last one stands for none
    messages = pd.DataFrame(said)
    messages["key"] = [f"{message.group} {message.ranks} {message.size}" for message in said]
    messages = messages.astype({"size": np.float64, "num_bytes": np.float64})  # NaN for None
    frame = messages.iloc[jobs.message[rows]].reset_index(drop=True)
    frame["step"] = step[rows]
    frame["collective"] = jobs.collective[rows]
    frame["duration_ns"] = jobs.duration_ns[rows]
    frame["exposed_ns"] = _exposed_ns(jobs, rows)
    frame["place"] = frame.groupby(["step", "key"]).cumcount()
    return frame[frame["size"] != 1]


def _exposed_ns(jobs: Jobs, rows: Ints) -> Ints:
    """The part of each of these jobs in which its device computes and copies nothing."""
    exposed = jobs.duration_ns.copy()
    for _, of_device in groups(jobs.device):
        others = of_device[computes(jobs, of_device)]
        hidden = jobs.union(others)
        exposed[of_device] -= hidden.within(jobs.start_ns[of_device], jobs.end_ns[of_device])
    return exposed[rows]


def met(
    collectives: Sequence[pd.DataFrame],
    profiles: Sequence[tuple[int, StepProfile]],
    world_size: int = 1,
) -> pd.DataFrame:
    """The collectives of all ranks in one frame, with what a rank's own file cannot say.

    `is_met`: all ranks of the group are here, and ran the same collectives. `sent_ns`: the time
    from the start of the last rank; where that is not known, the rank's whole time.
    """
    frame = pd.concat(collectives, keys=range(len(collectives)), names=["rank", None])
    frame = frame.reset_index("rank").reset_index(drop=True)
    here = frame.groupby("key")["rank"].transform("nunique")
    together = frame.groupby(_OF_ALL_RANKS)
    is_same = together["rank"].transform("nunique") == here
    is_same &= together["collective"].transform("nunique") == 1
    is_same &= (together["num_bytes"].transform("nunique") <= 1) | ~frame["collective"].isin(_EVEN)
    is_same &= len({profile.num_steps for _, profile in profiles}) == 1
    size = frame["size"].fillna(max(world_size, len(collectives)))
    frame["is_met"] = is_same & (here == size) & (here > 1)
    frame["here"] = here
    frame["is_met"] = frame.groupby("key")["is_met"].transform("all")
    shortest_ns = together["duration_ns"].transform("min")
    frame["sent_ns"] = shortest_ns.where(frame["is_met"], frame["duration_ns"])
    frame["is_last"] = frame["duration_ns"] == shortest_ns
    # of several ranks that began last together, none is named
    frame["is_last"] &= frame.groupby(_OF_ALL_RANKS)["is_last"].transform("sum") == 1
    return frame


def rank_times(
    profiles: Sequence[tuple[int, StepProfile]], collectives: pd.DataFrame
) -> tuple[RankTimes, ...]:
    """The times of all ranks, from the profile of each and what `met` says."""
    is_on_device = all(profile.work is Work.KERNELS for _, profile in profiles)
    is_known = is_on_device and len(collectives) > 0 and bool(collectives["is_met"].all())
    shape = len(profiles), max(profile.num_steps for _, profile in profiles)
    place = collectives["rank"], collectives["step"]
    waited_ns, last = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    np.add.at(waited_ns, place, collectives["duration_ns"] - collectives["sent_ns"])
    np.add.at(last, place, collectives["is_last"])
    times = []
    for number, (rank, profile) in enumerate(profiles):
        waited_s = num_last = None
        if is_known:
            waited_s = tuple((waited_ns[number] / 1e9).tolist())
            num_last = tuple(last[number].tolist())
        of_rank = RankTimes(
            rank=rank,
            step_s=profile.step_s,
            phases=profile.phases,
            communication=profile.communication,
            waited_s=waited_s,
            last=num_last,
        )
        times.append(of_rank)
    return tuple(times)


def step_skews(collectives: pd.DataFrame, num_steps: int) -> tuple[StepSkew, ...]:
    """How far apart the ranks began the same collective, in each step; nothing where no process
    group has all of its ranks here.
    """
    known = collectives[collectives["is_met"]]
    if known.empty:
        return ()
    durations = known.groupby(_OF_ALL_RANKS)["duration_ns"]
    spread_ns = durations.max() - durations.min()
    by_step = spread_ns.groupby("step").agg(["size", "median", "max"])
    by_step = by_step.reindex(range(num_steps), fill_value=0)
    skews = []
    for count, median_ns, largest_ns in by_step.to_numpy().tolist():
        skew = StepSkew(
            collectives=int(count), median_s=median_ns / 1e9, largest_s=largest_ns / 1e9
        )
        skews.append(skew)
    return tuple(skews)


def group_times(collectives: pd.DataFrame) -> Iterator[GroupTimes]:
    """The times and bytes of each process group by kind of collective, the longest first."""
    rows = []
    for _, part in collectives.groupby(["key", "collective"]):
        said = part.iloc[0]
        rows.append(
            GroupTimes(
                group=said["description"] or said["group"],
                ranks=said["ranks"],
                size=_if_known(said["size"]),
                here=int(said["here"]),
                collective=COLLECTIVES[said["collective"]],
                count=len(part),
                bytes=_if_known(part["num_bytes"].sum(skipna=False)),
                total_s=int(part["duration_ns"].sum()) / 1e9,
                exposed_s=int(part["exposed_ns"].sum()) / 1e9,
                sent_s=int(part["sent_ns"].sum()) / 1e9,
                is_met=bool(part["is_met"].all()),
            )
        )
    yield from sorted(rows, key=lambda row: -row.total_s)


def _if_known(number: float) -> int | None:
    """The whole number, or None for NaN, which stands for one that is not known."""
    return None if isnan(number) else int(number)
