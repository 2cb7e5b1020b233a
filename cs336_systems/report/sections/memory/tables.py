"""Tables of peaks of memory, what they consist of and what the allocator did; of one `MemoryProfile` and over many.

Those over its phases are in phases.py, those of single allocations and of blocks of the model in allocations.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cs336_systems.analysis.memory.profile import Category, CategoryBytes, MemoryProfile, Moment
from cs336_systems.config import Mode
from cs336_systems.report.columns import Column, column
from cs336_systems.report.entries import Values, over_configurations, rows_of
from cs336_systems.report.numbers import share
from cs336_systems.report.section import Section
from cs336_systems.report.sections.memory.allocations import typical
from cs336_systems.report.sections.memory.entries import MemoryEntry, twins
from cs336_systems.report.sections.memory.words import (
    GIB,
    GIB_CELL,
    MIB,
    MIB_CELL,
    Unit,
    in_unit,
    innermost,
    size,
    unit_for,
    when,
)
from cs336_systems.report.table import Table, make_table

WHOLE = "allocated"
"""What stands in the place of a category for all of them together."""
MIN_ROUNDED = 0.01
"""Of a category: with less, its blocks and what was asked for look the same in a table."""
MIN_ROUNDED_BYTES = MIB
SMALL = 0.01
"""Of the peak: a category that never has more can be left out on a narrow terminal."""


def fragmentation_bytes(profile: MemoryProfile) -> int:
    """What the allocator held at the peak and no block used: its cache, and the rests between blocks."""
    return profile.peak.reserved_bytes - profile.peak.allocated_bytes


def bytes_of(moment: Moment, category: Category) -> int:
    """How much of the category there was at the moment."""
    return sum(row.num_bytes for row in moment.categories if row.category is category)


def requested_of(moment: Moment, category: Category) -> int:
    """How much of the category had been asked for."""
    return sum(row.requested_bytes for row in moment.categories if row.category is category)


def name_of(category: Category) -> str:
    """The category as part of a column's name: `optimizer_state`."""
    return category.replace(" ", "_")


def of_category(category: Category, unit: Unit, key: str = "bytes", drop_order: int = 0) -> Column[Values]:
    """How much of the category there is, or with another `key` was asked for."""
    return Column(category, unit.name, key=f"{name_of(category)}_{key}", write=unit.cell, drop_order=drop_order)


def _quantity(name: str, value: int | None, about: str = "", unit: str = "bytes") -> Values:
    """One line of a table of single values."""
    return {"quantity": name, "value": value, "unit": unit, "about": about}


def peak_section(profile: MemoryProfile) -> Section:
    """The peak, counted in each way that is in use, and what it needs beside the blocks themselves."""
    peak = profile.peak
    rows = [
        _quantity("peak allocated", peak.allocated_bytes, when(peak)),
        _quantity("rounding", profile.rounding_bytes_at_peak,
                  "part of the peak: blocks are larger than what was asked for"),
        _quantity("peak asked for", profile.peak_requested_bytes,
                  "the peak without rounding: what PyTorch's viewer draws"),
        _quantity("peak recorded", profile.peak_recorded_bytes,
                  "held throughout as blocks, all else as asked for"),
        _quantity("held throughout", profile.held_bytes, "there before the recording and after it"),
        _quantity("reserved at the peak", peak.reserved_bytes, "segments that PyTorch held then"),
        _quantity("fragmentation", fragmentation_bytes(profile),
                  "reserved at the peak and not allocated: cache, and the rests between blocks"),
        _quantity("peak reserved", profile.peak_reserved_bytes, "at any time"),
        _quantity("outside of PyTorch", profile.outside_bytes,
                  "used on the device at the end: CUDA context, libraries, other processes"),
        _quantity("residual stream", profile.residual_stream_bytes, "one tensor of batch x T x d_model in fp32"),
    ]  # fmt: skip
    return _quantities(profile, "peak", "Peak", rows, [*_several_counts(profile), *profile.notes])


def _several_counts(profile: MemoryProfile) -> Iterator[str]:
    """Why one peak has several sizes, where it has."""
    counts = (profile.peak.allocated_bytes, profile.peak_requested_bytes, profile.peak_recorded_bytes)
    allocated, requested, recorded = map(size, counts)
    if allocated != requested:
        mixed = f"; {recorded} if the requests of the recorded events are added to the blocks held throughout"
        yield (
            f"One peak, counted in several ways: {allocated} in blocks, as torch.cuda.max_memory_allocated() does; "
            f"{requested} as asked for, as PyTorch's viewer does{mixed if recorded != requested else ''}. A block is "
            "larger than what was asked for: rounded up to 512 bytes, and a rest of up to 1 MiB is not split off."
        )


