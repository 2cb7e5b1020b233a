"""Two sides compared, each one configuration or a sweep: the verdict on each configuration, as a
table.

What was measured alternately is kept with COMPARISON_FILE, from which the tables are made again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..analysis import compare
from ..analysis.statistics import FEWEST
from ..analysis.warnings import in_doubt
from ..files import read_json
from ..record import RecordError, RunRecord, load_records, read_record
from ..subject import Subject
from ..text import counted, print_aside, text_of
from .columns import Row, columns_of
from .configurations import step_results
from .formats import texts_of, write_files
from .identity import (
    ALWAYS,
    SHAPE,
    heading,
    identity_columns,
    rows_without,
    shared_settings,
    without_unused,
)
from .quantities import StepResult
from .section import Section, known, make_table
from .words import DOUBT, SCATTER, in_percent, mean_and_std, significant, status_text

COMPARISON_FILE = "comparison.json"
ONLY_A, ONLY_B, NOT_COMPARED = "only in A", "only in B", "not compared"
"""Words in place of a verdict."""
RATES = ("a_tokens_per_s", "b_tokens_per_s")
SWEEPS = (
    "a_step_mean_ms",
    "b_step_mean_ms",
    "ratio",
    "ratio_low",
    "verdict",
    "a_processes",
    "b_processes",
)
VALUES = (
    "verdict",
    "ratio",
    "ratio_low",
    "ratio_high",
    "a_step_mean_ms",
    "a_step_std_ms",
    "a_processes",
    "a_status",
    "a_warnings",
    "b_step_mean_ms",
    "b_step_std_ms",
    "b_processes",
    "b_status",
    "b_warnings",
    *RATES,
)
"""Columns of the CSV file after those of the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What was compared, as the user named it; kept in COMPARISON_FILE."""

    a: str
    b: str
    format_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The verdict on each configuration of two sides, and the table that shows it."""

    sides: Sides
    records: Sequence[Sequence[RunRecord]]
    """Records of A, then records of B, without runs under a profiler."""
    section: Section
    left_out: Sequence[str] = ()
    """Sentences on runs that are not compared."""

    @property
    def answer(self) -> str:
        """The verdict in one sentence; of several configurations, how many have each."""
        return self.section.tables[0].findings[0]

    def write(self, directory: Path) -> None:
        """Write the table in every format."""
        write_files(texts_of(self.section), directory)


def compare_sides(
    sides: Sides,
    records: Sequence[Sequence[RunRecord]],
    *,
    are_alternate: bool = False,
    allow_mixed: bool = False,
) -> Compared:
    """Compare each configuration of A with that of B.

    `are_alternate` says that the runs of A and B were interleaved. Raises ValueError, which says
    why, where nothing matches, for a side that has one configuration on several devices, and,
    unless `allow_mixed`, for records of other hardware, software, inputs or warm-up.
    """
    # what is measured alternately was checked before the first run
    is_mixed = are_alternate or allow_mixed
    plain = [compare.without_profiled(side) for side in records]
    compare.refuse_unlike(plain, is_mixed)
    left_out = [
        (
            f"{counted(len(side) - len(own), 'run')} under a profiler left out of {name}: a "
            "profiler makes a step slower."
        )
        for name, side, own in zip("AB", records, plain, strict=True)
        if len(own) < len(side)
    ]
    found = [step_results(side) for side in plain]
    matching = _matched(found, allow_mixed=is_mixed)
    a, b = found
    pairs: list[tuple[StepResult | None, StepResult | None]] = [
        *((a[i], b[j]) for i, j in matching.pairs),
        *((a[i], None) for i in matching.only_a),
        *((None, b[j]) for j in matching.only_b),
    ]
    times = [_times(side, sides=2 if are_alternate else 1) for side in plain]
    rows = [_row(*pair, times, matching.differing, are_alternate) for pair in pairs]
    when = "their runs alternate (A B B A)" if are_alternate else _when(plain)
    what = _what_is_what(sides, found, matching, when)
    section = _section(
        rows, found, matching.differing, [*_counted(rows), *what, *_rules(rows, are_alternate)]
    )
    return Compared(sides=sides, records=plain, section=section, left_out=left_out)


def load_compared(directory: Path, records: Sequence[RunRecord] | None = None) -> Compared:
    """Compare again what was measured alternately into the directory; `records` are its records,
    if they were read.
    """
    what = "the names of both sides of a comparison"
    sides = read_json(directory / COMPARISON_FILE, Sides, what, version=1, error=RecordError)
    own = load_records(directory / "runs")[0] if records is None else records
    return compare_sides(sides, by_parity(own), are_alternate=True)


