"""`cs336 compare`: which of two configurations, or of each two of two sweeps, is faster, and in
what two traces or snapshots of any programs differ.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..analysis.compare import interleave, refuse_other_work
from ..config import Profiler, RunConfig
from ..files import encode_json, write_atomically
from ..record import RUNS, RunRecord, write_record
from ..report.progress import StatusLine
from ..settings import flag_of
from ..sweep.store import SweepError, make_writable
from ..temporary import temporary_directory
from ..text import print_aside, print_line
from . import flags
from .benchmark import BenchmarkArguments
from .compare_files import difference_of, is_sweep, write_difference
from .machine import DeviceChoice, explain_cpu_fallback
from .measuring import measure_all
from .outcome import OK, UsageError, checked, load_records_or_warn, show
from .parse import as_declared, flag_names, is_flag, parse

if TYPE_CHECKING:
    from ..report.compared import Compared
    from ..report.page.directory import Directory


@dataclass(frozen=True, kw_only=True)
class CompareArguments(flags.MeasuringArguments):
    """Say which of two configurations, sweeps or files is faster, or that one cannot tell.

    A and B may be flags of `cs336 benchmark` in quotes, such as "--size small --no-ranges". Their
    runs are interleaved A B B A, every one a fresh process, and the verdict rests on the
    differences of neighbours.

    They may be directories of finished sweeps. Each configuration has a row with its own verdict.
    Rows are matched by all settings but those in which the sweeps differ throughout. Steps of
    unequal work are compared by tokens per second.

    They may be files of any programs. Traces of torch.profiler, reports of nsys and profiles that
    `cs336 kernels` has kept are compared by phase, class, module and kernel; memory snapshots by
    category, line of code and pool. The differences add up to that of the whole.

    What is measured is written as tables and as a page (index.html), which `cs336 report` makes
    again.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Flags in quotes, the directory of a sweep, or a file of any program."""
    b: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="B", help_behavior_hint="")
    ] = None
    """What to compare it with; none with --baseline."""
    baseline: Annotated[str | None, flags.unset("NAME", "compare with B")] = None
    """Compare the directory A with the results kept under this name, in OUTPUT/baselines; the
    first time, keep them.
    """
    a_against_a: flags.Switch = False
    """Allow equal sides, which show how much the machine scatters."""
    repeats: int = 5
    """Fresh processes of A, and as many of B."""
    allow_mixed: flags.Switch = False
    """Go on with records that come from another GPU, driver, torch, code, own model, token file
    or warm-up.
    """
    name: Annotated[str | None, flags.unset("NAME", "made of A and B")] = None
    """Name of the directory under OUTPUT/e2e_benchmark/ for what is measured."""
    top: int = 10
    """Most rows of a table about files."""
    json: flags.Switch = False
    """Print the difference of files as JSON."""
    output: Annotated[Path | None, flags.unset("DIR", "data; for files nothing is written")] = None
    """Directory for results."""

    @property
    def results(self) -> Path:
        """Where results of runs are kept."""
        return flags.value_or(self.output, Path("data"))

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range; a side needs at least two processes."""
        super().__post_init__()
        flags.check_repeats(self.repeats, least=2)  # one process does not show the spread


def run(arguments: CompareArguments) -> int:
    """Say which side is faster, by records that exist or that are measured alternately first."""
    from ..report.compared import Sides, by_parity, compare_sides, records_at
    from .rebuild import load

    names = _names(arguments)
    if names is None:
        return OK
    results = None
    records = list[Sequence[RunRecord]]()
    if are_on_disk(names):
        paths = [Path(name) for name in names]
        _refuse_equal(arguments, paths[0].resolve() == paths[1].resolve())
        if are_of_strangers(paths):
            return _compare_files(arguments, paths)
        _refuse_json(arguments)
        records += [checked(records_at, path) for path in paths]
    else:
        _refuse_json(arguments)
        configs = configs_of(names)
        _refuse_equal(arguments, configs[0].configuration == configs[1].configuration)
        checked(refuse_other_work, *configs)
        directory = _directory(arguments, configs)
        if (status := _measure(arguments, configs, directory)) != OK:
            return status
        results = load(directory)
        assert results.results is not None
        records += by_parity(results.results.records)
    # JSON has no lone surrogates
    a, b = (name.strip().encode(errors="backslashreplace").decode() for name in names)
    compared = checked(
        compare_sides,
        Sides(a=a, b=b),
        records,
        are_alternate=results is not None,
        allow_mixed=arguments.allow_mixed,
    )
    page = None if results is None else _write(compared, results, arguments.formats)
    return _show(compared, page)


