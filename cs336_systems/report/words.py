"""How tables, pictures and sentences write numbers, statuses, modes, warnings, and places in the
user's own code.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..analysis import compare
from ..analysis.statistics import FEWEST
from ..record import Environment, Failure, RunRecord, Status
from ..text import counted

MIN_DIGITS, MAX_DIGITS = 3, 5
"""Fewest and most significant digits of a value that has an interval."""
MAX_LABEL = 64
"""Longest name in a readable table, in characters; the CSV has the whole name."""
LABEL_END = 8
"""How many of these are from the name's end: few, because some cuBLAS kernels differ only in the
middle, by tiles.
"""
DOUBT = "?"
"""Mark behind a time that is in doubt, and behind a value that was computed from one."""

MIB, GIB = 2**20, 2**30
GIGA, TERA = 1e9, 1e12

STATUS_WORDS = {
    Status.OK: "ok",
    Status.UNAVAILABLE: "no kernel",
    Status.OOM: "out of memory",
    Status.TIMEOUT: "timed out",
    Status.CRASHED: "crashed",
    Status.KILLED: "killed",
    Status.CUDA_ERROR: "CUDA error",
    Status.INVALID: "invalid record",
}
SHIPPED = (
    "These ceilings come with this program: they were measured on another machine, whose CPU and "
    "power limit may differ (cs336 ceilings measures those of this one)."
)
DOUBTED_FORECAST = (
    f"{DOUBT} marks a forecast from ceilings many of whose times are in doubt: measure them "
    "again on a quiet machine."
)
SCATTER = f"{100 * compare.PROCESS_DEVIATION:g} %"
CHANCE = (
    f"Of fewer than {FEWEST} processes each, {1 / compare.ONE_PROCESS_TELLS:.2f} to "
    f"{compare.ONE_PROCESS_TELLS:.2f} times as fast may be chance: they are assumed to scatter by "
    f"{SCATTER} (cs336 compare takes several)."
)
_FRAME = re.compile(
    r'^  File "([^"\n]+)", line (\d+).*\n(?:    .*\n|  \[Previous .*\n)*', re.MULTILINE
)
_NOT_THE_USERS = ("cs336/", "importlib/", "<frozen importlib", "torch/", "triton/")
"""Beginnings of the paths, in a record's traceback, of files that are not the user's."""


def status_text(status: str) -> str:
    """A status in words: `out of memory` for `oom`."""
    return STATUS_WORDS[Status(status)]


def ended(*statuses: Status) -> str:
    """How the runs ended, in words: `crashed` if each did, `of 3 processes 1 crashed` if they ended
    unlike each other; without any, that they were not run.
    """
    counts = Counter(statuses)
    if len(counts) <= 1:
        return STATUS_WORDS[statuses[0]] if statuses else "not run"
    del counts[Status.OK]
    parts = [f"{number} {STATUS_WORDS[status]}" for status, number in counts.items()]
    return f"of {len(statuses)} processes {', '.join(parts)}"


def warning_counts(codes: Sequence[str | None], rows: str) -> str:
    """How many rows have each warning: `drift in 2 of 4 rows, unstable in 1 of 4 rows`; empty
    without warnings.

    `codes` has the warnings of each row, joined by semicolons; `rows` is what the rows are called.
    """
    counts = Counter[str]()
    for of_row in codes:
        counts.update(of_row.split(";") if of_row else ())
    return ", ".join(
        f"{code} in {count} of {len(codes)} {rows}" for code, count in counts.most_common()
    )


def mixed_notes(environments: Iterable[Environment | None]) -> list[str]:
    """A note on the hardware and software in which these differ."""
    apart = compare.conditions_apart(environments)
    return [f"Differences may be due to unlike hardware or software: {apart}."] if apart else []


def significant(value: float, digits: int = 4) -> str:
    """The value to this many significant digits, without an exponent and with commas between
    thousands.

    All digits before the decimal point are written, even if they are more.
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{max(0, digits - 1 - _exponent(value, digits))}f}"


def rounded(value: float) -> str:
    """The value to four significant digits; `0` for zero."""
    return significant(value) if value else "0"


