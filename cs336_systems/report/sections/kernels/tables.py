"""Tables of the phases of a step, of its longest kernels, and of what the profiler costs.

Times and counts are per step: the sum over the profiled steps, over their number. More are in shares.py and details.py.
"""

import statistics
from collections.abc import Iterator, Sequence

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import PhaseTimes, StepProfile, Work
from cs336_systems.config import Phase
from cs336_systems.report.columns import Row, column
from cs336_systems.report.entries import over_configurations, rows_of
from cs336_systems.report.numbers import mean_and_std, ratio, rounded
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import NOTICEABLE, kernel_s, num_launches, top_kernel, wall_s
from cs336_systems.report.sections.kernels.words import WHOLE_STEP, terms

_PHASE_CSV = (
    "phase", "kernels_per_step", "kernel_mean_ms", "kernel_std_ms", "share", "wall_mean_ms", "wall_std_ms",
    "busy_mean_ms", "busy_share", "host_mean_ms", "host_std_ms", "launch_calls_per_step", "host_per_launch_ms",
    "copies_per_step", "copy_mean_ms", "recomputed_mean_ms", "clock_mean_ms", "wall_over_clock",
)  # fmt: skip


def phases(entries: Sequence[Explained]) -> Section:
    """Kernels and times of each phase, beside the clock of the run without a profiler."""
    rows, words, is_single = rows_of(entries, phase_rows), terms(entries[0].profile), len(entries) == 1
    columns = [
        column("phase"),
        column("kernels_per_step", name=words.items, drop_order=6),
        column("kernel_mean_ms", name=words.time, std="kernel_std_ms"),
        *([column("share", drop_order=7)] if is_single else []),
        column("wall_mean_ms", std="wall_std_ms"),
        column("busy_share"),
        *([column("host_mean_ms", std="host_std_ms", drop_order=8), column("host_per_launch_s", drop_order=9),
           column("copies_per_step", drop_order=10)] if is_single else []),
        column("recomputed_mean_ms", std="recomputed_std_ms"),
        column("clock_mean_ms"),
        column("wall_over_clock"),
    ]  # fmt: skip
    notes = [_meanings(entries, rows), *(_of_one_trace(entries[0].profile) if is_single else ())]
    return over_configurations(
        "phases", "Phases of a step", rows, columns, _PHASE_CSV, notes,
        shown=is_shown,
    )  # fmt: skip


def phase_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase in order, then their sum, named WHOLE_STEP."""
    profile = entry.profile
    for phase in profile.phases:
        yield _phase(entry, [phase], phase.phase)
    yield _phase(entry, profile.phases, WHOLE_STEP)


def is_shown(row: Row) -> bool:
    """Whether anything ran in the phase, or it took a noticeable part of the step."""
    ran = row["kernels_per_step"] or row["copies_per_step"]
    return bool(ran or row["wall_mean_ms"] >= NOTICEABLE * row["step_ms"])


def _phase(entry: Explained, chosen: Sequence[PhaseTimes], name: str) -> Row:
    """The row of these phases together; what a device does beside its host is None for a trace of a CPU."""
    profile, steps, on_device = entry.profile, entry.profile.num_steps, entry.profile.work is Work.KERNELS
    calls = sum(
        call.count for call in profile.host_calls if call.is_launch and call.phase in [phase.phase for phase in chosen]
    )
    wall, busy, host = (_mean_and_std(chosen, field) for field in ("wall", "busy", "host"))
    # the whole step is called alike in both
    clock_s = entry.clock_s(Phase(name)) if name in set(Phase) else None
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
        "step_ms": wall_s(profile) / steps * 1e3,
    }


def _mean_and_std(chosen: Sequence[PhaseTimes], field: str) -> Row:
    """Mean and deviation over the steps in ms of the phases together; no deviation of one step."""
    times_s = [sum(times) for times in zip(*(getattr(phase, f"{field}_s") for phase in chosen), strict=True)]
    return {
        f"{field}_mean_ms": sum(times_s) / max(len(times_s), 1) * 1e3,
        f"{field}_std_ms": statistics.stdev(times_s) * 1e3 if len(times_s) > 1 else None,
    }


def _meanings(entries: Sequence[Explained], rows: Sequence[Row]) -> str:
    profile = entries[0].profile
    words = terms(profile)
    if profile.work is Work.OPERATORS:
        text = f"{words.time}: of each operator the time that it spent in no other one."
    else:
        text = (
            f"{words.time}: durations of the kernels, added up. Wall: on the device, until the phase's last kernel has "
            "ended. GPU busy: share of the wall time in which a kernel or copy ran."
        )
    if len(entries) == 1 and words.item == "kernel":
        text += " CPU: how long the host was in the phase, waits included."
    text += " Clock: the same run without a profiler." if any(row["clock_mean_ms"] for row in rows) else ""
    return f"{text} Mean ± standard deviation over the steps." if profile.num_steps > 1 else text


def _of_one_trace(profile: StepProfile) -> Iterator[str]:
    """The host's clock, and the proof that phases and what is left are the whole file (reading checks it)."""
    step_ms = [time_s * 1e3 for time_s in profile.step_s]
    std_ms = statistics.stdev(step_ms) if len(step_ms) > 1 else None
    mean_ms = sum(step_ms) / len(step_ms)
    yield f"The step by the host's clock: {mean_and_std(mean_ms, std_ms) if mean_ms else '0'} ms."
    counts = {phase.phase: num_launches(phase) for phase in profile.phases}
    unattributed = counts.pop(LaunchPhase.UNATTRIBUTED, 0)
    kept = {"unattributed": unattributed, "warm-up": profile.left.warmup, "outside of steps": profile.left.outside}
    if profile.work is Work.KERNELS:
        kept["without a launch"] = profile.left.no_launch
    parts = [(name, count) for name, count in counts.items() if count] + [*kept.items()]
    named = " + ".join(f"{name} {count:,}" for name, count in parts)
    whole = f"all {profile.num_kernels:,} {terms(profile).items} of the file, {rounded(profile.kernel_s * 1e3)} ms"
    yield f"Check: {named} = {whole}."
    yield from profile.notes


