"""A sweep's step times: the tables that people read, results.csv with every column, and their
pictures.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from types import MappingProxyType

import pandas as pd

from ...analysis.statistics import FEWEST
from ...analysis.warnings import DOUBTFUL, in_doubt
from ...config import UNSIZED, Phase, Profiler, RunConfig
from ...record import RunRecord, Status, WarningCode
from ...text import counted, text_of
from ..charts import PHASE_COLOURS, REST_COLOUR, Bar, Chart, Panel, Style
from ..columns import VALUES, Row, column, columns_of, three_digits
from ..frame import RESULTS, SHARED, SPEED_UPS, codes_of, describe, over_warmup, rows_of, steady
from ..identity import UNLISTED, by_name, identity_columns, names_of, settings_of, trailing
from ..section import Section, Table, known, make_table
from ..words import (
    CHANCE,
    DOUBT,
    DOUBTED_FORECAST,
    SHIPPED,
    between,
    significant,
    status_text,
    warning_counts,
)

ALWAYS = ("size", "context_length", "precision")
"""Settings that are columns even if all rows have the same value."""
PHASES = (
    "data_mean_ms",
    "forward_mean_ms",
    "backward_mean_ms",
    "communication_mean_ms",
    "optimizer_mean_ms",
)
"""Columns of the phases, in the order of a step."""
DERIVED = tuple(
    dict.fromkeys(
        (
            "predicted_step_ms",
            "predicted_step_error",
            "step_cv",
            "sent_mib",
            "predicted_collectives_ms",
            "tokens_per_s",
            "mfu",
            "ceiling_share",
            "peak_allocated_gib",
            "predicted_peak_gib",
            *VALUES,
            *SPEED_UPS,
        )
    )
)
"""Columns that are computed from the times, and those of memory."""
ALL_COLUMNS = (*RESULTS, *UNLISTED, "processes")
"""First columns of results.csv; all other settings come after them."""
OFFERED = (
    "Offered: what the factory of a model of one's own was given to choose from; the model's "
    "shape is not known."
)
MOST_NAMED = 8
"""Most configurations that a finding names one by one."""
DOUBTED = f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation."


def step_answer(frame: pd.DataFrame, record: RunRecord) -> list[str]:
    """Three sentences on one run: its times, its speed and peak of memory, and what puts the
    times in doubt.
    """
    (row,), measured = rows_of(frame), record.measurement(Phase.STEP)
    if measured is None:
        return []
    low, median, high = (
        significant(1e3 * time_s)
        for time_s in (measured.min_s, measured.median_s, max(measured.times_s))
    )
    phases = ", ".join(f"{column(key).name} {column(key).cell(row)}" for key in PHASES if row[key])
    found = known(columns_of("tokens_per_s", "mfu", "peak_allocated_gib"), [row])
    speed = ", ".join(f"{each.label} {each.cell(row)}" for each in found)
    doubts = ", ".join(w.code for w in record.warnings if w.code in DOUBTFUL)
    under = "" if record.config.profiler is Profiler.NONE else " with the profiler running"
    return [
        f"A step takes {column('step_mean_ms').cell(row)} ms{under}: {phases}.",
        f"Minimum {low}, median {median}, maximum {high} ms in "
        f"{counted(len(measured.times_s), 'step')}; {speed}.",
        f"The times are in doubt: {doubts}." if doubts else "Nothing puts the times in doubt.",
    ]


def results_table(frame: pd.DataFrame, *, has_csv: bool = True) -> Table:
    """The table of step times: a row for each configuration, failed ones too; the notes have the
    findings.

    With `has_csv`, a note counts the warnings and points to the CSV, which has them in each row.
    """
    notes = [
        *(
            [OFFERED]
            if any(config.model_factory and config.size != UNSIZED for config in frame.index)
            else []
        ),
        "Times are mean ± standard deviation over the measured steps of a process.",
        *too_few_note(frame["processes"]),
        *([CHANCE] if frame[[*SPEED_UPS]][frame["processes"] < FEWEST].any(axis=None) else []),
        *([SHIPPED] if frame["prediction_is_shipped"].any() else []),
        *([DOUBTED_FORECAST] if frame["prediction_is_doubted"].any() else []),
        *(warning_notes([row["warnings"] for row in rows_of(frame)]) if has_csv else []),
        *([DOUBTED] if frame[[f"{key}_is_doubted" for key in SPEED_UPS]].any(axis=None) else []),
    ]
    return _table(
        "Time of a step",
        frame,
        ("step_ci95_low_ms", *PHASES, *DERIVED),
        notes,
        step_findings(frame),
    )


def warmup_table(frame: pd.DataFrame) -> Table | None:
    """The table of step times by the number of warm-up steps; None if that number does not vary."""
    frame = over_warmup(frame)
    keys = ("step_ci95_low_ms", "step_cv", "first_step_ms")
    return None if frame.empty else _table("Time of a step by warm-up", frame, keys, [])


def _table(
    title: str,
    frame: pd.DataFrame,
    keys: Sequence[str],
    notes: Sequence[str],
    findings: Sequence[str] = (),
) -> Table:
    """A table of distinguishing settings, the step, the columns of `keys` that are not empty,
    and any failures.
    """
    rows, shared = rows_of(frame), describe(frame)
    columns = [column("step_mean_ms"), *known(columns_of(*keys), rows)]
    status = [] if (frame["status"] == Status.OK).all() else [column("status")]
    return make_table(
        title,
        [*identity_columns(rows, ALWAYS), *columns, *status],
        rows,
        [*([f"{shared}."] if shared else []), *findings, *notes],
        lambda row: bool(row["status"] != Status.OK),
        findings,
    )


def step_findings(frame: pd.DataFrame) -> list[str]:
    """Sentences on what limits steps or ended them, and on speed-ups.

    Of rows that differ only in warm-up, the one with the most counts. Each number has the name of
    its row.
    """
    rows = rows_of(steady(frame))
    timed = [row for row in rows if row["step_mean_ms"]]
    return [*_limits(rows), *_speed_ups(timed)]


def _limits(rows: Sequence[Row]) -> Iterator[str]:
    """Which of several configurations the host's launches limit, and which ended without a time."""
    groups: dict[str, list[str]] = {}
    for name, row in zip(_names(rows), rows, strict=True):
        if row["status"] != Status.OK:
            groups.setdefault(status_text(row["status"]).capitalize(), []).append(name)
        elif WarningCode.LAUNCH_BOUND in codes_of(row):
            groups.setdefault("Limited by the host's launches", []).append(name)
    for what, named in groups.items() if len(rows) > 1 else ():
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        yield (
            f"{what}: {len(named)} of {len(rows)} configurations "
            f"({', '.join(named[:MOST_NAMED])}{more})."
        )


