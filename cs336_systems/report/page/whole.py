"""The page of all results below a directory, by subject; and that of one ladder, study or comparison."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cs336_systems.config import Profiler
from cs336_systems.report.page.collection import Collection, block_id
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.page.comparison import comparison_chapters
from cs336_systems.report.page.contents import sweep_chapters
from cs336_systems.report.page.studies import (
    attention_chapters,
    ceilings_chapters,
    fusion_chapters,
    ladder_chapters,
    precision_chapters,
)
from cs336_systems.report.page.write import LONGEST_LINE, Chapter, Page, Prose
from cs336_systems.report.results import Results
from cs336_systems.text import counted, inert_line

SELF = Path()
"""The directory of a page with the results of a single directory."""


def collection_page(collection: Collection, on_progress: Callable[[Path, int, int], object] = lambda *_: None) -> Page:
    """The page of all results: a chapter for each subject with its directories, closed.

    A collection of one directory, which is its root, has the chapters of that alone. Before each directory
    `on_progress` gets it, how many are done, and how many there are.
    """
    directories = collection.directories
    made = {}
    for number, directory in enumerate(directories):
        on_progress(collection.place(directory), number, len(directories))
        made[directory] = list(_chapters(collection, directory))
    name = inert_line(collection.root.resolve().name)
    if directories == [SELF]:
        title = SUBJECTS[_subject(collection, SELF)].title
        return Page(title=f"{title}: {name}", source=_source(collection, SELF, made[SELF]), chapters=made[SELF])
    chapters = []
    for kind, subject in SUBJECTS.items():
        own = [directory for directory in directories if _subject(collection, directory) == kind]
        if own:
            is_one_folder = len({directory.parent for directory in own}) == 1
            parts = [_directory(collection, directory, made[directory], is_one_folder) for directory in own]
            chapters.append(Chapter(id=f"subject-{kind}", title=subject.heading, chapters=parts))
    chapters += _unreadable(collection)
    return Page(title=f"All results in {name}", source=_counted(collection), chapters=chapters)


def _subject(collection: Collection, directory: Path) -> str:
    """The subject that a directory belongs to; a sweep that also has profiles belongs to these."""
    for name, subject in SUBJECTS.items():
        if subject.results != "sweeps" and directory in getattr(collection, subject.results):
            return name
    profilers = {record.config.profiler for record in collection.sweeps[directory].records}
    if Profiler.MEMORY in profilers:
        return "memory"
    return "kernels" if profilers - {Profiler.NONE} else "steps"


def _directory(collection: Collection, directory: Path, chapters: Sequence[Chapter], is_one_folder: bool) -> Chapter:
    """The chapter of a directory; `is_one_folder` says that all of its subject are in one folder."""
    source = chapters[0].source if chapters else ""  # said once
    return Chapter(
        id=block_id(directory, "all"),
        title=inert_line(str(directory)),
        short=inert_line(directory.name) if is_one_folder else "",
        source=_source(collection, directory, chapters),
        chapters=[replace(own, source="") if own.source == source else own for own in chapters],
        is_closed=True,
    )


def _source(collection: Collection, directory: Path, chapters: Iterable[Chapter]) -> str:
    """Where the results come from, and the command that makes such results again."""
    source = next((chapter.source for chapter in chapters if chapter.source), str(collection.place(directory)))
    return inert_line(f"{source}. Repeat it with: {command_for(collection, directory)}", LONGEST_LINE)


def _chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """The chapters of one directory; the runs of a comparison are also a sweep."""
    subject = _subject(collection, directory)
    yield from SUBJECTS[subject].chapters(collection, directory)
    if subject == "comparisons" and directory in collection.sweeps:
        yield from _sweep_chapters(collection, directory)


def _sweep_chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    results, prefix = collection.sweeps[directory], block_id(directory, "")
    if missing := _missing(results):
        blocks = [Prose(paragraphs=[(missing, "")])]
        yield Chapter(id=f"{prefix}missing", title="What is not kept", blocks=blocks)
    yield from sweep_chapters(
        results,
        collection.root / directory,
        collection.ceilings_of(directory),
        {collection.place(directory): results.records},
        prefix,
    )


def _missing(results: Results) -> str:
    """How many runs under a profiler have no explained profile, in words; empty where each that needs one has it."""
    if not results.lost:
        return ""
    num_runs = sum(record.config.profiler is not Profiler.NONE for record in results.records)
    num_kept = len(results.kernels) + len(results.memory)
    return (
        f"Of {counted(num_runs, 'run')} under a profiler, {num_kept} still have their explained profile here. Tables, "
        f"pictures and sentences about profiles are of these {num_kept} alone; the records of all runs are complete."
    )


def _unreadable(collection: Collection) -> Iterator[Chapter]:
    """Which directories have results that cannot be read, and why."""
    if collection.unreadable:
        sentences = [(inert_line(f"{path}: {why}"), "") for path, why in collection.unreadable.items()]
        yield Chapter(id="unreadable", title="What cannot be read", blocks=[Prose(paragraphs=sentences)])


def _counted(collection: Collection) -> str:
    num_runs = sum(len(results.records) for results in collection.sweeps.values())
    num_runs += sum(len(climbed.results.records) for climbed in collection.ladders.values())
    unread = f"; {len(collection.unreadable)} more cannot be read" if collection.unreadable else ""
    directories = len(collection.directories)
    return f"{directories} directories of results with {counted(num_runs, 'run')}{unread}"


class Subject(NamedTuple):
    """What results are about."""

    heading: str
    """Heading on the page of all results."""
    title: str
    """Title of the page of one directory."""
    results: str
    """The field of a collection that has the results."""
    chapters: Callable[[Collection, Path], Iterable[Chapter]]


_STEP = "Time and memory of a training step"
SUBJECTS = {
    "steps": Subject("Times of steps", _STEP, "sweeps", _sweep_chapters),
    "ladder": Subject("From the slow step to the fast one", "Ladder", "ladders", ladder_chapters),
    "kernels": Subject("Kernels", _STEP, "sweeps", _sweep_chapters),
    "memory": Subject("Memory", _STEP, "sweeps", _sweep_chapters),
    "attention": Subject("Attention alone", "Attention alone", "attention", attention_chapters),
    "fusion": Subject("Fused operations", "Fused operations", "fusion", fusion_chapters),
    "ceilings": Subject("What the machine reaches", "What the machine reaches", "ceilings", ceilings_chapters),
    "precision": Subject("Precision", "Precision", "precision", precision_chapters),
    "comparisons": Subject(
        "One configuration against another", "A against B", "comparisons", comparison_chapters
    ),
}  # fmt: skip
"""All subjects, in the order of the page."""
