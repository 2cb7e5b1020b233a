"""A ladder for people: a table of the speed, one of what it is compared by, one of the reasons; a picture; CSV."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cs336_systems.config import SETTINGS, Device, RunConfig
from cs336_systems.record import Status
from cs336_systems.report.columns import Column, column
from cs336_systems.report.identity import size_text
from cs336_systems.report.numbers import mean_and_std, significant
from cs336_systems.report.plots import drawing
from cs336_systems.report.section import Section, texts_of, values_of, write_files
from cs336_systems.report.sections.ladder.notes import count_notes, gate_notes, reason_notes, speed_notes
from cs336_systems.report.sections.ladder.plots import draw_ladder
from cs336_systems.report.sections.ladder.reasons import GIGA, reasons
from cs336_systems.report.sections.ladder.rows import LadderRow
from cs336_systems.report.sections.ladder.words import interval_text, ratio_text
from cs336_systems.report.table import Table, make_table
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.sweep.ladder import GATE_STEPS

LEAST_DISTANCE = 0.001
"""In percent of the fall of the reference's loss."""

Rows = Sequence[LadderRow]


def ladder_tables(rows: Rows) -> list[Table]:
    """Speed; numerics and compilation; counts and reasons, unless there is no profile and the model is not known."""
    tables = [_speed_table(rows), _gate_table(rows)]
    return (
        [*tables, _count_table(rows), _reason_table(rows)] if any(row.reason or row.traffic for row in rows) else tables
    )


def write_ladder_report(rows: Rows, directory: Path) -> list[Path]:
    """Write ladder.csv .md .tex .typ and plots/ladder.png; return their paths."""
    files: dict[str, str | bytes] = {**texts_of(ladder_section(rows))}
    files["plots/ladder.png"] = drawing.to_png(draw_ladder(rows, settings(rows)))
    return write_files(files, directory)


def ladder_section(rows: Rows) -> Section:
    """The tables, and a row for each rung."""
    return Section(name="ladder", tables=tuple(ladder_tables(rows)), rows=values_of(CSV, rows))


def settings(rows: Rows) -> str:
    """What all rungs share, in words."""
    config = rows[0].rung.config
    device = next((row.row["device_name"] for row in rows if row.row["device_name"]), None)
    name = config.model_factory or config.size
    words = [name, f"context {config.model.context_length}", f"batch {config.batch_size}", f"seed {config.seed}"]
    words += [f"learning rate {config.learning_rate:g}", f"tokens {config.tokens or 'random'}"]
    return ", ".join([*words, *([device] if device else [])])


def _speed_table(rows: Rows) -> Table:
    columns: list[Column[LadderRow]] = [
        _name(),
        Column("change", numeric=False, drop_order=9, text=lambda row: row.rung.change),
        Column("step", "ms", text=_step),
        column("step_ci95_low_ms", text=lambda row: column("step_ci95_low_ms").cell(row.row)),
        _quantity("tokens/s", "", "tokens_per_s", 1, 4, drop_order=5),
        _quantity("MFU", "%", "mfu", 100, 3, drop_order=6),
        _quantity("of ceiling", "%", "ceiling_share", 100, 3, drop_order=10),
        Column("over last", drop_order=2, text=lambda row: ratio_text(row.over_last)),
        Column("interval", numeric=False, drop_order=8, text=lambda row: interval_text(row.over_last)),
        Column("over first", drop_order=3, text=lambda row: ratio_text(row.over_first)),
        Column("interval", numeric=False, drop_order=7, text=lambda row: interval_text(row.over_first)),
        _quantity("peak", "GiB", "peak_allocated_gib", 1, 3, drop_order=4),
        Column("gate", numeric=False, text=_verdict),
    ]
    known = [column for column in columns if any(column.cell(row) for row in rows)]
    notes = [f"{settings(rows)}.", *speed_notes(rows)]
    return make_table("From the slow way to the fast way", known, rows, notes, _stands_out)


def _gate_table(rows: Rows) -> Table:
    columns: list[Column[LadderRow]] = [
        _name(),
        Column(f"loss {GATE_STEPS}", drop_order=5, text=lambda row: _text(row.gate.loss, 6)),
        Column("distance", "% of the fall", drop_order=1, text=lambda row: _distance(row.gate.last)),
        Column("largest", "% of the fall", drop_order=3, text=lambda row: _distance(row.gate.largest)),
        Column("bound", "% of the fall", drop_order=4, text=lambda row: f"{100 * row.gate.bound:g}"),
        Column("gate", numeric=False, text=_verdict),
        Column("compiling", "s", drop_order=2, text=lambda row: _text(row.compile_s, 3)),
        Column("graphs", drop_order=6, text=_compiled("graphs")),
        Column("graph breaks", drop_order=7, text=_compiled("graph_breaks")),
        Column("recompiles", drop_order=8, text=_compiled("recompiles")),
    ]
    known = [column for column in columns if any(column.cell(row) for row in rows)]
    return make_table("The same training, and what compiling takes", known, rows, gate_notes(rows), _stands_out)


def _count_table(rows: Rows) -> Table:
    on_cpu = rows[0].rung.config.device is Device.CPU
    columns: list[Column[LadderRow]] = [
        _name(),
        Column("operators" if on_cpu else "kernels", text=lambda row: _text(_launches(row), 3)),
        Column("GPU busy", "%", drop_order=2, text=lambda row: _text(row.busy_share, 3, 100)),
        Column("busy", "ms", drop_order=1, text=lambda row: "" if on_cpu else _text(_busy_ms(row), 4)),
        Column("weights", "GB", drop_order=5, text=_moved("weights")),
        Column("casts", "GB", drop_order=4, text=_moved("casts")),
        Column("AdamW", "GB", drop_order=3, text=_moved("optimizer")),
        Column("activations", "GB", drop_order=6, text=_moved("activations")),
    ]
    known = [column for column in columns if any(column.cell(row) for row in rows)]
    return make_table("Counts of a step, and the least bytes that it must move", known, rows, count_notes(rows))


