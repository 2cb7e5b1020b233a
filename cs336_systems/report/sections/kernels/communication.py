"""Tables of communication: time of collectives and its exposed part, gathers in time, and ranks beside each other.

Times are means per step. A table has rows only of runs whose trace has kernels of collectives.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cs336_systems.analysis.kernels.classes import Collective
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import CommunicationTimes, RankTimes, StepProfile
from cs336_systems.config import RunConfig
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.entries import over_configurations, rows_of
from cs336_systems.report.section import Section, Table
from cs336_systems.report.sections.kernels.entries import Explained, Profiled
from cs336_systems.report.sections.kernels.facts import WHOLE_STEP, last_ranks, mean_std_ms
from cs336_systems.report.words import ratio, rounded

ALL_KINDS = "all"
"""Name of all collectives together in the column of their kinds."""
EXPOSED = (
    "Exposed: the GPU runs a collective and nothing that computes, so the step waits for it; overlapped is the rest. "
    "A rank's kernel runs while it waits for other ranks, and that is a part of its time. Times are those of rank 0, "
    "in the phase in which they pass: a collective can begin in a later phase than the one that launched it."
)
IN_TIME = (
    "Late: the gather ended after what needs it was ready, which is when the work before it had ended and the host had "
    "launched it. Waited: how long it waited for the gather."
)
MAX_LATE = 20
"""Most rows of the table of late gathers."""
_CSV = ("phase", "collective", "collectives_per_step", "collective_mean_ms", "collective_std_ms", "overlapped_mean_ms",
        "exposed_mean_ms", "exposed_std_ms", "exposed_share")  # fmt: skip
GATHERS = ("gathers_per_step", "late_per_step", "gather_ms", "gather_waited_ms")
"""Values of the gathers of sharded parameters that a phase needed, in its last row; empty for a run without."""
_RANK_TIMES = ("collective", "exposed", "waited")
_SHOWN = (*LaunchPhase, WHOLE_STEP)


def communication(entries: Sequence[Explained]) -> Section:
    """Time of collectives in each phase and in the step, by their kind, what of it is exposed, and gathers in time."""
    columns = [
        column("phase"),
        column("collective"),
        column("collectives_per_step"),
        column("collective_mean_ms", std="collective_std_ms"),
        column("overlapped_mean_ms"),
        column("exposed_mean_ms", std="exposed_std_ms"),
        column("exposed_share"),
    ]
    rows = rows_of(entries, communication_rows)
    keys = (*_CSV, *(GATHERS if any(entry.profile.gathers for entry in entries) else ()))
    found = over_configurations("communication", "Communication", rows, columns, keys, [EXPOSED])
    return replace(found, tables=(*found.tables, *_gathers(entries)))


def communication_rows(entry: Explained) -> Iterator[Row]:
    """A row for each kind in each phase, then in the step; also for all kinds together where there are several."""
    profile = entry.profile
    wall = {phase.phase: sum(phase.wall_s) for phase in profile.phases}
    for phase in wall:
        yield from _of_phase(profile, phase, [own for own in profile.communication if own.phase is phase], wall[phase])
    yield from _of_phase(profile, WHOLE_STEP, profile.communication, sum(wall.values()))


def _of_phase(profile: StepProfile, name: str, found: Sequence[CommunicationTimes], wall_s: float) -> Iterator[Row]:
    of_kinds = {own.collective for own in found}
    kinds = [kind for kind in (*Collective, None) if kind in of_kinds]
    kinds = kinds if len(kinds) > 2 else kinds[:1]  # of a single kind, all are that kind
    needed = next((row for row in gather_rows(profile) if row["phase"] == name), None)
    if needed and not kinds:
        kinds = [None]
    for kind in kinds:
        own = [times for times in found if times.collective is kind]
        total, exposed = (mean_std_ms([getattr(times, field) for times in own]) for field in ("total_s", "exposed_s"))
        yield {
            "phase": name,
            "collective": kind or ALL_KINDS,
            "collectives_per_step": sum(sum(times.launches) for times in own) / profile.num_steps,
            "collective_mean_ms": total[0],
            "collective_std_ms": total[1],
            "overlapped_mean_ms": total[0] - exposed[0],
            "exposed_mean_ms": exposed[0],
            "exposed_std_ms": exposed[1],
            "exposed_share": ratio(exposed[0] * profile.num_steps / 1e3, wall_s),
            **{key: needed[key] if needed and kind is kinds[-1] else None for key in GATHERS},
        }


OF_CONFIGURATION = ("collective_mean_ms", "exposed_mean_ms", "exposed_share")
"""What `by_configuration` says of each; the share is that of the profiled step's wall time."""


def by_configuration(entries: Iterable[Profiled]) -> dict[RunConfig, Row]:
    """For each configuration on several ranks, the values OF_CONFIGURATION of its profiled runs.

    Times are means over the steps, the ranks and the runs. Both are those of the profiled step, which is slower.
    """
    found: dict[RunConfig, list[Row]] = {}
    for entry in entries:
        if entry.profile.communication:
            found.setdefault(entry.config.unprofiled.configuration, []).append(_of_run(entry.profile))
    return {
        config: {key: statistics.fmean(own[key] for own in rows) for key in OF_CONFIGURATION}
        for config, rows in found.items()
    }


def _of_run(profile: StepProfile) -> Row:
    """The means over the ranks on which collectives ran."""
    rows = [row for row in map(_sums, profile.ranks or (profile,)) if row["collective_mean_ms"] is not None]
    shares = [ratio(row["exposed_mean_ms"], row[f"{WHOLE_STEP}_wall_mean_ms"]) for row in rows]
    return {
        "collective_mean_ms": statistics.fmean([row["collective_mean_ms"] for row in rows] or [0.0]),
        "exposed_mean_ms": statistics.fmean([row["exposed_mean_ms"] for row in rows] or [0.0]),
        "exposed_share": statistics.fmean([share or 0.0 for share in shares] or [0.0]),
    }


