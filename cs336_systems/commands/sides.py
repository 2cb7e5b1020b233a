"""The two sides that `cs336 compare` is given: which of them are records, and which configurations they name."""

import functools
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from cs336_systems.analysis.matching import without_profiled
from cs336_systems.commands.benchmark import BenchmarkArguments
from cs336_systems.commands.flags import explain_cpu_fallback, parse, resolve_device
from cs336_systems.commands.outcome import UsageError, checked
from cs336_systems.commands.sweep import SweepArguments
from cs336_systems.config import Device, Profiler, RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.text import print_aside

GRID_FLAGS = {*SweepArguments.settings} - {*BenchmarkArguments.settings}
"""Flags that a sweep has and a single run does not."""


def both_on_disk(a: str, b: str) -> bool:
    """Whether the sides are records, not flags; raise UsageError for a side that is neither, and for one of each."""
    exist = [_exists(side) for side in (a, b)]
    for side, exists in zip((a, b), exist, strict=True):
        if not exists and side.strip() and not side.strip().startswith("-"):
            raise UsageError(f"{side}: no such directory or record; needed one, or flags of benchmark.py in quotes")
    if exist[0] != exist[1]:
        raise UsageError("A and B must both be directories of finished sweeps, or both flags of benchmark.py in quotes")
    return exist[0]


def _exists(text: str) -> bool:
    try:
        return bool(text.strip()) and Path(text).exists()  # an empty text means no flags, not the current directory
    except OSError:  # flags may be longer than any file name
        return False


def grids_of_flags(sides: Sequence[str]) -> list[Sequence[RunConfig]]:
    """The configurations of both sides; flags of a sweep on one make both of them sweeps."""
    words = [checked(functools.partial(shlex.split, side)) for side in sides]
    flags = {word.partition("=")[0].removeprefix("--").replace("-", "_") for own in words for word in own}
    if flags & GRID_FLAGS:
        sweeps = [_sweep_of(side, own) for side, own in zip(sides, words, strict=True)]
        grids: list[Sequence[RunConfig]] = [checked(sweep.plan).configs for sweep in sweeps]
        devices = [sweep.step.device for sweep in sweeps]
    else:
        single = [_flags_of(side, own) for side, own in zip(sides, words, strict=True)]
        grids = [[checked(side.config)] for side in single]
        devices = [side.step.device for side in single]
    for device in dict.fromkeys(devices):
        explain_cpu_fallback(device)
    return grids


def grids_of_records(sides: Sequence[Sequence[RunRecord]]) -> list[Sequence[RunConfig]]:
    """The configurations of both sides; raise UsageError for those that cannot run here."""
    plain = map(without_profiled, sides)
    grids = [list(dict.fromkeys(record.config.configuration for record in side)) for side in plain]
    for config in (config for grid in grids for config in grid):
        if config.profiler is not Profiler.NONE:
            raise UsageError("a profiler makes a run slower; compare runs without one")
        if config.device is Device.CUDA:
            checked(functools.partial(resolve_device, "cuda"))
    return [*grids]


def pairs(grids: Sequence[Sequence[RunConfig]], allow_mixed: bool) -> list[tuple[RunConfig, RunConfig]]:
    """The configurations that are on both sides, in A's order; others are named on standard error."""
    a, b = grids
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    from cs336_systems.report.identity import settings_of
    from cs336_systems.report.sections.comparison import matched

    settings = ([settings_of(config) for config in grid] for grid in grids)
    matching = checked(functools.partial(matched, *settings, allow_mixed=allow_mixed))
    for config in (*(a[index] for index in matching.only_a), *(b[index] for index in matching.only_b)):
        print_aside(f"note: {config.label} is not measured: only one side has it")
    return [(a[i], b[j]) for i, j in matching.pairs]


def name_of(pairs: Sequence[tuple[RunConfig, RunConfig]]) -> str:
    """Name of the directory for records of these pairs: the same for the same comparison, and only for it."""
    if len(pairs) == 1:
        ((a, b),) = pairs
        return f"compare_{a.size}_{a.digest}_{b.digest}"
    digests = (hashlib.sha256("".join(config.digest for config in side).encode()) for side in zip(*pairs, strict=True))
    return f"compare_sweeps_{'_'.join(digest.hexdigest()[:10] for digest in digests)}"


def _flags_of(side: str, words: Sequence[str]) -> BenchmarkArguments:
    """Parse the flags of a side; raise UsageError for a profiler, and for flags about output."""
    asked = parse(BenchmarkArguments, "benchmark.py", words)
    if checked(asked.config).profiler is not Profiler.NONE:
        raise UsageError(f"{side.strip()}: a profiler makes a run slower; compare runs without one")
    if asked.json or asked.output != BenchmarkArguments.output:
        raise UsageError(f"{side.strip()}: a side has no output of its own; leave out --json and --output")
    return asked


def _sweep_of(side: str, words: Sequence[str]) -> SweepArguments:
    """Parse the flags of a side that is a sweep; raise UsageError for a profiler, and for flags of `compare` itself."""
    asked = parse(SweepArguments, "benchmark_sweep.py", words)
    if checked(lambda: asked.profiler) is not Profiler.NONE:
        raise UsageError(f"{side.strip()}: a profiler makes a run slower; compare runs without one")
    own = ("repeats", "name", "output", "dry_run", "json")
    given = [name for name in own if getattr(asked, name) != getattr(SweepArguments, name)]
    given += [each.name for each in fields(asked.measuring) if getattr(asked.measuring, each.name) != each.default]
    if given:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{side.strip()}: a side is a grid and no more; leave out {flags}, or give it to compare")
    return asked
