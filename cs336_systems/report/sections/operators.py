"""The study of operators for people: attention, and what fusing does, as tables, pictures and
values as CSV.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ...analysis.warnings import PASSES
from ...config import Device, Phase
from ...record import Status
from ...studies.operators import (
    PHASES,
    AttentionStudy,
    CellResult,
    FusionRow,
    FusionStudy,
    Implementation,
    Quantity,
    Version,
    attention_flops,
    naive_saved_bytes,
    rows_bytes,
    weights_bytes,
)
from ..columns import Column, Row, column, columns_of, three_digits
from ..section import Section, Table, known, make_table
from ..words import CHANCE, GIB, GIGA, MIB, TERA, mixed_notes, place_in, ratio, significant
from .study import (
    across,
    derived,
    doubt_notes,
    end_of,
    has_failed,
    missing_notes,
    pivoted,
    promised_bandwidth,
    times_ms,
)

Rows = Sequence[Row]
CSV_COLUMNS = (
    "implementation",
    "precision",
    "d_head",
    "context_length",
    "batch_size",
    "causal",
    "device_name",
    "passes",
    "status",
    "error",
    "requested_mib",
    "forward_mean_ms",
    "forward_std_ms",
    "forward_tflops_per_s",
    "backward_mean_ms",
    "backward_std_ms",
    "backward_tflops_per_s",
    "before_forward_mib",
    "before_backward_mib",
    "saved_mib",
    "naive_saved_closed_form_mib",
    "peak_mib",
    "compile_s",
    "forward_warnings",
    "backward_warnings",
    "together_mean_ms",
    "together_std_ms",
    "together_tflops_per_s",
    "together_warnings",
)
"""Of the grid of attention; ERROR_COLUMNS follow in studies with an own implementation."""
ERROR_COLUMNS = tuple(
    f"{quantity}_{name}" for quantity in Quantity for name in ("max_error", "relative_error")
)
FUSION_CSV_COLUMNS = (
    "op",
    "precision",
    "version",
    "phase",
    "device_name",
    "status",
    "error",
    "kernels",
    "kernel_names",
    "must_move_mib",
    "moved_mib",
    "median_ms",
    "mean_ms",
    "std_ms",
    "gb_per_s",
    "bandwidth_share",
    "speed_up",
    "tflops_per_s",
    "max_error",
    "warnings",
)
FUSION_COLUMNS = (
    column("op"),
    column("version"),
    column("kernels"),
    column("must_move_mib"),
    column("moved_mib", drop_order=7),
    column("median_ms"),
    column("gb_per_s", drop_order=5, write=three_digits),
    column("bandwidth_share"),
    column("speed_up", unit="vs eager", drop_order=1),
    column("max_error"),
)
SHAPE = ("d_head", "context_length")
TIMED = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD, "together": Phase.STEP}
PASS_NAMES = {"forward": "Forward pass", "backward": "Backward pass"}
"""Of the tables of times; those of both passes together are in the CSV."""


def _attention_row(study: AttentionStudy, result: CellResult) -> Row:
    """The values of a cell, of a failed one too; None for what is not known."""
    grid, cell = study.grid, result.cell
    closed_form_mib = naive_saved_bytes(grid, cell) / MIB
    row: Row = {
        "implementation": cell.implementation,
        "precision": cell.precision,
        "d_head": cell.d_head,
        "context_length": cell.context_length,
        "batch_size": grid.batch_size,
        "causal": grid.causal,
        "device_name": _device_name(study),
        "passes": grid.passes,
        **end_of(result.status, result.failure),
        **_end_of_own(study, result),
        "requested_mib": None,
        "naive_saved_closed_form_mib": None,
        "closed_form_mib": closed_form_mib,
        "matrix_mib": weights_bytes(grid, cell) / MIB,
        "queries_mib": rows_bytes(grid, cell) / MIB,
        "compile_s": None,
    }
    if result.failure is not None:
        row["requested_mib"] = ratio(result.failure.requested_bytes, MIB)
    if cell.implementation is Implementation.NAIVE:
        row["naive_saved_closed_form_mib"] = closed_form_mib
    if cell.implementation is Implementation.COMPILED:
        row["compile_s"] = result.first_pass_s
    row |= _memory_mib(result)
    for timed, phase in TIMED.items():
        row |= times_ms(result.measurement(phase), f"{timed}_")
        tera_ms = attention_flops(grid, cell, phase) / TERA * 1e3
        rate = ratio(tera_ms, row[f"{timed}_mean_ms"])
        row |= derived(f"{timed}_tflops_per_s", rate, row, prefix=f"{timed}_")
    row |= dict.fromkeys(ERROR_COLUMNS)
    for error in result.errors:
        row[f"{error.quantity}_max_error"] = error.max_error
        row[f"{error.quantity}_relative_error"] = error.relative
    return row


def _memory_mib(result: CellResult) -> Row:
    """The memory of the cell's passes in MiB; None for a cell that failed."""
    memory = result.memory if result.status is Status.OK else None
    row: Row = {}
    for name in ("before_forward", "before_backward", "saved", "peak"):
        row[f"{name}_mib"] = memory and getattr(memory, f"{name}_bytes") / MIB
    return row


