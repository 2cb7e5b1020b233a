"""How times that warnings put in doubt are written, and what is computed from them, in the tables of all studies."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from cs336_systems.analysis.statistics import quotient_stdev
from cs336_systems.analysis.warnings import Repeated, in_doubt
from cs336_systems.record import RunWarning
from cs336_systems.report.numbers import DOUBT, derived_text, mean_and_std

Warnings = Sequence[RunWarning]


class Timed(Protocol):
    """Raw times of something."""

    @property
    def cv(self) -> float | None:
        """Their standard deviation over their mean; None where that is not known."""


def time_text(value: float, std: float | None, warnings: Warnings) -> str:
    """A time with its deviation, marked where it is in doubt."""
    return f"{mean_and_std(value, std)}{f' {DOUBT}' if is_doubted(warnings) else ''}"


def ratio_text(ratio: float | None, times: Iterable[Timed | None], warnings: Warnings, digits: int = 3) -> str:
    """What was computed from the times; in doubt with the deviation that theirs give it. Empty for None."""
    if ratio is None:
        return ""
    std = quotient_stdev(ratio, *(None if measured is None else measured.cv for measured in times))
    return derived_text(ratio, std, is_doubted=is_doubted(warnings), digits=digits)


def derived(key: str, value: float | None, *times: tuple[Timed | None, Warnings]) -> dict[str, object]:
    """What was computed from times, for a `derived` column: the value, its deviation, whether it is in doubt."""
    std = None if value is None else quotient_stdev(value, *(None if timed is None else timed.cv for timed, _ in times))
    doubted = any(is_doubted(warnings) for _, warnings in times)
    return {key: value, f"{key}_std": std, f"{key}_is_doubted": doubted}


def codes_text(warnings: Warnings) -> str | None:
    """The codes for a cell of a CSV file; None for none."""
    return ";".join(warning.code for warning in warnings) or None


def doubt_notes(codes: Sequence[str | None], rows: str, repeated: Repeated) -> list[str]:
    """How many of the rows, or what they are called here, carry each warning, and what to do; nothing without any.

    `codes` of each row are joined by semicolons, as in CSV files.
    """
    counts = Counter(code for found in codes if found for code in found.split(";"))
    if not counts:
        return []
    said = ", ".join(f"{code} in {count} of {len(codes)} {rows}" for code, count in counts.most_common())
    return [
        f"{DOUBT} marks a time in doubt, and what is computed from it, with its deviation: {said}. "
        f"Close other programs, or use {repeated.more}."
    ]


def is_doubted(warnings: Warnings) -> bool:
    """Whether a warning puts the time in doubt."""
    return in_doubt(warning.code for warning in warnings)
