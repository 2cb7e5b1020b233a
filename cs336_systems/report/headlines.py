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
from .sections.kernels.findings import Limit, limit_of
from .sections.kernels.findings import findings as kernel_findings
from .sections.kernels.tables import Explained
from .sections.ladder import RungResult
from .sections.ladder import findings as ladder_findings
from .sections.memory.findings import MemoryEntry, size
from .sections.memory.findings import findings as memory_findings
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
        known = range(len(self.rows)) if chosen is None else chosen
        known = sorted(
            (i for i in known if self.rows[i][key] is not None), key=lambda i: self.rows[i][key]
        )
        if not known:
            return ""
        marked = []
        for index in (known[0], known[-1]):
            row = self.rows[index]
            mark = f" {DOUBT}" if row.get(doubt) else ""
            marked.append(text(float(row[key])) + mark)
        low, high = marked
        if len(self.rows) == 1 or (low == high and len(known) > 1):
            return low
        least = f"{low} ({self.names[known[0]]})"
        return least if len(known) == 1 else f"{least} to {high} ({self.names[known[-1]]})"

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
        for value in dict.fromkeys(row[key] for row in self.rows if row[key] != Status.OK):
            what = value if key != "status" else "not run" if value is None else status_text(value)
            yield self.count(
                str(what), [index for index, row in enumerate(self.rows) if row[key] == value]
            )

    def failures(self) -> str:
        """How the rows that did not end well ended, after semicolons."""
        return "".join(f"; {told}" for told in self.counts("status"))

    def part(self, key: str) -> str:
        """In how many of the rows something is known: `in 2 of 3 configurations`."""
        number, whole = (
            sum(row[key] is not None for row in self.rows),
            counted(len(self.rows), "configuration"),
        )
        return f"in {whole}" if number == len(self.rows) else f"in {number} of {whole}"


def of_steps(rows: Sequence[StepResult]) -> Headline:
    """How long a step takes, how many steps launches limit, and how the other runs failed."""
    told = NamedRows(rows, names_of([row.identity for row in rows]))
    times = told.range("step_mean_ms", milliseconds)
    text = f"A step takes {times} {told.part('step_mean_ms')}" if times else "No step has a time"
    if times and len(rows) == 1:
        phases = [key for key in PHASES if rows[0][key]]
        parts = [
            f"{column(key).name} {percent_of(rows[0][key], rows[0]['step_mean_ms'])}"
            for key in phases
        ]
        text = f"A step takes {times}: {', '.join(parts)}"
    late = [index for index, row in enumerate(rows) if WarningCode.LAUNCH_BOUND in row.codes]
    more = f"{told.count(LIMITED, late)}." if late else ""
    configs = [rows[index].config for index in late]
    if late and all(config and config.compile is CompileMode.NONE for config in configs):
        more += " Try --compile there."
    return f"{text}{told.failures()}.", more


def of_profiles(entries: Sequence[Explained], rows: Sequence[StepResult]) -> Headline:
    """What limits the profiled steps, then how busy their GPU is, and how long the steps of all
    rows take.
    """
    steps, more = of_steps(rows)
    if len(entries) == 1 and len(rows) <= 1 and all(row.status is Status.OK for row in rows):
        return _first_sentence(kernel_findings(entries[0]))
    if any(entry.profile.work is Work.OPERATORS for entry in entries):
        return steps, more  # on a CPU nothing else can be the limit
    limits = [
        {"limit": limit_of(entry) or "not known", "busy_share": entry.span().busy_share}
        for entry in entries
    ]
    told = NamedRows(limits, labels(entries))
    what = (
        f"{len(entries)} profiled steps"
        if len(entries) > 1
        else f"the profiled step of {told.names[0]}"
    )
    num_profiled = sum(not entry.span().by_clock for entry in entries)
    under = ", under the profiler" if num_profiled else ""
    if 0 < num_profiled < len(entries):
        under += f" in {num_profiled} of them"
    runs = NamedRows(rows, names_of([row.identity for row in rows]))
    ends = runs.failures() if len(rows) > 1 else ""
    busy = f"The GPU is busy {told.range('busy_share', percent_of)} of the step{under}."
    text = f"What limits {what}: {', '.join(told.counts('limit'))}{ends}."
    return text, f"{busy} {steps.removesuffix(f'{ends}.')}. {more}".strip()


