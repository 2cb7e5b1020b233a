"""A sweep's step times: the tables that people read, results.csv with every column, and their
pictures.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any

from ...analysis.statistics import FEWEST
from ...analysis.warnings import DOUBTFUL, in_doubt
from ...config import UNSIZED, Phase, Precision, Profiler
from ...costs.time import uncounted_flops
from ...record import Measurement, RunRecord, WarningCode
from ...subject import Subject
from ...text import counted, text_of
from ..charts import PHASE_STYLES, REST_COLOUR, Bar, Chart, Panel, Style
from ..column import Quantity, Row, signed, three_digits
from ..columns import column
from ..configurations import over_warmup, steady
from ..identity import identity_columns, placed_settings, settings_of, trailing
from ..quantities import SpeedUp, StepResult
from ..section import Section, Table, distinct_labels, known, labels, make_table, settings
from ..words import (
    CHANCE,
    DOUBT,
    DOUBTED_FORECAST,
    SHIPPED,
    NamedRows,
    mixed_notes,
    percent_of,
    significant,
    warning_counts,
)

ALWAYS = ("size", "context_length", "precision")
"""Settings that are columns even if all rows have the same value."""
PHASES = [phase for phase in Phase if phase is not Phase.STEP]
"""The phases in the order of a step."""
OFFERED = (
    "Offered: what the factory of a model of one's own was given to choose from; the model's "
    "shape is not known."
)
MOST_NAMED = 8
"""Most configurations that a finding names one by one."""
DOUBTED = f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation."


def step_answer(result: StepResult, record: RunRecord) -> list[str]:
    """Three sentences on one run: its times, its speed and peak of memory, and what puts the
    times in doubt.
    """
    measured = record.measurement(Phase.STEP)
    if measured is None:
        return []
    low, median = significant(1e3 * measured.min_s), significant(1e3 * measured.median_s)
    high = significant(1e3 * max(measured.times_s))
    phases = []
    for phase in PHASES:
        if result[key := f"{phase}_mean_ms"]:
            phases.append(f"{phase} {column(key).cell(result)}")
    speed = []
    for entry in (StepResult.tokens_per_s, StepResult.mfu, StepResult.peak_allocated_gib):
        if text := entry.cell(result):
            speed.append(f"{entry.label} {text}")
    under = "" if record.subject.profiler is Profiler.NONE else " with the profiler running"
    step = StepResult.step_mean_ms.cell(result)
    steps = counted(len(measured.times_s), "step")
    spread = f"Minimum {low}, median {median}, maximum {high} ms in {steps}"
    if speed:
        spread += f"; {', '.join(speed)}"
    parts = f": {', '.join(phases)}" if phases else ""
    return [f"A step takes {step} ms{under}{parts}.", f"{spread}.", _doubts(record, measured)]


def _doubts(record: RunRecord, measured: Measurement) -> str:
    """Which warnings put the times of the run in doubt, or that none does."""
    codes = [warning.code for warning in record.warnings]
    if doubts := ", ".join(code for code in codes if code in DOUBTFUL):
        return f"The times are in doubt: {doubts}."
    if len(measured.times_s) == 1:
        return "A single step does not show how the times scatter."
    return "No warning puts the times in doubt."


def activity_sentences(result: StepResult) -> list[str]:
    """How busy tensor pipes are against MFU, and what is known of the difference, in points.

    Matmuls in fp32 use no tensor pipes.
    """
    tensor, mfu = result.tensor_share, result.mfu
    if tensor is None or mfu is None or result["precision"] in (None, Precision.FP32):
        return []
    numbers = f"Tensor pipes compute {percent_of(tensor)} of the time, MFU is {percent_of(mfu)}"
    uncounted = None if result.config is None else uncounted_flops(result.config)
    if uncounted is None:
        return [f"{numbers}."]
    a_point = uncounted.counted / (100 * mfu)
    parts = {
        "recomputation, which MFU leaves out": uncounted.recomputed / a_point,
        "masked attention, which MFU counts and the kernels skip": -uncounted.skipped / a_point,
    }
    named = {what: points for what, points in parts.items() if round(points, 1)}
    rest = 100 * (tensor - mfu) - sum(named.values())
    causes = [f"{signed(points)} {what}" for what, points in named.items()]
    return [f"{numbers}: {', '.join([*causes, f'{signed(rest)} of no known cause'])} (points)."]


def results_table(results: Sequence[StepResult], *, has_csv: bool = True) -> Table:
    """The table of step times: a row for each configuration, failed ones too; the notes have the
    findings.

    With `has_csv`, it is the table of a sweep: a note counts the warnings and points to the CSV,
    which has them in each row. Without, it is printed for a single run.
    """
    columns = [entry for entry in StepResult.entries() if entry.place]
    if has_csv:
        columns = [entry for entry in columns if not entry.of_one_run]
    columns.sort(key=lambda entry: entry.place)
    return _table(
        "Time of a step",
        results,
        columns,
        list(_notes(results, has_csv=has_csv)),
        step_findings(results),
    )


def _notes(results: Sequence[StepResult], *, has_csv: bool) -> Iterator[str]:
    """How to read the table of step times, and what its marks mean."""
    configs = [result.config for result in results if result.config is not None]
    if any(config.model_factory and config.size != UNSIZED for config in configs):
        yield OFFERED
    yield "Times are mean ± standard deviation over the measured steps of a process."
    yield from mixed_notes(chain.from_iterable(result.environments for result in results))
    yield from too_few_note(result.processes for result in results)
    gains, of_few = [], []
    for entry in StepResult.speed_ups():
        gains += [result.gain(entry.settings) for result in results]
        of_few += [result[entry.key] for result in results if result.processes < FEWEST]
    if any(of_few):
        yield CHANCE
    if any(result.prediction_is_shipped for result in results):
        yield SHIPPED
    if any(result.prediction_is_doubted for result in results):
        yield DOUBTED_FORECAST
    if has_csv:
        yield from warning_notes([result.warnings for result in results])
    if any(gain.is_doubted for gain in gains):
        yield DOUBTED


def warmup_table(results: Sequence[StepResult]) -> Table | None:
    """The table of step times by the number of warm-up steps; None if that number does not vary."""
    varying = over_warmup(results)
    columns = [
        StepResult.step_mean_ms,
        StepResult.step_ci95_low_ms,
        StepResult.step_cv,
        StepResult.first_step_ms,
    ]
    return _table("Time of a step by warm-up", varying, columns) if varying else None


def _table(
    title: str,
    results: Sequence[StepResult],
    columns: Sequence[Quantity[Any]],
    notes: Sequence[str] = (),
    findings: Sequence[str] = (),
) -> Table:
    """A table of distinguishing settings, the step, the other columns that are not empty, and any
    failures.
    """
    step, *others = columns
    shown = [*identity_columns(results, ALWAYS), step, *known(others, results)]
    if any(result.failed for result in results):
        shown.append(replace(StepResult.ended, name="status"))
    shared = settings(results)
    told = [f"{shared}."] if shared else []
    return make_table(
        title,
        shown,
        results,
        [*told, *findings, *notes],
        lambda result: bool(result.failed),
        findings,
    )


def step_findings(results: Sequence[StepResult]) -> list[str]:
    """Sentences on what limits steps or ended them, and on speed-ups.

    Of rows that differ only in warm-up, the one with the most counts. Each number has the name of
    its row.
    """
    told = steady(results)
    sentences = list(_limits(told))
    if len(told) == 1:
        sentences += activity_sentences(told[0])
    for entry in StepResult.speed_ups():
        sentences += _gains(entry, [result for result in told if result[entry.key]])
    return sentences


def _limits(results: Sequence[StepResult]) -> Iterator[str]:
    """Findings on several configurations: which of them the host's kernel launches limit, and how
    runs of them failed.
    """
    if len(results) < 2:
        return
    groups: dict[str, list[str]] = {}
    for name, result in zip(labels(results), results, strict=True):
        if result.failed:
            ends = f"{result.ended[:1].upper()}{result.ended[1:]}"
            groups.setdefault(ends, []).append(name)
        if WarningCode.LAUNCH_BOUND in result.codes:
            groups.setdefault("Limited by the host's launches", []).append(name)
    for what, named in groups.items():
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        names = ", ".join(named[:MOST_NAMED])
        yield f"{what}: {len(named)} of {len(results)} configurations ({names}{more})."


def _gains(entry: SpeedUp, results: Sequence[StepResult]) -> Iterator[str]:
    """Findings on speed-ups: for each value of a setting that has a baseline, the least and the
    largest.
    """
    setting = entry.settings[0]
    for value in dict.fromkeys(result[setting] for result in results):
        if value is None:  # of a watched loop, what was not seen
            continue
        faster = [result for result in results if result[setting] == value]
        values: type[StrEnum] = type(settings_of(faster[0].subject)[setting])
        baseline = next(iter(values))
        number = sum(result.gain(entry.settings).is_doubted for result in faster)
        doubt = f"; in {number} of {len(faster)} a time is in doubt ({DOUBT})" if number else ""
        gains = NamedRows(faster, distinct_labels(faster)).range(entry.key, three_digits)
        untold = sum(result.may_be_chance(entry.settings) for result in faster)
        chance = f"; {untold} of {len(faster)} may be chance" if untold else ""
        of_step = f"a step{_more_work(setting, faster)} is {gains} times as fast as with {baseline}"
        yield f"{setting} {value}: {of_step}{doubt}{chance}."


def _more_work(setting: str, results: Sequence[StepResult]) -> str:
    """How many times the tokens a step of several ranks has, each of which has a whole batch; empty
    where a setting does not change them or they differ among the results.
    """
    if setting != "parallel":
        return ""
    ranks = {settings_of(result.subject)["ranks"] for result in results}
    return f" of {ranks.pop()} times the tokens" if len(ranks) == 1 else ""


def results_section(
    results: Sequence[StepResult],
    of_profiles: Mapping[Subject, Mapping[str, float]] = MappingProxyType({}),
) -> Section:
    """The tables and pictures of step times, and for results.csv a row with every value of each
    configuration.

    `of_profiles` has, by configuration, what profiles of the same runs add to these rows.
    """
    keys = StepResult.csv_keys(results)
    added: Row = {}
    for values in of_profiles.values():
        added |= dict.fromkeys(values)
    identities = [result.identity for result in results]
    others = [name for name in trailing(identities) if name not in keys]
    as_texts = placed_settings(40, 49)
    rows = []
    for result in results:
        row: Row = {key: result[key] for key in keys}
        row |= {name: text_of(row[name]) for name in as_texts}
        row |= {**added, **of_profiles.get(result.subject, {})}
        rows.append(row | {name: result.identity[name] for name in others})
    tables = [results_table(results)]
    if by_warmup := warmup_table(results):
        tables.append(by_warmup)
    pictures = list(step_charts(results))
    return Section(name="results", tables=tuple(tables), rows=rows, pictures=pictures)


def too_few_note(counts: Iterable[int]) -> list[str]:
    """A note for rows of two processes, which have no interval, on how to get one."""
    if 2 not in counts:
        return []
    return [f"Two processes are too few for an interval: use --repeats {FEWEST} or more."]


def warning_notes(codes: Sequence[str | None], rows: str = "rows") -> list[str]:
    """A note that counts the rows with each warning; `rows` is what the rows are called."""
    counts = warning_counts(codes, rows.removesuffix("s") if len(codes) == 1 else rows)
    return [f"Warnings, named by row in the CSV: {counts}."] if counts else []


MAX_BARS = 60
"""Most configurations in one picture by phase."""
LEAST_REST = 0.02
"""Least share of a step outside of the phases that is drawn."""
BY_PHASE = "Time of a step by phase"
REST = "rest of the step"
PARTS = PHASE_STYLES | {REST: Style(colour=REST_COLOUR)}


def step_charts(results: Sequence[StepResult]) -> Iterator[Chart]:
    """Lying bars of several configurations, as many in one picture as can be read. Each size has a
    panel with a scale of its own, so that the parts of a short step are seen beside a long one.
    """
    if len(results) < 2 or all(result.step_mean_ms is None for result in results):
        return
    runs = list(zip(phase_bars(results), results, strict=True))
    for number, first in enumerate(range(0, len(runs), MAX_BARS), 1):
        by_size = groupby(runs[first : first + MAX_BARS], key=lambda run: run[1]["size"])
        panels = []
        for _, of_size in by_size:
            panels.append(Panel(label="time (ms)", bars=[bar for bar, _ in of_size]))
        yield Chart(
            name=f"step_time_no{number}" if number > 1 else "step_time",
            title=BY_PHASE,
            settings=settings(results),
            panels=panels,
            legend_columns=5,
            styles=PARTS,
        )


def phase_bars(results: Sequence[StepResult]) -> list[Bar]:
    """A bar for each result: its phases, and the rest of the step if noticeable.

    Its figures are the time of the step with the deviation, and the peak of memory.
    """
    return [_phase_bar(name, result) for name, result in zip(labels(results), results, strict=True)]


def _phase_bar(name: str, result: StepResult) -> Bar:
    """The bar of one result: mean time of each phase in a step in milliseconds, the rest of the
    step if it is noticeable, and step time and peak of memory as figures.
    """
    parts = {}
    for phase in PHASE_STYLES:
        time_ms = result.part_ms(Phase(phase))
        if time_ms is not None:
            parts[phase] = time_ms
    step_ms = result.step_mean_ms
    if step_ms is not None:
        rest_ms = step_ms - sum(parts.values())
        if rest_ms > LEAST_REST * step_ms:
            parts[REST] = rest_ms
    figures = []
    if step_ms:
        mark = f" {DOUBT}" if in_doubt(result.codes) else ""
        figures.append(f"{StepResult.step_mean_ms.cell(result)}{mark} ms")
    if result.peak_allocated_gib:
        figures.append(f"{StepResult.peak_allocated_gib.cell(result)} GiB")
    failure = result.ended if step_ms is None else ""
    return Bar(name=name, parts=parts, figures=figures, failure=failure)
