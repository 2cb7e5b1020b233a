"""`cs336 report`: writes the tables and plots of finished runs again."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from cs336_systems.commands.compare import write_comparison
from cs336_systems.commands.flags import unset
from cs336_systems.commands.outcome import FAILED, OK, UsageError, checked
from cs336_systems.commands.results import explain_or_warn, show_results
from cs336_systems.record import RecordError, load_records
from cs336_systems.text import counted, print_aside


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Make the tables, plots and page (index.html) of finished runs again, of a sweep's directory.

    A directory that holds no runs itself stands for all results below it, of sweeps, ladders, studies and comparisons:
    each is written again where it is, with its page, as in `cs336 report data`. The directory gets a page that lists
    them by subject. If there are ceilings, forecast/ gets a table of how far the times that they predict for all steps
    are from the measured ones.

    A run under a profiler whose raw profile was not explained, or whose explanation was lost, is explained first.
    """

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directory of a sweep (with runs/ in it), or of anything else, or with results below it."""
    output: Annotated[Path | None, unset("DIR", "the directory itself")] = None
    """Where to write, for a sweep."""


def run(arguments: ReportArguments) -> int:
    """Write the tables, plots and page of a sweep, or rebuild all results below the directory."""
    directory = arguments.directory
    from cs336_systems.report.progress import StatusLine

    if arguments.output is None and not _is_sweep(directory):
        from cs336_systems.commands.rebuild import rebuild_all

        with StatusLine() as status:
            return rebuild_all(directory, status)
    output = arguments.output or directory
    records, problems = load_records(directory / "runs")
    _refuse_to_lose(problems, directory, output)
    if not records:
        raise UsageError(f"{directory}: no records in {directory / 'runs'}; needed the directory of a sweep")
    identities = {record.environment.identity for record in records if record.environment}
    if len(identities) > len({identity.device_name for identity in identities}):
        what = "the records come from different drivers, torch or code, to which differences may be due"
        print_aside(f"warning: {what}")
    output.mkdir(parents=True, exist_ok=True)
    from cs336_systems.report.compared import COMPARISON_FILE, load_compared

    with StatusLine() as status:
        is_explained = explain_or_warn(records, directory / "runs", status)
        show_results(records, directory, output, status, prints_tables=False)
        if output == directory and (output / COMPARISON_FILE).is_file():
            write_comparison(checked(partial(load_compared, output)), output, status)
    return OK if is_explained and not problems else FAILED


def _is_sweep(directory: Path) -> bool:
    """Whether the directory has the runs of a sweep; a ladder has runs too."""
    if not (directory / "runs").is_dir():
        return False
    from cs336_systems.commands.rebuild import is_study

    return not is_study(directory)


def _refuse_to_lose(problems: Sequence[RecordError], directory: Path, output: Path) -> None:
    """Report which records cannot be read; raise UsageError if tables with these runs would be overwritten."""
    for problem in problems:
        print_aside(f"warning: {problem}")
    if problems and (directory / "results.csv").is_file() and output.resolve() == directory.resolve():
        raise UsageError(
            f"{directory}: {counted(len(problems), 'record')} cannot be read, and the tables there would lose them: "
            "write elsewhere with --output, or measure them again with the command of the sweep"
        )