def _device_name(study: AttentionStudy | FusionStudy) -> str | None:
    """Name of the device that the study was measured on; None if the study does not record it, or
    names several.
    """
    names = set()
    for environment in (study.environment, *study.other_environments):
        if environment is not None:
            names.add(environment.identity.device_name)
    return names.pop() if len(names) == 1 else None


def _end_of_own(study: AttentionStudy, result: CellResult) -> Row:
    """How a cell of the user's own ended, or why it has no backward: the error with the place in
    the file.
    """
    if result.cell.implementation is not Implementation.OWN or result.failure is None:
        return {}
    place = place_in(study.grid.own or "", result.failure)
    end: Row = {"error": result.failure.message}
    if place and place not in end["error"]:  # that of a syntax error has it
        end["error"] += f" ({place})"
    if result.status is Status.INVALID:
        end["ended"] = "WRONG"
    if result.status is Status.OK:
        end["ended"] = "no backward"
    return end


def attention_section(study: AttentionStudy) -> Section:
    """For each precision tables of forward, of backward, and of memory if it is known."""
    rows = [_attention_row(study, result) for result in study.results]
    tables = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        cells = sorted((row for row in rows if row["precision"] is precision), key=_shape)
        tables += [_time_table(study, cells, timed) for timed in PASS_NAMES]
        if any(row["saved_mib"] is not None for row in cells):
            tables.append(_memory_table(study, cells))
    keys: tuple[str, ...] = CSV_COLUMNS
    if study.grid.own:
        keys += ERROR_COLUMNS
    return Section(name="results", tables=tuple(tables), rows=rows, keys=keys)


def _shape(row: Row) -> tuple[int, int]:
    """Context length and head dimension of a row, by which rows are ordered."""
    return row["context_length"], row["d_head"]


def _at(row: Row) -> str:
    """Head dimension and context length of a row in words."""
    return f"d_head {row['d_head']}, context {row['context_length']}"


def _table(
    study: AttentionStudy,
    rows: Rows,
    title: str,
    cell: Column,
    notes: Iterable[str],
    findings: Sequence[str] = (),
    *others: Column,
) -> Table:
    """One row for each head dimension and context length, one column for each implementation
    that has kernels.
    """
    precision = rows[0]["precision"]
    device_name = _device_name(study)
    parts = [title, precision, f"batch {study.grid.batch_size}", "no heads"]
    if study.grid.causal:
        parts.append("causal")
    if device_name is not None:
        parts.append(device_name)
    by_shape = pivoted(rows, (*SHAPE, "closed_form_mib"), "implementation")
    by_shape.sort(key=lambda row: row["d_head"])
    implementations = [across(name, cell) for name in study.available(precision)]
    columns = columns_of(*SHAPE, *implementations, *others)
    return make_table(", ".join(parts), columns, by_shape, [*notes, *findings], findings=findings)


def cells_of(rows: Rows, implementation: Implementation, *known: str) -> list[Row]:
    """The rows of one implementation that have values by these keys, the smallest shape first."""
    cells = []
    for row in rows:
        is_known = all(row[key] is not None for key in known)
        if row["implementation"] is implementation and is_known:
            cells.append(row)
    return cells


def _time_table(study: AttentionStudy, rows: Rows, timed: str) -> Table:
    """Times of one pass, and how they compare with those of naive and own."""
    time = column(f"{timed}_mean_ms", drop_order=0, doubt=f"{timed}_is_doubted", instead="ended")
    notes = [
        f"Mean ± standard deviation of {study.grid.passes} passes after "
        f"{study.grid.warmup_passes} of warm-up."
    ]
    if timed == "forward":
        notes += _grid_notes(study, rows)
    codes = [row[f"{timed}_warnings"] for row in rows if row[f"{timed}_mean_ms"] is not None]
    notes += doubt_notes(codes, "cells", PASSES)
    return _table(
        study,
        rows,
        f"{PASS_NAMES[timed]} of attention",
        time,
        notes,
        list(_gains(study, rows, timed)),
    )


