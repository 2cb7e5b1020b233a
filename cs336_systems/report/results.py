"""The results of sweeps: records and explained profiles, from which files, tables and JSON are made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.config import Profiler, RunConfig
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.plots.steps import write_plots
from cs336_systems.report.section import write_files
from cs336_systems.report.sections.kernels.communication import by_configuration
from cs336_systems.report.sections.kernels.entries import Profiled, load_profiled
from cs336_systems.report.sections.kernels.files import tables_of as kernel_tables
from cs336_systems.report.sections.kernels.files import write_kernels
from cs336_systems.report.sections.memory.entries import MemoryEntry, load_memory
from cs336_systems.report.sections.memory.files import memory_tables, write_memory
from cs336_systems.report.sections.steps import results_section, write_tables
from cs336_systems.report.sections.steps_answers import answers_text
from cs336_systems.report.status_line import StatusLine
from cs336_systems.report.table import Table
from cs336_systems.studies.ceilings_files import Ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The records of sweeps, and an entry for each explained profile of kernels or memory."""

    records: Sequence[RunRecord]
    kernels: Sequence[Profiled] = ()
    memory: Sequence[MemoryEntry] = ()

    @classmethod
    def load(cls, records: Sequence[RunRecord], directory: Path) -> "Results":
        """The records with the explained profiles in the sweep's directory; a missing profile is a warning."""
        return cls(records=records, kernels=load_profiled(records, directory), memory=load_memory(records, directory))

    @classmethod
    def together(cls, several: Iterable["Results"]) -> "Results":
        """The results of several sweeps taken together, as if they were one."""
        found = list(several)
        return cls(
            records=[record for results in found for record in results.records],
            kernels=[entry for results in found for entry in results.kernels],
            memory=[entry for results in found for entry in results.memory],
        )

    @property
    def published(self) -> list[RunRecord]:
        """The records of runs without a profiler. Only their times are published."""
        return [record for record in self.records if record.config.profiler is Profiler.NONE]

    @property
    def _profiled(self) -> list[RunConfig]:
        """Runs under a profiler with status ok; one that ran out of memory need not have a profile."""
        return [r.config for r in self.records if r.config.profiler is not Profiler.NONE and r.status is Status.OK]

    @property
    def without_profile(self) -> list[RunConfig]:
        """Runs under a profiler with status ok whose explained profile is missing."""
        loaded = {entry.config for entry in self.kernels} | {entry.config for entry in self.memory}
        return [config for config in self._profiled if config not in loaded]

    @property
    def lost(self) -> str:
        """How many explained profiles are missing, in words; empty if none is."""
        num_missing = len(self.without_profile)
        words = f"the profiles of {num_missing} of {len(self._profiled)} runs that ended well are missing"
        return words if num_missing else ""

    def tables(self, ceilings: Ceilings) -> list[Table]:
        """The tables for a terminal."""
        steps = results_section(self.published, ceilings).tables if self.published else ()
        return [*steps, *kernel_tables(self.kernels), *memory_tables(self.memory)]

    def json(self, ceilings: Ceilings) -> dict[str, object]:
        """The rows of results.csv in SI units, and the explained profiles by the keys of their runs."""
        return {
            "results": results_section(self.published, ceilings, by_configuration(self.kernels)).json,
            "kernels": [{"key": entry.config.key, "profile": entry.profile} for entry in self.kernels],
            "memory": [{"key": entry.config.key, "profile": entry.profile} for entry in self.memory if entry.config],
        }

    def write(self, output: Path, ceilings: Ceilings, status: StatusLine) -> None:
        """Write the tables and plots that the records and profiles support together."""
        if self.published:
            status("writing tables and plots")
            write_tables(self.published, output, ceilings, by_configuration(self.kernels))
            write_plots(self.published, output)
        if len(self.published) == len(self.records):  # a profiled sweep has other questions in this file
            write_files({"answers.md": answers_text(self.published, ceilings)}, output)
        if self.kernels:
            status("writing tables of kernels")
            write_kernels(self.kernels, output, status=status)
        if self.memory:
            status("writing tables and plots of memory")
            write_memory(self.memory, output)
