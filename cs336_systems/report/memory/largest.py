"""The largest allocations in words: each size once, with all that has it."""

from collections.abc import Sequence
from itertools import groupby

from cs336_systems.analysis.memory.profile import LikeAllocations
from cs336_systems.report.listing import label
from cs336_systems.report.memory.words import innermost, size, times

MANY_TIMES_ROUNDED = 1.01
"""A block by so much larger than what was asked for is worth a word."""
NUM_NAMES = 4
"""Of what has one size, to name."""


def largest_words(rows: Sequence[LikeAllocations], num_sizes: int) -> str:
    """The allocations of the `num_sizes` largest sizes for a sentence: how many, their formula, what they are, where.

    Rows of one size follow each other.
    """
    sizes = [list(group) for _, group in groupby(rows, lambda row: row.requested_bytes)]
    return "; ".join(map(_size_words, sizes[:num_sizes]))


def _size_words(rows: Sequence[LikeAllocations]) -> str:
    requested, block = rows[0].requested_bytes, max(row.num_bytes for row in rows)
    odd = f", in a block of {size(block)}" if block > MANY_TIMES_ROUNDED * requested else ""
    many = times(sum(row.count for row in rows))
    uses: dict[str, str] = {}
    for row in rows:
        use = f"{row.category}{f' in {label(row.phase)}' if row.phase else ''}"
        uses[use] = uses.get(use) or innermost(row.places)
    said = [f"{use} at {place}" if place else use for use, place in uses.items()]
    formula = _formula(rows)
    whole = f"{requested:,} bytes ({size(requested)}{odd}){f' = {formula}' if formula else ''}"
    return f"{many} {whole}: {_few(said)}"


def _formula(rows: Sequence[LikeAllocations]) -> str:
    """Each formula once, with all that it stands for; empty where there is none."""
    meanings: dict[str, dict[str, None]] = {}
    for explanation in (part for row in rows for part in row.explanation.split(" or ") if part):
        formula, _, what = explanation.partition(": ")
        meanings.setdefault(formula, {}).update({what: None} if what else {})
    return " or ".join(f"{formula} ({_few(list(whats))})" if whats else formula for formula, whats in meanings.items())


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:NUM_NAMES], *(["others"] if len(names) > NUM_NAMES else [])])
