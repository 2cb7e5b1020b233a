"""Tables of memory: the peak, what it consists of, and what was allocated from phase to phase."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TypeAlias

from cs336_systems.analysis.memory.profile import Category, CategoryBytes, MemoryProfile, Moment
from cs336_systems.config import Mode
from cs336_systems.record import Status
from cs336_systems.report.columns import COLUMNS, Column, Row, column
from cs336_systems.report.entries import over_configurations, rows_of
from cs336_systems.report.section import Section, Table, known, make_table
from cs336_systems.report.sections.memory.entries import MemoryEntry, Snapshot, grouped, recorded_runs
from cs336_systems.report.sections.memory.words import (
    GIB_CELL,
    MIB_CELL,
    START,
    MemoryUnit,
    check_words,
    difference_bytes,
    failure_words,
    fields_of,
    fragmentation_bytes,
    in_unit,
    moment_ms,
    size,
    typical,
    unit_for,
    when,
)
from cs336_systems.report.words import GIB, MIB, label, ratio

SMALL = 0.01
"""Part of the largest total below which a category is dropped first on a narrow terminal."""
MIN_ROUNDED = 0.01
"""Smallest rounding that is mentioned, as a part of the category's requests: less does not show in a table."""
MIN_ROUNDED_BYTES = MIB
_PHASE_KEYS = (
    "step", "phase", "status", "begin_ms", "end_ms", "begin_bytes", "peak_bytes", "peak_ms", "end_bytes"
)  # fmt: skip


def category_key(category: Category, quantity: str) -> str:
    """The key of a column about a category, such as `optimizer_state_bytes`."""
    return f"{category.replace(' ', '_')}_{quantity}"


_MOMENT_KEYS = (
    "step", "moment", "time_ms", "allocated_bytes", "counted_bytes", "difference_bytes", "requested_bytes",
    "counted_requested_bytes", "reserved_bytes",
    *(category_key(category, quantity) for quantity in ("bytes", "requested_bytes") for category in Category),
)  # fmt: skip


def category_values(moment: Moment) -> Row:
    """Bytes, requested bytes, blocks and share of each category at the moment."""
    found = {row.category: row for row in moment.categories}
    values: Row = {}
    for name in Category:
        row = found.get(name) or CategoryBytes(category=name, num_bytes=0, requested_bytes=0, count=0)
        values[category_key(name, "bytes")] = row.num_bytes
        values[category_key(name, "requested_bytes")] = row.requested_bytes
        values[category_key(name, "blocks")] = row.count
        values[category_key(name, "share")] = ratio(row.num_bytes, moment.allocated_bytes)
    return values


def category_columns(rows: Sequence[Row], unit: MemoryUnit, whole: str, quantity: str = "bytes") -> list[Column]:
    """One column for each category; those that never reach SMALL of the largest `whole` are dropped first."""
    small = SMALL * max((row[whole] for row in rows), default=0)
    return [
        Column(name, unit.name, key=key, write=unit.cell, drop_order=1 if any(row[key] > small for row in rows) else 5)
        for name in Category
        if (key := category_key(name, quantity))
    ]


def boundaries(entries: Sequence[Snapshot]) -> Section:
    """Memory at the end of each phase, beside the allocator's own count; the tables of runs have the last step alone.

    The table of a single snapshot includes the peak. The CSV has the requested bytes too.
    """
    runs, rows = recorded_runs(entries), rows_of(entries, _moments)
    moments = [moment for entry in entries for moment in entry.profile.boundaries]
    unit = GIB_CELL if runs else unit_for(max(row["reserved_bytes"] for row in rows))
    columns = [
        *_step_column(rows),
        column("moment"),
        column("time_s", write=moment_ms),
        *category_columns(rows, unit, "allocated_bytes"),
        in_unit("allocated_bytes", unit),
        in_unit("counted_bytes", unit),
        in_unit("reserved_bytes", unit),
    ]
    rounding = rounding_words([*moments, *(entry.profile.peak for entry in entries)])
    notes, title = [check_words(moments), *rounding], "Memory from phase to phase"
    return over_configurations("boundaries", title, rows, columns, _MOMENT_KEYS, notes, shown=itemgetter("is_shown"))


