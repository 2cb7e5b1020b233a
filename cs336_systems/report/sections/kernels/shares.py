"""Tables of what the time went to: classes of kernels, matrix products, attention; of one `StepProfile` and over many.

Times and counts are per step.
"""

from collections.abc import Iterator, Sequence

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import AttentionPart, AttentionTimes, StepProfile
from cs336_systems.config import Arch, CompileMode, RunConfig
from cs336_systems.report.columns import Column, column
from cs336_systems.report.entries import Values, over_configurations, rows_of
from cs336_systems.report.numbers import in_percent, label, rounded, share, significant
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.kernels.facts import class_shares, softmax_cost
from cs336_systems.report.sections.kernels.words import WHOLE_STEP, terms
from cs336_systems.report.table import Table, make_table

MAX_OTHERS = 10
"""Kernels of class `other` to name below the table of classes."""
PRODUCTS = ("linear", "attention", "unknown")
"""What a matrix product belongs to."""
_PRODUCT_CSV = ("phase", *(f"{kind}{value}" for kind in PRODUCTS for value in ("_per_step", "_ms_per_step")))


def classes_section(profile: StepProfile) -> Section:
    """A row for each class, the longest first, and their sum; columns for each phase with kernels."""
    words, phases = terms(profile), [phase.phase for phase in profile.phases if any(phase.launches)]
    where: list[LaunchPhase | None] = [*phases, None]
    sums = {(kind, phase): _class(profile, kind, phase) for kind in (*KernelClass, None) for phase in where}
    kinds = sorted({row.kind for row in profile.classes}, key=lambda kind: -sums[kind, None]["total_ms_per_step"])
    rows = [
        {"class": kind or "sum", "count_per_step": sums[kind, None]["count_per_step"]}
        | {f"{phase or WHOLE_STEP} {key}": sums[kind, phase][key] if sums[kind, phase]["count_per_step"] else None
           for phase in where for key in ("total_ms_per_step", "share")}
        for kind in (*kinds, None)
    ]  # fmt: skip
    columns: list[Column[Values]] = [column("class")]
    for phase in where:
        name, drop_orders = phase or WHOLE_STEP, (0, 0) if phase is None else (1, 2)
        columns.append(Column(name, "ms", key=f"{name} total_ms_per_step", drop_order=drop_orders[0], write=rounded))
        columns.append(Column("", "%", key=f"{name} share", drop_order=drop_orders[1], write=in_percent))
    columns.append(column("count_per_step", name=words.items, drop_order=3))
    notes = [f"{words.time} per step; % of the phase, and of the step.", *_others(profile)]
    found = [sums[kind, phase] for kind in (*kinds, None) for phase in where if sums[kind, phase]["count_per_step"]]
    table = make_table(f"Classes of {words.items}", columns, rows, notes)
    return Section(name="classes", tables=(table,), rows=found)


def _class(profile: StepProfile, kind: KernelClass | None, phase: LaunchPhase | None) -> Values:
    """Kernels of one class, or of all (None), in one phase or (None) in the whole step."""
    of_phase = [row for row in profile.classes if phase in (None, row.phase)]
    rows = [row for row in of_phase if kind in (None, row.kind)]
    total_s = sum(row.total_s for row in rows)
    return {
        "class": kind or "sum",
        "phase": phase or WHOLE_STEP,
        "count_per_step": sum(row.count for row in rows) / profile.num_steps,
        "total_ms_per_step": total_s / profile.num_steps * 1e3,
        "share": share(total_s, sum(row.total_s for row in of_phase)),
    }


def _others(profile: StepProfile) -> Iterator[str]:
    """The kernels that no rule knows, by name."""
    words = terms(profile)
    rows = [row for row in profile.kernels if row.phase is None and row.kind is KernelClass.OTHER]
    if not rows:
        return
    times = [
        f"{label(row.short_name)} ({rounded(row.total_s / profile.num_steps * 1e3)} ms)" for row in rows[:MAX_OTHERS]
    ]
    if len(rows) > MAX_OTHERS:
        rest_s = sum(row.total_s for row in rows[MAX_OTHERS:]) / profile.num_steps
        times.append(f"{len(rows) - MAX_OTHERS} more ({rounded(rest_s * 1e3)} ms)")
    yield f"Class other, {words.items} that no rule knows: {', '.join(times)}."


