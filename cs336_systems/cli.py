"""From argv to a configuration at once, and from what happens to an exit status.

0: every configuration has a result (running out of memory is one); 1: something crashed, hung or was killed;
2: wrong usage; 130: interrupted.
"""

import contextlib
import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import tyro

from cs336_systems.analysis.compare import compare, interleave, process_means
from cs336_systems.arguments import (
    BenchmarkArguments,
    Command,
    CompareArguments,
    PrecisionArguments,
    ReportArguments,
    SweepArguments,
    checked_name,
)
from cs336_systems.config import Device, RunConfig
from cs336_systems.locks import LockedError, exclusive, gpu_lock_path
from cs336_systems.nvml import visible_gpus
from cs336_systems.record import RecordError, RunRecord, encode_record, load_records, read_record

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
T = TypeVar("T")


class UsageError(ValueError):
    """The command line asks for something that cannot be."""


def _parse(kind: Callable[..., T], prog: str, argv: Sequence[str] | None, description: str | None = None) -> T:
    try:
        return tyro.cli(kind, prog=prog, args=argv, description=description, config=(tyro.conf.EnumChoicesFromValues,))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _exit_status(main: Callable[..., int]) -> Callable[..., int]:
    """Turn what `main` raises into one line on standard error and an exit status."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        from cs336_systems.store import SweepError

        try:
            return main(argv)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE
        except (SweepError, LockedError, RecordError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED

    return run


@_exit_status
def benchmark(argv: Sequence[str] | None = None) -> int:
    """Measure one configuration in this process: it is fresh already, and nsys sees it."""
    arguments = _parse(BenchmarkArguments, "benchmark.py", argv)
    config = _checked(arguments.config)
    from cs336_systems.store import make_writable

    runs = make_writable(arguments.output / "e2e_benchmark" / "single" / "runs")
    from cs336_systems.worker import run_here

    gpu = next(iter(visible_gpus()), None)
    with contextlib.ExitStack() as stack:
        if config.device is Device.CUDA and gpu is not None:
            stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})"))
        if arguments.json:  # standard output is for the record, whatever a user's own model prints
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        record = run_here(config, runs)
    if arguments.json:
        sys.stdout.write(encode_record(record).decode())
    else:
        from cs336_systems.report.terminal import print_run

        print_run(record, runs / f"{record.key}.json")
    return _status([record])


@_exit_status
def sweep(argv: Sequence[str] | None = None) -> int:
    """Measure a grid and write its tables and plots."""
    arguments = _parse(SweepArguments, "benchmark_sweep.py", argv)
    configs, directory = _checked(arguments.configs), _checked(arguments.directory)
    if arguments.dry_run:
        for config in configs:
            print(f"{config.key}: {config.label}, {config.warmup_steps} + {config.measured_steps} steps")
        print(f"{len(configs)} runs into {directory}")
        return OK
    return _run(configs, directory, arguments)


@_exit_status
def precision(argv: Sequence[str] | None = None) -> int:
    """Print, and where asked write, what precision does to sums and types."""
    arguments = _parse(PrecisionArguments, "precision.py", argv)
    devices = _checked(arguments.devices)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
    from cs336_systems.precision_study import accumulation_study, dtype_study
    from cs336_systems.precision_tables import print_json, print_tables, write_tables

    sums, dtypes = accumulation_study(), dtype_study(devices)
    if arguments.output is not None:
        write_tables(sums, dtypes, arguments.output)
    print_json(sums, dtypes) if arguments.json else print_tables(sums, dtypes)
    return OK


@_exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """The `cs336` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A side of a comparison is a value, which the parser would take for a flag: a space before it tells the two apart.
    words = [f" {word}" if _is_side(word, words) else word for word in words]
    question = "Where do the time and the memory of a Transformer training step go?"
    arguments: CompareArguments | ReportArguments = _parse(Command, "cs336", words, question)  # type: ignore[arg-type]
    return _report(arguments) if isinstance(arguments, ReportArguments) else _compare(arguments)


def _is_side(word: str, words: Sequence[str]) -> bool:
    """Whether the word is flags of benchmark.py: several in quotes, or a single one that `compare` itself has not."""
    own = {"--help", *(f"--{f.name.replace('_', '-')}" for f in fields(CompareArguments))}
    alone = words[0] == "compare" and word.startswith("--") and word.partition("=")[0].replace("_", "-") not in own
    return word.startswith("-") and (" " in word or alone)


