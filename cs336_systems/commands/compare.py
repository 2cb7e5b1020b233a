"""`cs336 compare`: which of two configurations, or of each two of two sweeps, is faster."""

import functools
import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from cs336_systems.analysis.compare import Comparison, Verdict, compare, interleave, process_means
from cs336_systems.analysis.matching import refuse_unlike, without_profiled
from cs336_systems.commands.benchmark import BenchmarkArguments
from cs336_systems.commands.device import explain_cpu_fallback, resolve_device
from cs336_systems.commands.flags import (
    MeasuringArguments,
    Switch,
    check_repeats,
    checked_name,
    parse,
    unset,
    value_or,
)
from cs336_systems.commands.outcome import (
    FAILED,
    INTERRUPTED,
    OK,
    PrintJson,
    UsageError,
    checked,
    json_alone,
    load_records_or_warn,
)
from cs336_systems.commands.sweep import SweepArguments, measure_all
from cs336_systems.config import Device, Profiler, RunConfig
from cs336_systems.files import encode_json, read_json, write_atomically
from cs336_systems.record import RecordError, RunRecord, Status, WarningCode, load_records, read_record
from cs336_systems.text import counted

if TYPE_CHECKING:
    from cs336_systems.report.section import Section
    from cs336_systems.report.table import Table

COMPARISON_FILE = "comparison.json"
GRID_FLAGS = {*SweepArguments.settings} - {*BenchmarkArguments.settings}
"""Flags that a sweep has and a single run has not."""


@dataclass(frozen=True, kw_only=True)
class CompareArguments(MeasuringArguments):
    """Say which of two configurations is faster, slower, or that one cannot tell; or the same of two sweeps.

    A and B are each the flags of benchmark.py in quotes, such as "--size small --no-ranges"; their runs are
    interleaved A B B A, every one a fresh process, and the verdict rests on the means of the processes. Or they
    are directories of finished sweeps.

    Of two sweeps each configuration has a row with its own verdict. Rows are matched by all settings but those in
    which the sweeps differ throughout. To measure two sweeps interleaved, give the flags of benchmark_sweep.py in
    quotes, such as "--sizes small medium --precisions bf16", or two directories and --measure.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Flags in quotes, or the directory of a sweep."""
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """What to compare it with."""
    measure: Switch = False
    """Measure the configurations of two directories again, interleaved, instead of comparing what is there."""
    fail_if_slower: Annotated[float | None, unset("PERCENT", "no limit")] = None
    """End with status 1 if the verdict on any configuration is that B is slower, by more than this."""
    repeats: int = 5
    """Fresh processes of each; two give no interval, and so no verdict on two configurations."""
    allow_mixed: Switch = False
    """Go on with records that come from another GPU, driver, torch, code, own model, token file or warm-up."""
    name: Annotated[str | None, unset("NAME", "made of A and B; finished sweeps are compared without writing")] = None
    """Name of the directory, under OUTPUT/e2e_benchmark/ for what is measured, under OUTPUT/comparisons/ otherwise."""
    output: Path = Path("data")
    """Directory for results."""
    json: Switch = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_repeats(self.repeats, least=2)  # one process tells nothing of the spread
        if self.fail_if_slower is not None and not 0 <= self.fail_if_slower < float("inf"):
            raise ValueError(f"--fail-if-slower must be a percentage from 0 up, got {self.fail_if_slower}")


def run(arguments: CompareArguments) -> int:
    """Measure both sides alternately, or read them, and say which is faster."""
    with json_alone(arguments.json) as print_json:
        return _compare(arguments, print_json)