def ranks(entries: Sequence[Explained]) -> Section:
    """The phases of a step, its collectives and their waits on each rank, beside each other."""
    rows = rows_of(entries, rank_rows)
    shown = [name for name in _SHOWN if any(row[f"{name}_wall_mean_ms"] for row in rows)]
    columns = [
        column("rank"),
        *(
            Column(name, "ms", f"Wall time of {name} on the device.", key=f"{name}_wall_mean_ms", write=rounded,
                   std=f"{name}_wall_std_ms")
            for name in shown if name not in (LaunchPhase.DATA, LaunchPhase.UNATTRIBUTED)
        ),
        *(column(f"{name}_mean_ms", std=f"{name}_std_ms") for name in _RANK_TIMES),
    ]  # fmt: skip
    keys = ["rank", *(f"{name}_wall_{value}_ms" for name in shown for value in ("mean", "std")),
            *(f"{name}_{value}_ms" for name in _RANK_TIMES for value in ("mean", "std"))]  # fmt: skip
    waited = (
        " Waited: how much longer its kernels of collectives ran than those of the rank that came last to each."
        if any(row["waited_mean_ms"] is not None for row in rows)
        else ""
    )
    notes = [
        f"Wall times on each rank's device.{waited}",
        *(_last_ranks(entries[0].profile) if len(entries) == 1 else ()),
    ]
    return over_configurations("ranks", "Ranks", rows, columns, keys, notes)


def rank_rows(entry: Explained) -> Iterator[Row]:
    """A row for each rank; none for a run on one."""
    for own in entry.profile.ranks:
        waited = (None, None) if own.waited_s is None else mean_std_ms([own.waited_s])
        yield {"rank": own.rank, **_sums(own), "waited_mean_ms": waited[0], "waited_std_ms": waited[1]}


def _sums(own: RankTimes | StepProfile) -> Row:
    """Wall times of the phases and the step, and times of all collectives, with their deviations over the steps."""
    walls = {phase.phase: [phase.wall_s] for phase in own.phases}
    kept = [times for times in own.communication if times.collective is None]
    parts: dict[str, list[tuple[float, ...]]] = {
        **{f"{name}_wall": walls.get(name, []) for name in LaunchPhase},
        f"{WHOLE_STEP}_wall": [times for every in walls.values() for times in every],
        "collective": [times.total_s for times in kept],
        "exposed": [times.exposed_s for times in kept],
    }
    row: Row = {}
    for name, times in parts.items():
        row[f"{name}_mean_ms"], row[f"{name}_std_ms"] = mean_std_ms(times) if times else (None, None)
    return row


def _last_ranks(profile: StepProfile) -> Iterator[str]:
    """A note on which rank the others waited for, if that is known."""
    found = last_ranks(profile)
    if found:
        counts = ", ".join(f"{rank} in {count}" for rank, count in found.most_common())
        yield f"The rank that the others waited for most, by the number of steps: {counts}."


def _gathers(entries: Sequence[Explained]) -> Iterator[Table]:
    """How many gathers of sharded parameters came in time, and the modules for which the step waited longest."""
    yield from over_configurations(
        "", "Gathers of parameters", rows_of(entries, lambda entry: gather_rows(entry.profile)),
        [column("phase"), *map(column, GATHERS)], (), [IN_TIME],
    ).tables  # fmt: skip
    late = [row for row in rows_of(entries, _gathered_modules) if row["gather_waited_ms"]]
    if late:
        least_ms = sorted((row["gather_waited_ms"] for row in late), reverse=True)[:MAX_LATE][-1]
        yield from over_configurations(
            "", "Gathers that came late", late,
            [column("gathered"), column("phase"), column("gather_ms"), column("lead_ms"), column("gather_waited_ms"),
             column("late_steps")],
            (),
            ["In how many of the steps it came late.",
             *([f"Shown are the {MAX_LATE} longest waits of {len(late)}."] if len(late) > MAX_LATE else [])],
            shown=lambda row: row["gather_waited_ms"] >= least_ms,
        ).tables  # fmt: skip


def gather_rows(profile: StepProfile) -> Iterator[Row]:
    """A row for each phase that needed gathers: all of its modules together."""
    found, steps = profile.gathers, profile.num_steps
    for phase in dict.fromkeys(own.phase for own in found):
        own = [each for each in found if each.phase is phase]
        yield {
            "phase": phase,
            "gathers_per_step": sum(lead_s is not None for each in own for lead_s in each.lead_s) / steps,
            "late_per_step": sum(lead_s is not None and lead_s < 0 for each in own for lead_s in each.lead_s) / steps,
            "gather_ms": sum(sum(each.ran_s) for each in own) / steps * 1e3,
            "gather_waited_ms": sum(sum(each.waited_s) for each in own) / steps * 1e3,
        }


def _gathered_modules(entry: Explained) -> Iterator[Row]:
    """A row for each module in each phase that needed it; its lead is the mean over the steps that have one."""
    steps = entry.profile.num_steps
    for own in entry.profile.gathers:
        leads_s = [lead_s for lead_s in own.lead_s if lead_s is not None]
        yield {
            "gathered": own.unit,
            "phase": own.phase,
            "gather_ms": sum(own.ran_s) / steps * 1e3,
            "lead_ms": statistics.fmean(leads_s) * 1e3 if leads_s else None,
            "gather_waited_ms": sum(own.waited_s) / steps * 1e3,
            "late_steps": sum(lead_s < 0 for lead_s in leads_s),
        }
