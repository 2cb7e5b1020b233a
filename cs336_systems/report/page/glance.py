"""The first screen of a page: the headline, and of runs what their memory, their profiles or their
times show.

The headline answers the command's question from all rows, failed ones too. It takes two lines at
most: it names the extremes, and a row that stands alone. What stands below names others.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from ...analysis.kernels.step_profile import Work
from ...analysis.loop_times import loop_sentences
from ...analysis.warnings import DOUBTFUL, in_doubt
from ...config import CompileMode, Mode, Profiler
from ...record import WarningCode
from ...studies.operators import Version
from ...text import counted
from ..columns import three_digits
from ..compared import Compared
from ..configurations import step_results
from ..quantities import StepResult
from ..results import Results
from ..section import Finding, Section, all_tables, labels, short_labels
from ..sections.kernels.bars import configuration_chart
from ..sections.kernels.entry import Explained
from ..sections.kernels.findings import findings as kernel_findings
from ..sections.kernels.limits import Limit, limit_of
from ..sections.kernels.tables import phase_rows
from ..sections.ladder import RungResult
from ..sections.ladder import findings as ladder_findings
from ..sections.memory.bars import peak_charts
from ..sections.memory.entry import MemoryEntry
from ..sections.memory.findings import findings as memory_findings
from ..sections.memory.words import check_words, size
from ..sections.steps import BY_PHASE, PARTS, PHASES, phase_bars
from ..words import DOUBT, GIB, NamedRows, milliseconds, percent_of, significant
from .blocks import Bars, Glance, Tile, bars_of
from .directory import Directory
from .file_glance import bars_of_peak, bars_of_work, first_sentence, glance_of_file

MAX_SLOWDOWN = 0.10
"""A profiler that makes a step longer by more than this share puts what it says of the step in
doubt.
"""


Headline: TypeAlias = tuple[str, str]
"""The answer in a sentence, and more that it needs."""
Rows: TypeAlias = Sequence[Mapping[str, Any]]
LIMITED = f"Limited by {Limit.LAUNCHES}"


def headline_of(directory: Directory, rows: Sequence[StepResult]) -> Headline:
    """The headline of the directory's page; the rows are those of its runs."""
    if directory.study is not None:
        answer, more = OF_STUDIES[directory.study.subject](directory.study.sections)
        return answer, " ".join(filter(None, [*directory.study.caveats, more]))
    if directory.rungs:
        return of_ladder(directory.rungs)
    if directory.compared is not None:
        return of_comparison(directory.compared)
    results = directory.results
    if results is not None and directory.subject == "memory":
        return of_memory(results.memory, rows)
    if results is not None and results.kernels:
        return of_profiles(results.kernels, rows)
    return of_steps(rows)


def glance_at(directory: Directory) -> Glance:
    """The first screen of the directory's page."""
    results = directory.results
    if results is not None and results.is_of_file:
        return glance_of_file(results)
    if results is None or directory.rungs:
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
        moments = chain.from_iterable(entry.profile.boundaries for entry in results.memory)
        if wrong := check_words(moments):
            doubts.append(wrong)
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
    """A sentence on how runs under a profiler failed, if the headline is about runs without one."""
    profiled = [
        record for record in results.records if record.subject.profiler is not Profiler.NONE
    ]
    rows = [{"status": record.status} for record in profiled]
    failures = NamedRows(rows, [record.subject.label for record in profiled]).failures()
    if failures and results.published:
        yield f"Under the profiler: {failures.removeprefix('; ')}."


def times_of(results: Results) -> Sequence[StepResult]:
    """The results whose step times the page shows: those without a profiler; if there are none,
    those under a profiler of kernels, else those of memory.
    """
    if results.published:
        return results.configurations
    of_kernels = [
        record for record in results.records if record.subject.profiler is not Profiler.MEMORY
    ]
    return step_results(of_kernels or results.records, results.ceilings)


def _slowdown(entries: Sequence[Explained]) -> Iterator[str]:
    """A sentence that the profiler made a step much longer, if it did so in some profile."""
    # the last row of each profile is that of the whole step
    of_steps = [list(phase_rows(entry))[-1] for entry in entries]
    slowest = max(row["slowdown"] or 1.0 for row in of_steps)
    if slowest > 1 + MAX_SLOWDOWN:
        yield (
            f"The profiler made a step up to {significant(slowest, 3)} times as long as it "
            "is without."
        )


