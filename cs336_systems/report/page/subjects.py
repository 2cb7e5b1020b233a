"""The tables and pictures of records that can be compared: the time, the kernels and the memory of a step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cs336_systems.report.entries import labels
from cs336_systems.report.frame import order, to_frame
from cs336_systems.report.identity import file_names
from cs336_systems.report.page import pictured, profiles
from cs336_systems.report.page.figures import Spec, figure_of
from cs336_systems.report.page.provenance import PlaceOf, provenance
from cs336_systems.report.page.refusals import by_warmup
from cs336_systems.report.page.write import Block, Figure, Prose, TableBlock, png_address
from cs336_systems.report.plots.charts import Chart
from cs336_systems.report.plots.steps import step_charts
from cs336_systems.report.results import Results
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.communication import by_configuration
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.kernels.files import SUBJECTS
from cs336_systems.report.sections.kernels.findings import findings as kernel_findings
from cs336_systems.report.sections.kernels.plots import class_chart, communication_chart, configuration_chart
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.report.sections.memory.files import sections as memory_sections
from cs336_systems.report.sections.memory.findings import findings as memory_findings
from cs336_systems.report.sections.memory.plots import peak_charts
from cs336_systems.report.sections.memory.words import when
from cs336_systems.report.sections.steps import results_section
from cs336_systems.report.table import Table
from cs336_systems.studies.ceilings_files import Ceilings
from cs336_systems.text import counted, inert_line

E = TypeVar("E", Profiled, MemoryEntry)
MOST_OPEN = 3
"""Findings of a profile that are read without opening more."""


class Subjects:
    """What records that can be compared show: the blocks of each chapter, and the tables that findings rest on."""

    def __init__(
        self, results: Results, directory: Path, place_of: PlaceOf, ceilings: Ceilings,
        prefix: str, ending: str, conditions: str,
    ) -> None:  # fmt: skip
        """`prefix` begins all identifiers; `ending` and `conditions` tell these records from others of the sweep."""
        self.results, self.directory, self.ceilings = results, directory, ceilings
        self.place_of, self.prefix, self.ending, self.conditions = place_of, prefix, ending, conditions
        self.source = provenance(results.records, place_of)
        self.profiled = results.kernels
        self.of_kernels = self._told(self.profiled, lambda entry: kernel_findings(entry.profile, entry.config))
        self.of_memory = self._told(results.memory, lambda entry: memory_findings(entry.profile))
        self.steps = self._steps()
        self.time = self._time()
        self.kernels = self._kernels()
        self.memory = self._memory()

    def _told(self, entries: Sequence[E], find: Callable[[E], Sequence[str]]) -> list[tuple[str, E, list[str]]]:
        """Each profile in the order of tables: its distinguishing settings, the profile, and its findings."""
        ordered = sorted(entries, key=lambda entry: order(entry.config))
        return [
            (name, own, list(map(inert_line, find(own)))) for name, own in zip(labels(ordered), ordered, strict=True)
        ]

    def _steps(self) -> list[TableBlock]:
        """The times of each configuration, in a table for each number of warm-up steps."""
        groups = by_warmup(self.results.published)
        found = []
        for number, own in enumerate(groups):
            section = results_section(own, self.ceilings, by_configuration(self.results.kernels))
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
        return [*blocks, *map(self._chart, step_charts(frame))]

    def _kernels(self) -> list[Block]:
        """What the kernels of the profiled runs did: tables, and pictures and findings of each run."""
        entries = self.profiled
        if not entries:
            return []
        blocks: list[Block] = list(self._tables(make(entries) for make in SUBJECTS))
        charted = [(name, entry.profile) for name, entry, _ in self.of_kernels]
        charts = (configuration_chart(charted), communication_chart(charted))
        blocks += [self._chart(chart) for chart in charts if chart is not None]
        stems = file_names(name for name, _ in charted)
        for number, (stem, (name, entry, texts)) in enumerate(zip(stems, self.of_kernels, strict=True)):
            source, profile = provenance([entry.profiled], self.place_of), entry.profile
            blocks.append(_prose(name, texts))
            if (spec := pictured.step_picture(profile)) is not None:
                title = f"{pictured.step_title(profile)}: {name}"
                blocks.append(self._figure(f"{stem}_timeline", title, spec, 320, source, number))
            blocks.append(self._chart(class_chart(profile, f"{stem}_classes", name), source, number))
        return blocks

    def _memory(self) -> list[Block]:
        """What the memory of the recorded runs held: tables, peaks, and memory over time of each run."""
        entries = sorted(self.results.memory, key=lambda entry: order(entry.config))
        if not entries:
            return []
        blocks = list[Block](self._tables(memory_sections(entries), "memory-"))
        blocks += map(self._chart, peak_charts(entries))
        records = {record.config: record for record in self.results.records}
        for number, (name, entry, texts) in enumerate(self.of_memory):
            source = provenance([entry.recorded or records[entry.config]], self.place_of)
            blocks.append(_prose(name, texts))
            if (timeline := profiles.memory_picture(entry.profile)) is not None:
                stem = f"{entry.config.key}_timeline"
                figure = self._figure(stem, f"Memory over time: {name}", timeline, 460, source, number)
                title = inert_line(f"What holds the peak, {when(entry.profile.peak)}")
                blocks.append(replace(figure, parts=profiles.peak_parts(entry.profile), parts_title=title))
        return blocks

    def _tables(self, sections: Iterable[Section], before: str = "") -> Iterator[TableBlock]:
        """The tables of the sections, whose names come after `before`."""
        for section in sections:
            for number, table in enumerate(section.tables):
                yield self._table(f"{before}{section.name}{number or ''}", section, table)

    def _table(self, name: str, section: Section, table: Table) -> TableBlock:
        is_first = table.values == section.tables[0].values
        return TableBlock(
            id=f"{self.prefix}{name}{self.ending}", table=table, csv=section.csv if is_first else "", source=self.source
        )

    def _chart(self, chart: Chart, source: str = "", number: int = 0) -> Figure:
        return figure_of(chart, self._figure_id(chart.name, number), source or self.source, self._png(chart.name))

    def _figure(self, stem: str, title: str, spec: Spec, height: int, source: str, number: int) -> Figure:
        return Figure(
            id=self._figure_id(stem, number), title=inert_line(title), spec=spec, png=self._png(stem), source=source,
            height=height,
        )  # fmt: skip

    def _figure_id(self, stem: str, number: int) -> str:
        """`number` tells pictures of one name apart, as those of one configuration from several directories."""
        return f"{self.prefix}figure-{stem}{f'-{number}' if number else ''}{self.ending}"

    def _png(self, stem: str) -> str:
        """The PNG, or empty if records are shown in groups, because a PNG of the directory shows all records."""
        return "" if self.ending else png_address(self.directory / "plots" / f"{stem}.png")


def _prose(name: str, texts: Sequence[str]) -> Prose:
    """The findings of one profile, closed after the first."""
    sentences = [(text, "") for text in texts]
    first, more = sentences[:MOST_OPEN], sentences[MOST_OPEN:]
    return Prose(heading=inert_line(name), paragraphs=first, more=more, more_title=counted(len(more), "more finding"))
