"""The headline of a page: it answers the command's question from all rows, failed ones too; a
function for each kind.

A headline takes two lines at most: it names the extremes, and a row that stands alone. What stands
below names others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..analysis.kernels.step_profile import Work
from ..config import CompileMode, Mode
from ..record import Status, WarningCode
from ..studies.operators import Version
from ..text import counted
from .columns import column, three_digits
from .compared import Compared
from .identity import names_of
from .quantities import StepResult
from .section import Section, labels
from .sections.kernels.entry import Explained
from .sections.kernels.findings import findings as kernel_findings
from .sections.kernels.limits import Limit, limit_of
from .sections.ladder import RungResult
from .sections.ladder import findings as ladder_findings
from .sections.memory.entry import MemoryEntry
from .sections.memory.findings import findings as memory_findings
from .sections.memory.words import size
from .sections.steps import PHASES
from .words import DOUBT, GIB, between, milliseconds, percent_of, status_text

Headline: TypeAlias = tuple[str, str]
"""The answer in a sentence, and more that it needs."""
LIMITED = f"Limited by {Limit.LAUNCHES}"


class NamedRows:
    """Rows of results, each with a name if these are short, and what a sentence says of all of
    them.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> None:
        self.rows, self.names = rows, names

    def range(
        self,
        key: str,
        text: Callable[[float], str],
        chosen: Sequence[int] | None = None,
        doubt: str = "",
    ) -> str:
        """The least and the largest value under the key in the chosen rows, or in all; empty if
        none has one.

        A value is marked where its row says under the key `doubt` that it is in doubt.
        """
        indices = range(len(self.rows)) if chosen is None else chosen
        known = [index for index in indices if self.rows[index][key] is not None]
        if not known:
            return ""
        known.sort(key=lambda index: self.rows[index][key])
        low, high = (self._marked(known[end], key, text, doubt) for end in (0, -1))
        if len(self.rows) == 1 or (low == high and len(known) > 1):
            return low
        least = f"{low} ({self.names[known[0]]})"
        return least if len(known) == 1 else f"{least} to {high} ({self.names[known[-1]]})"

    def _marked(self, index: int, key: str, text: Callable[[float], str], doubt: str) -> str:
        row = self.rows[index]
        words = text(float(row[key]))
        return f"{words} {DOUBT}" if row.get(doubt) else words

    def count(self, what: str, chosen: Sequence[int]) -> str:
        """In how many of the rows this is so, and in which, if in one: `out of memory in 1 of 3
        (xl ctx 512)`.
        """
        if len(self.rows) == 1:
            return what
        name = f" ({self.names[chosen[0]]})" if self.names and len(chosen) == 1 else ""
        return f"{what} in {len(chosen)} of {len(self.rows)}{name}"

    def counts(self, key: str) -> Iterator[str]:
        """Each value under the key but `ok`, in words, and in how many rows it is."""
        indices: dict[Any, list[int]] = {}
        for index, row in enumerate(self.rows):
            indices.setdefault(row[key], []).append(index)
        indices.pop(Status.OK, None)
        for value, chosen in indices.items():
            what = str(value)
            if key == "status":
                what = "not run" if value is None else status_text(value)
            yield self.count(what, chosen)

    def failures(self) -> str:
        """How the rows that did not end well ended, after semicolons."""
        return "".join(f"; {told}" for told in self.counts("status"))

    def part(self, key: str) -> str:
        """In how many of the rows something is known: `in 2 of 3 configurations`."""
        whole = counted(len(self.rows), "configuration")
        number = sum(row[key] is not None for row in self.rows)
        return f"in {whole}" if number == len(self.rows) else f"in {number} of {whole}"


def _named(results: Sequence[StepResult]) -> NamedRows:
    return NamedRows(results, names_of([result.identity for result in results]))


def of_steps(results: Sequence[StepResult]) -> Headline:
    """How long a step takes, how many steps launches limit, and how the other runs failed."""
    told = _named(results)
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
        return _first_sentence([finding.text for finding in kernel_findings(entries[0])])
    steps, more = of_steps(results)
    if any(entry.profile.work is Work.OPERATORS for entry in entries):
        return steps, more  # on a CPU nothing else can be the limit
    limits = [
        {"limit": limit_of(entry) or "not known", "busy_share": entry.span().busy_share}
        for entry in entries
    ]
    told = NamedRows(limits, labels(entries))
    what = f"{len(entries)} profiled steps"
    if len(entries) == 1:
        what = f"the profiled step of {told.names[0]}"
    num_profiled = sum(not entry.span().by_clock for entry in entries)
    under = ", under the profiler" if num_profiled else ""
    if 0 < num_profiled < len(entries):
        under += f" in {num_profiled} of them"
    ends = _named(results).failures() if len(results) > 1 else ""
    busy = f"The GPU is busy {told.range('busy_share', percent_of)} of the step{under}."
    text = f"What limits {what}: {', '.join(told.counts('limit'))}{ends}."
    return text, f"{busy} {steps.removesuffix(f'{ends}.')}. {more}".strip()


