"""Two memory snapshots side by side: their peaks by category, place and pool."""

from ....analysis.difference import Amount, Change, Part, parts_of, with_rest
from ....analysis.memory.profile import LikeAllocations, MemoryProfile
from ...difference import Difference, Unit, came_and_went, difference_section, named
from ...section import Finding
from ...words import percent_of
from .words import about, innermost, size, unit_for, when

NO_PLACE = "no line of code seen"
NOT_LISTED = "in no group of allocations"
CACHE = "in no block, outside of private pools"


def compared_snapshots(a: MemoryProfile, b: MemoryProfile, top: int) -> Difference:
    """Both snapshots side by side at their peaks."""
    cells = unit_for(max(a.peak_reserved_bytes, b.peak_reserved_bytes))
    unit = Unit(
        cells.name, cells.num_bytes, lambda value: cells.cell(round(value * cells.num_bytes))
    )
    categories = parts_of(category_amounts(a), category_amounts(b))
    places = parts_of(place_amounts(a), place_amounts(b))
    pools = parts_of(pool_amounts(a), pool_amounts(b))
    sections = [
        difference_section("categories", "What the peaks consist of", categories, unit, top),
        difference_section("places", "Lines of code at the peak", places, unit, top),
        difference_section("pools", "Reserved at the peak", pools, unit, top),
    ]
    return Difference(findings=[*_answer(a, b, categories, places)], sections=sections)


def category_amounts(profile: MemoryProfile) -> dict[str, Amount]:
    """Blocks of each category at the peak; they add up to what is allocated."""
    parts = [part for part in profile.peak.categories if part.num_bytes]
    return {str(part.category): Amount(part.count, part.num_bytes) for part in parts}


def place_amounts(profile: MemoryProfile) -> dict[str, Amount]:
    """Blocks at the peak by the innermost line of code that allocated them."""
    amounts: dict[str, Amount] = {}
    for group in profile.at_peak:
        if not group.count_at_peak:
            continue
        name = _place(group)
        before = amounts.get(name, Amount())
        amounts[name] = Amount(
            before.count + group.count_at_peak, before.total + group.bytes_at_peak
        )
    return with_rest(amounts, profile.peak.allocated_bytes, NOT_LISTED)


def _place(group: LikeAllocations) -> str:
    """The line of code, or where none is seen the category."""
    return innermost(group.places) or f"{NO_PLACE}, {group.category}"


def pool_amounts(profile: MemoryProfile) -> dict[str, Amount]:
    """What was reserved at the peak: in blocks, in private pools, and otherwise in no block."""
    amounts = {"in blocks": Amount(0, profile.peak.allocated_bytes)}
    if profile.idle_private_bytes:
        amounts["in no block of private pools"] = Amount(0, profile.idle_private_bytes)
    return with_rest(amounts, profile.peak.reserved_bytes, CACHE)


def _answer(
    a: MemoryProfile, b: MemoryProfile, categories: list[Part], places: list[Part]
) -> list[Finding]:
    """By how much the peak differs, in which lines of code, and where the peaks lie."""
    bytes_a, bytes_b = a.peak.allocated_bytes, b.peak.allocated_bytes
    difference = bytes_b - bytes_a
    numbers = {"a_bytes": bytes_a, "b_bytes": bytes_b, "difference_bytes": difference}
    way = "higher" if difference > 0 else "lower"
    text = f"B's peak is as high as A's: {size(bytes_a)}"
    if difference:
        by = f"{size(abs(difference))} ({percent_of(abs(difference), bytes_a)})"
        text = f"B's peak is {by} {way} ({size(bytes_a)} in A, {size(bytes_b)} in B)"
    parts = named(categories, _words)
    text += f": {parts}." if parts else "."
    code = f"peak {way}" if difference else "peak same"
    return [Finding(code=code, text=text, numbers=numbers), _places(places), _evidence(a, b)]


def _places(places: list[Part]) -> Finding:
    """The lines of code whose blocks at the peak differ most."""
    texts = named(places, _words)
    if not texts:
        return Finding(code="places same", text="The same lines of code hold as much in both.")
    counts = came_and_went(places)
    text = (
        f"By line of code: {texts}; {counts[Change.ONLY_B]} of the lines only in B, "
        f"{counts[Change.ONLY_A]} only in A."
    )
    numbers = {part.name: float(part.difference) for part in places if part.difference}
    return Finding(code="places", text=text, numbers=numbers)


def _evidence(a: MemoryProfile, b: MemoryProfile) -> Finding:
    """What A and B are, and where their peaks lie."""
    texts = []
    for name, profile in (("A", a), ("B", b)):
        texts.append(f"{name}: {about(profile)} Its peak is {when(profile.peak)}.")
    return Finding(code="evidence", text=" ".join(texts))


def _words(part: Part) -> str:
    """The part with its difference."""
    difference = int(part.difference)
    return f"{part.name} {'-' if difference < 0 else '+'}{size(abs(difference))}"