def slowdown(entries: Sequence[Explained]) -> Section:
    """The step with and without the profiler; nothing for a file without a record."""
    items = terms(entries[0].profile).items
    columns = [
        column("plain_step_mean_ms"),
        column("profiled_step_mean_ms"),
        column("slowdown"),
        column("kernels_per_step", name=f"{items} per step", drop_order=2),
    ]
    profilers = " and ".join(dict.fromkeys(str(entry.config.profiler) for entry in entries if entry.config))
    return over_configurations(
        "slowdown", "What the profiler costs", rows_of(entries, _slowdown), columns,
        ("plain_step_mean_ms", "profiled_step_mean_ms", "slowdown", "kernels_per_step"),
        [f"Profiler: {profilers}, in a run of its own. Times by the clock, mean over the measured steps."],
    )  # fmt: skip


def _slowdown(entry: Explained) -> Iterator[Row]:
    if entry.profiled is None:
        return
    measured, plain_s = entry.profiled.measurement(Phase.STEP), entry.clock_s(Phase.STEP)
    profiled_s = None if measured is None else measured.mean_s
    yield {
        "plain_step_mean_ms": None if plain_s is None else plain_s * 1e3,
        "profiled_step_mean_ms": None if profiled_s is None else profiled_s * 1e3,
        "slowdown": profiled_s / plain_s if plain_s and profiled_s else None,
        "kernels_per_step": num_launches(*entry.profile.phases) / entry.profile.num_steps,
    }


def top_kernels(entries: Sequence[Explained]) -> Section:
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
        "top_kernels", f"The longest {words.item}", rows_of(entries, _top_kernels), columns,
        ("of", "share", "total_ms_per_step", "count_per_step", "class", "name"),
        [f"By {words.time} per step; share of that of forward, or of the step."],
    )  # fmt: skip


def _top_kernels(entry: Explained) -> Iterator[Row]:
    profile = entry.profile
    for where, chosen in ((LaunchPhase.FORWARD, [LaunchPhase.FORWARD]), (WHOLE_STEP, [*LaunchPhase])):
        if kernel := top_kernel(profile, chosen):
            yield {
                "of": where,
                "share": ratio(kernel.total_s, kernel_s(profile, chosen)),
                "total_ms_per_step": kernel.total_s / profile.num_steps * 1e3,
                "count_per_step": kernel.count / profile.num_steps,
                "class": kernel.kind,
                "short_name": kernel.short_name,
                "name": kernel.name,
            }
