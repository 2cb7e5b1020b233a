"""What the page of a sweep holds: what stands out, the time, the kernels and the memory of a step, and every run."""

import base64
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cs336_systems.config import Phase, Profiler
from cs336_systems.files import encode_json
from cs336_systems.record import RunRecord, Status, WarningCode, encode_record
from cs336_systems.report.columns import Row
from cs336_systems.report.entries import labels
from cs336_systems.report.frame import order, to_frame
from cs336_systems.report.identity import identities, names_of
from cs336_systems.report.numbers import significant
from cs336_systems.report.page import figures, profiles
from cs336_systems.report.page.command import command_of
from cs336_systems.report.page.refusals import by_warmup, id_of, separated, warmup_reasons
from cs336_systems.report.page.write import Block, Chapter, Figure, Page, Prose, Run, TableBlock
from cs336_systems.report.plots.steps import pictures
from cs336_systems.report.results import Results
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.files import SUBJECTS
from cs336_systems.report.sections.kernels.findings import findings as kernel_findings
from cs336_systems.report.sections.kernels.words import WHOLE_STEP
from cs336_systems.report.sections.memory.files import sections as memory_sections
from cs336_systems.report.sections.memory.findings import findings as memory_findings
from cs336_systems.report.sections.steps import results_section
from cs336_systems.report.table import Table
from cs336_systems.report.words import status_text
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.sweep.store import VIEWERS, raw_profile_path
from cs336_systems.text import inert_json, inert_line, shortened

LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""
DOUBTED = " Warnings of the two runs put it in doubt."
PlaceOf = Callable[[RunRecord], Path]
"""The directory that a record comes from."""
Sentence = tuple[str, str]
"""A sentence, and the identifier of the cell that it rests on."""


def sweep_page(
    results: Results,
    directory: Path,
    ceilings: Ceilings = NO_CEILINGS,
    found_in: Mapping[Path, Sequence[RunRecord]] | None = None,
) -> Page:
    """The page of what was measured; the PNGs are those in plots/ of the directory.

    `found_in` has the records by the directory that each comes from, if that is not the directory of the page.
    """
    places = {id_of(record): path for path, own in (found_in or {}).items() for record in own}

    def place_of(record: RunRecord) -> Path:
        return places.get(id_of(record), directory)

    apart = separated(results)
    is_alone = len(apart.groups) == 1
    found = [
        _Contents(own, directory, place_of, ceilings, "" if is_alone else f"-{number}")
        for number, own in enumerate(apart.groups, 1)
    ]
    refused = [*apart.reasons, *(text for own in apart.groups for text in warmup_reasons(own.published))]
    limits, stands_out, doubts = (
        [sentence for own in found for sentence in sentences(own)]
        for sentences in (_Contents.limits, _Contents.stands_out, _Contents.doubts)
    )
    prose = {
        "What limits each configuration": limits,
        "What stands out": stands_out,
        "What is in doubt": doubts,
        "What is not side by side, and why": [(text, "") for text in refused],
    }
    source = provenance(results.records, place_of)
    blocks = [Prose(heading=heading, paragraphs=sentences) for heading, sentences in prose.items() if sentences]
    chapters = [Chapter(id="findings", title="Findings", blocks=blocks, source=source)]
    chapters += [
        Chapter(
            id=f"{name}{own.ending}",
            title=inert_line(title if is_alone else f"{title}: {own.conditions}"),
            blocks=made,
            source=own.source,
        )
        for name, title in (("time", "Time of a step"), ("kernels", "Kernels"), ("memory", "Memory"))
        for own in found
        if (made := getattr(own, name))
    ]
    chapters.append(_runs(results.records, place_of))
    return Page(
        title=inert_line(f"Time and memory of a training step: {directory.name}"),
        source=source,
        chapters=[chapter for chapter in chapters if chapter.blocks],
    )


def provenance(records: Iterable[RunRecord], place_of: PlaceOf) -> str:
    """Where what is shown comes from: directories, device, software, commit and time of measurement."""
    found = list(records)
    times = sorted(record.started_at for record in found)
    places = dict.fromkeys(str(place_of(record)) for record in found)
    measured = " to ".join(dict.fromkeys(time[:19] for time in (*times[:1], *times[-1:])))
    return inert_line(
        "; ".join([", ".join(places), *_conditions(found), *([f"measured {measured} UTC"] if times else [])])
    )


