"""The parts of a page that come from ladders and studies: what stands out, tables and pictures, and where from."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from cs336_systems.record import Environment
from cs336_systems.report.page.collection import Collection, block_id
from cs336_systems.report.page.contents import sweep_chapters
from cs336_systems.report.page.figures import figure_of
from cs336_systems.report.page.provenance import conditions_of
from cs336_systems.report.page.write import Chapter, Figure, Prose, TableBlock, png_address
from cs336_systems.report.section import Section
from cs336_systems.report.sections.attention import attention_section
from cs336_systems.report.sections.ceilings.summary import ceilings_sections
from cs336_systems.report.sections.fusion import fusion_section
from cs336_systems.report.sections.ladder.tables import ladder_section
from cs336_systems.report.sections.precision import precision_sections
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.text import inert_line


def ladder_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """The rungs; what the kernels of each did; and all runs."""
    climbed = collection.ladders[directory]
    found_in, prefix = {collection.place(directory): climbed.results.records}, block_id(directory, "")
    chapters = sweep_chapters(climbed.results, collection.root / directory, found_in=found_in, prefix=prefix)
    of_runs = [chapter for chapter in chapters if chapter.id.removeprefix(prefix).partition("-")[0] in _OF_RUNS]
    source = of_runs[-1].source if of_runs else str(collection.place(directory))
    yield from _of_study(collection, directory, [ladder_section(climbed.rows)], source)
    yield from of_runs


_OF_RUNS = ("kernels", "runs")
"""Chapters of a sweep that the page also shows for a ladder; a ladder's times are in its own table."""


def ceilings_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """What the machine reaches, subject by subject."""
    study = collection.ceilings[directory]
    sections = ceilings_sections(study, collection.parts.get(directory))
    source = _source(collection, directory, "ceilings.json", study.environment)
    yield from _of_study(collection, directory, sections, source)


def attention_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """Times, memory and errors of attention alone."""
    study = collection.attention[directory]
    source = _source(collection, directory, "attention.json", study.environment)
    yield from _of_study(collection, directory, [attention_section(study)], source)


def fusion_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """What fusing does to each operation."""
    study = collection.fusion[directory]
    source = _source(collection, directory, "fusion.json", study.environment)
    yield from _of_study(collection, directory, [fusion_section(study)], source)


def precision_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """Sums, layer norm and data types."""
    study = collection.precision[directory]
    source = _source_of_precision(collection, directory, study)
    yield from _of_study(collection, directory, precision_sections(study), source)


def _of_study(collection: Collection, directory: Path, sections: Iterable[Section], source: str) -> Iterator[Chapter]:
    """What stands out, unless nothing does; then the tables and pictures of all sections."""
    blocks = [block for section in sections for block in section_blocks(section, collection, directory, source)]
    told = [
        Prose(heading=block.table.title, paragraphs=[(inert_line(text), block.id) for text in block.table.findings])
        for block in blocks
        if isinstance(block, TableBlock) and block.table.findings
    ]
    if told:
        yield Chapter(id=block_id(directory, "findings"), title="Findings", blocks=told, source=source)
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
