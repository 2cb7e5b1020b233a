"""How a speed-up is written: to three digits, and to more where its interval is so narrow that it asks for them."""

from cs336_systems.report import numbers
from cs336_systems.report.numbers import DOUBT, MIN_DIGITS, derived_text, interval_digits, significant
from cs336_systems.report.sections.ladder.rows import SpeedUp


def ratio_text(found: SpeedUp | None) -> str:
    """To the digits of its interval, which would else seem to leave it out; empty for none.

    In doubt with a mark, and without an interval with its deviation.
    """
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return derived_text(found.ratio, found.stdev, is_doubted=found.is_doubted, digits=MIN_DIGITS)
    doubt = f" {DOUBT}" if found.is_doubted else ""
    return f"{significant(found.ratio, interval_digits(found.low, found.high))}{doubt}"


def interval_text(found: SpeedUp | None) -> str:
    """`2.426 to 2.433`; empty for none."""
    return "" if found is None else numbers.interval_text(found.low, found.high)