def of_memory(entries: Sequence[MemoryEntry], results: Sequence[StepResult]) -> Headline:
    """How much memory the runs need, and which ran out of it."""
    told = _named(results)
    peaks = told.range("peak_allocated_gib", lambda gib: size(round(gib * GIB)))
    ends = told.failures()
    is_first_step = bool(entries) and all(
        entry.config is not None
        and entry.config.warmup_steps == 0
        and entry.config.mode is Mode.TRAIN
        for entry in entries
    )
    if len(entries) == 1 and len(results) <= 1 and not ends and not is_first_step:
        text, more = _first_sentence(
            [finding.text for finding in memory_findings(entries[0].profile)]
        )
        # the sentence about the peak goes on with what the bar shows
        return (text, more) if more else (f"{text.partition('; ')[0].rstrip('.')}.", "")
    text = "No run has a peak of memory"
    if peaks:
        text = f"Memory peaks at {peaks} {told.part('peak_allocated_gib')}"
    more = ""
    if is_first_step:
        recorded = [float(entry.profile.peak.allocated_bytes) for entry in entries]
        of_first_steps = dict(zip(labels(entries), recorded, strict=True))
        at_first = between(of_first_steps, lambda value: size(round(value)))
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
    names: list[str] = []
    rates: dict[str, list[int]] = {}
    launches: list[int] = []
    for index, row in enumerate(rows):
        ceiling = str(row["ceiling"])
        if not str(row["unit"]).endswith("/s"):
            names.append(ceiling)
            launches.append(index)
            continue
        name, _, kind = ceiling.replace("(", "").replace(")", "").rpartition(" ")
        names.append(name)
        rates.setdefault(kind, []).append(index)
    told = NamedRows(rows, names)

    def measured(chosen: Sequence[int]) -> str:
        write = f"{{:,.4g}} {rows[chosen[0]]['unit']}".format
        return told.range("measured", write, chosen, "is_doubted")

    reached = ", ".join(f"{kind} {measured(chosen)}" for kind, chosen in rates.items())
    times = ", ".join(measured([index]) for index in launches)
    text = f"Reached: {reached or 'nothing that is known'}{ends}."
    return _with_doubt(text, f"Times: {times}." if times else "")


def of_attention(sections: Sequence[Section]) -> Headline:
    """The shortest and the longest time at the largest shape of each precision, and how the
    other cells ended.
    """
    rows, key = sections[0].rows, "together_mean_ms"
    told = NamedRows(rows, [str(row["implementation"]) for row in rows])
    timed: dict[Any, dict[tuple[Any, Any], list[int]]] = {}
    for index, row in enumerate(rows):
        if row[key] is not None:
            shapes = timed.setdefault(row["precision"], {})
            shapes.setdefault((row["context_length"], row["d_head"]), []).append(index)
    ranges, largest_shapes = [], []
    for precision, shapes in timed.items():
        context, d_head = largest = max(shapes)
        times = told.range(key, milliseconds, shapes[largest], "together_is_doubted")
        ranges.append(f"{times} in {precision}")
        largest_shapes.append(f"context {context}, d_head {d_head} in {precision}")
    known = ", ".join(ranges) or "no known time"
    more = ""
    if largest_shapes:
        more = f"The largest shape that was timed: {'; '.join(largest_shapes)}."
    text = f"Forward and backward take at the largest shape {known}{told.failures()}."
    return _with_doubt(text, more)


def of_fusion(sections: Sequence[Section]) -> Headline:
    """The least and the largest gain of fused operations, and how the other cells ended."""
    rows = sections[0].rows
    told = NamedRows(
        rows, [f"{row['op']} {row['version']} {row['phase']} {row['precision']}" for row in rows]
    )
    fused = [index for index, row in enumerate(rows) if row["version"] is not Version.EAGER]
    gains = told.range("speed_up", three_digits, fused, "speed_up_is_doubted")
    known = gains or "an unknown number of"
    return _with_doubt(
        f"Fused operations are {known} times as fast as written out{told.failures()}."
    )


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
