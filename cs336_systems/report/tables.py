"""What of the results people read: one selection for every format, and the files of a results directory."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from cs336_systems.analysis.statistics import FEWEST
from cs336_systems.config import Precision
from cs336_systems.costs.hardware import find_device
from cs336_systems.files import write_atomically
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.columns import STEP_INTERVAL, Column
from cs336_systems.report.formats import WRITERS, to_csv
from cs336_systems.report.frame import COLUMNS, rows_of, speed_ups, to_frame, warmup_frame
from cs336_systems.report.identity import (
    SHAPE,
    UNLISTED,
    Identity,
    identities,
    identity_columns,
    telling,
    trailing,
)
from cs336_systems.report.listing import in_si
from cs336_systems.report.numbers import DOUBT, derived_text, interval_text, mean_and_std, significant
from cs336_systems.report.table import Table, make_table
from cs336_systems.report.words import NOTED, STATUS_WORDS, describe
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.text import text_of

RowDict: TypeAlias = dict[str, Any]

PHASES = {"data": 9, "forward": 6, "backward": 7, "optimizer": 8}
"""Phases in the order of a step, and which to leave out first where a terminal is narrow."""
OFFERED = "Offered: what the factory of a model of one's own was given to choose from; the model's shape is not known."
ALL_COLUMNS = (*COLUMNS, *UNLISTED, "processes")
"""Columns of results.csv; settings that these leave out come after them."""


def results_table(frame: pd.DataFrame, *, has_csv: bool = True) -> Table:
    """The times of every configuration, its failures in words; settings that all share are said once, below.

    Warnings are counted where there is a CSV that names them by row.
    """
    gains = speed_ups(frame)
    frame = frame.assign(**{name: gains[name].to_numpy() for name in ("speed_up", "speed_up_std", "is_doubted")})
    columns = [
        *_identity(frame),
        *_steps(frame),
        *(_times(name, spare) for name, spare in PHASES.items() if _known(frame, f"{name}_mean_ms")),
        *_derived(frame),
        *_status(frame),
    ]
    is_ceiling_known = _known(frame, "ceiling_share")
    notes = [
        *_sentences(describe(frame)),
        *([OFFERED] if any(config.model_factory for config in frame.index) else []),
        "Times are mean ± standard deviation over the measured steps of a process.",
        *interval_notes(frame["processes"]),
        *mfu_notes(frame),
        *(["Of ceiling: of the highest rate that matrix products were measured to reach."] if is_ceiling_known else []),
        *(warning_notes(frame) if has_csv else []),
        *(
            [f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation."]
            if gains["is_doubted"].any()
            else []
        ),
    ]
    return make_table("Time of a step", columns, rows_of(frame), notes, _failed)


def warmup_table(records: Iterable[RunRecord]) -> Table | None:
    """The same step after different numbers of warm-up steps; None where that number does not vary."""
    frame = warmup_frame(records)
    if frame.empty:
        return None
    columns = [
        *_identity(frame),
        *_steps(frame),
        _quantity("std/mean", "step_cv", "%", 100, 2, spare=3),
        _quantity("first measured step", "first_step_ms", "ms", 1, 4, spare=2),
        *_status(frame),
    ]
    return make_table("Time of a step by warm-up", columns, rows_of(frame), _sentences(describe(frame)), _failed)


def write_tables(records: Iterable[RunRecord], directory: Path, ceilings: Ceilings = NO_CEILINGS) -> list[Path]:
    """Write results.csv with everything, the readable tables as results.md, .tex and .typ; return their paths."""
    kept = tuple(records)
    frame = to_frame(kept, ceilings)
    tables = [table for table in (results_table(frame), warmup_table(kept)) if table is not None]
    rows = _all_columns(frame)
    texts = {"csv": to_csv(tuple(rows[0]) if rows else ALL_COLUMNS, (tuple(row.values()) for row in rows))}
    texts |= {ending: "\n".join(map(write, tables)) for ending, write in WRITERS.items()}
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for ending, text in texts.items():
        paths.append(directory / f"results.{ending}")
        write_atomically(paths[-1], text.encode(errors="replace"))
    return paths


def results_json(records: Iterable[RunRecord], ceilings: Ceilings = NO_CEILINGS) -> list[dict[str, object]]:
    """The rows of results.csv, in SI units."""
    return [in_si(row) for row in _all_columns(to_frame(records, ceilings))]


def _all_columns(frame: pd.DataFrame) -> list[dict[str, object]]:
    """The rows of results.csv: ALL_COLUMNS, then every setting that these have no column for."""
    rows = _identities(frame)
    added = [name for name in trailing(rows) if name not in ALL_COLUMNS]
    return [
        {name: text_of(told[name]) if name in UNLISTED else row[name] for name in ALL_COLUMNS}
        | {name: told[name] for name in added}
        for row, told in zip(rows_of(frame), rows, strict=True)
    ]


def _identities(frame: pd.DataFrame) -> list[Identity]:
    return identities((row["config"], row["device_name"]) for row in rows_of(frame))


def _identity(frame: pd.DataFrame) -> list[Column[RowDict]]:
    """Columns that tell the rows apart."""
    rows = _identities(frame)
    told = telling(rows, always=("size", "context_length", "precision"))
    order = ("size", *SHAPE, "context_length", "precision", *NOTED)
    names = sorted(told, key=lambda name: order.index(name) if name in order else len(order))
    by_run = {(row["config"], row["device_name"]): own for row, own in zip(rows_of(frame), rows, strict=True)}
    return identity_columns(names, rows, lambda row: by_run[row["config"], row["device_name"]])


def _derived(frame: pd.DataFrame) -> list[Column[RowDict]]:
    candidates = {
        "step_cv": _quantity("std/mean", "step_cv", "%", 100, 2, spare=10),
        "tokens_per_s": _quantity("tokens/s", "tokens_per_s", "", 1, 4, spare=5),
        "mfu": _quantity("MFU", "mfu", "%", 100, 3, spare=3),
        "ceiling_share": _quantity("of ceiling", "ceiling_share", "%", 100, 3, spare=12),
        "peak_allocated_gib": _quantity("peak", "peak_allocated_gib", "GiB", 1, 3, spare=2),
        "predicted_peak_gib": _quantity("predicted", "predicted_peak_gib", "GiB", 1, 3, spare=11),
        "speed_up": Column("speed-up", "vs fp32", spare=4, says=_speed_up),
    }
    return [column for name, column in candidates.items() if _known(frame, name)]


def _status(frame: pd.DataFrame) -> list[Column[RowDict]]:
    if (frame["status"] == Status.OK).all():
        return []
    return [Column("status", numeric=False, says=lambda row: STATUS_WORDS[Status(row["status"])])]


def _times(name: str, spare: int = 0) -> Column[RowDict]:
    mean, std = f"{name}_mean_ms", f"{name}_std_ms"

    def cell(row: RowDict) -> str:
        return "" if row[mean] is None else mean_and_std(row[mean], row[std])

    return Column(name, "ms", spare=spare, says=cell)


def _steps(frame: pd.DataFrame) -> list[Column[RowDict]]:
    """The step's time, and its interval where any row has one."""
    interval = [replace(STEP_INTERVAL, says=step_interval)] if _known(frame, "step_ci95_low_ms") else []
    return [_times("step"), *interval]


