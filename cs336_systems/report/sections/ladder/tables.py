"""A ladder for people: tables of speed, of the gate, of counts and of reasons; a picture; every value as CSV."""

from collections.abc import Sequence
from pathlib import Path

from cs336_systems.config import SETTINGS, Device
from cs336_systems.report.columns import column, short
from cs336_systems.report.entries import Values
from cs336_systems.report.identity import size_text
from cs336_systems.report.plots import drawing
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.sections.ladder.notes import count_notes, gate_notes, reason_notes, speed_notes
from cs336_systems.report.sections.ladder.plots import draw_ladder
from cs336_systems.report.sections.ladder.reasons import reasons
from cs336_systems.report.sections.ladder.rows import LadderRow, speed_ups
from cs336_systems.report.table import Table, known, make_table
from cs336_systems.sweep.ladder import GATE_STEPS

Rows = Sequence[LadderRow]
SPEED = (
    column("rung"), column("change"), column("step_mean_ms", instead="ended"), column("step_ci95_low_ms"),
    column("tokens_per_s"), column("mfu", drop_order=6), column("ceiling_share", drop_order=10),
    column("speed_up_over_last"), column("speed_up_over_last_ci95_low"), column("speed_up_over_first"),
    column("speed_up_over_first_ci95_low"), column("peak_allocated_gib", drop_order=4), column("gate"),
)  # fmt: skip
GATE = [column(key) for key in ("rung", f"loss_{GATE_STEPS}", "distance_last", "distance_largest", "bound", "gate",
                                "compile_s", "graphs", "graph_breaks", "recompiles")]  # fmt: skip
BYTES = [column(f"least_{name}_bytes") for name in ("weights", "casts", "optimizer", "activations")]
REASONS = column("rung"), column("last"), column("reasons")


def ladder_section(rows: Rows) -> Section:
    """Speed; gate and compilation; counts and reasons, unless there is no profile and the model is not known."""
    values = [values_of(row) for row in rows]
    by_name = {row.rung.name: row for row in rows}
    shown = [{**all_of, **_shown(row, by_name)} for row, all_of in zip(rows, values, strict=True)]
    on_cpu = rows[0].rung.config.device is Device.CPU
    busy = column("busy_share", write=short, scale=100), *([] if on_cpu else [column("busy_ms")])
    counts = (column("rung"), column("launches_per_step", name="operators" if on_cpu else "kernels"), *busy, *BYTES)
    ran = [row for row in shown if row["processes"]]
    same = "The same training, and what compiling takes"
    least = "Counts of a step, and the least bytes that it must move"
    tables: list[Table] = [
        make_table("From the slow way to the fast way", known(SPEED, shown), shown,
                   [f"{settings(rows)}.", *speed_notes(rows)], _stands_out),
        make_table(same, known(GATE, shown), shown, gate_notes(rows), _stands_out),
    ]  # fmt: skip
    if any(row.reason or row.traffic for row in rows):
        tables.append(make_table(least, known(counts, shown), shown, count_notes(rows)))
        tables.append(make_table("Why", REASONS, ran, reason_notes(rows)))
    return Section(name="ladder", tables=tuple(tables), rows=values)


def _stands_out(row: Values) -> bool:
    return not row["is_credited"]


def write_ladder_report(rows: Rows, directory: Path) -> list[Path]:
    """Write ladder.csv .md .tex .typ and plots/ladder.png; return their paths."""
    picture = drawing.to_png(draw_ladder(rows, settings(rows)))
    return write_files({**texts_of(ladder_section(rows)), "plots/ladder.png": picture}, directory)


def settings(rows: Rows) -> str:
    """What all rungs share, in words."""
    config = rows[0].rung.config
    device = next((row.row["device_name"] for row in rows if row.row["device_name"]), None)
    name = config.model_factory or config.size
    words = [name, f"context {config.model.context_length}", f"batch {config.batch_size}", f"seed {config.seed}"]
    words += [f"learning rate {config.learning_rate:g}", f"tokens {config.tokens or 'random'}"]
    return ", ".join([*words, *([device] if device else [])])


def values_of(row: LadderRow) -> Values:
    """The columns of ladder.csv; distances and bound are shares of the fall of the reference's loss."""
    config, gate = row.rung.config, row.gate
    shortcuts = (name for name, setting in SETTINGS.items() if setting.is_shortcut)
    fields = ("batch_size", "precision", "compile", "compile_blocks", "optimizer", *shortcuts, "learning_rate", "seed")
    times = ("step_mean_ms", "step_std_ms", "step_ci95_low_ms", "step_ci95_high_ms", "tokens_per_s",
             "model_tflops_per_s", "mfu", "ceiling_share")  # fmt: skip
    verdict = {True: "passed", False: "FAILED", None: "no verdict"}[gate.passed]
    least = ("weights", "casts", "optimizer", "activations")
    compiled = ("graphs", "graph_breaks", "recompiles")
    return {
        "rung": row.rung.name,
        "change": row.rung.change,
        "size": size_text(config),
        **{name: getattr(config, name) for name in fields},
        "context_length": config.model.context_length,
        "vocab_size": config.model.vocab_size,
        "attention": None if config.model_factory else f"{config.model.attention}-{config.model.sdpa_backend}",
        **{name: row.row[name] for name in ("device_name", "status", "error")},
        "processes": row.num_processes,
        **{name: row.row[name] for name in times},
        "last": row.last,
        **{key: gain for key, gain in speed_ups(row).items() if not key.endswith(("_std", "_is_doubted"))},
        **{name: row.row[name] for name in ("peak_allocated_gib", "peak_reserved_gib")},
        "compile_s": row.compile_s,
        **{name: max((int(getattr(each, name)) for each in row.compilations), default=None) for name in compiled},
        f"loss_{GATE_STEPS}": gate.loss,
        "distance_last": gate.last,
        "distance_largest": gate.largest,
        "bound": gate.bound,
        "gate": verdict if row.num_processes else "",
        "launches_per_step": None if row.reason is None else row.reason.launches,
        "busy_ms": None if row.reason is None else row.reason.busy_s * 1e3,
        "busy_share": row.busy_share,
        **{f"least_{name}_bytes": getattr(row.traffic, name, None) for name in least},
        "warnings": row.row["warnings"],
    }


def _shown(row: LadderRow, by_name: dict[str, LadderRow]) -> Values:
    """What the tables show of a rung beside the columns of ladder.csv."""
    return {
        "ended": row.ended,
        "is_credited": row.is_credited,
        **speed_ups(row),
        "reasons": reasons(row, by_name.get(row.last)),
    }
