"""What two files have in common and what not: parts whose differences add up to that of the wholes.

Amounts are whole numbers, nanoseconds or bytes, over all steps of a file; differences are per step.
They are fractions, so that nothing is lost where the files have unequal numbers of steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    """Time or memory of a part of one file, over all of its steps."""

    count: int = 0
    total: int = 0
    """Nanoseconds or bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The same part of both files."""

    name: str
    a: Amount
    b: Amount
    steps_a: int = 1
    steps_b: int = 1
    change: Change = Change.NONE

    @property
    def per_step_a(self) -> Fraction:
        """The amount in a step of A."""
        return Fraction(self.a.total, self.steps_a)

    @property
    def per_step_b(self) -> Fraction:
        """The amount in a step of B."""
        return Fraction(self.b.total, self.steps_b)

    @property
    def difference(self) -> Fraction:
        """How much more a step of B has."""
        return self.per_step_b - self.per_step_a

    @property
    def changed_count(self) -> Change:
        """Whether only one file has the part, or one of them more often in a step."""
        if self.a == self.b == Amount():
            return Change.NONE
        if self.a == Amount():
            return Change.ONLY_B
        if self.b == Amount():
            return Change.ONLY_A
        a, b = self.a.count * self.steps_b, self.b.count * self.steps_a
        if a == b:
            return Change.NONE
        return Change.MORE if b > a else Change.FEWER


def parts_of(
    a: Mapping[str, Amount], b: Mapping[str, Amount], steps: tuple[int, int] = (1, 1)
) -> list[Part]:
    """The parts of either file by name, the largest difference per step first."""
    parts = []
    for name in dict.fromkeys((*a, *b)):
        amounts = a.get(name, Amount()), b.get(name, Amount())
        parts.append(_part(name, amounts, steps))
    return sorted(parts, key=lambda part: -abs(part.difference))


def together(name: str, parts: Iterable[Part], steps: tuple[int, int]) -> Part:
    """All of these parts as one."""
    sums = [[0, 0], [0, 0]]
    for part in parts:
        for side, amount in zip(sums, (part.a, part.b), strict=True):
            side[0] += amount.count
            side[1] += amount.total
    return _part(name, (Amount(*sums[0]), Amount(*sums[1])), steps)


def with_rest(amounts: Mapping[str, Amount], whole: int, rest: str) -> dict[str, Amount]:
    """The amounts, and under the name `rest` what they lack to the whole, or have beyond it."""
    lacking = whole - sum(amount.total for amount in amounts.values())
    return {**amounts, rest: Amount(0, lacking)} if lacking else dict(amounts)


def _part(name: str, amounts: tuple[Amount, Amount], steps: tuple[int, int]) -> Part:
    """The part with what is to be said of its counts."""
    a, b = amounts
    part = Part(name=name, a=a, b=b, steps_a=steps[0], steps_b=steps[1])
    return replace(part, change=part.changed_count)
