"""Memory over the phases of a step: what was allocated at the end of each, by category, and the peak of each."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from cs336_systems.analysis.memory.profile import Category, CategoryBytes, MemoryProfile, Moment
from cs336_systems.record import Status
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.entries import over_configurations, rows_of
from cs336_systems.report.numbers import label, ratio
from cs336_systems.report.section import Section
from cs336_systems.report.sections.memory.entries import Snapshot, recorded_runs
from cs336_systems.report.sections.memory.facts import START, difference_bytes, fields_of
from cs336_systems.report.sections.memory.words import (
    GIB_CELL,
    MIB,
    Unit,
    check_words,
    in_unit,
    milliseconds,
    size,
    unit_for,
)

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


def category_columns(rows: Sequence[Row], unit: Unit, whole: str, quantity: str = "bytes") -> list[Column]:
    """One column for each category; those that never reach SMALL of the largest `whole` are dropped first."""
    small = SMALL * max((row[whole] for row in rows), default=0)
    return [
        Column(name, unit.name, key=key, write=unit.cell, drop_order=1 if any(row[key] > small for row in rows) else 5)
        for name in Category
        if (key := category_key(name, quantity))
    ]


def boundaries(entries: Sequence[Snapshot]) -> Section:
    """Memory at the end of each phase, beside the allocator's own count; the tables of runs have the last step alone.

    The table of a single snapshot includes the peak; a second one has the requested bytes if they differ visibly.
    """
    runs, rows = recorded_runs(entries), rows_of(entries, _moments)
    moments = [moment for entry in entries for moment in entry.profile.boundaries]
    unit = GIB_CELL if runs else unit_for(max(row["reserved_bytes"] for row in rows))
    names = [*_step_column(rows), column("moment"), column("time_s", write=milliseconds)]
    columns = [
        *names,
        *category_columns(rows, unit, "allocated_bytes"),
        in_unit("allocated_bytes", unit),
        in_unit("counted_bytes", unit),
        in_unit("reserved_bytes", unit),
    ]
    rounding = list(rounding_words([*moments, *(entry.profile.peak for entry in entries)]))
    notes, title = [check_words(moments), *rounding], "Memory from phase to phase"
    found = over_configurations("boundaries", title, rows, columns, _MOMENT_KEYS, notes, shown=itemgetter("is_shown"))
    if runs or not rounding or not moments:
        return found
    return replace(found, tables=(*found.tables, *_requested(rows, names, unit, moments).tables))


def _requested(rows: Sequence[Row], names: Sequence[Column], unit: Unit, moments: Sequence[Moment]) -> Section:
    """The same moments by the bytes that the program asked for."""
    columns = [
        *names,
        *category_columns(rows, unit, "requested_bytes", "requested_bytes"),
        in_unit("requested_bytes", unit, name="together"),
        in_unit("counted_requested_bytes", unit),
    ]
    notes = ["What the program asked for: the sizes of its tensors."]
    if not any(difference_bytes(moment, requested=True) for moment in moments):  # another stream may still use some
        notes.append(check_words(moments, requested=True))
    return over_configurations("", "Memory asked for, from phase to phase", rows, columns, (), notes)


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
        column("begin_s", write=milliseconds),
        column("duration_s", write=milliseconds),
        in_unit("begin_bytes", unit),
        in_unit("peak_bytes", unit),
        column("peak_s", write=milliseconds),
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
