"""Explained traces with the records of their runs, and tables of any number of them, such as phases
of a step.

Sums are over all steps of a profile; times and counts in tables are per step: the sum over the
profiled steps, over their number. Tables of one trace are in files.py.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ....analysis.columns import ProfileError
from ....analysis.kernels import step_profile
from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.phases import LaunchPhase
from ....config import Phase, Profiler, RunConfig
from ....costs.communication import Collective
from ....record import RunRecord, Status
from ....subject import Subject
from ....sweep.store import explanation_path
from ....text import counted
from ...columns import Column, Row, column, columns_of
from ...section import Section, load_entries, over_configurations, rows_of
from ...words import in_percent, label, mean_and_std, ratio, rounded

KERNEL_PROFILERS = (Profiler.NSYS, Profiler.KINETO)
WHOLE_STEP = "step"
"""Name of all phases together in the column of phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long a step or a phase lasts, and how long the device works in it; sums over all steps
    of the profile.
    """

    whole_s: float
    """By the clock of the run without a profiler; of the profile itself where no such run is
    known.
    """
    busy_s: float
    """How long kernels and copies run, as the profile has it: a profiler slows the host, not the
    kernels.
    """
    profiled_s: float
    """How long the profile itself lasts."""
    by_clock: bool

    @property
    def idle_s(self) -> float:
        """What the device does not work. No remedy against idle time can gain more than that."""
        return max(self.whole_s - self.busy_s, 0.0)

    @property
    def busy_share(self) -> float:
        """The part in which the device works, at most 1; 0 of nothing."""
        return min(self.busy_s / self.whole_s, 1.0) if self.whole_s else 0.0

    def gain_s(self, lost_s: float) -> float:
        """The most that can be gained without this much idle time in the profile, which a
        profiler makes longer.
        """
        return min(lost_s, self.idle_s) if self.by_clock else lost_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One explained trace, with the record of its run and that of the same run without a
    profiler, if known.
    """

    profile: step_profile.StepProfile
    profiled: RunRecord | None = None
    plain: RunRecord | None = None
    """The same run without a profiler; None if there is none that finished."""

    @property
    def subject(self) -> Subject | None:
        """None if the record of the run is not known."""
        return None if self.profiled is None else self.profiled.subject

    @property
    def config(self) -> RunConfig | None:
        """None if the record is not known, or that of a watched loop."""
        return None if self.profiled is None else self.profiled.config

    @property
    def device_name(self) -> str | None:
        """None if no record names the device."""
        return None if self.profiled is None else self.profiled.device_name

    def clock_s(self, phase: Phase, record: RunRecord | None) -> float | None:
        """Mean time of the phase by the clock of this run, with a profiler or without; None if it
        is not known.

        Backward's time includes communication if the trace cannot tell them apart, as in one CUDA
        graph of both.
        """
        phases = [phase]
        if phase is Phase.BACKWARD and all(
            own.phase is not LaunchPhase.COMMUNICATION for own in self.profile.phases
        ):
            phases.append(Phase.COMMUNICATION)
        found = [None if record is None else record.measurement(each) for each in phases]
        means_s = [measured.mean_s for measured in found if measured is not None]
        return sum(means_s) if found[0] is not None else None

    def span(self, phase: LaunchPhase | None = None) -> Span:
        """The span of the step, or of one phase. The clock timed no warm-up steps, and no file
        without steps.
        """
        name = Phase.STEP if phase is None else phase
        is_timed = name in set(Phase) and not (
            self.profile.is_warmup or self.profile.is_whole_trace
        )
        clock_s = self.clock_s(Phase(name), self.plain) if is_timed else None
        parts = [part for part in self.profile.phases if phase in (None, part.phase)]
        profiled_s = sum(sum(part.wall_s) for part in parts)
        return Span(
            whole_s=profiled_s if clock_s is None else clock_s * self.profile.num_steps,
            busy_s=sum(sum(part.busy_s) for part in parts),
            profiled_s=profiled_s,
            by_clock=clock_s is not None,
        )


