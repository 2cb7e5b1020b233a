"""Tables of collectives in a profiled step: by phase and kind, by rank, and by configuration."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import RankTimes, StepProfile
from ....costs.communication import Collective
from ....costs.hardware import find_device
from ....subject import Subject
from ...columns import Column, Row, column, columns_of
from ...section import Section, over_configurations, rows_of
from ...words import count, label, ratio, rounded, significant
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
MAX_GROUPS, MAX_SKEWS = 20, 10
"""Rows of the tables of process groups and of steps."""


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
        "communication", "Communication", rows, shown, notes, _COMMUNICATION_CSV
    )


def communication_rows(entry: Explained) -> Iterator[Row]:
    """A row for each kind in each phase, then in the step; also for all kinds together where
    there are several.
    """
    profile = entry.profile
    steps = profile.num_steps
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
    """For each configuration on several ranks, what its profiled runs say of communication: the
    columns that OF_CONFIGURATION names.

    Times are means over the steps, the ranks and the runs. They are those of steps under a
    profiler, which are slower than those without.
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
    means = {}
    for key in OF_CONFIGURATION:
        means[key] = statistics.fmean(row[key] for row in rows)
    return means


def ranks(entries: Sequence[Explained]) -> Section:
    """The phases of a step, its collectives and their waits on each rank, beside each other."""
    rows = rows_of(entries, rank_rows)
    names = []
    for name in (*LaunchPhase, WHOLE_STEP):
        if any(row[f"{name}_wall_mean_ms"] for row in rows):
            names.append(name)
    columns = [column("rank")]
    for name in names:
        if name in (LaunchPhase.DATA, LaunchPhase.UNATTRIBUTED):
            continue
        about = f"Wall time of {name} on the device."
        key = f"{name}_wall"
        columns.append(
            Column(name, "ms", about, key=f"{key}_mean_ms", std=f"{key}_std_ms", write=rounded)
        )
    columns += [column(f"{name}_mean_ms", std=f"{name}_std_ms") for name in _RANK_TIMES]
    keys = ["rank"]
    for name in (*(f"{name}_wall" for name in names), *_RANK_TIMES):
        keys += [f"{name}_mean_ms", f"{name}_std_ms"]
    notes = ["Wall times on each rank's device."]
    return over_configurations("ranks", "Ranks", rows, columns, notes, keys)


def rank_rows(entry: Explained) -> Iterator[Row]:
    """A row for each rank; none for a run on one."""
    for times in entry.profile.ranks:
        row = {"rank": times.rank, **_rank_times(times)}
        waited_s = [] if times.waited_s is None else [times.waited_s]
        row["waited_mean_ms"], row["waited_std_ms"] = _mean_std_ms_of_known(waited_s)
        yield row


def groups(entries: Sequence[Explained]) -> Section:
    """Times, bytes and bandwidth of each process group, by kind of collective."""
    shown = [
        Column("group", key="group", numeric=False, write=label),
        Column("ranks", key="ranks", numeric=False, drop_order=3, write=label),
        Column("size", key="size", write=str),
        column("collective"),
        Column("times", key="collectives_per_step", drop_order=2, write=count),
        Column("bytes of each", "MB", key="message_bytes", scale=1e-6, write=rounded),
        column("collective_mean_ms", name="time"),
        column("exposed_mean_ms"),
        Column("sending", "ms", key="sent_mean_ms", text=_or_less, write=rounded),
        Column("algorithm", "GB/s", key="bytes_per_s", drop_order=1, text=_or_more("bytes_per_s")),
        Column("bus", "GB/s", key="bus_bytes_per_s", text=_or_more("bus_bytes_per_s")),
        Column("NVLink", "GB/s", key="link_bytes_per_s", scale=1e-9, write=count),
    ]
    rows = rows_of(entries, group_rows)
    keys = [heading.key for heading in shown] + ["ranks_here", "is_lower_bound"]
    return over_configurations(
        "groups", "Process groups", rows, shown, _about_groups(rows), keys, shown=_is_among_first
    )