def _grid_notes(study: AttentionStudy, rows: Rows) -> Iterator[str]:
    """What own is, which cells were not measured, and each failure that no column shows, once."""
    grid = study.grid
    available = study.available(rows[0]["precision"])
    yield CHANCE
    if grid.own is not None:
        source = ""
        if grid.source and grid.source.state:
            source = f", of source {grid.source.state}"
        yield f"own is {grid.own}{source}."
    failed: dict[str, list[Row]] = {}
    for row in cells_of(rows, Implementation.OWN, "error"):
        failed.setdefault(row["error"], []).append(row)
    for error, cells in failed.items():
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        yield f"own, {cells[0]['ended']} at {_at(cells[0])}{more}: {error}"
    for name in dict.fromkeys(grid.implementations):
        if name in available or name is Implementation.OWN:
            continue
        for row in cells_of(rows, name, "error")[:1]:
            yield f"No {name} in {row['precision']}: {row['error']}"
    yield from caveats_of_operators(study)


def caveats_of_operators(study: AttentionStudy | FusionStudy) -> list[str]:
    """Notes on cells that were not measured, and on unlike conditions of the others."""
    wanted = 0
    for group in study.grid.groups():
        wanted += sum(len(cell.rows) for cell in group)
    environments = [study.environment, *study.other_environments]
    return [*missing_notes(len(study.rows), wanted), *mixed_notes(environments)]


def _gains(study: AttentionStudy, rows: Rows, timed: str) -> Iterator[str]:
    """Findings on how fast the implementations are relative to the user's own or, without one, to
    naive attention.
    """
    precision = rows[0]["precision"]
    baseline, words = Implementation.NAIVE, "times as fast as naive"
    if study.grid.own:
        baseline, words = Implementation.OWN, "time of the others over that of own"
    of_baseline = cells_of(rows, baseline, f"{timed}_mean_ms")
    gains: dict[str, list[str]] = {}
    for name in study.available(precision):
        cells = cells_of(rows, name, f"{timed}_mean_ms")
        # own is what is to be judged, so its time is the one below the line
        pair = (cells, of_baseline) if study.grid.own else (of_baseline, cells)
        quotient, shape = _quotient(timed, *pair)
        if quotient and name is not baseline:
            gains.setdefault(shape, []).append(f"{name} {quotient}")
    if gains:
        by_shape = "; ".join(f"{', '.join(of)} at {shape}" for shape, of in gains.items())
        which = f"{PASS_NAMES[timed]}, {precision}"
        yield f"{which}, {words} at the largest shape that both can do: {by_shape}."


def _quotient(timed: str, firsts: Rows, seconds: Rows) -> tuple[str, str]:
    """How many times the first rows' time is the second's at the largest shape that both have, and
    this shape, in words; empty if there is none.
    """
    mean = f"{timed}_mean_ms"
    by_shape = {_shape(row): row for row in firsts}
    for second in reversed(seconds):
        first = by_shape.get(_shape(second))
        if first is not None and second[mean]:
            speed_up = first[mean] / second[mean]
            cell = derived("speed_up", speed_up, first, second, prefix=f"{timed}_")
            return column("speed_up").cell(cell), _at(second)
    return "", ""


def _memory_table(study: AttentionStudy, rows: Rows) -> Table:
    """The table of memory in use before backward, with notes on where naive attention runs out of
    memory.
    """
    held = column("before_backward_mib", text=_held)
    note = "In brackets what forward left for backward, its output included."
    title = "Memory in use before backward"
    closed_form = column("closed_form_mib", drop_order=1)
    return _table(study, rows, title, held, [note], list(limit_notes(rows)), closed_form)


def _held(row: Row) -> str:
    """A table's cell: memory in use before backward and, in brackets, what forward added to it."""
    if row["saved_mib"] is None:
        return str(row["ended"])
    return f"{significant(row['before_backward_mib'])} ({significant(row['saved_mib'])})"


