"""The entries of tables about memory: a single snapshot of any program, or the recorded runs of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from cs336_systems.analysis.memory.profile import MemoryProfile, read_memory_profile
from cs336_systems.config import Profiler, RunConfig
from cs336_systems.costs.memory import predicted_peak_bytes
from cs336_systems.record import RunRecord
from cs336_systems.report.entries import identities_of, load_entries
from cs336_systems.report.identity import rows_without
from cs336_systems.sweep.store import memory_profile_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One explained snapshot, with the configuration of its run and the same run without a recording, if known."""

    profile: MemoryProfile
    config: RunConfig | None = None
    plain: RunRecord | None = None

    is_run: ClassVar[bool] = False
    """Whether it is a run of a sweep, which has a row in each table; a single snapshot has tables of its own."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out, so that the peak is only what was allocated before."""
        return self.profile.work.out_of_memory > 0

    @property
    def plain_peak_bytes(self) -> int | None:
        """The allocator's own peak without a recording; None if it is not known, or is that of later steps."""
        if self.config is None or self.plain is None or self.plain.memory is None:
            return None
        is_first_step = self.config.warmup_steps == 0 and self.config.measured_steps == 1  # later steps need more
        return None if is_first_step and self.plain.config.warmup_steps else self.plain.memory.peak_allocated_bytes

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak of the recorded steps; None if the configuration is unknown or has no prediction."""
        return None if self.config is None else predicted_peak_bytes(self.config)

    @property
    def device_name(self) -> str | None:
        """Name of the device, from the run without a recording; None if there is no such run."""
        return None if self.plain is None else self.plain.device_name


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry(Snapshot):
    """A run of a sweep whose memory was recorded."""

    config: RunConfig
    recorded: RunRecord | None = None
    """The run itself; None if only its profile is known."""

    is_run: ClassVar[bool] = True


def recorded_runs(entries: Sequence[Snapshot]) -> list[MemoryEntry]:
    """The entries that are runs of a sweep; empty for a single snapshot."""
    return [entry for entry in entries if isinstance(entry, MemoryEntry)]


def grouped(entries: Sequence[MemoryEntry], *names: str) -> list[list[MemoryEntry]]:
    """The entries in groups that differ in nothing but these columns, in the order of their first."""
    groups: dict[tuple[object, ...], list[MemoryEntry]] = {}
    for entry, identity in zip(entries, rows_without(identities_of(entries), names), strict=True):
        groups.setdefault(tuple(identity.values()), []).append(entry)
    return list(groups.values())


def load_memory(records: Sequence[RunRecord], directory: Path) -> list[MemoryEntry]:
    """The runs of a sweep whose memory was recorded, with their profiles in `directory`/memory, in the order of tables.

    A missing profile is left out, with a warning.
    """
    plain = {_apart_from_steps(record.config): record for record in records if record.config.profiler is Profiler.NONE}

    def load(record: RunRecord) -> MemoryEntry:
        return MemoryEntry(
            config=record.config,
            profile=read_memory_profile(memory_profile_path(record.config, directory / "runs")),
            plain=plain.get(_apart_from_steps(record.config.unprofiled)),
            recorded=record,
        )

    return load_entries(records, (Profiler.MEMORY,), load)


def _apart_from_steps(config: RunConfig) -> tuple[RunConfig, bool]:
    """What a recorded run and the same run without a recording share: all settings but the numbers of steps."""
    return replace(config.configuration.without_graph, warmup_steps=0, measured_steps=1), config.cuda_graph
