"""The page of one results directory, and of all below a directory by subject: findings, tables, pictures and runs."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from cs336_systems.config import Phase, Profiler
from cs336_systems.record import Environment, RunRecord, Status
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.compared import Compared
from cs336_systems.report.formats import csv_of
from cs336_systems.report.frame import order
from cs336_systems.report.page.glance import glance_at, glance_of
from cs336_systems.report.page.write import (
    Bars,
    Block,
    Chapter,
    Closed,
    Entry,
    Facts,
    Glance,
    Page,
    PictureBlock,
    Prose,
    Shelf,
    TableBlock,
)
from cs336_systems.report.plots.charts import Chart
from cs336_systems.report.plots.draw import svg_of
from cs336_systems.report.results import KERNELS, MEMORY, STEPS, Results, StudyResults
from cs336_systems.report.section import Section, Table, known, make_table
from cs336_systems.report.sections.kernels.files import modules_section
from cs336_systems.report.sections.ladder import ladder_section
from cs336_systems.report.words import significant, status_text
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.sweep.store import VIEWERS, command_in, raw_profile_path
from cs336_systems.text import counted, shortened

PAGE_FILE = "index.html"
"""The page for a browser, beside the tables."""
MOST_TIMES = 40
"""Most raw times that the table of runs shows of one run; its record has all."""
LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""
SUBJECTS = {
    "steps": "Time and memory of a training step", "ladders": "From the slow step to the fast one", "kernels": KERNELS,
    "memory": MEMORY, "attention": "Attention alone", "fusion": "Fused operations",
    "ceilings": "What the machine reaches", "precision": "Precision", "comparisons": "A against B",
}  # fmt: skip
"""All subjects in the order of the page; sweeps are by what was profiled in them."""


def _each(times_ms: Sequence[float]) -> str:
    left_out = f" and {len(times_ms) - MOST_TIMES} more" if len(times_ms) > MOST_TIMES else ""
    return f"{', '.join(significant(time_ms) for time_ms in times_ms[:MOST_TIMES])}{left_out}"


RUN = (
    Column("run", key="run", numeric=False, write=str), column("status"), column("step_mean_ms"),
    Column("each step", "ms", "The raw times, in order.", key="times_ms", numeric=False, write=_each),
    Column("warnings", key="warnings", numeric=False, write=str),
    Column("record", key="record", numeric=False, write=str),
    Column("raw profile", about="If it was kept.", key="profile", numeric=False, write=str),
    Column("opens in", key="viewer", numeric=False, write=str),
)  # fmt: skip
"""Columns of the table of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """A ladder that was run: the records and profiles of its rungs, and a row of values for each rung."""

    results: Results
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """The results in one directory, as far as it has any."""

    path: Path
    sweep: Results | None = None
    """Of a comparison, the runs that `cs336 compare` measured."""
    compared: Compared | None = None
    climbed: Climbed | None = None
    study: StudyResults | None = None

    @property
    def results(self) -> Results | None:
        """The runs, of a sweep or of a ladder."""
        return self.sweep if self.climbed is None else self.climbed.results

    @property
    def subject(self) -> str:
        """The subject that it belongs to; a sweep that also has profiles belongs to these."""
        if self.study is not None:
            return self.study.subject
        if self.climbed is not None or self.compared is not None:
            return "ladders" if self.climbed is not None else "comparisons"
        profilers = {record.config.profiler for record in self.sweep.records} if self.sweep is not None else set()
        return "memory" if Profiler.MEMORY in profilers else "kernels" if profilers - {Profiler.NONE} else "steps"


def page_of(directory: Directory) -> Page:
    """The page of one directory: its answer, where time and memory go, tables, runs, and how it was measured."""
    sections, results = _sections(directory), directory.results
    tables = [table for own in sections.values() for section in own for table in section.tables]
    glance = glance_of(tables) if results is None or directory.sweep is None else glance_at(results)
    title = f"{SUBJECTS[directory.subject]}: {directory.path.resolve().name}"
    chapters = list(_chapters(directory, sections, glance, tables))
    return Page(title=title, glance=glance, chapters=chapters)


def list_of(root: Path, pages: Mapping[Path, tuple[str, Page]], unreadable: Mapping[Path, str]) -> Page:
    """The list of all pages below `root`, by their directories relative to it and with their subjects."""
    shelves = []
    for subject, title in SUBJECTS.items():
        entries = [
            Entry(link=f"{quote(os.fsencode(path.as_posix()))}/{PAGE_FILE}", name=str(path), page=page)
            for path, (own, page) in pages.items()
            if own == subject
        ]
        shelves += [Shelf(title=title, entries=entries)] if entries else []
    lost = [f"{path}: {why}" for path, why in unreadable.items()]
    chapters = [Chapter(id="unreadable", title="What cannot be read", blocks=[Prose(paragraphs=lost)])] if lost else []
    title = f"All results in {root.resolve().name}"
    return Page(title=title, chapters=chapters, shelves=shelves)


