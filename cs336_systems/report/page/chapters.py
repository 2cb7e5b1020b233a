"""The page of one results directory, and of all below a directory by subject: findings, tables, pictures and runs."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cs336_systems.config import Phase, Profiler
from cs336_systems.record import Environment, RunRecord, Status
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.compared import Compared
from cs336_systems.report.formats import csv_of
from cs336_systems.report.frame import order
from cs336_systems.report.page.write import Block, Chapter, Closed, Page, PictureBlock, Prose, TableBlock
from cs336_systems.report.results import KERNELS, MEMORY, Results, StudyResults
from cs336_systems.report.section import Section, known, make_table
from cs336_systems.report.sections.ladder import ladder_section
from cs336_systems.report.words import status_text
from cs336_systems.studies.ceilings_files import Ceilings
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.sweep.store import VIEWERS, command_in, raw_profile_path
from cs336_systems.text import counted, shortened

SELF = Path()
"""The directory of a page with the results of a single directory."""
LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""
SUBJECTS = {
    "steps": "Time and memory of a training step", "ladders": "From the slow step to the fast one", "kernels": KERNELS,
    "memory": MEMORY, "attention": "Attention alone", "fusion": "Fused operations",
    "ceilings": "What the machine reaches", "precision": "Precision", "comparisons": "A against B",
}  # fmt: skip
"""All subjects in the order of the page; sweeps are by what was profiled in them."""
RUN = (
    Column("run", key="run", numeric=False, write=str), column("status"), column("step_mean_ms"),
    Column("warnings", key="warnings", numeric=False, write=str),
    Column("record", key="record", numeric=False, write=str),
    Column("raw profile", about="If it was kept.", key="profile", numeric=False, write=str),
    Column("opens in", key="viewer", numeric=False, write=str),
)  # fmt: skip
"""Columns of the table of runs."""


def block_id(directory: Path, name: str) -> str:
    """The identifier, in the page, of the table or figure `name` of a results directory.

    The directory is relative to the root of the page. That of a cell is `block_id(directory, "results.0.2")`. With an
    empty name this is what all identifiers of the directory begin with; it is empty for the root itself.
    """
    path = quote(os.fsencode(directory.as_posix()), safe="/")
    return name if path == "." else f"{path}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """A ladder that was run: the records and profiles of its rungs, and a row of values for each rung."""

    results: Results
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Results by their directories, which are relative to `root` and in order; the root itself is `Path(".")`."""

    root: Path
    sweeps: Mapping[Path, Results] = field(default_factory=dict)
    """Includes the runs that compare two sides."""
    comparisons: Mapping[Path, Compared] = field(default_factory=dict)
    """Verdicts on runs that `cs336 compare` measured, which are among the sweeps too, and on finished sweeps."""
    ladders: Mapping[Path, Climbed] = field(default_factory=dict)
    studies: Mapping[Path, StudyResults] = field(default_factory=dict)
    unreadable: Mapping[Path, str] = field(default_factory=dict)
    """Why the results of a directory cannot be read."""

    @classmethod
    def together(cls, root: Path, several: Iterable["Collection"]) -> "Collection":
        """The results of several collections of the same root, whose directories differ."""
        found, names = list(several), [each.name for each in fields(cls) if each.name != "root"]
        merged: dict[str, dict[Path, Any]] = {name: {} for name in names}
        for own in found:
            for name in names:
                merged[name] |= getattr(own, name)
        return cls(root=root, **{name: dict(sorted(own.items())) for name, own in merged.items()})

    def at(self, directory: Path) -> "Collection":
        """The results of this directory below the root, as a collection of which it is the root."""
        path = directory.relative_to(self.root)
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "root"}
        return Collection(root=directory, **{name: {Path(): own[path]} for name, own in kept.items() if path in own})

    def place(self, directory: Path) -> Path:
        """How the page names the directory: by its path below the root, or the root by its name."""
        return directory if directory != Path() else Path(self.root.resolve().name)

    @property
    def measured(self) -> Mapping[Path, Results]:
        """The results of sweeps and of ladders."""
        return {**self.sweeps, **{path: climbed.results for path, climbed in self.ladders.items()}}

    def ceilings_of(self, directory: Path) -> Ceilings:
        """The ceilings that were measured beside a sweep, of which its rates are given as shares."""
        return self.measured[directory].ceilings

    @property
    def directories(self) -> list[Path]:
        """All directories with results that could be read, each once."""
        return sorted({*self.sweeps, *self.comparisons, *self.ladders, *self.studies})


