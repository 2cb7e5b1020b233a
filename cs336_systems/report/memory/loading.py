"""Which records of a sweep have a memory profile, and which plain run is each one's twin."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.memory.profile import read_memory_profile
from cs336_systems.config import Profiler, RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.report.frame import order
from cs336_systems.report.memory.entries import MemoryEntry
from cs336_systems.sweep.store import memory_profile_path
from cs336_systems.text import inert_line


def load_memory(records: Sequence[RunRecord], directory: Path) -> list[MemoryEntry]:
    """Those of `records` with a recorded memory, in the order of the tables; a profile that is missing is said."""
    twins = {_whatever_steps(record.config): record for record in records if record.config.profiler is Profiler.NONE}
    found = []
    for record in sorted(records, key=lambda record: order(record.config)):
        if record.config.profiler is not Profiler.MEMORY:
            continue
        try:
            profile = read_memory_profile(memory_profile_path(record.config, directory / "runs"))
        except ProfileError as error:
            print(inert_line(f"warning: {record.config.label}, {record.status}: {error}"), file=sys.stderr)
            continue
        plain = twins.get(_whatever_steps(record.config.unprofiled))
        found.append(MemoryEntry(config=record.config, profile=profile, plain=plain))
    return found


def _whatever_steps(config: RunConfig) -> tuple[RunConfig, bool]:
    """The configuration without its numbers of steps: a recorded run has fewer. A graph, which needs some, apart."""
    return replace(config.configuration, cuda_graph=False, warmup_steps=0, measured_steps=1), config.cuda_graph
