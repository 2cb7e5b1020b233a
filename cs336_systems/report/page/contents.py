"""The page of a sweep: what stands out, the time, the kernels and the memory of a step, and every run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cs336_systems.record import RunRecord
from cs336_systems.report.page.commands import sweep_command
from cs336_systems.report.page.provenance import places, provenance
from cs336_systems.report.page.refusals import separated, warmup_reasons
from cs336_systems.report.page.runs import runs_chapter
from cs336_systems.report.page.subjects import Subjects
from cs336_systems.report.page.write import LONGEST_LINE, Chapter, Page, Prose
from cs336_systems.report.results import Results
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.text import inert_line

SUBJECTS = {"time": "Time of a step", "kernels": "Kernels", "memory": "Memory"}
"""Headings of the chapters between the findings and the runs, by the fields of `Subjects`."""


def sweep_page(
    results: Results,
    directory: Path,
    ceilings: Ceilings = NO_CEILINGS,
    found_in: Mapping[Path, Sequence[RunRecord]] | None = None,
) -> Page:
    """The page of what was measured, as in `sweep_chapters`, with the command that measures it, of a single sweep."""
    source = provenance(results.records, places(found_in or {}, directory))
    if results.records and len(sweeps := [*(found_in or [directory])]) == 1:
        command = sweep_command(results.records, sweeps[0].resolve().name)
        source = inert_line(f"{source}. Repeat it with: {command}", LONGEST_LINE)
    return Page(
        title=inert_line(f"Time and memory of a training step: {directory.name}"),
        source=source,
        chapters=sweep_chapters(results, directory, ceilings, found_in),
    )


def sweep_chapters(
    results: Results,
    directory: Path,
    ceilings: Ceilings = NO_CEILINGS,
    found_in: Mapping[Path, Sequence[RunRecord]] | None = None,
    prefix: str = "",
) -> list[Chapter]:
    """The chapters of what was measured: `findings`, `time`, `kernels`, `memory` and `runs`, unless they are empty.

    The PNGs are those in plots/ of the directory. `found_in` has the records by the directory that each comes from, if
    that is not `directory`. `prefix` begins all identifiers, so that a page can hold several sweeps.
    """
    place_of = places(found_in or {}, directory)
    apart = separated(results)
    is_alone = len(apart.groups) == 1
    found = [
        Subjects(own, directory, place_of, ceilings, prefix, "" if is_alone else f"-{number}", conditions)
        for number, (own, conditions) in enumerate(zip(apart.groups, apart.conditions, strict=True), 1)
    ]
    refused = [*apart.reasons, *(text for own in apart.groups for text in warmup_reasons(own.published))]
    source = provenance(results.records, place_of)
    told = [[(text, block.id) for text in block.table.findings] for own in found for block in own.steps]
    blocks = [Prose(paragraphs=texts) for texts in (*told, [(text, "") for text in refused]) if texts]
    chapters = [Chapter(id=f"{prefix}findings", title="Findings", blocks=blocks, source=source)]
    chapters += [
        Chapter(
            id=f"{prefix}{name}{own.ending}",
            title=inert_line(title if is_alone else f"{title}: {own.conditions}"),
            blocks=getattr(own, name),
            source=own.source,
        )
        for name, title in SUBJECTS.items()
        for own in found
    ]
    chapters.append(runs_chapter(results.records, place_of, prefix))
    return [chapter for chapter in chapters if chapter.blocks]
