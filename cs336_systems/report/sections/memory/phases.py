"""Tables of memory over the phases of a step: what there was where each ended, and its peak; of one run and of many."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cs336_systems.analysis.memory.profile import Category, MemoryProfile, Moment, PhaseMemory
from cs336_systems.config import Phase
from cs336_systems.report.columns import Column, column
from cs336_systems.report.entries import Values, over_configurations, rows_of
from cs336_systems.report.numbers import label
from cs336_systems.report.section import Section
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.report.sections.memory.tables import (
    SMALL,
    bytes_of,
    name_of,
    of_category,
    requested_of,
    rounding_words,
)
from cs336_systems.report.sections.memory.words import GIB_CELL, Unit, in_unit, milliseconds, unit_for
from cs336_systems.report.table import Table, make_table
from cs336_systems.text import counted

SIGHTED = tuple(category for category in Category if category is not Category.LATER)
"""Categories that a recording with notes may have; the CSV has the other one behind them."""
_MOMENT_CSV = (
    "step", "moment", "time_ms", "allocated_bytes", "counted_bytes", "difference_bytes", "requested_bytes",
    "counted_requested_bytes", "reserved_bytes",
    *(f"{name_of(category)}_{key}" for categories in (SIGHTED, (Category.LATER,))
      for key in ("bytes", "requested_bytes") for category in categories),
)  # fmt: skip
_PHASE_CSV = (
    "step", "phase", "status", "begin_ms", "end_ms", "begin_bytes", "peak_bytes", "peak_ms", "end_bytes"
)  # fmt: skip


def moment_name(moment: Moment) -> str:
    """`start`, or `end of forward`; the boundary of a phase that is not known is called so."""
    if not moment.phase:
        return "unknown"
    return moment.phase if moment.phase == "start" else f"end of {label(moment.phase)}"


def difference_bytes(moment: Moment) -> int | None:
    """By how much the blocks of the snapshot are more than what the allocator counted; None where it did not count."""
    return None if moment.counted_bytes is None else moment.allocated_bytes - moment.counted_bytes


def moment_values(moment: Moment, name: str = "") -> Values:
    """All that a CSV file has of a moment; it is called after its phase, or by `name`."""
    return {
        "step": None if moment.step < 0 else moment.step,
        "moment": name or moment_name(moment),
        "time_s": moment.time_s,
        "time_ms": moment.time_s * 1e3,
        "allocated_bytes": moment.allocated_bytes,
        "counted_bytes": moment.counted_bytes,
        "difference_bytes": difference_bytes(moment),
        "requested_bytes": moment.requested_bytes,
        "counted_requested_bytes": moment.counted_requested_bytes,
        "reserved_bytes": moment.reserved_bytes,
        **{f"{name_of(category)}_bytes": bytes_of(moment, category) for category in Category},
        **{f"{name_of(category)}_requested_bytes": requested_of(moment, category) for category in Category},
    }


def boundaries_section(profile: MemoryProfile) -> Section:
    """What there was whenever a phase ended, and at the peak, beside the allocator's own count.

    A second table has what was asked for, where that differs enough to show.
    """
    phase = f", in {label(profile.peak.phase)}" if profile.peak.phase else ""
    peak = moment_values(profile.peak, f"peak{phase}")
    rows = sorted([*map(moment_values, profile.boundaries), peak], key=lambda row: float(row["time_ms"]))
    unit = unit_for(max(row["reserved_bytes"] for row in rows))
    columns = [
        *_name_columns(rows),
        *_category_columns(rows, unit, "bytes", SMALL * profile.peak.allocated_bytes),
        in_unit("allocated_bytes", unit),
        *_count_columns(rows, unit, "counted_bytes"),
        in_unit("reserved_bytes", unit, drop_order=3),
    ]
    rounding = list(rounding_words([*profile.boundaries, profile.peak]))
    tables = [make_table("Memory from phase to phase", columns, rows, [_check(profile), *rounding])]
    if rounding and profile.boundaries:
        tables.append(_requested_table(profile, rows, unit))
    return Section(name="boundaries", tables=tuple(tables), rows=rows, keys=_MOMENT_CSV)


def _requested_table(profile: MemoryProfile, rows: Sequence[Values], unit: Unit) -> Table:
    columns = [
        *_name_columns(rows),
        *_category_columns(rows, unit, "requested_bytes", SMALL * profile.peak.requested_bytes),
        in_unit("requested_bytes", unit, "together"),
        *_count_columns(rows, unit, "counted_requested_bytes"),
    ]
    notes = ["What the program asked for: the sizes of its tensors.", *_check_requested(profile)]
    return make_table("Memory asked for, from phase to phase", columns, rows, notes)


def _name_columns(rows: Sequence[Values]) -> list[Column[Values]]:
    step = [column("step")] if any(row["step"] is not None for row in rows) else []
    return [*step, column("moment"), column("time_s", write=milliseconds)]


def _category_columns(rows: Sequence[Values], unit: Unit, key: str, small_bytes: float) -> Iterator[Column[Values]]:
    """One for each category of which there is ever something."""
    for category in Category:
        if most := max(row[f"{name_of(category)}_{key}"] for row in rows):
            yield of_category(category, unit, key, drop_order=5 if most < small_bytes else 1)


def _count_columns(rows: Sequence[Values], unit: Unit, key: str) -> list[Column[Values]]:
    """What the allocator itself counted, if it did."""
    return [in_unit(key, unit, drop_order=2)] if any(row[key] is not None for row in rows) else []


def _differences(moments: Iterable[Moment]) -> list[int]:
    return [found for moment in moments if (found := difference_bytes(moment)) is not None]


def _check(profile: MemoryProfile) -> str:
    """Whether categories, which add up to what is allocated, agree with the allocator's own count."""
    differences = _differences(profile.boundaries)
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
    counted_there = [moment for moment in profile.boundaries if moment.counted_requested_bytes is not None]
    if counted_there and all(moment.requested_bytes == moment.counted_requested_bytes for moment in counted_there):
        yield f"Check: at {_where(len(counted_there))} it adds up to what PyTorch's allocator counted, to the byte."