def load_profiled(records: Sequence[RunRecord], directory: Path) -> list[Explained]:
    """The runs of a sweep under a kernel profiler, with their profiles in `directory`/kernels, in
    the order of tables.

    A missing profile is left out, with a warning.
    """

    def load(record: RunRecord) -> Explained:
        path = explanation_path(record.subject, directory / "runs")
        try:
            profile = step_profile.decode_profile(path.read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ProfileError(path, f"no kernel profile ({reason})") from error
        return Explained(profile=profile, profiled=record, plain=plain_run(record, records))

    return load_entries(records, KERNEL_PROFILERS, load)


def plain_run(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord | None:
    """The finished run of the same configuration on the same device, without a profiler."""
    wanted = record.subject.unprofiled
    return next(
        (
            other
            for other in records
            if other.subject == wanted
            and other.status is Status.OK
            and other.device_name == record.device_name
        ),
        None,
    )


class Timed(Protocol):
    """Any part of a profile that has a count and a total time."""

    @property
    def count(self) -> int: ...
    @property
    def total_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Sum:
    """Number and total time of some calls."""

    count: int = 0
    total_s: float = 0.0


T = TypeVar("T", bound=Timed)
K = TypeVar("K", bound=Hashable)


def added(rows: Iterable[Timed]) -> Sum:
    """The sum of counts and of times over all rows."""
    kept = list(rows)
    return Sum(sum(row.count for row in kept), sum(row.total_s for row in kept))


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, Sum]:
    """The sums of the rows by key, the longest time first."""
    groups: dict[K, list[T]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    sums = {name: added(group) for name, group in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].total_s))


def wall_s(profile: step_profile.StepProfile) -> float:
    """Wall time of all phases."""
    return sum(sum(phase.wall_s) for phase in profile.phases)


def kernel_s(
    profile: step_profile.StepProfile, chosen: Collection[LaunchPhase] = tuple(LaunchPhase)
) -> float:
    """Time of the kernels of some phases, or of all."""
    return sum(sum(phase.kernel_s) for phase in profile.phases if phase.phase in chosen)


def num_launches(*phases: step_profile.PhaseTimes) -> int:
    """Number of the kernels of these phases."""
    return sum(sum(phase.launches) for phase in phases)


def idle(
    profile: step_profile.StepProfile,
    cause: step_profile.IdleCause,
    phase: LaunchPhase | None = None,
) -> Sum:
    """Idle times of this cause, in one phase or in all."""
    return added(row for row in profile.idle if row.cause is cause and phase in (None, row.phase))


def collectives_s(profile: step_profile.StepProfile, *, exposed: bool = False) -> float:
    """Time in which collectives ran on the device; if `exposed`, the part in which the device
    computes nothing.
    """
    rows = [row for row in profile.communication if row.collective is None]
    return sum(sum(row.exposed_s if exposed else row.total_s) for row in rows)


def copies_alone_s(profile: step_profile.StepProfile) -> float:
    """Time in which copies ran on the device and no kernel; a lower bound for profiles of
    earlier versions.
    """
    if profile.copies:
        return profile.copies[-1].alone_s
    return (
        max(sum(sum(phase.busy_s) for phase in profile.phases) - kernel_s(profile), 0.0)
        if profile.gaps
        else 0.0
    )


