"""The first screen of a page: the headline, and of runs what their memory, their profiles or their
times show.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from ...analysis.warnings import DOUBTFUL, in_doubt
from ...config import Profiler
from ...text import counted
from .. import headlines, words
from ..charts import Bar
from ..configurations import step_results
from ..headlines import Headline
from ..quantities import StepResult
from ..results import Results
from ..section import labels
from ..sections.kernels.entry import Explained
from ..sections.kernels.plots import STYLES, configuration_chart, parts_ms
from ..sections.kernels.tables import phase_rows
from ..sections.memory.entry import MemoryEntry, difference_bytes
from ..sections.memory.plots import CATEGORIES, peak_bar, peak_charts
from ..sections.memory.words import check_words
from ..sections.steps import BY_PHASE, PARTS, phase_bars
from ..words import NamedRows
from .blocks import Bars, Glance, Tile
from .directory import Directory

MAX_SLOWDOWN = 0.10
"""A profiler that makes a step longer by more than this share puts what it says of the step in
doubt.
"""


def headline_of(directory: Directory, rows: Sequence[StepResult]) -> Headline:
    """The headline of the directory's page; the rows are those of its runs."""
    if directory.study is not None:
        return headlines.OF_STUDIES[directory.study.subject](directory.study.sections)
    if directory.climbed is not None:
        return headlines.of_ladder(directory.climbed.rows)
    if directory.compared is not None:
        return headlines.of_comparison(directory.compared)
    if directory.sweep is not None and directory.subject == "memory":
        return headlines.of_memory(directory.sweep.memory, rows)
    if directory.sweep is not None and directory.sweep.kernels:
        return headlines.of_profiles(directory.sweep.kernels, rows)
    return headlines.of_steps(rows)


def glance_at(directory: Directory) -> Glance:
    """The first screen of the directory's page."""
    results = directory.sweep
    if results is None:
        answer, more = headline_of(directory, ())
        return Glance(answer=answer, more=more)
    rows = times_of(results)
    answer, more = headline_of(directory, rows)
    note = "" if results.published else "with the profiler running"
    title = f"{BY_PHASE}, {note}" if note else BY_PHASE
    bars = [Bars(title=title, bars=phase_bars(rows), styles=PARTS, unit="ms")]
    doubts = [*_failed_profiles(results), *_doubts(rows)]
    trust = _steady(rows)
    if directory.compared is None and results.memory:
        bars = _bars_of_peaks(results.memory)
        moments = [moment for entry in results.memory for moment in entry.profile.boundaries]
        trust = check_words(moments) if moments else ""
        if any(map(difference_bytes, moments)):
            doubts.append(trust)
    elif directory.compared is None and results.kernels:
        bars = _bars_of_work(bars, results.kernels)
        doubts += _slowdown(results.kernels)
    return Glance(
        answer=answer,
        more=more,
        bars=bars,
        tiles=list(_tiles(rows, note)),
        doubts=doubts,
        trust=trust,
    )


def _failed_profiles(results: Results) -> Iterator[str]:
    """How runs under a profiler failed, where the headline is of runs without one."""
    profiled = [
        record for record in results.records if record.subject.profiler is not Profiler.NONE
    ]
    rows = [{"status": record.status} for record in profiled]
    failures = NamedRows(rows, [record.subject.label for record in profiled]).failures()
    if failures and results.published:
        yield f"Under the profiler: {failures.removeprefix('; ')}."


def times_of(results: Results) -> Sequence[StepResult]:
    """The configurations without a profiler; if all runs were under one, those of kernels, else
    those of memory.
    """
    if results.published:
        return results.configurations
    of_kernels = [
        record for record in results.records if record.subject.profiler is not Profiler.MEMORY
    ]
    return step_results(of_kernels or results.records, results.ceilings)


def _slowdown(entries: Sequence[Explained]) -> Iterator[str]:
    """That the profiler made some step much longer, if so."""
    # the last row of each profile is that of the whole step
    of_steps = [list(phase_rows(entry))[-1] for entry in entries]
    slowest = max(row["slowdown"] or 1.0 for row in of_steps)
    if slowest > 1 + MAX_SLOWDOWN:
        yield (
            f"The profiler made a step up to {words.significant(slowest, 3)} times as long as it "
            "is without."
        )


def _bars_of_work(by_phase: Sequence[Bars], entries: Sequence[Explained]) -> list[Bars]:
    """Bars by kind of work: of several profiles in place of those by phase, of one below them."""
    names = labels(entries)
    profiles = [entry.profile for entry in entries]
    chart = configuration_chart(list(zip(names, profiles, strict=True)))
    if chart is not None:
        return [Bars.of(chart)]
    work = Bars(
        title=f"Kinds of work, and how long the device is idle, in the profiled step of {names[0]}",
        bars=[Bar(name="work", parts=parts_ms(profiles[0]))],
        styles=STYLES,
        unit="ms",
    )
    return [*by_phase, work]


def _bars_of_peaks(entries: Sequence[MemoryEntry]) -> list[Bars]:
    """Bars of what the peaks of memory consist of."""
    bars = [Bars.of(chart) for chart in peak_charts(entries)]
    if bars:
        return bars
    bar = peak_bar("peak", entries[0])
    return [Bars(title="What the peak consists of", bars=[bar], styles=CATEGORIES, unit="GiB")]


def _tiles(rows: Sequence[StepResult], note: str) -> Iterator[Tile]:
    """Step, throughput, utilisation and memory, as ranges; of one configuration the step with
    its deviation.
    """
    spread = note or f"{len(_timed(rows))} of {counted(len(rows), 'configuration')}"
    if len(rows) == 1 and not note and rows[0].step_std_ms is not None:
        spread = "mean ± standard deviation"
    for name, column, about in (
        ("step", StepResult.step_mean_ms, spread),
        ("tokens/s", StepResult.tokens_per_s, "in a step over its time"),
        ("MFU", StepResult.mfu, "model FLOPs, of the data sheet's peak"),
        ("peak of memory", StepResult.peak_allocated_gib, "allocated at most"),
    ):
        text = NamedRows(rows).range(column.key, column.written)
        if len(rows) == 1:
            text = column.cell(rows[0])
        if text:
            yield Tile(name, f"{text} {column.unit}".strip(), about)


def _doubts(rows: Sequence[StepResult]) -> Iterator[str]:
    """How many times are in doubt, and by which warnings."""
    timed = _timed(rows)
    number = sum(in_doubt(row.codes) for row in timed)
    if not number:
        return
    counts = Counter(code for row in timed for code in row.codes if code in DOUBTFUL)
    if len(timed) == 1:
        yield f"The time is in doubt: {', '.join(counts)}."
        return
    reasons = ", ".join(f"{code} in {count}" for code, count in counts.most_common())
    several = ", some in several ways" if counts.total() > number else ""
    yield f"{number} of {len(timed)} times are in doubt ({words.DOUBT}){several}: {reasons}."


def _timed(rows: Sequence[StepResult]) -> list[StepResult]:
    return [row for row in rows if row.step_mean_ms is not None]


def _steady(rows: Sequence[StepResult]) -> str:
    """That the times are steady; empty without times."""
    if not _timed(rows):
        return ""
    text = "No warning puts a time in doubt"
    spreads = [row.step_cv for row in rows if row.step_cv is not None]
    if spreads:
        largest = words.percent_of(max(spreads))
        text += f"; the standard deviation is at most {largest} of the step"
    return f"{text}."
