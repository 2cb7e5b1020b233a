"""Tables of one `MemoryProfile` over its phases: what there was where each ended, and its own peak."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter

from cs336_systems.analysis.memory.profile import Category, MemoryProfile, Moment, PhaseMemory
from cs336_systems.report.columns import Column
from cs336_systems.report.listing import Listing, csv_of, label
from cs336_systems.report.memory.tables import bytes_of, name_of, requested_of, rounding_words
from cs336_systems.report.memory.words import Unit, milliseconds, unit_for
from cs336_systems.report.table import Table, make_table

SMALL = 0.01
"""Of the peak: a category that never has more can be left out on a narrow terminal."""
SIGHTED = tuple(category for category in Category if category is not Category.LATER)
"""Categories that a recording with notes may have; the CSV has the other one behind them."""

Row = tuple[str, Moment]
"""A moment with its name."""


def moment_name(moment: Moment) -> str:
    """`start`, or `end of forward`; the boundary of a phase that is not known is called so."""
    if not moment.phase:
        return "unknown"
    return moment.phase if moment.phase == "start" else f"end of {label(moment.phase)}"


def boundaries_listing(profile: MemoryProfile) -> Listing:
    """What there was whenever a phase ended, and at the peak, beside the allocator's own count.

    A second table has what was asked for, where that differs enough to show.
    """
    rows = _in_time(profile)
    unit = unit_for(max(moment.reserved_bytes for _, moment in rows))
    blocks: list[Column[Row]] = [
        *_name_columns(rows),
        *_category_columns(rows, unit, bytes_of, SMALL * profile.peak.allocated_bytes),
        Column("allocated", unit.name, says=lambda row: unit.cell(row[1].allocated_bytes)),
        *_count_columns(rows, unit, attrgetter("counted_bytes")),
        Column("reserved", unit.name, spare=3, says=lambda row: unit.cell(row[1].reserved_bytes)),
    ]
    csv: dict[str, Callable[[Row], object]] = {
        "step": lambda row: None if row[1].step < 0 else row[1].step,
        "moment": itemgetter(0),
        **{name: _of_moment(value) for name, value in moment_values().items()},
    }
    rounding = list(rounding_words(moment for _, moment in rows))
    tables = [make_table("Memory from phase to phase", blocks, rows, [_check(profile), *rounding])]
    if rounding and profile.boundaries:
        tables.append(_requested_table(profile, rows, unit))
    return Listing(name="boundaries", tables=tuple(tables), csv=csv_of(csv, rows))


def moment_values() -> dict[str, Callable[[Moment], object]]:
    """All that a CSV file has of a moment."""
    return {
        "time_ms": lambda moment: moment.time_s * 1e3,
        "allocated_bytes": attrgetter("allocated_bytes"),
        "counted_bytes": attrgetter("counted_bytes"),
        "difference_bytes": difference_bytes,
        "requested_bytes": attrgetter("requested_bytes"),
        "counted_requested_bytes": attrgetter("counted_requested_bytes"),
        "reserved_bytes": attrgetter("reserved_bytes"),
        **_category_values("_bytes", bytes_of, SIGHTED),
        **_category_values("_requested_bytes", requested_of, SIGHTED),
        **_category_values("_bytes", bytes_of, (Category.LATER,)),
        **_category_values("_requested_bytes", requested_of, (Category.LATER,)),
    }


def _category_values(
    ending: str, value: Callable[[Moment, Category], int], categories: Iterable[Category]
) -> dict[str, Callable[[Moment], object]]:
    return {f"{name_of(category)}{ending}": _moment_getter(value, category) for category in categories}


def _moment_getter(value: Callable[[Moment, Category], int], category: Category) -> Callable[[Moment], int]:
    return lambda moment: value(moment, category)


def _of_moment(value: Callable[[Moment], object]) -> Callable[[Row], object]:
    return lambda row: value(row[1])


def _requested_table(profile: MemoryProfile, rows: Sequence[Row], unit: Unit) -> Table:
    columns: list[Column[Row]] = [
        *_name_columns(rows),
        *_category_columns(rows, unit, requested_of, SMALL * profile.peak.requested_bytes),
        Column("together", unit.name, says=lambda row: unit.cell(row[1].requested_bytes)),
        *_count_columns(rows, unit, attrgetter("counted_requested_bytes")),
    ]
    notes = ["What the program asked for: the sizes of its tensors.", *_check_requested(profile)]
    return make_table("Memory asked for, from phase to phase", columns, rows, notes)


def _name_columns(rows: Sequence[Row]) -> Iterator[Column[Row]]:
    if any(moment.step >= 0 for _, moment in rows):
        yield Column("step", says=lambda row: "" if row[1].step < 0 else str(row[1].step))
    yield Column("moment", numeric=False, says=itemgetter(0))
    yield Column("at", "ms", spare=4, says=lambda row: milliseconds(row[1].time_s))


def _category_columns(
    rows: Sequence[Row], unit: Unit, value: Callable[[Moment, Category], int], small_bytes: float
) -> Iterator[Column[Row]]:
    """One for each category of which there is ever something."""
    for category in Category:
        get = _getter(value, category)
        if most := max(map(get, rows)):
            spare = 5 if most < small_bytes else 1
            yield Column(category, unit.name, spare=spare, says=_cell(get, unit))


def _getter(value: Callable[[Moment, Category], int], category: Category) -> Callable[[Row], int]:
    return lambda row: value(row[1], category)


def _cell(get: Callable[[Row], int], unit: Unit) -> Callable[[Row], str]:
    return lambda row: unit.cell(get(row))


def difference_bytes(moment: Moment) -> int | None:
    """By how much the blocks of the snapshot are more than what the allocator counted; None where it did not count."""
    return None if moment.counted_bytes is None else moment.allocated_bytes - moment.counted_bytes


def _in_time(profile: MemoryProfile) -> list[Row]:
    """The boundaries with their names, and among them the peak."""
    phase = f", in {label(profile.peak.phase)}" if profile.peak.phase else ""
    named = [*((moment_name(moment), moment) for moment in profile.boundaries), (f"peak{phase}", profile.peak)]
    return sorted(named, key=lambda row: row[1].time_s)


def _count_columns(rows: Sequence[Row], unit: Unit, counted: Callable[[Moment], int | None]) -> Iterator[Column[Row]]:
    """What the allocator itself counted, if it did."""

    def cell(row: Row) -> str:
        num_bytes = counted(row[1])
        return "" if num_bytes is None else unit.cell(num_bytes)

    if any(map(cell, rows)):
        yield Column("PyTorch's count", unit.name, spare=2, says=cell)


def _check(profile: MemoryProfile) -> str:
    """Whether categories, which add up to what is allocated, agree with the allocator's own count."""
    differences = [found for moment in profile.boundaries if (found := difference_bytes(moment)) is not None]
    if not differences:
        return "Check: categories add up to what is allocated; the snapshot has no count of the allocator beside it."
    if not any(differences):
        where = _where(len(differences))
        return f"Check: at {where} the categories add up to what PyTorch's allocator counted, to the byte."
    wrong = [difference for difference in differences if difference]
    return (
        f"Check failed: at {len(wrong)} of {len(differences)} boundaries the blocks of the snapshot differ from what "
        f"PyTorch's allocator counted, by {max(wrong, key=abs):+,} bytes at most."
    )


