"""Tables of one `StepProfile`: its phases and its kernels. More are in kernel_shares.py and kernel_places.py.

Times are per step: the sum over the profiled steps, over their number.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import KernelTimes, PhaseTimes, StepProfile, Work
from cs336_systems.report.columns import Column
from cs336_systems.report.kernels.terms import WHOLE_STEP, Terms, count_per_step, microseconds, milliseconds, terms
from cs336_systems.report.listing import Listing, csv_of, label, percent, share
from cs336_systems.report.numbers import mean_and_std
from cs336_systems.report.table import Table, make_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """A phase or all of them, by name; the values are those of `PhaseTimes`, one for each step."""

    name: str
    launches: tuple[int, ...]
    kernel_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    wall_s: tuple[float, ...]
    host_s: tuple[float, ...]
    recomputed_s: tuple[float, ...]
    copies: tuple[int, ...]
    copy_s: tuple[float, ...]
    launch_calls: int | None
    """Calls of the host that launch something, over all steps; None where the file has no such calls."""

    @property
    def host_per_launch_s(self) -> float | None:
        """How long the host was in the phase, for each launch that it made; None for no launch."""
        return sum(self.host_s) / self.launch_calls if self.launch_calls else None


_SUMMED = ("launches", "kernel_s", "busy_s", "wall_s", "host_s", "recomputed_s", "copies", "copy_s")


def phase_rows(profile: StepProfile) -> list[PhaseRow]:
    """A row for each phase in order, then their sum, named WHOLE_STEP."""
    rows = [_phase_row(profile, phase, [phase.phase], [phase]) for phase in profile.phases]
    return [*rows, _phase_row(profile, None, [phase.phase for phase in profile.phases], profile.phases)]


def _phase_row(
    profile: StepProfile, phase: PhaseTimes | None, of: Iterable[LaunchPhase], times: Iterable[PhaseTimes]
) -> PhaseRow:
    chosen, kept = set(of), tuple(times)
    calls = sum(call.count for call in profile.host_calls if call.is_launch and call.phase in chosen)
    sums = {name: tuple(map(sum, zip(*(getattr(row, name) for row in kept), strict=True))) for name in _SUMMED}
    return PhaseRow(
        name=WHOLE_STEP if phase is None else phase.phase, launch_calls=calls if profile.host_calls else None, **sums
    )


def phases_listing(profile: StepProfile) -> Listing:
    """Kernels and times of each phase, and the check that no kernel of the file is missing or counted twice."""
    rows, words = phase_rows(profile), terms(profile)
    total_s = sum(rows[-1].kernel_s)
    columns: list[Column[PhaseRow]] = [
        Column("phase", numeric=False, says=attrgetter("name")),
        Column(words.items, spare=3, says=lambda row: _count(row.launches)),
        Column(words.time, "ms", says=lambda row: _times(row.kernel_s)),
        Column("share", "%", spare=1, says=lambda row: percent(sum(row.kernel_s), total_s)),
        Column("wall", "ms", spare=2, says=lambda row: _times(row.wall_s)),
        *(_device_columns() if profile.work is Work.KERNELS else ()),
        *_optional_columns(rows[-1]),
    ]
    notes = [_times_note(profile), _check(profile, words), *profile.notes]
    table = make_table("Phases of a step", columns, rows, notes)
    return Listing(name="phases", tables=(table,), csv=csv_of(_phase_csv(profile, total_s), rows))


def _device_columns() -> list[Column[PhaseRow]]:
    return [
        Column("GPU busy", "%", spare=4, says=lambda row: percent(sum(row.busy_s), sum(row.wall_s))),
        Column("CPU", "ms", spare=5, says=lambda row: _times(row.host_s)),
        Column("CPU per launch", "µs", spare=6, says=lambda row: microseconds(row.host_per_launch_s)),
    ]


def _optional_columns(whole: PhaseRow) -> list[Column[PhaseRow]]:
    """Columns of what few steps have."""
    copies: Column[PhaseRow] = Column("copies", spare=8, says=lambda row: _count(row.copies))
    recomputed: Column[PhaseRow] = Column("recomputed", "ms", spare=7, says=lambda row: _times(row.recomputed_s))
    return [*([copies] if any(whole.copies) else []), *([recomputed] if any(whole.recomputed_s) else [])]


def _count(counts: tuple[int, ...]) -> str:
    return f"{counts[0]:,}" if len(set(counts)) == 1 else f"{statistics.mean(counts):,.2f}" if counts else ""


def _stdev(times_s: tuple[float, ...]) -> float | None:
    return statistics.stdev(times_s) if len(times_s) > 1 else None


def _times(times_s: tuple[float, ...]) -> str:
    """Mean and deviation over the steps; a phase that takes no time has no deviation to speak of."""
    if not any(times_s):
        return "0"
    deviation_s = _stdev(times_s)
    return mean_and_std(statistics.mean(times_s) * 1e3, None if deviation_s is None else deviation_s * 1e3)


def _times_note(profile: StepProfile) -> str:
    words = terms(profile)
    if profile.work is Work.OPERATORS:
        text = f"{words.time}: of each operator the time that it spent in no other one"
    else:
        text = (
            f"{words.time}: durations of the kernels, added up. Wall: on the device, until the phase's last kernel has "
            "ended. GPU busy: share of the wall time in which a kernel or copy ran. CPU: how long the host was in the "
            "phase, waits included"
        )
    spread = " Mean ± standard deviation over the steps." if profile.num_steps > 1 else ""
    return f"{text}. The step by the host's clock: {_times(profile.step_s)} ms.{spread}"


def _check(profile: StepProfile, words: Terms) -> str:
    """The sum over phases and what is left, which is the whole file: reading and explaining see to that."""
    left = profile.left
    parts = {phase.phase: sum(phase.launches) for phase in profile.phases}
    unattributed = parts.pop(LaunchPhase.UNATTRIBUTED, 0)
    kept = {"unattributed": unattributed, "warm-up": left.warmup, "outside of steps": left.outside}
    if profile.work is Work.KERNELS:
        kept["without a launch"] = left.no_launch
    named = [f"{name} {count:,}" for name, count in parts.items() if count]
    named += [f"{name} {count:,}" for name, count in kept.items()]
    whole = f"all {profile.num_kernels:,} {words.items} of the file, {milliseconds(profile.kernel_s)} ms"
    return f"Check: {' + '.join(named)} = {whole}."


def _phase_csv(profile: StepProfile, total_s: float) -> dict[str, Callable[[PhaseRow], object]]:
    on_device = profile.work is Work.KERNELS

    def mean_ms(name: str, known: bool = True) -> Callable[[PhaseRow], object]:
        return lambda row: statistics.mean(getattr(row, name)) * 1e3 if known and getattr(row, name) else None

    def std_ms(name: str, known: bool = True) -> Callable[[PhaseRow], object]:
        return lambda row: None if not known or (std_s := _stdev(getattr(row, name))) is None else std_s * 1e3

    calls: Callable[[PhaseRow], int | None] = attrgetter("launch_calls")
    return {
        "phase": attrgetter("name"),
        "kernels_per_step": lambda row: sum(row.launches) / profile.num_steps,
        "kernel_mean_ms": mean_ms("kernel_s"),
        "kernel_std_ms": std_ms("kernel_s"),
        "share": lambda row: share(sum(row.kernel_s), total_s),
        "wall_mean_ms": mean_ms("wall_s"),
        "wall_std_ms": std_ms("wall_s"),
        "busy_mean_ms": mean_ms("busy_s", on_device),
        "busy_share": lambda row: share(sum(row.busy_s), sum(row.wall_s)) if on_device else None,
        "host_mean_ms": mean_ms("host_s", on_device),
        "host_std_ms": std_ms("host_s", on_device),
        "launch_calls_per_step": lambda row: None if (count := calls(row)) is None else count / profile.num_steps,
        "host_per_launch_ms": lambda row: None if (time_s := row.host_per_launch_s) is None else time_s * 1e3,
        "copies_per_step": lambda row: sum(row.copies) / profile.num_steps,
        "copy_mean_ms": mean_ms("copy_s"),
        "recomputed_mean_ms": mean_ms("recomputed_s"),
    }


def kernels_listing(profile: StepProfile, top: int) -> Listing:
    """The `top` kernels of the whole step and of each phase to read, all of them as CSV."""
    phases: list[LaunchPhase | None] = [None, *(phase.phase for phase in profile.phases)]
    total_s = {phase: sum(kernel.total_s for kernel in profile.kernels if kernel.phase is phase) for phase in phases}
    tables = [_kernels_table(profile, phase, top) for phase in phases if total_s[phase]]
    steps = profile.num_steps
    columns: dict[str, Callable[[KernelTimes], object]] = {
        "phase": lambda row: row.phase or WHOLE_STEP,
        "class": attrgetter("kind"),
        "short_name": attrgetter("short_name"),
        "share": lambda row: share(row.total_s, total_s[row.phase]),
        "total_ms_per_step": lambda row: row.total_s * 1e3 / steps,
        "count_per_step": lambda row: row.count / steps,
        "count": attrgetter("count"),
        "mean_ms": lambda row: row.mean_s * 1e3,
        "median_ms": lambda row: row.median_s * 1e3,
        "min_ms": lambda row: row.min_s * 1e3,
        "max_ms": lambda row: row.max_s * 1e3,
        "std_ms": lambda row: None if row.stdev_s is None else row.stdev_s * 1e3,
        "name": attrgetter("name"),
    }
    return Listing(name="kernels", tables=tuple(tables), csv=csv_of(columns, profile.kernels))


def _kernels_table(profile: StepProfile, phase: LaunchPhase | None, top: int) -> Table:
    words = terms(profile)
    rows = [kernel for kernel in profile.kernels if kernel.phase is phase]
    total_s = sum(row.total_s for row in rows)
    columns: list[Column[KernelTimes]] = [
        Column("share", "%", spare=1, says=lambda row: percent(row.total_s, total_s)),
        Column("total", "ms", says=lambda row: milliseconds(row.total_s / profile.num_steps)),
        Column("count", spare=2, says=lambda row: count_per_step(row.count, profile.num_steps)),
        *(
            Column(name, "µs", spare=spare, says=_microseconds_of(field))
            for name, field, spare in (("mean", "mean_s", 4), ("median", "median_s", 6), ("min", "min_s", 8),
                                       ("max", "max_s", 7), ("std", "stdev_s", 5))
        ),
        Column("class", numeric=False, spare=3, says=attrgetter("kind")),
        Column(words.item, numeric=False, says=lambda row: label(row.short_name)),
    ]  # fmt: skip
    where = "a whole step" if phase is None else phase
    shown = rows[:top]
    notes = [f"Total and count are per step; the others of single {words.items} in all steps."]
    if len(shown) < len(rows):
        part = percent(sum(row.total_s for row in shown), total_s)
        notes.append(f"Shown are {len(shown)} of {len(rows)} different {words.items}, {part} % of the time.")
    return make_table(f"{words.items.capitalize()} of {where}, by {words.time}", columns, shown, notes)


def _microseconds_of(field: str) -> Callable[[KernelTimes], str]:
    return lambda row: microseconds(getattr(row, field))
