"""Two sweeps side by side: a row for each configuration, how much faster B is than A, and what only one side has."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.analysis.compare import CONFIDENCE
from cs336_systems.analysis.few_processes import PROCESS_DEVIATION, STEP_FACTOR, compare_processes
from cs336_systems.analysis.matching import Matching, match
from cs336_systems.analysis.statistics import FEWEST
from cs336_systems.analysis.warnings import in_doubt
from cs336_systems.config import Phase, RunConfig
from cs336_systems.record import Measurement, RunRecord, Status
from cs336_systems.report.columns import Row, column
from cs336_systems.report.frame import codes_of, rows_of, to_frame
from cs336_systems.report.identity import (
    ALWAYS,
    SHAPE,
    apart_from,
    heading,
    identity_columns,
    names_of,
    shared_settings,
    without_unused,
)
from cs336_systems.report.numbers import DOUBT
from cs336_systems.report.section import Section
from cs336_systems.report.sections.ratio_charts import ratio_charts
from cs336_systems.report.table import known, make_table
from cs336_systems.report.words import status_text
from cs336_systems.text import inert_line, text_of

ONLY_A, ONLY_B, NOT_COMPARED = "only in A", "only in B", "not compared"
"""Stand in place of a verdict."""
COLUMNS = ("a_step_mean_ms", "b_step_mean_ms", "ratio", "ratio_low", "verdict", "a_processes", "b_processes")
VALUES = ("verdict", "ratio", "ratio_low", "ratio_high", "a_step_mean_ms", "a_step_std_ms", "a_processes", "a_status",
          "a_warnings", "b_step_mean_ms", "b_step_std_ms", "b_processes", "b_status", "b_warnings")  # fmt: skip
"""Columns of the CSV file after those of the configuration."""


def sweeps_section(
    names: Sequence[str],
    sides: Sequence[Sequence[RunRecord]],
    *,
    allow_mixed: bool = False,
    are_alternate: bool = False,
) -> Section:
    """The verdict on every configuration of two sweeps, A and B, which have these names.

    `are_alternate` says that the runs of A and B were interleaved. Raises ValueError, which says why, where nothing
    matches, for a side that has one configuration on several devices, and, unless `allow_mixed`, for another warm-up.
    """
    found = [rows_of(to_frame(side)) for side in sides]
    for name, rows in zip("AB", found, strict=True):
        if len({row["config"] for row in rows}) < len(rows):
            raise ValueError(f"{name} has the same configuration on several devices; keep each device's runs apart")
    matching = matched(*([_settings(row) for row in rows] for rows in found), allow_mixed=allow_mixed)
    times = [_times(side) for side in sides]
    a, b = found
    rows = [
        *(_row(a[i], b[j], times, matching.differing) for i, j in matching.pairs),
        *(_row(a[i], None, times, matching.differing) for i in matching.only_a),
        *(_row(None, b[j], times, matching.differing) for j in matching.only_b),
    ]
    always = [name for name in ALWAYS if name not in matching.differing]
    identities = [row["identity"] for row in rows]
    for row, name in zip(rows, names_of(identities, always=always), strict=True):
        row["name"] = inert_line(name)
    columns = [*identity_columns(rows, always), *known([column(key) for key in COLUMNS], rows)]
    shared = shared_settings([(row["config"], row["device_name"]) for own in found for row in own])
    notes = [
        *_what_is_what(names, found, matching, are_alternate),
        *_counted(rows),
        *_rules(rows),
        *([f"{shared}."] if shared else []),
    ]
    table = make_table("A against B", columns, rows, notes, lambda row: bool(row["verdict"] == NOT_COMPARED))
    apart = [f"{name}_{side}" for name in matching.differing for side in "ab"]
    keys = (*without_unused(identities), *apart, *VALUES)
    pictures = ratio_charts(rows, f"A is {names[0]}, B is {names[1]}; {shared}")
    return Section(name="comparison", tables=(table,), rows=rows, keys=keys, pictures=pictures)


def matched(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], *, allow_mixed: bool = False) -> Matching:
    """Match the configurations of two sweeps; raise ValueError where none match, or some after another warm-up."""
    matching = match(a, b)
    if not matching.pairs:
        raise ValueError("no configuration of A is in B; see the results of each with `cs336 report`")
    for i, j in matching.pairs:
        if (of_a := a[i]["warmup_steps"]) != (of_b := b[j]["warmup_steps"]) and not allow_mixed:
            raise ValueError(
                f"A had {of_a} warm-up steps and B had {of_b}, to which a difference may be due; "
                "compare them with --allow-mixed"
            )
    return matching


def _settings(row: Row) -> Row:
    """What tells the row from others of its sweep."""
    (settings,) = apart_from([row["identity"]], ("repeat",))
    return settings


def _times(side: Sequence[RunRecord]) -> dict[RunConfig, list[Measurement]]:
    """The step times of each process that ended well, by configuration."""
    found: dict[RunConfig, list[Measurement]] = {}
    for record in dict.fromkeys(side):
        measured = record.measurement(Phase.STEP)
        if record.status is Status.OK and measured is not None:
            found.setdefault(record.config.configuration, []).append(measured)
    return found


def _row(
    a: Row | None, b: Row | None, times: Sequence[Mapping[RunConfig, list[Measurement]]], differing: Sequence[str]
) -> Row:
    """What is known of one configuration, which may be missing on one side."""
    whole = a or b
    assert whole is not None
    identity = {name: value for name, value in _settings(whole).items() if name not in differing}
    row: Row = {**identity, "identity": identity}
    measured = []
    for side, own, of_side in zip("ab", (a, b), times, strict=True):
        measured.append(of_side.get(own["config"], []) if own else [])
        row |= {f"{name}_{side}": own["identity"][name] if own else None for name in differing}
        row |= {f"{side}_{name}": own[name] if own else None for name in ("step_mean_ms", "step_std_ms", "processes")}
        row |= {f"{side}_{name}": own[name] if own else None for name in ("status", "warnings")}
        row[f"{side}_ended"] = status_text(own["status"]) if own else ""
    row |= {"ratio": None, "ratio_low": None, "ratio_high": None, "ratio_is_doubted": False}
    if a is None or b is None:
        return row | {"verdict": ONLY_B if a is None else ONLY_A}
    if not all(measured):
        return row | {"verdict": NOT_COMPARED}
    found = compare_processes(*measured)
    doubted = in_doubt([*codes_of(a), *codes_of(b)])
    ratio = {"ratio": found.ratio, "ratio_low": found.low, "ratio_high": found.high, "ratio_is_doubted": doubted}
    return row | ratio | {"verdict": str(found.verdict)}


def _what_is_what(
    names: Sequence[str], found: Sequence[Sequence[Row]], matching: Matching, are_alternate: bool
) -> Iterator[str]:
    yield f"A is {names[0]}, B is {names[1]}{'; their runs alternate (A B B A)' if are_alternate else ''}."
    told = []
    for name in matching.differing:
        if name in SHAPE and "size" in matching.differing:
            continue
        of_sides = [dict.fromkeys(text_of(row["identity"][name]) for row in rows) for rows in found]
        told.append(f"{heading(name)} ({', '.join(' or '.join(own) for own in of_sides)})")
    if told:
        yield f"They differ throughout in {', '.join(told)}; rows are matched by all other settings."


def _counted(rows: Sequence[Row]) -> Iterator[str]:
    counts = Counter(row["verdict"] for row in rows)
    yield f"Of {len(rows)} rows: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}."
    if any(row["ratio_is_doubted"] for row in rows):
        yield f"{DOUBT} marks a ratio of times that are in doubt; the CSV names the warnings."


def _rules(rows: Sequence[Row]) -> Iterator[str]:
    """What the interval of the ratio rests on."""
    numbers = [min(row["a_processes"], row["b_processes"]) for row in rows if row["ratio"] is not None]
    level = f"{100 * CONFIDENCE:g} % interval of the ratio"
    if any(number >= FEWEST for number in numbers):
        yield f"{level} where both sides have {FEWEST} processes or more: Welch's, over their means."
    if any(number < FEWEST for number in numbers):
        yield (
            f"{level} where a side has fewer than {FEWEST} processes: a process's mean is taken to have a standard "
            f"deviation of {100 * PROCESS_DEVIATION:g} % and {STEP_FACTOR:g} times that of its steps."
        )