def _compare(arguments: CompareArguments, print_json: PrintJson | None) -> int:
    names = Names(a=arguments.a.strip(), b=arguments.b.strip())
    directory, status = None, OK
    if _both_on_disk(arguments.a, arguments.b):
        sides: Sequence[Sequence[RunRecord]] = [_plain_records_at(Path(side)) for side in (arguments.a, arguments.b)]
        if arguments.name is not None and not arguments.measure:
            directory = arguments.output / "comparisons" / _checked_name(arguments.name)
        grids = _grids_of_records(sides) if arguments.measure else None
    else:
        grids = _grids_of_flags((arguments.a, arguments.b))
    if grids is not None:
        pairs = _pairs(grids, arguments.allow_mixed)
        directory = arguments.output / "e2e_benchmark" / _checked_name(value_or(arguments.name, _name_of(pairs)))
        if not arguments.fresh:
            _refuse_another(pairs, directory)
        # Even repeats are A and odd ones B, so that A can be compared with A.
        order = [(side, 2 * repeat + side) for side, repeat in interleave(2, arguments.repeats)]
        configs = [replace(pair[side], repeat=repeat) for pair in pairs for side, repeat in order]
        status = measure_all(configs, directory, arguments)
        if status == INTERRUPTED or (status != OK and len(pairs) == 1):
            return status
        by_key = {record.key: record for record in load_records(directory / "runs")[0]}
        found = [by_key[config.key] for config in configs if config.key in by_key]
        sides = _by_parity(found)
        write_atomically(directory / COMPARISON_FILE, encode_json(names))
    is_measured = grids is not None
    if _is_pair(sides, is_measured or all(Path(side).is_file() for side in (arguments.a, arguments.b))):
        if not is_measured:
            checked(functools.partial(refuse_unlike, sides, arguments.allow_mixed))
        verdicts = _show_pair(names, sides, directory, print_json)
    else:
        verdicts = _show_sweeps(names, sides, directory, print_json, arguments.allow_mixed, is_measured)
    return max(status, _guard(verdicts, arguments.fail_if_slower))


_Verdicts = Sequence[tuple[str, float | None]]
"""The verdict on each configuration that is on both sides, and B's step over A's; None where one is not known."""


def _is_pair(sides: Sequence[Sequence[RunRecord]], is_any_number: bool) -> bool:
    """Whether each side is repeats of one configuration, of which two are needed unless `is_any_number`."""
    is_one = all(len({record.config.configuration for record in side}) == 1 for side in sides)
    return is_one and (is_any_number or min(map(len, sides)) > 1)


def _show_pair(
    names: "Names", sides: Sequence[Sequence[RunRecord]], directory: Path | None, print_json: PrintJson | None
) -> _Verdicts:
    from cs336_systems.report.sections.comparison import write_comparison
    from cs336_systems.report.terminal import print_table

    means, codes, comparison, table = _judge(names, sides)
    if directory is not None:
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
    return [(comparison.verdict, comparison.ratio)]


def _show_sweeps(
    names: "Names",
    sides: Sequence[Sequence[RunRecord]],
    directory: Path | None,
    print_json: PrintJson | None,
    allow_mixed: bool,
    are_alternate: bool,
) -> _Verdicts:
    from cs336_systems.report.section import texts_of, write_files
    from cs336_systems.report.sections.side_by_side import ONLY_A, ONLY_B, sweeps_section
    from cs336_systems.report.terminal import print_table
    from cs336_systems.sweep.store import SweepError

    make = functools.partial(
        sweeps_section, (names.a, names.b), sides, allow_mixed=allow_mixed, are_alternate=are_alternate
    )
    section = checked(make)
    if directory is not None:
        write_files(texts_of(section), directory)
    if print_json is not None:
        listed = [{"side": side, "configuration": name} for side, name in (("A", names.a), ("B", names.b))]
        print_json(encode_json({"sides": listed, "results": section.json}))
    else:
        for table in section.tables:
            print_table(table, directory)
    rows: Sequence[Mapping[str, Any]] = section.rows
    verdicts = [(row["verdict"], row["ratio"]) for row in rows if row["verdict"] not in (ONLY_A, ONLY_B)]
    if all(ratio is None for _, ratio in verdicts):
        raise SweepError("no configuration ended well on both sides, so nothing could be compared")
    return verdicts


def _guard(verdicts: _Verdicts, percent: float | None) -> int:
    """The exit status of --fail-if-slower, with its reason on standard error; OK where nothing was asked."""
    if percent is None:
        return OK
    told = [ratio for verdict, ratio in verdicts if verdict == Verdict.SLOWER and ratio is not None]
    slower = [ratio for ratio in told if 100 * (ratio - 1) > percent]
    unknown = [verdict for verdict, _ in verdicts if verdict not in (Verdict.FASTER, Verdict.SLOWER)]
    print(
        f"B is slower by more than {percent:g} % in {len(slower)} of {counted(len(verdicts), 'configuration')}; "
        f"of {len(unknown)} it cannot be told",
        file=sys.stderr,
    )
    return FAILED if slower else OK


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


