"""Tables of what the time of a `StepProfile` went to: classes of kernels, matrix products, the parts of attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import AttentionPart, AttentionTimes, ProductCounts, StepProfile
from cs336_systems.report.columns import Column
from cs336_systems.report.kernels.terms import WHOLE_STEP, count_per_step, milliseconds, terms
from cs336_systems.report.listing import Listing, csv_of, label, percent, share
from cs336_systems.report.numbers import significant
from cs336_systems.report.table import Table, make_table

MAX_OTHERS = 10
"""Kernels of class `other` to name below the table of classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSum:
    """Kernels of one class, or of all (`kind` None), in one phase or (`phase` None) in the whole step."""

    kind: KernelClass | None
    phase: LaunchPhase | None
    count: int
    total_s: float


def classes_listing(profile: StepProfile) -> Listing:
    """A row for each class, the longest first, and their sum; columns for each phase with kernels."""
    words = terms(profile)
    phases = [phase.phase for phase in profile.phases if any(phase.launches)]
    kinds = sorted({row.kind for row in profile.classes}, key=lambda kind: -_sum(profile, kind, None).total_s)
    rows: list[KernelClass | None] = [*kinds, None]
    where: list[LaunchPhase | None] = [*phases, None]
    columns: list[Column[KernelClass | None]] = [
        Column("class", numeric=False, says=lambda kind: kind or "sum"),
        *(column for phase in where for column in _class_columns(profile, phase)),
        Column(
            words.items, spare=3, says=lambda kind: count_per_step(_sum(profile, kind, None).count, profile.num_steps)
        ),
    ]
    notes = [f"{words.time} per step; % of the phase, and of the step.", *_others(profile)]
    sums = [_sum(profile, kind, phase) for kind in rows for phase in where]
    csv = _class_csv(profile, [row for row in sums if row.count])
    return Listing(name="classes", tables=(make_table(f"Classes of {words.items}", columns, rows, notes),), csv=csv)


def _sum(profile: StepProfile, kind: KernelClass | None, phase: LaunchPhase | None) -> ClassSum:
    rows = [row for row in profile.classes if kind in (None, row.kind) and phase in (None, row.phase)]
    return ClassSum(
        kind=kind, phase=phase, count=sum(row.count for row in rows), total_s=sum(row.total_s for row in rows)
    )


def _class_columns(profile: StepProfile, phase: LaunchPhase | None) -> list[Column[KernelClass | None]]:
    """Time and share in one phase; empty where the phase has no such kernel."""
    whole_s = _sum(profile, None, phase).total_s

    def time(kind: KernelClass | None) -> str:
        found = _sum(profile, kind, phase)
        return milliseconds(found.total_s / profile.num_steps) if found.count else ""

    def part(kind: KernelClass | None) -> str:
        found = _sum(profile, kind, phase)
        return percent(found.total_s, whole_s) if found.count else ""

    time_spare, part_spare = (0, 0) if phase is None else (1, 2)
    return [
        Column(phase or WHOLE_STEP, "ms", spare=time_spare, says=time),
        Column("", "%", spare=part_spare, says=part),
    ]


def _others(profile: StepProfile) -> Iterator[str]:
    """The kernels that no rule knows, by name."""
    words = terms(profile)
    rows = [row for row in profile.kernels if row.phase is None and row.kind is KernelClass.OTHER]
    if not rows:
        return
    times = [
        f"{label(row.short_name)} ({milliseconds(row.total_s / profile.num_steps)} ms)" for row in rows[:MAX_OTHERS]
    ]
    if len(rows) > MAX_OTHERS:
        rest_s = sum(row.total_s for row in rows[MAX_OTHERS:]) / profile.num_steps
        times.append(f"{len(rows) - MAX_OTHERS} more ({milliseconds(rest_s)} ms)")
    yield f"Class other, {words.items} that no rule knows: {', '.join(times)}."


def _class_csv(profile: StepProfile, rows: list[ClassSum]) -> str:
    columns: dict[str, Callable[[ClassSum], object]] = {
        "class": lambda row: row.kind or "sum",
        "phase": lambda row: row.phase or WHOLE_STEP,
        "count_per_step": lambda row: row.count / profile.num_steps,
        "total_ms_per_step": lambda row: row.total_s * 1e3 / profile.num_steps,
        "share": lambda row: share(row.total_s, _sum(profile, None, row.phase).total_s),
    }
    return csv_of(columns, rows)


def products_listing(profile: StepProfile) -> Listing:
    """Matrix products by what they belong to; to read, without kinds that there are none of."""
    steps = profile.num_steps
    kinds = ("linear", "attention", "unknown")
    found = [kind for kind in kinds if any(getattr(row, kind) for row in profile.products)]
    columns: list[Column[ProductCounts]] = [
        Column("phase", numeric=False, says=attrgetter("phase")),
        *(column for kind in found for column in _product_columns(kind, steps)),
    ]
    csv_columns: dict[str, Callable[[ProductCounts], object]] = {"phase": attrgetter("phase")}
    for kind in kinds:
        csv_columns[f"{kind}_per_step"] = _per_step(kind, steps)
        csv_columns[f"{kind}_ms_per_step"] = _per_step(f"{kind}_s", steps, scale=1e3)
    notes = ["Count and time per step, without helpers such as the sum over split-K parts."]
    if any(row.unknown for row in profile.products):
        notes.append("Unknown: the file does not tell whether a linear layer's or attention's.")
    tables = (make_table("Matrix products", columns, profile.products, notes),) if found else ()
    return Listing(name="products", tables=tables, csv=csv_of(csv_columns, profile.products))


