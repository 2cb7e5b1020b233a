"""The parts of a page that come from ladders and studies: what stands out, tables and pictures, and where from."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from cs336_systems.record import Environment, Status
from cs336_systems.report.columns import Row
from cs336_systems.report.numbers import DOUBT
from cs336_systems.report.page.collection import Collection, block_id
from cs336_systems.report.page.contents import sweep_chapters
from cs336_systems.report.page.figures import figure_of
from cs336_systems.report.page.provenance import conditions_of
from cs336_systems.report.page.rows import Named, linked
from cs336_systems.report.page.write import Chapter, Figure, Linked, Part, Prose, TableBlock, png_address
from cs336_systems.report.section import Section
from cs336_systems.report.sections.attention import attention_section
from cs336_systems.report.sections.ceilings.summary import ceilings_sections
from cs336_systems.report.sections.fusion import fusion_section
from cs336_systems.report.sections.ladder.rows import fastest_row
from cs336_systems.report.sections.ladder.tables import ladder_section
from cs336_systems.report.sections.precision import precision_sections
from cs336_systems.studies.fusion_records import Version
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.text import inert_line

MOST_GAINS = 4
"""Rungs whose gain is told."""
Tables = Sequence[TableBlock]


def ladder_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """The rungs; what the kernels of each did; and all runs."""
    climbed = collection.ladders[directory]
    found_in, prefix = {collection.place(directory): climbed.results.records}, block_id(directory, "")
    chapters = sweep_chapters(climbed.results, collection.root / directory, found_in=found_in, prefix=prefix)
    of_runs = [chapter for chapter in chapters if chapter.id.removeprefix(prefix).partition("-")[0] in _OF_RUNS]
    source = of_runs[-1].source if of_runs else str(collection.place(directory))
    yield from _of_study(collection, directory, [ladder_section(climbed.rows)], source, _ladder_findings)
    yield from of_runs


_OF_RUNS = ("kernels", "runs")
"""Chapters of a sweep that the page shows of a ladder, whose times stand in a table of their own."""


def ceilings_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """What the machine reaches, subject by subject."""
    study = collection.ceilings[directory]
    sections = ceilings_sections(study, collection.parts.get(directory))
    source = _source(collection, directory, "ceilings.json", study.environment)
    yield from _of_study(collection, directory, sections, source, _ceilings_findings)


def attention_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """Times, memory and errors of attention alone."""
    study = collection.attention[directory]
    source = _source(collection, directory, "attention.json", study.environment)
    yield from _of_study(collection, directory, [attention_section(study)], source, _attention_findings)


def fusion_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """What fusing does to each operation."""
    study = collection.fusion[directory]
    source = _source(collection, directory, "fusion.json", study.environment)
    yield from _of_study(collection, directory, [fusion_section(study)], source, _fusion_findings)


def precision_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """Sums, layer norm and data types."""
    study = collection.precision[directory]
    source = _source_of_precision(collection, directory, study)
    yield from _of_study(collection, directory, precision_sections(study), source, _precision_findings)


def _of_study(
    collection: Collection,
    directory: Path,
    sections: Iterable[Section],
    source: str,
    findings: Callable[[Tables], Iterable[Part | Linked]],
) -> Iterator[Chapter]:
    """What stands out, unless nothing does; then the tables and pictures of all sections."""
    blocks = [block for section in sections for block in section_blocks(section, collection, directory, source)]
    if told := list(findings([block for block in blocks if isinstance(block, TableBlock)])):
        texts = [each.text if isinstance(each, Linked) else each[0] for each in told]
        if any(f" {DOUBT}" in text for text in texts):
            told.append((f"{DOUBT} marks what rests on times in doubt; the warnings stand below the tables.", ""))
        yield Chapter(
            id=block_id(directory, "findings"), title="Findings", blocks=[Prose(paragraphs=told)], source=source
        )
    yield Chapter(id=block_id(directory, "tables"), title="Tables and pictures", blocks=blocks, source=source)


def section_blocks(
    section: Section, collection: Collection, directory: Path, source: str
) -> Iterator[TableBlock | Figure]:
    """The tables of the section, below its name, of which the second is called `NAME1`; then its pictures."""
    for number, table in enumerate(section.tables):
        csv = "" if number else section.csv
        yield TableBlock(id=block_id(directory, f"{section.name}{number or ''}"), table=table, csv=csv, source=source)
    for chart in section.pictures:
        png = png_address(collection.root / directory / "plots" / f"{chart.name}.png")
        yield figure_of(chart, block_id(directory, f"figure-{chart.name}"), source, png)


def _source(collection: Collection, directory: Path, file: str, environment: Environment | None) -> str:
    """The file, and the device, software and commit that it names; a study does not say when it was measured."""
    conditions = conditions_of([environment] if environment is not None else [])
    return inert_line("; ".join([str(collection.place(directory) / file), *conditions]))


def _source_of_precision(collection: Collection, directory: Path, study: PrecisionStudy) -> str:
    gpu = [study.gpu] if study.gpu is not None else []
    return inert_line("; ".join([str(collection.place(directory) / "precision.json"), *gpu, f"PyTorch {study.torch}"]))


def _ladder_findings(tables: Tables) -> Iterator[Linked]:
    """The fastest rung, the largest gains, what is slower, and what is not credited."""
    speed = tables[0]
    rows = speed.table.values
    if (fastest := fastest_row(rows)) is not None and fastest["speed_up_over_first"]:
        number = rows.index(fastest)
        step, gain = (_cell(speed, number, key) for key in ("step_mean_ms", "speed_up_over_first"))
        over = f" times as fast as {rows[0]['rung']}."
        yield linked(f"The fastest rung is {fastest['rung']}: ", step, " ms per step, ", gain, over)
    told = [(row["speed_up_over_last"], number) for number, row in enumerate(rows) if row["speed_up_over_last"]]
    for value, number in sorted(told, reverse=True)[:MOST_GAINS]:
        if value > 1:
            words = f"{rows[number]['rung']} ({rows[number]['change']}) makes a step "
            yield linked(words, _cell(speed, number, "speed_up_over_last"), " times as fast as the rung before.")
    for _, number in told:
        if (most := rows[number]["speed_up_over_last_ci95_high"]) is not None and most < 1:
            yield linked(
                f"{rows[number]['rung']} is slower than the rung before: ",
                _cell(speed, number, "speed_up_over_last"),
                " times as fast.",
            )
    for number, row in enumerate(rows):
        if row["processes"] and not row["is_credited"]:
            yield linked(
                f"Nothing is credited to {row['rung']}: its losses have the verdict ", _cell(speed, number, "gate"), "."
            )


def _ceilings_findings(tables: Tables) -> Iterator[Linked]:
    """How near products and memory come to the data sheet, and what a launch takes."""
    summary = tables[0]
    for words, is_it in (
        ("Matrix products reach ", lambda row: row["ceiling"].endswith(" product")),
        ("Passes over memory reach ", lambda row: row["ceiling"].endswith("(memory)")),
    ):
        yield from _range(summary, "data_sheet_share", words, " % of the data sheet", is_it)
    for number, row in enumerate(summary.table.values):
        if row["ceiling"].startswith("kernel, ") or row["ceiling"].endswith("(bus)"):
            yield linked(f"{row['ceiling']}: ", _cell(summary, number, "measured"), f" {row['unit']}.")


def _range(block: TableBlock, key: str, words: str, unit: str, is_it: Callable[[Row], bool]) -> Iterator[Linked]:
    """The least and the largest value of the rows that are it."""
    known = [(row[key], number) for number, row in enumerate(block.table.values) if is_it(row) and row[key] is not None]
    if known:
        ends = [number for _, number in (min(known), max(known))]
        least, most = (_cell(block, number, key) for number in ends)
        names = [str(block.table.values[number]["ceiling"]).partition(" ")[0] for number in ends]
        yield linked(words, least, f" ({names[0]}) to ", most, f"{unit} ({names[1]}).")


def _attention_findings(tables: Tables) -> Iterator[Linked]:
    """The times of all implementations at the largest shape that two can do, and where one runs out of memory."""
    for block in tables:
        keys = [heading.key for heading in block.table.headings if heading.key.endswith("_mean_ms")]
        if not keys:
            continue
        several = [
            number for number, row in enumerate(block.table.values) if sum(row[key] is not None for key in keys) > 1
        ]
        for number in sorted(several, key=lambda number: _size(block.table.values[number]))[-1:]:
            row = block.table.values[number]
            times = sorted((row[key], key) for key in keys if row[key] is not None)
            parts: list[str | Part] = [f"{block.table.title}, at {_shape(row)}, the fastest first: "]
            for place, (_, key) in enumerate(times):
                parts += [", " if place else "", key.partition(" ")[0], " ", _cell(block, number, key), " ms"]
            yield linked(*parts, ".")
        yield from _out_of_memory(block, keys)


def _out_of_memory(block: TableBlock, keys: Sequence[str]) -> Iterator[Linked]:
    """The smallest shape at which each implementation runs out of memory."""
    for key in keys if "forward_mean_ms" in keys[0] else ():
        name = key.partition(" ")[0]
        failed = [number for number, row in enumerate(block.table.values) if row.get(f"{name} status") is Status.OOM]
        for number in sorted(failed, key=lambda number: _size(block.table.values[number]))[:1]:
            yield linked(f"{name} at {_shape(block.table.values[number])}: ", _cell(block, number, key), ".")


def _size(row: Row) -> tuple[int, int]:
    return row["context_length"], row["d_head"]


def _shape(row: Row) -> str:
    return f"d_head {row['d_head']} and context {row['context_length']}"


def _fusion_findings(tables: Tables) -> Iterator[Linked]:
    """The largest gain of each table, and what is slower than written out."""
    for block in tables:
        rows = block.table.values
        told = [
            (row["speed_up"], number)
            for number, row in enumerate(rows)
            if row["speed_up"] is not None and row["version"] is not Version.EAGER
        ]
        for value, number in [*sorted(told)[-1:], *(pair for pair in sorted(told)[:-1] if pair[0] < 1)]:
            row, words = rows[number], "the largest gain" if (value, number) == max(told) else "slower"
            yield linked(
                f"{row['op']} {row['version']}, {row['phase']}, {row['precision']}: ",
                _cell(block, number, "speed_up"),
                f" times as fast as written out, {words}.",
            )


def _precision_findings(tables: Tables) -> Iterator[Part]:
    """The first sentences below each table."""
    for block in tables:
        yield from ((note, block.id) for note in block.table.notes[:2])


def _cell(block: TableBlock, number: int, key: str) -> Part:
    return Named("", block, number).cell(key)
