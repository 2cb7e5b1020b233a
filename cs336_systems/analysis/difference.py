"""What two files have in common and what not: parts whose differences add up to that of the wholes.

Amounts are fractions, so that nothing is lost where the files have unequal numbers of steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction


class Change(StrEnum):
    """How a part of B differs from that of A."""

    NONE = ""
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    MORE = "more often"
    FEWER = "less often"
    SLOWER = "slower"
    FASTER = "faster"
    LONGER = "longer"
    SHORTER = "shorter"


@dataclass(frozen=True, slots=True)
class Amount:
    """Time or memory of a part of one file, per step."""

    count: Fraction = field(default_factory=Fraction)
    total: Fraction = field(default_factory=Fraction)
    """Nanoseconds or bytes."""

    def __add__(self, other: "Amount") -> "Amount":
        """The sum of counts and the sum of totals."""
        return Amount(self.count + other.count, self.total + other.total)


def per_step(count: int, total: int, steps: int = 1) -> Amount:
    """The count and the amount of one step, from those of several."""
    return Amount(Fraction(count, steps), Fraction(total, steps))


@dataclass(frozen=True, slots=True)
class Part:
    """The same part of both files."""

    name: str
    a: Amount
    b: Amount
    change: Change = Change.NONE

    @property
    def difference(self) -> Fraction:
        """How much larger the part's amount in a step is in file B than in file A."""
        return self.b.total - self.a.total


def parts_of(a: Mapping[str, Amount], b: Mapping[str, Amount]) -> list[Part]:
    """The parts of either file by name, the largest difference first."""
    parts = []
    for name in dict.fromkeys((*a, *b)):
        of_a, of_b = a.get(name, Amount()), b.get(name, Amount())
        if of_a != Amount() or of_b != Amount():
            parts.append(Part(name, of_a, of_b, _change(of_a, of_b)))
    return by_difference(parts)


def by_difference(parts: list[Part]) -> list[Part]:
    """The parts in the order of tables and sentences, the largest difference first."""
    return sorted(parts, key=lambda part: -abs(part.difference))


def _change(a: Amount, b: Amount) -> Change:
    """Whether only one file has the part, or one of them more often in a step."""
    if Amount() in (a, b) and a != b:
        return Change.ONLY_A if b == Amount() else Change.ONLY_B
    if a.count == b.count:
        return Change.NONE
    return Change.MORE if b.count > a.count else Change.FEWER


def with_rest(amounts: Mapping[str, Amount], whole: Amount, rest: str) -> dict[str, Amount]:
    """The amounts by name, with what they lack to `whole` (or, negative, have beyond it) under the
    name `rest`.
    """
    lacking = whole.total - sum(amount.total for amount in amounts.values())
    return {**amounts, rest: Amount(total=lacking)} if lacking else dict(amounts)
