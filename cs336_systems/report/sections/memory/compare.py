"""Two memory profiles beside each other: what grew, by category and by place."""

from collections import Counter
from collections.abc import Mapping

from cs336_systems.analysis.memory.profile import MemoryProfile
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.section import Table, make_table
from cs336_systems.report.sections.memory.tables import WHOLE
from cs336_systems.report.sections.memory.words import MemoryUnit, by_category, in_unit, innermost, size, unit_for
from cs336_systems.report.words import label, ratio

MAX_CHANGES = 20
"""Most changes by name and place that the table lists."""


def compare_memory(a: MemoryProfile, b: MemoryProfile) -> list[Table]:
    """What `b` has more or less of than `a` at its peak: by category, then by name and place, by the size of change."""
    values = _value_columns(unit_for(max(a.peak_reserved_bytes, b.peak_reserved_bytes)))
    sides = f"Before: {label(a.source)}; after: {label(b.source)}."
    categories = make_table(
        "Memory at the peak, before and after", [column("name", name="category"), *values], _category_changes(a, b),
        [sides, _verdict(a, b)],
    )  # fmt: skip
    changed = _place_changes(a, b)
    named = [100 * _places(one).total() / (one.peak.allocated_bytes or 1) for one in (a, b)]
    notes = [f"The profiles name {named[0]:.1f} % of the peak before and {named[1]:.1f} % of that after."]
    if len(changed) > MAX_CHANGES:
        notes.append(f"Shown are {MAX_CHANGES} of {len(changed)} changes.")
    columns = [column("name", name="what", write=str), *values, column("place", drop_order=4)]
    title = "What grew and shrank at the peak, by name and place"
    return [categories, make_table(title, columns, changed[:MAX_CHANGES], notes)]


def changes_json(a: MemoryProfile, b: MemoryProfile) -> dict[str, object]:
    """Every change, in bytes."""
    return {
        "before": a.source,
        "after": b.source,
        "categories": _category_changes(a, b),
        "places": _place_changes(a, b),
    }


def _category_changes(a: MemoryProfile, b: MemoryProfile) -> list[Row]:
    """Changes of each category that either profile has, of all categories together, and of the reserved memory."""
    return [row for row in _changes(_totals(a), _totals(b)) if row["before_bytes"] or row["after_bytes"]]


def _totals(profile: MemoryProfile) -> dict[tuple[str, str], int]:
    totals = {(str(name), ""): num_bytes for name, num_bytes in by_category(profile.peak).items()}
    return totals | {(WHOLE, ""): profile.peak.allocated_bytes, ("reserved at most", ""): profile.peak_reserved_bytes}


def _place_changes(a: MemoryProfile, b: MemoryProfile) -> list[Row]:
    """Changes by name and place, the largest first."""
    changed = [row for row in _changes(_places(a), _places(b)) if row["grown_bytes"]]
    return sorted(changed, key=lambda row: -abs(row["grown_bytes"]))


def _changes(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> list[Row]:
    rows = []
    for name, place in {**before, **after}:
        sizes = before.get((name, place), 0), after.get((name, place), 0)
        grown_bytes = sizes[1] - sizes[0]
        rows.append({
            "name": name, "place": place, "before_bytes": sizes[0], "after_bytes": sizes[1],
            "grown_bytes": grown_bytes, "grown_share": ratio(grown_bytes, sizes[0]),
        })  # fmt: skip
    return rows


def _places(profile: MemoryProfile) -> Counter[tuple[str, str]]:
    """Bytes at the peak by what they are and where they were allocated."""
    sums = Counter[tuple[str, str]]()
    for row in profile.at_peak:
        name = label(row.name) or row.explanation
        sums[f"{row.category}, {name}" if name else str(row.category), innermost(row.places)] += row.bytes_at_peak
    return sums


def _value_columns(unit: MemoryUnit) -> list[Column]:
    def grown(num_bytes: int) -> str:
        return f"{'-' if num_bytes < 0 else '+'}{unit.cell(abs(num_bytes))}" if num_bytes else "0"

    def relative(row: Row) -> str:
        if row["grown_share"] is None:
            return "new"
        return f"{100 * row['grown_share']:+.1f}" if row["grown_share"] else "0"

    return [
        in_unit("before_bytes", unit),
        in_unit("after_bytes", unit),
        column("grown_bytes", unit=unit.name, write=grown),
        column("grown_share", text=relative),
    ]


def _verdict(a: MemoryProfile, b: MemoryProfile) -> str:
    grown = b.peak.allocated_bytes - a.peak.allocated_bytes
    if not grown:
        return "The peaks are the same, to the byte."
    return f"The peak {'grew' if grown > 0 else 'shrank'} by {size(abs(grown))}."
