"""Tables of phases and kernels, of one `StepProfile` and over the configurations of a sweep.

Times are per step: the sum over the profiled steps, over their number. More are in shares.py and places.py.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import KernelTimes, PhaseTimes, StepProfile, Work
from cs336_systems.config import Phase
from cs336_systems.report.columns import column
from cs336_systems.report.entries import Values, over_configurations, rows_of
from cs336_systems.report.numbers import mean_and_std, percent, rounded, share
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.kernels.facts import top_kernel
from cs336_systems.report.sections.kernels.words import WHOLE_STEP, Terms, terms
from cs336_systems.report.table import Table, make_table

_SUMMED = ("launches", "kernel_s", "busy_s", "wall_s", "host_s", "recomputed_s", "copies", "copy_s")
_PHASE_CSV = (
    "phase", "kernels_per_step", "kernel_mean_ms", "kernel_std_ms", "share", "wall_mean_ms", "wall_std_ms",
    "busy_mean_ms", "busy_share", "host_mean_ms", "host_std_ms", "launch_calls_per_step", "host_per_launch_ms",
    "copies_per_step", "copy_mean_ms", "recomputed_mean_ms",
)  # fmt: skip
_KERNEL_CSV = (
    "phase", "class", "short_name", "share", "total_ms_per_step", "count_per_step", "count", "mean_ms", "median_ms",
    "min_ms", "max_ms", "std_ms", "name",
)  # fmt: skip


def phase_values(profile: StepProfile) -> list[Values]:
    """A row for each phase in order, then their sum, named WHOLE_STEP."""
    chosen: list[Sequence[PhaseTimes]] = [*([phase] for phase in profile.phases), profile.phases]
    total_s = sum(sum(phase.kernel_s) for phase in profile.phases)
    return [_phase(profile, phases, total_s, WHOLE_STEP if phases is profile.phases else None) for phases in chosen]


def _phase(profile: StepProfile, phases: Sequence[PhaseTimes], total_s: float, name: str | None) -> Values:
    """The phases added up step by step; what a device does beside its host is None where there is no device."""
    steps, on_device = profile.num_steps, profile.work is Work.KERNELS
    sums = {field: tuple(map(sum, zip(*(getattr(phase, field) for phase in phases), strict=True))) for field in _SUMMED}
    of = {phase.phase for phase in phases}
    calls = sum(call.count for call in profile.host_calls if call.is_launch and call.phase in of)
    host_s = sum(sums["host_s"])
    return {
        "phase": name or phases[0].phase,
        "kernels_per_step": sum(sums["launches"]) / steps,
        **_mean_and_std("kernel", sums["kernel_s"]),
        "share": share(sum(sums["kernel_s"]), total_s),
        **_mean_and_std("wall", sums["wall_s"]),
        **_mean_and_std("busy", sums["busy_s"], on_device),
        "busy_share": share(sum(sums["busy_s"]), sum(sums["wall_s"])) if on_device else None,
        **_mean_and_std("host", sums["host_s"], on_device),
        "launch_calls_per_step": calls / steps if profile.host_calls else None,
        "host_per_launch_ms": host_s * 1e3 / calls if calls else None,
        "host_per_launch_s": host_s / calls if calls else None,
        "copies_per_step": sum(sums["copies"]) / steps,
        **_mean_and_std("copy", sums["copy_s"]),
        **_mean_and_std("recomputed", sums["recomputed_s"]),
    }


def _mean_and_std(name: str, times_s: Sequence[float], known: bool = True) -> Values:
    """Mean and deviation over the steps in ms; no deviation of one step."""
    std_s = statistics.stdev(times_s) if known and len(times_s) > 1 else None
    return {
        f"{name}_mean_ms": sum(times_s) / len(times_s) * 1e3 if known and times_s else None,
        f"{name}_std_ms": None if std_s is None else std_s * 1e3,
    }


def phases_section(profile: StepProfile) -> Section:
    """Kernels and times of each phase, and the check that no kernel of the file is missing or counted twice."""
    rows, words = phase_values(profile), terms(profile)
    columns = [
        column("phase"),
        column("kernels_per_step", name=words.items, drop_order=3),
        column("kernel_mean_ms", name=words.time, std="kernel_std_ms"),
        column("share"),
        column("wall_mean_ms", std="wall_std_ms", drop_order=2),
    ]
    if profile.work is Work.KERNELS:
        columns += [
            column("busy_share", drop_order=4),
            column("host_mean_ms", std="host_std_ms"),
            column("host_per_launch_s"),
        ]
    columns += [column("copies_per_step")] if rows[-1]["copies_per_step"] else []
    columns += [column("recomputed_mean_ms", std="recomputed_std_ms")] if rows[-1]["recomputed_mean_ms"] else []
    notes = [_times_note(profile), _check(profile, words), *profile.notes]
    table = make_table("Phases of a step", columns, rows, notes)
    return Section(name="phases", tables=(table,), rows=rows, keys=_PHASE_CSV)


def _times_note(profile: StepProfile) -> str:
    words, step = terms(profile), _mean_and_std("step", profile.step_s)
    if profile.work is Work.OPERATORS:
        text = f"{words.time}: of each operator the time that it spent in no other one"
    else:
        text = (
            f"{words.time}: durations of the kernels, added up. Wall: on the device, until the phase's last kernel has "
            "ended. GPU busy: share of the wall time in which a kernel or copy ran. CPU: how long the host was in the "
            "phase, waits included"
        )
    spread = " Mean ± standard deviation over the steps." if profile.num_steps > 1 else ""
    by_clock = mean_and_std(step["step_mean_ms"], step["step_std_ms"]) if step["step_mean_ms"] else "0"
    return f"{text}. The step by the host's clock: {by_clock} ms.{spread}"


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
    whole = f"all {profile.num_kernels:,} {words.items} of the file, {rounded(profile.kernel_s * 1e3)} ms"
    return f"Check: {' + '.join(named)} = {whole}."


def phases_by_configuration(entries: Sequence[Profiled]) -> Section:
    """Kernels and times of each phase, beside the clock of the run without a profiler."""
    words, on_device = terms(entries[0].profile), entries[0].profile.work is Work.KERNELS
    columns = [
        column("phase"),
        column("kernels_per_step", name=words.items),
        column("kernel_mean_ms", name=words.time),
        column("wall_mean_ms"),
        *([column("busy_share")] if on_device else []),
        column("clock_mean_ms"),
        column("wall_over_clock"),
    ]
    csv = ("phase", "kernels_per_step", "kernel_mean_ms", "wall_mean_ms", "busy_share", "host_mean_ms",
           "clock_mean_ms", "wall_over_clock")  # fmt: skip
    return over_configurations(
        "phases", "Phases by configuration", rows_of(entries, _beside_clock), columns, csv,
        ["Wall: by the trace, with the profiler. Clock: the same run without a profiler."],
        shown=lambda row: bool(row["kernels_per_step"]),
    )  # fmt: skip


def _beside_clock(entry: Profiled) -> Iterator[Values]:
    for row in phase_values(entry.profile):
        # the whole step is called alike in both
        clock_s = entry.clock_s(Phase(row["phase"])) if row["phase"] in set(Phase) else None
        clock_ms = None if clock_s is None else clock_s * 1e3
        yield row | {"clock_mean_ms": clock_ms, "wall_over_clock": row["wall_mean_ms"] / clock_ms if clock_ms else None}


def slowdown_by_configuration(entries: Sequence[Profiled]) -> Section:
    """What the profiler costs: the step with it and without."""
    items = terms(entries[0].profile).items
    columns = [
        column("plain_step_mean_ms"),
        column("profiled_step_mean_ms"),
        column("slowdown"),
        column("kernels_per_step", name=f"{items} per step", drop_order=2),
    ]
    profilers = " and ".join(dict.fromkeys(str(entry.config.profiler) for entry in entries))
    return over_configurations(
        "slowdown", "What the profiler costs", rows_of(entries, _slowdown), columns,
        ("plain_step_mean_ms", "profiled_step_mean_ms", "slowdown", "kernels_per_step"),
        [f"Profiler: {profilers}, in a run of its own. Times by the clock, mean over the measured steps."],
    )  # fmt: skip


def _slowdown(entry: Profiled) -> list[Values]:
    measured, plain_s = entry.profiled.measurement(Phase.STEP), entry.clock_s(Phase.STEP)
    profiled_s = None if measured is None else measured.mean_s
    launches = sum(sum(phase.launches) for phase in entry.profile.phases)
    return [
        {
            "plain_step_mean_ms": None if plain_s is None else plain_s * 1e3,
            "profiled_step_mean_ms": None if profiled_s is None else profiled_s * 1e3,
            "slowdown": profiled_s / plain_s if plain_s and profiled_s else None,
            "kernels_per_step": launches / entry.profile.num_steps,
        }
    ]


def kernels_section(profile: StepProfile, top: int) -> Section:
    """The `top` kernels of the whole step and of each phase to read, all of them as CSV."""
    phases: list[LaunchPhase | None] = [None, *(phase.phase for phase in profile.phases)]
    total_s = {phase: sum(kernel.total_s for kernel in profile.kernels if kernel.phase is phase) for phase in phases}
    rows = [_kernel(profile, kernel, total_s) for kernel in profile.kernels]
    tables = tuple(_kernels_table(profile, phase, rows, top) for phase in phases if total_s[phase])
    return Section(name="kernels", tables=tables, rows=rows, keys=_KERNEL_CSV)


def _kernel(profile: StepProfile, kernel: KernelTimes, total_s: Mapping[LaunchPhase | None, float]) -> Values:
    each_s = {
        "mean": kernel.mean_s, "median": kernel.median_s, "min": kernel.min_s, "max": kernel.max_s,
        "std": kernel.stdev_s,
    }  # fmt: skip
    return {
        "phase": kernel.phase or WHOLE_STEP,
        "class": kernel.kind,
        "short_name": kernel.short_name,
        "share": share(kernel.total_s, total_s[kernel.phase]),
        "total_ms_per_step": kernel.total_s / profile.num_steps * 1e3,
        "count_per_step": kernel.count / profile.num_steps,
        "count": kernel.count,
        **{f"{name}_s": value for name, value in each_s.items()},
        **{f"{name}_ms": None if value is None else value * 1e3 for name, value in each_s.items()},
        "name": kernel.name,
    }


def _kernels_table(profile: StepProfile, phase: LaunchPhase | None, kernels: Sequence[Values], top: int) -> Table:
    words, rows = terms(profile), [row for row in kernels if row["phase"] == (phase or WHOLE_STEP)]
    columns = [
        column("share"),
        column("total_ms_per_step", name="total"),
        column("count_per_step", name="count", drop_order=2),
        *map(column, ("mean_s", "median_s", "min_s", "max_s", "std_s")),
        column("class", drop_order=3),
        column("short_name", name=words.item),
    ]
    shown = rows[:top]
    notes = [f"Total and count are per step; the others of single {words.items} in all steps."]
    if len(shown) < len(rows):
        part = percent(*(sum(row["total_ms_per_step"] for row in chosen) for chosen in (shown, rows)))
        notes.append(f"Shown are {len(shown)} of {len(rows)} different {words.items}, {part} % of the time.")
    where = "a whole step" if phase is None else phase
    return make_table(f"{words.items.capitalize()} of {where}, by {words.time}", columns, shown, notes)


def top_kernels_by_configuration(entries: Sequence[Profiled]) -> Section:
    """The longest kernel of forward, and of the whole step."""
    words = terms(entries[0].profile)
    columns = [
        column("of"),
        column("share", drop_order=0),
        column("total_ms_per_step"),
        column("count_per_step"),
        column("class"),
        column("short_name", name=words.item),
    ]
    return over_configurations(
        "top_kernels", f"The longest {words.item} by configuration", rows_of(entries, _top_kernels), columns,
        ("of", "share", "total_ms_per_step", "count_per_step", "class", "name"),
        [f"By {words.time} per step; share of that of forward, or of the step."],
    )  # fmt: skip


def _top_kernels(entry: Profiled) -> Iterator[Values]:
    profile = entry.profile
    every = [phase.phase for phase in profile.phases]
    for where, phases in ((str(LaunchPhase.FORWARD), [LaunchPhase.FORWARD]), (WHOLE_STEP, every)):
        if (kernel := top_kernel(profile, phases)) is None:
            continue
        whole_s = sum(sum(phase.kernel_s) for phase in profile.phases if phase.phase in phases)
        yield {
            "of": where,
            "share": share(kernel.total_s, whole_s),
            "total_ms_per_step": kernel.total_s / profile.num_steps * 1e3,
            "count_per_step": kernel.count / profile.num_steps,
            "class": kernel.kind,
            "short_name": kernel.short_name,
            "name": kernel.name,
        }
