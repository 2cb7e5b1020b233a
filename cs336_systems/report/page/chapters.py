"""The page of one results directory: its answer, where time and memory go, tables, runs, and how it
was measured; and the list of all pages below a directory, by subject.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from urllib.parse import quote

from ...record import RUNS, load_records
from ...studies.ceilings_files import ceilings_beside, load_ceilings_or_warn
from ..charts import Chart
from ..results import KERNELS, MEMORY, Results
from ..section import Section, all_tables, make_table
from ..sections.kernels.files import modules_section
from ..sections.ladder import ladder_section
from .blocks import (
    Bars,
    Block,
    Chapter,
    Entry,
    Facts,
    Glance,
    Page,
    PictureBlock,
    Prose,
    TableBlock,
    bars_of,
)
from .directory import SUBJECTS, Directory
from .glance import glance_at
from .html import PAGE_FILE, write_page
from .runs import run_blocks, source_facts

NO_FINDING = "\n"
"""What no headline holds, for rows that are no findings."""


def page_of(directory: Directory) -> Page:
    """The page of one directory."""
    glance = glance_at(directory)
    return Page(
        title=f"{SUBJECTS[directory.subject]}: {directory.path.resolve().name}",
        subject=directory.subject,
        source=_source(directory),
        glance=glance,
        chapters=list(_chapters(directory, glance)),
    )


def _source(directory: Directory) -> str:
    """Device of what the directory holds, and the day, or days, on which it was measured."""
    facts = dict(source_facts(directory))
    results = directory.results
    names = list[str]()
    if results is not None:
        for entry in results.kernels:
            names += entry.profile.device_names
    device = facts.get("device") or ", ".join(dict.fromkeys(names))
    days = re.findall(r"\d{4}-\d\d-\d\d", facts.get("measured", ""))
    return ", ".join(filter(None, [device, " to ".join(dict.fromkeys(days))]))


def write_page_of(directory: Directory, say: Callable[[str], None]) -> tuple[Path, Page]:
    """Write the page of one directory into it, saying so; return its path and what it shows."""
    say(f"making the page of {directory.path.name}")
    page = page_of(directory)
    path = directory.path / PAGE_FILE
    write_page(page, path)
    return path, page


def write_page_of_runs(directory: Path) -> Path:
    """Write the page of all runs in a directory, without its tables and pictures as files."""
    records, _ = load_records(directory / RUNS)
    ceilings = load_ceilings_or_warn(ceilings_beside(directory))
    results = Results.load(records, directory, ceilings)
    path, _ = write_page_of(Directory(path=directory, results=results), lambda _: None)
    return path


def list_of(root: Path, pages: Mapping[Path, Page], unreadable: Mapping[Path, str]) -> Page:
    """The page that links all pages below `root`, grouped by subject, and says at its end which
    directories cannot be read and why.

    Keys are directories relative to `root`.
    """
    chapters = []
    for subject, title in SUBJECTS.items():
        entries = []
        for path, page in pages.items():
            if page.subject == subject:
                link = f"{quote(os.fsencode(path.as_posix()))}/{PAGE_FILE}"
                entries.append(Entry(link=link, name=str(path), page=page))
        if entries:
            chapters.append(Chapter(id=f"all-{subject}", title=title, blocks=entries))
    if unreadable:
        reasons = Prose(paragraphs=[f"{path}: {why}" for path, why in unreadable.items()])
        chapters.append(Chapter(id="unreadable", title="What cannot be read", blocks=[reasons]))
    return Page(title=f"All results in {root.resolve().name}", chapters=chapters)


def _chapters(directory: Directory, glance: Glance) -> Iterator[Chapter]:
    """The chapters of a directory's page: findings, then pictures and tables of each subject, then
    all runs, and how they were measured.
    """
    results = directory.results
    sections = _sections(directory)
    tables = all_tables(chain.from_iterable(sections.values()))
    sentences = chain.from_iterable(table.findings for table in tables)
    # the findings of profiles are not among these: they stand in tables of their own
    headline = f"{glance.answer} {glance.more}".strip()
    # such as `Out of memory: 8 of 48 configurations (...)` below `out of memory in 8 of 48`
    findings = [
        text for text in sentences if text.partition(":")[0].lower() not in headline.lower()
    ]
    if directory.compared is not None:
        findings += directory.compared.left_out
    if results is not None and results.lost:
        findings.append(f"{results.lost.capitalize()}.")
    if findings:
        yield Chapter(id="findings", title="Findings", blocks=[Prose(paragraphs=findings)])
    counts = Counter(chain.from_iterable(table.notes for table in tables))
    repeated = [note for note, count in counts.items() if count > 1]
    shown = [bar.parts for bar in chain.from_iterable(bars.bars for bars in glance.bars)]
    for number, (title, part) in enumerate(sections.items()):
        blocks = []
        for block in _blocks(title, part, repeated, headline):
            is_repeated = isinstance(block, Bars) and all(bar.parts in shown for bar in block.bars)
            if not is_repeated:
                blocks.append(block)
        yield Chapter(id=f"part-{number}", title=title, blocks=blocks)
    if results is not None and results.records:
        yield Chapter(
            id="runs", title="Runs", blocks=list(run_blocks(results.records, directory.path))
        )
    facts = [*source_facts(directory), *(("note", note) for note in repeated)]
    yield Chapter(id="measured", title="How it was measured", blocks=[Facts(rows=facts)])


def _sections(directory: Directory) -> Mapping[str, Sequence[Section]]:
    """All sections of a directory, by the title of their chapter; where time and memory go comes
    before the times.
    """
    chapters: dict[str, Sequence[Section]] = {}
    if directory.compared is not None:
        chapters["B against A"] = [directory.compared.section]
    if directory.rungs:
        chapters["Rungs"] = [ladder_section(directory.rungs)]
    if directory.study is not None:
        chapters["Tables"] = directory.study.sections
    results = directory.results
    if results is None:
        return chapters
    for title, part in results.sections.items():
        # a ladder's times and memory are those of its table of rungs
        if title == KERNELS or not directory.rungs:
            chapters[title] = part
    if len(results.kernels) == 1 and not results.is_of_file:
        chapters[KERNELS] = [*chapters[KERNELS], modules_section(results.kernels[0].profile)]
    return chapters


def _blocks(
    title: str, sections: Sequence[Section], repeated: Collection[str], headline: str
) -> Iterator[Block]:
    """The pictures, then the tables without `repeated` notes and without the finding that is the
    headline; the second table of a section is called `NAME1`.

    The page itself draws the horizontal bars of charts.
    """
    for picture in (picture for section in sections for picture in section.pictures):
        if isinstance(picture, Chart):
            yield from bars_of(picture)
        else:
            # matplotlib is slow to import, and few pages need it
            from ..draw import svg_of

            yield PictureBlock(id=f"picture-{picture.name}", svg=svg_of(picture, picture.name))
    prefix = "memory-" if title == MEMORY else ""
    for section in sections:
        for number, table in enumerate(section.tables):
            notes = tuple(note for note in table.notes if note not in repeated)
            shown = replace(table, notes=notes)
            rows = [row for row in table.values if row.get("finding", NO_FINDING) not in headline]
            if len(rows) < len(table.values):
                rows = [{**row, "number": place} for place, row in enumerate(rows, 1)]
                shown = make_table(table.title, table.headings, rows, notes)
            if rows or not table.values:
                yield TableBlock(id=f"{prefix}{section.name}{number or ''}", table=shown)
