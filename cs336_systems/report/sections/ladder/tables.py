"""A ladder for people: tables of speed, of the gate, of counts and of reasons; a picture; every value as CSV."""

from collections.abc import Sequence
from pathlib import Path

from cs336_systems.config import Device
from cs336_systems.report.columns import Row, column, short
from cs336_systems.report.section import Section, pngs_of, texts_of, write_files
from cs336_systems.report.sections.ladder.notes import count_notes, gate_notes, reason_notes, speed_notes
from cs336_systems.report.sections.ladder.plots import ladder_chart
from cs336_systems.report.sections.ladder.reasons import reasons
from cs336_systems.report.sections.ladder.rows import COMPILED, FIELDS, PREDICTED, TIMES
from cs336_systems.report.table import known, make_table
from cs336_systems.sweep.ladder import GATE_STEPS

Rows = Sequence[Row]
SPEED_UPS = ("speed_up_over_last", "speed_up_over_last_ci95_low", "speed_up_over_last_ci95_high",
             "speed_up_over_first", "speed_up_over_first_ci95_low", "speed_up_over_first_ci95_high")  # fmt: skip
DISTANCES = (f"loss_{GATE_STEPS}", "distance_last", "distance_largest", "bound", "gate")
BYTES = ("least_weights_bytes", "least_casts_bytes", "least_optimizer_bytes", "least_activations_bytes")
CSV_COLUMNS = (
    "rung", "change", "size", *FIELDS, "context_length", "vocab_size", "attention", "device_name", "status", "error",
    "processes", *TIMES, "last", *SPEED_UPS, "peak_allocated_gib", "peak_reserved_gib", "compile_s", *COMPILED,
    *DISTANCES, "launches_per_step", "busy_ms", "busy_share", *BYTES, "warnings", *PREDICTED,
)  # fmt: skip
SPEED = (
    column("rung"), column("change"), column("step_mean_ms", instead="ended"), column("step_ci95_low_ms"),
    column("predicted_step_ms", drop_order=5), column("predicted_step_error", drop_order=5),
    column("tokens_per_s"), column("mfu", drop_order=6), column("ceiling_share", drop_order=10),
    column("speed_up_over_last"), column("speed_up_over_last_ci95_low"), column("speed_up_over_first"),
    column("speed_up_over_first_ci95_low"), column("peak_allocated_gib", drop_order=4), column("gate"),
)  # fmt: skip
GATE = [column(key) for key in ("rung", *DISTANCES, "compile_s", *COMPILED)]
REASONS = column("rung"), column("last"), column("reasons")


def ladder_section(rows: Rows) -> Section:
    """Speed; gate and compilation; counts and reasons, unless there is no profile and the model is not known."""
    on_cpu = rows[0]["config"].device is Device.CPU
    counts = [
        column("rung"),
        column("launches_per_step", name="operators" if on_cpu else "kernels"),
        column("busy_share", write=short, scale=100),
        *([] if on_cpu else [column("busy_ms")]),
        *map(column, BYTES),
    ]
    by_name = {row["rung"]: row for row in rows}
    ran = [row | {"reasons": reasons(row, by_name.get(row["last"]))} for row in rows if row["processes"]]
    least = "Counts of a step, and the least bytes that it must move"
    tables = [
        make_table("From the slow way to the fast way", known(SPEED, rows), rows,
                   [f"{settings(rows)}.", *speed_notes(rows)], _stands_out),
        make_table("The same training, and what compiling takes", known(GATE, rows), rows, gate_notes(rows),
                   _stands_out),
    ]  # fmt: skip
    if any(row[key] is not None for row in rows for key in ("launches_per_step", *BYTES)):
        tables.append(make_table(least, known(counts, rows), rows, count_notes(rows)))
        tables.append(make_table("Why", REASONS, ran, reason_notes(rows)))
    chart = ladder_chart(rows, settings(rows))
    return Section(name="ladder", tables=tuple(tables), rows=rows, keys=CSV_COLUMNS, pictures=(chart,))


def _stands_out(row: Row) -> bool:
    return not row["is_credited"]


def write_ladder_report(rows: Rows, directory: Path) -> list[Path]:
    """Write ladder.csv .md .tex .typ and plots/ladder.png; return their paths."""
    section = ladder_section(rows)
    return write_files({**texts_of(section), **pngs_of(section)}, directory)


def settings(rows: Rows) -> str:
    """What all rungs share, in words."""
    config = rows[0]["config"]
    device = next((row["device_name"] for row in rows if row["device_name"]), None)
    name = config.model_factory or config.size
    words = [name, f"context {config.model.context_length}", f"batch {config.batch_size}", f"seed {config.seed}"]
    words += [f"learning rate {config.learning_rate:g}", f"tokens {config.tokens or 'random'}"]
    return ", ".join([*words, *([device] if device else [])])
