"""The page of one results directory, and of all below a directory by subject: findings, tables,
pictures and runs.

A page is one HTML file that makes no network requests. All but sorting and filtering works without
a script. With the extra `report` it embeds DataTables (from itables), compressed. Every text is
escaped, and the Content-Security-Policy allows only the script whose hash it names. Equal pages are
written as equal bytes.
"""

import base64
import gzip
import hashlib
import importlib.resources
import importlib.util
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from ...analysis.warnings import DOUBTFUL, in_doubt
from ...config import Phase, Profiler
from ...files import write_atomically
from ...record import RUNS, Environment, RunRecord, Status, published_runs
from ...studies.records import PrecisionStudy
from ...sweep.store import VIEWERS, command_in, raw_profile_path
from ...text import counted, inert_line, shortened
from .. import headlines, words
from ..charts import Bar, Chart, Style, visible
from ..columns import Column, Row, column, three_digits
from ..compared import Compared
from ..configurations import order, step_results
from ..draw import svg_of
from ..headlines import Headline, NamedRows
from ..quantities import StepResult
from ..results import KERNELS, MEMORY, STEPS, Results, StudyResults
from ..section import Section, Table, known, labels, make_table
from ..sections.kernels.files import modules_section
from ..sections.kernels.plots import STYLES, configuration_chart, parts_ms
from ..sections.kernels.tables import Explained, phase_rows
from ..sections.ladder import RungResult, ladder_section
from ..sections.memory.findings import MemoryEntry, check_words, difference_bytes
from ..sections.memory.plots import CATEGORIES, peak_bar, peak_charts
from ..sections.steps import BY_PHASE, PARTS, phase_bars
from ..words import in_percent, significant

TABLES = ("itables", "html/dt_bundle.js")
"""The package that sorts tables, and its file, which the page embeds."""
MOST_COLUMNS, LEAST_WORTH = 8, 5
"""A table with more columns than that is shown without those whose `drop_order` is higher, until
somebody asks.
"""
LONGEST_LINE = 100_000
"""Most characters of a line of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Sentences."""

    paragraphs: Sequence[str]
    kind: str = "prose"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBlock:
    """A table below an identifier."""

    id: str
    table: Table
    kind: str = "table"

    @property
    def notes(self) -> list[str]:
        """The notes that are not findings, which the page shows first."""
        return [note for note in self.table.notes if note not in self.table.findings]

    @property
    def columns(self) -> list[tuple[int, Column, bool]]:
        """Index and heading of each column, and whether it is folded; those that are stand last."""
        headings = self.table.headings
        is_wide = len(headings) > MOST_COLUMNS
        found = [
            (index, own, is_wide and own.drop_order > LEAST_WORTH)
            for index, own in enumerate(headings)
        ]
        return sorted(found, key=lambda column: column[2])

    @property
    def rows(self) -> Iterator[tuple[bool, list[tuple[str, str | None, bool]]]]:
        """Whether each row failed, and its cells: text, the value to sort a number by, and
        whether it is folded.
        """
        table, columns = self.table, self.columns
        for number, row in enumerate(table.rows):
            values = table.values[number] if number < len(table.values) else {}
            yield (
                number in table.failed,
                [(row[i], _order(own, values), folded) for i, own, folded in columns],
            )


