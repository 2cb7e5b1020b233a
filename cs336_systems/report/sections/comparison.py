"""A compared with B: the verdict on two configurations, or on every one of two sweeps, with pictures."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.analysis.compare import CONFIDENCE, Comparison, Verdict, compare, process_means
from cs336_systems.analysis.few_processes import (
    PROCESS_DEVIATION,
    STEP_FACTOR,
    TIME_DEVIATION,
    compare_processes,
    least_difference,
)
from cs336_systems.analysis.matching import Matching, match
from cs336_systems.analysis.statistics import FEWEST, mean_interval
from cs336_systems.analysis.warnings import STEPS, in_doubt
from cs336_systems.config import Phase, RunConfig
from cs336_systems.record import Measurement, RunRecord, Status
from cs336_systems.report.columns import WIDEST_RATIO, Row, column
from cs336_systems.report.frame import codes_of, rows_of, to_frame
from cs336_systems.report.identity import (
    ALWAYS,
    SHAPE,
    heading,
    identity_columns,
    names_of,
    rows_without,
    shared_settings,
    without_unused,
)
from cs336_systems.report.plots.charts import GREY, Axis, Chart, Curve, Line, Panel, Point, Reference
from cs336_systems.report.section import Section, Table, known, make_table
from cs336_systems.report.words import DOUBT, STATUS_WORDS, status_text
from cs336_systems.sweep.store import SweepError
from cs336_systems.text import inert_line, text_of

PAIR = ("side", "configuration", "processes", "step_mean_ms", "step_ci95_low_ms", "process_means")
ONLY_A, ONLY_B, NOT_COMPARED = "only in A", "only in B", "not compared"
"""Words in place of a verdict."""
SWEEPS = ("a_step_mean_ms", "b_step_mean_ms", "ratio", "ratio_low", "verdict", "a_processes", "b_processes")
VALUES = ("verdict", "ratio", "ratio_low", "ratio_high", "a_step_mean_ms", "a_step_std_ms", "a_processes", "a_status",
          "a_warnings", "b_step_mean_ms", "b_step_std_ms", "b_processes", "b_status", "b_warnings")  # fmt: skip
"""Columns of the CSV file after those of the configuration."""
LOOKS = {Verdict.FASTER: ("#0072B2", "o"), Verdict.SLOWER: ("#D55E00", "s"), Verdict.CANNOT_TELL: (GREY, "D")}
"""Colour and mark of each verdict."""
ROW_INCHES, LEAST_INCHES, MOST_INCHES = 0.42, 6.4, 30.0
BEYOND = 1.15
"""Factor by which the axis is longer than the ratios and their intervals."""
TICKS = [step * 10.0**power for power in range(-2, 4) for step in (1, 2, 5)]
WIDEST = 10.0
"""Factor around the ratios within which intervals are shown whole."""


def pair_section(
    names: Sequence[str], sides: Sequence[Sequence[RunRecord]], *, are_alternate: bool = False
) -> tuple[Section, Row, Mapping[str, Any]]:
    """The verdict on two configurations by the processes that ended well: as table, values and JSON.

    Raises SweepError for a side of which none ended well, and ValueError for too few processes.
    """
    means = [process_means(side) for side in sides]
    for name, records, own in zip("AB", sides, means, strict=True):
        if records and not own:
            ended = STATUS_WORDS[records[0].status]
            raise SweepError(f"{name} cannot be compared: {ended} in {len(records)} of {len(records)} processes")
    comparison = compare(*means, between=0.0 if are_alternate else TIME_DEVIATION)
    codes = [[[w.code for w in record.warnings] for record in side if record.status is Status.OK] for side in sides]
    listed = [
        {"side": side, "configuration": name, "process_means_s": own, "process_warnings": warned}
        for side, name, own, warned in zip("AB", names, means, codes, strict=True)
    ]
    row = {
        "verdict": str(comparison.verdict), "ratio": comparison.ratio,
        "ratio_low": comparison.low, "ratio_high": comparison.high,
        "ratio_is_doubted": in_doubt(itertools.chain.from_iterable(itertools.chain(*codes))),
    }  # fmt: skip
    table = comparison_table(names, means, comparison, codes)
    section = Section(name="comparison", tables=(table,), pictures=(processes_chart(names, means),))
    json = {"sides": listed, "verdict": comparison.verdict, "comparison": comparison}
    return section, row, json


def comparison_table(
    names: Sequence[str],
    means_s: Sequence[Sequence[float]],
    comparison: Comparison,
    codes: Sequence[Sequence[Sequence[str]]] = ((), ()),
) -> Table:
    """One row per side: `names` are the flags or paths, `means_s` the mean step times of the processes, in seconds.

    `codes` are the warnings of each process.
    """
    sides = zip("AB", names, means_s, strict=True)
    rows = [
        {"side": side, "configuration": name, **_over_processes([mean * 1e3 for mean in own])}
        for side, name, own in sides
    ]
    spread = " ± standard deviation" if max(map(len, means_s)) >= FEWEST else ""
    found = comparison.sentence, *_doubts(codes)
    notes = *found, f"Mean{spread} over fresh processes, run alternately."
    return make_table("A against B", known([column(key) for key in PAIR], rows), rows, notes, findings=found)


def _over_processes(means_ms: Sequence[float]) -> dict[str, object]:
    """The mean of the processes, and the standard deviation and interval of three or more."""
    low_ms, high_ms = mean_interval(means_ms) or (None, None)
    return {
        "processes": len(means_ms),
        "step_mean_ms": statistics.fmean(means_ms),
        "step_std_ms": statistics.stdev(means_ms) if len(means_ms) >= FEWEST else None,
        "step_ci95_low_ms": low_ms,
        "step_ci95_high_ms": high_ms,
        "process_means": ", ".join(f"{mean_ms:.3f}" for mean_ms in means_ms),
    }


def _doubts(codes: Sequence[Sequence[Sequence[str]]]) -> Iterator[str]:
    """How many processes of a side carry each warning that puts their times, and so the verdict, in doubt."""
    found = []
    for side, processes in zip("AB", codes, strict=True):
        counts = Counter(code for process in processes for code in process if in_doubt([code]))
        found += [f"{code} in {count} of {len(processes)} processes of {side}" for code, count in counts.items()]
    if found:
        yield f"In doubt: {', '.join(found)}. Close other programs, or use {STEPS.more}."


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
        *(_row(a[i], b[j], times, matching.differing, are_alternate) for i, j in matching.pairs),
        *(_row(a[i], None, times, matching.differing, are_alternate) for i in matching.only_a),
        *(_row(None, b[j], times, matching.differing, are_alternate) for j in matching.only_b),
    ]
    always = [name for name in ALWAYS if name not in matching.differing]
    identities = [row["identity"] for row in rows]
    for row, name in zip(rows, names_of(identities, always=always), strict=True):
        row["name"] = inert_line(name)
    columns = [*identity_columns(rows, always), *known([column(key) for key in SWEEPS], rows)]
    shared = shared_settings([(row["config"], row["device_name"]) for own in found for row in own])
    told = [*_what_is_what(names, found, matching, are_alternate), *_counted(rows)]
    notes = [
        *told,
        *_rules(rows),
        *([f"{shared}."] if shared else []),
    ]
    table = make_table("A against B", columns, rows, notes, lambda row: bool(row["verdict"] == NOT_COMPARED), told)
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
    (settings,) = rows_without([row["identity"]], ("repeat",))
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
    a: Row | None,
    b: Row | None,
    times: Sequence[Mapping[RunConfig, list[Measurement]]],
    differing: Sequence[str],
    are_alternate: bool,
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
    found = compare_processes(*measured, are_alternate=are_alternate)
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
            f"deviation of {100 * PROCESS_DEVIATION:g} % and {STEP_FACTOR:g} times that of its steps, and a time of "
            f"measurement one of {100 * TIME_DEVIATION:g} %. One process of each side cannot tell differences below "
            f"{100 * least_difference():.1f} %: repeats can (--repeats {FEWEST})."
        )


def ratio_charts(rows: Sequence[Row], settings: str) -> list[Chart]:
    """B's step over A's with its interval, for each row that has one, by its `name`; none for fewer than two rows."""
    known = [row for row in rows if row["ratio"] is not None]
    if len(known) < 2:
        return []
    ratios = [row["ratio"] for row in known]
    ends = [end for row in known for end in (row["ratio_low"], row["ratio_high"]) if end is not None]
    low, high = min(ratios) / WIDEST, max(ratios) * WIDEST
    shown = [1.0, *ratios, *(min(max(end, low), high) for end in ends)]
    limits = min(shown) / BEYOND, max(shown) * BEYOND
    ticks = [tick for tick in TICKS if limits[0] <= tick <= limits[1]]
    y = Axis(label="step of B / step of A", is_log=True, limits=limits, ticks=ticks)
    panel = Panel(
        x=Axis(names=[row["name"] for row in known]), y=y, curves=list(_curves(known)),
        references=[Reference(value=1.0, colour=GREY, name="as fast as A")],
    )  # fmt: skip
    width = min(max(LEAST_INCHES, ROW_INCHES * len(known)), MOST_INCHES)
    title = f"Step of B over step of A, with {100 * CONFIDENCE:g} % intervals"
    return [Chart(name="ratios", title=title, settings=settings, panels=[panel], size=(width, 4.0), legend=3)]


def _curves(known: Sequence[Row]) -> Iterator[Curve]:
    """The points of each verdict; those in doubt are hollow."""
    for verdict, (colour, marker) in LOOKS.items():
        for is_doubted in (False, True):
            points = tuple(
                _point(row) for row in known if row["verdict"] == verdict and row["ratio_is_doubted"] is is_doubted
            )
            line = Line(name=f"{verdict}{', in doubt' if is_doubted else ''}", points=points)
            if points:
                yield Curve(line=line, colour=colour, marker=marker, dash="", is_hollow=is_doubted, size=6.0)


def _point(row: Row) -> Point:
    """The ratio with its interval, which is cut off at a factor of WIDEST_RATIO."""
    name, ratio, low, high = row["name"], row["ratio"], row["ratio_low"], row["ratio_high"]
    if low is None or high is None:
        return Point(x=name, value=ratio)
    above, below = min(high, ratio * WIDEST_RATIO) - ratio, ratio - max(low, ratio / WIDEST_RATIO)
    return Point(x=name, value=ratio, error=above, error_below=below)


def processes_chart(names: Sequence[str], means_s: Sequence[Sequence[float]]) -> Chart:
    """The mean step of each process of both sides, in the order in which they ran."""
    looks = [("A", "#0072B2", "o"), ("B", "#D55E00", "s")]
    curves = [
        Curve(
            line=Line(name=side, points=tuple(Point(x=i, value=1e3 * mean_s) for i, mean_s in enumerate(own, 1))),
            colour=colour, marker=marker, dash="", size=6.0,
        )
        for (side, colour, marker), own in zip(looks, means_s, strict=True)
    ]  # fmt: skip
    numbers = sorted({float(point.x) for curve in curves for point in curve.line.points})
    panel = Panel(x=Axis(label="process", ticks=numbers), y=Axis(label="mean step (ms)"), curves=curves)
    settings = "; ".join(f"{side} is {name or 'without flags'}" for side, name in zip("AB", names, strict=True))
    return Chart(name="processes", title="Step of each process", settings=settings, panels=[panel])