def classes_by_configuration(entries: Sequence[Profiled]) -> Section:
    """Share of each class in forward, backward, the optimizer and the step; to read, of those that there are."""
    rows, words = rows_of(entries, _class_rows), terms(entries[0].profile)
    keys = {kind: f"{kind.lower().replace(' ', '_').replace('-', '_')}_share" for kind in KernelClass}
    kinds = [kind for kind in KernelClass if any(row[kind] is not None for row in rows)]
    columns: list[Column[Values]] = [
        column("phase"),
        *(Column(kind, "%", key=kind, drop_order=rank, write=in_percent) for rank, kind in enumerate(kinds)),
    ]
    for row in rows:
        row.update({key: row[kind] or 0.0 for kind, key in keys.items()})
    title, csv = f"Classes of {words.items} by configuration", ("phase", *keys.values())
    return over_configurations("classes", title, rows, columns, csv, [f"Shares of the {words.time}."])


def _class_rows(entry: Profiled) -> Iterator[Values]:
    phases = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER)
    chosen: dict[str, list[LaunchPhase] | None] = {str(phase): [phase] for phase in phases} | {WHOLE_STEP: None}
    for name, of in chosen.items():
        if shares := class_shares(entry.profile, of):
            yield {"phase": name, **{kind: shares.get(kind) for kind in KernelClass}}


def expected_linear(config: RunConfig, phase: LaunchPhase) -> int | None:
    """Matrix products of linear layers in one pass of this project's eager model; None where that is not known.

    In forward one for each layer: 7 in a block of the course's architecture, 6 in one of GPT-2's, and the head. In
    backward two for each, one for the gradient of each factor.
    """
    if config.model_factory is not None or config.compile is not CompileMode.NONE:
        return None
    forward = (7 if config.model.arch is Arch.CS336 else 6) * config.model.num_layers + 1
    return {LaunchPhase.FORWARD: forward, LaunchPhase.BACKWARD: 2 * forward}.get(phase)


def _product_rows(profile: StepProfile) -> list[Values]:
    steps = profile.num_steps
    return [
        {"phase": row.phase}
        | {f"{kind}_per_step": getattr(row, kind) / steps for kind in PRODUCTS}
        | {f"{kind}_ms_per_step": getattr(row, f"{kind}_s") / steps * 1e3 for kind in PRODUCTS}
        for row in profile.products
    ]


def products_section(profile: StepProfile) -> Section:
    """Matrix products by what they belong to; to read, without kinds that there are none of."""
    rows = _product_rows(profile)
    found = [kind for kind in PRODUCTS if any(row[f"{kind}_per_step"] for row in rows)]
    keys = ["phase", *(f"{kind}{value}" for kind in found for value in ("_per_step", "_ms_per_step"))]
    notes = ["Count and time per step, without helpers such as the sum over split-K parts."]
    if "unknown" in found:
        notes.append("Unknown: the file does not tell whether a linear layer's or attention's.")
    tables = (make_table("Matrix products", [*map(column, keys)], rows, notes),) if found else ()
    return Section(name="products", tables=tables, rows=rows, keys=_PRODUCT_CSV)


def products_by_configuration(entries: Sequence[Profiled]) -> Section:
    """How many matrix products were launched, beside how many of linear layers there should be."""
    columns = [
        column("phase"),
        column("linear_per_step"),
        column("linear_expected"),
        column("as_expected"),
        column("attention_per_step", drop_order=4),
        column("unknown_per_step", drop_order=6),
        column("linear_ms_per_step", drop_order=3),
        column("attention_ms_per_step", drop_order=5),
    ]
    csv = (*_PRODUCT_CSV, "linear_expected", "as_expected")
    note = "Launches per step. Expected of an eager model: one for each linear layer in forward, two in backward."
    title, rows = "Matrix products by configuration", rows_of(entries, _against_expected)
    return over_configurations("products", title, rows, columns, csv, [note])


def _against_expected(entry: Profiled) -> Iterator[Values]:
    """The verdict is empty where what is expected is not known, or some products' kind is not."""
    for row in _product_rows(entry.profile):
        expected = expected_linear(entry.config, row["phase"])
        known = expected is not None and not row["unknown_per_step"]
        verdict = ("yes" if row["linear_per_step"] == expected else "no") if known else ""
        yield row | {"linear_expected": expected, "as_expected": verdict}