def _order(heading: Column, values: Mapping[str, Any]) -> str | None:
    """The value below the heading, unrounded; empty if it is not known, and None for a text."""
    if not heading.numeric:
        return None
    value = values.get(heading.key)
    return f"{value:.8g}" if isinstance(value, int | float) and not math.isnan(value) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBlock:
    """A picture below an identifier, as an SVG; matplotlib escapes its words."""

    id: str
    svg: str
    kind: str = "picture"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Lying bars on one scale that begins at 0, below each other, with one legend."""

    title: str
    bars: Sequence[Bar]
    styles: Mapping[str, Style]
    unit: str
    kind: str = "bars"

    @property
    def legend(self) -> list[tuple[str, Style, str]]:
        """Name and style of each part that can be seen in some bar; of a bar alone in its order,
        with the values.
        """
        styles, only = (
            visible(self.bars, self.styles),
            self.bars[0] if len(self.bars) == 1 else None,
        )
        return [
            (name, styles[name], self.words(only, name) if only else "")
            for name in (only.parts if only else styles)
            if name in styles
        ]

    def words(self, bar: Bar, name: str) -> str:
        """How large the part is, and which share of the bar."""
        value = f"{significant(bar.parts[name], 3)} {self.unit}, "
        return f"{'' if self.unit == '%' else value}{in_percent(bar.parts[name] / bar.length)} %"

    def width(self, value: float) -> str:
        """The part of the full width that this value takes, for CSS."""
        whole = max(each.length for each in self.bars)
        return f"{100 * value / whole:.3f}%" if whole else "0"

    def spoken(self, bar: Bar) -> str:
        """The bar in words, for those who do not see it."""
        parts = [f"{name} {self.words(bar, name)}" for name in bar.parts]
        return f"{bar.name}: {', '.join([bar.words, *parts, bar.failure])}"

    @classmethod
    def of(cls, chart: Chart) -> "Bars":
        """The lying bars of a chart, whose panels share one scale here."""
        label = chart.panels[0].label
        unit = next((unit for unit in ("%", "ms", "GiB") if f"({unit})" in label), "")
        bars = [bar for panel in chart.panels for bar in panel.bars]
        return cls(title=chart.title, bars=bars, styles=chart.styles, unit=unit)


@dataclass(frozen=True, slots=True)
class Tile:
    """One number, what it is, and a note below it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Pairs of a name and a text."""

    rows: Sequence[tuple[str, str]]
    kind: str = "facts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What a reader sees first."""

    answer: str
    more: str = ""
    """The rest of the finding that the answer is the first sentence of."""
    bars: Sequence[Bars] = ()
    tiles: Sequence[Tile] = ()
    trust: str = ""
    doubts: Sequence[str] = ()
    """What puts the numbers in doubt; where there is anything, `trust` is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A long text as it is, such as a traceback, closed until somebody opens it."""

    title: str
    text: str
    kind: str = "closed"