def allocator_section(profile: MemoryProfile) -> Section:
    """What the allocator had to do with the device, and where it could not."""
    work = profile.work
    rows = [
        _quantity("blocks in use", profile.num_allocations,
                  "at some time of the recording, those held throughout not counted", "blocks"),
        _quantity("blocks allocated", work.allocations, "during the recording", "blocks"),
        _quantity("segments allocated", work.segments_allocated,
                  "asked of the driver; a steady state asks for none", "segments"),
        _quantity("segments freed", work.segments_freed, "given back to the driver", "segments"),
        _quantity("out of memory", work.out_of_memory, unit="times"),
    ]  # fmt: skip
    if failure := work.first_failure:
        place = f", at {innermost(failure.places)}" if failure.places else ""
        rows += [
            _quantity("asked for", failure.requested_bytes, f"{when(failure)}{place}"),
            _quantity("free then", failure.free_bytes, "on the device"),
            _quantity("allocated then", failure.allocated_bytes, "in blocks"),
            _quantity("reserved then", failure.reserved_bytes, "segments that PyTorch held"),
            _quantity("events before it", failure.event, f"of {work.events:,} in the recording", "events"),
        ]
    return _quantities(profile, "allocator", "Work of the allocator", rows)


def _quantities(
    profile: MemoryProfile, name: str, title: str, rows: Sequence[Values], notes: Iterable[str] = ()
) -> Section:
    def cell(row: Values) -> str:
        if row["value"] is None:
            return "unknown"
        return size(row["value"]) if row["unit"] == "bytes" else f"{row['value']:,}"

    def exact(row: Values) -> str:
        return f"{row['value']:,}" if row["value"] is not None and row["unit"] == "bytes" else ""

    has_bytes = any(row["unit"] == "bytes" for row in rows)
    columns = [
        column("quantity"),
        column("value", text=cell),
        *([column("value", name="exact", drop_order=1, text=exact)] if has_bytes else []),
        column("about"),
    ]
    source = [_quantity("device", profile.device, unit="index"), _quantity("steps", profile.num_steps, unit="steps")]
    table = make_table(title, columns, rows, notes)
    return Section(name=name, tables=(table,), rows=[*rows, *source], keys=("quantity", "value", "unit"))


def rounding_words(moments: Iterable[Moment]) -> Iterator[str]:
    """A sentence on the categories whose blocks are larger than what was asked for, where a table shows that."""
    most: dict[Category, CategoryBytes] = {}
    for row in (row for moment in moments for row in moment.categories):
        if row.category not in most or _rounding(row) > _rounding(most[row.category]):
            most[row.category] = row
    said = [
        f"{name} {size(most[name].num_bytes)} for {size(most[name].requested_bytes)}"
        for name in Category
        if name in most and _rounding(most[name]) >= max(MIN_ROUNDED_BYTES, MIN_ROUNDED * most[name].requested_bytes)
    ]
    if said:
        yield f"Blocks are larger than what was asked for: {', '.join(said)}."


def _rounding(row: CategoryBytes) -> int:
    return row.num_bytes - row.requested_bytes


def categories_section(profile: MemoryProfile) -> Section:
    """What the peak consists of by category, in the order of the categories, and their sum."""
    peak = profile.peak
    unit = unit_for(peak.allocated_bytes)
    kept = sorted(peak.categories, key=lambda row: list(Category).index(row.category))
    named = [(str(row.category), row.num_bytes, row.requested_bytes, row.count) for row in kept if row.num_bytes]
    named.append((WHOLE, peak.allocated_bytes, peak.requested_bytes, sum(row.count for row in kept)))
    rows = [
        {
            "category": name, "bytes": num_bytes, "gib": num_bytes / GIB,
            "share": share(num_bytes, peak.allocated_bytes), "requested_bytes": requested, "blocks": blocks,
        }
        for name, num_bytes, requested, blocks in named
    ]  # fmt: skip
    columns = [
        column("category"),
        in_unit("bytes", unit),
        column("share"),
        in_unit("requested_bytes", unit, drop_order=3),
        column("blocks"),
    ]
    notes = [f"The peak is {when(peak)}.", *rounding_words([peak])]
    table = make_table("Categories at the peak", columns, rows, notes)
    return Section(name="categories", tables=(table,), rows=rows)


