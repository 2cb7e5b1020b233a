"""The headline of a page: it answers the command's question from all rows, failed ones too; a
function for each kind.

A headline takes two lines at most: it names the extremes, and a row that stands alone. What stands
below names others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ..analysis.kernels.step_profile import Work
from ..config import CompileMode, Mode
from ..record import WarningCode
from ..studies.operators import Version
from .columns import column, three_digits
from .compared import Compared
from .quantities import StepResult
from .section import Section, distinct_labels, labels
from .sections.kernels.entry import Explained
from .sections.kernels.findings import Limit, limit_of
from .sections.kernels.findings import findings as kernel_findings
from .sections.ladder import RungResult
from .sections.ladder import findings as ladder_findings
from .sections.memory.entry import MemoryEntry
from .sections.memory.findings import findings as memory_findings
from .sections.memory.words import size
from .sections.steps import PHASES
from .words import DOUBT, GIB, NamedRows, milliseconds, percent_of

Headline: TypeAlias = tuple[str, str]
"""The answer in a sentence, and more that it needs."""
Rows: TypeAlias = Sequence[Mapping[str, Any]]
LIMITED = f"Limited by {Limit.LAUNCHES}"


def of_steps(results: Sequence[StepResult]) -> Headline:
    """How long a step takes, how many steps launches limit, and how the other runs failed."""
    told = NamedRows(results, distinct_labels(results))
    times = told.range("step_mean_ms", milliseconds)
    text = "No step has a time"
    if times and len(results) == 1:
        (result,) = results
        parts = [
            f"{column(key).name} {percent_of(result[key], result['step_mean_ms'])}"
            for key in PHASES
            if result[key]
        ]
        text = f"A step takes {times}: {', '.join(parts)}"
    elif times:
        text = f"A step takes {times} {told.part('step_mean_ms')}"
    late = [n for n, result in enumerate(results) if WarningCode.LAUNCH_BOUND in result.codes]
    more = f"{told.count(LIMITED, late)}." if late else ""
    configs = [results[index].config for index in late]
    if late and all(config and config.compile is CompileMode.NONE for config in configs):
        more += " Try --compile there."
    return f"{text}{told.failures()}.", more


def of_profiles(entries: Sequence[Explained], results: Sequence[StepResult]) -> Headline:
    """What limits the profiled steps, then how busy their GPU is, and how long the steps of all
    results take.
    """
    if len(entries) == 1 and len(results) <= 1 and not any(result.failed for result in results):
        return _first_sentence(kernel_findings(entries[0]))
    steps, more = of_steps(results)
    if any(entry.profile.work is Work.OPERATORS for entry in entries):
        return steps, more  # on a CPU nothing else can be the limit
    spans = [entry.span() for entry in entries]
    busy_shares = [{"busy_share": span.busy_share} for span in spans]
    told = NamedRows(busy_shares, distinct_labels(entries))
    limits = told.counts(limit_of(entry) or "not known" for entry in entries)
    what = f"{len(entries)} profiled steps"
    if len(entries) == 1:
        what = f"the profiled step of {labels(entries)[0]}"
    num_profiled = sum(not span.by_clock for span in spans)
    under = ", under the profiler" if num_profiled else ""
    if 0 < num_profiled < len(entries):
        under += f" in {num_profiled} of them"
    ends = NamedRows(results, distinct_labels(results)).failures() if len(results) > 1 else ""
    busy = f"The GPU is busy {told.range('busy_share', percent_of)} of the step{under}."
    text = f"What limits {what}: {', '.join(limits)}{ends}."
    return text, f"{busy} {steps.removesuffix(f'{ends}.')}. {more}".strip()


def of_memory(entries: Sequence[MemoryEntry], results: Sequence[StepResult]) -> Headline:
    """How much memory the runs need, and which ran out of it."""
    told = NamedRows(results, distinct_labels(results))
    peaks = told.range("peak_allocated_gib", lambda gib: size(round(gib * GIB)))
    ends = told.failures()
    is_first_step = bool(entries) and all(
        entry.config is not None
        and entry.config.warmup_steps == 0
        and entry.config.mode is Mode.TRAIN
        for entry in entries
    )
    if len(entries) == 1 and len(results) <= 1 and not ends and not is_first_step:
        text, more = _first_sentence(memory_findings(entries[0].profile))
        # the sentence about the peak goes on with what the bar shows
        return (text, more) if more else (f"{text.partition('; ')[0].rstrip('.')}.", "")
    text = "No run has a peak of memory"
    if peaks:
        text = f"Memory peaks at {peaks} {told.part('peak_allocated_gib')}"
    more = ""
    if is_first_step:
        first_steps = [{"bytes": entry.profile.peak.allocated_bytes} for entry in entries]
        told_first = NamedRows(first_steps, distinct_labels(entries))
        at_first = told_first.range("bytes", size)
        more = (
            f"The first step peaks at {at_first}: later ones hold the optimizer's state from "
            "their beginning."
        )
    return f"{text}{ends}.", more


def of_comparison(compared: Compared) -> Headline:
    """The verdict, or how many configurations have each, and what is compared."""
    answer, sides, *_ = compared.section.tables[0].findings
    return answer, sides


def of_ladder(rungs: Sequence[RungResult]) -> Headline:
    """The fastest rung that passed the gate, and how the others ended."""
    ends = NamedRows(rungs, [rung.rung for rung in rungs]).failures()
    text = "No rung passed the gate"
    if any(rung.is_credited for rung in rungs):
        text = next(ladder_findings(rungs)).rstrip(".")
    return _with_doubt(f"{text}{ends}.")


def _with_doubt(text: str, more: str = "") -> Headline:
    """The headline, which explains the mark of doubt if it has one."""
    if DOUBT in f"{text}{more}":
        more = f"{more} {DOUBT} marks what follows from times that are in doubt.".strip()
    return text, more


def of_ceilings(sections: Sequence[Section]) -> Headline:
    """The ranges over products, passes over memory and collectives, how other cells ended, and
    times of launches.
    """
    rows = sections[0].rows
    ends = NamedRows([row for section in sections[1:] for row in section.rows]).failures()
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
    rates = [f"{kind} {_measured(*named)}" for kind, named in reached.items()]
    text = f"Reached: {', '.join(rates) or 'nothing that is known'}{ends}."
    return _with_doubt(text, f"Times: {', '.join(times)}." if times else "")


def _measured(rows: Rows, names: Sequence[str]) -> str:
    """The least and the largest of these ceilings, which have one unit."""
    write = f"{{:,.4g}} {rows[0]['unit']}".format
    return NamedRows(rows, names).range("measured", write, "is_doubted")


def of_attention(sections: Sequence[Section]) -> Headline:
    """The shortest and the longest time at the largest shape of each precision, and how the
    other cells ended.
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
    return _with_doubt(f"Forward and backward take at the largest shape {known}{ends}.", more)


def _implementations(rows: Rows) -> NamedRows:
    """Cells of the study of attention, named by their implementations."""
    return NamedRows(rows, [row["implementation"] for row in rows])


def of_fusion(sections: Sequence[Section]) -> Headline:
    """The least and the largest gain of fused operations, and how the other cells ended."""
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
    keys = ("op", "version", "phase", "precision")
    return NamedRows(rows, [" ".join(str(row[key]) for key in keys) for row in rows])


def of_precision(sections: Sequence[Section]) -> Headline:
    """What is in fp32 in all rows."""
    tables = [table for section in sections for table in section.tables if table.findings]
    return tables[0].findings[0], ""


OF_STUDIES: Mapping[str, Callable[[Sequence[Section]], Headline]] = {
    "ceilings": of_ceilings,
    "attention": of_attention,
    "fusion": of_fusion,
    "precision": of_precision,
}
"""The function of each kind of study."""


def _first_sentence(findings: Sequence[str]) -> Headline:
    """The first sentence of the first finding, and the rest of it."""
    if not findings:
        return "Nothing stands out.", ""
    head, dot, rest = findings[0].partition(". ")
    return f"{head}{dot.strip()}", rest