def _conditions(records: Sequence[RunRecord]) -> list[str]:
    """Device, software and commit of the records, each value once."""
    environments = [record.environment for record in records if record.environment is not None]
    commits = [
        f"{environment.git_commit[:9]}{' with changes' if environment.git_dirty else ''}"
        for environment in environments
        if environment.git_commit
    ]
    return [
        *_each("", [environment.identity.device_name for environment in environments]),
        *_each("driver ", [environment.identity.driver for environment in environments]),
        *_each("PyTorch ", [environment.identity.torch for environment in environments]),
        *_each("measuring code ", [environment.identity.code[:9] for environment in environments]),
        *_each("commit ", commits),
    ]


def _each(words: str, values: Iterable[str | None]) -> list[str]:
    """The different values, after what they are."""
    known = list(dict.fromkeys(value for value in values if value))
    return [f"{words}{', '.join(known)}"] if known else []


class _Contents:
    """What records that can be compared show: the blocks of each chapter, and sentences on them."""

    def __init__(self, results: Results, directory: Path, place_of: PlaceOf, ceilings: Ceilings, ending: str) -> None:
        """`ending` tells identifiers from those of other records in the page."""
        self.results, self.directory, self.ceilings, self.ending = results, directory, ceilings, ending
        self.place_of = place_of
        self.source = provenance(results.records, place_of)
        self.conditions = ", ".join(_conditions(results.records)[:3])
        self.steps = self._steps()
        self.time = self._time()
        self.kernels = self._kernels()
        self.memory = self._memory()

    def _steps(self) -> list[TableBlock]:
        """The times of each configuration, in a table for each number of warm-up steps."""
        groups = by_warmup(self.results.published)
        found = []
        for number, own in enumerate(groups):
            section = results_section(own, self.ceilings)
            table = section.tables[0]
            if len(groups) > 1:
                table = replace(table, title=f"{table.title} after {own[0].config.warmup_steps} warm-up steps")
            found.append(self._table(f"results{f'-warmup-{number}' if number else ''}", section, table))
        return found

    def _time(self) -> list[Block]:
        """Tables of steps, and the pictures that the results support."""
        published = self.results.published
        if not published:
            return []
        frame = to_frame(published, self.ceilings)
        blocks: list[Block] = list(self.steps)
        if len(self.steps) > 1:
            section = results_section(published, self.ceilings)
            blocks += [self._table("warmup", section, table) for table in section.tables[1:]]
        for stem, draw in pictures(frame):
            title, settings, spec, height = figures.picture(draw)
            blocks.append(self._figure(stem, f"{title}: {settings}", spec, height))
        return blocks

    def _kernels(self) -> list[Block]:
        """What the kernels of the profiled runs did: tables, and pictures and findings of each run."""
        entries = self.results.kernels
        if not entries:
            return []
        blocks: list[Block] = list(self._tables(make(entries) for make in SUBJECTS))
        for number, (name, entry) in enumerate(zip(labels(entries), entries, strict=True)):
            source, profile = provenance([entry.profiled], self.place_of), entry.profile
            sentences = [(text, "") for text in map(inert_line, kernel_findings(profile, entry.config))]
            blocks.append(Prose(heading=inert_line(name), paragraphs=sentences))
            if (spec := profiles.step_picture(profile)) is not None:
                stem = f"{entry.config.key}_timeline"
                blocks.append(
                    self._figure(
                        stem,
                        f"One step on its streams, kernels of one class that follow each other as one: {name}",
                        spec,
                        320,
                        source,
                        number,
                    )
                )
            spec = profiles.classes_picture(profile)
            blocks.append(
                self._figure(f"{entry.config.key}_classes", f"Time by class: {name}", spec, 340, source, number)
            )
        return blocks

    def _memory(self) -> list[Block]:
        """What the memory of the recorded runs held: tables, peaks, and memory over time of each run."""
        entries = sorted(self.results.memory, key=lambda entry: order(entry.config))
        if not entries:
            return []
        names, blocks = labels(entries), list[Block](self._tables(memory_sections(entries), "memory-"))
        spec = profiles.peaks_picture(names, [entry.profile for entry in entries])
        blocks.append(self._figure("peaks", "What the peak of each run consists of", spec, 160 + 30 * len(entries)))
        records = {record.config: record for record in self.results.records}
        for number, (name, entry) in enumerate(zip(names, entries, strict=True)):
            source = provenance([records[entry.config]], self.place_of)
            sentences = [(text, "") for text in map(inert_line, memory_findings(entry.profile))]
            blocks.append(Prose(heading=inert_line(name), paragraphs=sentences))
            if (timeline := profiles.memory_picture(entry.profile)) is not None:
                stem = f"{entry.config.key}_timeline"
                blocks.append(self._figure(stem, f"Memory over time: {name}", timeline, 460, source, number))
        return blocks

    def limits(self) -> Iterator[Sentence]:
        """What each configuration takes, and what limits it."""
        for block, named in self._named_steps():
            for number, (name, row) in enumerate(named):
                if row["status"] != Status.OK:
                    yield f"{name}: {status_text(row['status'])}.", _cell(block, number, "status")
                if row["step_mean_ms"] is None:
                    continue
                share = "" if row["mfu"] is None else f", at {significant(100 * row['mfu'], 3)} % of the promised rate"
                is_launched = WarningCode.LAUNCH_BOUND in (row["warnings"] or "").split(";")
                limit = "; the host's launches limit it" if is_launched else ""
                took = f"{significant(row['step_mean_ms'], 4)} ms per step"
                yield inert_line(f"{name}: {took}{share}{limit}."), _cell(block, number, "step_mean_ms")
        kernels, memory = self.results.kernels, self.results.memory
        found = [
            *zip(labels(kernels), kernels, [kernel_findings(own.profile, own.config) for own in kernels], strict=True),
            *zip(labels(memory), memory, [memory_findings(own.profile) for own in memory], strict=True),
        ]
        for name, entry, texts in found:
            for text in texts[:1]:
                yield inert_line(f"{name}: {text}"), self._cell_of(entry)

    def _named_steps(self) -> list[tuple[TableBlock, list[tuple[str, Row]]]]:
        """The tables of steps with their rows, each with what tells it from those of all of them."""
        names = iter(names_of([row["identity"] for block in self.steps for row in block.table.values]))
        return [(block, [(next(names), row) for row in block.table.values]) for block in self.steps]

    def _cell_of(self, entry: object) -> str:
        """The cell of the time, or of the peak, of a profiled run."""
        blocks = [*self.kernels, *self.memory]
        found = (
            _find(blocks, key, lambda row: row.get("entry") is entry and row.get("phase") in (None, WHOLE_STEP))
            for key in ("wall_mean_ms", "peak_allocated_bytes")
        )
        return next(filter(None, found), "")

    def stands_out(self) -> Iterator[Sentence]:
        """The extremes of the steps, of those after most warm-up."""
        for block, named in self._named_steps()[:1]:
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
                    yield inert_line(sentence), _cell(block, number, key)
            for number, (name, row) in rows:
                if row["speed_up"] is not None and row["speed_up"] < 1 and not row["speed_up_is_doubted"]:
                    slower = f"{name} is slower than in fp32: {significant(row['speed_up'], 3)} times as fast."
                    yield inert_line(slower), _cell(block, number, "speed_up")

    def doubts(self) -> Iterator[Sentence]:
        """The warnings of the runs whose times are shown."""
        records = sorted(self.results.published, key=lambda record: order(record.config))
        runs = [(r.config, r.environment.identity.device_name if r.environment else None) for r in records]
        for name, record in zip(names_of(identities(runs)), records, strict=True):
            for warning in record.warnings:
                yield inert_line(f"{name}: {warning.code}: {warning.message}."), self._cell_of_step(record)

    def _cell_of_step(self, record: RunRecord) -> str:
        return _find(self.steps, "step_mean_ms", lambda row: row["config"] == record.config.configuration)

    def _tables(self, sections: Iterable[Section], before: str = "") -> Iterator[TableBlock]:
        """The tables of the sections, whose names come after `before`."""
        for section in sections:
            for number, table in enumerate(section.tables):
                yield self._table(f"{before}{section.name}{number or ''}", section, table)

    def _table(self, name: str, section: Section, table: Table) -> TableBlock:
        is_first = table.values == section.tables[0].values
        return TableBlock(
            id=f"{name}{self.ending}", table=table, csv=section.csv if is_first else "", source=self.source
        )

    def _figure(
        self, stem: str, title: str, spec: figures.Spec, height: int, source: str = "", number: int = 0
    ) -> Figure:
        """The picture; the PNG of this name stands in its place where there is no plotly.

        `number` tells pictures of one name apart, as those of one configuration from several directories.
        A PNG of the directory shows all records, so it stands for none that are shown apart from others.
        """
        png = self.directory / "plots" / f"{stem}.png"
        has_png = not self.ending and importlib.util.find_spec("plotly") is None and png.is_file()
        address = f"data:image/png;base64,{base64.b64encode(png.read_bytes()).decode()}" if has_png else ""
        again = f"-{number}" if number else ""
        return Figure(
            id=f"figure-{stem}{again}{self.ending}", title=inert_line(title), spec=spec, png=address,
            source=source or self.source, height=height,
        )  # fmt: skip