def _run(configs: Sequence[RunConfig], directory: Path, arguments: SweepArguments | CompareArguments) -> int:
    from cs336_systems.report.progress import TerminalListener
    from cs336_systems.sweep import run_sweep

    with TerminalListener() as listener:
        outcome = run_sweep(
            configs, directory, listener,
            timeout_s=arguments.timeout_s, fresh=arguments.fresh, allow_mixed=arguments.allow_mixed,
        )  # fmt: skip
    _write_report(outcome.records, directory)
    from cs336_systems.report.terminal import print_sweep

    print_sweep(outcome.records, directory)
    if outcome.overhead_s is not None:
        print(
            f"{len(outcome.measured)} runs in {outcome.wall_s:.1f} s, of which {outcome.overhead_s:.2f} s per run "
            "were neither warm-up nor measured steps"
        )
    if outcome.interrupted:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    wanted = {config.key for config in configs}
    return _status([record for record in outcome.records if record.key in wanted])


def _write_report(records: Sequence[RunRecord], directory: Path) -> None:
    from cs336_systems.report.plots import write_plots
    from cs336_systems.report.tables import write_tables

    if records:
        write_tables(records, directory)
        write_plots(records, directory)


def _report(arguments: ReportArguments) -> int:
    if not arguments.directories or (arguments.output is None and len(arguments.directories) > 1):
        raise UsageError("report needs a directory; with several, also --output for what they give together")
    records: list[RunRecord] = []
    for directory in arguments.directories:
        found = _load(directory / "runs")
        if not found:
            raise UsageError(f"{directory}: no records in {directory / 'runs'}; needed the directory of a sweep")
        records += found
    identities = {record.environment.identity for record in records if record.environment}
    if len(identities) > len({identity.device_name for identity in identities}):
        said = "the records come from different drivers, torch or code, to which differences may be due"
        print(f"warning: {said}", file=sys.stderr)
    output = arguments.output or arguments.directories[0]
    output.mkdir(parents=True, exist_ok=True)
    _write_report(records, output)
    from cs336_systems.report.terminal import print_sweep

    print_sweep(records, output)
    return OK


def _compare(arguments: CompareArguments) -> int:
    from cs336_systems.report.comparison import comparison_table, write_comparison
    from cs336_systems.report.terminal import print_table
    from cs336_systems.report.words import STATUS_WORDS
    from cs336_systems.store import SweepError

    directory: Path | None = None
    if _both_on_disk(arguments.a, arguments.b):
        sides = [_records_at(Path(side)) for side in (arguments.a, arguments.b)]
        _refuse_unlike(sides, arguments.allow_mixed)
    else:
        pair = [
            _checked(_parse(BenchmarkArguments, "benchmark.py", _checked(functools.partial(shlex.split, s))).config)
            for s in (arguments.a, arguments.b)
        ]
        # Even repeats are A and odd ones B, so that A can be compared with A.
        order = [(side, 2 * repeat + side) for side, repeat in interleave(2, arguments.repeats)]
        configs = [replace(pair[side], repeat=repeat) for side, repeat in order]
        directory = arguments.output / "e2e_benchmark" / _checked(functools.partial(checked_name, arguments.name))
        if (status := _run(configs, directory, arguments)) != OK:
            return status
        by_key = {record.key: record for record in load_records(directory / "runs")[0]}
        sides = [[by_key[c.key] for c in configs if c.repeat % 2 == side] for side in (0, 1)]
    means = [process_means(side) for side in sides]
    for name, records, known in zip("AB", sides, means, strict=True):
        if records and not known:
            ended = STATUS_WORDS[records[0].status]
            raise SweepError(f"{name} cannot be compared: {ended} in {len(records)} of {len(records)} processes")
    comparison = _checked(functools.partial(compare, *means))
    table = comparison_table((arguments.a.strip(), arguments.b.strip()), means, comparison)
    if directory is not None:
        write_comparison(table, directory)
    print_table(table)
    return OK


def _refuse_unlike(sides: Sequence[Sequence[RunRecord]], allow_mixed: bool) -> None:
    identities = {record.environment.identity for side in sides for record in side if record.environment}
    if len(identities) > 1 and not allow_mixed:
        raise UsageError("the records come from different hardware or software; compare them with --allow-mixed")
    if any(len({record.config.configuration for record in side}) != 1 for side in sides):
        raise UsageError("each side must hold repeats of one configuration; give the paths of its records")


def _both_on_disk(a: str, b: str) -> bool:
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
        return bool(text.strip()) and Path(text).exists()  # no flags at all are flags too, not the current directory
    except OSError:  # flags may be longer than any file name
        return False


def _records_at(path: Path) -> list[RunRecord]:
    if path.is_file():
        return [read_record(path)]
    runs = path / "runs" if (path / "runs").is_dir() else path
    return _load(runs)


def _load(runs: Path) -> list[RunRecord]:
    """The records in `runs`; what is unreadable is said and left out."""
    records, problems = load_records(runs)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    return records


def _checked(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _status(records: Sequence[RunRecord]) -> int:
    return OK if all(record.status.is_result for record in records) else FAILED
