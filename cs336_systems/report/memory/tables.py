"""Tables of one `MemoryProfile`: its peak, its memory from phase to phase, what the allocator did.

Those of single allocations and of blocks of the model are in memory_allocations.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from cs336_systems.analysis.memory.profile import Category, MemoryProfile, Moment
from cs336_systems.report.formats import Column, Heading, make_table, significant
from cs336_systems.report.listing import Listing, csv_of, label, percent, share
from cs336_systems.report.memory.words import GIB, Unit, size, unit_for, when

WHOLE = "allocated"
"""What stands in the place of a category for all of them together."""
SMALL = 0.01
"""Of the peak: a category that never has more can be left out on a narrow terminal."""


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


def peak_listing(profile: MemoryProfile) -> Listing:
    """The peak and what it needs beside the blocks themselves."""
    peak = profile.peak
    rows = [
        Quantity(name="peak allocated", value=peak.allocated_bytes, about=when(peak)),
        Quantity(name="held throughout", value=profile.held_bytes, about="there before the recording and after it"),
        Quantity(name="rounding", value=profile.rounding_bytes_at_peak,
                 about="part of the peak: blocks are larger than what was asked for"),
        Quantity(name="reserved at the peak", value=peak.reserved_bytes, about="segments that PyTorch held then"),
        Quantity(name="fragmentation", value=fragmentation_bytes(profile),
                 about="reserved at the peak and not allocated: cache, and the rests between blocks"),
        Quantity(name="peak reserved", value=profile.peak_reserved_bytes, about="at any time"),
        Quantity(name="outside of PyTorch", value=profile.outside_bytes,
                 about="used on the device at the end: CUDA context, libraries, other processes"),
        Quantity(name="residual stream", value=profile.residual_stream_bytes,
                 about="one tensor of batch x T x d_model in fp32"),
    ]  # fmt: skip
    return _quantities(profile, "peak", "Peak", rows, profile.notes)


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
    if work.out_of_memory:
        rows += [
            Quantity(name="asked for", value=work.oom_requested_bytes, about="the first time, rounded up"),
            Quantity(name="free then", value=work.oom_free_bytes, about="on the device"),
        ]
    return _quantities(profile, "allocator", "Work of the allocator", rows)


def _quantities(
    profile: MemoryProfile, name: str, title: str, rows: Sequence[Quantity], notes: Iterable[str] = ()
) -> Listing:
    columns: list[Column[Quantity]] = [
        Column(Heading("quantity", numeric=False), attrgetter("name")),
        Column(Heading("value"), attrgetter("cell")),
        Column(Heading("exact"), lambda row: f"{row.value:,}" if row.value is not None and row.unit == "bytes" else ""),
        Column(Heading("what it is", numeric=False, spare=1), attrgetter("about")),
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


def moment_name(moment: Moment) -> str:
    """`start`, or `end of forward`; the boundary of a phase that is not known is called so."""
    if not moment.phase:
        return "unknown"
    return moment.phase if moment.phase == "start" else f"end of {label(moment.phase)}"


def boundaries_listing(profile: MemoryProfile) -> Listing:
    """What there was whenever a phase ended, and at the peak, beside the allocator's own count."""
    rows = _in_time(profile)
    present = [category for category in Category if _most(rows, category)]
    unit = unit_for(max(moment.reserved_bytes for _, moment in rows))
    columns: list[Column[tuple[str, Moment]]] = [
        Column(Heading("step"), lambda row: "" if row[1].step < 0 else str(row[1].step)),
        Column(Heading("moment", numeric=False), itemgetter(0)),
        Column(Heading("at", "ms", spare=3), lambda row: significant(row[1].time_s * 1e3)),
        *(
            _category_column(category, unit, _most(rows, category) < SMALL * profile.peak.allocated_bytes)
            for category in present
        ),
        Column(Heading("allocated", unit.name), lambda row: unit.cell(row[1].allocated_bytes)),
        Column(Heading("PyTorch's count", unit.name), lambda row: _if_known(row[1].counted_bytes, unit)),
        Column(Heading("reserved", unit.name, spare=2), lambda row: unit.cell(row[1].reserved_bytes)),
    ]
    csv: dict[str, Callable[[tuple[str, Moment]], object]] = {
        "step": lambda row: None if row[1].step < 0 else row[1].step,
        "moment": itemgetter(0),
        "time_ms": lambda row: row[1].time_s * 1e3,
        "allocated_bytes": lambda row: row[1].allocated_bytes,
        "counted_bytes": lambda row: row[1].counted_bytes,
        "difference_bytes": lambda row: difference_bytes(row[1]),
        "reserved_bytes": lambda row: row[1].reserved_bytes,
        **{f"{name_of(category)}_bytes": _bytes_getter(category) for category in Category},
    }
    table = make_table("Memory from phase to phase", columns, rows, [_check(profile)])
    return Listing(name="boundaries", tables=(table,), csv=csv_of(csv, rows))