def count(value: float) -> str:
    """How often something happened: a whole number, or a mean with two decimals; with commas
    between thousands.
    """
    return f"{value:,.2f}" if value % 1 else f"{value:,.0f}"


def in_percent(share: float) -> str:
    """The share in percent with one decimal."""
    return f"{100 * share:.1f}"


def change(ratio: float) -> str:
    """The relative change that the ratio means, in percent with a sign: `+5.0` for 1.05."""
    return f"{100 * (ratio - 1):+.1f}"


def mean_and_std(mean: float, std: float | None) -> str:
    """Mean and standard deviation with the same decimals: `66.31 ± 0.12`, `66.3 ± 0.4`.

    The deviation has one significant digit, or two if the first is a 1. If it is larger than the
    mean, each has two significant digits: `0.072 ± 33`.
    """
    if std is None or not math.isfinite(std):
        return significant(mean)
    if std == 0:
        return f"{significant(mean)} ± 0"
    if std > abs(mean):
        return f"{significant(mean, 2)} ± {significant(std, 2)}"
    first, _, exponent = f"{std:.1e}".partition("e")
    # a deviation that begins with a 1 has a second digit
    decimals = first.startswith("1") - int(exponent)
    decimals = min(9, max(0, decimals))
    return f"{mean:,.{decimals}f} ± {std:,.{decimals}f}"


def interval_text(low: float | None, high: float | None) -> str:
    """The interval as `2.426 to 2.433`, with enough digits to show its width; empty if an end is
    unknown.
    """
    if low is None or high is None:
        return ""
    digits = interval_digits(low, high)
    return f"{significant(low, digits)} to {significant(high, digits)}"


def interval_digits(low: float, high: float) -> int:
    """How many significant digits show the width of the interval: from MIN_DIGITS to MAX_DIGITS."""
    wanted = _exponent(high) - _exponent(high - low) + 1 if high > low else MAX_DIGITS
    return min(MAX_DIGITS, max(MIN_DIGITS, wanted))


def _exponent(value: float, digits: int = 7) -> int:
    """The decimal exponent of the value after rounding to this many significant digits."""
    return int(f"{value:.{digits - 1}e}".partition("e")[2])


def percent(part: float, whole: float) -> str:
    """The part in percent of the whole, with one decimal; empty if the whole is 0."""
    return f"{100 * part / whole:.1f}" if whole else ""


def ratio(value: float | None, whole: float | None) -> float | None:
    """`value` over `whole`; None if either is unknown or `whole` is 0."""
    return None if value is None or not whole else value / whole


def scaled(value: float | None, scale: float) -> float | None:
    """The value times the scale; None for unknown."""
    return None if value is None else value * scale


def label(name: str) -> str:
    """The name of a module or kernel; if it is longer than MAX_LABEL characters, without its
    middle.
    """
    if len(name) <= MAX_LABEL:
        return name
    return f"{name[: MAX_LABEL - LABEL_END - 1]}…{name[-LABEL_END:]}"


def scientific(value: float) -> str:
    """The value to two digits, with an exponent."""
    return f"{value:.1e}"


