"""The first screen of a page: the answer in a sentence, bars of what a step consists of, tiles, and what is in doubt.

Sentences are the first findings of their subjects, and numbers those of the frame.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import Work
from cs336_systems.analysis.warnings import DOUBTFUL, in_doubt
from cs336_systems.config import Phase, Profiler
from cs336_systems.record import WarningCode
from cs336_systems.report.columns import Row
from cs336_systems.report.entries import labels
from cs336_systems.report.frame import codes_of, rows_of, to_frame
from cs336_systems.report.identity import by_name
from cs336_systems.report.page.write import Bars, Glance, Tile
from cs336_systems.report.plots.charts import CATEGORY_COLOURS, Bar, Style
from cs336_systems.report.plots.steps import BY_PHASE, PARTS, REST, phase_bars
from cs336_systems.report.results import Results
from cs336_systems.report.section import Table
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.kernels.findings import findings as kernel_findings
from cs336_systems.report.sections.kernels.findings import is_launch_bound
from cs336_systems.report.sections.kernels.plots import STYLES, configuration_chart, parts_ms
from cs336_systems.report.sections.kernels.tables import phase_rows
from cs336_systems.report.sections.ladder import MAX_SLOWDOWN
from cs336_systems.report.sections.memory.findings import MemoryEntry, by_category, check_words, difference_bytes, size
from cs336_systems.report.sections.memory.findings import findings as memory_findings
from cs336_systems.report.sections.memory.plots import peak_charts
from cs336_systems.report.words import (
    GIB,
    between,
    mean_and_std,
    milliseconds,
    percent_of,
    significant,
)
from cs336_systems.text import counted

MOST_NAMED = 4
"""Most configurations that the answer names."""
WHERE = {LaunchPhase.LOSS: str(Phase.FORWARD), LaunchPhase.UNATTRIBUTED: REST}
"""Names of phases of launches, if not their own."""
CATEGORIES = {str(category): Style(colour=colour) for category, colour in CATEGORY_COLOURS.items()}


def glance_at(results: Results) -> Glance:
    """The first screen of the runs of a directory: of their memory, else of their profiles, else of their times."""
    if results.memory:
        return _of_memory(results.memory)
    return _of_profiles(results) if results.kernels else _of_steps(_times(results))


def glance_of(tables: Iterable[Table]) -> Glance | None:
    """The first screen of other results: their first finding; None if they have none."""
    told = [text for table in tables for text in table.findings]
    return Glance(answer=told[0]) if told else None


def _times(results: Results) -> list[Row]:
    """The configurations without a profiler; if all runs were under one, those of kernels with their times under it."""
    profiled = [own for own in results.records if own.config.profiler is not Profiler.MEMORY]
    return rows_of(results.frame if results.published else to_frame(profiled, results.ceilings))


def _of_steps(rows: Sequence[Row]) -> Glance:
    timed = [row for row in rows if row["step_mean_ms"]]
    bars = Bars(title=BY_PHASE, bars=phase_bars(rows), styles=PARTS, unit="ms")
    if len(timed) > 1:
        answer = f"A step takes {between(by_name(timed, itemgetter('step_mean_ms')), milliseconds)}."
    elif timed:
        bar = next(bar for bar in bars.bars if bar.parts)
        parts = ", ".join(f"{name} {percent_of(value, bar.length)}" for name, value in bar.parts.items())
        limit = "; the CPU limits it" if WarningCode.LAUNCH_BOUND in codes_of(timed[0]) else ""
        answer = f"A step takes {milliseconds(timed[0]['step_mean_ms'])}: {parts}{limit}."
    else:
        answer = f"No step has a time: {', '.join(dict.fromkeys(bar.failure for bar in bars.bars))}."
    return Glance(answer=answer, bars=[bars], tiles=_tiles(rows), doubts=_doubts(rows), trust=_steady(timed))


def _of_profiles(results: Results) -> Glance:
    entries, rows = results.kernels, _times(results)
    wanted = {entry.config.unprofiled for entry in entries}
    own = [row for row in rows if row["config"].unprofiled in wanted] or rows
    if len(entries) == 1:
        answer, more = _first_sentence(kernel_findings(entries[0].profile, entries[0].config))
    else:
        slow = [name for name, entry in zip(labels(entries), entries, strict=True) if is_launch_bound(entry.profile)]
        named = f" ({', '.join(slow[:MOST_NAMED])}{', ...' * (len(slow) > MOST_NAMED)})" if slow else ""
        answer, more = f"The CPU limits {len(slow)} of {len(entries)} profiled steps{named}.", ""
    slowed = [row for entry in entries for row in list(phase_rows(entry))[-1:] if row["slowdown"]]
    worst = max((row["slowdown"] for row in slowed), default=1.0)
    doubts = _doubts(own)
    if worst > 1 + MAX_SLOWDOWN:
        doubts.append(f"The profiler made a step up to {significant(worst, 3)} times as long as it is without.")
    note = "" if results.published else "with the profiler running"
    return Glance(
        answer=answer, more=more, bars=list(_profile_bars(entries)), tiles=_tiles(own, note), doubts=doubts,
        trust=_steady(own),
    )  # fmt: skip


def _profile_bars(entries: Sequence[Profiled]) -> Iterator[Bars]:
    """Of a single profile the phases on the device; of each profile the kinds of work, and how long it was idle."""
    chart = configuration_chart([(name, own.profile) for name, own in zip(labels(entries), entries, strict=True)])
    if chart is not None:
        yield Bars.of(chart)
        return
    (profile,), phases = [entry.profile for entry in entries], dict[str, float]()
    for phase in profile.phases:
        name = WHERE.get(phase.phase, str(phase.phase))
        phases[name] = phases.get(name, 0.0) + sum(phase.wall_s) / profile.num_steps * 1e3
    parts = {name: phases[name] for name in PARTS if phases.get(name)}
    yield Bars(title="One step by phase", bars=[Bar(name="phases", parts=parts)], styles=PARTS, unit="ms")
    on_device = profile.work is Work.KERNELS
    title = "by kind of work on the GPU, and how long it is idle" if on_device else "by kind of operator"
    yield Bars(title=title, bars=[Bar(name="work", parts=parts_ms(profile))], styles=STYLES, unit="ms")


def _of_memory(entries: Sequence[MemoryEntry]) -> Glance:
    named = labels(entries) if all(entry.config for entry in entries) else [entry.profile.source for entry in entries]
    peaks = {name: float(entry.profile.peak.allocated_bytes) for name, entry in zip(named, entries, strict=True)}
    if len(entries) == 1:
        answer, more = _first_sentence(memory_findings(entries[0].profile))
        if not more:  # the sentence about the peak goes on with what the bar shows
            answer = f"{answer.partition('; ')[0].rstrip('.')}."
    else:
        answer, more = f"Memory peaks at {between(peaks, lambda value: size(round(value)))}.", ""
    charts = peak_charts(entries)
    parts = {
        str(part): num_bytes / GIB for part, num_bytes in by_category(entries[0].profile.peak).items() if num_bytes
    }
    of_one = Bars(
        title="What the peak consists of", bars=[Bar(name="peak", parts=parts)], styles=CATEGORIES, unit="GiB"
    )
    moments = [moment for entry in entries for moment in entry.profile.boundaries]
    checked = check_words(moments) if moments else ""
    off = [text for text in (checked,) if any(map(difference_bytes, moments))]
    where = ", ".join(dict.fromkeys(entry.profile.peak.phase for entry in entries if entry.profile.peak.phase))
    tiles = [
        Tile("peak", _bytes(entry.profile.peak.allocated_bytes for entry in entries), where and f"in {where}"),
        Tile("predicted peak", _bytes(entry.predicted_peak_bytes for entry in entries), "foretold without running"),
        Tile("reserved", _bytes(entry.profile.peak_reserved_bytes for entry in entries), "held by PyTorch at most"),
        Tile("outside of PyTorch", _bytes(entry.profile.outside_bytes for entry in entries), "such as CUDA's context"),
    ]
    bars = [Bars.of(chart) for chart in charts] or [of_one]
    return Glance(answer=answer, more=more, bars=bars, tiles=tiles, doubts=off, trust=checked)


def _first_sentence(found: Sequence[str]) -> tuple[str, str]:
    """The first sentence of the first finding, and the rest of it."""
    head, dot, rest = found[0].partition(". ") if found else ("Nothing stands out.", "", "")
    return f"{head}{dot.strip()}", rest


def _tiles(rows: Sequence[Row], note: str = "") -> list[Tile]:
    """Step, throughput, utilisation and memory: with the spread of one configuration, as ranges of several."""
    step = _range(rows, "step_mean_ms", milliseconds)
    if len(rows) == 1 and rows[0]["step_mean_ms"]:
        step = f"{mean_and_std(rows[0]['step_mean_ms'], rows[0]['step_std_ms'])} ms"
    notes = note or ("mean ± standard deviation" if len(rows) == 1 else f"of {counted(len(rows), 'configuration')}")
    return [
        Tile("step", step, notes),
        Tile("tokens/s", _range(rows, "tokens_per_s", lambda value: significant(value, 3)), "in a step over its time"),
        Tile("MFU", _range(rows, "mfu", percent_of), "of the data sheet's peak"),
        Tile("peak of memory", _range(rows, "peak_allocated_gib", lambda value: f"{significant(value, 3)} GiB"),
             "allocated at most"),
    ]  # fmt: skip


def _range(rows: Sequence[Row], key: str, text: Callable[[float], str]) -> str:
    return between_two([row[key] for row in rows], text)


def between_two(values: Iterable[float | None], text: Callable[[float], str]) -> str:
    """The least and the largest value, the unit once; `unknown` without any."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    low, high = text(min(known)), text(max(known))
    number, space, unit = low.partition(" ")
    return low if low == high else f"{number if high.endswith(f'{space}{unit}') else low} to {high}"


def _bytes(values: Iterable[int | None]) -> str:
    return between_two(values, lambda value: size(round(value)))


def _doubts(rows: Sequence[Row]) -> list[str]:
    """How many times are in doubt, and by which warnings."""
    number = sum(in_doubt(codes_of(row)) for row in rows)
    counts = Counter(code for row in rows for code in codes_of(row) if code in DOUBTFUL)
    told = ", ".join(f"{code} in {count}" if len(rows) > 1 else code for code, count in counts.most_common())
    if not number:
        return []
    return [
        f"{number} of {len(rows)} times are in doubt: {told}." if len(rows) > 1 else f"The time is in doubt: {told}."
    ]


def _steady(rows: Sequence[Row]) -> str:
    spread = max((row["step_cv"] for row in rows if row["step_cv"] is not None), default=None)
    told = "" if spread is None else f"; the standard deviation is at most {percent_of(spread)} of the step"
    return f"No warning puts a time in doubt{told}."
