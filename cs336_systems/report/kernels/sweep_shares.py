"""Tables over the configurations of a sweep: classes of kernels, matrix products, attention, the longest kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import ProductCounts
from cs336_systems.config import Arch, CompileMode, RunConfig
from cs336_systems.report.columns import Column
from cs336_systems.report.kernels.entries import Profiled
from cs336_systems.report.kernels.facts import SoftmaxCost, TopKernel, class_shares, softmax_cost, top_kernel
from cs336_systems.report.kernels.sweep_tables import Row, make_listing, rows_of_entries, text
from cs336_systems.report.kernels.terms import WHOLE_STEP, count_per_step, milliseconds, terms
from cs336_systems.report.listing import Listing, label, percent, share

_PHASES = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """Shares of the classes in one phase, or in the whole step."""

    where: str
    shares: dict[KernelClass, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRow:
    """The longest kernel of forward, or of the whole step."""

    where: str
    kernel: TopKernel
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """What softmax and products cost in one phase."""

    phase: LaunchPhase
    cost: SoftmaxCost


def classes_listing(entries: Sequence[Profiled]) -> Listing:
    """Share of each class in forward, backward, the optimizer and the step; to read, of those that there are."""
    rows = rows_of_entries(entries, _class_rows)
    kinds = [kind for kind in KernelClass if any(kind in row.part.shares for row in rows)]
    columns: list[Column[Row[ClassRow]]] = [
        Column("phase", numeric=False, says=attrgetter("part.where")),
        *(Column(kind, "%", spare=rank, says=_class_cell(kind)) for rank, kind in enumerate(kinds)),
    ]
    csv: dict[str, Callable[[Row[ClassRow]], object]] = {"phase": attrgetter("part.where")}
    csv |= {f"{kind.lower().replace(' ', '_').replace('-', '_')}_share": _class_share(kind) for kind in KernelClass}
    words = terms(entries[0].profile)
    title = f"Classes of {words.items} by configuration"
    return make_listing("classes", title, rows, columns, csv, f"Shares of the {words.time}.")


def _class_rows(entry: Profiled) -> list[ClassRow]:
    phases = {str(phase): [phase] for phase in _PHASES}
    found = {name: class_shares(entry.profile, chosen) for name, chosen in {**phases, WHOLE_STEP: None}.items()}
    return [ClassRow(where=name, shares=shares) for name, shares in found.items() if shares]


def _class_cell(kind: KernelClass) -> Callable[[Row[ClassRow]], str]:
    return lambda row: percent(row.part.shares[kind], 1) if kind in row.part.shares else ""


def _class_share(kind: KernelClass) -> Callable[[Row[ClassRow]], float]:
    return lambda row: row.part.shares.get(kind, 0.0)


def expected_linear(config: RunConfig, phase: LaunchPhase) -> int | None:
    """Matrix products of linear layers in one pass of this project's eager model; None where that is not known.

    In forward one for each layer: 7 in a block of the course's architecture, 6 in one of GPT-2's, and the head. In
    backward two for each, one for the gradient of each factor.
    """
    if config.model_factory is not None or config.compile is not CompileMode.NONE:
        return None
    forward = (7 if config.model.arch is Arch.CS336 else 6) * config.model.num_layers + 1
    return {LaunchPhase.FORWARD: forward, LaunchPhase.BACKWARD: 2 * forward}.get(phase)


def products_listing(entries: Sequence[Profiled]) -> Listing:
    """How many matrix products were launched, beside how many of linear layers there should be."""
    columns: list[Column[Row[ProductCounts]]] = [
        Column("phase", numeric=False, says=attrgetter("part.phase")),
        Column("linear", says=lambda row: count_per_step(row.part.linear, row.steps)),
        Column("expected", spare=2, says=lambda row: "" if (count := _expected(row)) is None else f"{count:,}"),
        Column("as expected", numeric=False, spare=1, says=_verdict),
        Column("attention", spare=4, says=lambda row: count_per_step(row.part.attention, row.steps)),
        Column("unknown", spare=6, says=lambda row: count_per_step(row.part.unknown, row.steps)),
        Column("linear time", "ms", spare=3, says=lambda row: milliseconds(row.part.linear_s / row.steps)),
        Column("attention time", "ms", spare=5, says=lambda row: milliseconds(row.part.attention_s / row.steps)),
    ]
    csv: dict[str, Callable[[Row[ProductCounts]], object]] = {"phase": attrgetter("part.phase")}
    for kind in ("linear", "attention", "unknown"):
        csv[f"{kind}_per_step"] = _per_step(f"part.{kind}", 1)
        csv[f"{kind}_ms_per_step"] = _per_step(f"part.{kind}_s", 1e3)
    csv |= {"linear_expected": _expected, "as_expected": _verdict}
    note = "Launches per step. Expected of an eager model: one for each linear layer in forward, two in backward."
    rows = rows_of_entries(entries, attrgetter("profile.products"))
    return make_listing("products", "Matrix products by configuration", rows, columns, csv, note)


def _per_step(path: str, scale: float) -> Callable[[Row[Any]], float]:
    return lambda row: float(attrgetter(path)(row)) * scale / row.steps


def _expected(row: Row[ProductCounts]) -> int | None:
    return expected_linear(row.entry.config, row.part.phase)


def _verdict(row: Row[ProductCounts]) -> str:
    """Yes or no; empty where what is expected is not known, or some products' kind is not."""
    expected = _expected(row)
    if expected is None or row.part.unknown:
        return ""
    return "yes" if row.part.linear == expected * row.steps else "no"


