"""What each configuration of a sweep had allocated from phase to phase, beside what PyTorch's allocator counted."""

from collections.abc import Callable, Sequence

from cs336_systems.analysis.memory.profile import Moment, PhaseMemory
from cs336_systems.config import Phase
from cs336_systems.report.columns import Column
from cs336_systems.report.listing import Listing
from cs336_systems.report.memory.entries import MemoryEntry, Row, make_listing, rows_of_entries
from cs336_systems.report.memory.phases import difference_bytes, moment_name, moment_values
from cs336_systems.report.memory.words import GIB, Unit
from cs336_systems.text import counted

_GIB = Unit("GiB", GIB, 2)

LastStep = dict[str, PhaseMemory]
"""The phases of the last step of a recording, by name."""


def boundaries_listing(entries: Sequence[MemoryEntry]) -> Listing:
    """A row for the last step of each configuration; in the CSV every boundary of every recorded step."""
    rows = rows_of_entries(entries, lambda entry: [_last_step(entry)])
    present = [phase for phase in Phase if any(phase in row.part for row in rows)]
    columns: list[Column[Row[LastStep]]] = [Column("at its start", "GiB", spare=1, says=_at_start)]
    for phase in present:
        columns.append(Column(f"{phase}: peak", "GiB", says=_peak_of(phase)))
        columns.append(Column(f"{phase}: at its end", "GiB", spare=2, says=_end_of(phase)))
    table = (
        make_listing("", "Memory from phase to phase", rows, columns, {}, [_check(entries)]).tables if present else ()
    )
    csv: dict[str, Callable[[Row[Moment]], object]] = {
        "step": lambda row: None if row.part.step < 0 else row.part.step,
        "moment": lambda row: moment_name(row.part),
        **{name: _of_moment(value) for name, value in moment_values().items()},
    }
    moments = rows_of_entries(entries, lambda entry: entry.profile.boundaries)
    return Listing(name="boundaries", tables=table, csv=make_listing("", "", moments, [], csv, []).csv)


def _last_step(entry: MemoryEntry) -> LastStep:
    phases = entry.profile.phases
    return {phase.phase: phase for phase in phases if phase.step == phases[-1].step}


def _at_start(row: Row[LastStep]) -> str:
    return _GIB.cell(next(iter(row.part.values())).begin_bytes) if row.part else ""


def _peak_of(name: str) -> Callable[[Row[LastStep]], str]:
    def cell(row: Row[LastStep]) -> str:
        if (phase := row.part.get(name)) is None:
            return ""
        return f"{'' if phase.is_finished else 'above '}{_GIB.cell(phase.peak_bytes)}"

    return cell


def _end_of(name: str) -> Callable[[Row[LastStep]], str]:
    def cell(row: Row[LastStep]) -> str:
        phase = row.part.get(name)
        return _GIB.cell(phase.end_bytes) if phase is not None and phase.is_finished else ""

    return cell


def _of_moment(value: Callable[[Moment], object]) -> Callable[[Row[Moment]], object]:
    return lambda row: value(row.part)


def _check(entries: Sequence[MemoryEntry]) -> str:
    """How many boundaries were compared with the allocator's count, and by how much any differs."""
    moments = [moment for entry in entries for moment in entry.profile.boundaries]
    differences = [found for moment in moments if (found := difference_bytes(moment)) is not None]
    said = "The last recorded step. Above: memory ran out after that much."
    if not differences:
        return said
    wrong = [difference for difference in differences if difference]
    agree = "the categories add up to what PyTorch's allocator counted, to the byte"
    if wrong:
        most = max(map(abs, wrong))
        agree = f"at {len(wrong)} the blocks differ from what the allocator counted, by up to {most:,} bytes"
    return f"{said} Check, over {len(differences):,} boundaries of {counted(len(entries), 'recording')}: {agree}."
