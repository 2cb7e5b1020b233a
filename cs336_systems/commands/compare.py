"""`cs336 compare`: which of two configurations, or of each two of two sweeps, is faster."""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..analysis.compare import interleave, refuse_other_work
from ..config import Profiler, RunConfig
from ..files import encode_json, write_atomically
from ..record import write_record
from ..report.progress import StatusLine
from ..sweep.store import SweepError, make_writable
from ..temporary import temporary_directory
from ..text import print_aside, print_line
from . import flags
from .benchmark import BenchmarkArguments
from .outcome import OK, UsageError, checked, load_records_or_warn
from .sweep import measure_all

if TYPE_CHECKING:
    from ..report.compared import Compared, Sides


@dataclass(frozen=True, kw_only=True)
class CompareArguments(flags.MeasuringArguments):
    """Say which of two configurations is faster, slower, or that one cannot tell; or the same of
    two sweeps.

    A and B are each the flags of benchmark.py in quotes, such as "--size small --no-ranges"; their
    runs are interleaved A B B A, every one a fresh process, and the verdict rests on the
    differences of neighbours. Or they are directories of finished sweeps: each configuration has a
    row with its own verdict. Rows are matched by all settings but those in which the sweeps differ
    throughout. Steps of unequal work are compared by tokens per second.

    What is measured is written as tables and as a page (index.html), which `cs336 report` makes
    again.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Flags in quotes, or the directory of a sweep."""
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
    """Fresh processes of each."""
    allow_mixed: flags.Switch = False
    """Go on with records that come from another GPU, driver, torch, code, own model, token file
    or warm-up.
    """
    name: Annotated[str | None, flags.unset("NAME", "made of A and B")] = None
    """Name of the directory under OUTPUT/e2e_benchmark/ for what is measured."""
    output: Path = Path("data")
    """Directory for results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        flags.check_repeats(self.repeats, least=2)  # one process does not show the spread


def run(arguments: CompareArguments) -> int:
    """Measure both sides alternately, or read them, and say which is faster."""
    from ..report.compared import Sides, compare_sides, records_at

    if arguments.baseline is not None:
        kept = (
            arguments.output
            / "baselines"
            / checked(functools.partial(flags.checked_name, arguments.baseline))
        )
        if arguments.b is not None or not both_on_disk(arguments.a, arguments.a):
            raise UsageError(
                "--baseline compares one directory of results with those kept earlier; leave out B"
            )
        if not kept.exists():
            records = checked(functools.partial(records_at, Path(arguments.a)))
            with temporary_directory(make_writable(kept.parent)) as begun:
                for record in records:
                    write_record(record, make_writable(begun / "runs"))
                begun.rename(kept)  # so that it is there wholly or not at all
            print_line(f"baseline: {kept} (compare later results with the same --baseline)")
            return OK
        names = (str(kept), arguments.a)
    elif arguments.b is None:
        raise UsageError("needed two sides, got one: add B, or --baseline NAME")
    else:
        names = (arguments.a, arguments.b)
    # JSON has no lone surrogates
    shown = [name.strip().encode(errors="backslashreplace").decode() for name in names]
    sides = Sides(a=shown[0], b=shown[1])
    if not both_on_disk(*names):
        configs = configs_of(names)
        _refuse_equal(arguments, configs[0].configuration == configs[1].configuration)
        checked(lambda: refuse_other_work(*configs))
        return _measure(arguments, sides, configs)
    paths = [Path(name) for name in names]
    _refuse_equal(arguments, paths[0].resolve() == paths[1].resolve())
    mixed = arguments.allow_mixed
    return _show(
        checked(
            lambda: compare_sides(sides, [records_at(path) for path in paths], allow_mixed=mixed)
        )
    )


def _refuse_equal(arguments: CompareArguments, are_equal: bool) -> None:
    if are_equal and not arguments.a_against_a:
        raise UsageError(
            "A and B are the same; to see how much the machine scatters, add --a-against-a"
        )


def _measure(arguments: CompareArguments, sides: "Sides", configs: Sequence[RunConfig]) -> int:
    """Measure the configurations of A and B alternately, and compare them."""
    from ..report.compared import COMPARISON_FILE
    from ..report.page.chapters import write_page_of
    from .rebuild import load

    a, b = configs
    given = f"compare_{a.size}_{a.digest}_{b.digest}" if arguments.name is None else arguments.name
    name = checked(functools.partial(flags.checked_name, given))
    directory = arguments.output / "e2e_benchmark" / name
    if not arguments.fresh:
        _refuse_another(configs, directory)
    # Even repeats are A and odd ones B, so that A can be compared with A.
    order = [(side, 2 * repeat + side) for side, repeat in interleave(2, arguments.repeats)]
    runs = [replace(configs[side], repeat=repeat) for side, repeat in order]
    if (status := measure_all(runs, directory, arguments)) != OK:
        return status
    write_atomically(directory / COMPARISON_FILE, encode_json(sides))
    with StatusLine() as line:
        own = load(directory)
        assert own.compared is not None
        own.compared.write(directory)
        page, _ = write_page_of(own, line)
    return _show(own.compared, page)


def _show(compared: "Compared", page: Path | None = None) -> int:
    """Print the tables of the comparison, and where its page is if it was written; return the
    exit status.
    """
    from ..report.terminal import print_table

    for left_out in compared.left_out:
        print_aside(f"note: {left_out}")
    for table in compared.section.tables:
        shown = replace(table, notes=tuple(note for note in table.notes if note != compared.answer))
        print_table(shown, None if page is None else page.parent)
    if page is not None:
        print_line(f"page: {page}")
    print_line(compared.answer)
    if all(row["ratio"] is None for row in compared.section.rows):
        raise SweepError("no configuration ended well on both sides, so nothing could be compared")
    return OK


def _refuse_another(configs: Sequence[RunConfig], directory: Path) -> None:
    """Raise UsageError if the directory has records of another comparison: they were not
    interleaved with these runs.

    Even repeats are A's and odd ones B's.
    """
    for record in load_records_or_warn(directory / "runs") if directory.is_dir() else ():
        if record.subject.configuration != configs[record.subject.repeat % 2].configuration:
            raise UsageError(
                f"{directory} holds another comparison ({record.subject.label} is in it): both "
                "sides are measured alternately, so none of its times can stand for one of them; "
                "choose another --name, or --fresh"
            )


def is_side(word: str, words: Sequence[str]) -> bool:
    """Whether the word is a side, given as flags of benchmark.py: several in quotes, or one that
    `compare` lacks.
    """
    own = {
        *flags.HELP,
        flags.HELP_ALL,
        *(f"--{f.name.replace('_', '-')}" for f in fields(CompareArguments)),
    }
    alone = (
        words[0] == "compare"
        and word.startswith("--")
        and word.partition("=")[0].replace("_", "-") not in own
    )
    return word.startswith("-") and (" " in word or alone)


def both_on_disk(a: str, b: str) -> bool:
    """Whether the sides are records, not flags; raise UsageError for a side that is neither, and
    for one of each.
    """
    exist = [_exists(side) for side in (a, b)]
    for side, exists in zip((a, b), exist, strict=True):
        if not exists and side.strip() and not side.strip().startswith("-"):
            raise UsageError(
                f"{side}: no such directory or record; needed one, or flags of benchmark.py in "
                "quotes"
            )
    if exist[0] != exist[1]:
        raise UsageError(
            "A and B must both be directories of finished sweeps, or both flags of benchmark.py "
            "in quotes"
        )
    return exist[0]


def _exists(text: str) -> bool:
    try:
        # an empty text means no flags, not the current directory
        return bool(text.strip()) and Path(text).exists()
    except OSError:  # flags may be longer than any file name
        return False


def configs_of(sides: Sequence[str]) -> list[RunConfig]:
    """The configuration that the flags of each side name; raise UsageError for a profiler, and
    for flags of output.
    """
    asked = [
        flags.parse(
            BenchmarkArguments, "benchmark.py", checked(functools.partial(shlex.split, side))
        )
        for side in sides
    ]
    configs = [checked(each.config) for each in asked]
    for side, each, config in zip(sides, asked, configs, strict=True):
        if config.profiler is not Profiler.NONE:
            raise UsageError(
                f"{side.strip()}: a profiler makes a run slower; compare runs without one"
            )
        if each.json or each.output != BenchmarkArguments.output:
            raise UsageError(
                f"{side.strip()}: a side has no output of its own; leave out --json and --output"
            )
    for device in dict.fromkeys(each.step.device for each in asked):
        flags.explain_cpu_fallback(device)
    return configs