def _per_step(field: str, steps: int, scale: float = 1) -> Callable[[ProductCounts], object]:
    return lambda row: getattr(row, field) * scale / steps


def _product_columns(kind: str, steps: int) -> list[Column[ProductCounts]]:
    return [
        Column(kind, says=lambda row: count_per_step(getattr(row, kind), steps)),
        Column(f"{kind} time", "ms", says=lambda row: milliseconds(getattr(row, f"{kind}_s") / steps)),
    ]


def attention_listing(profile: StepProfile) -> Listing:
    """Scores, softmax and values in time and FLOPs, a table for forward and one for backward; none where not told."""
    rows = profile.attention
    phases = list(dict.fromkeys(row.phase for row in rows))
    phase_s = {phase.phase: sum(phase.kernel_s) for phase in profile.phases}
    steps = profile.num_steps
    columns: dict[str, Callable[[AttentionTimes], object]] = {
        "phase": attrgetter("phase"),
        "part": attrgetter("part"),
        "count_per_step": lambda row: row.count / steps,
        "total_ms_per_step": lambda row: row.total_s * 1e3 / steps,
        "share_of_attention": lambda row: share(row.total_s, _attention_s(profile, row.phase)),
        "share_of_phase": lambda row: share(row.total_s, phase_s[row.phase]),
        "products_per_step": lambda row: row.product_count / steps,
        "products_ms_per_step": lambda row: row.product_s * 1e3 / steps,
        "flops_per_step": lambda row: None if row.flops is None else row.flops / steps,
        "flops_per_s": _flops_per_s,
    }
    tables = tuple(_attention_table(profile, phase, phase_s[phase]) for phase in phases)
    return Listing(name="attention", tables=tables, csv=csv_of(columns, rows))


def _attention_s(profile: StepProfile, phase: LaunchPhase) -> float:
    return sum(row.total_s for row in profile.attention if row.phase is phase)


def _flops_per_s(row: AttentionTimes) -> float | None:
    return None if row.flops is None else share(row.flops, row.total_s)


def _attention_table(profile: StepProfile, phase: LaunchPhase, phase_s: float) -> Table:
    rows = [row for row in profile.attention if row.phase is phase]
    steps, whole_s = profile.num_steps, _attention_s(profile, phase)
    columns: list[Column[AttentionTimes]] = [
        Column("part", numeric=False, says=attrgetter("part")),
        Column(terms(profile).items, spare=5, says=lambda row: count_per_step(row.count, steps)),
        Column("time", "ms", says=lambda row: milliseconds(row.total_s / steps)),
        Column("share", "%", spare=1, says=lambda row: percent(row.total_s, whole_s)),
        Column(f"of {phase}", "%", spare=4, says=lambda row: percent(row.total_s, phase_s)),
        Column(
            "products", "ms", spare=6, says=lambda row: milliseconds(row.product_s / steps) if row.product_count else ""
        ),
        *(_flops_columns(steps) if any(row.flops for row in rows) else ()),
    ]
    notes = ["Per step. Products: of the part's time, that of its matrix products.", *_softmax_sentence(rows)]
    return make_table(f"Inside attention, {phase}", columns, rows, notes)


def _flops_columns(steps: int) -> list[Column[AttentionTimes]]:
    def flops(row: AttentionTimes) -> str:
        return "" if row.flops is None else significant(row.flops / steps / 1e9)

    def rate(row: AttentionTimes) -> str:
        return "" if (rate := _flops_per_s(row)) is None else significant(rate / 1e12, 3)

    return [Column("FLOPs", "G", spare=7, says=flops), Column("rate", "TFLOP/s", spare=3, says=rate)]


def _softmax_sentence(rows: list[AttentionTimes]) -> Iterator[str]:
    """Softmax against the matrix products in time and FLOPs, and the ratio of these ratios."""
    softmax = [row for row in rows if row.part is AttentionPart.SOFTMAX]
    products = [row for row in rows if row.part is not AttentionPart.SOFTMAX]
    time = share(sum(row.total_s for row in softmax), sum(row.product_s for row in products))
    if not time:
        return
    text = f"Softmax takes {significant(time, 3)} of the time of the matrix products"
    known = [row.flops for row in rows if row.flops is not None]
    if len(known) < len(rows):
        yield f"{text}; the FLOPs are not known without the record of the run."
        return
    flops = share(sum(row.flops or 0 for row in softmax), sum(row.flops or 0 for row in products))
    if flops:
        longer = significant(time / flops, 3)
        yield f"{text} for {significant(flops, 3)} of their FLOPs: {longer} times as long per FLOP."
