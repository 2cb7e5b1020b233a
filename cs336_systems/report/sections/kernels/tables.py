"""Tables of any number of traces: phases of a step, classes of kernels, inside attention, the longest kernels.

Times and counts are per step: the sum over the profiled steps, over their number. Those of one trace are in details.py.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import AttentionPart, PhaseTimes, StepProfile, Work
from cs336_systems.config import Arch, CompileMode, Phase, RunConfig
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.entries import over_configurations, rows_of
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import (
    NOTICEABLE,
    WHOLE_STEP,
    Sum,
    added,
    grouped,
    kernel_s,
    mean_std_ms,
    num_launches,
    terms,
    top_kernel,
    wall_s,
)
from cs336_systems.report.words import in_percent, label, mean_and_std, ratio, rounded

_PHASE_CSV = (
    "phase", "kernels_per_step", "kernel_mean_ms", "kernel_std_ms", "share", "wall_mean_ms", "wall_std_ms",
    "busy_mean_ms", "busy_share", "host_mean_ms", "host_std_ms", "launch_calls_per_step", "host_per_launch_ms",
    "copies_per_step", "copy_mean_ms", "recomputed_mean_ms", "clock_mean_ms", "wall_over_clock", "profiled_mean_ms",
    "slowdown",
)  # fmt: skip

MAX_OTHERS = 10
"""Most kernels of class `other` that are named below the table of classes."""
PRODUCTS = ("linear", "attention", "unknown")
"""Kinds of matrix products, by what they belong to."""
CLASS_KEYS = {kind: kind.lower().replace(" ", "_").replace("-", "_") for kind in KernelClass}
_PRODUCT_KEYS = (*(f"{kind}{value}" for kind in PRODUCTS for value in ("_per_step", "_ms_per_step")), "linear_expected",
                 "as_expected")  # fmt: skip
_CLASS_VALUES = ("share", "ms_per_step", "per_step")
_PART_VALUES = ("per_step", "ms_per_step", "products_ms_per_step", "flops_per_step", "flops_per_s")


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
        column("slowdown"),
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
    clock_s, profiled_s = (
        entry.clock_s(Phase(name), record) if name in set(Phase) else None for record in (entry.plain, entry.profiled)
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


def _mean_and_std(chosen: Sequence[PhaseTimes], field: str) -> Row:
    """Mean and deviation over the steps in ms of the phases together; no deviation of one step."""
    mean_ms, std_ms = mean_std_ms([getattr(phase, f"{field}_s") for phase in chosen])
    return {f"{field}_mean_ms": mean_ms, f"{field}_std_ms": std_ms}


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
    text += " Clock: without a profiler; slowdown: with it." if any(row["clock_mean_ms"] for row in rows) else ""
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


def classes(entries: Sequence[Explained]) -> Section:
    """Share of each class in the time of each phase and of the step, and matrix products by what they belong to."""
    words, rows = terms(entries[0].profile), rows_of(entries, class_rows)
    columns = [column("phase")]
    for rank, (kind, key) in enumerate(CLASS_KEYS.items()):
        columns.append(Column(kind, "%", key=f"{key}_share", drop_order=rank, write=_share, about=f"Share of {kind}."))
    keys = ["phase", *(f"{key}_{value}" for value in _CLASS_VALUES for key in CLASS_KEYS.values()), *_PRODUCT_KEYS]
    notes = [f"Shares of the {words.time}.", *(_others(entries[0].profile) if len(entries) == 1 else ())]
    found = over_configurations("classes", f"Classes of {words.items}", rows, columns, keys, notes)
    return replace(found, tables=(*found.tables, *_products(rows).tables))


def _share(part: float) -> str:
    return in_percent(part) if part else ""


def class_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase with kernels, then one for the whole step."""
    profile = entry.profile
    chosen = {phase.phase: (phase.phase,) for phase in profile.phases} | {WHOLE_STEP: tuple(LaunchPhase)}
    for name, of in chosen.items():
        sums = grouped((row for row in profile.classes if row.phase in of), lambda row: row.kind)
        whole_s = sum(part.total_s for part in sums.values())
        row: Row = {"phase": name}
        for kind, key in CLASS_KEYS.items():
            part = sums.get(kind, Sum())
            row[f"{key}_share"] = ratio(part.total_s, whole_s)
            row[f"{key}_ms_per_step"] = part.total_s / profile.num_steps * 1e3
            row[f"{key}_per_step"] = part.count / profile.num_steps
        if whole_s:
            yield row | _product_values(entry, name)


def _others(profile: StepProfile) -> Iterator[str]:
    """A note with the names of kernels of class `other`, which no rule matches."""
    rows = [row for row in profile.kernels if row.phase is None and row.kind is KernelClass.OTHER]
    named = {label(row.short_name): row.total_s for row in rows[:MAX_OTHERS]}
    if rest := rows[MAX_OTHERS:]:
        named[f"{len(rest)} more"] = added(rest).total_s
    times = [f"{name} ({rounded(total_s / profile.num_steps * 1e3)} ms)" for name, total_s in named.items()]
    if times:
        yield f"Class other, {terms(profile).items} that no rule knows: {', '.join(times)}."