def of_memory(entries: Sequence[MemoryEntry], rows: Sequence[StepResult]) -> Headline:
    """How much memory the runs need, and which ran out of it."""
    told = NamedRows(rows, names_of([row.identity for row in rows]))
    peaks, ends = (
        told.range("peak_allocated_gib", lambda gib: size(round(gib * GIB))),
        told.failures(),
    )
    first = [
        own
        for entry in entries
        if (own := entry.subject) and own.warmup_steps == 0 and own.mode is Mode.TRAIN
    ]
    is_first_step = bool(entries) and len(first) == len(entries)
    if len(entries) == 1 and len(rows) <= 1 and not ends and not is_first_step:
        text, more = _first_sentence(memory_findings(entries[0].profile))
        # the sentence about the peak goes on with what the bar shows
        return (text, more) if more else (f"{text.partition('; ')[0].rstrip('.')}.", "")
    text = (
        f"Memory peaks at {peaks} {told.part('peak_allocated_gib')}"
        if peaks
        else "No run has a peak of memory"
    )
    more = ""
    if is_first_step:
        recorded = [float(entry.profile.peak.allocated_bytes) for entry in entries]
        at_first = between(
            dict(zip(labels(entries), recorded, strict=True)), lambda value: size(round(value))
        )
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
    rows, cells = sections[0].rows, [row for section in sections[1:] for row in section.rows]
    ends = NamedRows(cells).failures()
    names, groups = [], dict[str, list[int]]()
    for index, row in enumerate(rows):
        name, _, kind = str(row["ceiling"]).replace("(", "").replace(")", "").rpartition(" ")
        is_launch = not str(row["unit"]).endswith("/s")
        names.append(str(row["ceiling"]) if is_launch else name)
        groups.setdefault("" if is_launch else kind, []).append(index)
    told, launches = NamedRows(rows, names), groups.pop("", [])

    def measured(chosen: Sequence[int]) -> str:
        write = f"{{:,.4g}} {rows[chosen[0]]['unit']}".format
        return told.range("measured", write, chosen, "is_doubted")

    reached = ", ".join(f"{kind} {measured(chosen)}" for kind, chosen in groups.items())
    more = ", ".join(measured([index]) for index in launches)
    text = f"Reached: {reached or 'nothing that is known'}{ends}."
    return _with_doubt(text, f"Times: {more}." if more else "")


def of_attention(sections: Sequence[Section]) -> Headline:
    """The shortest and the longest time at the largest shape of each precision, and how the
    other cells ended.
    """
    rows, key = sections[0].rows, "together_mean_ms"
    told, ranges, shapes = NamedRows(rows, [str(row["implementation"]) for row in rows]), [], []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        timed = [
            index
            for index, row in enumerate(rows)
            if row["precision"] is precision and row[key] is not None
        ]
        sizes: dict[int, Any] = {
            index: (rows[index]["context_length"], rows[index]["d_head"]) for index in timed
        }
        if timed:
            context, d_head = largest = max(sizes.values())
            at_largest = [index for index in timed if sizes[index] == largest]
            times = told.range(key, milliseconds, at_largest, "together_is_doubted")
            ranges.append(f"{times} in {precision}")
            shapes.append(f"context {context}, d_head {d_head} in {precision}")
    times = ", ".join(ranges) or "no known time"
    more = f"The largest shape that was timed: {'; '.join(shapes)}." if shapes else ""
    text = f"Forward and backward take at the largest shape {times}{told.failures()}."
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
    return next(
        text for section in sections for table in section.tables for text in table.findings
    ), ""


OF_STUDIES: Mapping[str, Callable[[Sequence[Section]], Headline]] = {
    "ceilings": of_ceilings,
    "attention": of_attention,
    "fusion": of_fusion,
    "precision": of_precision,
}
"""The function of each kind of study."""


def _first_sentence(found: Sequence[str]) -> Headline:
    """The first sentence of the first finding, and the rest of it."""
    head, dot, rest = found[0].partition(". ") if found else ("Nothing stands out.", "", "")
    return f"{head}{dot.strip()}", rest