def collection_page(collection: Collection, on_progress: Callable[[Path, int, int], object] = lambda *_: None) -> Page:
    """The page of all results: a chapter for each subject with its directories, closed.

    A collection of one directory, which is its root, has the chapters of that alone. Before each directory
    `on_progress` gets it, how many are done, and how many there are.
    """
    directories, made = collection.directories, {}
    for number, directory in enumerate(directories):
        on_progress(collection.place(directory), number, len(directories))
        made[directory] = list(_chapters(collection, directory))
    name = collection.root.resolve().name
    if directories == [SELF]:
        title = f"{SUBJECTS[_subject(collection, SELF)]}: {name}"
        return Page(title=title, source=_source(collection, SELF), chapters=made[SELF])
    chapters = []
    for subject, title in SUBJECTS.items():
        parts = [
            Chapter(
                id=block_id(directory, "all"), title=str(directory), is_closed=True,
                source=_source(collection, directory), chapters=made[directory],
            )
            for directory in directories
            if _subject(collection, directory) == subject
        ]  # fmt: skip
        chapters += [Chapter(id=f"subject-{subject}", title=title, chapters=parts)] if parts else []
    if collection.unreadable:
        sentences = [f"{path}: {why}" for path, why in collection.unreadable.items()]
        chapters.append(Chapter(id="unreadable", title="What cannot be read", blocks=[Prose(paragraphs=sentences)]))
    return Page(title=f"All results in {name}", source=counted(len(directories), "directory"), chapters=chapters)


def _subject(collection: Collection, directory: Path) -> str:
    """The subject that a directory belongs to; a sweep that also has profiles belongs to these."""
    if directory in collection.studies:
        return collection.studies[directory].subject
    for name in ("ladders", "comparisons"):
        if directory in getattr(collection, name):
            return name
    profilers = {record.config.profiler for record in collection.sweeps[directory].records}
    if Profiler.MEMORY in profilers:
        return "memory"
    return "kernels" if profilers - {Profiler.NONE} else "steps"


def _chapters(collection: Collection, directory: Path) -> Iterator[Chapter]:
    """What stands out, then the tables and pictures of each subject, then all runs."""
    sections, results = _sections(collection, directory), _results(collection, directory)
    tables = [table for own in sections.values() for section in own for table in section.tables]
    told = [Prose(heading=own.title, paragraphs=own.findings) for own in tables if own.findings]
    if directory in collection.comparisons:
        told.append(Prose(paragraphs=collection.comparisons[directory].left_out))
    if results is not None and (missing := _missing(results)):
        told.append(Prose(paragraphs=[missing]))
    if told:
        yield Chapter(id=block_id(directory, "findings"), title="Findings", blocks=told)
    for number, (title, own) in enumerate(sections.items()):
        prefix = "memory-" if title == MEMORY else ""
        blocks = [block for section in own for block in _blocks(section, directory, prefix)]
        yield Chapter(id=block_id(directory, f"part-{number}"), title=title, blocks=blocks)
    if results is not None and results.records:
        blocks = list(_runs(results.records, block_id(directory, "runs-table")))
        yield Chapter(id=block_id(directory, "runs"), title="Runs", blocks=blocks)


def _sections(collection: Collection, directory: Path) -> Mapping[str, Sequence[Section]]:
    """All sections of a directory, by the title of their chapter."""
    found: dict[str, Sequence[Section]] = {}
    if (compared := collection.comparisons.get(directory)) is not None:
        found["B against A"] = [compared.section]
    if (climbed := collection.ladders.get(directory)) is not None:
        found["Rungs"] = [ladder_section(climbed.rows)]
        found |= {title: own for title, own in climbed.results.sections.items() if title == KERNELS}
    if (study := collection.studies.get(directory)) is not None:
        found["Tables and pictures"] = study.sections
    return {**found, **(collection.sweeps[directory].sections if directory in collection.sweeps else {})}