Block = Prose | TableBlock | PictureBlock | Bars | Facts | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """Blocks below one heading."""

    id: str
    title: str
    blocks: Sequence[Block] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A page in the list of all."""

    link: str
    name: str
    page: "Page"

    @property
    def thumbnail(self) -> Bars | PictureBlock | None:
        """The last bars of the page's first screen, else its first picture."""
        if self.page.glance is not None and self.page.glance.bars:
            return self.page.glance.bars[-1]
        blocks = (block for chapter in self.page.chapters for block in chapter.blocks)
        return next((block for block in blocks if isinstance(block, PictureBlock | Bars)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a reader sees first, then chapters; in the list of all pages, their entries by
    subject.
    """

    title: str
    chapters: Sequence[Chapter] = ()
    glance: Glance | None = None
    shelves: Mapping[str, Sequence[Entry]] = field(default_factory=dict)


def write_page(page: Page, path: Path) -> None:
    """Write the page to the file at once, so that an interrupted writer leaves the earlier one
    whole.
    """
    write_atomically(path, to_html(page).encode())


def to_html(page: Page) -> str:
    """The page as text; raise ValueError where two parts have one identifier."""
    blocks = [block for chapter in page.chapters for block in chapter.blocks]
    named = [
        part.id
        for part in (*page.chapters, *blocks)
        if isinstance(part, Chapter | TableBlock | PictureBlock)
    ]
    if len(set(named)) < len(named):
        twice = next(name for place, name in enumerate(named) if name in named[:place])
        raise ValueError(f"each part of a page needs an identifier of its own, got {twice!r} twice")
    has_tables = any(isinstance(block, TableBlock) for block in blocks)
    script = _read("page.js")
    return _TEMPLATES.get_template("page.html").render(
        page=page,
        hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(_read("page.css")),
        script=Markup(script),
        packed=_library() if has_tables else {},
    )


def _visible(value: object) -> object:
    """A text with its lines, in which nothing is hidden or turned around."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(inert_line(line.expandtabs(4), LONGEST_LINE) for line in value.split("\n"))


def _read(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def _library() -> Mapping[str, Markup]:
    """What the extra `report` brings, which is not imported for it; nothing where it is not
    installed.
    """
    package, file = TABLES
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations if spec else None) or ()
    library = next(
        (path.read_bytes() for place in places if (path := Path(place) / file).is_file()), None
    )
    return (
        {}
        if library is None
        else {"tables": Markup(base64.b64encode(gzip.compress(library, mtime=0)).decode())}
    )


_TEMPLATES = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    finalize=_visible,
    loader=jinja2.FunctionLoader(_read),
)
PAGE_FILE = "index.html"
"""The page for a browser, beside the tables."""
MOST_TIMES = 40
"""Most raw times that the table of runs shows of one run; its record has all."""
LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""
SUBJECTS = {
    "steps": "Time and memory of a training step",
    "ladders": "From the slow step to the fast one",
    "kernels": KERNELS,
    "memory": MEMORY,
    "attention": "Attention alone",
    "fusion": "Fused operations",
    "ceilings": "What the machine reaches",
    "precision": "Precision",
    "comparisons": "A against B",
}
"""All subjects in the order of the page; sweeps are by what was profiled in them."""


def _each(times_ms: Sequence[float]) -> str:
    left_out = f" and {len(times_ms) - MOST_TIMES} more" if len(times_ms) > MOST_TIMES else ""
    return f"{', '.join(words.significant(time_ms) for time_ms in times_ms[:MOST_TIMES])}{left_out}"


RUN = (
    Column("run", key="run", numeric=False, write=str),
    column("status"),
    column("step_mean_ms"),
    Column(
        "each step", "ms", "The raw times, in order.", key="times_ms", numeric=False, write=_each
    ),
    Column("warnings", key="warnings", numeric=False, write=str),
    Column("record", key="record", numeric=False, write=str),
    Column("raw profile", about="If it was kept.", key="profile", numeric=False, write=str),
    Column("opens in", key="viewer", numeric=False, write=str),
)
"""Columns of the table of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """A ladder that was run: the records and profiles of its rungs, and the result of each rung."""

    results: Results
    rows: Sequence[RungResult]


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
        profilers = (
            {record.subject.profiler for record in self.sweep.records}
            if self.sweep is not None
            else set()
        )
        return (
            "memory"
            if Profiler.MEMORY in profilers
            else "kernels"
            if profilers - {Profiler.NONE}
            else "steps"
        )


def page_of(directory: Directory) -> Page:
    """The page of one directory: its answer, where time and memory go, tables, runs, and how it
    was measured.
    """
    sections = _sections(directory)
    tables = [table for own in sections.values() for section in own for table in section.tables]
    glance = glance_at(directory)
    title = f"{SUBJECTS[directory.subject]}: {directory.path.resolve().name}"
    chapters = list(_chapters(directory, sections, glance, tables))
    return Page(title=title, glance=glance, chapters=chapters)


def write_page_of(directory: Directory, say: Callable[[str], None]) -> tuple[Path, Page]:
    """Write the page of one directory into it, saying so; return its path and what it shows."""
    say(f"making the page of {directory.path.name}")
    page = page_of(directory)
    write_page(page, directory.path / PAGE_FILE)
    return directory.path / PAGE_FILE, page


def list_of(
    root: Path, pages: Mapping[Path, tuple[str, Page]], unreadable: Mapping[Path, str]
) -> Page:
    """The list of all pages below `root`, by their directories relative to it and with their
    subjects.
    """
    shelves: dict[str, list[Entry]] = {}
    for subject, title in SUBJECTS.items():
        for path, (own, page) in pages.items():
            if own == subject:
                link = f"{quote(os.fsencode(path.as_posix()))}/{PAGE_FILE}"
                shelves.setdefault(title, []).append(Entry(link=link, name=str(path), page=page))
    lost = [f"{path}: {why}" for path, why in unreadable.items()]
    chapters = (
        [Chapter(id="unreadable", title="What cannot be read", blocks=[Prose(paragraphs=lost)])]
        if lost
        else []
    )
    title = f"All results in {root.resolve().name}"
    return Page(title=title, chapters=chapters, shelves=shelves)


def _chapters(
    directory: Directory,
    sections: Mapping[str, Sequence[Section]],
    glance: Glance,
    tables: Sequence[Table],
) -> Iterator[Chapter]:
    """Findings, then pictures and tables of each subject, then all runs, and how they were
    measured.
    """
    results = directory.results
    # findings of profiles stand in tables of their own
    told = [
        text for own in tables for text in own.findings if text not in (glance.answer, glance.more)
    ]
    told += directory.compared.left_out if directory.compared is not None else []
    told += (
        [f"{lost[0].upper()}{lost[1:]}."] if results is not None and (lost := results.lost) else []
    )
    if told:
        yield Chapter(id="findings", title="Findings", blocks=[Prose(paragraphs=told)])
    shown = [bar.parts for bars in glance.bars for bar in bars.bars]
    notes = Counter(note for own in tables for note in own.notes)
    repeated = {note for note, count in notes.items() if count > 1}
    for number, (title, own) in enumerate(sections.items()):
        blocks = [
            block
            for block in _blocks(title, own, repeated)
            if not isinstance(block, Bars) or any(bar.parts not in shown for bar in block.bars)
        ]
        yield Chapter(id=f"part-{number}", title=title, blocks=blocks)
    if results is not None and results.records:
        yield Chapter(id="runs", title="Runs", blocks=list(_runs(results.records, directory.path)))
    yield Chapter(
        id="measured",
        title="How it was measured",
        blocks=[
            Facts(
                rows=[*_source(directory), *(("note", note) for note in notes if note in repeated)]
            )
        ],
    )


def _sections(directory: Directory) -> Mapping[str, Sequence[Section]]:
    """All sections of a directory, by the title of their chapter; where time and memory go comes
    before the times.
    """
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
    """The pictures, then the tables without `repeated` notes; the second table of a section is
    called `NAME1`.

    The page itself draws the lying bars of charts.
    """
    prefix = "memory-" if title == MEMORY else ""
    for picture in (picture for section in sections for picture in section.pictures):
        if isinstance(picture, Chart):
            yield Bars.of(picture)
        else:
            yield PictureBlock(id=f"picture-{picture.name}", svg=svg_of(picture, picture.name))
    for section in sections:
        for number, table in enumerate(section.tables):
            shown = replace(
                table, notes=tuple(note for note in table.notes if note not in repeated)
            )
            yield TableBlock(id=f"{prefix}{section.name}{number or ''}", table=shown)


def _runs(records: Sequence[RunRecord], directory: Path) -> Iterator[Block]:
    """A row for each run, failed ones too, then how they failed."""
    joined = published_runs(directory / RUNS)
    found = sorted(
        records,
        key=lambda record: (*order(record.subject), record.subject.profiler, record.subject.repeat),
    )
    rows = [_run(record) for record in found]
    for row, record in zip(rows, found, strict=True):
        if joined.is_file() and not (directory / row["record"]).is_file():
            row["record"] = f"{record.key} in {joined.name}"
    table = make_table(
        "Runs", known(RUN, rows), rows, failed=lambda row: bool(row["status"] != Status.OK)
    )
    yield TableBlock(id="runs-table", table=table)
    for record in found:
        if (failure := record.failure) is not None:
            where = f" (in {failure.where})" if failure.where else ""
            texts = [
                failure.message,
                shortened(failure.traceback or "", LONGEST_TEXT),
                failure.log_tail or "",
            ]
            title = f"{record.subject.label}: {words.status_text(record.status)}{where}"
            yield Closed(title=title, text="\n\n".join(filter(None, texts)))


def _run(record: RunRecord) -> Row:
    step, subject = record.measurement(Phase.STEP), record.subject
    is_profiled = subject.profiler is not Profiler.NONE
    raw = raw_profile_path(subject, Path("runs")) if is_profiled else None
    return {
        "run": f"{subject.label}{f', under {subject.profiler}' if is_profiled else ''}",
        "status": str(record.status),
        "step_mean_ms": None if step is None else step.mean_s * 1e3,
        "step_std_ms": None if step is None or step.stdev_s is None else step.stdev_s * 1e3,
        "times_ms": None if step is None else [time_s * 1e3 for time_s in step.times_s],
        "warnings": ", ".join(warning.code for warning in record.warnings) or None,
        "record": f"{RUNS}/{record.key}.json",
        "profile": None if raw is None else str(raw),
        "viewer": VIEWERS[subject.profiler] if is_profiled else None,
    }


def _source(directory: Directory) -> Iterator[tuple[str, str]]:
    """Where the results come from: device, software, commit and time, and the command that made
    them.
    """
    results, study = (
        directory.results,
        directory.study.study if directory.study is not None else None,
    )
    records: Sequence[RunRecord] = results.records if results is not None else ()
    environments = [
        *(record.environment for record in records),
        getattr(study, "environment", None),
    ]
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
        f"{own.git_commit[:9]}{' with changes' if own.git_dirty else ''}"
        for own in environments
        if own.git_commit
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


MAX_SLOWDOWN = 0.10
"""A profiler that makes a step longer by more than this share puts what it says of the step in
doubt.
"""


def headline_of(directory: Directory, rows: Sequence[StepResult]) -> Headline:
    """The headline of the directory's page; the rows are those of its runs."""
    if directory.study is not None:
        return headlines.OF_STUDIES[directory.study.subject](directory.study.sections)
    if directory.climbed is not None:
        return headlines.of_ladder(directory.climbed.rows)
    if directory.compared is not None:
        return headlines.of_comparison(directory.compared)
    if directory.sweep is not None and directory.subject == "memory":
        return headlines.of_memory(directory.sweep.memory, rows)
    if directory.sweep is not None and directory.sweep.kernels:
        return headlines.of_profiles(directory.sweep.kernels, rows)
    return headlines.of_steps(rows)


def glance_at(directory: Directory) -> Glance:
    """The first screen: the headline, and of runs what their memory, their profiles or their
    times show.
    """
    results = directory.sweep
    rows = times_of(results) if results is not None else []
    answer, more = headline_of(directory, rows)
    glance = Glance(answer=answer, more=more)
    if results is None:
        return glance
    note = "" if results.published else "with the profiler running"
    title = f"{BY_PHASE}, {note}" if note else BY_PHASE
    bars = Bars(title=title, bars=phase_bars(rows), styles=PARTS, unit="ms")
    doubts = [*_failed_profiles(results), *_doubts(rows)]
    glance = replace(
        glance, bars=[bars], tiles=_tiles(rows, note), doubts=doubts, trust=_steady(rows)
    )
    if results.memory and directory.compared is None:
        return _with_memory(glance, results.memory)
    if results.kernels and directory.compared is None:
        return _with_profiles(glance, results.kernels)
    return glance


def _failed_profiles(results: Results) -> list[str]:
    """How runs under a profiler failed, where the headline is of runs without one."""
    profiled = [
        record for record in results.records if record.subject.profiler is not Profiler.NONE
    ]
    rows = [{"status": record.status} for record in profiled]
    ends = NamedRows(rows, [record.subject.label for record in profiled]).failures()
    return [f"Under the profiler: {ends.removeprefix('; ')}."] if ends and results.published else []


def times_of(results: Results) -> Sequence[StepResult]:
    """The configurations without a profiler; if all runs were under one, those of kernels, else
    those of memory.
    """
    profiled = [
        own for own in results.records if own.subject.profiler is not Profiler.MEMORY
    ] or results.records
    if results.published:
        return results.configurations
    return step_results(profiled, results.ceilings)


def _with_profiles(glance: Glance, entries: Sequence[Explained]) -> Glance:
    """Instead of several bars by phase those by kind of work; to those of a single profile come
    its kinds of work.
    """
    slowed = [row for entry in entries for row in list(phase_rows(entry))[-1:] if row["slowdown"]]
    worst = max((row["slowdown"] for row in slowed), default=1.0)
    doubts = [*glance.doubts]
    if worst > 1 + MAX_SLOWDOWN:
        doubts.append(
            f"The profiler made a step up to {words.significant(worst, 3)} times as long as it is "
            "without."
        )
    names = labels(entries)
    chart = configuration_chart(
        [(name, own.profile) for name, own in zip(names, entries, strict=True)]
    )
    if chart is not None:
        return replace(glance, bars=[Bars.of(chart)], doubts=doubts)
    work = Bar(name="work", parts=parts_ms(entries[0].profile))
    title = f"Kinds of work, and how long the device is idle, in the profiled step of {names[0]}"
    return replace(
        glance,
        bars=[*glance.bars, Bars(title=title, bars=[work], styles=STYLES, unit="ms")],
        doubts=doubts,
    )


def _with_memory(glance: Glance, entries: Sequence[MemoryEntry]) -> Glance:
    of_one = Bars(
        title="What the peak consists of",
        bars=[peak_bar("peak", entries[0])],
        styles=CATEGORIES,
        unit="GiB",
    )
    moments = [moment for entry in entries for moment in entry.profile.boundaries]
    checked = check_words(moments) if moments else ""
    doubts = [checked] if any(map(difference_bytes, moments)) else []
    bars = [Bars.of(chart) for chart in peak_charts(entries)] or [of_one]
    return replace(glance, bars=bars, doubts=[*glance.doubts, *doubts], trust=checked)


def _tiles(rows: Sequence[StepResult], note: str) -> list[Tile]:
    """Step, throughput, utilisation and memory, as ranges; of one configuration the step with
    its deviation.
    """
    step = _range(rows, "step_mean_ms", words.milliseconds)
    peak = _range(rows, "peak_allocated_gib", lambda gib: f"{words.significant(gib, 3)} GiB")
    spread = f"{len(_timed(rows))} of {counted(len(rows), 'configuration')}"
    if len(rows) == 1 and rows[0].step_mean_ms is not None and rows[0].step_std_ms is not None:
        step = f"{words.mean_and_std(rows[0].step_mean_ms, rows[0].step_std_ms)} ms"
        spread = "mean ± standard deviation"
    tiles = [
        Tile("step", step, note or spread),
        Tile("tokens/s", _range(rows, "tokens_per_s", three_digits), "in a step over its time"),
        Tile("MFU", _range(rows, "mfu", words.percent_of), "model FLOPs, of the data sheet's peak"),
        Tile("peak of memory", peak, "allocated at most"),
    ]
    return [tile for tile in tiles if tile.value]


def _range(rows: Sequence[StepResult], key: str, text: Callable[[float], str]) -> str:
    """The least and the largest value under the key, the unit once; empty without any."""
    known = [row[key] for row in rows if row[key] is not None]
    if not known:
        return ""
    low, high = text(min(known)), text(max(known))
    number, space, unit = low.partition(" ")
    return low if low == high else f"{number if high.endswith(f'{space}{unit}') else low} to {high}"


def _doubts(rows: Sequence[StepResult]) -> list[str]:
    """How many times are in doubt, and by which warnings."""
    rows = _timed(rows)
    number = sum(in_doubt(row.codes) for row in rows)
    counts = Counter(code for row in rows for code in row.codes if code in DOUBTFUL)
    told = ", ".join(
        f"{code} in {count}" if len(rows) > 1 else code for code, count in counts.most_common()
    )
    if not number:
        return []
    several = ", some in several ways" if counts.total() > number else ""
    many = f"{number} of {len(rows)} times are in doubt ({words.DOUBT}){several}: {told}."
    return [many if len(rows) > 1 else f"The time is in doubt: {told}."]


def _timed(rows: Sequence[StepResult]) -> list[StepResult]:
    return [row for row in rows if row.step_mean_ms is not None]


def _steady(rows: Sequence[StepResult]) -> str:
    """That the times are steady; empty without times."""
    spread = max((row.step_cv for row in rows if row.step_cv is not None), default=None)
    told = (
        ""
        if spread is None
        else f"; the standard deviation is at most {words.percent_of(spread)} of the step"
    )
    return f"No warning puts a time in doubt{told}." if _timed(rows) else ""