def _find(blocks: Iterable[Block], key: str, is_it: Callable[[Row], bool]) -> str:
    """The cell below this key in the first row that is it; an empty text where no table has one."""
    for block in blocks:
        if isinstance(block, TableBlock):
            for number, row in enumerate(block.table.values):
                if is_it(row) and (found := _cell(block, number, key)):
                    return found
    return ""


def _cell(block: TableBlock, number: int, key: str) -> str:
    """The identifier of the cell in this row; empty where the table has no such column."""
    keys = [heading.key for heading in block.table.headings]
    return f"{block.id}.{number}.{keys.index(key)}" if key in keys else ""


def _runs(records: Iterable[RunRecord], place_of: PlaceOf) -> Chapter:
    """Every run, failed ones too."""
    found = sorted(records, key=lambda record: (*order(record.config), record.config.profiler, record.config.repeat))
    blocks = [_run(record, place_of, number) for number, record in enumerate(found)]
    return Chapter(id="runs", title="Runs", blocks=blocks, source=provenance(found, place_of))


def _run(record: RunRecord, place_of: PlaceOf, number: int) -> Run:
    """All that is kept of one run, in words and as its record."""
    step = record.measurement(Phase.STEP)
    profiler = "" if record.config.profiler is Profiler.NONE else f", under {record.config.profiler}"
    mean = "" if step is None else f", {step.mean_s * 1e3:.2f} ms"
    title = f"{record.config.label}{profiler}: {status_text(record.status)}{mean}"
    texts = [(heading, text) for heading, text in _run_texts(record, place_of) if text]
    return Run(id=f"run-{number}", title=inert_line(title), texts=texts)


