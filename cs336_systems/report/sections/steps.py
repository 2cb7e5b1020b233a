"""The section of a sweep's step times: the tables that people read, and results.csv with every column."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from cs336_systems.analysis.statistics import FEWEST
from cs336_systems.config import Precision, RunConfig
from cs336_systems.costs.hardware import find_device
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.columns import Row, column
from cs336_systems.report.frame import RESULTS, SHARED, SPEED_UPS, describe, over_warmup, rows_of, to_frame
from cs336_systems.report.identity import UNLISTED, identity_columns, trailing
from cs336_systems.report.numbers import DOUBT
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.table import Table, known, make_table
from cs336_systems.report.words import SHIPPED, warning_counts
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.text import text_of

ALWAYS = ("size", "context_length", "precision")
"""Settings that are columns even if all rows have the same value."""
PHASES = ("data_mean_ms", "forward_mean_ms", "backward_mean_ms", "communication_mean_ms", "optimizer_mean_ms")
"""Columns of the phases, in the order of a step."""
DERIVED = (
    "predicted_step_ms", "predicted_step_error", "step_cv", "sent_mib", "predicted_collectives_ms", "tokens_per_s",
    "mfu", "ceiling_share", "peak_allocated_gib", "predicted_peak_gib", *SPEED_UPS,
)  # fmt: skip
"""Columns that are computed from the times, and those of memory."""
ALL_COLUMNS = (*RESULTS, *UNLISTED, "processes")
"""First columns of results.csv; all other settings come after them."""
OFFERED = "Offered: what the factory of a model of one's own was given to choose from; the model's shape is not known."
CEILING = "Of ceiling: of the highest rate that matrix products were measured to reach."
FORETOLD = (
    "Predicted (ms): the step, by its configuration and the measured ceilings of its device alone. Where it is empty, "
    "there is no forecast."
)
PREDICTED = (
    "Collectives, predicted: the time of all of them one after the other, by the measured ceilings. The phase "
    "communication has only what is left of them after backward, and copying and waiting besides."
)
DOUBTED_FORECAST = (
    f"{DOUBT} marks a forecast from ceilings many of whose times are in doubt: measure them again on a quiet machine."
)
DOUBTED = f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation."


def results_table(frame: pd.DataFrame, ceilings: Ceilings = NO_CEILINGS, *, has_csv: bool = True) -> Table:
    """The table of step times: a row for each configuration, failed ones too, and the shared settings in a note.

    `ceilings` are those from which the frame was made.
    With `has_csv`, a note counts the warnings and points to the CSV, which has them in each row.
    """
    devices = frame["device_name"].dropna().unique()
    notes = [
        *([OFFERED] if any(config.model_factory for config in frame.index) else []),
        "Times are mean ± standard deviation over the measured steps of a process.",
        *interval_notes(frame["processes"]),
        *mfu_notes(frame),
        *([CEILING] if frame["ceiling_share"].notna().any() else []),
        *([FORETOLD] if frame["predicted_step_ms"].notna().any() else []),
        *([SHIPPED] if frame["predicted_step_ms"].notna().any() and any(map(ceilings.is_shipped, devices)) else []),
        *([DOUBTED_FORECAST] if frame["prediction_is_doubted"].any() else []),
        *([PREDICTED] if frame["predicted_collectives_ms"].notna().any() else []),
        *(warning_notes([row["warnings"] for row in rows_of(frame)]) if has_csv else []),
        *([DOUBTED] if frame[[f"{key}_is_doubted" for key in SPEED_UPS]].any(axis=None) else []),
    ]
    return _table("Time of a step", frame, ("step_ci95_low_ms", *PHASES, *DERIVED), notes)


def warmup_table(frame: pd.DataFrame) -> Table | None:
    """The table of step times by the number of warm-up steps; None if that number does not vary."""
    frame = over_warmup(frame)
    keys = ("step_ci95_low_ms", "step_cv", "first_step_ms")
    return None if frame.empty else _table("Time of a step by warm-up", frame, keys, [])


def _table(title: str, frame: pd.DataFrame, keys: Sequence[str], notes: Sequence[str]) -> Table:
    """A table of distinguishing settings, the step, the columns of `keys` that are not empty, and any failures."""
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


def write_tables(
    records: Iterable[RunRecord],
    directory: Path,
    ceilings: Ceilings = NO_CEILINGS,
    of_profiles: Mapping[RunConfig, Row] = MappingProxyType({}),
) -> list[Path]:
    """Write results.csv with everything, the readable tables as results.md, .tex and .typ; return their paths."""
    return write_files(texts_of(results_section(records, ceilings, of_profiles)), directory)


def results_section(
    records: Iterable[RunRecord],
    ceilings: Ceilings = NO_CEILINGS,
    of_profiles: Mapping[RunConfig, Row] = MappingProxyType({}),
) -> Section:
    """The tables of step times, and for results.csv a row with every value of each configuration.

    `of_profiles` has, by configuration, what profiles of the same runs add to these rows.
    """
    frame = to_frame(records, ceilings)
    added_keys = tuple(dict.fromkeys(key for row in of_profiles.values() for key in row))
    unknown: Row = dict.fromkeys(added_keys)
    rows = [
        {**unknown, **row, **{name: text_of(row[name]) for name in UNLISTED}, **of_profiles.get(row["config"], {})}
        for row in rows_of(frame)
    ]
    added = [name for name in trailing([row["identity"] for row in rows]) if name not in ALL_COLUMNS]
    tables = tuple(table for table in (results_table(frame, ceilings), warmup_table(frame)) if table is not None)
    shared = SHARED if any(config.is_shared for config in frame.index) else ()
    return Section(name="results", tables=tables, rows=rows, keys=(*ALL_COLUMNS, *shared, *added_keys, *added))


def interval_notes(counts: Iterable[int]) -> list[str]:
    """Notes on the confidence interval: how many processes it is over, and why two processes give none."""
    numbers = sorted(set(counts))
    enough = [count for count in numbers if count >= FEWEST]
    number = " to ".join(str(count) for count in dict.fromkeys(enough[:1] + enough[-1:]))
    interval = [f"95 % interval: of the mean step, over the means of {number} fresh processes."] if enough else []
    return [*interval, *too_few_note(numbers)]


def too_few_note(counts: Iterable[int]) -> list[str]:
    """A note for rows of two processes, which have no interval, on how to get one."""
    return [f"Two processes are too few for an interval: use --repeats {FEWEST} or more."] if 2 in set(counts) else []


def mfu_notes(frame: pd.DataFrame) -> list[str]:
    """A note on the peaks that MFU refers to, if precisions differ; with their values, if all runs have one device."""
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
    """A note that counts the rows with each warning; `rows` is what the rows are called."""
    counted = warning_counts(codes, rows.removesuffix("s") if len(codes) == 1 else rows)
    return [f"Warnings, named by row in the CSV: {counted}."] if counted else []
