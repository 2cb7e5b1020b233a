"""Two memory snapshots side by side: their peaks by category, place and pool."""

from ....analysis.difference import Amount, Part, parts_of, per_step, with_rest
from ....analysis.memory.profile import MemoryProfile
from ...column import Column
from ...difference import Difference, difference_section, named, numbers_of
from ...section import Finding
from ...words import percent_of
from .words import about, innermost, size, unit_for, when

NO_PLACE = "no line of code seen"


def compared_snapshots(a: MemoryProfile, b: MemoryProfile, top: int) -> Difference:
    """Both snapshots side by side at their peaks."""
    unit = unit_for(max(a.peak_reserved_bytes, b.peak_reserved_bytes))
    amount = Column("", unit.name, write=unit.cell)
    parts = {
        "Categories": parts_of(category_amounts(a), category_amounts(b)),
        "Lines of code": parts_of(place_amounts(a), place_amounts(b)),
        "Reserved": parts_of(pool_amounts(a), pool_amounts(b)),
    }
    sections = []
    for title, of_title in parts.items():
        sections.append(difference_section(f"{title}, at the peak", of_title, top, amount))
    evidence, cautions = [], []
    for name, profile in (("A", a), ("B", b)):
        if why := _unsure(profile):
            cautions.append(Finding(code="doubt", text=f"{name}'s peak is {why}."))
        at_peak = when(profile.peak)
        peak = f" Its peak is {at_peak}." if at_peak else ""
        evidence.append(f"{name}: {about(profile)}{peak}")
    places = named(parts["Lines of code"], _words) or "the same in both"
    findings = [
        _peak(a.peak.allocated_bytes, b.peak.allocated_bytes, named(parts["Categories"], _words)),
        Finding(
            code="places",
            text=f"By line of code: {places}.",
            numbers=numbers_of(parts["Lines of code"]),
        ),
        Finding(code="evidence", text=" ".join(evidence)),
        *cautions,
    ]
    return Difference(findings=findings, sections=sections)


def _unsure(profile: MemoryProfile) -> str:
    """What the peak is where the file does not have all of it; empty where it has."""
    if profile.doubts:
        return "in doubt: events contradict each other"
    return "a lower bound: segments are missing" if profile.lacks_segments else ""


def category_amounts(profile: MemoryProfile) -> dict[str, Amount]:
    """Blocks of each category at the peak; they add up to what is allocated."""
    parts = [part for part in profile.peak.categories if part.num_bytes]
    return {str(part.category): per_step(part.count, part.num_bytes) for part in parts}


def place_amounts(profile: MemoryProfile) -> dict[str, Amount]:
    """Blocks at the peak by the innermost line of code, or where none is seen by category."""
    amounts: dict[str, Amount] = {}
    for group in profile.at_peak:
        name = innermost(group.places) or f"{NO_PLACE}, {group.category}"
        blocks = per_step(group.count_at_peak, group.bytes_at_peak)
        amounts[name] = amounts.get(name, Amount()) + blocks
    return with_rest(amounts, per_step(0, profile.peak.allocated_bytes), "in no group")


def pool_amounts(profile: MemoryProfile) -> dict[str, Amount]:
    """What was reserved at the peak: in blocks, in private pools, and otherwise in no block."""
    amounts = {"in blocks": per_step(0, profile.peak.allocated_bytes)}
    if idle_bytes := profile.idle_private_bytes:
        amounts["in no block of private pools"] = per_step(0, idle_bytes)
    return with_rest(amounts, per_step(0, profile.peak.reserved_bytes), "in no block of the others")


def _peak(a: int, b: int, parts: str) -> Finding:
    """By how much the peak differs, and in which categories."""
    numbers = {"a_bytes": a, "b_bytes": b, "difference_bytes": b - a}
    text = f"B's peak is as high as A's: {size(a)}"
    way = "same"
    if a != b:
        way = "higher" if b > a else "lower"
        by = f"{size(abs(b - a))} ({percent_of(abs(b - a), a)})"
        text = f"B's peak is {by} {way} ({size(a)} in A, {size(b)} in B)"
    text += f": {parts}." if parts else "."
    return Finding(code=f"peak {way}", text=text, numbers=numbers)


def _words(part: Part) -> str:
    """Name of the part and how its bytes differ, with a sign: `gradients +1.2 GiB`."""
    sign = "-" if part.difference < 0 else "+"
    return f"{part.name} {sign}{size(abs(int(part.difference)))}"