def _speed_ups(rows: Sequence[Row]) -> Iterator[str]:
    """For each value of a setting with a baseline: the least and the largest speed-up."""
    for key, (setting, *_) in SPEED_UPS.items():
        known = [row for row in rows if row[key]]
        for value in dict.fromkeys(row[setting] for row in known):
            own = [row for row in known if row[setting] == value]
            values: type[StrEnum] = type(settings_of(own[0]["config"])[setting])
            baseline = next(iter(values))
            number = sum(bool(row[f"{key}_is_doubted"]) for row in own)
            doubt = f"; in {number} of {len(own)} a time is in doubt ({DOUBT})" if number else ""
            gains = between(by_name(own, itemgetter(key)), three_digits)
            yield f"{setting} {value}: a step is {gains} times as fast as with {baseline}{doubt}."


def _names(rows: Sequence[Row]) -> list[str]:
    return names_of([row["identity"] for row in rows])


def results_section(
    frame: pd.DataFrame, of_profiles: Mapping[RunConfig, Row] = MappingProxyType({})
) -> Section:
    """The tables and pictures of step times, and for results.csv a row with every value of each
    configuration.

    `of_profiles` has, by configuration, what profiles of the same runs add to these rows.
    """
    added_keys = tuple(dict.fromkeys(key for row in of_profiles.values() for key in row))
    unknown: Row = dict.fromkeys(added_keys)
    rows = [
        {
            **unknown,
            **row,
            **{name: text_of(row[name]) for name in UNLISTED},
            **of_profiles.get(row["config"], {}),
        }
        for row in rows_of(frame)
    ]
    added = [
        name for name in trailing([row["identity"] for row in rows]) if name not in ALL_COLUMNS
    ]
    tables = tuple(
        table for table in (results_table(frame), warmup_table(frame)) if table is not None
    )
    shared = SHARED if any(config.is_shared for config in frame.index) else ()
    keys = (*ALL_COLUMNS, *shared, *added_keys, *added)
    return Section(
        name="results", tables=tables, rows=rows, keys=keys, pictures=list(step_charts(frame))
    )


