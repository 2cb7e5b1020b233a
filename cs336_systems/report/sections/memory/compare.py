"""Two memory profiles beside each other: what grew, by category and by place."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from cs336_systems.analysis.memory.profile import Category, LikeAllocations, MemoryProfile
from cs336_systems.report.columns import Column
from cs336_systems.report.numbers import label
from cs336_systems.report.sections.memory.tables import WHOLE, bytes_of
from cs336_systems.report.sections.memory.words import Unit, innermost, size, unit_for
from cs336_systems.report.table import Table, make_table

MAX_CHANGES = 20
"""Names and places to list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one thing has in both profiles, in bytes at the peak."""

    name: str
    place: str
    before_bytes: int
    after_bytes: int

    @property
    def grown_bytes(self) -> int:
        """Negative where it shrank."""
        return self.after_bytes - self.before_bytes


def compare_memory(a: MemoryProfile, b: MemoryProfile) -> list[Table]:
    """What `b` has more or less of than `a` at its peak: by category, then by name and place, by the size of change."""
    unit = unit_for(max(a.peak_reserved_bytes, b.peak_reserved_bytes))
    return [_categories_table(a, b, unit), _places_table(a, b, unit)]


def changes_json(a: MemoryProfile, b: MemoryProfile) -> dict[str, object]:
    """Every change, in bytes."""
    return {
        "before": a.source,
        "after": b.source,
        "categories": _category_changes(a, b),
        "places": _place_changes(a, b),
    }


def _category_changes(a: MemoryProfile, b: MemoryProfile) -> list[Change]:
    pairs = {str(name): (bytes_of(a.peak, name), bytes_of(b.peak, name)) for name in Category}
    pairs = {name: pair for name, pair in pairs.items() if any(pair)}
    pairs[WHOLE] = a.peak.allocated_bytes, b.peak.allocated_bytes
    pairs["reserved at most"] = a.peak_reserved_bytes, b.peak_reserved_bytes
    return [Change(name=name, place="", before_bytes=x, after_bytes=y) for name, (x, y) in pairs.items()]


def _categories_table(a: MemoryProfile, b: MemoryProfile, unit: Unit) -> Table:
    rows = _category_changes(a, b)
    columns: list[Column[Change]] = [Column("category", numeric=False, text=attrgetter("name")), *_values(unit)]
    return make_table("Memory at the peak, before and after", columns, rows, [_sides(a, b), _verdict(a, b)])


def _place_changes(a: MemoryProfile, b: MemoryProfile) -> list[Change]:
    """The largest first."""
    before, after = _sums(a.at_peak), _sums(b.at_peak)
    changes = [
        Change(
            name=name, place=place, before_bytes=before.get((name, place), 0), after_bytes=after.get((name, place), 0)
        )
        for name, place in {**before, **after}
    ]
    return sorted((row for row in changes if row.grown_bytes), key=lambda row: -abs(row.grown_bytes))


def _places_table(a: MemoryProfile, b: MemoryProfile, unit: Unit) -> Table:
    changed = _place_changes(a, b)
    columns: list[Column[Change]] = [
        Column("what", numeric=False, text=attrgetter("name")),
        *_values(unit),
        Column("place", numeric=False, drop_order=4, text=attrgetter("place")),
    ]
    notes = [_coverage(a, b)]
    if len(changed) > MAX_CHANGES:
        notes.append(f"Shown are {MAX_CHANGES} of {len(changed)} changes.")
    return make_table("What grew and shrank at the peak, by name and place", columns, changed[:MAX_CHANGES], notes)


def _sums(rows: Iterable[LikeAllocations]) -> dict[tuple[str, str], int]:
    """Bytes at the peak by what they are and where they were allocated."""
    sums: dict[tuple[str, str], int] = {}
    for row in rows:
        name = label(row.name) or row.explanation
        key = f"{row.category}, {name}" if name else str(row.category), innermost(row.places)
        sums[key] = sums.get(key, 0) + row.bytes_at_peak
    return sums


def _values(unit: Unit) -> list[Column[Change]]:
    def signed(row: Change) -> str:
        text = unit.cell(abs(row.grown_bytes))
        return f"{'-' if row.grown_bytes < 0 else '+'}{text}" if row.grown_bytes else "0"

    def relative(row: Change) -> str:
        if not row.grown_bytes:
            return "0"
        return f"{100 * row.grown_bytes / row.before_bytes:+.1f}" if row.before_bytes else "new"

    return [
        Column("before", unit.name, drop_order=1, text=lambda row: unit.cell(row.before_bytes)),
        Column("after", unit.name, drop_order=2, text=lambda row: unit.cell(row.after_bytes)),
        Column("grown by", unit.name, text=signed),
        Column("grown by", "%", drop_order=3, text=relative),
    ]


def _sides(a: MemoryProfile, b: MemoryProfile) -> str:
    return f"Before: {label(a.source)}; after: {label(b.source)}."


def _verdict(a: MemoryProfile, b: MemoryProfile) -> str:
    grown = b.peak.allocated_bytes - a.peak.allocated_bytes
    if not grown:
        return "The peaks are the same, to the byte."
    return f"The peak {'grew' if grown > 0 else 'shrank'} by {size(abs(grown))}."


def _coverage(a: MemoryProfile, b: MemoryProfile) -> str:
    """How much of the peaks the rows tell of: a profile keeps the largest groups."""
    parts = [
        f"{100 * sum(_sums(profile.at_peak).values()) / (profile.peak.allocated_bytes or 1):.1f} %"
        for profile in (a, b)
    ]
    return f"The profiles name {parts[0]} of the peak before and {parts[1]} of that after."