def _results(collection: Collection, directory: Path) -> Results | None:
    """The runs of a directory, if it has any."""
    climbed = collection.ladders.get(directory)
    return collection.sweeps.get(directory) if climbed is None else climbed.results


def _blocks(section: Section, directory: Path, prefix: str) -> Iterator[Block]:
    """The tables of the section, below its name, of which the second is called `NAME1`; then its pictures."""
    for number, table in enumerate(section.tables):
        csv = "" if number else csv_of(section)
        yield TableBlock(id=block_id(directory, f"{prefix}{section.name}{number or ''}"), table=table, csv=csv)
    for picture in section.pictures:
        yield PictureBlock(id=block_id(directory, f"picture-{picture.name}"), picture=picture)


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


def _runs(records: Sequence[RunRecord], identifier: str) -> Iterator[Block]:
    """A row for each run, failed ones too, then how they failed."""
    found = sorted(records, key=lambda record: (*order(record.config), record.config.profiler, record.config.repeat))
    rows = [_run(record) for record in found]
    table = make_table("Runs", known(RUN, rows), rows, failed=lambda row: bool(row["status"] != Status.OK))
    yield TableBlock(id=identifier, table=table)
    for record in found:
        if (failure := record.failure) is not None:
            where = f" (in {failure.where})" if failure.where else ""
            texts = [failure.message, shortened(failure.traceback or "", LONGEST_TEXT), failure.log_tail or ""]
            title = f"{record.config.label}: {status_text(record.status)}{where}"
            yield Closed(title=title, text="\n\n".join(filter(None, texts)))


def _run(record: RunRecord) -> Row:
    step, config = record.measurement(Phase.STEP), record.config
    is_profiled = config.profiler is not Profiler.NONE
    raw = raw_profile_path(config, Path("runs")) if is_profiled else None
    return {
        "run": f"{config.label}{f', under {config.profiler}' if is_profiled else ''}",
        "status": str(record.status),
        "step_mean_ms": None if step is None else step.mean_s * 1e3,
        "step_std_ms": None if step is None or step.stdev_s is None else step.stdev_s * 1e3,
        "warnings": ", ".join(warning.code for warning in record.warnings) or None,
        "record": f"runs/{record.key}.json",
        "profile": None if raw is None else str(raw),
        "viewer": VIEWERS[config.profiler] if is_profiled else None,
    }


def _source(collection: Collection, directory: Path) -> str:
    """Where the results come from: their place, device, software, commit and time, and the command that made them."""
    results = _results(collection, directory)
    compared = collection.comparisons.get(directory)
    records: Sequence[RunRecord] = results.records if results is not None else ()
    if compared is not None:
        records = [record for side in compared.records for record in side]
    study = collection.studies[directory].study if directory in collection.studies else None
    environments = [record.environment for record in records]
    environments += [getattr(study, "environment", None)]
    told = [str(collection.place(directory)), *_conditions([own for own in environments if own is not None])]
    if isinstance(study, PrecisionStudy):
        told += [*filter(None, [study.gpu]), f"PyTorch {study.torch}"]
    times = sorted(record.started_at[:19] for record in records)
    told += [f"measured {' to '.join(dict.fromkeys((times[0], times[-1])))} UTC"] if times else []
    if command := command_in(collection.root / directory):
        told.append(f"command: {command}")
    return "; ".join(told)


def _conditions(environments: Sequence[Environment]) -> Iterator[str]:
    """Device, software and commit of these environments, each value once."""
    identities = [environment.identity for environment in environments]
    commits = [
        f"{own.git_commit[:9]}{' with changes' if own.git_dirty else ''}" for own in environments if own.git_commit
    ]
    parts: dict[str, Iterable[str | None]] = {
        "": [own.device_name for own in identities],
        "driver ": [own.driver for own in identities],
        "PyTorch ": [own.torch for own in identities],
        "measuring code ": [own.code[:9] for own in identities],
        "commit ": commits,
    }
    for words, values in parts.items():
        if told := list(dict.fromkeys(filter(None, values))):
            yield f"{words}{', '.join(told)}"
