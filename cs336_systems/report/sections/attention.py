"""The attention grid for people: times and memory as tables, pictures and sentences, and every value as CSV."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from cs336_systems.analysis.warnings import PASSES
from cs336_systems.config import Phase, Precision
from cs336_systems.files import encode_json, write_atomically
from cs336_systems.record import Status
from cs336_systems.report.columns import Column
from cs336_systems.report.doubts import codes_text, doubt_notes, ratio_text, time_text
from cs336_systems.report.numbers import significant
from cs336_systems.report.section import Section
from cs336_systems.report.sections.attention_plots import PHASES, attention_pictures, settings
from cs336_systems.report.sections.study import write_study
from cs336_systems.report.table import Table
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.studies.attention_records import (
    AttentionCell,
    AttentionStudy,
    CellResult,
    Implementation,
    matmul_flops,
    naive_saved_bytes,
    rows_bytes,
    weights_bytes,
)
from cs336_systems.studies.records import CellStatus

MIB, GIB = 2**20, 2**30
CSV_COLUMNS = (
    "implementation", "precision", "d_head", "context_length", "batch_size", "causal", "device_name", "passes",
    "status", "error", "requested_mib",
    "forward_mean_ms", "forward_std_ms", "forward_tflops_per_s",
    "backward_mean_ms", "backward_std_ms", "backward_tflops_per_s",
    "before_forward_mib", "before_backward_mib", "saved_mib", "naive_saved_closed_form_mib", "peak_mib", "compile_s",
    "forward_warnings", "backward_warnings",
)  # fmt: skip


def attention_tables(study: AttentionStudy) -> list[Table]:
    """For each precision a table of forward, one of backward, and, where there is an allocator to ask, of memory."""
    tables = []
    for precision in study.precisions:
        tables += [_time_table(study, precision, phase) for phase in PHASES]
        if any(result.memory for result in study.results_of(precision)):
            tables.append(_memory_table(study, precision))
    return tables


def _time_table(study: AttentionStudy, precision: Precision, phase: Phase) -> Table:
    def cell(result: CellResult) -> str:
        measured = result.measurement(phase)
        std_ms = None if measured is None or measured.stdev_s is None else measured.stdev_s * 1e3
        return "" if measured is None else time_text(measured.mean_s * 1e3, std_ms, result.warnings(phase))

    timed = [result.warnings(phase) for result in study.results_of(precision) if result.measurement(phase)]
    notes = [
        f"In ms, mean ± standard deviation of {study.grid.passes} passes after {study.grid.warmup_passes} of warm-up.",
        *doubt_notes([codes_text(found) for found in timed], "cells", PASSES),
        *_speed_ups(study, precision, phase),
        *_rates(study, precision, phase),
        *(_compile_times(study, precision) if phase is Phase.FORWARD else ()),
        *(_why_missing(study, precision) if phase is Phase.FORWARD else ()),
    ]
    return _table(study, precision, f"{phase.capitalize()} pass of attention", cell, notes)


def _table(
    study: AttentionStudy,
    precision: Precision,
    title: str,
    cell: Callable[[CellResult], str],
    notes: Sequence[str],
    closed_form: bool = False,
) -> Table:
    """One row for each head dimension and context length, one column for each implementation."""
    implementations = study.available(precision)
    by_cell = {(r.cell.d_head, r.cell.context_length, r.cell.implementation): r for r in study.results_of(precision)}
    shapes = sorted({(d_head, context_length) for d_head, context_length, _ in by_cell})
    rows = []
    for d_head, context_length in shapes:
        results = [by_cell.get((d_head, context_length, implementation)) for implementation in implementations]
        texts = ["" if r is None else cell(r) if r.status is CellStatus.OK else _words(r.status) for r in results]
        if closed_form:
            shape = _naive(precision, d_head, context_length)
            texts.append(significant(naive_saved_bytes(study.grid, shape) / MIB))
        rows.append((str(d_head), str(context_length), *texts))
    own: list[Column[object]] = [
        Column(name, drop_order=rank if closed_form else 0) for rank, name in enumerate(implementations)
    ]
    extra: list[Column[object]] = [Column("naive saves, in closed form", drop_order=len(own))] if closed_form else []
    return Table(
        title=f"{title}, {precision}, {settings(study)}",
        headings=(Column("d_head"), Column("context"), *own, *extra),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _naive(precision: Precision, d_head: int, context_length: int) -> AttentionCell:
    return AttentionCell(
        implementation=Implementation.NAIVE, precision=precision, d_head=d_head, context_length=context_length
    )


def _words(status: CellStatus) -> str:
    return "no kernel" if status is CellStatus.UNAVAILABLE else STATUS_WORDS[Status(status)]


def _speed_ups(study: AttentionStudy, precision: Precision, phase: Phase) -> Iterator[str]:
    """How much faster than written out each implementation is, at the longest context where both have a time."""
    naive = {_shape(result): result for result in study.results_of(precision, Implementation.NAIVE)}
    gains = []
    for implementation in study.available(precision):
        pairs = [
            (naive[_shape(result)], result)
            for result in study.results_of(precision, implementation)
            if implementation is not Implementation.NAIVE and _shape(result) in naive
        ]
        gain_of = [(_gain(slow, fast, phase), fast) for slow, fast in pairs]
        if both := [(gain, result) for gain, result in gain_of if gain]:
            gain, result = both[-1]
            gains.append(f"{implementation} {gain} (d_head {_at(result)})")
    if gains:
        yield f"Times as fast as naive, at the largest shape that both can do: {', '.join(gains)}."


def _gain(slow: CellResult, fast: CellResult, phase: Phase) -> str:
    """How many times as fast the second is; empty where either has no time."""
    times = slow.measurement(phase), fast.measurement(phase)
    if times[0] is None or times[1] is None or not times[1].mean_s:
        return ""
    return ratio_text(times[0].mean_s / times[1].mean_s, times, (*slow.warnings(phase), *fast.warnings(phase)))


def _rates(study: AttentionStudy, precision: Precision, phase: Phase) -> Iterator[str]:
    """What each implementation achieves at the largest shape that it can do."""
    rates = []
    for implementation in study.available(precision):
        timed = [result for result in study.results_of(precision, implementation) if result.measurement(phase)]
        if timed and (rate := _tflops_per_s(study, timed[-1], phase)):
            text = ratio_text(rate, [timed[-1].measurement(phase)], timed[-1].warnings(phase))
            rates.append(f"{implementation} {text} (d_head {_at(timed[-1])})")
    if rates:
        convention = "a causal mask counting as full"
        if phase is Phase.BACKWARD:
            convention += ", backward as twice forward, 2.5 times for kernels that compute the scores again"
        yield f"TFLOP/s of the matrix products, {convention}: {', '.join(rates)}."


def _shape(result: CellResult) -> tuple[int, int]:
    return result.cell.d_head, result.cell.context_length


def _at(result: CellResult) -> str:
    return f"{result.cell.d_head}, context {result.cell.context_length}"


def _compile_times(study: AttentionStudy, precision: Precision) -> Iterator[str]:
    times = [result.compile_s for result in study.results_of(precision) if result.compile_s is not None]
    if times:
        yield (
            f"torch.compile takes {significant(min(times), 2)} to {significant(max(times), 2)} s a shape, in its first "
            "pass, which is not among the times."
        )


def _why_missing(study: AttentionStudy, precision: Precision) -> Iterator[str]:
    """Why an implementation has no column."""
    for implementation in dict.fromkeys(study.grid.implementations):
        results = study.results_of(precision, implementation)
        if results and implementation not in study.available(precision) and results[0].failure:
            yield f"No {implementation} in {precision}: {results[0].failure.message}"


def _memory_table(study: AttentionStudy, precision: Precision) -> Table:
    def cell(result: CellResult) -> str:
        if result.memory is None:
            return ""
        return f"{_mib(result.memory.before_backward_bytes)} ({_mib(result.memory.saved_bytes)})"

    notes = [
        "In MiB; in brackets what forward left for backward, its output included.",
        *_out_of_memory(study, precision),
        *_account(study, precision),
        *_growth(study, precision),
    ]
    return _table(study, precision, "Memory in use before backward", cell, notes, closed_form=True)


def _mib(num_bytes: float) -> str:
    return significant(num_bytes / MIB)


def _out_of_memory(study: AttentionStudy, precision: Precision) -> Iterator[str]:
    """At which size written-out attention runs out of memory, or would."""
    results = study.results_of(precision, Implementation.NAIVE)
    failed = next((result for result in results if result.status is CellStatus.OOM), None)
    if failed is not None:
        asked = failed.failure.requested_bytes if failed.failure else None
        request = "" if asked is None else f" when it asked for {significant(asked / GIB)} GiB"
        matrix = weights_bytes(study.grid, failed.cell) / GIB
        yield (
            f"naive runs out of memory at d_head {_at(failed)}{request}: one matrix of batch x T x T elements takes "
            f"{significant(matrix)} GiB."
        )
        return
    largest = _largest(results)
    if largest is None or largest.memory is None:
        return
    peak = largest.memory.peak_bytes
    sentence = (
        f"naive does not run out of memory here: at d_head {_at(largest)} it peaks at {significant(peak / GIB)} GiB, "
        f"{significant(peak / weights_bytes(study.grid, largest.cell), 3)} times a matrix of batch x T x T elements"
    )
    total = study.environment.device_memory_bytes if study.environment else None
    if total:
        full = largest.cell.context_length * math.sqrt(total / peak)
        sentence += f"; as the square of the context it fills {significant(total / GIB)} GiB at about {full:,.0f}"
    yield f"{sentence}."


def _largest(results: Sequence[CellResult]) -> CellResult | None:
    return next((result for result in reversed(results) if result.memory is not None), None)


def _account(study: AttentionStudy, precision: Precision) -> Iterator[str]:
    """What written-out attention left for backward, measured and in closed form."""
    largest = _largest(study.results_of(precision, Implementation.NAIVE))
    if largest is not None and largest.memory is not None:
        grid, cell = study.grid, largest.cell
        rows = _mib(rows_bytes(grid, cell))
        yield (
            f"At d_head {_at(largest)} naive's forward left {_mib(largest.memory.saved_bytes)} MiB; in closed form "
            f"{_mib(naive_saved_bytes(grid, cell))}: softmax's weights {_mib(weights_bytes(grid, cell))}, the scaled "
            f"queries {rows}, the output {rows}."
        )


def _growth(study: AttentionStudy, precision: Precision) -> Iterator[str]:
    """How what is left for backward grows with the context, over the last two that are known."""
    for implementation in study.available(precision):
        known = [result for result in study.results_of(precision, implementation) if result.memory]
        widest = [result for result in known if result.cell.d_head == known[-1].cell.d_head]
        for shorter, longer in list(pairwise(widest))[-1:]:
            assert shorter.memory is not None
            assert longer.memory is not None
            growth = longer.memory.saved_bytes / shorter.memory.saved_bytes
            lengths = shorter.cell.context_length, longer.cell.context_length
            power = math.log(growth) / math.log(lengths[1] / lengths[0])
            yield (
                f"{implementation}: from context {lengths[0]} to {lengths[1]} it grows {significant(growth, 3)}-fold, "
                f"as the context to the power of {power:.2f} (d_head {longer.cell.d_head})."
            )


def attention_section(study: AttentionStudy) -> Section:
    """The tables, and a row for each cell, failed ones too; what is not known is empty."""
    rows = [dict(zip(CSV_COLUMNS, _csv_row(study, result), strict=True)) for result in study.results]
    return Section(name="results", tables=tuple(attention_tables(study)), rows=rows)


def _csv_row(study: AttentionStudy, result: CellResult) -> list[object]:
    grid, cell, failure, memory = study.grid, result.cell, result.failure, result.memory
    held = (memory.before_forward_bytes, memory.before_backward_bytes, memory.saved_bytes) if memory else (None,) * 3
    requested = failure.requested_bytes if failure else None
    return [
        cell.implementation, cell.precision, cell.d_head, cell.context_length, grid.batch_size, grid.causal,
        study.environment.identity.device_name if study.environment else None, grid.passes,
        result.status, failure.message if failure else None, _scaled(requested),
        *(value for phase in PHASES for value in _csv_times(study, result, phase)),
        *map(_scaled, held),
        _scaled(naive_saved_bytes(grid, cell)) if cell.implementation is Implementation.NAIVE else None,
        _scaled(memory.peak_bytes if memory else None),
        result.compile_s, *(codes_text(result.warnings(phase)) for phase in PHASES),
    ]  # fmt: skip


def _scaled(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / MIB


def _csv_times(study: AttentionStudy, result: CellResult, phase: Phase) -> list[float | None]:
    measured = result.measurement(phase)
    if measured is None:
        return [None] * 3
    std_ms = None if measured.stdev_s is None else measured.stdev_s * 1e3
    return [measured.mean_s * 1e3, std_ms, _tflops_per_s(study, result, phase)]


def _tflops_per_s(study: AttentionStudy, result: CellResult, phase: Phase) -> float | None:
    measured = result.measurement(phase)
    if measured is None or not measured.mean_s:
        return None
    return matmul_flops(study.grid, result.cell, phase) / measured.mean_s / 1e12


def write_attention_record(study: AttentionStudy, directory: Path) -> None:
    """Write attention.json: the grid, the environment, every raw time. Cheap enough to do after every cell."""
    write_atomically(directory / "attention.json", encode_json(study))


def write_attention(study: AttentionStudy, directory: Path) -> None:
    """Write attention.json, results.csv .md .tex .typ and plots/ into the directory, which is made if need be."""
    write_study("attention.json", study, [attention_section(study)], dict(attention_pictures(study)), directory)
