"""The headline of a page: it answers the command's question from all rows, failed ones too; a function for each kind.

Every number in it is a claim, which names the rows that it stands on. Tests compare the claims with results.csv.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cs336_systems.analysis.kernels.step_profile import Work
from cs336_systems.config import CompileMode, Mode
from cs336_systems.record import Status, WarningCode
from cs336_systems.report.columns import Row, column, three_digits
from cs336_systems.report.compared import Compared
from cs336_systems.report.frame import codes_of
from cs336_systems.report.identity import names_of
from cs336_systems.report.section import Section, labels
from cs336_systems.report.sections.kernels.findings import findings as kernel_findings
from cs336_systems.report.sections.kernels.findings import limit_of
from cs336_systems.report.sections.kernels.tables import Explained
from cs336_systems.report.sections.ladder import fastest_row
from cs336_systems.report.sections.ladder import findings as ladder_findings
from cs336_systems.report.sections.memory.findings import MemoryEntry, size
from cs336_systems.report.sections.memory.findings import findings as memory_findings
from cs336_systems.report.sections.steps import PHASES
from cs336_systems.report.words import GIB, between, milliseconds, percent_of, status_text
from cs336_systems.studies.operators import Version
from cs336_systems.text import counted

MOST_NAMED = 4
"""Most rows that a headline names one by one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A number: the least or most of a column's values in these rows, or how many rows have the value `of`."""

    kind: str
    key: str
    value: float
    rows: tuple[int, ...]
    of: object = None


