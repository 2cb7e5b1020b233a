"""The largest allocations in words: each size once, with all that has it."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from cs336_systems.analysis.memory.formulas import OR
from cs336_systems.analysis.memory.profile import LikeAllocations
from cs336_systems.report.numbers import label
from cs336_systems.report.sections.memory.words import innermost, size, times
from cs336_systems.text import counted

MANY_TIMES_ROUNDED = 1.01
"""A block by so much larger than what was asked for is worth a word."""
NUM_NAMES = 4
"""Of what has one size, to name."""


def largest_words(rows: Sequence[LikeAllocations], num_sizes: int) -> str:
    """The allocations of the `num_sizes` largest sizes for a sentence: how many, their formula, what they are, where.

    Rows of one size follow each other. Each count is of what stands behind it: of several uses each has its own, and so
    has the place that most of a use come from, where there are others.
    """
    sizes = [list(group) for _, group in groupby(rows, lambda row: row.requested_bytes)]
    return "; ".join(map(_size_words, sizes[:num_sizes]))


def _size_words(rows: Sequence[LikeAllocations]) -> str:
    requested, count = rows[0].requested_bytes, sum(row.count for row in rows)
    formula = _formula(rows)
    whole = f"{requested:,} bytes ({size(requested)}{_block_words(rows)}){f' = {formula}' if formula else ''}"
    return f"{times(count)} {whole}: {_uses_words(rows)}"


def _block_words(rows: Sequence[LikeAllocations]) -> str:
    """The largest block, where it is worth a word; the others may be smaller."""
    block = max(row.num_bytes for row in rows)
    if block <= MANY_TIMES_ROUNDED * rows[0].requested_bytes:
        return ""
    is_one = sum(row.count for row in rows) == 1
    return f", in {'a block' if is_one else 'blocks'} of {'' if is_one else 'up to '}{size(block)}"


def _uses_words(rows: Sequence[LikeAllocations]) -> str:
    """By category and phase, those of which there are most first; with counts where there is more than one use."""
    places_of: dict[str, Counter[str]] = {}
    for row in rows:
        use = f"{row.category}{f' in {label(row.phase)}' if row.phase else ''}"
        places_of.setdefault(use, Counter())[innermost(row.places)] += row.count
    if len(places_of) == 1:
        return "".join(use + _places_words(places) for use, places in places_of.items())
    ordered = sorted(places_of.items(), key=lambda item: -item[1].total())
    said = [f"{places.total():,} {use}{_places_words(places)}" for use, places in ordered[:NUM_NAMES]]
    others = sum(places.total() for _, places in ordered[NUM_NAMES:])
    return ", ".join([*said, *([counted(others, "other")] if others else [])])


def _places_words(places: Counter[str]) -> str:
    """Where so many come from: the place itself if it is the only one, else the most frequent and how many others."""
    known = Counter({place: count for place, count in places.items() if place})
    if not known:
        return ""
    (place, count), *others = known.most_common()
    if len(places) == 1:
        return f" at {place}"
    said = [f"{count:,} at {place}"]
    if others:
        said.append(f"{known.total() - count:,} at {counted(len(others), 'other place')}")
    if unknown := places[""]:
        said.append(f"{unknown:,} at no known place")
    return f" ({', '.join(said)})"


def _formula(rows: Sequence[LikeAllocations]) -> str:
    """Each formula once, with all that it stands for; empty where there is none."""
    meanings: dict[str, dict[str, None]] = {}
    for explanation in (part for row in rows for part in row.explanation.split(OR) if part):
        formula, _, what = explanation.partition(": ")
        meanings.setdefault(formula, {}).update({what: None} if what else {})
    return OR.join(f"{formula} ({_few(list(whats))})" if whats else formula for formula, whats in meanings.items())


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:NUM_NAMES], *(["others"] if len(names) > NUM_NAMES else [])])