def _about_groups(rows: Sequence[Row]) -> Iterator[str]:
    """What the numbers of process groups are, and what cannot be told."""
    yield (
        "Per step, means over the ranks that are here. Exposed: the device computes nothing "
        "meanwhile. Sending begins with the start of the last rank."
    )
    if any(row["bytes_per_s"] for row in rows):
        yield (
            "Bandwidths of algorithm and bus as nccl-tests defines them: bytes over the time of "
            "sending, and times 2(n-1)/n for an all-reduce, (n-1)/n for an all-gather, a "
            "reduce-scatter and an all-to-all of n ranks."
        )
    if any(row["is_lower_bound"] for row in rows):
        yield (
            "≥, ≤: not all ranks of the group are here with the same collectives, so that waiting "
            "for the last one is in the time of sending, and the bandwidth may be higher."
        )
    if any(row["link_bytes_per_s"] for row in rows):
        yield (
            "NVLink: one direction of all links of the device, by its data sheet. The file does "
            "not say whether a group spans hosts, between which a network sends less."
        )
    if len(rows) > MAX_GROUPS:
        yield f"Shown are {MAX_GROUPS} of {len(rows)}, those that take longest."


def _is_among_first(row: Row) -> bool:
    return bool(row["number"] < MAX_GROUPS)


def _or_more(key: str) -> Callable[[Row], str]:
    """Writes a bandwidth, with a mark for a lower bound."""

    def text(row: Row) -> str:
        rate = row[key]
        mark = "≥ " if row["is_lower_bound"] else ""
        return "" if rate is None else f"{mark}{significant(rate / 1e9, 3)}"

    return text


def _or_less(row: Row) -> str:
    """Writes the time of sending, with a mark for an upper bound."""
    mark = "≤ " if row["is_lower_bound"] else ""
    return f"{mark}{rounded(row['sent_mean_ms'])}"


def group_rows(entry: Explained) -> Iterator[Row]:
    """A row for each kind of collective in each process group."""
    profile = entry.profile
    devices = [find_device(name) for name in profile.device_names]
    link = devices[0].link_bytes_per_s if len(devices) == 1 and devices[0] else None
    for number, times in enumerate(profile.groups):
        parts = times.here * profile.num_steps
        yield {
            "number": number,
            "group": times.group or "not in the file",
            "ranks": times.ranks,
            "size": times.size,
            "ranks_here": times.here,
            "collective": times.collective,
            "collectives_per_step": times.count / parts,
            "message_bytes": ratio(times.bytes, times.count),
            "collective_mean_ms": times.total_s / parts * 1e3,
            "exposed_mean_ms": times.exposed_s / parts * 1e3,
            "sent_mean_ms": times.sent_s / parts * 1e3,
            "bytes_per_s": times.bytes_per_s,
            "bus_bytes_per_s": times.bus_bytes_per_s,
            "link_bytes_per_s": link if times.bus_bytes_per_s else None,
            "is_lower_bound": not times.is_met,
        }


def skew(entries: Sequence[Explained]) -> Section:
    """How far apart the ranks began the same collective, in each step."""
    shown = [
        Column("step", key="step", write=str),
        Column("collectives", key="collectives", write=count),
        Column("median", "ms", key="median_ms", write=rounded),
        Column("largest", "ms", key="largest_ms", write=rounded),
        Column("began last most often", key="last", numeric=False, write=str),
    ]
    notes = [
        "From the start of the first rank to that of the last one, of the same collective. Its "
        "kernels end together on all ranks, so clocks are not compared."
    ]
    rows = rows_of(entries, skew_rows)
    if len(rows) > MAX_SKEWS:
        notes.append(f"Shown are the first {MAX_SKEWS} of {len(rows)} steps.")
    return over_configurations(
        "skew", "Skew of ranks", rows, shown, notes, shown=lambda row: row["step"] <= MAX_SKEWS
    )


def skew_rows(entry: Explained) -> Iterator[Row]:
    """A row for each step in which the ranks met."""
    profile = entry.profile
    for step, times in enumerate(profile.skew):
        last = [(rank.last[step], rank.rank) for rank in profile.ranks if rank.last is not None]
        yield {
            "step": step + 1,  # as pictures number them
            "collectives": times.collectives,
            "median_ms": times.median_s * 1e3,
            "largest_ms": times.largest_s * 1e3,
            "last": _most_often(last, times.collectives),
        }


def _most_often(last: Sequence[tuple[int, int]], count: int) -> str:
    """The rank that was last most often, from how often each was; empty if none was."""
    most, rank = max(last, default=(0, 0))
    ties = [times for times, _ in last if times == most]
    who = f"rank {rank}" if len(ties) == 1 else f"{len(ties)} ranks"
    return f"{who}, {most} of {count}" if most else ""


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