def limit_notes(rows: Rows) -> Iterator[str]:
    """Where written-out attention runs out of memory, and what of its largest shape takes how
    much.
    """
    naive = cells_of(rows, Implementation.NAIVE)
    failed = [row for row in naive if row["status"] is Status.OOM]
    for row in failed[:1]:
        asked = row["requested_mib"]
        request = "" if asked is None else f" when it asked for {_gib(asked)} GiB"
        yield (
            f"naive runs out of memory at {_at(row)}{request}: one matrix of batch x T x T "
            f"elements takes {_gib(row['matrix_mib'])} GiB."
        )
    for row in cells_of(rows, Implementation.NAIVE, "saved_mib")[-1:]:
        matrix, queries = significant(row["matrix_mib"]), significant(row["queries_mib"])
        yield (
            f"At {_at(row)} naive's forward left {significant(row['saved_mib'])} MiB; in closed "
            f"form {significant(row['closed_form_mib'])}: softmax's weights {matrix}, the scaled "
            f"queries {queries}, the output {queries}."
        )


def _gib(size_mib: float) -> str:
    """A size in MiB, written in GiB."""
    return significant(size_mib * MIB / GIB)


def fusion_section(study: FusionStudy) -> Section:
    """A table for each precision and direction; the values have a row for each version and
    direction.
    """
    eager = {
        (row.op, row.precision, row.phase): row
        for row in study.rows
        if row.version is Version.EAGER
    }
    rows = [_fusion_row(study, row, eager[row.op, row.precision, row.phase]) for row in study.rows]
    tables = []
    for precision, phase in product(dict.fromkeys(row["precision"] for row in rows), PHASES):
        part = [row for row in rows if (row["precision"], row["phase"]) == (precision, phase)]
        if part:
            tables.append(_fusion_table(study, part, f"{phase}, {precision}"))
    return Section(name="results", tables=tuple(tables), rows=rows, keys=FUSION_CSV_COLUMNS)


def _fusion_table(study: FusionStudy, rows: Rows, which: str) -> Table:
    """The versions of each operation in one direction and precision."""
    grid = study.grid
    title = (
        f"Fusion op by op, {which}, batch {grid.batch_size}, context {grid.context_length}, width "
        f"{grid.width}, attention {grid.num_heads} heads of {grid.d_head}"
    )
    if device_name := _device_name(study):
        title += f", {device_name}"
    failures = [
        f"{row['op']} {row['version']}: {row['error']}" for row in rows if row["error"] is not None
    ]
    notes = [*_fusion_notes(study, rows), *failures]
    return make_table(title, known(FUSION_COLUMNS, rows), rows, notes, has_failed)


def _fusion_row(study: FusionStudy, row: FusionRow, eager: FusionRow) -> Row:
    """The values of one version and direction; None for what is not known."""
    device_name = _device_name(study)
    rate = None
    if row.measurement:
        rate = ratio(row.must_move_bytes, row.measurement.median_s)
    bandwidth = promised_bandwidth(device_name or "")
    times, eager_times = times_ms(row.measurement), times_ms(eager.measurement)
    speed_up = ratio(eager_times["median_ms"], times["median_ms"])
    pair = () if row is eager else (eager_times, times)
    return {
        "op": row.op,
        "precision": row.precision,
        "version": row.version,
        "phase": row.phase,
        "device_name": device_name,
        **end_of(row.status, row.failure),
        "kernels": len(row.kernels) or None,
        "kernel_names": "; ".join(row.kernels),
        "must_move_mib": row.must_move_bytes / MIB,
        "moved_mib": ratio(row.moved_bytes, MIB),
        **times,
        **derived("gb_per_s", ratio(rate, GIGA), times),
        **derived("bandwidth_share", ratio(rate, bandwidth), times),
        **derived("speed_up", speed_up, *pair),
        "tflops_per_s": ratio(row.matmul_flops / GIGA or None, times["median_ms"]),
        "max_error": row.max_error,
        "error_words": "not finite" if row.status is Status.OK else "",
    }


def _fusion_notes(study: FusionStudy, rows: Rows) -> Iterator[str]:
    """What is measured, which times are in doubt, and what may be chance."""
    yield (
        "must move: inputs read once and results written once; moved: operands and results of "
        f"every operation that was launched. Median ± standard deviation of {study.grid.passes} "
        "passes; error against the same mathematics in float64."
    )
    codes = [row["warnings"] for row in rows if row["median_ms"] is not None]
    yield from doubt_notes(codes, "rows", PASSES)
    if study.grid.device is Device.CPU:
        yield "On a CPU operators take the place of kernels."
    yield from caveats_of_operators(study)
    yield CHANCE
