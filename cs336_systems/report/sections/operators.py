"""The study of operators for people: attention, and what fusing does, as tables, pictures and
values as CSV.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product

from ...analysis.warnings import PASSES
from ...config import Device, Phase
from ...record import Status
from ...studies import operators
from ...text import counted
from ..columns import Column, Row, column, three_digits
from ..section import Section, Table, known, make_table
from ..words import CHANCE, GIB, GIGA, MIB, TERA, place_in, ratio, scientific, significant
from .study import (
    across,
    derived,
    doubt_notes,
    end_of,
    has_failed,
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
    f"{quantity}_{name}"
    for quantity in operators.Quantity
    for name in ("max_error", "relative_error")
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
TITLES = {
    "forward": "Forward pass of attention",
    "backward": "Backward pass of attention",
    "together": "Forward and backward pass of attention together",
}


def _attention_row(study: operators.AttentionStudy, result: operators.CellResult) -> Row:
    """The values of a cell, of a failed one too; None for what is not known."""
    grid, cell = study.grid, result.cell
    memory = result.memory if result.status is Status.OK else None
    closed_form = operators.naive_saved_bytes(grid, cell) / MIB
    row: Row = {
        "implementation": cell.implementation,
        "precision": cell.precision,
        "d_head": cell.d_head,
        "context_length": cell.context_length,
        "batch_size": grid.batch_size,
        "causal": grid.causal,
        "device_name": study.environment.identity.device_name if study.environment else None,
        "passes": grid.passes,
        **end_of(result.status, result.failure),
        **_end_of_own(study, result),
        "requested_mib": ratio(result.failure.requested_bytes if result.failure else None, MIB),
        "before_forward_mib": memory and memory.before_forward_bytes / MIB,
        "before_backward_mib": memory and memory.before_backward_bytes / MIB,
        "saved_mib": memory and memory.saved_bytes / MIB,
        "peak_mib": memory and memory.peak_bytes / MIB,
        "naive_saved_closed_form_mib": closed_form
        if cell.implementation is operators.Implementation.NAIVE
        else None,
        "closed_form_mib": closed_form,
        "matrix_mib": operators.weights_bytes(grid, cell) / MIB,
        "queries_mib": operators.rows_bytes(grid, cell) / MIB,
        "compile_s": result.first_pass_s
        if cell.implementation is operators.Implementation.COMPILED
        else None,
    }
    for timed, phase in TIMED.items():
        row |= times_ms(result.measurement(phase), f"{timed}_")
        rate = ratio(
            operators.attention_flops(grid, cell, phase) / TERA * 1e3, row[f"{timed}_mean_ms"]
        )
        row |= derived(f"{timed}_tflops_per_s", rate, row, prefix=f"{timed}_")
    errors = {error.quantity: error for error in result.errors}
    for quantity in operators.Quantity:
        error = errors.get(quantity)
        row[f"{quantity}_max_error"] = error and error.max_error
        row[f"{quantity}_relative_error"] = error and error.relative
    return row | {"errors": errors}


def _end_of_own(study: operators.AttentionStudy, result: operators.CellResult) -> Row:
    """How a cell of the user's own ended, or why it has no backward: the error with the place in
    the file.
    """
    if result.cell.implementation is not operators.Implementation.OWN or result.failure is None:
        return {}
    place = place_in(study.grid.own or "", result.failure)
    error = result.failure.message
    if place and place not in error:  # that of a syntax error has it
        error += f" ({place})"
    ended = {Status.INVALID: "WRONG", Status.OK: "no backward"}
    return {"error": error} | ({"ended": ended[result.status]} if result.status in ended else {})


def attention_section(study: operators.AttentionStudy) -> Section:
    """For each precision tables of forward, of backward, of both, of memory and of errors, if
    these two are known.
    """
    rows, tables = [_attention_row(study, result) for result in study.results], []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        own = sorted((row for row in rows if row["precision"] is precision), key=_shape)
        tables += [_time_table(study, own, timed) for timed in TIMED]
        if any(row["saved_mib"] is not None for row in own):
            tables.append(_memory_table(study, own))
        if any(row["errors"] for row in own):
            tables.append(_error_table(study, own, "output", (operators.Quantity.OUTPUT,)))
            tables.append(
                _error_table(
                    study,
                    own,
                    "gradients",
                    (operators.Quantity.DQ, operators.Quantity.DK, operators.Quantity.DV),
                )
            )
    keys = (*CSV_COLUMNS, *(ERROR_COLUMNS if study.grid.own else ()))
    return Section(name="results", tables=tuple(tables), rows=rows, keys=keys)


def _shape(row: Row) -> tuple[int, int]:
    return row["context_length"], row["d_head"]


def _at(row: Row) -> str:
    return f"d_head {row['d_head']}, context {row['context_length']}"


def _table(
    study: operators.AttentionStudy,
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
    device = "" if study.environment is None else f", {study.environment.identity.device_name}"
    shared = (
        f"batch {study.grid.batch_size}, no heads{', causal' if study.grid.causal else ''}{device}"
    )
    title = f"{title}, {rows[0]['precision']}, {shared}"
    columns = [across(name, cell) for name in study.available(rows[0]["precision"])]
    by_shape = sorted(
        pivoted(rows, (*SHAPE, "closed_form_mib"), "implementation"), key=lambda row: row["d_head"]
    )
    columns = [*map(column, SHAPE), *columns, *others]
    return make_table(title, columns, by_shape, [*notes, *findings], findings=findings)


def cells_of(rows: Rows, implementation: operators.Implementation, *known: str) -> list[Row]:
    """The rows of one implementation that have values by these keys, the smallest shape first."""
    own = [row for row in rows if row["implementation"] is implementation]
    return [row for row in own if all(row[key] is not None for key in known)]


def _time_table(study: operators.AttentionStudy, rows: Rows, timed: str) -> Table:
    time = column(
        f"{timed}_mean_ms", unit="", drop_order=0, doubt=f"{timed}_is_doubted", instead="ended"
    )
    notes = [
        (
            f"In ms, mean ± standard deviation of {study.grid.passes} passes after "
            f"{study.grid.warmup_passes} of warm-up."
        ),
        *(_grid_notes(study, rows) if timed == "forward" else ()),
        *doubt_notes(
            [row[f"{timed}_warnings"] for row in rows if row[f"{timed}_mean_ms"] is not None],
            "cells",
            PASSES,
        ),
    ]
    return _table(study, rows, TITLES[timed], time, notes, list(_gains(study, rows, timed)))


def _grid_notes(study: operators.AttentionStudy, rows: Rows) -> Iterator[str]:
    """What own is, which cells were not measured, and each failure that no column shows, once."""
    names = study.available(rows[0]["precision"])
    yield CHANCE
    if study.grid.own is not None:
        digest = study.grid.source.state if study.grid.source else None
        yield f"own is {study.grid.own}{f', of source {digest}' if digest else ''}."
    failed: dict[str, list[Row]] = {}
    for row in cells_of(rows, operators.Implementation.OWN, "error"):
        failed.setdefault(row["error"], []).append(row)
    for error, cells in failed.items():
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        yield f"own, {cells[0]['ended']} at {_at(cells[0])}{more}: {error}"
    for name in dict.fromkeys(study.grid.implementations):
        if (
            name not in names
            and name is not operators.Implementation.OWN
            and (lost := cells_of(rows, name, "error"))
        ):
            yield f"No {name} in {lost[0]['precision']}: {lost[0]['error']}"
    wanted = sum(map(len, study.grid.groups()))
    if len(study.results) < wanted:
        yield (
            f"Only {len(study.results)} of the grid's {wanted} cells were measured: the study "
            "was interrupted."
        )


def _gains(study: operators.AttentionStudy, rows: Rows, timed: str) -> Iterator[str]:
    """How fast the implementations are beside naive, and beside own."""
    times = {
        name: cells_of(rows, name, f"{timed}_mean_ms")
        for name in study.available(rows[0]["precision"])
    }
    naive, own = (
        times.get(operators.Implementation.NAIVE, []),
        times.get(operators.Implementation.OWN, []),
    )
    quotients = (
        _quotient(timed, naive, cells, name) for name, cells in times.items() if cells is not naive
    )
    if gains := list(filter(None, quotients)):
        yield f"Times as fast as naive, at the largest shape that both can do: {', '.join(gains)}."
    quotients = (
        _quotient(timed, cells, own, name) for name, cells in times.items() if cells is not own
    )
    if gains := list(filter(None, quotients)):
        yield (
            "Time of the others over that of own, at the largest shape that both can do: "
            f"{', '.join(gains)}."
        )


def _quotient(timed: str, firsts: Rows, seconds: Rows, name: str) -> str | None:
    """The first's time over the second's at the largest shape that has both, in words; None if
    there is none.
    """
    mean, by_shape = f"{timed}_mean_ms", {_shape(row): row for row in firsts}
    second = next((row for row in reversed(seconds) if row[mean] and _shape(row) in by_shape), None)
    if second is None:
        return None
    first = by_shape[_shape(second)]
    quotient = derived("speed_up", first[mean] / second[mean], first, second, prefix=f"{timed}_")
    return f"{name} {column('speed_up').cell(quotient)} ({_at(second)})"


def _error_table(
    study: operators.AttentionStudy, rows: Rows, name: str, quantities: Sequence[operators.Quantity]
) -> Table:
    error = column(f"{name.removesuffix('s')}_error", text=partial(_error, quantities=quantities))
    several = ", the largest of the three" if len(quantities) > 1 else ""
    note = (
        f"Largest distance of an element of {', '.join(quantities)} from written-out attention in "
        f"float64 on the same inputs; in brackets over the largest magnitude there{several}. "
        "Empty where float64 did not fit into memory."
    )
    return _table(study, rows, f"Error of attention's {name} against float64", error, [note])


def _error(row: Row, quantities: Sequence[operators.Quantity]) -> str:
    """The largest distance of any of these quantities, and in brackets the largest relative one."""
    errors = [row["errors"].get(quantity) for quantity in quantities]
    if not all(errors):
        return str(row["ended"])
    mark = "WRONG " if row["status"] is Status.INVALID else ""
    if any(error.max_error is None for error in errors):
        return f"{mark}not finite"
    largest, relative = (
        max(error.max_error for error in errors),
        max(error.relative or 0 for error in errors),
    )
    return f"{mark}{scientific(largest)} ({scientific(relative)})"


def _memory_table(study: operators.AttentionStudy, rows: Rows) -> Table:
    held = column("before_backward_mib", unit="", text=_held)
    note = "In MiB; in brackets what forward left for backward, its output included."
    title, closed_form = "Memory in use before backward", column("closed_form_mib", drop_order=1)
    return _table(study, rows, title, held, [note], list(limit_notes(rows)), closed_form)


def _held(row: Row) -> str:
    """What was allocated before backward, and in brackets what forward added to it."""
    if row["saved_mib"] is None:
        return str(row["ended"])
    return f"{significant(row['before_backward_mib'])} ({significant(row['saved_mib'])})"


def limit_notes(rows: Rows) -> Iterator[str]:
    """Where written-out attention runs out of memory, and what of its largest shape takes how
    much.
    """
    naive = cells_of(rows, operators.Implementation.NAIVE)
    for row in [row for row in naive if row["status"] is Status.OOM][:1]:
        asked = row["requested_mib"]
        request = "" if asked is None else f" when it asked for {_gib(asked)} GiB"
        yield (
            f"naive runs out of memory at {_at(row)}{request}: one matrix of batch x T x T "
            f"elements takes {_gib(row['matrix_mib'])} GiB."
        )
    for row in [row for row in naive if row["saved_mib"] is not None][-1:]:
        matrix, queries = significant(row["matrix_mib"]), significant(row["queries_mib"])
        yield (
            f"At {_at(row)} naive's forward left {significant(row['saved_mib'])} MiB; in closed "
            f"form {significant(row['closed_form_mib'])}: softmax's weights {matrix}, the scaled "
            f"queries {queries}, the output {queries}."
        )


def _gib(size_mib: float) -> str:
    return significant(size_mib * MIB / GIB)


def fusion_section(study: operators.FusionStudy) -> Section:
    """A table for each precision and direction; the values have a row for each version and
    direction.
    """
    eager = {
        (row.op, row.precision, row.phase): row
        for row in study.rows
        if row.version is operators.Version.EAGER
    }
    rows = [_fusion_row(study, row, eager[row.op, row.precision, row.phase]) for row in study.rows]
    tables, grid = [], study.grid
    shared = (
        f"batch {grid.batch_size}, context {grid.context_length}, width {grid.width}, attention "
        f"{grid.num_heads} heads of {grid.d_head}, {study.environment.identity.device_name}"
    )
    for precision, phase in product(
        dict.fromkeys(row["precision"] for row in rows), operators.PHASES
    ):
        own = [row for row in rows if (row["precision"], row["phase"]) == (precision, phase)]
        if not own:
            continue
        findings = list(_savings(own))
        title = f"Fusion op by op, {phase}, {precision}, {shared}"
        failures = [
            f"{row['op']} {row['version']}: {row['error']}"
            for row in own
            if row["error"] is not None
        ]
        notes = [*_fusion_notes(study, own), *findings, *failures]
        tables.append(
            make_table(title, known(FUSION_COLUMNS, own), own, notes, has_failed, findings)
        )
    return Section(name="results", tables=tuple(tables), rows=rows, keys=FUSION_CSV_COLUMNS)


def _fusion_row(
    study: operators.FusionStudy, row: operators.FusionRow, eager: operators.FusionRow
) -> Row:
    """The values of one version and direction; None for what is not known."""
    device_name = study.environment.identity.device_name
    rate = ratio(row.must_move_bytes, row.measurement.median_s if row.measurement else None)
    own, slow = times_ms(row.measurement), times_ms(eager.measurement)
    pair = () if row is eager else (slow, own)
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
        **own,
        **derived("gb_per_s", ratio(rate, GIGA), own),
        **derived("bandwidth_share", ratio(rate, promised_bandwidth(device_name)), own),
        **derived("speed_up", ratio(slow["median_ms"], own["median_ms"]), *pair),
        "tflops_per_s": ratio(row.matmul_flops / GIGA or None, own["median_ms"]),
        "max_error": row.max_error,
        "error_words": "not finite" if row.status is Status.OK else "",
    }


def _fusion_notes(study: operators.FusionStudy, rows: Rows) -> Iterator[str]:
    yield (
        "must move: inputs read once and results written once; moved: operands and results of "
        f"every operation that was launched. Median ± standard deviation of {study.grid.passes} "
        "passes; error against the same mathematics in float64."
    )
    yield from doubt_notes(
        [row["warnings"] for row in rows if row["median_ms"] is not None], "rows", PASSES
    )
    if study.grid.device is Device.CPU:
        yield "On a CPU operators take the place of kernels."
    yield CHANCE


def _savings(rows: Rows) -> Iterator[str]:
    """What fusing each operation saves."""
    for op in dict.fromkeys(row["op"] for row in rows):
        versions = {row["version"]: row for row in rows if row["op"] is op}
        eager = versions[operators.Version.EAGER]
        if eager["status"] is not Status.OK or eager["moved_mib"] is None:
            continue
        excess = significant(eager["moved_mib"] / eager["must_move_mib"], 3)
        texts = [
            (
                f"written out {counted(eager['kernels'], 'kernel')} that move {excess} times what "
                "must move"
            )
        ]
        for version, row in versions.items():
            if version is not operators.Version.EAGER and (gain := column("speed_up").cell(row)):
                kernels = f"{counted(row['kernels'], 'kernel')}, " if row["kernels"] else ""
                texts.append(f"{version} {kernels}{gain} times as fast")
        yield f"{op}: {'; '.join(texts)}."