def attention_section(profile: StepProfile) -> Section:
    """Scores, softmax and values in time and FLOPs, a table for forward and one for backward; none where not told."""
    phases = list(dict.fromkeys(row.phase for row in profile.attention))
    rows = {phase: [_part(profile, row) for row in profile.attention if row.phase is phase] for phase in phases}
    tables = tuple(_attention_table(profile, phase, own) for phase, own in rows.items())
    every = [_part(profile, row) for row in profile.attention]
    return Section(name="attention", tables=tables, rows=every)


def _part(profile: StepProfile, row: AttentionTimes) -> Values:
    steps = profile.num_steps
    return {
        "phase": row.phase,
        "part": row.part,
        "count_per_step": row.count / steps,
        "total_ms_per_step": row.total_s / steps * 1e3,
        "share_of_attention": share(
            row.total_s, sum(part.total_s for part in profile.attention if part.phase is row.phase)
        ),
        "share_of_phase": share(
            row.total_s, sum(sum(phase.kernel_s) for phase in profile.phases if phase.phase is row.phase)
        ),
        "products_per_step": row.product_count / steps,
        "products_ms_per_step": row.product_s / steps * 1e3,
        "flops_per_step": None if row.flops is None else row.flops / steps,
        "flops_per_s": None if row.flops is None else share(row.flops, row.total_s),
    }


def _attention_table(profile: StepProfile, phase: LaunchPhase, rows: Sequence[Values]) -> Table:
    columns = [
        column("part"),
        column("count_per_step", name=terms(profile).items, drop_order=5),
        column("total_ms_per_step"),
        column("share_of_attention"),
        column("share_of_phase", name=f"of {phase}"),
        column(
            "products_ms_per_step",
            drop_order=6,
            text=lambda row: rounded(row["products_ms_per_step"]) if row["products_per_step"] else "",
        ),
        *(map(column, ("flops_per_step", "flops_per_s")) if any(row["flops_per_step"] for row in rows) else ()),
    ]
    notes = ["Per step. Products: of the part's time, that of its matrix products.", *_softmax_sentence(profile, phase)]
    return make_table(f"Inside attention, {phase}", columns, rows, notes)


def _softmax_sentence(profile: StepProfile, phase: LaunchPhase) -> Iterator[str]:
    """Softmax against the matrix products in time and FLOPs, and the ratio of these ratios."""
    rows = [row for row in profile.attention if row.phase is phase]
    softmax = [row for row in rows if row.part is AttentionPart.SOFTMAX]
    products = [row for row in rows if row.part is not AttentionPart.SOFTMAX]
    time = share(sum(row.total_s for row in softmax), sum(row.product_s for row in products))
    if not time:
        return
    text = f"Softmax takes {significant(time, 3)} of the time of the matrix products"
    if any(row.flops is None for row in rows):
        yield f"{text}; the FLOPs are not known without the record of the run."
        return
    flops = share(sum(row.flops or 0 for row in softmax), sum(row.flops or 0 for row in products))
    if flops:
        longer = significant(time / flops, 3)
        yield f"{text} for {significant(flops, 3)} of their FLOPs: {longer} times as long per FLOP."


def attention_by_configuration(entries: Sequence[Profiled]) -> Section:
    """Softmax against the matrix products inside attention, where both are told."""
    times = ("softmax_ms_per_step", "products_ms_per_step", "whole_ms_per_step")
    keys = ("phase", *times, "time_ratio", "flops_ratio", "time_per_flop_ratio")
    note = "Ratios are softmax over matrix products; scaling and masking are in neither."
    title, rows = "Inside attention by configuration", rows_of(entries, _softmax_costs)
    return over_configurations("attention", title, rows, [*map(column, keys)], keys, [note])


def _softmax_costs(entry: Profiled) -> Iterator[Values]:
    for phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD):
        if (cost := softmax_cost(entry.profile, phase)) is None:
            continue
        times_s = {"softmax": cost.softmax_s, "products": cost.products_s, "whole": cost.whole_s}
        yield {
            "phase": phase,
            **{f"{name}_ms_per_step": time_s / entry.profile.num_steps * 1e3 for name, time_s in times_s.items()},
            "time_ratio": cost.time_ratio,
            "flops_ratio": cost.flops_ratio,
            "time_per_flop_ratio": cost.time_per_flop_ratio,
        }
