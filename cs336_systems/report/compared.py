"""Two sides compared, each one configuration or a sweep: the verdict on each configuration, as a
table.

What was measured alternately is kept with COMPARISON_FILE, from which the tables are made again.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from ..analysis import compare
from ..analysis.statistics import FEWEST
from ..analysis.warnings import DOUBTFUL
from ..files import read_json
from ..record import RUNS, RecordError, RunRecord, load_records, read_record
from ..text import counted, print_aside, text_of
from .columns import Row, columns_of
from .configurations import step_results
from .formats import texts_of, write_files
from .identity import ALWAYS, SHAPE, heading, identity_columns, without_unused
from .quantities import StepResult
from .section import Section, known, make_table, settings
from .words import DOUBT, SCATTER, ended, in_percent, mean_and_std, mixed_notes, significant

COMPARISON_FILE = "comparison.json"
ONLY_A, ONLY_B, NOT_COMPARED = "only in A", "only in B", "not compared"
"""Words in place of a verdict."""
RATES = ("a_tokens_per_s", "b_tokens_per_s")
RATIO = ("ratio", "ratio_low", "ratio_high")
OF_A_SIDE = ("step_mean_ms", "step_std_ms", "processes", "status", "warnings")
SWEEPS = (
    "a_step_mean_ms",
    "b_step_mean_ms",
    "ratio",
    "ratio_low",
    "verdict",
    "a_processes",
    "b_processes",
)
COMPARED_COLUMNS = (
    "verdict",
    *RATIO,
    *(f"a_{name}" for name in OF_A_SIDE),
    *(f"b_{name}" for name in OF_A_SIDE),
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
    section: Section
    left_out: Sequence[str] = ()
    """Sentences on runs that are not compared."""

    @property
    def answer(self) -> str:
        """The verdict of the comparison in one sentence; for several configurations, how many have
        each verdict.
        """
        return self.section.tables[0].findings[0]

    def write(self, directory: Path, formats: Collection[str] = ()) -> None:
        """Write the table as Markdown and CSV, and in the other `formats`."""
        write_files(texts_of(self.section), directory, formats)


def compare_sides(
    sides: Sides,
    records: Sequence[Sequence[RunRecord]],
    *,
    are_alternate: bool = False,
    allow_mixed: bool = False,
) -> Compared:
    """Compare each configuration of A with that of B.

    `are_alternate` says that the runs of A and B were interleaved. Raises ValueError, which says
    why, where nothing matches, for a side that has one configuration on several devices or one
    repeat several times, and, unless `allow_mixed`, for records of other hardware, software, inputs
    or warm-up.
    """
    # what is measured alternately was checked before the first run
    is_mixed = are_alternate or allow_mixed
    plain = [compare.without_profiled(side) for side in records]
    compare.refuse_unlike(plain, is_mixed)
    left_out = []
    for name, side, kept in zip("AB", records, plain, strict=True):
        if len(kept) < len(side):
            left_out.append(
                f"{counted(len(side) - len(kept), 'run')} under a profiler left out of {name}: a "
                "profiler makes a step slower."
            )
    results = [step_results(side) for side in plain]
    matching = _matched(results, allow_mixed=is_mixed)
    a, b = results
    row_of = partial(_row, differing=matching.differing, are_alternate=are_alternate)
    rows = [row_of(a[of_a], b[of_b]) for of_a, of_b in matching.pairs]
    rows += [row_of(a[of_a], None) for of_a in matching.only_a]
    rows += [row_of(None, b[of_b]) for of_b in matching.only_b]
    when = "their runs alternate (A B B A)" if are_alternate else _when(plain)
    findings = [
        *_counted(rows),
        *_what_is_what(sides, results, matching, when),
        *_ratio_notes(rows),
    ]
    section = _section(rows, results, matching.differing, findings)
    return Compared(sides=sides, section=section, left_out=left_out)


def load_compared(directory: Path, records: Sequence[RunRecord]) -> Compared:
    """Compare again the `records` in the directory, which were measured alternately."""
    what = "the names of both sides of a comparison"
    sides = read_json(directory / COMPARISON_FILE, Sides, what, version=1, error=RecordError)
    return compare_sides(sides, by_parity(records), are_alternate=True)


def by_parity(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Split runs that were measured alternately into A's (even repeats) and B's (odd repeats),
    by repeat.
    """
    sides: list[list[RunRecord]] = [[], []]
    for record in sorted(records, key=lambda record: record.subject.repeat):
        sides[record.subject.repeat % 2].append(record)
    return sides