def _moments(entry: Snapshot) -> Iterable[Row]:
    """Rows of all boundaries of phases; for a single snapshot with the peak among them, by time."""
    profile = entry.profile
    if entry.is_run:
        last = max((moment.step for moment in profile.boundaries), default=0)
        return [_moment(moment, _boundary_name(moment), moment.step == last) for moment in profile.boundaries]
    peak = f"peak{f', in {label(profile.peak.phase)}' if profile.peak.phase else ''}"
    named = [*((moment, _boundary_name(moment)) for moment in profile.boundaries), (profile.peak, peak)]
    return [_moment(*one) for one in sorted(named, key=lambda one: one[0].time_s)]


def _boundary_name(moment: Moment) -> str:
    """Name of a boundary: `start`, `end of forward`, or `unknown` without a phase."""
    if not moment.phase:
        return "unknown"
    return START if moment.phase == START else f"end of {label(moment.phase)}"


def _moment(moment: Moment, name: str, is_shown: bool = True) -> Row:
    return {
        **fields_of(moment),
        **category_values(moment),
        "is_shown": is_shown,
        "step": None if moment.step < 0 else moment.step,
        "moment": name,
        "time_ms": moment.time_s * 1e3,
        "difference_bytes": difference_bytes(moment),
        "requested_bytes": moment.requested_bytes,
    }


def _step_column(rows: Sequence[Row]) -> list[Column]:
    """The column of steps if the shown rows are of several steps."""
    return [column("step")] if len({row["step"] for row in rows if row["is_shown"]}) > 1 else []


def rounding_words(moments: Iterable[Moment]) -> Iterator[str]:
    """A sentence on the categories whose blocks are visibly larger than the requests, if there are any."""
    lost: dict[Category, CategoryBytes] = {}
    for row in (row for moment in moments for row in moment.categories):
        lost[row.category] = max(lost.get(row.category, row), row, key=_rounding)
    said = [
        f"{name} {size(lost[name].num_bytes)} for {size(lost[name].requested_bytes)}"
        for name in Category
        if name in lost and _rounding(lost[name]) >= max(MIN_ROUNDED_BYTES, MIN_ROUNDED * lost[name].requested_bytes)
    ]
    if said:
        yield f"Blocks are larger than what was asked for: {', '.join(said)}."


def _rounding(row: CategoryBytes) -> int:
    return row.num_bytes - row.requested_bytes


def phases(entries: Sequence[Snapshot]) -> Section:
    """Start, peak and end of each phase; the table of runs has the last step of each alone."""
    rows = rows_of(entries, lambda entry: _phases(entry.profile, is_every=not entry.is_run))
    most = max((row["peak_bytes"] for row in rows), default=0)
    unit = GIB_CELL if entries[0].is_run else unit_for(most)
    columns = [
        *_step_column(rows),
        column("phase", write=label),
        column("begin_s", write=moment_ms),
        column("duration_s", write=moment_ms),
        in_unit("begin_bytes", unit),
        in_unit("peak_bytes", unit),
        column("peak_s", write=moment_ms),
        in_unit("end_bytes", unit),
    ]
    notes = ["Peaks are over all events; times are those of a run that is being recorded."]
    if any(row["status"] != Status.OK for row in rows):
        columns.append(column("status"))
        notes.append("Where memory ran out, the end of the phase is the request that failed.")
    title = "Peak of each phase"
    return over_configurations("phases", title, rows, columns, _PHASE_KEYS, notes, shown=itemgetter("is_shown"))


def _phases(profile: MemoryProfile, is_every: bool) -> Iterator[Row]:
    for phase in profile.phases:
        yield {
            **fields_of(phase),
            "is_shown": is_every or phase.step == profile.phases[-1].step,
            "status": str(Status.OK if phase.is_finished else Status.OOM),
            "begin_ms": phase.begin_s * 1e3,
            "end_ms": phase.end_s * 1e3,
            "duration_s": phase.end_s - phase.begin_s,
            "peak_ms": phase.peak_s * 1e3,
        }


Lines: TypeAlias = tuple[Table, list[Row]]
"""A table of a single snapshot with a value on each line, and its rows in the CSV file."""
_LINE_KEYS = ("quantity", "value", "unit", "share", "requested_bytes", "blocks")
WHOLE = "allocated"
"""Name of the row for all categories together."""
_ALONE = (
    "peak_allocated_bytes", "rounding_bytes", "peak_requested_bytes", "peak_recorded_bytes", "held_bytes",
    "reserved_at_peak_bytes", "fragmentation_bytes", "peak_reserved_bytes", "outside_bytes", "residual_stream_bytes",
    "gpu_index", "recorded_steps",
)  # fmt: skip
"""Values that a single snapshot's table of the peak shows, one on each line, by the keys of their columns."""
_FULL_NAMES = {"peak_allocated_bytes": "peak allocated", "peak_reserved_bytes": "peak reserved",
               "residual_stream_bytes": "residual stream"}  # fmt: skip