def _chapters(
    directory: Directory, sections: Mapping[str, Sequence[Section]], glance: Glance | None, tables: Sequence[Table]
) -> Iterator[Chapter]:
    """Findings, then pictures and tables of each subject, then all runs, and how they were measured."""
    results, said = directory.results, glance.answer if glance is not None else ""
    # findings of profiles stand in tables of their own
    told = [text for own in tables for text in own.findings if text != said]
    told += directory.compared.left_out if directory.compared is not None else []
    told += [missing] if results is not None and (missing := _missing(results)) else []
    if told:
        yield Chapter(id="findings", title="Findings", blocks=[Prose(paragraphs=told)])
    shown = {bars.title for bars in glance.bars} if glance is not None else set()
    notes = Counter(note for own in tables for note in own.notes)
    repeated = {note for note, count in notes.items() if count > 1}
    for number, (title, own) in enumerate(sections.items()):
        blocks = [block for block in _blocks(title, own, repeated) if getattr(block, "title", "") not in shown]
        yield Chapter(id=f"part-{number}", title=title, blocks=blocks)
    if results is not None and results.records:
        yield Chapter(id="runs", title="Runs", blocks=list(_runs(results.records)))
    yield Chapter(id="measured", title="How it was measured", blocks=[
        Facts(rows=[*_source(directory), *(("note", note) for note in notes if note in repeated)])
    ])  # fmt: skip


def _sections(directory: Directory) -> Mapping[str, Sequence[Section]]:
    """All sections of a directory, by the title of their chapter; where time and memory go comes before the times."""
    found: dict[str, Sequence[Section]] = {}
    if directory.compared is not None:
        found["B against A"] = [directory.compared.section]
    if directory.climbed is not None:
        found["Rungs"] = [ladder_section(directory.climbed.rows)]
    if directory.study is not None:
        found["Tables and pictures"] = directory.study.sections
    own = directory.results.sections if directory.results is not None else {}
    if directory.results is not None and len(kernels := directory.results.kernels) == 1:
        own = {**own, KERNELS: [*own[KERNELS], modules_section(kernels[0].profile)]}
    titles = (KERNELS, MEMORY, STEPS) if directory.climbed is None else (KERNELS,)
    return found | {title: own[title] for title in titles if title in own}


def _blocks(title: str, sections: Sequence[Section], repeated: Collection[str]) -> Iterator[Block]:
    """The pictures, then the tables without `repeated` notes; the second table of a section is called `NAME1`.

    The page itself draws the lying bars of charts.
    """
    prefix = "memory-" if title == MEMORY else ""
    for picture in (picture for section in sections for picture in section.pictures):
        if isinstance(picture, Chart) and picture.is_lying:
            yield Bars.of(picture)
        else:
            yield PictureBlock(id=f"picture-{picture.name}", svg=svg_of(picture, picture.name))
    for section in sections:
        for number, table in enumerate(section.tables):
            csv = "" if number else csv_of(section)
            notes = tuple(note for note in table.notes if note not in repeated)
            shown = replace(table, notes=notes)
            yield TableBlock(id=f"{prefix}{section.name}{number or ''}", table=shown, csv=csv)


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


def _runs(records: Sequence[RunRecord]) -> Iterator[Block]:
    """A row for each run, failed ones too, then how they failed."""
    found = sorted(records, key=lambda record: (*order(record.config), record.config.profiler, record.config.repeat))
    rows = [_run(record) for record in found]
    table = make_table("Runs", known(RUN, rows), rows, failed=lambda row: bool(row["status"] != Status.OK))
    yield TableBlock(id="runs-table", table=table)
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
        "times_ms": None if step is None else [time_s * 1e3 for time_s in step.times_s],
        "warnings": ", ".join(warning.code for warning in record.warnings) or None,
        "record": f"runs/{record.key}.json",
        "profile": None if raw is None else str(raw),
        "viewer": VIEWERS[config.profiler] if is_profiled else None,
    }


def _source(directory: Directory) -> Iterator[tuple[str, str]]:
    """Where the results come from: device, software, commit and time, and the command that made them."""
    results, study = directory.results, directory.study.study if directory.study is not None else None
    records: Sequence[RunRecord] = results.records if results is not None else ()
    if directory.compared is not None:
        records = [record for side in directory.compared.records for record in side]
    environments = [*(record.environment for record in records), getattr(study, "environment", None)]
    yield from _conditions([own for own in environments if own is not None])
    if isinstance(study, PrecisionStudy):
        yield from (("device", study.gpu or "CPU"), ("PyTorch", study.torch))
    if times := sorted(record.started_at[:19] for record in records):
        yield "measured", f"{' to '.join(dict.fromkeys((times[0], times[-1])))} UTC"
    if command := command_in(directory.path):
        yield "command", command


def _conditions(environments: Sequence[Environment]) -> Iterator[tuple[str, str]]:
    """Device, software and commit of these environments, each value once."""
    identities = [environment.identity for environment in environments]
    commits = [
        f"{own.git_commit[:9]}{' with changes' if own.git_dirty else ''}" for own in environments if own.git_commit
    ]
    parts: dict[str, Iterable[str | None]] = {
        "device": [own.device_name for own in identities],
        "driver": [own.driver for own in identities],
        "PyTorch": [own.torch for own in identities],
        "measuring code": [own.code[:9] for own in identities],
        "commit": commits,
    }
    for name, values in parts.items():
        if told := list(dict.fromkeys(filter(None, values))):
            yield name, ", ".join(told)