def step_interval(row: RowDict) -> str:
    """Interval of the mean step over processes; empty where it is unknown."""
    return interval_text(row["step_ci95_low_ms"], row["step_ci95_high_ms"])


def interval_notes(counts: Iterable[int]) -> list[str]:
    """What the interval of the step is over, by the number of processes of each row; why there is none of two."""
    known = sorted(set(counts))
    enough = [count for count in known if count >= FEWEST]
    number = " to ".join(str(count) for count in dict.fromkeys(enough[:1] + enough[-1:]))
    said = [f"{STEP_INTERVAL.name}: of the mean step, over the means of {number} fresh processes."] if enough else []
    return [*said, *too_few_note(known)]


def too_few_note(counts: Iterable[int]) -> list[str]:
    """What to do where there were two processes, which give no interval."""
    return [f"Two processes are too few for an interval: use --repeats {FEWEST} or more."] if 2 in set(counts) else []


def _quantity(name: str, source: str, unit: str, scale: float, digits: int, spare: int = 0) -> Column[RowDict]:
    def cell(row: RowDict) -> str:
        return "" if row[source] is None else significant(row[source] * scale, digits)

    return Column(name, unit, spare=spare, says=cell)


def _speed_up(row: RowDict) -> str:
    return derived_text(row["speed_up"], row["speed_up_std"], is_doubted=row["is_doubted"], digits=3)


def _known(frame: pd.DataFrame, name: str) -> bool:
    return bool(frame[name].notna().any())


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