def name_of(category: Category) -> str:
    """The category as part of a column's name: `optimizer_state`."""
    return category.replace(" ", "_")


def difference_bytes(moment: Moment) -> int | None:
    """By how much the blocks of the snapshot are more than what the allocator counted; None where it did not count."""
    return None if moment.counted_bytes is None else moment.allocated_bytes - moment.counted_bytes


def _in_time(profile: MemoryProfile) -> list[tuple[str, Moment]]:
    """The boundaries with their names, and among them the peak."""
    phase = f", in {label(profile.peak.phase)}" if profile.peak.phase else ""
    named = [*((moment_name(moment), moment) for moment in profile.boundaries), (f"peak{phase}", profile.peak)]
    return sorted(named, key=lambda row: row[1].time_s)


def _most(rows: Iterable[tuple[str, Moment]], category: Category) -> int:
    return max(bytes_of(moment, category) for _, moment in rows)


def _category_column(category: Category, unit: Unit, is_small: bool) -> Column[tuple[str, Moment]]:
    heading = Heading(category, unit.name, spare=4 if is_small else 0)
    return Column(heading, lambda row: unit.cell(bytes_of(row[1], category)))


def _bytes_getter(category: Category) -> Callable[[tuple[str, Moment]], int]:
    return lambda row: bytes_of(row[1], category)


def _if_known(num_bytes: int | None, unit: Unit) -> str:
    return "" if num_bytes is None else unit.cell(num_bytes)


def _check(profile: MemoryProfile) -> str:
    """Whether categories and allocator agree; raise ValueError where categories do not add up to what is allocated."""
    for moment in (profile.peak, *profile.boundaries):
        if (total := sum(row.num_bytes for row in moment.categories)) != moment.allocated_bytes:
            raise ValueError(
                f"{profile.source}: at {moment.time_s:.6f} s the categories add up to {total} bytes, needed all "
                f"{moment.allocated_bytes} that are allocated. Explain the snapshot again."
            )
    differences = [found for moment in profile.boundaries if (found := difference_bytes(moment)) is not None]
    if not differences:
        return "Check: categories add up to what is allocated; the snapshot has no count of the allocator beside it."
    where = "the one boundary" if len(differences) == 1 else f"all {len(differences)} boundaries"
    if not any(differences):
        return f"Check: at {where} the categories add up to what PyTorch's allocator counted, to the byte."
    wrong = [difference for difference in differences if difference]
    return (
        f"Check failed: at {len(wrong)} of {len(differences)} boundaries the blocks of the snapshot differ from what "
        f"PyTorch's allocator counted, by {max(wrong, key=abs):+,} bytes at most."
    )


def categories_listing(profile: MemoryProfile) -> Listing:
    """What the peak consists of by category, in the order of the categories, and their sum."""
    peak = profile.peak
    unit = unit_for(peak.allocated_bytes)
    kept = sorted(peak.categories, key=lambda row: list(Category).index(row.category))
    rows: list[tuple[str, int, int]] = [
        *((str(row.category), row.num_bytes, row.count) for row in kept if row.num_bytes),
        (WHOLE, peak.allocated_bytes, sum(row.count for row in kept)),
    ]
    columns: list[Column[tuple[str, int, int]]] = [
        Column(Heading("category", numeric=False), itemgetter(0)),
        Column(Heading("size", unit.name), lambda row: unit.cell(row[1])),
        Column(Heading("share", "%"), lambda row: percent(row[1], peak.allocated_bytes)),
        Column(Heading("blocks"), lambda row: f"{row[2]:,}"),
    ]
    csv: dict[str, Callable[[tuple[str, int, int]], object]] = {
        "category": itemgetter(0),
        "bytes": itemgetter(1),
        "gib": lambda row: row[1] / GIB,
        "share": lambda row: share(row[1], peak.allocated_bytes),
        "blocks": itemgetter(2),
    }
    table = make_table("Categories at the peak", columns, rows, [f"The peak is {when(peak)}."])
    return Listing(name="categories", tables=(table,), csv=csv_of(csv, rows))