"""Names of values on such lines, if they differ from the headings of their columns."""


def _peak(entry: Snapshot) -> Iterator[Row]:
    """One row with all values of the peak."""
    profile, peak, blocks = entry.profile, entry.profile.peak, entry.profile.blocks
    yield {
        "status": str(Status.OOM if profile.work.out_of_memory else Status.OK),
        "peak_allocated_gib": peak.allocated_bytes / GIB,
        "peak_allocated_bytes": peak.allocated_bytes,
        "peak_phase": peak.phase or None,
        "plain_peak_allocated_bytes": entry.plain_peak_bytes,
        "predicted_peak_allocated_bytes": entry.predicted_peak_bytes,
        "rounding_bytes": profile.rounding_bytes_at_peak,
        "peak_requested_bytes": profile.peak_requested_bytes,
        "peak_recorded_bytes": profile.peak_recorded_bytes,
        "held_bytes": profile.held_bytes,
        "reserved_at_peak_bytes": peak.reserved_bytes,
        "fragmentation_bytes": fragmentation_bytes(profile),
        "peak_reserved_bytes": profile.peak_reserved_bytes,
        "outside_bytes": profile.outside_bytes,
        "residual_stream_bytes": profile.residual_stream_bytes,
        "block_saved_bytes": typical(blocks).saved_bytes if blocks else None,
        "block_gradient_bytes": typical(blocks).gradient_bytes if blocks else None,
        "gpu_index": profile.device,
        "recorded_steps": profile.num_steps,
        **category_values(peak),
    }


def peaks(entries: Sequence[Snapshot]) -> Section:
    """Peaks of the runs, first by mode, then one row for each run, then by category.

    A single snapshot has a line for each value, for each category, and for each count of the allocator's work.
    """
    rows, runs = rows_of(entries, _peak), recorded_runs(entries)
    if not runs:
        profile = entries[0].profile
        notes = [f"The peak is {when(profile.peak)}.", *profile.notes]
        of_one = (
            _value_lines("Peak", {key: rows[0][key] for key in _ALONE}, notes),
            _categories_alone(profile.peak),
            _allocator(profile),
        )
        lines = [dict.fromkeys(_LINE_KEYS) | line for _, own in of_one for line in own]
        return Section(name="peak", tables=tuple(table for table, _ in of_one), rows=lines, keys=_LINE_KEYS)
    columns = [
        in_unit("peak_allocated_bytes", GIB_CELL),
        column("peak_phase", drop_order=3),
        in_unit("plain_peak_allocated_bytes", GIB_CELL),
        in_unit("predicted_peak_allocated_bytes", GIB_CELL),
        in_unit("peak_reserved_bytes", GIB_CELL),
        in_unit("residual_stream_bytes", MIB_CELL),
        in_unit("block_saved_bytes", MIB_CELL),
        in_unit("block_gradient_bytes", MIB_CELL),
        column("status"),
    ]
    notes = ["Peak: allocated at most; reserved: held by PyTorch at most.", *_rank_notes(runs), *_failure_notes(runs)]
    every = over_configurations("peaks", "Peaks of memory", rows, columns, tuple(next(_peak(runs[0]))), notes)
    of = [*category_columns(rows, GIB_CELL, "peak_allocated_bytes"), in_unit("peak_allocated_bytes", GIB_CELL),
          column("peak_phase", drop_order=2), column("status")]  # fmt: skip
    parts = over_configurations("", "What the peaks consist of", rows, of, (), _failure_notes(runs))
    return replace(every, tables=(*_by_mode(runs), *every.tables, *parts.tables))


def _allocator(profile: MemoryProfile) -> Lines:
    """The allocator's requests to the device during one recording, and the first request that failed."""
    work = profile.work
    values = {
        "blocks_in_use": profile.num_allocations,
        "blocks_allocated": work.allocations,
        "segments_allocated": work.segments_allocated,
        "segments_freed": work.segments_freed,
        "failed_requests": work.out_of_memory,
        "gpu_index": profile.device,
        "recorded_steps": profile.num_steps,
    }
    if failure := work.first_failure:
        values |= {
            "failed_request_bytes": failure.requested_bytes,
            "failed_free_bytes": failure.free_bytes,
            "failed_allocated_bytes": failure.allocated_bytes,
            "failed_reserved_bytes": failure.reserved_bytes,
            "failed_after_events": failure.event,
        }
    notes = [f"Memory first ran out {failure_words(failure)}, of {work.events:,} events in all."] if failure else []
    return _value_lines("Work of the allocator", values, notes)


