"""The first screen of a page: the headline, and of runs what their memory, their profiles or their
times show.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...analysis.warnings import DOUBTFUL, in_doubt
from ...config import Profiler
from ...text import counted
from .. import headlines, words
from ..charts import Bar
from ..columns import three_digits
from ..configurations import step_results
from ..headlines import Headline, NamedRows
from ..quantities import StepResult
from ..results import Results
from ..section import labels
from ..sections.kernels.entry import Explained
from ..sections.kernels.plots import STYLES, configuration_chart, parts_ms
from ..sections.kernels.tables import phase_rows
from ..sections.memory.entry import MemoryEntry
from ..sections.memory.plots import CATEGORIES, peak_bar, peak_charts
from ..sections.memory.words import check_words
from ..sections.steps import BY_PHASE, PARTS, phase_bars
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
    rows: Sequence[StepResult] = () if results is None else times_of(results)
    answer, more = headline_of(directory, rows)
    glance = Glance(answer=answer, more=more)
    if results is None:
        return glance
    note = "" if results.published else "with the profiler running"
    title = f"{BY_PHASE}, {note}" if note else BY_PHASE
    glance = replace(
        glance,
        bars=[Bars(title=title, bars=phase_bars(rows), styles=PARTS, unit="ms")],
        tiles=_tiles(rows, note),
        doubts=[*_failed_profiles(results), *_doubts(rows)],
        trust=_steady(rows),
    )
    if directory.compared is not None:
        return glance
    if results.memory:
        return _with_memory(glance, results.memory)
    return _with_profiles(glance, results.kernels) if results.kernels else glance


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


def _with_profiles(glance: Glance, entries: Sequence[Explained]) -> Glance:
    """Add what the profiles say: bars by kind of work, and a doubt if the profiler slowed a step
    much.

    With several profiles, these bars replace those by phase; with one, they stand below them.
    """
    # the last row of each profile is that of the whole step
    of_steps = [list(phase_rows(entry))[-1] for entry in entries]
    slowest = max((row["slowdown"] or 1.0 for row in of_steps), default=1.0)
    if slowest > 1 + MAX_SLOWDOWN:
        doubt = (
            f"The profiler made a step up to {words.significant(slowest, 3)} times as long as it "
            "is without."
        )
        glance = replace(glance, doubts=[*glance.doubts, doubt])
    names = labels(entries)
    profiles = [entry.profile for entry in entries]
    chart = configuration_chart(list(zip(names, profiles, strict=True)))
    if chart is not None:
        return replace(glance, bars=[Bars.of(chart)])
    work = Bars(
        title=f"Kinds of work, and how long the device is idle, in the profiled step of {names[0]}",
        bars=[Bar(name="work", parts=parts_ms(profiles[0]))],
        styles=STYLES,
        unit="ms",
    )
    return replace(glance, bars=[*glance.bars, work])


def _with_memory(glance: Glance, entries: Sequence[MemoryEntry]) -> Glance:
    """Bars of what the peaks consist of, and whether categories agree with the allocator."""
    bars = [Bars.of(chart) for chart in peak_charts(entries)]
    if not bars:
        title, peak = "What the peak consists of", peak_bar("peak", entries[0])
        bars = [Bars(title=title, bars=[peak], styles=CATEGORIES, unit="GiB")]
    moments = [moment for entry in entries for moment in entry.profile.boundaries]
    wrong = check_words(moments)
    doubts = [wrong] if wrong else []
    return replace(glance, bars=bars, doubts=[*glance.doubts, *doubts])


def _tiles(rows: Sequence[StepResult], note: str) -> list[Tile]:
    """Step, throughput, utilisation and memory, as ranges; of one configuration the step with
    its deviation.
    """
    step = _range(rows, "step_mean_ms", words.milliseconds)
    peak = _range(rows, "peak_allocated_gib", lambda gib: f"{words.significant(gib, 3)} GiB")
    spread = f"{len(_timed(rows))} of {counted(len(rows), 'configuration')}"
    if len(rows) == 1 and rows[0].step_mean_ms is not None and rows[0].step_std_ms is not None:
        step = f"{words.mean_and_std(rows[0].step_mean_ms, rows[0].step_std_ms)} ms"
        spread = "mean ± standard deviation"
    tiles = [
        Tile("step", step, note or spread),
        Tile("tokens/s", _range(rows, "tokens_per_s", three_digits), "in a step over its time"),
        Tile("MFU", _range(rows, "mfu", words.percent_of), "model FLOPs, of the data sheet's peak"),
        Tile("peak of memory", peak, "allocated at most"),
    ]
    return [tile for tile in tiles if tile.value]


def _range(rows: Sequence[StepResult], key: str, text: Callable[[float], str]) -> str:
    """The least and the largest value under the key, the unit once; empty without any."""
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return ""
    low, high = text(min(values)), text(max(values))
    if low == high:
        return low
    number, space, unit = low.partition(" ")
    return f"{number if high.endswith(f'{space}{unit}') else low} to {high}"


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
