"""Explained snapshots with the configurations of their runs: what tables, pictures and findings of
memory are made from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from ....analysis.memory.profile import (
    BlockMemory,
    Category,
    MemoryProfile,
    Moment,
    read_memory_profile,
)
from ....config import Profiler, RunConfig
from ....costs.memory import predicted_peak_bytes, residual_stream_bytes
from ....record import RunRecord
from ....subject import Subject
from ....sweep.store import explanation_path
from ...section import load_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """One explained snapshot of any program; of a run of a sweep also its configuration and its
    device.
    """

    profile: MemoryProfile
    subject: Subject | None = None
    """None for a single snapshot, which has no columns of settings."""
    device_name: str | None = None

    @property
    def config(self) -> RunConfig | None:
        """The run's configuration; None for a single snapshot and for a watched loop."""
        return self.subject if isinstance(self.subject, RunConfig) else None

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out, so that the peak is only what was allocated before."""
        return self.profile.work.out_of_memory > 0

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak of the recorded steps; None if the configuration is unknown or has no
        prediction.
        """
        return None if self.config is None else predicted_peak_bytes(self.config)

    @property
    def residual_stream_bytes(self) -> int | None:
        """Bytes of one tensor of batch x context x d_model in fp32; None if the shape of the
        model is unknown.
        """
        if self.config is None or self.config.model_factory is not None:
            return None
        return residual_stream_bytes(self.config)


def load_memory(records: Sequence[RunRecord], directory: Path) -> list[MemoryEntry]:
    """The runs of a sweep whose memory was recorded, with their profiles in `directory`/memory, in
    the order of tables.

    A missing profile is left out, with a warning.
    """

    def load(record: RunRecord) -> MemoryEntry:
        """The explained memory profile of one run."""
        profile = read_memory_profile(explanation_path(record.subject, directory / "runs"))
        return MemoryEntry(subject=record.subject, profile=profile, device_name=record.device_name)

    return load_entries(records, (Profiler.MEMORY,), load)


def by_category(moment: Moment) -> dict[Category, int]:
    """Bytes of each category at the moment, counted in blocks; 0 for an absent category."""
    return dict.fromkeys(Category, 0) | {row.category: row.num_bytes for row in moment.categories}


def difference_bytes(moment: Moment) -> int | None:
    """Bytes by which the snapshot's blocks exceed the allocator's count; None if not counted."""
    return None if moment.counted_bytes is None else moment.allocated_bytes - moment.counted_bytes


def typical(blocks: Sequence[BlockMemory]) -> BlockMemory:
    """The block of the model that saves the median number of bytes for backward (the lower
    median).
    """
    middle = median_low(block.saved_bytes for block in blocks)
    return next(block for block in blocks if block.saved_bytes == middle)
