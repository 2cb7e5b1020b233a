"""Tables of classes of kernels, of matrix products and of attention. Times and counts are per step."""

from collections.abc import Iterator, Sequence

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import AttentionPart, StepProfile
from cs336_systems.config import Arch, CompileMode, RunConfig
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.entries import over_configurations, rows_of
from cs336_systems.report.numbers import in_percent, label, ratio, rounded
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import Sum, added, grouped, kernel_s
from cs336_systems.report.sections.kernels.words import WHOLE_STEP, terms

MAX_OTHERS = 10
"""Most kernels of class `other` that are named below the table of classes."""
PRODUCTS = ("linear", "attention", "unknown")
"""Kinds of matrix products, by what they belong to."""
CLASS_KEYS = {kind: kind.lower().replace(" ", "_").replace("-", "_") for kind in KernelClass}
_CLASS_VALUES = ("share", "ms_per_step", "per_step")
_PART_VALUES = ("per_step", "ms_per_step", "products_ms_per_step", "flops_per_step", "flops_per_s")


def classes(entries: Sequence[Explained]) -> Section:
    """Share of each class in the kernels' time of each phase, and of the step; as CSV with times and counts."""
    words = terms(entries[0].profile)
    columns = [column("phase")]
    for rank, (kind, key) in enumerate(CLASS_KEYS.items()):
        columns.append(Column(kind, "%", key=f"{key}_share", drop_order=rank, write=_share, about=f"Share of {kind}."))
    keys = ["phase", *(f"{key}_{value}" for value in _CLASS_VALUES for key in CLASS_KEYS.values())]
    notes = [f"Shares of the {words.time}.", *(_others(entries[0].profile) if len(entries) == 1 else ())]
    title = f"Classes of {words.items}"
    return over_configurations("classes", title, rows_of(entries, class_rows), columns, keys, notes)


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
            yield row


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


def products(entries: Sequence[Explained]) -> Section:
    """Matrix products by what they belong to, beside how many of linear layers there should be."""
    rows = rows_of(entries, _products)
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
    keys = ("phase", *(f"{kind}{value}" for kind in PRODUCTS for value in ("_per_step", "_ms_per_step")),
            "linear_expected", "as_expected")  # fmt: skip
    return over_configurations(
        "products", "Matrix products", rows, columns, keys, notes,
        shown=lambda row: any(row[f"{kind}_per_step"] for kind in PRODUCTS),
    )  # fmt: skip


def _products(entry: Explained) -> Iterator[Row]:
    """A row for each phase; `as_expected` is empty if the expected number or the kind of some products is unknown."""
    steps = entry.profile.num_steps
    for row in entry.profile.products:
        expected = expected_linear(entry.config, row.phase)
        is_known = expected is not None and not row.unknown
        yield {
            "phase": row.phase,
            **{f"{kind}_per_step": getattr(row, kind) / steps for kind in PRODUCTS},
            **{f"{kind}_ms_per_step": getattr(row, f"{kind}_s") / steps * 1e3 for kind in PRODUCTS},
            "linear_expected": expected,
            "as_expected": ("yes" if row.linear / steps == expected else "no") if is_known else "",
        }


def attention(entries: Sequence[Explained]) -> Section:
    """Scores, softmax and values, and the softmax against the matrix products; as CSV with counts and FLOPs of each."""
    rows = rows_of(entries, attention_rows)
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


def attention_rows(entry: Explained) -> Iterator[Row]:
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
