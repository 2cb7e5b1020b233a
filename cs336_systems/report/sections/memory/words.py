"""Numbers of a `MemoryProfile`, and texts for its bytes, moments, places and checks."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from cs336_systems.analysis.memory.formulas import OR
from cs336_systems.analysis.memory.profile import (
    BlockMemory,
    Category,
    FailedRequest,
    LikeAllocations,
    MemoryProfile,
    Moment,
    PhaseMemory,
    Place,
)
from cs336_systems.report.columns import Column, column
from cs336_systems.report.words import GIB, MIB, label, significant
from cs336_systems.text import counted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Key = TypeVar("Key")

START = "start"
"""Name of the phase of a moment at which a step begins."""


def fields_of(part: "DataclassInstance") -> dict[str, Any]:
    """The fields of a part of a profile by name, which is also the key of a column."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


def by_category(moment: Moment) -> dict[Category, int]:
    """Bytes of each category at the moment, counted in blocks; 0 for an absent category."""
    return dict.fromkeys(Category, 0) | {row.category: row.num_bytes for row in moment.categories}


def bytes_of(moment: Moment, category: Category) -> int:
    """Bytes of the category at the moment, counted in blocks."""
    return by_category(moment)[category]


def fragmentation_bytes(profile: MemoryProfile) -> int:
    """Bytes that were reserved at the peak and in no block: the allocator's cache, and rests between blocks."""
    return profile.peak.reserved_bytes - profile.peak.allocated_bytes


def difference_bytes(moment: Moment) -> int | None:
    """Bytes by which the snapshot's blocks exceed the allocator's count; None if not counted."""
    return None if moment.counted_bytes is None else moment.allocated_bytes - moment.counted_bytes


def peaks_by(phases: Iterable[PhaseMemory], key: Callable[[PhaseMemory], Key]) -> dict[Key, int]:
    """The highest peak among the phases of each key, in the order in which the keys first appear."""
    peaks: dict[Key, int] = {}
    for phase in phases:
        peaks[key(phase)] = max(peaks.get(key(phase), 0), phase.peak_bytes)
    return peaks