def _where(num_boundaries: int) -> str:
    return "the one boundary" if num_boundaries == 1 else f"all {num_boundaries} boundaries"


def boundaries_by_configuration(entries: Sequence[MemoryEntry]) -> Section:
    """A row for the last step of each configuration; in the CSV every boundary of every recorded step."""
    rows = rows_of(entries, lambda entry: [{"last step": _last_step(entry)}])
    present = [phase for phase in Phase if any(phase in row["last step"] for row in rows)]
    columns: list[Column[Values]] = [Column("at its start", "GiB", drop_order=1, text=_at_start)]
    for phase in present:
        columns.append(Column(f"{phase}: peak", "GiB", text=_peak_of(phase)))
        columns.append(Column(f"{phase}: at its end", "GiB", drop_order=2, text=_end_of(phase)))
    title, notes = "Memory from phase to phase", [_check_all(entries)]
    tables = over_configurations("", title, rows, columns, (), notes).tables if present else ()
    moments = rows_of(entries, lambda entry: map(moment_values, entry.profile.boundaries))
    return replace(over_configurations("boundaries", "", moments, [], _MOMENT_CSV, []), tables=tables)


def _last_step(entry: MemoryEntry) -> dict[str, PhaseMemory]:
    """The phases of the last step of a recording, by name."""
    phases = entry.profile.phases
    return {phase.phase: phase for phase in phases if phase.step == phases[-1].step}


LastStep = Mapping[str, Mapping[str, PhaseMemory]]


def _at_start(row: LastStep) -> str:
    phases = row["last step"]
    return GIB_CELL.cell(next(iter(phases.values())).begin_bytes) if phases else ""


def _peak_of(name: str) -> Callable[[LastStep], str]:
    def cell(row: LastStep) -> str:
        if (phase := row["last step"].get(name)) is None:
            return ""
        return f"{'' if phase.is_finished else 'above '}{GIB_CELL.cell(phase.peak_bytes)}"

    return cell


def _end_of(name: str) -> Callable[[LastStep], str]:
    def cell(row: LastStep) -> str:
        phase = row["last step"].get(name)
        return GIB_CELL.cell(phase.end_bytes) if phase is not None and phase.is_finished else ""

    return cell


def _check_all(entries: Sequence[MemoryEntry]) -> str:
    """How many boundaries were compared with the allocator's count, and by how much any differs."""
    differences = _differences(moment for entry in entries for moment in entry.profile.boundaries)
    said = "The last recorded step. Above: memory ran out after that much."
    if not differences:
        return said
    wrong = [difference for difference in differences if difference]
    agree = "the categories add up to what PyTorch's allocator counted, to the byte"
    if wrong:
        most = max(map(abs, wrong))
        agree = f"at {len(wrong)} the blocks differ from what the allocator counted, by up to {most:,} bytes"
    return f"{said} Check, over {len(differences):,} boundaries of {counted(len(entries), 'recording')}: {agree}."


def phases_section(profile: MemoryProfile) -> Section:
    """Each phase of each step with its own peak."""
    phases = profile.phases
    unit = unit_for(max((phase.peak_bytes for phase in phases), default=0))
    rows = [
        {
            "step": phase.step,
            "phase": phase.phase,
            "status": "ok" if phase.is_finished else "oom",
            "begin_s": phase.begin_s,
            "begin_ms": phase.begin_s * 1e3,
            "end_ms": phase.end_s * 1e3,
            "duration_s": phase.end_s - phase.begin_s,
            "begin_bytes": phase.begin_bytes,
            "peak_bytes": phase.peak_bytes,
            "peak_s": phase.peak_s,
            "peak_ms": phase.peak_s * 1e3,
            "end_bytes": phase.end_bytes,
        }
        for phase in phases
    ]
    columns = [
        column("step"),
        column("phase", write=label),
        column("begin_s", write=milliseconds),
        column("duration_s", write=milliseconds),
        in_unit("begin_bytes", unit, drop_order=2),
        in_unit("peak_bytes", unit),
        column("peak_s", write=milliseconds),
        in_unit("end_bytes", unit, drop_order=1),
    ]
    notes = ["Peaks are over all events; times are those of a run that is being recorded.", *_unfinished(phases)]
    table = make_table("Peak of each phase", columns, rows, notes, lambda row: row["status"] != "ok")
    return Section(name="phases", tables=(table,) if rows else (), rows=rows, keys=_PHASE_CSV)


def _unfinished(phases: Iterable[PhaseMemory]) -> Iterator[str]:
    for phase in phases:
        if not phase.is_finished:
            yield f"Memory ran out in {label(phase.phase)} of step {phase.step}: its end is the request that failed."
