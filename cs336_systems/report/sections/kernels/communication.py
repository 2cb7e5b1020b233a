"""Tables of collectives in a profiled step: by phase and kind, by rank, and by configuration."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import RankTimes, StepProfile
from ....costs.communication import Collective
from ....subject import Subject
from ...columns import Column, Row, column, columns_of
from ...section import Section, over_configurations, rows_of
from ...words import ratio, rounded
from .entry import Explained
from .sums import ALL_KINDS, WHOLE_STEP, mean_std_ms, phases_by_name, total

_COMMUNICATION_CSV = (
    "phase",
    "collective",
    "collectives_per_step",
    "collective_mean_ms",
    "collective_std_ms",
    "overlapped_mean_ms",
    "exposed_mean_ms",
    "exposed_std_ms",
    "exposed_share",
)

_RANK_TIMES = ("collective", "exposed", "waited")


def communication(entries: Sequence[Explained]) -> Section:
    """Time of collectives in each phase and in the step, by their kind, and what of it is
    exposed.
    """
    shown = columns_of(
        "phase",
        "collective",
        "collectives_per_step",
        column("collective_mean_ms", std="collective_std_ms"),
        "overlapped_mean_ms",
        column("exposed_mean_ms", std="exposed_std_ms"),
        "exposed_share",
    )
    rows = rows_of(entries, communication_rows)
    notes = [
        "A rank's kernel runs while it waits for other ranks, and that is a part of its time. "
        f"Times are those of rank {entries[0].profile.rank or 0}, in the phase in which they "
        "pass: a collective can begin in a later phase than the one that launched it."
    ]
    return over_configurations(
        "communication", "Communication", rows, shown, _COMMUNICATION_CSV, notes
    )


def communication_rows(entry: Explained) -> Iterator[Row]:
    """A row for each kind in each phase, then in the step; also for all kinds together where
    there are several.
    """
    profile, steps = entry.profile, entry.profile.num_steps
    for name, chosen in phases_by_name(profile).items():
        of_phase = [times for times in profile.communication if times.phase in chosen]
        present = {times.collective for times in of_phase}
        kinds = [kind for kind in (*Collective, None) if kind in present]
        if len(kinds) == 2:  # of a single kind, all together are that kind
            kinds = kinds[:1]
        wall_s = total(times.wall_s for times in profile.phases if times.phase in chosen)
        for kind in kinds:
            parts = [times for times in of_phase if times.collective is kind]
            total_ms, total_std_ms = mean_std_ms([times.total_s for times in parts])
            exposed_ms, exposed_std_ms = mean_std_ms([times.exposed_s for times in parts])
            yield {
                "phase": name,
                "collective": kind or ALL_KINDS,
                "collectives_per_step": total(times.launches for times in parts) / steps,
                "collective_mean_ms": total_ms,
                "collective_std_ms": total_std_ms,
                "overlapped_mean_ms": total_ms - exposed_ms,
                "exposed_mean_ms": exposed_ms,
                "exposed_std_ms": exposed_std_ms,
                "exposed_share": ratio(exposed_ms * steps / 1e3, wall_s),
            }


OF_CONFIGURATION = ("collective_mean_ms", "exposed_mean_ms", "exposed_share")
"""What `by_configuration` says of each; the share is that of the profiled step's wall time."""


def by_configuration(entries: Iterable[Explained]) -> dict[Subject, Row]:
    """For each configuration on several ranks, the values OF_CONFIGURATION of its profiled runs.

    Times are means over the steps, the ranks and the runs. Both are those of the profiled step,
    which is slower.
    """
    runs: dict[Subject, list[Row]] = {}
    for entry in entries:
        if entry.subject is not None and entry.profile.communication:
            subject = entry.subject.unprofiled.configuration
            runs.setdefault(subject, []).append(_of_run(entry.profile))
    return {subject: _means(rows) for subject, rows in runs.items()}


def _of_run(profile: StepProfile) -> Row:
    """The means over the ranks on which collectives ran."""
    rows = [_rank_times(times) for times in profile.ranks or (profile,)]
    rows = [row for row in rows if row["collective_mean_ms"] is not None]
    for row in rows:
        share = ratio(row["exposed_mean_ms"], row[f"{WHOLE_STEP}_wall_mean_ms"])
        row["exposed_share"] = share or 0.0
    return _means(rows or [dict.fromkeys(OF_CONFIGURATION, 0.0)])


def _means(rows: Sequence[Row]) -> Row:
    return {key: statistics.fmean(row[key] for row in rows) for key in OF_CONFIGURATION}


def ranks(entries: Sequence[Explained]) -> Section:
    """The phases of a step, its collectives and their waits on each rank, beside each other."""
    rows = rows_of(entries, rank_rows)
    names = [
        name
        for name in (*LaunchPhase, WHOLE_STEP)
        if any(row[f"{name}_wall_mean_ms"] for row in rows)
    ]
    columns = [column("rank")]
    for name in names:
        if name in (LaunchPhase.DATA, LaunchPhase.UNATTRIBUTED):
            continue
        about, key = f"Wall time of {name} on the device.", f"{name}_wall"
        columns.append(
            Column(name, "ms", about, key=f"{key}_mean_ms", std=f"{key}_std_ms", write=rounded)
        )
    columns += [column(f"{name}_mean_ms", std=f"{name}_std_ms") for name in _RANK_TIMES]
    keys = ["rank"]
    for name in (*(f"{name}_wall" for name in names), *_RANK_TIMES):
        keys += [f"{name}_mean_ms", f"{name}_std_ms"]
    notes = ["Wall times on each rank's device."]
    return over_configurations("ranks", "Ranks", rows, columns, keys, notes)


def rank_rows(entry: Explained) -> Iterator[Row]:
    """A row for each rank; none for a run on one."""
    for times in entry.profile.ranks:
        row = {"rank": times.rank, **_rank_times(times)}
        waited_s = [] if times.waited_s is None else [times.waited_s]
        row["waited_mean_ms"], row["waited_std_ms"] = _mean_std_ms_of_known(waited_s)
        yield row


def _rank_times(times: RankTimes | StepProfile) -> Row:
    """Wall times of the phases and the step, and times of all collectives, with their deviations
    over the steps; None for a phase that the rank does not have.
    """
    parts: dict[str, list[Sequence[float]]] = {f"{name}_wall": [] for name in LaunchPhase}
    for name, chosen in phases_by_name(times).items():
        parts[f"{name}_wall"] = [part.wall_s for part in times.phases if part.phase in chosen]
    of_all_kinds = [part for part in times.communication if part.collective is None]
    parts["collective"] = [part.total_s for part in of_all_kinds]
    parts["exposed"] = [part.exposed_s for part in of_all_kinds]
    row: Row = {}
    for name, times_s in parts.items():
        row[f"{name}_mean_ms"], row[f"{name}_std_ms"] = _mean_std_ms_of_known(times_s)
    return row


def _mean_std_ms_of_known(
    parts_s: Sequence[Sequence[float]],
) -> tuple[float, float | None] | tuple[None, None]:
    """Mean and deviation as of `mean_std_ms`; None where there are no parts."""
    return mean_std_ms(parts_s) if parts_s else (None, None)