def _value_lines(title: str, values: Row, notes: Iterable[str]) -> Lines:
    """A table with one value on each line, and the explanation of its column; `values` are by the keys of columns."""

    def cell(line: Row) -> str:
        if line["value"] is None:
            return "unknown"
        return size(line["value"]) if line["unit"] == "bytes" else f"{line['value']:,}"

    def exact(line: Row) -> str:
        return f"{line['value']:,}" if line["value"] is not None and line["unit"] == "bytes" else ""

    rows = [
        {"quantity": _FULL_NAMES.get(key, COLUMNS[key].name), "value": value, "about": COLUMNS[key].about,
         "unit": "bytes" if key.endswith("_bytes") else COLUMNS[key].unit}
        for key, value in values.items()
    ]  # fmt: skip
    columns = [
        column("quantity"),
        column("value", text=cell),
        column("value", name="exact", drop_order=1, text=exact),
        column("about"),
    ]
    return make_table(title, known(columns, rows), rows, notes), rows


def _rank_notes(entries: Sequence[MemoryEntry]) -> Iterator[str]:
    """A note on runs on several ranks, of which one is explained, if there are any."""
    found = {
        entry.config.label: [rank.memory.peak_allocated_bytes for rank in entry.recorded.ranks if rank.memory]
        for entry in entries
        if entry.recorded is not None and entry.recorded.ranks
    }
    peaks = [f"{label}: {', '.join(map(size, each))}" for label, each in found.items() if each]
    if peaks:
        yield f"Of several ranks rank 0 is explained; the peak of each rank: {'; '.join(peaks)}."


def _failure_notes(entries: Sequence[MemoryEntry]) -> Iterator[str]:
    """A note on the rows of runs that ran out of memory, if there are any."""
    if any(entry.is_out_of_memory for entry in entries):
        yield (
            "Out of memory: what there was before it, which is less than the run needs; after a first forward pass of "
            "training, gradients and the optimizer's state would have been added."
        )


def _by_mode(entries: Sequence[MemoryEntry]) -> tuple[Table, ...]:
    """A table with a column for each mode, such as forward alone and a whole step; none if all runs have one mode."""
    modes = [mode for mode in Mode if any(entry.config.mode is mode for entry in entries)]
    if len(modes) < 2:
        return ()
    groups = {id(group[0]): group for group in grouped(entries, "mode")}

    def by_mode(first: MemoryEntry) -> Iterator[Row]:
        found = {entry.config.mode: entry for entry in groups[id(first)]}
        yield {str(mode): found.get(mode) for mode in modes}

    rows = rows_of([group[0] for group in groups.values()], by_mode)
    columns: list[Column] = [Column(mode, "GiB", key=mode, write=_peak_cell) for mode in modes]
    note = "Allocated at most. Above: memory ran out after that much."
    return over_configurations(
        "", "Peak of memory by mode", rows, columns, (), [note], without=("mode",), among=entries
    ).tables


def _peak_cell(entry: MemoryEntry) -> str:
    return f"{'above ' if entry.is_out_of_memory else ''}{GIB_CELL.cell(entry.profile.peak.allocated_bytes)}"


def _categories_alone(peak: Moment) -> Lines:
    """A line for each category, and for all together."""
    kept = sorted((row for row in peak.categories if row.num_bytes), key=lambda row: [*Category].index(row.category))
    parts = [(str(row.category), row.num_bytes, row.requested_bytes, row.count) for row in kept]
    parts.append((WHOLE, peak.allocated_bytes, peak.requested_bytes, sum(row.count for row in kept)))
    rows = [
        {"category": name, "bytes": num_bytes, "share": ratio(num_bytes, peak.allocated_bytes),
         "requested_bytes": requested, "blocks": blocks}
        for name, num_bytes, requested, blocks in parts
    ]  # fmt: skip
    unit = unit_for(peak.allocated_bytes)
    columns = [
        column("category"),
        in_unit("bytes", unit),
        column("share"),
        in_unit("requested_bytes", unit, drop_order=3),
        column("blocks"),
    ]
    table = make_table("Categories at the peak", columns, rows, rounding_words([peak]))
    return table, [
        row | {"quantity": f"{row['category']} at the peak", "value": row["bytes"], "unit": "bytes"} for row in rows
    ]