def _run_texts(record: RunRecord, place_of: PlaceOf) -> Iterator[tuple[str, str]]:
    """Headings and texts; an empty text is not known."""
    failure, profiler = record.failure, record.config.profiler
    yield "Repeat it with", inert_line(command_of(record.config))
    yield "Source", provenance([record], place_of)
    yield "Warnings", _lines(f"{warning.code}: {warning.message}" for warning in record.warnings)
    if failure is not None:
        yield "Failure", inert_line(f"{failure.message}{f' (in {failure.where})' if failure.where else ''}")
        yield "Traceback", _long(failure.traceback)
        yield "End of the log", _long(failure.log_tail)
    yield "Warm-up steps in order (ms)", _times(record.warmup_times_s)
    for measurement in record.measurements:
        yield f"Measured in order: {measurement.phase} (ms)", _times(measurement.times_s)
    yield "Host, to launch each step (ms)", _times(record.host_times_s)
    yield "Memory", _json(record.memory)
    yield "State of the GPU", _json(record.telemetry)
    yield "Environment", _json(record.environment)
    if profiler is not Profiler.NONE:
        path = raw_profile_path(record.config, place_of(record) / "runs")
        yield "Raw profile", inert_line(f"{path}: open it with {VIEWERS[profiler]}")
    yield "Record", inert_json(encode_record(record)).decode()


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(map(inert_line, texts))


def _long(text: str | None) -> str:
    """A text of several lines, of which a long one loses its middle."""
    return "" if text is None else _lines(shortened(text, LONGEST_TEXT).splitlines())


def _times(times_s: Sequence[float]) -> str:
    return ", ".join(f"{time_s * 1e3:.4f}" for time_s in times_s)


def _json(value: object) -> str:
    return "" if value is None else inert_json(encode_json(value)).decode()