def by_parity(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Split runs that were measured alternately into A's (even repeats) and B's (odd repeats),
    by repeat.
    """
    ordered = sorted(records, key=lambda record: record.subject.repeat)
    return [[record for record in ordered if record.subject.repeat % 2 == side] for side in (0, 1)]


def records_at(path: Path) -> Sequence[RunRecord]:
    """The records at the path; one that cannot be read is a warning on standard error.
    ValueError if there are none.
    """
    if path.is_file():
        return [read_record(path)]
    runs = path / "runs" if (path / "runs").is_dir() else path
    found, problems = load_records(runs)
    if not found:
        others = f" ({problems[0]})" if problems else ""
        raise ValueError(f"{path}: no records of runs{others}; needed the directory of a sweep")
    for problem in problems:
        print_aside(f"warning: {problem}")
    return found


def _section(
    rows: Sequence[Row],
    found: Sequence[Sequence[StepResult]],
    differing: Sequence[str],
    told: Sequence[str],
) -> Section:
    """The rows as a table with the findings `told`; `found` are the results of both sides."""
    rates = RATES if any(row["per"] for row in rows) else ()
    columns = [
        *identity_columns(rows, [name for name in ALWAYS if name not in differing]),
        *known(columns_of(*rates, *SWEEPS), rows),
    ]
    shared = shared_settings([(row.subject, row["device_name"]) for own in found for row in own])
    notes = [*told, *([f"{shared}."] if shared else [])]
    table = make_table(
        "A against B", columns, rows, notes, lambda row: bool(row["verdict"] == NOT_COMPARED), told
    )
    apart = [f"{name}_{side}" for name in differing for side in "ab"]
    keys = (*without_unused([row["identity"] for row in rows]), *apart, *VALUES)
    return Section(name="comparison", tables=(table,), rows=rows, keys=keys)


def _matched(found: Sequence[Sequence[StepResult]], *, allow_mixed: bool) -> compare.Matching:
    """Match the rows of both sides; raise ValueError for what must not be compared."""
    for name, rows in zip("AB", found, strict=True):
        if len({row.subject for row in rows}) < len(rows):
            raise ValueError(
                f"{name} has the same configuration on several devices; keep each device's runs "
                "apart"
            )
    a, b = ([_settings(row) for row in rows] for rows in found)
    matching = compare.match(a, b)
    if not matching.pairs:
        raise ValueError(
            "no configuration of A is in B; see the results of each with `cs336 report`"
        )
    for i, j in matching.pairs:
        compare.refuse_other_work(found[0][i].subject, found[1][j].subject)
        if (of_a := a[i]["warmup_steps"]) != (of_b := b[j]["warmup_steps"]) and not allow_mixed:
            raise ValueError(
                f"A had {of_a} warm-up steps and B had {of_b}, to which a difference may be due; "
                "compare them with --allow-mixed"
            )
    return matching


def _settings(row: StepResult) -> Row:
    """What tells the row from others of its sweep."""
    (settings,) = rows_without([row["identity"]], ("repeat",))
    return settings


def _times(side: Sequence[RunRecord], sides: int) -> dict[Subject, compare.Blocks]:
    """The times per token of each process that ended well, by configuration."""
    found: dict[Subject, list[RunRecord]] = {}
    for record in side:
        found.setdefault(record.subject.configuration, []).append(record)
    return {config: compare.measured_steps(records, sides) for config, records in found.items()}


def _row(
    a: StepResult | None,
    b: StepResult | None,
    times: Sequence[Mapping[Subject, compare.Blocks]],
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
        measured.append(of_side.get(own.subject, {}) if own else {})
        row |= {f"{name}_{side}": own["identity"][name] if own else None for name in differing}
        row |= {
            f"{side}_{name}": own[name] if own else None
            for name in ("step_mean_ms", "step_std_ms", "processes")
        }
        row |= {
            f"{side}_{name}": own[name] if own else None
            for name in ("status", "warnings", "tokens_per_s")
        }
        row[f"{side}_ended"] = status_text(own["status"]) if own else ""
    row |= {
        "ratio": None,
        "ratio_low": None,
        "ratio_high": None,
        "ratio_is_doubted": False,
        "answer": "",
        "per": "",
    }
    if a is None or b is None:
        return row | {"verdict": ONLY_B if a is None else ONLY_A}
    if not all(measured):
        return row | {"verdict": NOT_COMPARED}
    per = "" if a.subject.tokens_per_step == b.subject.tokens_per_step else " per token"
    found = (compare.compare_in_turn if are_alternate else compare.compare_apart)(*measured)
    doubted = in_doubt([*a.codes, *b.codes])
    ratio = {
        "ratio": found.ratio,
        "ratio_low": found.low,
        "ratio_high": found.high,
        "ratio_is_doubted": doubted,
    }
    return row | ratio | {"verdict": str(found.verdict), "answer": _answer(found, per), "per": per}


def _answer(found: compare.Comparison, per: str) -> str:
    """`B is 2.19 ± 0.01 times as fast as A`, with half of the interval of the quotient, or what
    cannot be told.
    """
    of = f"{found.num_a} and {found.num_b} processes"
    if found.low is None or found.high is None or found.least_shown is None:
        return f"Cannot tell: {of} of one step show no spread."
    if min(found.num_a, found.num_b) < FEWEST:
        of += f", assumed to scatter by {SCATTER}"
    if found.verdict is not compare.Verdict.CANNOT_TELL:
        speed = mean_and_std(1 / found.ratio, (1 / found.low - 1 / found.high) / 2)
        return (
            f"B is {speed} times as fast as A{per} ({100 * compare.CONFIDENCE:g} % interval, {of})."
        )
    if found.is_within_least_effect:
        return f"Cannot tell: any difference is below {in_percent(compare.LEAST_EFFECT)} % ({of})."
    return (
        f"Cannot tell: a difference below {significant(100 * found.least_shown, 2)} % would "
        f"not show ({of})."
    )


def _when(sides: Sequence[Sequence[RunRecord]]) -> str:
    a, b = (sorted(record.started_at for record in side) for side in sides)
    return f"runs of A began from {a[0]} to {a[-1]}, of B from {b[0]} to {b[-1]}"


def _what_is_what(
    sides: Sides, found: Sequence[Sequence[StepResult]], matching: compare.Matching, when: str
) -> Iterator[str]:
    yield f"A is {sides.a}, B is {sides.b}; {when}."
    told = []
    for name in matching.differing:
        if name in SHAPE and "size" in matching.differing:
            continue
        of_sides = [dict.fromkeys(text_of(row["identity"][name]) for row in rows) for rows in found]
        told.append(f"{heading(name)} ({', '.join(' or '.join(own) for own in of_sides)})")
    if told:
        yield (
            f"They differ throughout in {', '.join(told)}; rows are matched by all other settings."
        )
    for i, j in matching.pairs:
        a, b = (row.subject.tokens_per_step for row in (found[0][i], found[1][j]))
        if a != b:
            yield (
                f"Unequal work, compared by tokens per second: a step of A has {a:,} tokens, "
                f"one of B {b:,} tokens."
            )
            return


def _counted(rows: Sequence[Row]) -> Iterator[str]:
    """How many rows have each verdict; of a single row its verdict with the numbers it rests on."""
    counts = Counter(row["verdict"] for row in rows)
    if len(rows) == 1 and rows[0]["answer"]:
        yield rows[0]["answer"]
    else:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        yield f"B against A in {counted(len(rows), 'configuration')}: {verdicts}."


def _rules(rows: Sequence[Row], are_alternate: bool) -> Iterator[str]:
    """Whether ratios are in doubt, and what their interval rests on."""
    if any(row["ratio_is_doubted"] for row in rows):
        yield f"{DOUBT} marks a ratio of times that are in doubt; the CSV names the warnings."
    fewest = min(
        (min(row["a_processes"], row["b_processes"]) for row in rows if row["ratio"]), default=0
    )
    interval = f"{100 * compare.CONFIDENCE:g} % interval of the ratio"
    if are_alternate and fewest >= FEWEST:
        yield (
            f"{interval}: Student's t, over the differences of processes that ran one after "
            "the other."
        )
        return
    few = (
        f"; for fewer than {FEWEST} processes (--repeats) one of {SCATTER} between them, the "
        f"largest in the published records, and of {compare.STEP_FACTOR:g} times that of their "
        "steps"
    )
    yield (
        f"{interval}: Welch's, over the means of processes. Assumed is a standard deviation of "
        f"{100 * compare.SESSION_DEVIATION:g} % between the times of A and B (published sweeps "
        f"differ by up to 1.6 %){few if fewest < FEWEST else ''}."
    )