def records_at(path: Path) -> Sequence[RunRecord]:
    """The records at the path; one that cannot be read is a warning on standard error.
    ValueError if there are none.
    """
    if path.is_file():
        return [read_record(path)]
    records, problems = load_records(path / RUNS)
    if not records and not problems:
        records, problems = load_records(path)
    if not records:
        others = f" ({problems[0]})" if problems else ""
        raise ValueError(f"{path}: no records of runs{others}; needed the directory of a sweep")
    for problem in problems:
        print_aside(f"warning: {problem}")
    return records


def _section(
    rows: Sequence[Row],
    results: Sequence[Sequence[StepResult]],
    differing: Sequence[str],
    findings: Sequence[str],
) -> Section:
    """The rows as a table with its findings; `results` are those of both sides."""
    rates = RATES if any(row["per"] for row in rows) else ()
    always = [name for name in ALWAYS if name not in differing]
    columns = [*identity_columns(rows, always), *known(columns_of(*rates, *SWEEPS), rows)]
    notes = [*findings]
    if shared := settings(chain(*results)):
        notes.append(f"{shared}.")

    def is_left_out(row: Row) -> bool:
        return bool(row["verdict"] == NOT_COMPARED)

    table = make_table("A against B", columns, rows, notes, is_left_out, findings)
    keys = without_unused([row["identity"] for row in rows])
    for name in differing:
        keys += (f"{name}_a", f"{name}_b")
    return Section(name="comparison", tables=(table,), rows=rows, keys=(*keys, *COMPARED_COLUMNS))


def _matched(results: Sequence[Sequence[StepResult]], *, allow_mixed: bool) -> compare.Matching:
    """Match the rows of both sides; raise ValueError for what must not be compared."""
    for name, rows in zip("AB", results, strict=True):
        _refuse_doubled(name, rows)
    a = [_settings(row) for row in results[0]]
    b = [_settings(row) for row in results[1]]
    matching = compare.match(a, b)
    if not matching.pairs:
        raise ValueError(
            "no configuration of A is in B; see the results of each with `cs336 report`"
        )
    for of_a, of_b in matching.pairs:
        compare.refuse_other_work(results[0][of_a].subject, results[1][of_b].subject)
        steps_a, steps_b = a[of_a]["warmup_steps"], b[of_b]["warmup_steps"]
        if steps_a != steps_b and not allow_mixed:
            raise ValueError(
                f"A had {steps_a} warm-up steps and B had {steps_b}, to which a difference may be "
                "due; compare them with --allow-mixed"
            )
    return matching


def _refuse_doubled(name: str, rows: Sequence[StepResult]) -> None:
    """Raise ValueError if the side of this name has one configuration on several devices, or one
    repeat of it several times.
    """
    if len({row.subject for row in rows}) < len(rows):
        raise ValueError(
            f"{name} has the same configuration on several devices; keep each device's runs apart"
        )
    for row in rows:
        repeats = [record.subject.repeat for record in row.records]
        if len(set(repeats)) < len(repeats):
            raise ValueError(
                f"{name} has several runs of one repeat of {row.subject.label}; keep the runs of "
                "each sweep apart"
            )


def _settings(row: StepResult) -> Row:
    """The settings that tell a row from the others of its sweep: all of its identity but repeat and
    digest.
    """
    return {name: value for name, value in row.identity.items() if name not in ("repeat", "digest")}


def _row(
    a: StepResult | None, b: StepResult | None, differing: Sequence[str], are_alternate: bool
) -> Row:
    """What is known of one configuration, which may be missing on one side."""
    whole = a or b
    assert whole is not None
    identity = {name: value for name, value in _settings(whole).items() if name not in differing}
    row: Row = {**identity, "identity": identity, **dict.fromkeys(RATIO)}
    row |= {"doubts": (), "answer": "", "per": ""}
    row |= {"is_in_turn": False, "is_assumed": False}
    for side, result in (("a", a), ("b", b)):
        for name in differing:
            row[f"{name}_{side}"] = result and result["identity"][name]
        for name in (*OF_A_SIDE, "tokens_per_s", "ended"):
            row[f"{side}_{name}"] = result and result[name]
    if a is None or b is None:
        return row | {"verdict": ONLY_B if a is None else ONLY_A}
    sides = 2 if are_alternate else 1
    times = [compare.measured_steps(side.records, sides) for side in (a, b)]
    if not all(times):
        return row | {"verdict": NOT_COMPARED}
    compared = (compare.compare_in_turn if are_alternate else compare.compare_apart)(*times)
    if a.subject.tokens_per_step != b.subject.tokens_per_step:
        row["per"] = " per token"
    return row | {
        "ratio": compared.ratio,
        "ratio_low": compared.low,
        "ratio_high": compared.high,
        "doubts": sorted(DOUBTFUL.intersection([*a.codes, *b.codes])),
        "is_in_turn": compared.is_in_turn,
        "is_assumed": compared.is_assumed,
        "verdict": str(compared.verdict),
        "answer": _answer(compared, row["per"]),
    }


