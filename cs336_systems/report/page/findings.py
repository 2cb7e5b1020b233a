"""The sentences that a page begins with: what limits each configuration, what stands out, and what is in doubt."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from cs336_systems.record import RunRecord, Status, WarningCode
from cs336_systems.report.columns import Row
from cs336_systems.report.entries import labels
from cs336_systems.report.frame import order
from cs336_systems.report.identity import identities, names_of
from cs336_systems.report.numbers import significant
from cs336_systems.report.page.subjects import Subjects
from cs336_systems.report.page.write import Block, Prose, TableBlock
from cs336_systems.report.sections.kernels.findings import findings as kernel_findings
from cs336_systems.report.sections.kernels.words import WHOLE_STEP
from cs336_systems.report.sections.memory.findings import findings as memory_findings
from cs336_systems.report.words import status_text
from cs336_systems.text import inert_line

DOUBTED = " Warnings of the two runs put it in doubt."
Sentence = tuple[str, str]
"""A sentence, and the identifier of the cell that it rests on."""


def findings(found: Sequence[Subjects], refused: Sequence[str]) -> list[Prose]:
    """The sentences on all records of a sweep, in groups that can be compared; `refused` says what cannot be."""
    prose = {
        "What limits each configuration": [each for own in found for each in _limits(own)],
        "What stands out": [each for own in found for each in _stands_out(own)],
        "What is in doubt": [each for own in found for each in _doubts(own)],
        "What is not side by side, and why": [(text, "") for text in refused],
    }
    return [Prose(heading=heading, paragraphs=sentences) for heading, sentences in prose.items() if sentences]


def _limits(own: Subjects) -> Iterator[Sentence]:
    """What each configuration takes, and what limits it."""
    for block, named in _named_steps(own):
        for number, (name, row) in enumerate(named):
            if row["status"] != Status.OK:
                yield f"{name}: {status_text(row['status'])}.", cell_of(block, number, "status")
            if row["step_mean_ms"] is None:
                continue
            share = "" if row["mfu"] is None else f", at {significant(100 * row['mfu'], 3)} % of the promised rate"
            is_launched = WarningCode.LAUNCH_BOUND in (row["warnings"] or "").split(";")
            limit = "; the host's launches limit it" if is_launched else ""
            took = f"{significant(row['step_mean_ms'], 4)} ms per step"
            yield inert_line(f"{name}: {took}{share}{limit}."), cell_of(block, number, "step_mean_ms")
    kernels, memory = own.results.kernels, own.results.memory
    found = [
        *zip(labels(kernels), kernels, [kernel_findings(each.profile, each.config) for each in kernels], strict=True),
        *zip(labels(memory), memory, [memory_findings(each.profile) for each in memory], strict=True),
    ]
    for name, entry, texts in found:
        for text in texts[:1]:
            yield inert_line(f"{name}: {text}"), _cell_of(own, entry)


def _named_steps(own: Subjects) -> list[tuple[TableBlock, list[tuple[str, Row]]]]:
    """The tables of steps with their rows, each with what tells it from those of all of them."""
    names = iter(names_of([row["identity"] for block in own.steps for row in block.table.values]))
    return [(block, [(next(names), row) for row in block.table.values]) for block in own.steps]


def _cell_of(own: Subjects, entry: object) -> str:
    """The cell of the time, or of the peak, of a profiled run."""
    blocks = [*own.kernels, *own.memory]
    found = (
        find_cell(blocks, key, lambda row: row.get("entry") is entry and row.get("phase") in (None, WHOLE_STEP))
        for key in ("wall_mean_ms", "peak_allocated_bytes")
    )
    return next(filter(None, found), "")


def _stands_out(own: Subjects) -> Iterator[Sentence]:
    """The extremes of the steps, of those after most warm-up."""
    for block, named in _named_steps(own)[:1]:
        rows = list(enumerate(named))
        for key, scale, words in (
            ("speed_up", 1, "The largest speed-up over fp32 is {} times: {}."),
            ("step_cv", 100, "The widest spread of steps is {} % of their mean: {}."),
            ("mfu", 100, "The highest share of the promised rate is {} %: {}."),
        ):
            known = [(row[key], number, name) for number, (name, row) in rows if row[key] is not None]
            if len(known) > 1:
                value, number, name = max(known)
                doubt = DOUBTED if key == "speed_up" and block.table.values[number]["speed_up_is_doubted"] else ""
                sentence = words.format(significant(value * scale, 3), name) + doubt
                yield inert_line(sentence), cell_of(block, number, key)
        for number, (name, row) in rows:
            if row["speed_up"] is not None and row["speed_up"] < 1 and not row["speed_up_is_doubted"]:
                slower = f"{name} is slower than in fp32: {significant(row['speed_up'], 3)} times as fast."
                yield inert_line(slower), cell_of(block, number, "speed_up")


def _doubts(own: Subjects) -> Iterator[Sentence]:
    """The warnings of the runs whose times are shown."""
    records = sorted(own.results.published, key=lambda record: order(record.config))
    runs = [(r.config, r.environment.identity.device_name if r.environment else None) for r in records]
    for name, record in zip(names_of(identities(runs)), records, strict=True):
        for warning in record.warnings:
            yield inert_line(f"{name}: {warning.code}: {warning.message}."), _cell_of_step(own, record)


def _cell_of_step(own: Subjects, record: RunRecord) -> str:
    return find_cell(own.steps, "step_mean_ms", lambda row: row["config"] == record.config.configuration)


def find_cell(blocks: Iterable[Block], key: str, is_it: Callable[[Row], bool]) -> str:
    """The cell below this key in the first row that is it; an empty text where no table has one."""
    for block in blocks:
        if isinstance(block, TableBlock):
            for number, row in enumerate(block.table.values):
                if is_it(row) and (found := cell_of(block, number, key)):
                    return found
    return ""


def cell_of(block: TableBlock, number: int, key: str) -> str:
    """The identifier of the cell in this row; empty where the table has no such column."""
    keys = [heading.key for heading in block.table.headings]
    return f"{block.id}.{number}.{keys.index(key)}" if key in keys else ""