def _peak(entry: MemoryEntry) -> Values:
    """What is known of the peak of a configuration."""
    profile, blocks = entry.profile, entry.profile.blocks
    return {
        "status": "oom" if entry.is_out_of_memory else "ok",
        "peak_allocated_gib": profile.peak.allocated_bytes / GIB,
        "peak_allocated_bytes": profile.peak.allocated_bytes,
        "peak_phase": profile.peak.phase or None,
        "plain_peak_allocated_bytes": entry.plain_peak_bytes,
        "predicted_peak_allocated_bytes": entry.predicted_peak_bytes,
        "peak_reserved_bytes": profile.peak_reserved_bytes,
        "fragmentation_bytes": fragmentation_bytes(profile),
        "outside_bytes": profile.outside_bytes,
        "residual_stream_bytes": profile.residual_stream_bytes,
        "block_saved_bytes": typical(blocks).saved_bytes if blocks else None,
        "block_gradient_bytes": typical(blocks).gradient_bytes if blocks else None,
    }


def peaks_by_configuration(entries: Sequence[MemoryEntry]) -> Section:
    """A table of peaks with a column for each mode, then every peak with what else is known of it."""
    rows = rows_of(entries, lambda entry: [_peak(entry)])
    columns = [
        in_unit("peak_allocated_bytes", GIB_CELL),
        column("peak_phase", drop_order=3),
        in_unit("plain_peak_allocated_bytes", GIB_CELL, drop_order=7),
        in_unit("predicted_peak_allocated_bytes", GIB_CELL, drop_order=1),
        in_unit("peak_reserved_bytes", GIB_CELL, drop_order=5),
        in_unit("residual_stream_bytes", MIB_CELL, drop_order=6),
        in_unit("block_saved_bytes", MIB_CELL, drop_order=2),
        in_unit("block_gradient_bytes", MIB_CELL, drop_order=4),
        column("status"),
    ]
    notes = ["Peak: allocated at most; reserved: held by PyTorch at most.", *_failure_notes(entries)]
    csv = tuple(_peak(entries[0]))
    every = over_configurations("peaks", "Peaks of memory", rows, columns, csv, notes)
    return replace(every, tables=(*_by_mode(entries), *every.tables))


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


def _by_mode(entries: Sequence[MemoryEntry]) -> tuple[Table, ...]:
    """Forward alone against a whole step; nothing where all runs are of one mode."""
    modes = [mode for mode in Mode if any(entry.config.mode is mode for entry in entries)]
    if len(modes) < 2:
        return ()
    groups = twins(entries, "mode")
    of = {id(group[0]): {entry.config.mode: entry for entry in group} for group in groups}
    rows = rows_of([group[0] for group in groups], lambda entry: [{"peaks": of[id(entry)]}])
    columns: list[Column[Values]] = [Column(mode, "GiB", text=_mode_cell(mode)) for mode in modes]
    note = "Allocated at most. Above: memory ran out after that much."
    return over_configurations(
        "", "Peak of memory by mode", rows, columns, (), [note], without=("mode",), among=entries
    ).tables


def _mode_cell(mode: Mode) -> Callable[[Mapping[str, Mapping[Mode, MemoryEntry]]], str]:
    def cell(row: Mapping[str, Mapping[Mode, MemoryEntry]]) -> str:
        if (entry := row["peaks"].get(mode)) is None:
            return ""
        return f"{'above ' if entry.is_out_of_memory else ''}{GIB_CELL.cell(entry.profile.peak.allocated_bytes)}"

    return cell


def categories_by_configuration(entries: Sequence[MemoryEntry]) -> Section:
    """What every peak consists of, by category."""
    present = [name for name in Category if any(bytes_of(entry.profile.peak, name) for entry in entries)]
    rows = rows_of(entries, lambda entry: [_peak(entry) | _categories(entry.profile.peak)])
    columns = [
        *(of_category(name, GIB_CELL, drop_order=1 if _is_seen(name, entries) else 3) for name in present),
        in_unit("peak_allocated_bytes", GIB_CELL),
        column("peak_phase", drop_order=2),
        column("status"),
    ]
    csv = ("status", "peak_phase", "peak_allocated_bytes", *_categories(entries[0].profile.peak))
    notes = list(_failure_notes(entries))
    return over_configurations("categories", "What the peaks consist of", rows, columns, csv, notes)


def _categories(moment: Moment) -> Values:
    """Bytes of each category and its share."""
    found = {name: bytes_of(moment, name) for name in Category}
    return {
        f"{name_of(name)}_{key}": value
        for name, num_bytes in found.items()
        for key, value in (("bytes", num_bytes), ("share", share(num_bytes, moment.allocated_bytes)))
    }


def _is_seen(name: Category, entries: Sequence[MemoryEntry]) -> bool:
    """Whether any peak has so much of the category that a narrow terminal shall show it."""
    peaks = [entry.profile.peak for entry in entries]
    return any(bytes_of(peak, name) > SMALL * peak.allocated_bytes for peak in peaks)