def _bars_of_work(by_phase: Sequence[Bars], entries: Sequence[Explained]) -> list[Bars]:
    """Bars of a profiled step by kind of work, beside idle time. With one profile they follow the
    bars `by_phase`; with several they replace them.
    """
    names = labels(entries)
    profiles = [entry.profile for entry in entries]
    chart = configuration_chart(list(zip(names, profiles, strict=True)))
    if chart is not None:
        return bars_of(chart)
    return [*by_phase, bars_of_work(profiles[0], f"the profiled step of {names[0]}")]


def _bars_of_peaks(entries: Sequence[MemoryEntry]) -> list[Bars]:
    """Bars of what each peak of memory consists of, by category."""
    for chart in peak_charts(entries):
        return bars_of(chart)
    return [bars_of_peak(entries[0])]


def _tiles(rows: Sequence[StepResult], note: str) -> Iterator[Tile]:
    """The page's tiles: step time, throughput, utilisation and memory, as ranges over all
    configurations. A single configuration has its step time with standard deviation.
    """
    spread = note or f"{len(_timed(rows))} of {counted(len(rows), 'configuration')}"
    if len(rows) == 1 and not note and rows[0].step_std_ms is not None:
        spread = "mean ± standard deviation"
    for name, entry, about in (
        ("step", StepResult.step_mean_ms, spread),
        ("tokens/s", StepResult.tokens_per_s, "in a step over its time"),
        ("MFU", StepResult.mfu, "model FLOPs, of the data sheet's peak"),
        ("peak of memory", StepResult.peak_allocated_gib, "allocated at most"),
    ):
        text = NamedRows(rows).range(entry.key, entry.written)
        if len(rows) == 1:
            text = entry.cell(rows[0])
        number = sum(row[entry.key] is not None for row in rows)
        part = "" if number == len(_timed(rows)) else f", of {number} of {len(rows)}"
        if text:
            yield Tile(name, f"{text} {entry.unit}".strip(), f"{about}{part}")


def _doubts(rows: Sequence[StepResult]) -> Iterator[str]:
    """A sentence on how many step times are in doubt, and because of which warnings."""
    timed = _timed(rows)
    number = sum(in_doubt(row.codes) for row in timed)
    if not number:
        return
    counts = Counter[str]()
    for row in timed:
        counts.update(code for code in row.codes if code in DOUBTFUL)
    if len(timed) == 1:
        yield f"The time is in doubt: {', '.join(counts)}."
        return
    reasons = ", ".join(f"{code} in {count}" for code, count in counts.most_common())
    several = ", some in several ways" if counts.total() > number else ""
    yield f"{number} of {len(timed)} times are in doubt ({DOUBT}){several}: {reasons}."


def _timed(rows: Sequence[StepResult]) -> list[StepResult]:
    """The results that have a time of a step."""
    return [row for row in rows if row.step_mean_ms is not None]


def _steady(rows: Sequence[StepResult]) -> str:
    """A sentence that no step time is in doubt, with the largest standard deviation; empty without
    times.
    """
    if not _timed(rows):
        return ""
    text = "No warning puts a time in doubt"
    spreads = [row.step_cv for row in rows if row.step_cv is not None]
    if spreads:
        largest = percent_of(max(spreads))
        text += f"; the standard deviation is at most {largest} of the step"
    return f"{text}."


def of_steps(results: Sequence[StepResult]) -> Headline:
    """Headline of a sweep: how long a step takes, how many runs failed and how, and how many steps
    kernel launches limit.
    """
    told = NamedRows(results, short_labels(results))
    times = told.range("step_mean_ms", milliseconds)
    text = "No step has a time"
    if times and len(results) == 1:
        (result,) = results
        parts = []
        for phase in PHASES:
            if part_ms := result.part_ms(phase):
                parts.append(f"{phase} {percent_of(part_ms, result['step_mean_ms'])}")
        text = ": ".join(filter(None, [f"A step takes {times}", ", ".join(parts)]))
    elif times:
        text = f"A step takes {times} {told.part('step_mean_ms')}"
    late = []
    for place, result in enumerate(results):
        if WarningCode.LAUNCH_BOUND in result.codes:
            late.append(place)
    more = f"{told.count(LIMITED, late)}." if late else ""
    configs = [results[index].config for index in late]
    if late and all(config and config.compile is CompileMode.NONE for config in configs):
        more += " Try --compile there."
    if len(results) == 1 and results[0].done:
        of_loop = loop_sentences(results[0].done[-1])
        sentences = [f"{text[0].upper()}{text[1:]}." for text in of_loop]
        more = " ".join([more, *sentences]).strip()
    return f"{text}{told.failures()}.", more