def _compare_files(arguments: CompareArguments, paths: Sequence[Path]) -> int:
    """Say in what the files of any programs differ."""
    checked(flags.check_top, arguments.top)
    if arguments.formats and arguments.output is None:
        raise UsageError(f"--{arguments.formats[0]} needs --output, the directory to write to")
    from ..report.section import all_tables

    difference = difference_of(paths, arguments.top)
    if arguments.output is not None:
        write_difference(difference, arguments.output, arguments.formats)
    tables = all_tables(difference.sections)
    lines = [finding.text for finding in difference.findings]
    show(tables, arguments.output, lines, json=difference.encode() if arguments.json else None)
    return OK


def _refuse_json(arguments: CompareArguments) -> None:
    """Raise UsageError for --json where records of runs are compared, which are JSON already."""
    if arguments.json:
        raise UsageError("--json needs two traces or snapshots; runs are kept as JSON in runs/")


def _names(arguments: CompareArguments) -> tuple[str, str] | None:
    """The two sides as the user named them; None if there is only one, which is to be kept as the
    new --baseline.
    """
    if arguments.baseline is None:
        if arguments.b is None:
            raise UsageError("needed two sides, got one: add B, or --baseline NAME")
        return arguments.a, arguments.b
    from ..report.compared import records_at

    name = checked(flags.checked_name, arguments.baseline, "--baseline")
    kept = arguments.results / "baselines" / name
    if arguments.b is not None or not are_on_disk((arguments.a, arguments.a)):
        raise UsageError(
            "--baseline compares one directory of results with those kept earlier; leave out B"
        )
    if kept.exists():
        return str(kept), arguments.a
    records = checked(records_at, Path(arguments.a))
    with temporary_directory(make_writable(kept.parent)) as begun:
        runs = make_writable(begun / RUNS)
        for record in records:
            write_record(record, runs)
        begun.rename(kept)  # so that it is there wholly or not at all
    print_line(f"baseline: {kept} (compare later results with the same --baseline)")
    return None


def _refuse_equal(arguments: CompareArguments, are_equal: bool) -> None:
    """Raise UsageError for equal sides, unless they are asked for."""
    if are_equal and not arguments.a_against_a:
        raise UsageError(
            "A and B are the same; to see how much the machine scatters, add --a-against-a"
        )


def _directory(arguments: CompareArguments, configs: Sequence[RunConfig]) -> Path:
    """Where the runs of A and B are kept, under a name made of both unless one was given."""
    a, b = configs
    name = arguments.name
    if name is None:
        name = f"compare_{a.size}_{a.digest}_{b.digest}"
    return arguments.results / "e2e_benchmark" / checked(flags.checked_name, name)


def _measure(arguments: CompareArguments, configs: Sequence[RunConfig], directory: Path) -> int:
    """Measure the configurations of A and B alternately; return the exit status."""
    if not arguments.fresh:
        _refuse_another(configs, directory)
    # Even repeats are A and odd ones B, so that A can be compared with A.
    runs = []
    for side, repeat in interleave(2, arguments.repeats):
        runs.append(replace(configs[side], repeat=2 * repeat + side))
    return measure_all(runs, directory, arguments)


