"""`cs336 compare`: which of two configurations is faster."""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import tyro

from cs336_systems.analysis.compare import Comparison, compare, interleave, process_means
from cs336_systems.commands.benchmark import BenchmarkArguments
from cs336_systems.commands.device import explain_cpu_fallback
from cs336_systems.commands.flags import (
    MeasuringArguments,
    Switch,
    check_repeats,
    checked_name,
    parse,
    unset,
    value_or,
)
from cs336_systems.commands.outcome import OK, PrintJson, UsageError, checked, json_alone, load_records_or_warn
from cs336_systems.commands.sweep import measure_all
from cs336_systems.config import Profiler, RunConfig
from cs336_systems.files import encode_json, read_json, write_atomically
from cs336_systems.record import RecordError, RunRecord, Status, WarningCode, load_records, read_record

if TYPE_CHECKING:
    from cs336_systems.report.table import Table

COMPARISON_FILE = "comparison.json"


@dataclass(frozen=True, kw_only=True)
class CompareArguments(MeasuringArguments):
    """Say which of two configurations is faster, slower, or that one cannot tell.

    A and B are each the flags of benchmark.py in quotes, such as "--size small --no-ranges"; their runs are
    interleaved A B B A, every one a fresh process, and the verdict rests on the means of the processes. Or they
    are directories of finished sweeps.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Flags in quotes, or the directory of a sweep that holds repeats of one configuration."""
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """What to compare it with."""
    repeats: int = 5
    """Fresh processes of each; two give no interval, and so no verdict."""
    name: Annotated[str | None, unset("NAME", "made of A and B")] = None
    """Name of the directory under OUTPUT/e2e_benchmark/ for the records."""
    output: Path = Path("data")
    """Directory for results."""
    json: Switch = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_repeats(self.repeats, least=2)  # one process tells nothing of the spread


def run(arguments: CompareArguments) -> int:
    """Measure both sides alternately, or read them, and say which is faster."""
    with json_alone(arguments.json) as print_json:
        return _compare(arguments, print_json)