def mean_std_ms(parts_s: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Mean and deviation over the steps, in ms, of the parts together; no deviation of one step."""
    times_s = [sum(times) for times in zip(*parts_s, strict=True)]
    std_ms = statistics.stdev(times_s) * 1e3 if len(times_s) > 1 else None
    return sum(times_s) / max(len(times_s), 1) * 1e3, std_ms


def terms(profile: step_profile.StepProfile) -> tuple[str, str]:
    """What the profile lists, and its time, in words: kernel and GPU time, or operator and CPU
    time for a CPU.
    """
    return (
        ("operator", "CPU time")
        if profile.work is step_profile.Work.OPERATORS
        else ("kernel", "GPU time")
    )


def about(profile: step_profile.StepProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    steps = counted(profile.num_steps, "warm-up step" if profile.is_warmup else "step")
    steps = (
        "no steps in the file, so the whole of it counts as one"
        if profile.is_whole_trace
        else steps
    )
    return f"{', '.join([*map(label, (profile.source, *profile.device_names)), steps])}."


def path_text(path: tuple[str, ...], cut: bool = True) -> str:
    """Ranges around a launch as `block.3 > ffn`; each name is `cut` to what a table has room
    for.
    """
    return " > ".join(label(name) if cut else name for name in path) or "outside of all ranges"


NOTICEABLE = 0.005
"""Share of the step's wall time: a phase that launched nothing and is shorter is not shown, such as
taking a batch that is ready.
"""
_PHASE_CSV = (
    "phase",
    "kernels_per_step",
    "kernel_mean_ms",
    "kernel_std_ms",
    "share",
    "wall_mean_ms",
    "wall_std_ms",
    "busy_mean_ms",
    "busy_share",
    "host_mean_ms",
    "host_std_ms",
    "launch_calls_per_step",
    "host_per_launch_ms",
    "copies_per_step",
    "copy_mean_ms",
    "recomputed_mean_ms",
    "clock_mean_ms",
    "wall_over_clock",
    "profiled_mean_ms",
    "slowdown",
)
CLASS_KEYS = {kind: kind.lower().replace(" ", "_").replace("-", "_") for kind in KernelClass}
_CLASS_VALUES = ("share", "ms_per_step", "per_step")
_PART_VALUES = ("per_step", "ms_per_step", "products_ms_per_step", "flops_per_step", "flops_per_s")
ALL_KINDS = "all"
"""Name of all collectives together in the column of their kinds."""
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


def _phases_of(
    profile: step_profile.StepProfile | step_profile.RankTimes,
) -> dict[str, tuple[LaunchPhase, ...]]:
    """Each phase and then all of them, by the names in the column of phases."""
    return {phase.phase: (phase.phase,) for phase in profile.phases} | {
        WHOLE_STEP: tuple(LaunchPhase)
    }


def phases(entries: Sequence[Explained]) -> Section:
    """Kernels and times of each phase, beside the clock of the run without a profiler."""
    rows, (item, time), is_single = (
        rows_of(entries, phase_rows),
        terms(entries[0].profile),
        len(entries) == 1,
    )
    shown = columns_of(
        "phase",
        column("kernels_per_step", name=f"{item}s", drop_order=6),
        column("kernel_mean_ms", name=time, std="kernel_std_ms"),
        *([column("share", drop_order=7)] if is_single else []),
        column("wall_mean_ms", std="wall_std_ms"),
        "busy_share",
        *(
            [
                column("host_mean_ms", std="host_std_ms", drop_order=8),
                column("host_per_launch_s", drop_order=9),
                column("copies_per_step", drop_order=10),
            ]
            if is_single
            else []
        ),
        column("recomputed_mean_ms", std="recomputed_std_ms"),
        "clock_mean_ms",
        "wall_over_clock",
        "slowdown",
    )
    notes = [*_of_one_trace(entries[0].profile)] if is_single else []
    if any(entry.plain for entry in entries):
        notes.append(
            "The clock ran without a profiler; all other times, and GPU busy, are those under it."
        )
    return over_configurations(
        "phases", "Phases of a step", rows, shown, _PHASE_CSV, notes, shown=is_shown
    )


def phase_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase in order, then their sum, named WHOLE_STEP."""
    for name, chosen in _phases_of(entry.profile).items():
        yield _phase(
            entry, [phase for phase in entry.profile.phases if phase.phase in chosen], name
        )


def is_shown(row: Row) -> bool:
    """Whether anything ran in the phase, or it took a noticeable part of the step."""
    ran = row["kernels_per_step"] or row["copies_per_step"]
    return bool(ran or row["wall_mean_ms"] >= NOTICEABLE * row["step_ms"])


def _phase(entry: Explained, chosen: Sequence[step_profile.PhaseTimes], name: str) -> Row:
    """The row of these phases together; what a device does beside its host is None for a trace
    of a CPU.
    """
    profile, steps, on_device = (
        entry.profile,
        entry.profile.num_steps,
        entry.profile.work is step_profile.Work.KERNELS,
    )
    calls = added(
        call
        for call in profile.host_calls
        if call.is_launch and call.phase in [phase.phase for phase in chosen]
    ).count
    wall, busy, host = (_mean_and_std(chosen, field) for field in ("wall", "busy", "host"))
    # the whole step is called alike in both
    clock_s, profiled_s = (
        entry.clock_s(Phase(name), record) if name in set(Phase) else None
        for record in (entry.plain, entry.profiled)
    )
    return {
        "phase": name,
        "kernels_per_step": num_launches(*chosen) / steps,
        **_mean_and_std(chosen, "kernel"),
        "share": ratio(sum(sum(phase.kernel_s) for phase in chosen), kernel_s(profile)),
        **wall,
        **(busy if on_device else dict.fromkeys(busy)),
        "busy_share": ratio(busy["busy_mean_ms"], wall["wall_mean_ms"]) if on_device else None,
        **(host if on_device else dict.fromkeys(host)),
        "launch_calls_per_step": calls / steps if profile.host_calls else None,
        "host_per_launch_ms": ratio(host["host_mean_ms"] * steps, calls),
        "host_per_launch_s": ratio(host["host_mean_ms"] * steps / 1e3, calls),
        "copies_per_step": sum(sum(phase.copies) for phase in chosen) / steps,
        **_mean_and_std(chosen, "copy"),
        **_mean_and_std(chosen, "recomputed"),
        "clock_mean_ms": None if clock_s is None else clock_s * 1e3,
        "wall_over_clock": ratio(wall["wall_mean_ms"], clock_s * 1e3) if clock_s else None,
        "profiled_mean_ms": None if profiled_s is None else profiled_s * 1e3,
        "slowdown": profiled_s / clock_s if profiled_s and clock_s else None,
        "step_ms": wall_s(profile) / steps * 1e3,
    }


def _mean_and_std(chosen: Sequence[step_profile.PhaseTimes], field: str) -> Row:
    """Mean and deviation over the steps in ms of the phases together; no deviation of one step."""
    mean_ms, std_ms = mean_std_ms([getattr(phase, f"{field}_s") for phase in chosen])
    return {f"{field}_mean_ms": mean_ms, f"{field}_std_ms": std_ms}


def _of_one_trace(profile: step_profile.StepProfile) -> Iterator[str]:
    """The host's clock, and the proof that phases and what is left are the whole file (reading
    checks it).
    """
    mean_ms, std_ms = mean_std_ms([profile.step_s])
    yield f"The step by the host's clock: {mean_and_std(mean_ms, std_ms) if mean_ms else '0'} ms."
    counts = {phase.phase: num_launches(phase) for phase in profile.phases}
    unattributed = counts.pop(LaunchPhase.UNATTRIBUTED, 0)
    kept = {
        "unattributed": unattributed,
        "warm-up": profile.left.warmup,
        "outside of steps": profile.left.outside,
    }
    if profile.work is step_profile.Work.KERNELS:
        kept["without a launch"] = profile.left.no_launch
    parts = [(name, count) for name, count in counts.items() if count] + [*kept.items()]
    named = " + ".join(f"{name} {count:,}" for name, count in parts)
    of_what = f"rank {profile.rank}" if profile.ranks and profile.rank is not None else "the file"
    whole = (
        f"all {profile.num_kernels:,} {terms(profile)[0]}s of {of_what}, "
        f"{rounded(profile.kernel_s * 1e3)} ms"
    )
    yield f"Check: {named} = {whole}."
    yield from profile.notes


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
    for name, chosen in _phases_of(profile).items():
        found = [own for own in profile.communication if own.phase in chosen]
        kinds = [kind for kind in (*Collective, None) if kind in {own.collective for own in found}]
        kinds = kinds if len(kinds) > 2 else kinds[:1]  # of a single kind, all are that kind
        walls_s = sum(sum(phase.wall_s) for phase in profile.phases if phase.phase in chosen)
        for kind in kinds:
            own = [times for times in found if times.collective is kind]
            total, exposed = (
                mean_std_ms([getattr(row, field) for row in own])
                for field in ("total_s", "exposed_s")
            )
            yield {
                "phase": name,
                "collective": kind or ALL_KINDS,
                "collectives_per_step": sum(sum(times.launches) for times in own) / steps,
                "collective_mean_ms": total[0],
                "collective_std_ms": total[1],
                "overlapped_mean_ms": total[0] - exposed[0],
                "exposed_mean_ms": exposed[0],
                "exposed_std_ms": exposed[1],
                "exposed_share": ratio(exposed[0] * steps / 1e3, walls_s),
            }


OF_CONFIGURATION = ("collective_mean_ms", "exposed_mean_ms", "exposed_share")
"""What `by_configuration` says of each; the share is that of the profiled step's wall time."""


def by_configuration(entries: Iterable[Explained]) -> dict[Subject, Row]:
    """For each configuration on several ranks, the values OF_CONFIGURATION of its profiled runs.

    Times are means over the steps, the ranks and the runs. Both are those of the profiled step,
    which is slower.
    """
    found: dict[Subject, list[Row]] = {}
    for entry in entries:
        if entry.subject is not None and entry.profile.communication:
            found.setdefault(entry.subject.unprofiled.configuration, []).append(
                _of_run(entry.profile)
            )
    return {
        config: {key: statistics.fmean(own[key] for own in rows) for key in OF_CONFIGURATION}
        for config, rows in found.items()
    }


def _of_run(profile: step_profile.StepProfile) -> Row:
    """The means over the ranks on which collectives ran."""
    rows = [
        row
        for row in map(_sums, profile.ranks or (profile,))
        if row["collective_mean_ms"] is not None
    ]
    for row in rows:
        row["exposed_share"] = (
            ratio(row["exposed_mean_ms"], row[f"{WHOLE_STEP}_wall_mean_ms"]) or 0.0
        )
    return {key: statistics.fmean([row[key] for row in rows] or [0.0]) for key in OF_CONFIGURATION}


def ranks(entries: Sequence[Explained]) -> Section:
    """The phases of a step, its collectives and their waits on each rank, beside each other."""
    rows = rows_of(entries, rank_rows)
    shown = [
        name
        for name in (*LaunchPhase, WHOLE_STEP)
        if any(row[f"{name}_wall_mean_ms"] for row in rows)
    ]
    columns = [
        column("rank"),
        *(
            Column(
                name,
                "ms",
                f"Wall time of {name} on the device.",
                key=f"{name}_wall_mean_ms",
                write=rounded,
                std=f"{name}_wall_std_ms",
            )
            for name in shown
            if name not in (LaunchPhase.DATA, LaunchPhase.UNATTRIBUTED)
        ),
        *(column(f"{name}_mean_ms", std=f"{name}_std_ms") for name in _RANK_TIMES),
    ]
    keys = [
        "rank",
        *(f"{name}_wall_{value}_ms" for name in shown for value in ("mean", "std")),
        *(f"{name}_{value}_ms" for name in _RANK_TIMES for value in ("mean", "std")),
    ]
    return over_configurations(
        "ranks", "Ranks", rows, columns, keys, ["Wall times on each rank's device."]
    )


def rank_rows(entry: Explained) -> Iterator[Row]:
    """A row for each rank; none for a run on one."""
    for own in entry.profile.ranks:
        waited = (None, None) if own.waited_s is None else mean_std_ms([own.waited_s])
        yield {
            "rank": own.rank,
            **_sums(own),
            "waited_mean_ms": waited[0],
            "waited_std_ms": waited[1],
        }


def _sums(own: step_profile.RankTimes | step_profile.StepProfile) -> Row:
    """Wall times of the phases and the step, and times of all collectives, with their deviations
    over the steps.
    """
    kept = [times for times in own.communication if times.collective is None]
    parts = {
        f"{name}_wall": [phase.wall_s for phase in own.phases if phase.phase in chosen]
        for name, chosen in (dict.fromkeys(LaunchPhase, ()) | _phases_of(own)).items()
    }
    parts |= {
        "collective": [times.total_s for times in kept],
        "exposed": [times.exposed_s for times in kept],
    }
    row: Row = {}
    for name, times in parts.items():
        row[f"{name}_mean_ms"], row[f"{name}_std_ms"] = (
            mean_std_ms(times) if times else (None, None)
        )
    return row


def copies(entries: Sequence[Explained]) -> Section:
    """Copies and fills by kind, their time, and what of it passes without a kernel."""
    columns = [
        Column("kind", "", key="kind", numeric=False, write=str, about="Direction and memory."),
        column("copies_per_step", name="times"),
        Column(
            "time",
            "ms",
            key="copy_mean_ms",
            write=rounded,
            about="Durations of these copies, added up.",
        ),
        Column(
            "alone",
            "ms",
            key="alone_mean_ms",
            write=rounded,
            about="Time without a kernel beside it.",
        ),
        Column(
            "of step", "%", key="alone_share", write=in_percent, about="Share of that in the step."
        ),
    ]
    keys = ("kind", "copies_per_step", "copy_mean_ms", "alone_mean_ms", "alone_share")
    notes = ["Alone: no kernel runs meanwhile; % of the step's wall time."]
    return over_configurations(
        "copies", "Copies and fills", rows_of(entries, copy_rows), columns, keys, notes
    )


def copy_rows(entry: Explained) -> Iterator[Row]:
    """A row for each kind; for all together too if there are several."""
    steps = entry.profile.num_steps
    for times in entry.profile.copies[: None if len(entry.profile.copies) > 2 else 1]:
        yield {
            "kind": times.kind or ALL_KINDS,
            "copies_per_step": times.count / steps,
            "copy_mean_ms": times.total_s / steps * 1e3,
            "alone_mean_ms": times.alone_s / steps * 1e3,
            "alone_share": ratio(times.alone_s, wall_s(entry.profile)),
        }


def classes(entries: Sequence[Explained]) -> Section:
    """Share of each class in the time of each phase and of the step."""
    rows = rows_of(entries, class_rows)
    # a column for convolutions only where there are some
    keys_of = {
        kind: key
        for kind, key in CLASS_KEYS.items()
        if kind is not KernelClass.CONVOLUTION or any(row[f"{key}_per_step"] for row in rows)
    }
    columns = [column("phase")]
    for rank, (kind, key) in enumerate(keys_of.items()):
        columns.append(
            Column(
                kind,
                "%",
                key=f"{key}_share",
                drop_order=rank,
                write=_share,
                about=f"Share of {kind}.",
            )
        )
    keys = ["phase", *(f"{key}_{value}" for value in _CLASS_VALUES for key in keys_of.values())]
    item, time = terms(entries[0].profile)
    notes = [f"Shares of the {time}."]
    return over_configurations("classes", f"Classes of {item}s", rows, columns, keys, notes)


def _share(part: float) -> str:
    return in_percent(part) if part else ""


def class_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase with kernels, then one for the whole step."""
    for name, chosen in _phases_of(entry.profile).items():
        sums = grouped(
            (row for row in entry.profile.classes if row.phase in chosen), lambda row: row.kind
        )
        whole_s = sum(part.total_s for part in sums.values())
        row: Row = {"phase": name}
        for kind, key in CLASS_KEYS.items():
            part = sums.get(kind, Sum())
            row[f"{key}_share"] = ratio(part.total_s, whole_s)
            row[f"{key}_ms_per_step"] = part.total_s / entry.profile.num_steps * 1e3
            row[f"{key}_per_step"] = part.count / entry.profile.num_steps
        if whole_s:
            yield row


def attention(entries: Sequence[Explained]) -> Section:
    """Scores, softmax and values, and the softmax against the matrix products; as CSV with
    counts and FLOPs of each.
    """
    rows = rows_of(entries, attention_part_rows)
    sums = ("products_ms_per_step", "whole_ms_per_step", "share_of_phase")
    ratios = ("time_ratio", "flops_ratio", "time_per_flop_ratio")
    shown = (
        "phase",
        *(f"{part}_ms_per_step" for part in step_profile.AttentionPart),
        *sums,
        *ratios,
    )
    parts = (f"{part}_{value}" for part in step_profile.AttentionPart for value in _PART_VALUES)
    notes = ["Ratios are softmax over matrix products; scaling and masking are in neither."]
    if not all(row["flops_ratio"] for row in rows):
        notes.append("FLOPs are not known without the record of the run.")
    csv = tuple(dict.fromkeys(("phase", "softmax_ms_per_step", *sums, *ratios, *parts)))
    return over_configurations(
        "attention", "Inside attention", rows, [*map(column, shown)], csv, notes
    )


def attention_part_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase in which the parts of attention are known; ratios are softmax over
    products.
    """
    profile, steps = entry.profile, entry.profile.num_steps
    for phase in dict.fromkeys(row.phase for row in profile.attention):
        rows = [row for row in profile.attention if row.phase is phase]
        row: Row = dict.fromkeys(
            f"{part}_{value}" for part in step_profile.AttentionPart for value in _PART_VALUES
        )
        for part in rows:
            flops = (
                (None, None)
                if part.flops is None
                else (part.flops / steps, ratio(part.flops, part.total_s))
            )
            values = (
                part.count / steps,
                part.total_s / steps * 1e3,
                part.product_s / steps * 1e3,
                *flops,
            )
            row |= {
                f"{part.part}_{name}": value
                for name, value in zip(_PART_VALUES, values, strict=True)
            }
        products = [part for part in rows if part.part is not step_profile.AttentionPart.SOFTMAX]
        products_ms = sum(part.product_s for part in products) / steps * 1e3
        known = [part.flops for part in products if part.flops is not None]
        products_flops = sum(known) / steps if len(known) == len(products) else None
        time_ratio = ratio(row["softmax_ms_per_step"] or None, products_ms)
        flops_ratio = ratio(row["softmax_flops_per_step"] or None, products_flops)
        whole_s = added(rows).total_s
        yield row | {
            "phase": phase,
            "products_ms_per_step": products_ms,
            "whole_ms_per_step": whole_s / steps * 1e3,
            "share_of_phase": ratio(whole_s, kernel_s(profile, [phase])),
            "time_ratio": time_ratio,
            "flops_ratio": flops_ratio,
            "time_per_flop_ratio": ratio(time_ratio, flops_ratio),
        }


def top_kernels(entries: Sequence[Explained]) -> Section:
    """The longest kernel of forward, and of the whole step."""
    item, time = terms(entries[0].profile)
    which, name = column("share", drop_order=0), column("short_name", name=item)
    return over_configurations(
        "top_kernels",
        f"The longest {item}",
        rows_of(entries, _top_kernels),
        columns_of("of", which, "total_ms_per_step", "count_per_step", "class", name),
        ("of", "share", "total_ms_per_step", "count_per_step", "class", "name"),
        [f"By {time} per step; share of that of forward, or of the step."],
    )


def _top_kernels(entry: Explained) -> Iterator[Row]:
    profile = entry.profile
    for where, phase in ((LaunchPhase.FORWARD, LaunchPhase.FORWARD), (WHOLE_STEP, None)):
        kernels = [kernel for kernel in profile.kernels if kernel.phase is phase]
        for kernel in kernels[:1]:
            yield {
                "of": where,
                "share": ratio(kernel.total_s, added(kernels).total_s),
                "total_ms_per_step": kernel.total_s / profile.num_steps * 1e3,
                "count_per_step": kernel.count / profile.num_steps,
                "class": kernel.kind,
                "short_name": kernel.short_name,
                "name": kernel.name,
            }


PRINTED: tuple[Callable[[Sequence[Explained]], Section], ...] = (
    phases,
    communication,
    ranks,
    classes,
)
"""The sections that a terminal shows of several traces."""
OF_ONE = (*PRINTED, copies, attention)
SUBJECTS = (*PRINTED, attention, top_kernels)
"""Sections about any number of traces; `details` in files.py has more of the kernels of a single
one.
"""
