"""The largest allocations in words: each size once, with everything of that size."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from cs336_systems.analysis.memory.formulas import OR
from cs336_systems.analysis.memory.profile import LikeAllocations
from cs336_systems.report.numbers import label
from cs336_systems.report.sections.memory.words import innermost, size, times
from cs336_systems.text import counted

MANY_TIMES_ROUNDED = 1.01
"""A block this many times larger than the request is mentioned."""
NUM_NAMES = 4
"""Most uses, or meanings of a formula, that are named for one size."""


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