def _refuse_another(configs: Sequence[RunConfig], directory: Path) -> None:
    """Raise UsageError if the directory has records of another comparison: they were not
    interleaved with these runs.
    """
    for record in load_records_or_warn(directory / RUNS):
        if record.subject.configuration != configs[record.subject.repeat % 2].configuration:
            raise UsageError(
                f"{directory} holds another comparison ({record.subject.label} is in it): both "
                "sides are measured alternately, so none of its times can stand for one of them; "
                "choose another --name, or --fresh"
            )


def _write(compared: "Compared", results: "Directory", formats: Sequence[str]) -> Path:
    """Write the comparison and its page beside the results that were measured for it; return the
    path of the page.
    """
    from ..report.compared import COMPARISON_FILE
    from ..report.page.chapters import write_page_of

    write_atomically(results.path / COMPARISON_FILE, encode_json(compared.sides))
    compared.write(results.path, formats)
    with StatusLine() as line:
        page, _ = write_page_of(replace(results, compared=compared), line)
    return page


def _show(compared: "Compared", page: Path | None) -> int:
    """Print the tables of the comparison, and where its page is if it was written; return the
    exit status.
    """
    from ..report.terminal import print_table

    for left_out in compared.left_out:
        print_aside(f"note: {left_out}")
    for table in compared.section.tables:
        # the answer is the last line
        notes = tuple(note for note in table.notes if note != compared.answer)
        print_table(replace(table, notes=notes), None if page is None else page.parent)
    if page is not None:
        print_line(f"page: {page}")
    print_line(compared.answer)
    if all(row["ratio"] is None for row in compared.section.rows):
        raise SweepError("no configuration ended well on both sides, so nothing could be compared")
    return OK


def is_side(word: str, words: Sequence[str]) -> bool:
    """Whether a word is one side of a comparison given as flags: several in quotes, or
    one that `compare` itself does not have.
    """
    names = flag_names(BenchmarkArguments)
    flags = {flag_of(name) for name in names - flag_names(CompareArguments)}
    is_alone = words[0] == "compare" and is_flag(as_declared(word, names), flags)
    return word.startswith("-") and (" " in word or is_alone)


def are_on_disk(sides: Sequence[str]) -> bool:
    """Whether the sides are records, not flags; raise UsageError for a side that is neither, and
    for one of each.
    """
    exist = set()
    for side in sides:
        exists = _exists(side)
        exist.add(exists)
        if not exists and side.strip() and not side.strip().startswith("-"):
            raise UsageError(
                f"{side}: no such file or directory; needed one, or flags of cs336 benchmark"
            )
    if len(exist) > 1:
        raise UsageError(
            "A and B must both be directories of finished sweeps, both files of traces or "
            "snapshots, or both flags of cs336 benchmark in quotes"
        )
    return exists


def are_of_strangers(paths: Sequence[Path]) -> bool:
    """Whether these existing paths are files of any programs; raise UsageError if only one is."""
    a, b = map(is_sweep, paths)
    if a != b:
        sweep, other = paths if a else reversed(paths)
        raise UsageError(
            f"{sweep} holds records of runs and {other} does not: compare two sweeps, or two "
            "traces or snapshots"
        )
    return not a


def _exists(text: str) -> bool:
    """Whether the side is a path that exists."""
    try:
        # an empty text means no flags, not the current directory
        return bool(text.strip()) and Path(text).exists()
    except OSError:  # flags may be longer than any file name
        return False


def configs_of(sides: Sequence[str]) -> list[RunConfig]:
    """The configuration that the flags of each side name; raise UsageError for a profiler, and
    for flags of output.
    """
    configs = []
    devices = dict[DeviceChoice, None]()
    for side in sides:
        asked = parse(BenchmarkArguments, "benchmark.py", checked(shlex.split, side))
        config = checked(asked.config)
        if config.profiler is not Profiler.NONE:
            raise UsageError(
                f"{side.strip()}: a profiler makes a run slower; compare runs without one"
            )
        if asked.json or asked.output != BenchmarkArguments.output:
            raise UsageError(
                f"{side.strip()}: a side has no output of its own; leave out --json and --output"
            )
        configs.append(config)
        devices[asked.step.device] = None
    for device in devices:
        explain_cpu_fallback(device)
    return configs
