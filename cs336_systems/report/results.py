"""The results of sweeps and of studies, and the sections that show them."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ..config import Profiler
from ..record import RunRecord, Status
from ..studies.ceilings_files import NO_CEILINGS, Ceilings
from ..studies.ceilings_records import CeilingsStudy
from ..studies.operators import AttentionStudy, FusionStudy
from ..studies.records import PrecisionStudy
from ..subject import Subject
from .configurations import step_results
from .formats import pngs_of, texts_of, write_files
from .quantities import StepResult
from .section import Section, Table, all_tables, findings_section, findings_table
from .sections.ceilings import caveats_of_ceilings, ceilings_sections
from .sections.kernels.communication import by_configuration
from .sections.kernels.entry import Explained, load_profiled
from .sections.kernels.files import TOP_ON_A_PAGE, write_kernels
from .sections.kernels.files import sections_of as kernel_sections
from .sections.kernels.files import tables_of as kernel_tables
from .sections.kernels.findings import findings as kernel_findings
from .sections.memory.entry import MemoryEntry, load_memory
from .sections.memory.findings import findings as memory_findings
from .sections.memory.tables import memory_tables, write_memory
from .sections.memory.tables import sections_of as memory_sections
from .sections.operators import attention_section, caveats_of_operators, fusion_section
from .sections.plugged import added_findings, added_sections
from .sections.steps import results_section
from .sections.study import precision_sections

STEPS, KERNELS, MEMORY = "Time of a step", "Where the time goes", "Where the memory goes"
"""Subjects of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """The records of sweeps, an entry for each explained profile of kernels or memory, and
    ceilings for forecasts.
    """

    records: Sequence[RunRecord]
    kernels: Sequence[Explained] = ()
    memory: Sequence[MemoryEntry] = ()
    ceilings: Ceilings = NO_CEILINGS

    @classmethod
    def load(
        cls, records: Sequence[RunRecord], directory: Path, ceilings: Ceilings = NO_CEILINGS
    ) -> "Results":
        """The records with the explained profiles in the sweep's directory; a missing profile is
        a warning.
        """
        kernels = load_profiled(records, directory)
        memory = load_memory(records, directory)
        return cls(records=records, kernels=kernels, memory=memory, ceilings=ceilings)

    @property
    def is_of_file(self) -> bool:
        """Whether these are of one file of any program, without the record of a run."""
        subjects = [entry.subject for entry in self.kernels]
        subjects += [entry.subject for entry in self.memory]
        return subjects == [None]

    @property
    def published(self) -> list[RunRecord]:
        """The records of runs without a profiler. Only their times are published."""
        return [record for record in self.records if record.subject.profiler is Profiler.NONE]

    @property
    def _profiled(self) -> list[Subject]:
        """Runs under a profiler with status ok; one that ran out of memory need not have a
        profile.
        """
        done = [record.subject for record in self.records if record.status is Status.OK]
        return [config for config in done if config.profiler is not Profiler.NONE]

    @property
    def without_profile(self) -> list[Subject]:
        """Runs under a profiler with status ok whose explained profile is missing."""
        loaded = {entry.subject for entry in self.kernels}
        loaded |= {entry.subject for entry in self.memory}
        return [subject for subject in self._profiled if subject not in loaded]

    @property
    def lost(self) -> str:
        """How many explained profiles are missing, in words; empty if none is."""
        num_missing = len(self.without_profile)
        if not num_missing:
            return ""
        runs = f"{num_missing} of {len(self._profiled)} runs that ended well"
        return f"the profiles of {runs} are missing"

    @cached_property
    def configurations(self) -> list[StepResult]:
        """The result of each configuration without a profiler, with its forecast; tables and
        pictures are made of these.
        """
        return step_results(self.published, self.ceilings)

    @cached_property
    def steps(self) -> Section:
        """The section of step times, which are those of runs without a profiler."""
        return results_section(self.configurations, by_configuration(self.kernels))

    @cached_property
    def sections(self) -> Mapping[str, Sequence[Section]]:
        """The sections of each subject that these results have, where time and memory go before
        the times: findings first, then tables and pictures.
        """
        sections: dict[str, Sequence[Section]] = {}
        if self.kernels:
            findings = findings_section("kernel_findings", self.kernels, kernel_findings)
            sections[KERNELS] = [findings, *kernel_sections(self.kernels)]
        if self.memory:
            findings = findings_section(
                "memory_findings", self.memory, lambda entry: memory_findings(entry.profile)
            )
            sections[MEMORY] = [findings, *memory_sections(self.memory)]
        steps = [self.steps] if self.published else []
        steps += added_sections(Results, self)
        if sentences := list(added_findings(self)):
            table = findings_table(sentences)
            steps.append(Section(name="plugin_findings", tables=(table,), rows=table.values))
        if steps:
            sections[STEPS] = steps
        return sections

    def tables(self) -> list[Table]:
        """The tables for a terminal, with the first finding of each profile."""
        of_kernels = findings_section("", self.kernels, lambda entry: kernel_findings(entry)[:1])
        of_memory = findings_section(
            "", self.memory, lambda entry: memory_findings(entry.profile)[:1]
        )
        return [
            *all_tables([*self.sections.get(STEPS, ()), of_kernels, of_memory]),
            *kernel_tables(self.kernels),
            *memory_tables(self.memory),
        ]

    def write(
        self, output: Path, status: Callable[..., object], formats: Collection[str] = ()
    ) -> None:
        """Write the tables and pictures that records and profiles support together, tables also in
        `formats`; `status` shows what is done.
        """
        if self.is_of_file:
            status("drawing and writing")
            for entry in self.kernels:
                write_kernels(entry, output, TOP_ON_A_PAGE, formats)
            for of_memory in self.memory:
                write_memory(of_memory.profile, output, TOP_ON_A_PAGE, formats)
            return
        sections = list(itertools.chain.from_iterable(self.sections.values()))
        for done, section in enumerate(sections):
            status(f"writing tables and pictures of {section.name}", done, len(sections))
            write_files({**texts_of(section), **pngs_of(section)}, output, formats)