def _answer(compared: compare.Comparison, per: str) -> str:
    """`B is 2.19 ± 0.01 times as fast as A`, with half of the interval of the quotient, or what
    cannot be told.
    """
    of = f"{compared.num_a} and {compared.num_b} processes"
    if compared.low is None or compared.high is None or compared.least_shown is None:
        return f"Cannot tell: the spread of {of} is not known."
    if compared.is_assumed:
        of += f", assumed to scatter by at least {SCATTER}"
    if compared.verdict is not compare.Verdict.CANNOT_TELL:
        speed = mean_and_std(1 / compared.ratio, (1 / compared.low - 1 / compared.high) / 2)
        return (
            f"B is {speed} times as fast as A{per} ({100 * compare.CONFIDENCE:g} % interval, {of})."
        )
    if compared.is_within_least_effect:
        return f"Cannot tell: any difference is below {in_percent(compare.LEAST_EFFECT)} % ({of})."
    return (
        f"Cannot tell: a difference below {significant(100 * compared.least_shown, 2)} % would "
        f"not show ({of})."
    )


def _when(sides: Sequence[Sequence[RunRecord]]) -> str:
    """When the first and the last run of each side began, as text."""
    a = sorted(record.started_at for record in sides[0])
    b = sorted(record.started_at for record in sides[1])
    return f"runs of A began from {a[0]} to {a[-1]}, of B from {b[0]} to {b[-1]}"


def _what_is_what(
    sides: Sides, results: Sequence[Sequence[StepResult]], matching: compare.Matching, when: str
) -> Iterator[str]:
    """What A and B are, in which settings they differ, and whether their work is equal."""
    yield f"A is {sides.a}, B is {sides.b}; {when}."
    differences = []
    for name in matching.differing:
        if name in SHAPE and "size" in matching.differing:
            continue
        texts = []
        for rows in results:
            of_rows = [row["identity"][name] for row in rows]
            values = dict.fromkeys(
                "not seen" if value is None else text_of(value) for value in of_rows
            )
            texts.append(" or ".join(values))
        differences.append(f"{heading(name)} ({', '.join(texts)})")
    if differences:
        yield (
            f"They differ throughout in {', '.join(differences)}; rows are matched by all other "
            "settings."
        )
    yield from mixed_notes(chain.from_iterable(row.environments for row in chain(*results)))
    for name, side in zip("AB", results, strict=True):
        partly = [row.statuses for row in side if row.done and row.failed]
        if partly:
            yield f"Left out of {name}: {ended(*chain.from_iterable(partly))}."
    for of_a, of_b in matching.pairs:
        a, b = (row.subject.tokens_per_step for row in (results[0][of_a], results[1][of_b]))
        if a != b:
            yield (
                f"Unequal work, compared by tokens per second: a step of A has {a:,} tokens, "
                f"one of B {b:,} tokens."
            )
            return


def _counted(rows: Sequence[Row]) -> Iterator[str]:
    """How many rows have each verdict; for a single row, its verdict with ratio and interval."""
    counts = Counter(row["verdict"] for row in rows)
    if len(rows) == 1 and rows[0]["answer"]:
        yield rows[0]["answer"]
    else:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        yield f"B against A in {counted(len(rows), 'configuration')}: {verdicts}."


def _ratio_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Notes on the ratios: the mark of those in doubt, and how their interval is computed, which
    differs for processes measured alternately and for fewer than FEWEST processes.
    """
    if doubts := sorted(set(chain.from_iterable(row["doubts"] for row in rows))):
        yield f"{DOUBT} marks a ratio of times that are in doubt: {', '.join(doubts)}."
    told = [row for row in rows if row["ratio_low"] is not None]
    interval = f"{100 * compare.CONFIDENCE:g} % interval of the ratio"
    if any(row["is_in_turn"] for row in told):
        yield (
            f"{interval}: Student's t, over the differences of processes that ran one after "
            "the other."
        )
    if all(row["is_in_turn"] for row in told):
        return
    few = ""
    if any(row["is_assumed"] for row in told):
        few = (
            f"; for fewer than {FEWEST} processes (--repeats), or equal ones, one of {SCATTER} "
            "between them, the largest in the published records, and of "
            f"{compare.STEP_FACTOR:g} times that of their steps, besides what they show"
        )
    yield (
        f"{interval}: Welch's, over the means of processes. Assumed is a standard deviation of "
        f"{100 * compare.SESSION_DEVIATION:g} % between the times of A and B (published sweeps "
        f"differ by up to 1.6 %){few}."
    )
