"""Tables and words for the parts of two files, whose differences add up to that of the wholes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..analysis.difference import Change, Part, together
from ..files import encode_json
from .column import Column, Row
from .section import Finding, Section, make_table
from .words import count, label, rounded

OTHERS, WHOLE = "others", "together"
"""Names of the rows for the parts that the table does not list, and for all parts."""
MAX_LISTED = 3
"""Most parts that a sentence names."""
MIN_NAMED = 0.05
"""Smallest part of the largest difference that a sentence names beside it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of the amounts in a table."""

    name: str
    per_unit: float
    write: Callable[[float], str]
    """Writes an amount in this unit."""

    def signed(self, amount: float) -> str:
        """The amount in this unit with its sign."""
        sign = "-" if amount < 0 else "+" if amount > 0 else ""
        return sign + self.write(abs(amount))


MS = Unit("ms", 1e6, rounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two files beside each other."""

    findings: Sequence[Finding]
    """The first three are the answer."""
    sections: Sequence[Section]

    def encode(self) -> bytes:
        """The findings and all rows as JSON; totals are whole nanoseconds or bytes over all
        steps.
        """
        answer = []
        for finding in self.findings:
            answer.append(
                {"code": finding.code, "text": finding.text, "numbers": dict(finding.numbers)}
            )
        rows = {section.name: list(section.rows) for section in self.sections}
        return encode_json({"answer": answer, **rows})


def difference_section(
    name: str, title: str, parts: Sequence[Part], unit: Unit, top: int, notes: Sequence[str] = ()
) -> Section:
    """The parts in a table, `top` of them, then the others and the whole; the CSV has each."""
    steps = parts[0].steps_a, parts[0].steps_b
    sums = [together(WHOLE, parts, steps)]
    if others := parts[top:]:
        sums.insert(0, together(f"{OTHERS} ({len(others)})", others, steps))
    listed = [*parts[:top], *(replace(part, change=Change.NONE) for part in sums)]
    table = make_table(title, _columns(unit), [_row(part, unit) for part in listed], notes)
    return Section(name=name, tables=(table,), rows=[_row(part, unit) for part in parts])


def _columns(unit: Unit) -> list[Column]:
    """The part, its amounts and counts in both files, and what changed."""
    columns = [Column("part", key="part", numeric=False, write=label)]
    for side in "ab":
        about = f"In a step of {side.upper()}."
        columns.append(Column(side.upper(), unit.name, about, key=side, write=unit.write))
    about = "How much more a step of B has."
    columns.append(Column("B - A", unit.name, about, key="difference", write=unit.signed))
    for side in "ab":
        about, key = f"How many in a step of {side.upper()}.", f"{side}_count"
        heading = f"times in {side.upper()}"
        columns.append(Column(heading, "", about, 2, key=key, write=count))
    columns.append(Column("B is", "", "How B differs.", key="change", numeric=False, write=str))
    return columns


def _row(part: Part, unit: Unit) -> Row:
    """The values of one part, per step but for the totals."""
    return {
        "part": part.name,
        "unit": unit.name,
        "a": float(part.per_step_a) / unit.per_unit,
        "b": float(part.per_step_b) / unit.per_unit,
        "difference": float(part.difference) / unit.per_unit,
        "a_count": part.a.count / part.steps_a,
        "b_count": part.b.count / part.steps_b,
        "change": part.change.value,
        "a_total": part.a.total,
        "b_total": part.b.total,
        "a_steps": part.steps_a,
        "b_steps": part.steps_b,
    }


def named(parts: Sequence[Part], words: Callable[[Part], str]) -> str:
    """The parts of the largest differences as `backward +3.0 ms, forward -0.2 ms`."""
    differing = [part for part in parts if part.difference]
    texts = list[str]()
    for part in sorted(differing, key=lambda part: -abs(part.difference))[:MAX_LISTED]:
        if texts and abs(part.difference) < MIN_NAMED * abs(differing[0].difference):
            break
        texts.append(words(part))
    return ", ".join(texts)


def came_and_went(parts: Sequence[Part]) -> dict[str, int]:
    """How many parts only one of the files has, by which one."""
    changes = [part.change for part in parts]
    return {change: changes.count(change) for change in (Change.ONLY_A, Change.ONLY_B)}
