"""Tables of one `MemoryProfile`: its peak, what that consists of, what the allocator did.

Those over its phases are in phases.py, those of single allocations and of blocks of the model in allocations.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from cs336_systems.analysis.memory.profile import Category, CategoryBytes, MemoryProfile, Moment
from cs336_systems.report.columns import Column
from cs336_systems.report.listing import Listing, csv_of, percent, share
from cs336_systems.report.memory.words import GIB, MIB, innermost, size, unit_for, when
from cs336_systems.report.table import make_table

WHOLE = "allocated"
"""What stands in the place of a category for all of them together."""
MIN_ROUNDED = 0.01
"""Of a category: with less, its blocks and what was asked for look the same in a table."""
MIN_ROUNDED_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One line of a table of single values."""

    name: str
    value: int | None
    unit: str = "bytes"
    about: str = ""
    """What it is, in words."""

    @property
    def cell(self) -> str:
        """The value to read."""
        if self.value is None:
            return "unknown"
        return size(self.value) if self.unit == "bytes" else f"{self.value:,}"


def fragmentation_bytes(profile: MemoryProfile) -> int:
    """What the allocator held at the peak and no block used: its cache, and the rests between blocks."""
    return profile.peak.reserved_bytes - profile.peak.allocated_bytes


def bytes_of(moment: Moment, category: Category) -> int:
    """How much of the category there was at the moment."""
    return sum(row.num_bytes for row in moment.categories if row.category is category)


def requested_of(moment: Moment, category: Category) -> int:
    """How much of the category had been asked for."""
    return sum(row.requested_bytes for row in moment.categories if row.category is category)


def peak_listing(profile: MemoryProfile) -> Listing:
    """The peak, counted in each way that is in use, and what it needs beside the blocks themselves."""
    peak = profile.peak
    rows = [
        Quantity(name="peak allocated", value=peak.allocated_bytes, about=when(peak)),
        Quantity(name="rounding", value=profile.rounding_bytes_at_peak,
                 about="part of the peak: blocks are larger than what was asked for"),
        Quantity(name="peak asked for", value=profile.peak_requested_bytes,
                 about="the peak without rounding: what PyTorch's viewer draws"),
        Quantity(name="peak recorded", value=profile.peak_recorded_bytes,
                 about="held throughout as blocks, all else as asked for"),
        Quantity(name="held throughout", value=profile.held_bytes, about="there before the recording and after it"),
        Quantity(name="reserved at the peak", value=peak.reserved_bytes, about="segments that PyTorch held then"),
        Quantity(name="fragmentation", value=fragmentation_bytes(profile),
                 about="reserved at the peak and not allocated: cache, and the rests between blocks"),
        Quantity(name="peak reserved", value=profile.peak_reserved_bytes, about="at any time"),
        Quantity(name="outside of PyTorch", value=profile.outside_bytes,
                 about="used on the device at the end: CUDA context, libraries, other processes"),
        Quantity(name="residual stream", value=profile.residual_stream_bytes,
                 about="one tensor of batch x T x d_model in fp32"),
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


def allocator_listing(profile: MemoryProfile) -> Listing:
    """What the allocator had to do with the device, and where it could not."""
    work = profile.work
    rows = [
        Quantity(name="blocks in use", value=profile.num_allocations, unit="blocks",
                 about="at some time of the recording, those held throughout not counted"),
        Quantity(name="blocks allocated", value=work.allocations, unit="blocks", about="during the recording"),
        Quantity(name="segments allocated", value=work.segments_allocated, unit="segments",
                 about="asked of the driver; a steady state asks for none"),
        Quantity(name="segments freed", value=work.segments_freed, unit="segments", about="given back to the driver"),
        Quantity(name="out of memory", value=work.out_of_memory, unit="times"),
    ]  # fmt: skip
    if failure := work.first_failure:
        place = f", at {innermost(failure.places)}" if failure.places else ""
        rows += [
            Quantity(name="asked for", value=failure.requested_bytes, about=f"{when(failure)}{place}"),
            Quantity(name="free then", value=failure.free_bytes, about="on the device"),
            Quantity(name="allocated then", value=failure.allocated_bytes, about="in blocks"),
            Quantity(name="reserved then", value=failure.reserved_bytes, about="segments that PyTorch held"),
            Quantity(name="events before it", value=failure.event, unit="events",
                     about=f"of {work.events:,} in the recording"),
        ]  # fmt: skip
    return _quantities(profile, "allocator", "Work of the allocator", rows)


def _quantities(
    profile: MemoryProfile, name: str, title: str, rows: Sequence[Quantity], notes: Iterable[str] = ()
) -> Listing:
    columns: list[Column[Quantity]] = [
        Column("quantity", numeric=False, says=attrgetter("name")),
        Column("value", says=attrgetter("cell")),
        Column(
            "exact", spare=1, says=lambda row: f"{row.value:,}" if row.value is not None and row.unit == "bytes" else ""
        ),
        Column("what it is", numeric=False, spare=2, says=attrgetter("about")),
    ]
    if not any(row.unit == "bytes" for row in rows):
        del columns[2]
    csv: dict[str, Callable[[Quantity], object]] = {
        "quantity": attrgetter("name"),
        "value": attrgetter("value"),
        "unit": attrgetter("unit"),
    }
    source = [Quantity(name="device", value=profile.device, unit="index"),
              Quantity(name="steps", value=profile.num_steps, unit="steps")]  # fmt: skip
    return Listing(name=name, tables=(make_table(title, columns, rows, notes),), csv=csv_of(csv, [*rows, *source]))


def name_of(category: Category) -> str:
    """The category as part of a column's name: `optimizer_state`."""
    return category.replace(" ", "_")


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


def categories_listing(profile: MemoryProfile) -> Listing:
    """What the peak consists of by category, in the order of the categories, and their sum."""
    peak = profile.peak
    unit = unit_for(peak.allocated_bytes)
    kept = sorted(peak.categories, key=lambda row: list(Category).index(row.category))
    rows: list[tuple[str, int, int, int]] = [
        *((str(row.category), row.num_bytes, row.requested_bytes, row.count) for row in kept if row.num_bytes),
        (WHOLE, peak.allocated_bytes, peak.requested_bytes, sum(row.count for row in kept)),
    ]
    columns: list[Column[tuple[str, int, int, int]]] = [
        Column("category", numeric=False, says=itemgetter(0)),
        Column("size", unit.name, says=lambda row: unit.cell(row[1])),
        Column("share", "%", spare=1, says=lambda row: percent(row[1], peak.allocated_bytes)),
        Column("asked for", unit.name, spare=3, says=lambda row: unit.cell(row[2])),
        Column("blocks", spare=2, says=lambda row: f"{row[3]:,}"),
    ]
    csv: dict[str, Callable[[tuple[str, int, int, int]], object]] = {
        "category": itemgetter(0),
        "bytes": itemgetter(1),
        "gib": lambda row: row[1] / GIB,
        "share": lambda row: share(row[1], peak.allocated_bytes),
        "requested_bytes": itemgetter(2),
        "blocks": itemgetter(3),
    }
    notes = [f"The peak is {when(peak)}.", *rounding_words([peak])]
    table = make_table("Categories at the peak", columns, rows, notes)
    return Listing(name="categories", tables=(table,), csv=csv_of(csv, rows))