def expected_linear(config: RunConfig | None, phase: LaunchPhase) -> int | None:
    """Matrix products of linear layers in one pass of this project's eager model; None if that is not known.

    In forward one for each layer: 7 in a block of the course's architecture, 6 in one of GPT-2's, and the head. In
    backward two for each, one for the gradient of each factor.
    """
    if config is None or config.model_factory is not None or config.compile is not CompileMode.NONE:
        return None
    forward = (7 if config.model.arch is Arch.CS336 else 6) * config.model.num_layers + 1
    return {LaunchPhase.FORWARD: forward, LaunchPhase.BACKWARD: 2 * forward}.get(phase)


def _products(rows: Sequence[Row]) -> Section:
    """Matrix products by what they belong to, beside how many of linear layers there should be."""
    columns = [
        column("phase"),
        column("linear_per_step"),
        column("linear_expected"),
        column("as_expected"),
        column("attention_per_step", drop_order=4),
        column("unknown_per_step", drop_order=6),
        column("linear_ms_per_step", drop_order=3),
        column("attention_ms_per_step", drop_order=5),
        column("unknown_ms_per_step", drop_order=7),
    ]
    notes = ["Launches and time per step, without helpers such as the sum over split-K parts."]
    if any(row["linear_expected"] for row in rows):
        notes.append("Expected of an eager model: one for each linear layer in forward, two in backward.")
    if any(row["unknown_per_step"] for row in rows):
        notes.append("Unknown: the file does not tell whether a linear layer's or attention's.")
    return over_configurations(
        "", "Matrix products", rows, columns, (), notes,
        shown=lambda row: any(row[f"{kind}_per_step"] for kind in PRODUCTS),
    )  # fmt: skip


def _product_values(entry: Explained, phase: str) -> Row:
    """Matrix products of a phase; `as_expected` is empty if the expected number or the kind of some is unknown."""
    steps, values = entry.profile.num_steps, dict.fromkeys(_PRODUCT_KEYS)
    for row in entry.profile.products:
        if row.phase == phase:
            expected = expected_linear(entry.config, row.phase)
            is_known = expected is not None and not row.unknown
            values |= {f"{kind}_per_step": getattr(row, kind) / steps for kind in PRODUCTS}
            values |= {f"{kind}_ms_per_step": getattr(row, f"{kind}_s") / steps * 1e3 for kind in PRODUCTS}
            values["linear_expected"] = expected
            values["as_expected"] = ("yes" if row.linear / steps == expected else "no") if is_known else ""
    return values


def attention(entries: Sequence[Explained]) -> Section:
    """Scores, softmax and values, and the softmax against the matrix products; as CSV with counts and FLOPs of each."""
    rows = rows_of(entries, attention_part_rows)
    keys = ("phase", "softmax_ms_per_step", "products_ms_per_step", "whole_ms_per_step", "share_of_phase")
    ratios = ("time_ratio", "flops_ratio", "time_per_flop_ratio")
    shown = ("phase", "scores_ms_per_step", "softmax_ms_per_step", "values_ms_per_step", *keys[2:], *ratios)
    parts = [f"{part}_{value}" for part in AttentionPart for value in _PART_VALUES]
    notes = ["Products: of scores and values, the time of their matrix products.",
             "Ratios are softmax over matrix products; scaling and masking are in neither."]  # fmt: skip
    if not all(row["flops_ratio"] for row in rows):
        notes.append("FLOPs are not known without the record of the run.")
    every = tuple(dict.fromkeys((*keys, *ratios, *parts)))
    return over_configurations("attention", "Inside attention", rows, [*map(column, shown)], every, notes)


def attention_part_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase in which the parts of attention are known; ratios are softmax over products."""
    profile, steps = entry.profile, entry.profile.num_steps
    for phase in dict.fromkeys(row.phase for row in profile.attention):
        rows = [row for row in profile.attention if row.phase is phase]
        row: Row = dict.fromkeys(f"{part}_{value}" for part in AttentionPart for value in _PART_VALUES)
        for part in rows:
            times_ms = (part.total_s / steps * 1e3, part.product_s / steps * 1e3)
            flops = (None, None) if part.flops is None else (part.flops / steps, ratio(part.flops, part.total_s))
            values = (part.count / steps, *times_ms, *flops)
            row |= {f"{part.part}_{name}": value for name, value in zip(_PART_VALUES, values, strict=True)}
        products = [part for part in rows if part.part is not AttentionPart.SOFTMAX]
        products_ms = sum(part.product_s for part in products) / steps * 1e3
        flops_known = all(part.flops is not None for part in rows)
        products_flops = sum(part.flops or 0 for part in products) / steps if flops_known else None
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
