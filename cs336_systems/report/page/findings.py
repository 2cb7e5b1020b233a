"""The sentences that a page begins with: what limits the configurations, what stands out, and what is in doubt.

Configurations with the same finding share a sentence, whose numbers link to their cells; sentences from answers.md link
to the table. All warnings follow, collapsed. All findings of a profile are beside its pictures.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from cs336_systems.config import Phase
from cs336_systems.record import RunRecord, RunWarning, WarningCode
from cs336_systems.report.columns import three_digits
from cs336_systems.report.frame import order
from cs336_systems.report.identity import identities, names_of
from cs336_systems.report.numbers import milliseconds, percent_of
from cs336_systems.report.page.limits import limits, recorded_runs
from cs336_systems.report.page.rows import Named, between, linked, named_rows
from cs336_systems.report.page.subjects import Subjects
from cs336_systems.report.page.write import Linked, Part, Prose
from cs336_systems.report.sections.memory.words import by_category, parts_of, size
from cs336_systems.report.sections.steps_answers import (
    checkpoint_answers,
    choice_answers,
    forecast_answers,
    precision_answers,
    texts,
)
from cs336_systems.text import counted, inert_line

SPREADS = (WarningCode.UNSTABLE, WarningCode.OUTLIERS, WarningCode.DRIFT)
"""Warnings whose worst case is the run with the widest spread."""
Warned = tuple[str, RunRecord, RunWarning, str]
"""The name of a run, its record, a warning of it, and the cell of its step."""


def findings(found: Sequence[Subjects], refused: Sequence[str]) -> list[Prose]:
    """The sentences on all records of a sweep, in groups that can be compared; `refused` says what cannot be."""
    prose = [
        *(_prose("What limits each configuration", own, limits(own)) for own in found),
        *(_prose("What stands out", own, _stands_out(own)) for own in _several(found)),
        *map(_in_doubt, found),
        Prose(heading="What is not side by side, and why", paragraphs=[(text, "") for text in refused]),
    ]
    return [block for block in prose if block.paragraphs]


def _prose(title: str, own: Subjects, sentences: Iterable[Linked | Part], more: Sequence[Part] = ()) -> Prose:
    """The sentences below the title, and the conditions that tell these records from the others of the sweep."""
    heading = f"{title}: {own.conditions}" if own.conditions else title
    return Prose(heading=heading, paragraphs=list(sentences), more=more, more_title=f"All {len(more)} warnings")


def _several(found: Sequence[Subjects]) -> Sequence[Subjects]:
    """The groups with several configurations, of which one can stand out; all groups if there are none."""
    return [own for own in found if sum(len(block.table.values) for block in own.steps) > 1] or found


def _in_doubt(own: Subjects) -> Prose:
    """A sentence for each kind of warning, then all warnings, closed."""
    warned = list(_warned(own))
    doubts = list(_doubts(warned, len(own.results.published)))
    every = [(inert_line(f"{name}: {each.code}: {each.message}."), cell) for name, _, each, cell in warned]
    return _prose("What is in doubt", own, doubts, every if len(every) > len(doubts) else ())


def _stands_out(own: Subjects) -> Iterator[Linked | Part]:
    """The extremes of the steps after most warm-up, the largest peaks of memory, and the answers of answers.md."""
    steps = named_rows(own.steps[:1], "step_mean_ms")
    timed = [step for step in steps if step.row["step_mean_ms"] is not None]
    yield from _extremes(timed)
    yield from _peaks(steps, recorded_runs(own.memory))
    rows = [step.row for step in timed]
    told = [*precision_answers(rows), *choice_answers(rows), *checkpoint_answers(rows), *forecast_answers(rows)]
    yield from ((inert_line(text), own.steps[0].id) for text in texts(told))


def _extremes(steps: Sequence[Named]) -> Iterator[Linked]:
    """The fastest and the slowest step, how steps scale, the share of the promised rate, and the widest spread."""
    if steps:
        yield linked("A step takes ", *between(steps, "step_mean_ms", milliseconds), ".")
    ways: dict[str, list[Named]] = defaultdict(list)
    for step in steps:
        if step.row["weak_scaling"] is not None:
            ways[str(step.row["parallel"])].append(step)
    for way, own in ways.items():
        gains = between(own, "weak_scaling", three_digits)
        yield linked(f"With parallel {way} a step is ", *gains, " times as fast as in one process.")
    if known := [step for step in steps if step.row["mfu"] is not None]:
        yield linked("The model's share of the promised rate is ", *between(known, "mfu", percent_of), ".")
    if known := [step for step in steps if step.row["step_cv"] is not None]:
        widest = max(known, key=lambda step: float(step.row["step_cv"]))
        spread = widest.link("step_cv", percent_of(widest.row["step_cv"]))
        yield linked("The widest spread of the steps of a run is ", spread, f" of their mean ({widest.name}).")


def _peaks(steps: Sequence[Named], recorded: Sequence[Named]) -> Iterator[Linked]:
    """The largest peak of memory; of a recorded one, what it consists of."""
    if len(recorded) > 1:
        largest = max(recorded, key=lambda run: int(run.row["peak_allocated_bytes"]))
        peak = largest.row["entry"].profile.peak
        yield linked(
            "The largest peak of memory is ", largest.link("peak_allocated_bytes", size(peak.allocated_bytes)),
            f" ({largest.name}): {parts_of(by_category(peak), peak.allocated_bytes)}.",
        )  # fmt: skip
    elif not recorded and (known := [step for step in steps if step.row["peak_allocated_gib"] is not None]):
        peaks = between(known, "peak_allocated_gib", lambda gib: size(round(gib * 2**30)))
        yield linked("The peak of memory is ", *peaks, ".")


def _warned(own: Subjects) -> Iterator[Warned]:
    """The warnings of the runs whose times are shown."""
    records = sorted(own.results.published, key=lambda record: order(record.config))
    runs = [(record.config, record.device_name) for record in records]
    cells = {row.row["config"]: row.link("step_mean_ms", "")[1] for row in named_rows(own.steps, "step_mean_ms")}
    for name, record in zip(names_of(identities(runs)), records, strict=True):
        for warning in record.warnings:
            yield name, record, warning, cells.get(record.config.configuration, "")


def _doubts(warned: Sequence[Warned], num_runs: int) -> Iterator[Linked]:
    """How many runs have each warning, and the worst of them; what limits a step puts no time in doubt."""
    by_code: dict[WarningCode, list[Warned]] = defaultdict(list)
    for each in warned:
        by_code[each[2].code].append(each)
    by_code.pop(WarningCode.LAUNCH_BOUND, None)
    for code, own in sorted(by_code.items(), key=lambda item: -len(item[1])):
        name, _, warning, cell = max(own, key=lambda each: _spread(each[1])) if code in SPREADS else own[0]
        which = "" if len(own) == 1 else "worst in " if code in SPREADS else "such as "
        number = f"{len(own)} of {counted(num_runs, 'run')}"
        yield linked(f"Warning {code} in {number}, {which}", (name, cell), f": {warning.message}.")


def _spread(record: RunRecord) -> float:
    step = record.measurement(Phase.STEP)
    return (step.cv if step else None) or 0.0
