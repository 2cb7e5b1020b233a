"""Profiled runs with their kernel profiles and their plain twins, and what tells them apart."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_systems.analysis.step_profile import StepProfile, decode_profile
from cs336_systems.config import Phase, Profiler, RunConfig
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.frame import COLUMNS, order, rows_of, to_frame
from cs336_systems.store import kernel_profile_path

KERNEL_PROFILERS = (Profiler.NSYS, Profiler.KINETO)
IDENTITY = tuple(name for name in COLUMNS[: COLUMNS.index("warmup_steps")] if name != "world_size")
"""Columns of results.csv that say which configuration a row is of."""
_TOLD = ("mode", "precision", "batch_size", "attention", "compile", "optimizer", "arch", "device_name", "profiler")
"""Settings that have a column of their own where they vary."""
_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
_WORDS = {"context_length": "ctx {}", "batch_size": "batch {}", "repeat": "#{}", **{n: f"{n} {{}}" for n in _SHAPE}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A run under a profiler, what its kernels did, and the same run without a profiler."""

    config: RunConfig
    """Of the profiled run."""
    profile: StepProfile
    plain: RunRecord | None
    """None where there is no such run that finished."""
    profiled: RunRecord

    def clock_s(self, phase: Phase) -> float | None:
        """Mean time of the phase without a profiler; None where it is not known."""
        measured = None if self.plain is None else self.plain.measurement(phase)
        return None if measured is None else measured.mean_s


def load_profiled(records: Sequence[RunRecord], directory: Path) -> list[Profiled]:
    """The kernel-profiled among `records` with what `directory`/kernels has of them, in the order of the tables.

    What is missing is said.
    """
    found = []
    for record in sorted(records, key=lambda record: order(record.config)):
        if record.config.profiler not in KERNEL_PROFILERS:
            continue
        path = kernel_profile_path(record.config, directory / "runs")
        try:
            profile = decode_profile(path.read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            ended = f"; the run ended as {record.status}" if record.status is not Status.OK else ""
            print(f"warning: {record.config.label}: no kernel profile at {path} ({reason}){ended}", file=sys.stderr)
            continue
        plain = _plain_twin(record, records)
        found.append(Profiled(config=record.config, profile=profile, plain=plain, profiled=record))
    return found


def _plain_twin(record: RunRecord, records: Sequence[RunRecord]) -> RunRecord | None:
    """The finished run of the same configuration on the same device, without a profiler."""
    wanted = record.config.unprofiled
    return next(
        (
            other
            for other in records
            if other.config == wanted and other.status is Status.OK and _device(other) == _device(record)
        ),
        None,
    )


def _device(record: RunRecord) -> str | None:
    return None if record.environment is None else record.environment.identity.device_name


def identity(entry: Profiled) -> dict[str, Any]:
    """Which configuration the entry is: the columns of results.csv that say so, the profiler and the repeat."""
    row = rows_of(to_frame([entry.profiled]))[0]
    named = {name: row[name] for name in IDENTITY}
    return named | {"profiler": str(entry.config.profiler), "repeat": entry.config.repeat}


def telling(identities: Sequence[dict[str, Any]]) -> list[str]:
    """Columns that tell configurations apart: size and context, and what else varies; the shape only if it must."""
    names = ["size", "context_length", *(name for name in _TOLD if len({row[name] for row in identities}) > 1)]
    wanted = len({tuple(row.values()) for row in identities})
    for name in (*_SHAPE, "repeat"):
        if len({tuple(row[told] for told in names) for row in identities}) < wanted:
            names += [name] if len({row[name] for row in identities}) > 1 else []
    return names


def labels(entries: Sequence[Profiled]) -> list[str]:
    """A few words for each entry, with what tells it from the others: `small ctx 128 bf16`."""
    identities = [identity(entry) for entry in entries]
    names = telling(identities)
    return [" ".join(_WORDS.get(name, "{}").format(row[name]) for name in names) for row in identities]
