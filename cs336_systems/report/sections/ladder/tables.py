"""A ladder for people: tables of speed, of the gate, of counts and of reasons; a picture; every value as CSV."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cs336_systems.config import Device
from cs336_systems.report.columns import Row, column, short
from cs336_systems.report.formats import pngs_of, texts_of, write_files
from cs336_systems.report.plots.charts import Axis, Bar, Chart, Curve, Line, Panel, Point, Style
from cs336_systems.report.section import Section, known, make_table
from cs336_systems.report.sections.ladder.notes import (
    count_notes,
    findings,
    gate_notes,
    reason_notes,
    reasons,
    speed_notes,
)
from cs336_systems.report.sections.ladder.rows import COMPILED, FIELDS, PREDICTED, TIMES
from cs336_systems.report.words import DOUBT, significant
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
_FRACTION = 5
PASSED, UNCREDITED = "passed", "did not pass the gate"
STYLES = {PASSED: Style(colour="#0072B2"), UNCREDITED: Style(colour="#BBBBBB", pattern="/", ink="#000000")}


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
                   [f"{settings(rows)}.", *speed_notes(rows)], _stands_out, findings(rows)),
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


def ladder_chart(rows: Sequence[Row], settings: str) -> Chart:
    """Mean time of a step by rung, with the interval over processes where there are three or more.

    Rungs whose bars would all be short beside the slowest one's are repeated below, on a scale of their own.
    """
    fast, below = _fast(rows), f"Those that take less than 1/{_FRACTION} of the slowest"
    panels = [_panel(rows), *([_panel(fast, below)] if len(fast) > 1 else [])]
    has_both = any(row["step_mean_ms"] is not None and not row["is_credited"] for row in rows)
    return Chart(
        name="ladder", title="Time of a training step, rung by rung", settings=settings, panels=panels,
        size=(max(5.5, 0.95 * len(rows) + 0.9), 4.2), legend=2,
        styles=STYLES if has_both else {PASSED: replace(STYLES[PASSED], label="")},
    )  # fmt: skip


def _fast(rows: Sequence[Row]) -> list[Row]:
    """The rungs whose bars would be short beside the slowest's."""
    times = [row["step_mean_ms"] for row in rows]
    slowest_ms = max((time for time in times if time is not None), default=0.0)
    return [row for row, time in zip(rows, times, strict=True) if time is not None and time * _FRACTION < slowest_ms]


def _panel(rows: Sequence[Row], title: str = "") -> Panel:
    intervals = [
        Point(
            x=row["rung"],
            value=row["step_mean_ms"],
            error=row["step_ci95_high_ms"] - row["step_mean_ms"],
            error_below=row["step_mean_ms"] - max(0.0, row["step_ci95_low_ms"]),
        )
        for row in rows
        if row["step_mean_ms"] is not None and row["step_ci95_low_ms"] is not None
    ]
    means = Curve(line=Line(name="mean, 95 % interval", points=tuple(intervals)), colour="#000000", dash="", label="")
    return Panel(
        x=Axis(names=[row["rung"] for row in rows]), y=Axis(label="step (ms)", from_zero=True), title=title,
        bars=[_bar(row) for row in rows], curves=[means],
    )  # fmt: skip


def _bar(row: Row) -> Bar:
    mean_ms = row["step_mean_ms"]
    if mean_ms is None:
        return Bar(name=row["rung"], failure=row["ended"])
    gain = ""
    if row["speed_up_over_first"] is not None and row["is_credited"]:
        doubt = f" {DOUBT}" if row["speed_up_over_first_is_doubted"] else ""
        gain = f"\n{significant(row['speed_up_over_first'], 3)}x{doubt}"
    part = PASSED if row["is_credited"] else UNCREDITED
    return Bar(name=row["rung"], parts={part: mean_ms}, words=f"{significant(mean_ms, 3)}{gain}")