def of_profiles(entries: Sequence[Explained], results: Sequence[StepResult]) -> Headline:
    """Headline of kernel profiles: what limits the profiled steps, how busy the GPU is, and how
    long steps take.
    """
    has_failed = any(result.failed for result in results)
    if len(entries) == 1 and len(results) <= 1 and not has_failed:
        return _of_first(kernel_findings(entries[0]))
    steps, more = of_steps(results)
    if any(entry.profile.work is Work.OPERATORS for entry in entries):
        return steps, more  # on a CPU nothing else can be the limit
    spans = [entry.span() for entry in entries]
    busy_shares = [{"busy_share": span.busy_share} for span in spans]
    told = NamedRows(busy_shares, short_labels(entries))
    limits = told.counts(_limit_in_words(entry) for entry in entries)
    what = f"{len(entries)} profiled steps"
    if len(entries) == 1:
        what = f"The profiled step of {labels(entries)[0]}"
    num_profiled = sum(not span.by_clock for span in spans)
    under = ", under the profiler" if num_profiled else ""
    if 0 < num_profiled < len(entries):
        under += f" in {num_profiled} of them"
    ends = NamedRows(results, short_labels(results)).failures() if len(results) > 1 else ""
    busy = f"The GPU is busy {told.range('busy_share', percent_of)} of the step{under}."
    text = f"{what}: {', '.join(limits)}{ends}."
    return text, f"{busy} {steps.removesuffix(f'{ends}.')}. {more}".strip()


def _limit_in_words(entry: Explained) -> str:
    """What limits the step."""
    limit = limit_of(entry)
    if limit in (None, Limit.ONE_STEP, Limit.DOUBT):
        return f"the limit is {limit or 'not known'}"
    return f"limited by {limit}"


def of_memory(entries: Sequence[MemoryEntry], results: Sequence[StepResult]) -> Headline:
    """Headline of memory profiles: the peak of memory of the runs, and which of them ran out of
    memory.
    """
    runs = NamedRows(results, short_labels(results))
    failures = runs.failures()
    are_first_steps = bool(entries) and all(map(_is_first_step, entries))
    if len(entries) == 1 and len(results) <= 1 and not failures and not are_first_steps:
        return _of_one_memory_profile(entries[0])
    text = "No run has a peak of memory"
    peaks = runs.range("peak_allocated_gib", lambda gib: size(round(gib * GIB)))
    if peaks:
        text = f"Memory peaks at {peaks} {runs.part('peak_allocated_gib')}"
    more = ""
    if are_first_steps:
        first_peaks = [{"bytes": entry.profile.peak.allocated_bytes} for entry in entries]
        first_steps = NamedRows(first_peaks, short_labels(entries))
        more = (
            f"The first step peaks at {first_steps.range('bytes', size)}: later ones hold the "
            "optimizer's state from their beginning."
        )
    return f"{text}{failures}.", more


def _is_first_step(entry: MemoryEntry) -> bool:
    """Whether the profile is of a training step without any before it."""
    config = entry.config
    return config is not None and config.warmup_steps == 0 and config.mode is Mode.TRAIN


def _of_one_memory_profile(entry: MemoryEntry) -> Headline:
    """Headline of the memory profile of a single run that did not fail."""
    text, more = _of_first(memory_findings(entry.profile))
    if more:
        return text, more
    # the sentence about the peak goes on with what the bar shows
    peak = text.partition("; ")[0]
    return f"{peak.rstrip('.')}.", ""


def of_comparison(compared: Compared) -> Headline:
    """Headline of a comparison: the verdict (for several configurations, how many have each), and
    what is compared.
    """
    answer, sides, *_ = compared.section.tables[0].findings
    return answer, sides


def of_ladder(rungs: Sequence[RungResult]) -> Headline:
    """Headline of a ladder of optimizations: the fastest rung that passed its gate, and how failed
    ones ended.
    """
    ends = NamedRows(rungs, [rung.rung for rung in rungs]).failures()
    text = "No rung passed the gate"
    if all(rung.verdict.passed is None for rung in rungs):
        text = f"The gate judged no rung: {rungs[0].verdict.missing}"
    if any(rung.is_credited for rung in rungs):
        text = next(ladder_findings(rungs)).rstrip(".")
    return _with_doubt(f"{text}{ends}.")


