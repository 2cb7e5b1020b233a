"""The memory of a sweep's configurations beside each other: tables, the course's answers, pictures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from cs336_systems.analysis.memory.profile import Category, LikeAllocations
from cs336_systems.config import Mode
from cs336_systems.report import drawing
from cs336_systems.report.columns import Column
from cs336_systems.report.identity import file_names
from cs336_systems.report.listing import Listing, share, texts_of, write_files
from cs336_systems.report.memory.allocations import typical
from cs336_systems.report.memory.entries import (
    MemoryEntry,
    Row,
    in_order,
    labels,
    make_listing,
    rows_of_entries,
    settings,
)
from cs336_systems.report.memory.peak_bars import draw_peaks
from cs336_systems.report.memory.phases import SMALL
from cs336_systems.report.memory.plots import draw_memory
from cs336_systems.report.memory.sweep_answers import sweep_answers, twins
from cs336_systems.report.memory.sweep_phases import boundaries_listing
from cs336_systems.report.memory.tables import bytes_of, fragmentation_bytes, name_of
from cs336_systems.report.memory.words import GIB, MIB, Unit, innermost, size
from cs336_systems.report.table import Table

__all__ = ["MemoryEntry", "memory_sweep_tables", "write_memory_sweep"]

_GIB = Unit("GiB", GIB, 2)
_MIB = Unit("MiB", MIB, 2)
Bar = tuple[str, MemoryEntry]
"""A run with its label."""
NUM_LARGEST = 3
"""Allocations of each configuration to list."""
MAX_BARS = 40
"""Of one picture; more would not fit a page."""


def memory_sweep_tables(entries: Sequence[MemoryEntry]) -> list[Table]:
    """For a terminal: peaks by mode, every peak, what each consists of; none for no entries."""
    listings = [make(in_order(entries)) for make in _LISTINGS[:2]] if entries else []
    return [table for listing in listings for table in listing.tables]


def write_memory_sweep(entries: Sequence[MemoryEntry], directory: Path) -> list[Path]:
    """Write each table as CSV, Markdown, LaTeX and Typst, answers.md and plots/; return the paths.

    plots/peaks.png has a bar for each configuration, peaks2.png those that it has no room for, plots/<key>_timeline.png
    is its timeline. The directory is made. Without entries nothing is written. A table that these entries have no rows
    for has no files: those of earlier entries are removed.
    """
    if not entries:
        return []
    ordered = in_order(entries)
    files: dict[str, str | bytes] = {"answers.md": sweep_answers(ordered)}
    for make in _LISTINGS:
        files |= texts_of(make(ordered))
    files |= _pictures(ordered)
    return write_files(files, directory)


def _pictures(entries: Sequence[MemoryEntry]) -> dict[str, bytes]:
    pictures = {}
    for page, shown in enumerate(_pages(list(zip(labels(entries), entries, strict=True))), start=1):
        groups = [[(label, entry.profile) for label, entry in group] for _, group in groupby(shown, _size)]
        name = f"plots/peaks{'' if page == 1 else page}.png"
        pictures[name] = drawing.to_png(draw_peaks(groups, settings(entries)))
    titles = labels(entries, always=("size", "context_length", "mode", "precision"))
    stems = file_names(entry.config.key for entry in entries)
    for entry, title, stem in zip(entries, titles, stems, strict=True):
        picture = draw_memory(entry.profile, settings([entry]), title)
        pictures[f"plots/{stem}_timeline.png"] = drawing.to_png(picture)
    return pictures


def _pages(bars: Sequence[Bar]) -> Iterator[list[Bar]]:
    """As many sizes on a page as there is room for; one that needs more than a page begins a new one."""
    page: list[Bar] = []
    for _, group in groupby(bars, _size):
        own = list(group)
        if page and len(page) + len(own) > MAX_BARS:
            yield page
            page = []
        page += own
        while len(page) > MAX_BARS:
            yield page[:MAX_BARS]
            page = page[MAX_BARS:]
    yield page


def _size(bar: Bar) -> str:
    return bar[1].config.size


def peaks_listing(entries: Sequence[MemoryEntry]) -> Listing:
    """A table of peaks with a column for each mode, then every peak with what else is known of it."""
    rows = rows_of_entries(entries, lambda _: [None])
    columns: list[Column[Row[None]]] = [
        Column("peak", "GiB", says=lambda row: _GIB.cell(row.entry.profile.peak.allocated_bytes)),
        Column("in", numeric=False, spare=3, says=lambda row: row.entry.profile.peak.phase),
        Column("without recording", "GiB", spare=7, says=lambda row: _known(row.entry.plain_peak_bytes, _GIB)),
        Column("predicted", "GiB", spare=1, says=lambda row: _known(row.entry.predicted_peak_bytes, _GIB)),
        Column("reserved", "GiB", spare=5, says=lambda row: _GIB.cell(row.entry.profile.peak_reserved_bytes)),
        Column("residual", "MiB", spare=6, says=lambda row: _known(row.entry.profile.residual_stream_bytes, _MIB)),
        Column("saved per block", "MiB", spare=2, says=lambda row: _known(_block(row.entry, "saved_bytes"), _MIB)),
        Column(
            "gradients per block", "MiB", spare=4, says=lambda row: _known(_block(row.entry, "gradient_bytes"), _MIB)
        ),
        Column("status", numeric=False, says=_status),
    ]
    csv: dict[str, Callable[[Row[None]], object]] = {
        "status": _csv_status,
        "peak_allocated_gib": lambda row: row.entry.profile.peak.allocated_bytes / GIB,
        "peak_allocated_bytes": lambda row: row.entry.profile.peak.allocated_bytes,
        "peak_phase": lambda row: row.entry.profile.peak.phase or None,
        "plain_peak_allocated_bytes": lambda row: row.entry.plain_peak_bytes,
        "predicted_peak_allocated_bytes": lambda row: row.entry.predicted_peak_bytes,
        "peak_reserved_bytes": lambda row: row.entry.profile.peak_reserved_bytes,
        "fragmentation_bytes": lambda row: fragmentation_bytes(row.entry.profile),
        "outside_bytes": lambda row: row.entry.profile.outside_bytes,
        "residual_stream_bytes": lambda row: row.entry.profile.residual_stream_bytes,
        "block_saved_bytes": lambda row: _block(row.entry, "saved_bytes"),
        "block_gradient_bytes": lambda row: _block(row.entry, "gradient_bytes"),
    }
    notes = ["Peak: allocated at most; reserved: held by PyTorch at most."]
    every = make_listing("peaks", "Peaks of memory", rows, columns, csv, [*notes, *_failure_notes(entries)])
    return Listing(name="peaks", tables=(*_by_mode(entries), *every.tables), csv=every.csv)


def _status(row: Row[None]) -> str:
    return "out of memory" if row.entry.is_out_of_memory else "ok"


def _csv_status(row: Row[None]) -> str:
    return "oom" if row.entry.is_out_of_memory else "ok"


def _failure_notes(entries: Sequence[MemoryEntry]) -> Iterator[str]:
    """What the rows of runs that ran out of memory are, and are not."""
    failed = [entry for entry in entries if entry.is_out_of_memory]
    if failed:
        yield "Out of memory: what there was before it, which is less than the run needs."
    if any(entry.config.mode is Mode.TRAIN and _is_before_state(entry) for entry in failed):
        yield "Where memory ran out in the first forward pass, gradients and the optimizer's state were still to come."


def _is_before_state(entry: MemoryEntry) -> bool:
    moments, kept = (entry.profile.peak, *entry.profile.boundaries), (Category.GRADIENTS, Category.OPTIMIZER_STATE)
    return not any(bytes_of(moment, category) for moment in moments for category in kept)


def _block(entry: MemoryEntry, field: str) -> int | None:
    """Of a typical block; None where no block saved anything."""
    return getattr(typical(entry.profile.blocks), field) if entry.profile.blocks else None


def _known(num_bytes: int | None, unit: Unit) -> str:
    return "" if num_bytes is None else unit.cell(num_bytes)


def _by_mode(entries: Sequence[MemoryEntry]) -> tuple[Table, ...]:
    """Forward alone against a whole step; nothing where all runs are of one mode."""
    modes = [mode for mode in Mode if any(entry.config.mode is mode for entry in entries)]
    if len(modes) < 2:
        return ()
    groups = twins(entries, "mode")
    rows = rows_of_entries([group[0] for group in groups], lambda _: [None])
    of = {id(group[0]): {entry.config.mode: entry for entry in group} for group in groups}
    columns: list[Column[Row[None]]] = [Column(mode, "GiB", says=_mode_cell(of, mode)) for mode in modes]
    note = "Allocated at most. Above: memory ran out after that much."
    listing = make_listing("", "Peak of memory by mode", rows, columns, {}, [note], ("mode",), entries)
    return listing.tables


def _mode_cell(of: Mapping[int, Mapping[Mode, MemoryEntry]], mode: Mode) -> Callable[[Row[None]], str]:
    return lambda row: _peak_cell(of[id(row.entry)].get(mode))


def _peak_cell(entry: MemoryEntry | None) -> str:
    if entry is None:
        return ""
    peak = _GIB.cell(entry.profile.peak.allocated_bytes)
    return f"above {peak}" if entry.is_out_of_memory else peak


def categories_listing(entries: Sequence[MemoryEntry]) -> Listing:
    """What every peak consists of, by category."""
    present = [name for name in Category if any(bytes_of(entry.profile.peak, name) for entry in entries)]
    rows = rows_of_entries(entries, lambda _: [None])
    columns: list[Column[Row[None]]] = [
        *(
            Column(name, "GiB", spare=1 if _is_seen(name, entries) else 3, says=_category_cell(name))
            for name in present
        ),
        Column("peak", "GiB", says=lambda row: _GIB.cell(row.entry.profile.peak.allocated_bytes)),
        Column("in", numeric=False, spare=2, says=lambda row: row.entry.profile.peak.phase),
        Column("status", numeric=False, says=_status),
    ]
    csv: dict[str, Callable[[Row[None]], object]] = {
        "status": _csv_status,
        "peak_phase": lambda row: row.entry.profile.peak.phase or None,
        "peak_allocated_bytes": lambda row: row.entry.profile.peak.allocated_bytes,
    }
    for name in Category:
        csv[f"{name_of(name)}_bytes"] = _category_value(name)
        csv[f"{name_of(name)}_share"] = _category_share(name)
    notes = list(_failure_notes(entries))
    return make_listing("categories", "What the peaks consist of", rows, columns, csv, notes)


def _is_seen(name: Category, entries: Sequence[MemoryEntry]) -> bool:
    """Whether any peak has so much of the category that a narrow terminal shall show it."""
    peaks = [entry.profile.peak for entry in entries]
    return any(bytes_of(peak, name) > SMALL * peak.allocated_bytes for peak in peaks)


def _category_cell(name: Category) -> Callable[[Row[None]], str]:
    return lambda row: _GIB.cell(bytes_of(row.entry.profile.peak, name))


def _category_value(name: Category) -> Callable[[Row[None]], int]:
    return lambda row: bytes_of(row.entry.profile.peak, name)


def _category_share(name: Category) -> Callable[[Row[None]], float | None]:
    return lambda row: share(bytes_of(row.entry.profile.peak, name), row.entry.profile.peak.allocated_bytes)


def largest_listing(entries: Sequence[MemoryEntry]) -> Listing:
    """The largest allocations of every configuration, and where they come from."""
    rows = rows_of_entries(entries, lambda entry: entry.profile.largest[:NUM_LARGEST])
    columns: list[Column[Row[LikeAllocations]]] = [
        Column("asked for", "bytes", spare=3, says=lambda row: f"{row.part.requested_bytes:,}"),
        Column("size", says=lambda row: size(row.part.requested_bytes)),
        Column("count", spare=1, says=lambda row: f"{row.part.count:,}"),
        Column("category", numeric=False, spare=2, says=lambda row: row.part.category),
        Column("formula", numeric=False, spare=4, says=lambda row: row.part.explanation),
        Column("place", numeric=False, spare=5, says=lambda row: innermost(row.part.places)),
    ]
    csv: dict[str, Callable[[Row[LikeAllocations]], object]] = {
        "requested_bytes": lambda row: row.part.requested_bytes,
        "bytes": lambda row: row.part.num_bytes,
        "count": lambda row: row.part.count,
        "category": lambda row: row.part.category,
        "name": lambda row: row.part.name,
        "explanation": lambda row: row.part.explanation,
        "place": lambda row: innermost(row.part.places),
    }
    return make_listing("largest", "Largest allocations", rows, columns, csv, [])


_LISTINGS: tuple[Callable[[Sequence[MemoryEntry]], Listing], ...] = (
    peaks_listing, categories_listing, boundaries_listing, largest_listing,
)  # fmt: skip
"""The first two are what a terminal has room for."""