class Headline:
    """The answer in a sentence or two, more that it needs, and the claims of both; made row by row."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        """The rows of the results, each with a name."""
        self.rows, self.names = rows, names
        self.text = self.more = ""
        self.claims: list[Claim] = []

    def range(self, key: str, text: Callable[[float], str], chosen: Sequence[int] | None = None) -> str:
        """The least and the largest value under the key in the chosen rows, or in all that have one."""
        known = [index for index, row in enumerate(self.rows) if row[key] is not None]
        shown = tuple(known if chosen is None else chosen)
        values = {index: float(self.rows[index][key]) for index in shown}
        self.claims += [Claim(kind, key, find(values.values()), shown)
                        for kind, find in (("least", min), ("most", max)) if values]  # fmt: skip
        if len(values) == 1 and len(self.rows) > 1:
            return f"{text(values[shown[0]])} ({self.names[shown[0]]})"
        return between({self.names[index]: value for index, value in values.items()}, text)

    def count(self, key: str, of: object, chosen: Sequence[int]) -> str:
        """How many of the rows have this value, and the names of the first of them: `2 of 3 (xl ctx 128, ...)`."""
        self.claims.append(Claim("count", key, len(chosen), tuple(chosen), of))
        names = list(dict.fromkeys(self.names[index] for index in chosen))
        more = ", ..." if len(names) > MOST_NAMED else ""
        return f"{len(chosen)} of {len(self.rows)} ({', '.join(names[:MOST_NAMED])}{more})"

    def counts(self, key: str, left_out: object = "") -> Iterator[tuple[object, str]]:
        """Each value under the key but this one, and how many rows have it."""
        for value in dict.fromkeys(row[key] for row in self.rows if row[key] != left_out):
            chosen = [index for index, row in enumerate(self.rows) if row[key] == value]
            yield value, self.count(key, value, chosen)

    def failures(self) -> str:
        """How many rows did not end well, by how they ended: `; out of memory: 1 (xl ctx 512)`."""
        ends = self.counts("status", Status.OK)
        return "".join(f"; {'not run' if end is None else status_text(str(end))}: {told}" for end, told in ends)

    def part(self, key: str) -> str:
        """In how many of the rows something is known: `in 2 of 3 configurations`."""
        number, whole = sum(row[key] is not None for row in self.rows), counted(len(self.rows), "configuration")
        return f"in {whole}" if number == len(self.rows) else f"in {number} of {whole}"


def of_steps(rows: Sequence[Row]) -> Headline:
    """How long a step takes, which steps launches limit, and which runs failed."""
    told = Headline(rows, names_of([row["identity"] for row in rows]))
    times = told.range("step_mean_ms", milliseconds)
    told.text = f"A step takes {times} {told.part('step_mean_ms')}" if times else "No step has a time"
    if times and len(rows) == 1:
        parts = [f"{column(key).name} {percent_of(rows[0][key], rows[0]['step_mean_ms'])}"
                 for key in PHASES if rows[0][key]]  # fmt: skip
        told.text = f"A step takes {times}: {', '.join(parts)}"
    told.text += f"{told.failures()}."
    late = [index for index, row in enumerate(rows) if WarningCode.LAUNCH_BOUND in codes_of(row)]
    if late:
        can_compile = all(rows[index]["config"].compile is CompileMode.NONE for index in late)
        told.more = f"Limited by the host's launches: {told.count('warnings', WarningCode.LAUNCH_BOUND, late)}."
        told.more += " Try --compile there." if can_compile else ""
    return told


def of_profiles(entries: Sequence[Explained], rows: Sequence[Row]) -> Headline:
    """What limits the profiled steps, how busy their GPU is, and how long the steps of all rows take."""
    steps = of_steps(rows)
    profiled = [{"limit": limit_of(entry), "busy_share": entry.span().busy_share} for entry in entries]
    told = Headline(profiled, labels(entries))
    busy, ends = told.range("busy_share", percent_of), steps.failures()
    if len(entries) == 1 and len(rows) <= 1 and not ends:
        told.text, told.more = _first_sentence(kernel_findings(entries[0]))
        return told
    if any(entry.profile.work is Work.OPERATORS for entry in entries):
        return steps  # on a CPU nothing else can be the limit
    limits = [f"{limit or 'not known'} {number}" for limit, number in told.counts("limit")]
    num_timed = sum(entry.span().by_clock for entry in entries)
    under = "" if num_timed == len(entries) else f", under the profiler in {len(entries) - num_timed} of them"
    told.text = (
        f"What limits {counted(len(entries), 'profiled step')}: {', '.join(limits)}; the GPU is busy "
        f"{busy} of the step{under}{ends}."
    )
    told.more = f"{steps.text.removesuffix(f'{ends}.')}. {steps.more}".strip()
    told.claims += steps.claims
    return told


def of_memory(entries: Sequence[MemoryEntry], rows: Sequence[Row]) -> Headline:
    """How much memory the runs need, and which ran out of it."""
    told = Headline(rows, names_of([row["identity"] for row in rows]))
    peaks, ends = told.range("peak_allocated_gib", lambda gib: size(round(gib * GIB))), told.failures()
    configs = [entry.config for entry in entries]
    is_first_step = all(own is not None and own.warmup_steps == 0 and own.mode is Mode.TRAIN for own in configs)
    if len(entries) == 1 and len(rows) <= 1 and not ends and not is_first_step:
        told.text, told.more = _first_sentence(memory_findings(entries[0].profile))
        if not told.more:  # the sentence about the peak goes on with what the bar shows
            told.text = f"{told.text.partition('; ')[0].rstrip('.')}."
        return told
    told.text = f"Memory peaks at {peaks} {told.part('peak_allocated_gib')}" if peaks else "No run has a peak of memory"
    told.text += f"{ends}."
    if is_first_step:
        recorded = [float(entry.profile.peak.allocated_bytes) for entry in entries]
        at_first = between(dict(zip(labels(entries), recorded, strict=True)), lambda value: size(round(value)))
        told.more = f"The first step peaks at {at_first}: later ones hold the optimizer's state from their beginning."
    return told


def of_comparison(compared: Compared, rows: Sequence[Row]) -> Headline:
    """The verdict, or how many configurations have each, and how long the steps of both sides take."""
    told = Headline(compared.section.rows, [str(row["verdict"]) for row in compared.section.rows])
    list(told.counts("verdict"))
    told.text, told.more = compared.answer, of_steps(rows).text
    return told


def of_ladder(rows: Sequence[Row]) -> Headline:
    """The fastest rung that passed the gate, and how the others ended."""
    told, best = Headline(rows, [row["rung"] for row in rows]), fastest_row(rows)
    credited = tuple(index for index, row in enumerate(rows) if row["is_credited"])
    told.text = "No rung passed the gate"
    if best is not None:
        told.claims.append(Claim("least", "step_mean_ms", best["step_mean_ms"], credited))
        told.text = next(ladder_findings(rows)).rstrip(".")
    told.text += f"{told.failures()}."
    return told


def of_ceilings(sections: Sequence[Section]) -> Headline:
    """All ceilings, of passes over memory and of collectives the range, and how the cells ended that have none."""
    rows, cells = sections[0].rows, [row for section in sections[1:] for row in section.rows]
    told = Headline(rows, [str(row["ceiling"]) for row in rows])
    ends = Headline(cells, [str(row["label"]) for row in cells])
    groups = [(str(row["unit"]), str(row["ceiling"]).rpartition(" (")[1:]) for row in rows]
    reached: dict[bool, list[str]] = {True: [], False: []}
    for unit, kind in dict.fromkeys(groups):
        chosen = [index for index, group in enumerate(groups) if group == (unit, kind)]
        with_unit = f"{{:,.4g}} {unit}".format
        reached[unit.endswith("/s")].append(told.range("measured", with_unit, chosen))
    told.text = f"The machine reaches {', '.join(reached[True]) or 'nothing that is known'}{ends.failures()}."
    told.more = f"Launches take {', '.join(reached[False])}." if reached[False] else ""
    return told


def of_attention(sections: Sequence[Section]) -> Headline:
    """The shortest and the longest time at the largest shape of each precision, and how the other cells ended."""
    rows, key = sections[0].rows, "together_mean_ms"
    told, ranges = Headline(rows, [str(row["implementation"]) for row in rows]), []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        timed = [index for index, row in enumerate(rows) if row["precision"] is precision and row[key] is not None]
        shapes: dict[int, Any] = {index: (rows[index]["context_length"], rows[index]["d_head"]) for index in timed}
        if timed:
            context, d_head = largest = max(shapes.values())
            times = told.range(key, milliseconds, [index for index in timed if shapes[index] == largest])
            ranges.append(f"{precision}, d_head {d_head}, context {context}: {times}")
    told.text = f"Forward and backward take, at the largest shape: {'; '.join(ranges) or 'no known time'}"
    told.text += f"{told.failures()}."
    return told


def of_fusion(sections: Sequence[Section]) -> Headline:
    """The least and the largest gain of fused operations, and how the other cells ended."""
    rows = sections[0].rows
    told = Headline(rows, [f"{row['op']} {row['version']} {row['phase']} {row['precision']}" for row in rows])
    fused = [i for i, row in enumerate(rows) if row["version"] is not Version.EAGER and row["speed_up"] is not None]
    gains = told.range("speed_up", three_digits, fused) or "an unknown number of"
    told.text = f"Fused operations are {gains} times as fast as written out{told.failures()}."
    return told


def of_precision(sections: Sequence[Section]) -> Headline:
    """What is in fp32 in all rows."""
    told = Headline((), ())
    told.text = next(text for section in sections for table in section.tables for text in table.findings)
    return told


OF_STUDIES: Mapping[str, Callable[[Sequence[Section]], Headline]] = {
    "ceilings": of_ceilings, "attention": of_attention, "fusion": of_fusion, "precision": of_precision,
}  # fmt: skip
"""The function of each kind of study."""


def _first_sentence(found: Sequence[str]) -> tuple[str, str]:
    """The first sentence of the first finding, and the rest of it."""
    head, dot, rest = found[0].partition(". ") if found else ("Nothing stands out.", "", "")
    return f"{head}{dot.strip()}", rest