def _with_doubt(text: str, more: str = "") -> Headline:
    """Add to the headline what the mark of doubt means, if the headline contains it."""
    if DOUBT in f"{text}{more}":
        more = f"{more} {DOUBT} marks what follows from times that are in doubt.".strip()
    return text, more


_REACHING = {
    "product": "Matrix multiplications reach",
    "memory": "Passes over memory reach",
    "bus": "Collectives reach a bus bandwidth of",
}
"""The kinds of ceilings, by the last words of their names."""


def of_ceilings(sections: Sequence[Section]) -> Headline:
    """Headline of the study of ceilings: rates of matmuls, of passes over memory and of
    collectives; how failed cells ended; and times of launches.
    """
    rows = sections[0].rows
    cells = list(chain.from_iterable(section.rows for section in sections[1:]))
    ends = NamedRows(cells).failures()
    reached: dict[str, tuple[list[Mapping[str, Any]], list[str]]] = {}
    times = []
    for row in rows:
        ceiling, unit = row["ceiling"], row["unit"]
        if not unit.endswith("/s"):
            times.append(_measured([row], [ceiling]))
            continue
        name, _, kind = ceiling.replace("(", "").replace(")", "").rpartition(" ")
        of_kind, names = reached.setdefault(kind, ([], []))
        of_kind.append(row)
        names.append(name)
    rates = [f"{_REACHING[kind]} {_measured(*named)}" for kind, named in reached.items()]
    if times:
        rates.append(f"Times: {', '.join(times)}")
    answer, *others = rates or ["Nothing is known"]
    return _with_doubt(f"{answer}{ends}.", " ".join(f"{other}." for other in others))


def _measured(rows: Rows, names: Sequence[str]) -> str:
    """The least and the largest measured rate of these ceilings, which share one unit, as text."""
    write = f"{{:,.4g}} {rows[0]['unit']}".format
    return NamedRows(rows, names).range("measured", write, "is_doubted")


def of_attention(sections: Sequence[Section]) -> Headline:
    """Headline of the study of attention: shortest and longest time at the largest shape of each
    precision, and how failed cells ended.
    """
    rows, key = sections[0].rows, "together_mean_ms"
    timed: dict[str, dict[tuple[int, int], list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row[key] is not None:
            shapes = timed.setdefault(row["precision"], {})
            shapes.setdefault((row["context_length"], row["d_head"]), []).append(row)
    ranges, largest_shapes = [], []
    for precision, shapes in timed.items():
        context, d_head = largest = max(shapes)
        times = _implementations(shapes[largest]).range(key, milliseconds, "together_is_doubted")
        ranges.append(f"{times} in {precision}")
        largest_shapes.append(f"context {context}, d_head {d_head} in {precision}")
    known = ", ".join(ranges) or "no known time"
    more = ""
    if largest_shapes:
        more = f"The largest shape that was timed: {'; '.join(largest_shapes)}."
    ends = _implementations(rows).failures()
    return _with_doubt(f"At the largest shape forward and backward take {known}{ends}.", more)


def _implementations(rows: Rows) -> NamedRows:
    """Cells of the study of attention, named by their implementations."""
    return NamedRows(rows, [row["implementation"] for row in rows])


def of_fusion(sections: Sequence[Section]) -> Headline:
    """Headline of the study of fusion: least and largest speed-up of fused operations, and how
    failed cells ended.
    """
    rows = sections[0].rows
    gains = _operations([row for row in rows if row["version"] is not Version.EAGER])
    known = gains.range("speed_up", three_digits, "speed_up_is_doubted")
    ends = _operations(rows).failures()
    return _with_doubt(
        f"Fused operations are {known or 'an unknown number of'} times as fast as written out"
        f"{ends}."
    )


def _operations(rows: Rows) -> NamedRows:
    """Cells of the study of fusion with their names."""
    name = "{op} {version} {phase} {precision}"
    return NamedRows(rows, [name.format_map(row) for row in rows])


def of_precision(sections: Sequence[Section]) -> Headline:
    """Headline of the study of precision: which quantities are in fp32 in every row."""
    findings = chain.from_iterable(table.findings for table in all_tables(sections))
    return next(findings), ""


OF_STUDIES: Mapping[str, Callable[[Sequence[Section]], Headline]] = {
    "ceilings": of_ceilings,
    "attention": of_attention,
    "fusion": of_fusion,
    "precision": of_precision,
}
"""The function of each kind of study."""


def _of_first(findings: Sequence[Finding]) -> Headline:
    """The first sentence of the first finding, and the rest of it."""
    return first_sentence(findings[0].text if findings else "")