def attention_listing(entries: Sequence[Profiled]) -> Listing:
    """Softmax against the matrix products inside attention, where both are told."""
    times = {"softmax": "softmax", "products": "products", "all of attention": "whole"}
    ratios = {"time ratio": "time_ratio", "FLOP ratio": "flops_ratio", "time per FLOP": "time_per_flop_ratio"}
    columns: list[Column[Row[CostRow]]] = [
        Column("phase", numeric=False, says=attrgetter("part.phase")),
        *(Column(name, "ms", spare=rank, says=_time_cell(field)) for rank, (name, field) in enumerate(times.items())),
        *(Column(name, spare=3, says=_ratio_cell(field)) for name, field in ratios.items()),
    ]
    csv: dict[str, Callable[[Row[CostRow]], object]] = {"phase": attrgetter("part.phase")}
    csv |= {f"{field}_ms_per_step": _per_step(f"part.cost.{field}_s", 1e3) for field in times.values()}
    csv |= {field: attrgetter(f"part.cost.{field}") for field in ratios.values()}
    note = "Ratios are softmax over matrix products; scaling and masking are in neither."
    rows = rows_of_entries(entries, _cost_rows)
    return make_listing("attention", "Inside attention by configuration", rows, columns, csv, note)


def _cost_rows(entry: Profiled) -> list[CostRow]:
    found = [(phase, softmax_cost(entry.profile, phase)) for phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)]
    return [CostRow(phase=phase, cost=cost) for phase, cost in found if cost is not None]


def _time_cell(field: str) -> Callable[[Row[CostRow]], str]:
    return lambda row: milliseconds(getattr(row.part.cost, f"{field}_s") / row.steps)


def _ratio_cell(field: str) -> Callable[[Row[CostRow]], str]:
    return lambda row: text(getattr(row.part.cost, field), 3)


def top_kernels_listing(entries: Sequence[Profiled]) -> Listing:
    """The longest kernel of forward, and of the whole step."""
    words = terms(entries[0].profile)
    columns: list[Column[Row[TopRow]]] = [
        Column("of", numeric=False, says=attrgetter("part.where")),
        Column("share", "%", says=lambda row: percent(row.part.kernel.total_s, row.part.whole_s)),
        Column("time", "ms", says=lambda row: milliseconds(row.part.kernel.total_s / row.steps)),
        Column("launches", says=lambda row: count_per_step(row.part.kernel.count, row.steps)),
        Column("class", numeric=False, says=attrgetter("part.kernel.kind")),
        Column(words.item, numeric=False, says=lambda row: label(row.part.kernel.short_name)),
    ]
    csv: dict[str, Callable[[Row[TopRow]], object]] = {
        "of": attrgetter("part.where"),
        "share": lambda row: share(row.part.kernel.total_s, row.part.whole_s),
        "total_ms_per_step": _per_step("part.kernel.total_s", 1e3),
        "count_per_step": _per_step("part.kernel.count", 1),
        "class": attrgetter("part.kernel.kind"),
        "name": attrgetter("part.kernel.name"),
    }
    title = f"The longest {words.item} by configuration"
    note = f"By {words.time} per step; share of that of forward, or of the step."
    return make_listing("top_kernels", title, rows_of_entries(entries, _top_rows), columns, csv, note)


def _top_rows(entry: Profiled) -> list[TopRow]:
    phases = [phase.phase for phase in entry.profile.phases]
    rows = []
    for where, chosen in ((str(LaunchPhase.FORWARD), [LaunchPhase.FORWARD]), (WHOLE_STEP, phases)):
        if kernel := top_kernel(entry.profile, chosen):
            whole_s = sum(sum(phase.kernel_s) for phase in entry.profile.phases if phase.phase in chosen)
            rows.append(TopRow(where=where, kernel=kernel, whole_s=whole_s))
    return rows