def typical(blocks: Sequence[BlockMemory]) -> BlockMemory:
    """The first block that saves the median, the lower of the middle two; raise ValueError for no blocks."""
    if not blocks:
        raise ValueError("a typical block needs at least one block, got none")
    middle = sorted(block.saved_bytes for block in blocks)[(len(blocks) - 1) // 2]
    return next(block for block in blocks if block.saved_bytes == middle)


KIB = 2**10
MIN_PART = 0.001
"""Sentences leave out parts below this share of the whole."""
KEPT_FOLDERS = 2
"""Last parts of a path that a table shows; the CSV has the whole path."""
MANY_TIMES_ROUNDED = 1.01
"""A block this many times larger than the request is mentioned."""
NUM_NAMES = 4
"""Most uses, or meanings of a formula, that are named for one size."""


@dataclass(frozen=True, slots=True)
class MemoryUnit:
    """A unit of memory with fixed decimals, so that the cells of a table can be compared at a glance."""

    name: str
    num_bytes: int
    decimals: int

    def cell(self, num_bytes: int) -> str:
        """The bytes in this unit; `< 0.01` for what is more than nothing but less than the decimals show."""
        least = 10.0**-self.decimals
        value = num_bytes / self.num_bytes
        if num_bytes and abs(value) < least / 2:
            return f"< {least:.{self.decimals}f}"
        return f"{value:,.{self.decimals}f}" if num_bytes else "0"


GIB_CELL, MIB_CELL = MemoryUnit("GiB", GIB, 2), MemoryUnit("MiB", MIB, 2)


def in_unit(key: str, unit: MemoryUnit, name: str = "", drop_order: int | None = None) -> Column:
    """The column of bytes of this key in this unit, in one table under another name or with another order."""
    found = column(key, unit=unit.name, write=unit.cell)
    order = found.drop_order if drop_order is None else drop_order
    return replace(found, name=name or found.name, drop_order=order)


def unit_for(largest_bytes: int) -> MemoryUnit:
    """GiB for a table whose largest value is at least one, MiB below."""
    return MemoryUnit("GiB", GIB, 3) if largest_bytes >= GIB else MemoryUnit("MiB", MIB, 2)


def size(num_bytes: int) -> str:
    """The bytes for a sentence: `18.84 GiB`, `6.25 MiB`, one decimal from 100 on; below a KiB whole."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.{1 if abs(num_bytes) >= 100 * unit else 2}f} {name}"
    return counted(num_bytes, "byte")


def times(count: int) -> str:
    """How often: `once`, `3 times`."""
    return "once" if count == 1 else f"{count:,} times"


def about(profile: MemoryProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    steps = f"{counted(profile.num_steps, 'step')}, counted from 0" if profile.num_steps > 1 else "1 step, number 0"
    known = steps if profile.num_steps else "no steps known to the file"
    return f"{label(profile.source)}, GPU {profile.device}, {known}."


def when(moment: Moment | FailedRequest) -> str:
    """The moment for a sentence: `15.0 ms after the first event, in backward of step 0`."""
    where = f", in {label(moment.phase)}" if moment.phase else ""
    step = f"{' of' if moment.phase else ', in'} step {moment.step}" if moment.step >= 0 else ""
    return f"{moment_ms(moment.time_s)} ms after the first event{where}{step}"


def moment_ms(time_s: float) -> str:
    """The time in ms, to a tenth, or to three digits where that is more."""
    return f"{time_s * 1e3:,.1f}" if time_s >= 0.01 else significant(time_s * 1e3, 3)


def failure_words(failure: FailedRequest) -> str:
    """When and where a request failed, for a sentence."""
    return f"{when(failure)}{f', at {innermost(failure.places)}' if failure.places else ''}"


def peak_words(profile: MemoryProfile) -> str:
    """The peak, when it was, and what it consists of, as a sentence."""
    peak = profile.peak
    of = parts_of(by_category(peak), peak.allocated_bytes) or "nothing"
    return f"The peak is {size(peak.allocated_bytes)}, {when(peak)}; it consists of {of}."


def check_words(moments: Iterable[Moment]) -> str:
    """Whether categories, which add up to what is allocated, agree with the allocator's own count, as a sentence."""
    found = [difference_bytes(moment) for moment in moments]
    differences = [difference for difference in found if difference is not None]
    if not differences:
        return "Check: categories add up to what is allocated; no count of the allocator is known beside it."
    if not any(differences):
        where = "the one boundary" if len(differences) == 1 else f"all {len(differences):,} boundaries"
        return f"Check: at {where} the categories add up to what PyTorch's allocator counted, to the byte."
    wrong = [difference for difference in differences if difference]
    return (
        f"Check failed: at {len(wrong):,} of {len(differences):,} boundaries the blocks of the snapshot differ from "
        f"what PyTorch's allocator counted, by {max(wrong, key=abs):+,} bytes at most."
    )


def parts_of(parts: Mapping[Any, int], whole_bytes: int) -> str:
    """The parts for a sentence, the largest first, without tiny ones: `saved activations 380.0 MiB (48.7 %), ...`."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    said = [(label(name), part) for name, part in ordered if part and part >= MIN_PART * whole_bytes]
    return ", ".join(f"{name} {size(part)} ({100 * part / whole_bytes:.1f} %)" for name, part in said)


def shape_text(shape: tuple[int, ...], dtype: str) -> str:
    """Shape and data type as far as they are known: `4 x 512 x 768 float32`."""
    return " ".join(part for part in (" x ".join(map(str, shape)), label(dtype)) if part)


def place_text(place: Place) -> str:
    """The place with the end of its path: `cs336_systems/model/transformer.py:123 softmax`."""
    folders = re.split(r"[/\\]", place.file)
    return f"{label('/'.join(folders[-KEPT_FOLDERS:]))}:{place.line} {label(place.function)}".strip()


def innermost(places: tuple[Place, ...]) -> str:
    """Text of the innermost place; empty without a stack."""
    return place_text(places[0]) if places else ""


def largest_words(rows: Sequence[LikeAllocations], num_sizes: int) -> str:
    """The allocations of the `num_sizes` largest sizes for a sentence: how many, their formula, their uses and places.

    Rows of one size must follow each other. Each use and place has its own count.
    """
    sizes = [list(group) for _, group in groupby(rows, lambda row: row.requested_bytes)]
    return "; ".join(map(_size_words, sizes[:num_sizes]))


def _size_words(rows: Sequence[LikeAllocations]) -> str:
    requested, formula, uses = rows[0].requested_bytes, _formula(rows), Counter[str]()
    for row in rows:
        uses[_use(row)] += row.count
    most = uses.most_common(NUM_NAMES)
    said = [f"{count:,} {use}" for use, count in most] if len(uses) > 1 else [*uses]
    if others := uses.total() - sum(count for _, count in most):
        said.append(counted(others, "other"))
    whole = f"{requested:,} bytes ({size(requested)}{_block_words(rows)}){f' = {formula}' if formula else ''}"
    return f"{times(uses.total())} {whole}: {', '.join(said)}"


def _use(row: LikeAllocations) -> str:
    """Category, phase and place of allocations, as far as they are known."""
    phase, place = label(row.phase), innermost(row.places)
    return f"{row.category}{f' in {phase}' if phase else ''}{f' at {place}' if place else ''}"


def _block_words(rows: Sequence[LikeAllocations]) -> str:
    """The size of the largest block if it is much larger than the request; else an empty text."""
    block = max(row.num_bytes for row in rows)
    if block <= MANY_TIMES_ROUNDED * rows[0].requested_bytes:
        return ""
    is_one = sum(row.count for row in rows) == 1
    return f", in {'a block' if is_one else 'blocks'} of {'' if is_one else 'up to '}{size(block)}"


def _formula(rows: Sequence[LikeAllocations]) -> str:
    """Each formula once, with everything that it stands for; an empty text if no formula is known."""
    meanings: dict[str, dict[str, None]] = {}
    for explanation in (part for row in rows for part in row.explanation.split(OR) if part):
        formula, _, what = explanation.partition(": ")
        meanings.setdefault(formula, {}).update({what: None} if what else {})
    return OR.join(f"{formula} ({_few(list(whats))})" if whats else formula for formula, whats in meanings.items())


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:NUM_NAMES], *(["others"] if len(names) > NUM_NAMES else [])])