def section_of(directory: Path, records: Sequence[RunRecord]) -> "Section":
    """The verdict of a comparison that was measured, from its records; even repeats are A's and odd ones B's."""
    from cs336_systems.report.section import Section
    from cs336_systems.report.sections.side_by_side import sweeps_section

    file, what = directory / COMPARISON_FILE, "the names of both sides of a comparison"
    names = read_json(file, Names, what, version=1, error=RecordError)
    sides = _by_parity(sorted(records, key=lambda record: record.config.repeat))
    if _is_pair(sides, is_any_number=True):
        return Section(name="comparison", tables=(_judge(names, sides).table,))
    make = functools.partial(sweeps_section, (names.a, names.b), sides, allow_mixed=True, are_alternate=True)
    return checked(make)


def _by_parity(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Both sides of what `compare` measured: even repeats are A's and odd ones B's."""
    return [[record for record in records if record.config.repeat % 2 == side] for side in (0, 1)]


def _grids_of_flags(sides: Sequence[str]) -> list[Sequence[RunConfig]]:
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


def _grids_of_records(sides: Sequence[Sequence[RunRecord]]) -> list[Sequence[RunConfig]]:
    """The configurations of both sides; raise UsageError for those that cannot run here."""
    grids = [list(dict.fromkeys(record.config.configuration for record in side)) for side in sides]
    for config in (config for grid in grids for config in grid):
        if config.profiler is not Profiler.NONE:
            raise UsageError("a profiler makes a run slower; compare runs without one")
        if config.device is Device.CUDA:
            checked(functools.partial(resolve_device, "cuda"))
    return [*grids]


def _pairs(grids: Sequence[Sequence[RunConfig]], allow_mixed: bool) -> list[tuple[RunConfig, RunConfig]]:
    """The configurations that are on both sides, in A's order; others are named on standard error."""
    a, b = grids
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    from cs336_systems.report.identity import settings_of
    from cs336_systems.report.sections.side_by_side import matched

    settings = ([settings_of(config) for config in grid] for grid in grids)
    matching = checked(functools.partial(matched, *settings, allow_mixed=allow_mixed))
    for config in (*(a[index] for index in matching.only_a), *(b[index] for index in matching.only_b)):
        print(f"note: {config.label} is not measured: only one side has it", file=sys.stderr)
    return [(a[i], b[j]) for i, j in matching.pairs]


def _name_of(pairs: Sequence[tuple[RunConfig, RunConfig]]) -> str:
    """Name of the directory for records of these: the same for the same comparison alone."""
    if len(pairs) == 1:
        ((a, b),) = pairs
        return f"compare_{a.size}_{a.digest}_{b.digest}"
    digests = (hashlib.sha256("".join(config.digest for config in side).encode()) for side in zip(*pairs, strict=True))
    return f"compare_sweeps_{'_'.join(digest.hexdigest()[:10] for digest in digests)}"


def _checked_name(name: str) -> str:
    return checked(functools.partial(checked_name, name))


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


def _refuse_another(pairs: Sequence[tuple[RunConfig, RunConfig]], directory: Path) -> None:
    """Raise UsageError if the directory has records of another comparison, not measured alternately with these.

    Even repeats are A's and odd ones B's.
    """
    for record in load_records_or_warn(directory / "runs") if directory.is_dir() else ():
        if record.config.configuration not in {pair[record.config.repeat % 2].configuration for pair in pairs}:
            raise UsageError(
                f"{directory} holds another comparison ({record.config.label} is in it): both sides are measured "
                "alternately, so none of its times can stand for one of them; choose another --name, or --fresh"
            )


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


def _plain_records_at(path: Path) -> Sequence[RunRecord]:
    """The records at the path without those of runs under a profiler, unless all are such."""
    if path.is_file():
        return [read_record(path)]
    found = load_records_or_warn(path / "runs" if (path / "runs").is_dir() else path)
    if not found:
        raise UsageError(f"{path}: no records; needed the directory of a sweep")
    kept = without_profiled(found)
    if left_out := len(found) - len(kept):
        print(f"note: {counted(left_out, 'run')} under a profiler left out of {path}", file=sys.stderr)
    return kept


def is_side(word: str, words: Sequence[str]) -> bool:
    """Whether the word is a side, given as flags of benchmark.py: several in quotes, or one that `compare` lacks."""
    own = {"--help", *(f"--{f.name.replace('_', '-')}" for f in fields(CompareArguments))}
    alone = words[0] == "compare" and word.startswith("--") and word.partition("=")[0].replace("_", "-") not in own
    return word.startswith("-") and (" " in word or alone)