Study: TypeAlias = CeilingsStudy | AttentionStudy | FusionStudy | PrecisionStudy
STUDIES: Mapping[str, type] = {
    "ceilings": CeilingsStudy,
    "attention": AttentionStudy,
    "fusion": FusionStudy,
    "precision": PrecisionStudy,
}
"""All kinds of studies by their subject; the record of a study is the file SUBJECT.json in its
directory.
"""


_SECTIONS: Mapping[str, Callable[[Any], Sequence[Section]]] = {
    "ceilings": ceilings_sections,
    "attention": lambda study: [attention_section(study)],
    "fusion": lambda study: [fusion_section(study)],
    "precision": precision_sections,
}
"""The function that makes the tables of each kind of study."""


@dataclass(frozen=True)
class StudyResults:
    """A study as its directory and its page show it."""

    study: Study

    @property
    def subject(self) -> str:
        """What it is about, a key of STUDIES."""
        return next(subject for subject, kind in STUDIES.items() if isinstance(self.study, kind))

    @cached_property
    def sections(self) -> Sequence[Section]:
        """Its tables."""
        return _SECTIONS[self.subject](self.study)

    @property
    def caveats(self) -> list[str]:
        """Notes on what of its grid was not measured, and on unlike conditions."""
        if isinstance(self.study, CeilingsStudy):
            return caveats_of_ceilings(self.study)
        if isinstance(self.study, PrecisionStudy):
            return []
        return caveats_of_operators(self.study)

    def write(self, directory: Path, formats: Collection[str] = ()) -> None:
        """Write the tables into the directory, also in `formats`. The record stays as it is: a
        study may be writing it.
        """
        for section in self.sections:
            write_files(texts_of(section), directory, formats)