def _reason_table(rows: Rows) -> Table:
    by_name = {row.rung.name: row for row in rows}
    columns: list[Column[LadderRow]] = [
        _name(),
        Column("over", numeric=False, drop_order=1, text=lambda row: row.last),
        Column("what changes", numeric=False, text=lambda row: reasons(row, by_name.get(row.last))),
    ]
    return make_table("Why", columns, [row for row in rows if row.num_processes], reason_notes(rows))


def _name() -> Column[LadderRow]:
    return Column("rung", numeric=False, text=lambda row: row.rung.name)


def _quantity(name: str, unit: str, source: str, scale: float, digits: int, drop_order: int) -> Column[LadderRow]:
    return Column(name, unit, drop_order=drop_order, text=lambda row: _text(row.row[source], digits, scale))


def _text(value: float | None, digits: int, scale: float = 1) -> str:
    if value is None:
        return ""
    return significant(value * scale, digits) if value else "0"


def _distance(share: float | None) -> str:
    """In percent; what is far below every bound need not be told."""
    if share is None or share == 0 or 100 * share >= LEAST_DISTANCE:
        return _text(share, 2, 100)
    return f"<{LEAST_DISTANCE:g}"


def _step(row: LadderRow) -> str:
    if row.row["step_mean_ms"] is not None:
        return mean_and_std(row.row["step_mean_ms"], row.row["step_std_ms"])
    return "not run" if row.row["status"] is None else STATUS_WORDS[Status(row.row["status"])]


def _verdict(row: LadderRow) -> str:
    if not row.num_processes:
        return ""
    return {True: "passed", False: "FAILED", None: "no verdict"}[row.gate.passed]


def _stands_out(row: LadderRow) -> bool:
    return not row.is_credited


def _launches(row: LadderRow) -> float | None:
    return None if row.reason is None else row.reason.launches


def _busy_ms(row: LadderRow) -> float | None:
    return None if row.reason is None else row.reason.busy_s * 1e3


def _compiled(name: str) -> Callable[[LadderRow], str]:
    """The largest number of any process."""
    return lambda row: str(_most(row, name)) if row.compilations else ""


def _most(row: LadderRow, name: str) -> int | None:
    return max((int(getattr(compilation, name)) for compilation in row.compilations), default=None)


def _moved(name: str) -> Callable[[LadderRow], str]:
    return lambda row: "" if row.traffic is None else _text(getattr(row.traffic, name) / GIGA, 3)


def _least(name: str) -> Callable[[LadderRow], object]:
    return lambda row: getattr(row.traffic, name, None)


def _setting(name: str) -> Callable[[LadderRow], object]:
    return lambda row: getattr(row.rung.config, name)


def _column(name: str) -> Callable[[LadderRow], object]:
    return lambda row: row.row[name]


def _speed_up_columns(name: str) -> Mapping[str, Callable[[LadderRow], object]]:
    def value(part: str) -> Callable[[LadderRow], object]:
        return lambda row: getattr(getattr(row, name), part, None)

    short = f"speed_up_{name}"
    return {short: value("ratio"), f"{short}_ci95_low": value("low"), f"{short}_ci95_high": value("high")}


def _attention(config: RunConfig) -> str | None:
    return None if config.model_factory else f"{config.model.attention}-{config.model.sdpa_backend}"


CSV: Mapping[str, Callable[[LadderRow], object]] = {
    "rung": lambda row: row.rung.name,
    "change": lambda row: row.rung.change,
    "size": lambda row: size_text(row.rung.config),
    **{name: _setting(name) for name in ("batch_size", "precision", "compile", "compile_blocks", "optimizer",
                                         *(name for name, setting in SETTINGS.items() if setting.is_shortcut),
                                         "learning_rate", "seed")},
    "context_length": lambda row: row.rung.config.model.context_length,
    "vocab_size": lambda row: row.rung.config.model.vocab_size,
    "attention": lambda row: _attention(row.rung.config),
    "device_name": _column("device_name"),
    "status": _column("status"),
    "error": _column("error"),
    "processes": lambda row: row.num_processes,
    **{name: _column(name) for name in ("step_mean_ms", "step_std_ms", "step_ci95_low_ms", "step_ci95_high_ms",
                                        "tokens_per_s", "model_tflops_per_s", "mfu", "ceiling_share")},
    "last": lambda row: row.last,
    **_speed_up_columns("over_last"),
    **_speed_up_columns("over_first"),
    "peak_allocated_gib": _column("peak_allocated_gib"),
    "peak_reserved_gib": _column("peak_reserved_gib"),
    "compile_s": lambda row: row.compile_s,
    "graphs": lambda row: _most(row, "graphs"),
    "graph_breaks": lambda row: _most(row, "graph_breaks"),
    "recompiles": lambda row: _most(row, "recompiles"),
    f"loss_{GATE_STEPS}": lambda row: row.gate.loss,
    "distance_last": lambda row: row.gate.last,
    "distance_largest": lambda row: row.gate.largest,
    "bound": lambda row: row.gate.bound,
    "gate": _verdict,
    "launches_per_step": _launches,
    "busy_ms": _busy_ms,
    "busy_share": lambda row: row.busy_share,
    **{f"least_{name}_bytes": _least(name) for name in ("weights", "casts", "optimizer", "activations")},
    "warnings": _column("warnings"),
}  # fmt: skip
"""Columns of ladder.csv; distances and bound are shares of the fall of the reference's loss."""