def too_few_note(counts: Iterable[int]) -> list[str]:
    """A note for rows of two processes, which have no interval, on how to get one."""
    return (
        [f"Two processes are too few for an interval: use --repeats {FEWEST} or more."]
        if 2 in set(counts)
        else []
    )


def warning_notes(codes: Sequence[str | None], rows: str = "rows") -> list[str]:
    """A note that counts the rows with each warning; `rows` is what the rows are called."""
    counted = warning_counts(codes, rows.removesuffix("s") if len(codes) == 1 else rows)
    return [f"Warnings, named by row in the CSV: {counted}."] if counted else []


MAX_BARS = 60
"""Most configurations in one picture by phase."""
LEAST_REST = 0.02
"""Least share of a step outside of the phases that is drawn."""
BY_PHASE = "Time of a step by phase"
REST = "rest of the step"
PARTS = {str(phase): Style(colour=colour) for phase, colour in PHASE_COLOURS.items()} | {
    REST: Style(colour=REST_COLOUR)
}


def step_charts(frame: pd.DataFrame) -> Iterator[Chart]:
    """Lying bars of several configurations, as many in one picture as can be read."""
    bars = (
        phase_bars(rows_of(frame)) if len(frame) > 1 and frame["step_mean_ms"].notna().any() else []
    )
    for number, first in enumerate(range(0, len(bars), MAX_BARS), 1):
        panel = Panel(label="time (ms)", bars=bars[first : first + MAX_BARS])
        name, shared = f"step_time{f'_no{number}' if number > 1 else ''}", describe(frame)
        yield Chart(
            name=name, title=BY_PHASE, settings=shared, panels=[panel], legend=5, styles=PARTS
        )


def phase_bars(rows: Sequence[Row]) -> list[Bar]:
    """A bar for each row of results: its phases, and the rest of the step if noticeable.

    Its words are the time of the step with the deviation and, on a line of its own, the peak of
    memory.
    """
    bars, told = [], [column("step_mean_ms", doubt="is_doubted"), column("peak_allocated_gib")]
    for name, row in zip(names_of([row["identity"] for row in rows]), rows, strict=True):
        step_ms = row["step_mean_ms"]
        parts = {str(phase): row[f"{phase}_mean_ms"] for phase in PHASE_COLOURS}
        parts = {phase: time_ms for phase, time_ms in parts.items() if time_ms is not None}
        rest_ms = (step_ms or 0.0) - sum(parts.values())
        if step_ms is not None and rest_ms > LEAST_REST * step_ms:
            parts[REST] = rest_ms
        judged = row | {"is_doubted": in_doubt(codes_of(row))}
        words = "\n".join(f"{own.cell(judged)} {own.unit}" for own in told if row[own.key])
        failure = "" if row["status"] == Status.OK else status_text(row["status"])
        bars.append(Bar(name=name, parts=parts, words=words, failure=failure))
    return bars
