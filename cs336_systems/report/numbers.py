"""How a number is written in a cell or a sentence."""

import math

MIN_DIGITS, MAX_DIGITS = 3, 5
"""Significant digits of what has an interval."""
MAX_LABEL = 64
"""Characters of a name in a readable table; the CSV has all."""
LABEL_END = 8
"""Of these, characters of its end: cuBLAS names its tiles in the middle, by which alone some kernels differ."""
DOUBT = "?"
"""Ends a time that is in doubt, and what is computed from it."""


MIB, GIB = 2**20, 2**30
GIGA, TERA = 1e9, 1e12


def significant(value: float, digits: int = 4) -> str:
    """The value to so many significant digits, more where it is a larger whole number; no exponent, thousands apart."""
    if not math.isfinite(value):
        return str(value)
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def rounded(value: float) -> str:
    """The value to four significant digits; nothing but a zero for 0."""
    return significant(value) if value else "0"


def count(value: float) -> str:
    """How often something happened: a whole number, or a mean with two decimals; thousands apart."""
    return f"{value:,.2f}" if value % 1 else f"{value:,.0f}"


def in_percent(share: float) -> str:
    """The share in percent with one decimal."""
    return f"{100 * share:.1f}"


def change(ratio: float) -> str:
    """By how much more or less than 1 the ratio is, in percent, signed."""
    return f"{100 * (ratio - 1):+.1f}"


def mean_and_std(mean: float, std: float | None) -> str:
    """`66.31 ± 0.12`, `66.3 ± 0.4`: the deviation to one digit, two after a leading 1; the mean as far as these.

    Where the deviation is the larger, `0.072 ± 33`: each to two digits.
    """
    if std is None or not math.isfinite(std):
        return significant(mean)
    if std == 0:
        return f"{significant(mean)} ± 0"
    if std > abs(mean):
        return f"{significant(mean, 2)} ± {significant(std, 2)}"
    first, _, exponent = f"{std:.1e}".partition("e")
    decimals = min(9, max(0, (1 if first.startswith("1") else 0) - int(exponent)))
    return f"{mean:,.{decimals}f} ± {std:,.{decimals}f}"


def interval_text(low: float | None, high: float | None) -> str:
    """`2.426 to 2.433`: its width shows, unless that takes more than MAX_DIGITS; empty for none."""
    if low is None or high is None:
        return ""
    digits = interval_digits(low, high)
    return f"{significant(low, digits)} to {significant(high, digits)}"


def interval_digits(low: float, high: float) -> int:
    """Significant ones, as far as the first of the interval's width, from MIN_DIGITS to MAX_DIGITS."""
    wanted = _exponent(high) - _exponent(high - low) + 1 if high > low else MAX_DIGITS
    return min(MAX_DIGITS, max(MIN_DIGITS, wanted))


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def percent(part: float, whole: float) -> str:
    """The share with one decimal; empty where the whole is nothing."""
    return f"{100 * part / whole:.1f}" if whole else ""


def ratio(value: float | None, whole: float | None) -> float | None:
    """The value over the whole; None where either is not known, or the whole is nothing."""
    return None if value is None or not whole else value / whole


def label(name: str) -> str:
    """The name, its middle left out where it is longer than a table has room for."""
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - LABEL_END - 1]}…{name[-LABEL_END:]}"


def scientific(value: float) -> str:
    """The value to two digits, with an exponent."""
    return f"{value:.1e}"


def amount(value: float | str) -> str:
    """A whole number in full; others to four digits, with a power of a thousand from a million on: `70e9`."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or not value:
        return f"{value:,.0f}"
    if 1e-3 <= value < 1e6:
        return significant(value)
    exponent = int(f"{value:.3e}".partition("e")[2]) // 3 * 3
    return f"{value / 10.0**exponent:.4g}e{exponent}"