def _check_requested(profile: MemoryProfile) -> Iterator[str]:
    counted = [moment for moment in profile.boundaries if moment.counted_requested_bytes is not None]
    if counted and all(moment.requested_bytes == moment.counted_requested_bytes for moment in counted):
        yield f"Check: at {_where(len(counted))} it adds up to what PyTorch's allocator counted, to the byte."


def _where(num_boundaries: int) -> str:
    return "the one boundary" if num_boundaries == 1 else f"all {num_boundaries} boundaries"


def phases_listing(profile: MemoryProfile) -> Listing:
    """Each phase of each step with its own peak."""
    rows = profile.phases
    unit = unit_for(max((row.peak_bytes for row in rows), default=0))
    columns: list[Column[PhaseMemory]] = [
        Column("step", says=lambda row: str(row.step)),
        Column("phase", numeric=False, says=lambda row: label(row.phase)),
        Column("begins", "ms", spare=3, says=lambda row: milliseconds(row.begin_s)),
        Column("takes", "ms", spare=3, says=lambda row: milliseconds(row.end_s - row.begin_s)),
        Column("at its start", unit.name, spare=2, says=lambda row: unit.cell(row.begin_bytes)),
        Column("peak", unit.name, says=lambda row: unit.cell(row.peak_bytes)),
        Column("peak at", "ms", spare=4, says=lambda row: milliseconds(row.peak_s)),
        Column("at its end", unit.name, spare=1, says=lambda row: unit.cell(row.end_bytes)),
    ]
    csv: dict[str, Callable[[PhaseMemory], object]] = {
        "step": attrgetter("step"),
        "phase": attrgetter("phase"),
        "status": lambda row: "ok" if row.is_finished else "oom",
        "begin_ms": lambda row: row.begin_s * 1e3,
        "end_ms": lambda row: row.end_s * 1e3,
        "begin_bytes": attrgetter("begin_bytes"),
        "peak_bytes": attrgetter("peak_bytes"),
        "peak_ms": lambda row: row.peak_s * 1e3,
        "end_bytes": attrgetter("end_bytes"),
    }
    notes = ["Peaks are over all events; times are those of a run that is being recorded.", *_unfinished(rows)]
    table = make_table("Peak of each phase", columns, rows, notes, lambda row: not row.is_finished)
    return Listing(name="phases", tables=(table,) if rows else (), csv=csv_of(csv, rows))


def _unfinished(phases: Iterable[PhaseMemory]) -> Iterator[str]:
    for phase in phases:
        if not phase.is_finished:
            yield f"Memory ran out in {label(phase.phase)} of step {phase.step}: its end is the request that failed."
