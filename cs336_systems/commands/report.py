"""`cs336 report`: writes the tables and plots of finished runs again."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from cs336_systems.commands.compare import write_comparison
from cs336_systems.commands.flags import Switch, unset
from cs336_systems.commands.outcome import FAILED, OK, UsageError, checked, json_alone
from cs336_systems.commands.results import explain_or_warn, show_results
from cs336_systems.record import RecordError, load_records
from cs336_systems.text import counted, print_aside


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Make the tables, plots and page (index.html) of finished runs again, of one sweep's directory or several.

    A directory that holds no runs itself stands for all results below it, of sweeps, ladders, studies and comparisons:
    each is written again where it is, as in `cs336 report data`. The directory gets one page of all of them, which
    begins with the course's questions and then has the results by subject. The directory of a ladder or of a study
    is written again too, with its page. If there are ceilings, forecast/ gets a table of how far the times that they
    predict for all steps are from the measured ones.

    A run under a profiler whose raw profile was not explained, or whose explanation was lost, is explained first.
    """

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR ...]")]
    """Directories of sweeps (each with runs/ in it), or one of anything else, or with results below it."""
    output: Annotated[Path | None, unset("DIR", "the directory itself, if there is one only")] = None
    """Where to write."""
    json: Switch = False
    """Print JSON: all rows of the tables."""


def run(arguments: ReportArguments) -> int:
    """Write the tables of all directories together, or rebuild all results below a single directory."""
    if not arguments.directories or (arguments.output is None and len(arguments.directories) > 1):
        raise UsageError("report needs a directory; with several, also --output for what they give together")
    first, *others = arguments.directories
    if not others and arguments.output is None and not _is_sweep(first):
        return _everything(first, arguments.json)
    found, problems = {}, {}
    for directory in arguments.directories:
        found[directory], problems[directory] = load_records(directory / "runs")
    _refuse_to_lose(problems, arguments.output)
    for directory, own in found.items():
        if not own:
            raise UsageError(f"{directory}: no records in {directory / 'runs'}; needed the directory of a sweep")
    identities = {record.environment.identity for own in found.values() for record in own if record.environment}
    if len(identities) > len({identity.device_name for identity in identities}):
        what = "the records come from different drivers, torch or code, to which differences may be due"
        print_aside(f"warning: {what}")
    output = arguments.output or arguments.directories[0]
    output.mkdir(parents=True, exist_ok=True)
    from cs336_systems.report.compared import COMPARISON_FILE, load_compared
    from cs336_systems.report.progress import StatusLine

    with json_alone(arguments.json) as print_json, StatusLine() as status:
        is_explained = [explain_or_warn(own, directory / "runs", status) for directory, own in found.items()]
        show_results(found, output, status, print_json, prints_tables=False)
        if [*found] == [output] and (output / COMPARISON_FILE).is_file():
            write_comparison(checked(partial(load_compared, output)), output, status)
    return OK if all(is_explained) and not any(problems.values()) else FAILED


def _is_sweep(directory: Path) -> bool:
    """Whether the directory has the runs of a sweep; a ladder has runs too."""
    if not (directory / "runs").is_dir():
        return False
    from cs336_systems.commands.rebuild import is_study

    return not is_study(directory)


def _everything(root: Path, is_json: bool) -> int:
    """Rebuild all results below the directory."""
    from cs336_systems.commands.rebuild import rebuild_all
    from cs336_systems.report.progress import StatusLine

    with json_alone(is_json) as print_json, StatusLine() as status:
        return rebuild_all(root, status, print_json)


def _refuse_to_lose(problems: Mapping[Path, Sequence[RecordError]], output: Path | None) -> None:
    """Report which records cannot be read; raise UsageError if tables with these runs would be overwritten."""
    for problem in itertools.chain.from_iterable(problems.values()):
        print_aside(f"warning: {problem}")
    for directory, found in problems.items():
        if found and (directory / "results.csv").is_file() and (output or directory).resolve() == directory.resolve():
            raise UsageError(
                f"{directory}: {counted(len(found), 'record')} cannot be read, and the tables there would lose them: "
                "write elsewhere with --output, or measure them again with the command of the sweep"
            )