def amount(value: float | str) -> str:
    """A whole number in full; others to four digits, and from a million on with a power of a
    thousand: `70e9`.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) or not value:
        return f"{value:,.0f}"
    if 1e-3 <= value < 1e6:
        return significant(value)
    exponent = _exponent(value, 4) // 3 * 3
    return f"{value / 10.0**exponent:.4g}e{exponent}"


def milliseconds(time_ms: float) -> str:
    """The time to four digits."""
    return f"{significant(time_ms)} ms"


def percent_of(part: float, whole: float = 1) -> str:
    """The part in percent of the whole, to three digits; `0 %` if either is 0."""
    share = significant(100 * part / whole, 3) if part and whole else "0"
    return f"{share} %"


class NamedRows:
    """Rows of results, and what a sentence says of all of them.

    With `names`, one for each row, the sentence names the rows that it singles out.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> None:
        """`names` has a name for each row, or is empty for rows that need none."""
        self.rows, self.names = rows, names

    def range(self, key: str, text: Callable[[Any], str], doubt: str = "") -> str:
        """The least and the largest value under the key as texts, with the names of their rows;
        the text alone if both read the same, empty if no row has a value.

        A value is marked if its row says under the key `doubt` that it is in doubt.
        """
        known = [index for index, row in enumerate(self.rows) if row[key] is not None]
        if not known:
            return ""
        known.sort(key=lambda index: self.rows[index][key])
        ends = []
        for index in (known[0], known[-1]):
            row = self.rows[index]
            mark = f" {DOUBT}" if row.get(doubt) else ""
            ends.append(f"{text(row[key])}{mark}")
        low, high = ends
        if low == high and len(known) > 1:
            return low
        least = f"{low}{self._name(known[0])}"
        return least if len(known) == 1 else f"{least} to {high}{self._name(known[-1])}"

    def _name(self, index: int) -> str:
        """The name of this row in parentheses; empty if the rows have no names."""
        return f" ({self.names[index]})" if self.names else ""

    def count(self, what: str, chosen: Sequence[int]) -> str:
        """In how many of the rows this is so, and in which, if in one: `out of memory in 1 of 3
        (xl ctx 512)`. `chosen` are the indices of the rows.
        """
        if len(self.rows) == 1:
            return what
        name = self._name(chosen[0]) if len(chosen) == 1 else ""
        return f"{what} in {len(chosen)} of {len(self.rows)}{name}"

    def counts(self, texts: Iterable[str]) -> list[str]:
        """Each different text, and in how many rows it is; `texts` has one for each row."""
        indices: dict[str, list[int]] = {}
        for index, text in enumerate(texts):
            indices.setdefault(text, []).append(index)
        return [self.count(text, chosen) for text, chosen in indices.items() if text]

    def failures(self) -> str:
        """In words, how many rows ended in each kind of failure, to be put at the end of a sentence
        after a semicolon.
        """
        return "".join(f"; {told}" for told in self.counts(map(_failure, self.rows)))

    def part(self, key: str) -> str:
        """In words, how many of the rows have a value under the key: `in 2 of 3 configurations`."""
        whole = counted(len(self.rows), "configuration")
        number = sum(row[key] is not None for row in self.rows)
        return f"in {whole}" if number == len(self.rows) else f"in {number} of {whole}"


def _failure(row: Mapping[str, Any]) -> str:
    """How the runs of the row failed, in words; empty if none did."""
    status = row["status"]
    return "" if status is Status.OK else ended(*row.get("statuses", (status,)))


def own_traceback(record: RunRecord) -> str:
    """The traceback of a failed run of the user's own model, reduced to the user's files; empty
    for other runs.
    """
    return _of_the_user(record.failure) if _factory(record) else ""


def own_place(record: RunRecord) -> str:
    """The innermost file and line of the user's own code, in the model's package if possible;
    empty for other runs.
    """
    factory = _factory(record)
    return place_in(factory, record.failure) if factory else ""


def _factory(record: RunRecord) -> str | None:
    """The `package.module:name` of the user's own model; None if the run has this project's
    model.
    """
    return None if record.config is None else record.config.model_factory


def _of_the_user(failure: Failure | None) -> str:
    """The failure's traceback without frames of PyTorch, Python and this program; empty if it has
    no other frames.
    """
    traceback = failure and failure.traceback
    if not traceback or not any(map(_is_users, _FRAME.finditer(traceback))):
        return ""
    return _FRAME.sub(lambda frame: frame[0] if _is_users(frame) else "", traceback)


def place_in(name: str, failure: Failure | None) -> str:
    """The innermost file and line of the user's own code, in the package of `name` if possible;
    empty if none.
    """
    frames = list(_FRAME.finditer(_of_the_user(failure)))
    package = name.partition(":")[0].partition(".")[0]
    in_package = (f"{package}.py", f"{package}/")
    nearest = [frame for frame in frames if frame[1].startswith(in_package)] or frames
    return f"{nearest[-1][1]}, line {nearest[-1][2]}" if nearest else ""


def _is_users(frame: re.Match[str]) -> bool:
    """Whether a frame of a traceback, as text, is of the user's own code."""
    return not frame[1].startswith(_NOT_THE_USERS)
