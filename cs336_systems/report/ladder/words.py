"""How a speed-up is written: to three digits, and to more where its interval is so narrow that it asks for them."""

from cs336_systems.report.formats import significant
from cs336_systems.report.ladder.rows import SpeedUp

MIN_DIGITS, MAX_DIGITS = 3, 5


def ratio_text(found: SpeedUp | None) -> str:
    """To the digits of its interval, which would else seem to leave it out; empty for none."""
    return "" if found is None else significant(found.ratio, _digits(found))


def interval_text(found: SpeedUp | None) -> str:
    """`2.426 to 2.433`: its width shows, unless that takes more than MAX_DIGITS; empty for none."""
    if found is None or found.low is None or found.high is None:
        return ""
    digits = _digits(found)
    return f"{significant(found.low, digits)} to {significant(found.high, digits)}"


def _digits(found: SpeedUp) -> int:
    """Significant ones, as far as the first of the interval's width."""
    if found.low is None or found.high is None:
        return MIN_DIGITS
    width = found.high - found.low
    wanted = _exponent(found.high) - _exponent(width) + 1 if width > 0 else MAX_DIGITS
    return min(MAX_DIGITS, max(MIN_DIGITS, wanted))


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])
