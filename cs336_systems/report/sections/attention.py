"""The attention grid for people: times and memory as tables, pictures and sentences, and every value as CSV."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from cs336_systems.analysis.warnings import PASSES
from cs336_systems.config import Phase
from cs336_systems.files import encode_json, write_atomically
from cs336_systems.record import Status
from cs336_systems.report.columns import Column, Row, column, three_digits
from cs336_systems.report.plots.charts import MARKERS, Axis, Chart, Curve, Line, Panel, Point, doubling
from cs336_systems.report.section import Section, Table, make_table
from cs336_systems.report.sections.study import across, derived, doubt_notes, end_of, pivoted, times_ms, write_study
from cs336_systems.report.words import GIB, MIB, TERA, place_in, ratio, scientific, significant
from cs336_systems.studies.attention_records import (
    AttentionStudy,
    CellResult,
    Implementation,
    Quantity,
    matmul_flops,
    naive_saved_bytes,
    rows_bytes,
    weights_bytes,
)
from cs336_systems.studies.fusion_records import PHASES

CSV_COLUMNS = (
    "implementation", "precision", "d_head", "context_length", "batch_size", "causal", "device_name", "passes",
    "status", "error", "requested_mib",
    "forward_mean_ms", "forward_std_ms", "forward_tflops_per_s",
    "backward_mean_ms", "backward_std_ms", "backward_tflops_per_s",
    "before_forward_mib", "before_backward_mib", "saved_mib", "naive_saved_closed_form_mib", "peak_mib", "compile_s",
    "forward_warnings", "backward_warnings",
    "together_mean_ms", "together_std_ms", "together_tflops_per_s", "together_warnings",
)  # fmt: skip
ERROR_COLUMNS = tuple(f"{quantity}_{name}" for quantity in Quantity for name in ("max_error", "relative_error"))
"""Columns of errors, in studies with an own implementation."""
SHAPE = ("d_head", "context_length")
TIMED = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD, "together": Phase.STEP}
TITLES = {
    "forward": "Forward pass of attention",
    "backward": "Backward pass of attention",
    "together": "Forward and backward pass of attention together",
}
Rows = Sequence[Row]
COLOURS = {
    Implementation.NAIVE: "#333333",
    Implementation.COMPILED: "#E69F00",
    Implementation.SDPA: "#D55E00",
    Implementation.FLASH: "#0072B2",
    Implementation.EFFICIENT: "#009E73",
    Implementation.CUDNN: "#CC79A7",
    Implementation.MATH: "#56B4E9",
    Implementation.OWN: "#701C70",
}
MARKS = dict(zip(Implementation, MARKERS, strict=False))
CLOSED_FORM = "naive, in closed form"


def attention_rows(study: AttentionStudy) -> list[Row]:
    """A row for each cell, failed ones too; None for what is not known."""
    return [_values(study, result) for result in study.results]


def _values(study: AttentionStudy, result: CellResult) -> Row:
    grid, cell = study.grid, result.cell
    memory = result.memory if result.status is Status.OK else None
    closed_form = naive_saved_bytes(grid, cell) / MIB
    row: Row = {
        "implementation": cell.implementation, "precision": cell.precision, "d_head": cell.d_head,
        "context_length": cell.context_length, "batch_size": grid.batch_size, "causal": grid.causal,
        "device_name": study.environment.identity.device_name if study.environment else None, "passes": grid.passes,
        **end_of(result.status, result.failure), **_end_of_own(study, result),
        "requested_mib": ratio(result.failure.requested_bytes if result.failure else None, MIB),
        "before_forward_mib": memory and memory.before_forward_bytes / MIB,
        "before_backward_mib": memory and memory.before_backward_bytes / MIB,
        "saved_mib": memory and memory.saved_bytes / MIB, "peak_mib": memory and memory.peak_bytes / MIB,
        "naive_saved_closed_form_mib": closed_form if cell.implementation is Implementation.NAIVE else None,
        "closed_form_mib": closed_form, "matrix_mib": weights_bytes(grid, cell) / MIB,
        "queries_mib": rows_bytes(grid, cell) / MIB, "compile_s": result.compile_s,
    }  # fmt: skip
    for timed, phase in TIMED.items():
        row |= times_ms(result.measurement(phase), result.warnings(phase), f"{timed}_")
        rate = ratio(matmul_flops(grid, cell, phase) / TERA * 1e3, row[f"{timed}_mean_ms"])
        row |= derived(f"{timed}_tflops_per_s", rate, row, prefix=f"{timed}_")
    errors = {error.quantity: error for error in result.errors}
    for quantity in Quantity:
        error = errors.get(quantity)
        row[f"{quantity}_max_error"] = error and error.max_error
        row[f"{quantity}_relative_error"] = error and error.relative
    return row | {"errors": errors}


def _end_of_own(study: AttentionStudy, result: CellResult) -> Row:
    """How a cell of the user's own function ended, where that was not well: the error with the place in the file.

    A cell that ended well but has an error has no backward.
    """
    if result.cell.implementation is not Implementation.OWN or result.failure is None:
        return {}
    place = place_in(study.grid.own or "", result.failure)
    error = result.failure.message
    if place and place not in error:  # that of a syntax error has it
        error += f" ({place})"
    ended = {Status.INVALID: "WRONG", Status.OK: "no backward"}
    return {"error": error} | ({"ended": ended[result.status]} if result.status in ended else {})


def attention_section(study: AttentionStudy) -> Section:
    """For each precision tables of forward, of backward, of both, of memory and of errors, if these two are known."""
    rows, tables = attention_rows(study), []
    for precision in study.precisions:
        own = sorted((row for row in rows if row["precision"] is precision), key=_shape)
        tables += [_time_table(study, own, timed) for timed in TIMED]
        if any(row["saved_mib"] is not None for row in own):
            tables.append(_memory_table(study, own))
        if any(row["errors"] for row in own):
            tables.append(_error_table(study, own, "output", (Quantity.OUTPUT,)))
            tables.append(_error_table(study, own, "gradients", (Quantity.DQ, Quantity.DK, Quantity.DV)))
    keys = (*CSV_COLUMNS, *(ERROR_COLUMNS if study.grid.own else ()))
    charts = tuple(attention_charts(study, rows))
    return Section(name="results", tables=tuple(tables), rows=rows, keys=keys, pictures=charts)


def _shape(row: Row) -> tuple[int, int]:
    return row["context_length"], row["d_head"]


def _table(
    study: AttentionStudy,
    rows: Rows,
    title: str,
    columns: Sequence[Column],
    notes: Iterator[str],
    findings: Iterable[str] = (),
) -> Table:
    """One row for each head dimension and context length."""
    title = f"{title}, {rows[0]['precision']}, {settings(study)}"
    by_shape = sorted(pivoted(rows, (*SHAPE, "closed_form_mib"), "implementation"), key=lambda row: row["d_head"])
    return make_table(title, [*map(column, SHAPE), *columns], by_shape, notes, findings=findings)


def _time_table(study: AttentionStudy, rows: Rows, timed: str) -> Table:
    time = column(f"{timed}_mean_ms", unit="", drop_order=0, doubt=f"{timed}_is_doubted", instead="ended")
    columns = [across(implementation, time) for implementation in _available(study, rows)]
    return _table(study, rows, TITLES[timed], columns, _time_notes(study, rows, timed), _gains(study, rows, timed))


def _available(study: AttentionStudy, rows: Rows) -> list[Implementation]:
    return study.available(rows[0]["precision"])


def cells_of(rows: Rows, implementation: Implementation, *known: str) -> list[Row]:
    """The rows of one implementation that have values by these keys, the smallest shape first."""
    own = [row for row in rows if row["implementation"] is implementation]
    return [row for row in own if all(row[key] is not None for key in known)]


def _time_notes(study: AttentionStudy, rows: Rows, timed: str) -> Iterator[str]:
    mean = f"{timed}_mean_ms"
    yield f"In ms, mean ± standard deviation of {study.grid.passes} passes after {study.grid.warmup_passes} of warm-up."
    if timed == "forward":
        yield from _own_notes(study, rows)
        wanted = sum(map(len, study.grid.groups()))
        if len(study.results) < wanted:
            yield f"Only {len(study.results)} of the grid's {wanted} cells were measured: the study was interrupted."
    yield from doubt_notes([row[f"{timed}_warnings"] for row in rows if row[mean] is not None], "cells", PASSES)
    yield from _gains(study, rows, timed)
    largest = [(name, row) for name in _available(study, rows) for row in cells_of(rows, name, mean)[-1:] if row[mean]]
    if rates := [f"{name} {column(f'{timed}_tflops_per_s').cell(row)} ({_at(row)})" for name, row in largest]:
        convention = "a causal mask counting as full"
        if timed != "forward":
            convention += ", backward as twice forward, 2.5 times for kernels that compute the scores again"
            convention += ", as own is taken to do" if cells_of(rows, Implementation.OWN, mean) else ""
        yield f"TFLOP/s of the matrix products, {convention}: {', '.join(rates)}."
    if timed == "forward":
        yield from _first_passes(study, rows)


def _gains(study: AttentionStudy, rows: Rows, timed: str) -> Iterator[str]:
    """How fast the implementations are beside naive, and beside own."""
    mean = f"{timed}_mean_ms"
    others = [name for name in _available(study, rows) if name is not Implementation.NAIVE]
    naive = cells_of(rows, Implementation.NAIVE, mean)
    if gains := _quotients(timed, [(naive, cells_of(rows, name, mean), name) for name in others]):
        yield f"Times as fast as naive, at the largest shape that both can do: {', '.join(gains)}."
    own = cells_of(rows, Implementation.OWN, mean)
    beside = [
        (cells_of(rows, name, mean), own, name) for name in _available(study, rows) if name is not Implementation.OWN
    ]
    if gains := _quotients(timed, beside):
        yield f"Time of the others over that of own, at the largest shape that both can do: {', '.join(gains)}."


def _quotients(timed: str, pairs: Sequence[tuple[Rows, Rows, Implementation]]) -> list[str]:
    """For each triple: the first's time over the second's at the largest shape that has both, and the third as name."""
    mean, said = f"{timed}_mean_ms", []
    for firsts, seconds, name in pairs:
        by_shape = {_shape(row): row for row in firsts}
        for second in [row for row in seconds if row[mean] and _shape(row) in by_shape][-1:]:
            first = by_shape[_shape(second)]
            quotient = derived("speed_up", first[mean] / second[mean], first, second, prefix=f"{timed}_")
            said.append(f"{name} {column('speed_up').cell(quotient)} ({_at(second)})")
    return said


def _own_notes(study: AttentionStudy, rows: Rows) -> Iterator[str]:
    """What own is, and what went wrong with it, each message once."""
    if study.grid.own is None:
        return
    digest = study.grid.source.state if study.grid.source else None
    yield f"own is {study.grid.own}{f', of source {digest}' if digest else ''}."
    failed: dict[str, list[Row]] = {}
    for row in cells_of(rows, Implementation.OWN, "error") if Implementation.OWN in _available(study, rows) else ():
        failed.setdefault(row["error"], []).append(row)
    for error, cells in failed.items():
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        yield f"own, {cells[0]['ended']} at {_at(cells[0])}{more}: {error}"


def _at(row: Row) -> str:
    return f"d_head {row['d_head']}, context {row['context_length']}"


def _first_passes(study: AttentionStudy, rows: Rows) -> Iterator[str]:
    """What compiling takes, and why an implementation has no column."""
    times_s = [row["compile_s"] for row in rows if row["compile_s"] is not None]
    if times_s:
        yield (
            f"torch.compile takes {significant(min(times_s), 2)} to {significant(max(times_s), 2)} s a shape, in its "
            "first pass, which is not among the times."
        )
    for name in dict.fromkeys(study.grid.implementations):
        if name not in _available(study, rows) and (failed := cells_of(rows, name, "error")):
            yield f"No {name} in {failed[0]['precision']}: {failed[0]['error']}"


def _error_table(study: AttentionStudy, rows: Rows, name: str, quantities: Sequence[Quantity]) -> Table:
    error = column(f"{name.removesuffix('s')}_error", text=partial(_error, quantities=quantities))
    columns = [across(implementation, error) for implementation in _available(study, rows)]
    title = f"Error of attention's {name} against float64"
    return _table(study, rows, title, columns, _error_notes(study, rows, quantities))


def _error(row: Row, quantities: Sequence[Quantity]) -> str:
    """The largest distance of any of these quantities, and in brackets the largest relative one."""
    errors = [row["errors"].get(quantity) for quantity in quantities]
    if not all(errors):
        return str(row["ended"])
    mark = "WRONG " if row["status"] is Status.INVALID else ""
    if any(error.max_error is None for error in errors):
        return f"{mark}not finite"
    largest, relative = max(error.max_error for error in errors), max(error.relative or 0 for error in errors)
    return f"{mark}{scientific(largest)} ({scientific(relative)})"


def _error_notes(study: AttentionStudy, rows: Rows, quantities: Sequence[Quantity]) -> Iterator[str]:
    several = ", the largest of the three" if len(quantities) > 1 else ""
    yield (
        f"Largest distance of an element of {', '.join(quantities)} from written-out attention in float64 on the "
        f"same inputs; in brackets over the largest magnitude there{several}."
    )
    if lacking := [row for row in rows if row["status"] is Status.OK and not row["errors"]]:
        first = f"{lacking[0]['implementation']} at {_at(lacking[0])}"
        yield f"Memory lacked for float64 in {len(lacking)} cells, the first of which is {first}."
    for implementation in _available(study, rows):
        if known := [row for row in cells_of(rows, implementation) if row["errors"].keys() >= {*quantities}]:
            parts = [f"{quantity} {_largest_relative(known, quantity)}" for quantity in quantities]
            yield f"{implementation}, largest relative error of any shape: {', '.join(parts)}."


def _largest_relative(rows: Rows, quantity: Quantity) -> str:
    found = [row[f"{quantity}_relative_error"] for row in rows]
    return "not finite" if None in found else scientific(max(found))


def _memory_table(study: AttentionStudy, rows: Rows) -> Table:
    held = column("before_backward_mib", unit="", text=_held)
    names = _available(study, rows)
    columns = [across(name, replace(held, drop_order=order)) for order, name in enumerate(names)]
    columns.append(column("closed_form_mib", drop_order=len(names)))
    notes, findings = _memory_notes(study, rows), limit_notes(study, rows)
    return _table(study, rows, "Memory in use before backward", columns, notes, findings)


def _held(row: Row) -> str:
    """What was allocated before backward, and in brackets what forward added to it."""
    if row["saved_mib"] is None:
        return str(row["ended"])
    return f"{significant(row['before_backward_mib'])} ({significant(row['saved_mib'])})"


def _memory_notes(study: AttentionStudy, rows: Rows) -> Iterator[str]:
    yield "In MiB; in brackets what forward left for backward, its output included."
    yield from limit_notes(study, rows)
    for name in _available(study, rows):
        if known := cells_of(rows, name, "saved_mib"):
            yield from (f"{name}: from {text}" for text in growth_words(known, "it grows"))


def limit_notes(study: AttentionStudy, rows: Rows) -> Iterator[str]:
    """Where written-out attention runs out of memory, or would, and what of its largest shape takes how much."""
    naive = cells_of(rows, Implementation.NAIVE)
    largest = [row for row in naive if row["saved_mib"] is not None][-1:]
    failed = [row for row in naive if row["status"] is Status.OOM][:1]
    yield from map(_out_of_memory, failed)
    for row in largest:
        if not failed:
            yield _would_run_out(row, study.environment.device_memory_bytes if study.environment else None)
        matrix, queries = significant(row["matrix_mib"]), significant(row["queries_mib"])
        yield (
            f"At {_at(row)} naive's forward left {significant(row['saved_mib'])} MiB; in closed form "
            f"{significant(row['closed_form_mib'])}: softmax's weights {matrix}, the scaled queries {queries}, the "
            f"output {queries}."
        )


def _out_of_memory(row: Row) -> str:
    """At which size written-out attention runs out of memory."""
    asked = row["requested_mib"]
    request = "" if asked is None else f" when it asked for {_gib(asked)} GiB"
    return (
        f"naive runs out of memory at {_at(row)}{request}: one matrix of batch x T x T elements takes "
        f"{_gib(row['matrix_mib'])} GiB."
    )


def _would_run_out(row: Row, total_bytes: int | None) -> str:
    """At which context written-out attention would run out of memory."""
    peak, context = row["peak_mib"], row["context_length"]
    sentence = (
        f"naive does not run out of memory here: at {_at(row)} it peaks at {_gib(peak)} GiB, "
        f"{three_digits(peak / row['matrix_mib'])} times a matrix of batch x T x T elements"
    )
    if total_bytes:
        full = context * math.sqrt(total_bytes / MIB / peak)
        sentence += (
            f"; as it grows with the square of the context, it would fill {_gib(total_bytes / MIB)} GiB at a "
            f"context of about {full:,.0f}"
        )
    return f"{sentence}."


def _gib(size_mib: float) -> str:
    return significant(size_mib * MIB / GIB)


def growth_words(rows: Rows, grows: str) -> Iterator[str]:
    """How what is left for backward grows with the context, over the last two that are known of the widest head."""
    widest = [row for row in rows if row["d_head"] == rows[-1]["d_head"]]
    for shorter, longer in list(pairwise(widest))[-1:]:
        growth = longer["saved_mib"] / shorter["saved_mib"]
        first, last = shorter["context_length"], longer["context_length"]
        yield (
            f"context {first} to {last} {grows} {three_digits(growth)}-fold, as the "
            f"context to the power of {math.log(growth) / math.log(last / first):.2f} (d_head {longer['d_head']})."
        )


def write_attention_record(study: AttentionStudy, directory: Path) -> None:
    """Write attention.json: the grid, the environment, every raw time. Cheap enough to do after every cell."""
    write_atomically(directory / "attention.json", encode_json(study))


def write_attention(study: AttentionStudy, directory: Path) -> None:
    """Write attention.json, results.csv .md .tex .typ and plots/ into the directory, which is made if need be."""
    write_study("attention.json", study, [attention_section(study)], directory)


def settings(study: AttentionStudy) -> str:
    """What all cells share, in words."""
    device = "" if study.environment is None else f", {study.environment.identity.device_name}"
    causal = ", causal" if study.grid.causal else ""
    return f"batch {study.grid.batch_size}, no heads{causal}{device}"


def attention_charts(study: AttentionStudy, rows: Rows) -> Iterator[Chart]:
    """A chart of each quantity at each precision, where at least one cell has it."""
    for precision in study.precisions:
        own = [row for row in rows if row["precision"] is precision]
        for phase in PHASES:
            if any(row[f"{phase}_mean_ms"] is not None for row in own):
                y = Axis(label="time (ms)", is_log=True)
                title = f"{phase.capitalize()} pass of attention, {precision}"
                yield _chart(study, own, f"{phase}_{precision}", title, y, f"{phase}_mean_ms", f"{phase}_std_ms")
        if any(row["saved_mib"] is not None for row in own):
            y = Axis(label="memory (MiB)", is_log=True)
            title = f"What attention's forward leaves for backward, {precision}"
            yield _chart(study, own, f"memory_{precision}", title, y, "saved_mib")


def attention_lines(rows: Rows, d_head: int, key: str, std: str = "") -> list[Line]:
    """The values by this key against context length, one line for each implementation that has kernels."""
    points: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda row: row["context_length"]):
        if row["d_head"] == d_head and row["status"] is not Status.UNAVAILABLE:
            error = row[std] if std else None
            failure = row["ended"] or None if row[key] is None else None
            point = Point(x=row["context_length"], value=row[key], error=error, failure=failure)
            points.setdefault(row["implementation"], []).append(point)
    names = dict.fromkeys(row["implementation"] for row in rows if row["implementation"] in points)
    return [Line(name=name, points=tuple(points[name])) for name in names]


def _chart(study: AttentionStudy, rows: Rows, name: str, title: str, y: Axis, key: str, std: str = "") -> Chart:
    """Both axes logarithmic; memory beside what written-out attention must leave in closed form."""
    d_heads = sorted({row["d_head"] for row in rows})
    naive = [row for row in rows if row["implementation"] is Implementation.NAIVE and not std]
    panels = []
    for d_head in d_heads:
        lines = attention_lines(rows, d_head, key, std)
        closed_form = [replace(line, name=CLOSED_FORM) for line in attention_lines(naive, d_head, "closed_form_mib")]
        curves = [
            Curve(line=replace(line, points=line.known), colour="#999999", dash="--", width=5, opacity=0.6)
            for line in closed_form
        ]
        curves += [Curve(line=line, colour=COLOURS[own], marker=MARKS[own])
                   for line in lines if (own := Implementation(line.name))]  # fmt: skip
        x = doubling({float(point.x) for line in lines for point in line.points}, "context length (tokens)", 1.4)
        panels.append(Panel(x=x, y=y, title=f"d_head {d_head}", curves=curves))
    passes = f"{study.grid.passes} passes" if study.grid.passes > 1 else "1 pass"
    return Chart(
        name=name, title=title, settings=f"{settings(study)}, {passes}", panels=panels, columns=min(2, len(panels)),
        size=(5.0, 3.4), legend=4, is_shared=True,
    )  # fmt: skip
