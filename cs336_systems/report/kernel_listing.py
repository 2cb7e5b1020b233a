"""What the tables of a `StepProfile` share: their form, their words, and how numbers are said."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cs336_systems.analysis.step_profile import StepProfile, Work
from cs336_systems.report.formats import Table, significant, to_csv

Row = TypeVar("Row")

WHOLE_STEP = "step"
"""What stands in the place of a phase for all phases together."""
MAX_LABEL = 64
"""Characters of a name in a readable table; the CSV has all."""
LABEL_END = 8
"""Of these, characters of its end: cuBLAS names its tiles in the middle, by which alone some kernels differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One subject of a profile: what of it people read, and all of its values."""

    name: str
    """Of the files, without an ending."""
    tables: tuple[Table, ...]
    """Empty where only the CSV is of use."""
    csv: str
    """Empty where nothing is known of the subject."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the work of a profile is called."""

    item: str
    time: str

    @property
    def items(self) -> str:
        """The plural."""
        return f"{self.item}s"


def terms(profile: StepProfile) -> Terms:
    """Kernels and GPU time; operators and CPU time where the trace is of a CPU."""
    return Terms("operator", "CPU time") if profile.work is Work.OPERATORS else Terms("kernel", "GPU time")


def about(profile: StepProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    kind = "warm-up step" if profile.is_warmup else "step"
    steps = f"{profile.num_steps} {kind}" + ("s" if profile.num_steps != 1 else "")
    steps = "no steps in the file, so the whole of it counts as one" if profile.is_whole_trace else steps
    return f"{', '.join([*map(label, (profile.source, *profile.device_names)), steps])}."


def csv_of(columns: Mapping[str, Callable[[Row], object]], rows: Iterable[Row]) -> str:
    """The rows as CSV, by the name of each column and how to get its value; empty for no rows."""
    values = [[value(row) for value in columns.values()] for row in rows]
    return to_csv(tuple(columns), values) if values else ""


def milliseconds(time_s: float) -> str:
    """The time in ms, for a cell."""
    return significant(time_s * 1e3) if time_s else "0"


def microseconds(time_s: float | None) -> str:
    """The time in us, for a cell; empty for None."""
    return "" if time_s is None else significant(time_s * 1e6)


def percent(part: float, whole: float) -> str:
    """The share with one decimal; empty where the whole is nothing."""
    return f"{100 * part / whole:.1f}" if whole else ""


def share(part: float, whole: float) -> float | None:
    """The share as a fraction; None where the whole is nothing."""
    return part / whole if whole else None


def count_per_step(count: int, num_steps: int) -> str:
    """A whole number where the count divides by the steps, else their mean with two decimals."""
    return f"{count / num_steps:,.2f}" if count % num_steps else f"{count // num_steps:,}"


def label(name: str) -> str:
    """The name, its middle left out where it is longer than a table has room for."""
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - LABEL_END - 1]}…{name[-LABEL_END:]}"
