"""What of the results people read: one selection for every format, and the files of a results directory."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from cs336_systems.analysis.statistics import FEWEST
from cs336_systems.config import Precision
from cs336_systems.costs.hardware import find_device
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.columns import column
from cs336_systems.report.frame import RESULTS, describe, over_warmup, rows_of, to_frame
from cs336_systems.report.identity import UNLISTED, identity_columns, trailing
from cs336_systems.report.numbers import DOUBT
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.table import Table, known, make_table
from cs336_systems.report.words import warning_counts
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.text import text_of

ALWAYS = ("size", "context_length", "precision")
"""Settings that every row gives."""
PHASES = ("data_mean_ms", "forward_mean_ms", "backward_mean_ms", "optimizer_mean_ms")
"""In the order of a step."""
DERIVED = ("step_cv", "tokens_per_s", "mfu", "ceiling_share", "peak_allocated_gib", "predicted_peak_gib", "speed_up")
"""Columns that follow from the times, and those of memory."""
ALL_COLUMNS = (*RESULTS, *UNLISTED, "processes")
"""Columns of results.csv; settings that these leave out come after them."""
OFFERED = "Offered: what the factory of a model of one's own was given to choose from; the model's shape is not known."
CEILING = "Of ceiling: of the highest rate that matrix products were measured to reach."
DOUBTED = f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation."


def results_table(frame: pd.DataFrame, *, has_csv: bool = True) -> Table:
    """The times of every configuration, its failures in words; settings that all share are said once, below.

    Warnings are counted where there is a CSV that names them by row.
    """
    notes = [
        *([OFFERED] if any(config.model_factory for config in frame.index) else []),
        "Times are mean ± standard deviation over the measured steps of a process.",
        *interval_notes(frame["processes"]),
        *mfu_notes(frame),
        *([CEILING] if frame["ceiling_share"].notna().any() else []),
        *(warning_notes([row["warnings"] for row in rows_of(frame)]) if has_csv else []),
        *([DOUBTED] if frame["speed_up_is_doubted"].any() else []),
    ]
    return _table("Time of a step", frame, ("step_ci95_low_ms", *PHASES, *DERIVED), notes)


def warmup_table(frame: pd.DataFrame) -> Table | None:
    """The same step after different numbers of warm-up steps; None where that number does not vary."""
    frame = over_warmup(frame)
    keys = ("step_ci95_low_ms", "step_cv", "first_step_ms")
    return None if frame.empty else _table("Time of a step by warm-up", frame, keys, [])


def _table(title: str, frame: pd.DataFrame, keys: Sequence[str], notes: Sequence[str]) -> Table:
    """What tells the rows apart, the step, what is known below these keys, and how runs ended if any failed."""
    rows, shared = rows_of(frame), describe(frame)
    columns = [column("step_mean_ms"), *known([column(key) for key in keys], rows)]
    status = [] if (frame["status"] == Status.OK).all() else [column("status")]
    return make_table(
        title,
        [*identity_columns(rows, ALWAYS), *columns, *status],
        rows,
        [*([f"{shared}."] if shared else []), *notes],
        lambda row: bool(row["status"] != Status.OK),
    )


def write_tables(records: Iterable[RunRecord], directory: Path, ceilings: Ceilings = NO_CEILINGS) -> list[Path]:
    """Write results.csv with everything, the readable tables as results.md, .tex and .typ; return their paths."""
    return write_files(texts_of(results_section(records, ceilings)), directory)


def results_section(records: Iterable[RunRecord], ceilings: Ceilings = NO_CEILINGS) -> Section:
    """The tables of the steps, and every configuration with all that is known of it."""
    frame = to_frame(records, ceilings)
    rows = [row | {name: text_of(row[name]) for name in UNLISTED} for row in rows_of(frame)]
    added = [name for name in trailing([row["identity"] for row in rows]) if name not in ALL_COLUMNS]
    tables = tuple(table for table in (results_table(frame), warmup_table(frame)) if table is not None)
    return Section(name="results", tables=tables, rows=rows, keys=(*ALL_COLUMNS, *added))


def interval_notes(counts: Iterable[int]) -> list[str]:
    """What the interval of the step is over, by the number of processes of each row; why there is none of two."""
    numbers = sorted(set(counts))
    enough = [count for count in numbers if count >= FEWEST]
    number = " to ".join(str(count) for count in dict.fromkeys(enough[:1] + enough[-1:]))
    interval = [f"95 % interval: of the mean step, over the means of {number} fresh processes."] if enough else []
    return [*interval, *too_few_note(numbers)]


def too_few_note(counts: Iterable[int]) -> list[str]:
    """What to do where there were two processes, which give no interval."""
    return [f"Two processes are too few for an interval: use --repeats {FEWEST} or more."] if 2 in set(counts) else []


def mfu_notes(frame: pd.DataFrame) -> list[str]:
    """What MFU is a share of, where it stands beside that of another precision; the peaks, if all are of one device."""
    timed = frame[frame["mfu"].notna()]
    precisions = [precision for precision in Precision if precision in set(timed["precision"])]
    if len(precisions) < 2:
        return []
    names = timed["device_name"].unique()
    device = find_device(names[0]) if len(names) == 1 else None
    each = [f"{name} {device.peak_flops_per_s[name] / 1e12:g}" for name in precisions] if device else []
    peaks = f" ({', '.join(each)} TFLOP/s)" if each else ""
    return [
        f"MFU: of the peak that the data sheet promises at the row's own precision{peaks}. A faster step in another "
        "precision has a lower MFU where that peak rises by more than the speed."
    ]


def warning_notes(codes: Sequence[str | None], rows: str = "rows") -> list[str]:
    """How many rows, or what they are called here, carry each warning."""
    counted = warning_counts(codes, rows.removesuffix("s") if len(codes) == 1 else rows)
    return [f"Warnings, named by row in the CSV: {counted}."] if counted else []
