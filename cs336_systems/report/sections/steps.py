"""What of the results people read: one selection for every format, and the files of a results directory."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from cs336_systems.analysis.statistics import FEWEST
from cs336_systems.config import Precision
from cs336_systems.costs.hardware import find_device
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.columns import Column, column
from cs336_systems.report.frame import COLUMNS, over_warmup, rows_of, to_frame
from cs336_systems.report.identity import (
    SHAPE,
    UNLISTED,
    identities,
    identity_columns,
    telling,
    trailing,
)
from cs336_systems.report.numbers import DOUBT
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.table import Table, make_table
from cs336_systems.report.words import NOTED, STATUS_WORDS, describe
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.text import text_of

RowDict: TypeAlias = dict[str, Any]

PHASES = ("data", "forward", "backward", "optimizer")
"""In the order of a step."""
DERIVED = ("step_cv", "tokens_per_s", "mfu", "ceiling_share", "peak_allocated_gib", "predicted_peak_gib", "speed_up")
"""Columns that follow from the times, and those of memory."""
OFFERED = "Offered: what the factory of a model of one's own was given to choose from; the model's shape is not known."
ALL_COLUMNS = (*COLUMNS, *UNLISTED, "processes")
"""Columns of results.csv; settings that these leave out come after them."""


def results_table(frame: pd.DataFrame, *, has_csv: bool = True) -> Table:
    """The times of every configuration, its failures in words; settings that all share are said once, below.

    Warnings are counted where there is a CSV that names them by row.
    """
    rows = _rows(frame)
    columns = [
        *_identity(rows),
        column("step_mean_ms"),
        *_known(frame, "step_ci95_low_ms", *(f"{phase}_mean_ms" for phase in PHASES), *DERIVED),
        *_status(frame),
    ]
    notes = [
        *_sentences(describe(frame)),
        *([OFFERED] if any(config.model_factory for config in frame.index) else []),
        "Times are mean ± standard deviation over the measured steps of a process.",
        *interval_notes(frame["processes"]),
        *mfu_notes(frame),
        *(
            ["Of ceiling: of the highest rate that matrix products were measured to reach."]
            if _known(frame, "ceiling_share")
            else []
        ),
        *(warning_notes(frame) if has_csv else []),
        *(
            [f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation."]
            if frame["speed_up_is_doubted"].any()
            else []
        ),
    ]
    return make_table("Time of a step", columns, rows, notes, _failed)


def warmup_table(frame: pd.DataFrame) -> Table | None:
    """The same step after different numbers of warm-up steps; None where that number does not vary."""
    frame = over_warmup(frame)
    if frame.empty:
        return None
    rows = _rows(frame)
    columns = [
        *_identity(rows),
        column("step_mean_ms"),
        *_known(frame, "step_ci95_low_ms"),
        column("step_cv", drop_order=3),
        column("first_step_ms"),
        *_status(frame),
    ]
    return make_table("Time of a step by warm-up", columns, rows, _sentences(describe(frame)), _failed)


def write_tables(records: Iterable[RunRecord], directory: Path, ceilings: Ceilings = NO_CEILINGS) -> list[Path]:
    """Write results.csv with everything, the readable tables as results.md, .tex and .typ; return their paths."""
    return write_files(texts_of(results_section(records, ceilings)), directory)


def results_section(records: Iterable[RunRecord], ceilings: Ceilings = NO_CEILINGS) -> Section:
    """The tables of the steps, and every configuration with all that is known of it."""
    frame = to_frame(records, ceilings)
    tables = tuple(table for table in (results_table(frame), warmup_table(frame)) if table is not None)
    return Section(name="results", tables=tables, rows=_all_columns(frame))


def _all_columns(frame: pd.DataFrame) -> list[dict[str, object]]:
    """The rows of results.csv: ALL_COLUMNS, then every setting that these have no column for."""
    rows = _rows(frame)
    added = [name for name in trailing([row["identity"] for row in rows]) if name not in ALL_COLUMNS]
    return [
        {name: text_of(row[name]) if name in UNLISTED else row[name] for name in ALL_COLUMNS}
        | {name: row[name] for name in added}
        for row in rows
    ]


def _rows(frame: pd.DataFrame) -> list[RowDict]:
    """The rows with every setting."""
    rows = rows_of(frame)
    told = identities((row["config"], row["device_name"]) for row in rows)
    return [{**own, **row, "identity": own} for row, own in zip(rows, told, strict=True)]


def _identity(rows: Sequence[RowDict]) -> list[Column[RowDict]]:
    """Columns that tell the rows apart."""
    told = telling([row["identity"] for row in rows], always=("size", "context_length", "precision"))
    order = ("size", *SHAPE, "context_length", "precision", *NOTED)
    names = sorted(told, key=lambda name: order.index(name) if name in order else len(order))
    return identity_columns(names, [row["identity"] for row in rows], lambda row: row["identity"])


def _known(frame: pd.DataFrame, *keys: str) -> list[Column[RowDict]]:
    """Those of the columns in which any row has a value."""
    return [column(key) for key in keys if frame[key].notna().any()]


def _status(frame: pd.DataFrame) -> list[Column[RowDict]]:
    if (frame["status"] == Status.OK).all():
        return []
    return [column("status", write=lambda status: STATUS_WORDS[Status(status)])]


def interval_notes(counts: Iterable[int]) -> list[str]:
    """What the interval of the step is over, by the number of processes of each row; why there is none of two."""
    known = sorted(set(counts))
    enough = [count for count in known if count >= FEWEST]
    number = " to ".join(str(count) for count in dict.fromkeys(enough[:1] + enough[-1:]))
    said = [f"95 % interval: of the mean step, over the means of {number} fresh processes."] if enough else []
    return [*said, *too_few_note(known)]


def too_few_note(counts: Iterable[int]) -> list[str]:
    """What to do where there were two processes, which give no interval."""
    return [f"Two processes are too few for an interval: use --repeats {FEWEST} or more."] if 2 in set(counts) else []


def _failed(row: RowDict) -> bool:
    return bool(row["status"] != Status.OK)


def _sentences(text: str) -> list[str]:
    return [f"{text}."] if text else []


def mfu_notes(frame: pd.DataFrame) -> list[str]:
    """What MFU is a share of, where it stands beside that of another precision; the peaks, if all are of one device."""
    known = frame[frame["mfu"].notna()]
    precisions = [precision for precision in Precision if precision in set(known["precision"])]
    if len(precisions) < 2:
        return []
    names = known["device_name"].unique()
    device = find_device(names[0]) if len(names) == 1 else None
    told = [f"{name} {device.peak_flops_per_s[name] / 1e12:g}" for name in precisions] if device else []
    peaks = f" ({', '.join(told)} TFLOP/s)" if told else ""
    return [
        f"MFU: of the peak that the data sheet promises at the row's own precision{peaks}. A faster step in another "
        "precision has a lower MFU where that peak rises by more than the speed."
    ]


def warning_notes(frame: pd.DataFrame, rows: str = "rows") -> list[str]:
    """How many rows, or what they are called here, carry each warning."""
    rows = rows.removesuffix("s") if len(frame) == 1 else rows
    counts = frame["warnings"].dropna().str.split(";").explode().value_counts()
    said = ", ".join(f"{code} in {count} of {len(frame)} {rows}" for code, count in counts.items())
    return [f"Warnings, named by row in the CSV: {said}."] if said else []