def _compare(arguments: CompareArguments, print_json: PrintJson | None) -> int:
    from cs336_systems.report.sections.comparison import write_comparison
    from cs336_systems.report.terminal import print_table

    names = Names(a=arguments.a.strip(), b=arguments.b.strip())
    directory: Path | None = None
    if _both_on_disk(arguments.a, arguments.b):
        sides = [_records_at(Path(side)) for side in (arguments.a, arguments.b)]
        _refuse_unlike(sides, arguments.allow_mixed)
    else:
        asked = [_flags_of(side) for side in (arguments.a, arguments.b)]
        pair = [checked(side.config) for side in asked]
        for device in dict.fromkeys(side.step.device for side in asked):
            explain_cpu_fallback(device)
        # Even repeats are A and odd ones B, so that A can be compared with A.
        order = [(side, 2 * repeat + side) for side, repeat in interleave(2, arguments.repeats)]
        configs = [replace(pair[side], repeat=repeat) for side, repeat in order]
        name = value_or(arguments.name, f"compare_{pair[0].size}_{pair[0].digest}_{pair[1].digest}")
        directory = arguments.output / "e2e_benchmark" / checked(functools.partial(checked_name, name))
        if not arguments.fresh:
            _refuse_another(pair, directory)
        if (status := measure_all(configs, directory, arguments)) != OK:
            return status
        by_key = {record.key: record for record in load_records(directory / "runs")[0]}
        sides = [[by_key[c.key] for c in configs if c.repeat % 2 == side] for side in (0, 1)]
    means, codes, comparison, table = _judge(names, sides)
    if directory is not None:
        write_atomically(directory / COMPARISON_FILE, encode_json(names))
        write_comparison(table, directory)
    if print_json is not None:
        found = zip("AB", (names.a, names.b), means, codes, strict=True)
        listed = [
            {"side": side, "configuration": name, "process_means_s": own, "process_warnings": warned}
            for side, name, own, warned in found
        ]
        print_json(encode_json({"sides": listed, "verdict": comparison.verdict, "comparison": comparison}))
    else:
        print_table(table)
    return OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names that the user gave the two sides of a comparison; kept in a file beside their records."""

    a: str
    b: str
    format_version: int = 1


class _Judged(NamedTuple):
    """Two sides and the verdict on them; `means_s` and `codes` of the warnings are by side and process."""

    means_s: list[list[float]]
    codes: list[list[list[WarningCode]]]
    comparison: Comparison
    table: "Table"


def _judge(names: Names, sides: Sequence[Sequence[RunRecord]]) -> _Judged:
    """Compare the processes that finished; raise SweepError where none of a side did, UsageError for too few."""
    from cs336_systems.report.sections.comparison import comparison_table
    from cs336_systems.report.words import STATUS_WORDS
    from cs336_systems.sweep.store import SweepError

    means = [process_means(side) for side in sides]
    for name, records, known in zip("AB", sides, means, strict=True):
        if records and not known:
            ended = STATUS_WORDS[records[0].status]
            raise SweepError(f"{name} cannot be compared: {ended} in {len(records)} of {len(records)} processes")
    comparison = checked(functools.partial(compare, *means))
    codes = [[[w.code for w in record.warnings] for record in side if record.status is Status.OK] for side in sides]
    return _Judged(means, codes, comparison, comparison_table((names.a, names.b), means, comparison, codes))


def rebuild(directory: Path) -> None:
    """Write the verdict of a finished comparison again, from its records; even repeats are A's and odd ones B's."""
    from cs336_systems.report.sections.comparison import write_comparison

    file, what = directory / COMPARISON_FILE, "the names of both sides of a comparison"
    names = read_json(file, Names, what, version=1, error=RecordError)
    records = sorted(load_records_or_warn(directory / "runs"), key=lambda record: record.config.repeat)
    sides = [[record for record in records if record.config.repeat % 2 == side] for side in (0, 1)]
    write_comparison(_judge(names, sides).table, directory)


def _flags_of(side: str) -> BenchmarkArguments:
    """Parse the flags of a side; raise UsageError for a profiler, and for flags about output."""
    asked = parse(BenchmarkArguments, "benchmark.py", checked(functools.partial(shlex.split, side)))
    if checked(asked.config).profiler is not Profiler.NONE:
        raise UsageError(f"{side.strip()}: a profiler makes a run slower; compare runs without one")
    if asked.json or asked.output != BenchmarkArguments.output:
        raise UsageError(f"{side.strip()}: a side has no output of its own; leave out --json and --output")
    return asked


def _refuse_another(pair: Sequence[RunConfig], directory: Path) -> None:
    """Raise UsageError if the directory has records of another comparison, not measured alternately with these.

    Even repeats are A's and odd ones B's.
    """
    for record in load_records_or_warn(directory / "runs") if directory.is_dir() else ():
        if record.config.configuration != pair[record.config.repeat % 2].configuration:
            raise UsageError(
                f"{directory} holds another comparison ({record.config.label} is in it): both sides are measured "
                "alternately, so none of its times can stand for one of them; choose another --name, or --fresh"
            )


def _refuse_unlike(sides: Sequence[Sequence[RunRecord]], allow_mixed: bool) -> None:
    identities = {record.environment.identity for side in sides for record in side if record.environment}
    if len(identities) > 1 and not allow_mixed:
        raise UsageError("the records come from different hardware or software; compare them with --allow-mixed")
    if any(len({record.inputs for record in side}) > 1 for side in sides) and not allow_mixed:
        raise UsageError(
            "the records of one side come from different versions of a model's source or of a token file; "
            "compare them with --allow-mixed"
        )
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
    return load_records_or_warn(runs)


def is_side(word: str, words: Sequence[str]) -> bool:
    """Whether the word is a side, given as flags of benchmark.py: several in quotes, or one that `compare` lacks."""
    own = {"--help", *(f"--{f.name.replace('_', '-')}" for f in fields(CompareArguments))}
    alone = words[0] == "compare" and word.startswith("--") and word.partition("=")[0].replace("_", "-") not in own
    return word.startswith("-") and (" " in word or alone)
