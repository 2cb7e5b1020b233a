"""Tables and words for the parts of two files, whose differences add up to that of the wholes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ..analysis.difference import Amount, Part, by_difference
from ..files import encode_json
from .column import Column, Row
from .section import Finding, Section, make_table
from .words import count, label

MAX_NAMED = 3
"""Most parts that a sentence names."""
MIN_NAMED = 0.05
"""Smallest part of the largest difference that a sentence names beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two files beside each other."""

    findings: Sequence[Finding]
    """The first three are the answer."""
    sections: Sequence[Section]

    def encode(self) -> bytes:
        """The findings and all rows as JSON."""
        rows = {section.name: section.rows for section in self.sections}
        return encode_json({"answer": msgspec.to_builtins(self.findings), **rows})


def difference_section(title: str, parts: Sequence[Part], top: int, amount: Column) -> Section:
    """The parts in a table, `top` of them, then the others and the whole; the CSV has each.

    `amount` says how amounts are scaled and written. The files are named after the title up to its
    comma.
    """
    groups = {"together": parts}
    if others := parts[top:]:
        groups = {f"others ({len(others)})": others, **groups}
    listed = list(parts[:top])
    for group, members in groups.items():
        of_a = [part.a for part in members]
        of_b = [part.b for part in members]
        listed.append(Part(group, sum(of_a, Amount()), sum(of_b, Amount())))
    table = make_table(title, _columns(amount), [_row(part, amount) for part in listed])
    name = "_".join(title.partition(",")[0].lower().split())
    return Section(name=name, tables=(table,), rows=[_row(part, amount) for part in parts])


def _columns(amount: Column) -> list[Column]:
    """Columns of a table of differences: the part, its amount and count in file A and in file B,
    and the change. `amount` says how amounts are written.
    """
    unit, write = amount.unit, amount.write

    def signed(value: float) -> str:
        """An amount with an explicit sign; no sign for 0."""
        sign = "+" if value else ""
        if value < 0:
            sign = "-"
        return f"{sign}{write(abs(value))}"

    return [
        Column("part", key="part", numeric=False, write=label),
        Column("A", unit, "In a step of A.", key="a", write=write),
        Column("B", unit, "In a step of B.", key="b", write=write),
        Column("B - A", unit, "How much more B has.", key="difference", write=signed),
        Column("times in A", "", "How many in a step of A.", 2, key="a_count", write=count),
        Column("times in B", "", "How many in a step of B.", 2, key="b_count", write=count),
        Column("B is", "", "How B differs.", key="change", numeric=False, write=str),
    ]


def _row(part: Part, amount: Column) -> Row:
    """The row of one part of a difference between two files; amounts and counts are per step."""
    return {
        "part": part.name,
        "unit": amount.unit,
        "a": float(part.a.total) * amount.scale,
        "b": float(part.b.total) * amount.scale,
        "difference": float(part.difference) * amount.scale,
        "a_count": float(part.a.count),
        "b_count": float(part.b.count),
        "change": part.change.value,
    }


def named(parts: Sequence[Part], words: Callable[[Part], str]) -> str:
    """The parts of the largest differences as `backward +3.0 ms, forward -0.2 ms`; empty if none
    differs.
    """
    ordered = by_difference([part for part in parts if part.difference])
    least = MIN_NAMED * abs(ordered[0].difference) if ordered else 0
    return ", ".join(words(part) for part in ordered[:MAX_NAMED] if abs(part.difference) >= least)


def numbers_of(parts: Sequence[Part], scale: float = 1) -> dict[str, float]:
    """The differences of the parts by their names, multiplied by `scale`."""
    return {part.name: float(part.difference) * scale for part in parts if part.difference}
