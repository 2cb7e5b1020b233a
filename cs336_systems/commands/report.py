"""`cs336 report`: writes the tables, plots and pages of finished runs, or of a file."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..report.progress import StatusLine
from ..text import print_aside
from .flags import FormatArguments, RulesFile, Switch
from .outcome import OK


@dataclass(frozen=True, kw_only=True)
class ReportArguments(FormatArguments):
    """Make the tables, plots and page (index.html) of finished runs again, of a sweep's directory;
    or of the file of any program that `cs336 kernels` or `cs336 memory` explains.

    The page of a file is data/files/NAME/index.html, with the NAME of the file; so is that of a
    directory with the traces of one run.

    A directory that holds no results itself stands for all below it, of sweeps, ladders, studies,
    comparisons and files: each is written again where it is, with its page, as in
    `cs336 report data`. The directory gets a page that lists them by subject. If there are
    ceilings, forecast/ gets a table of how far the times that they predict for all steps are from
    the measured ones.

    A run under a profiler whose raw profile was not explained, or whose explanation was lost, is
    explained first.
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR|FILE")]
    """Directory of a sweep (with runs/ in it), or of anything else, or with results below it; or a
    trace, a report of nsys, or a memory snapshot.
    """
    open: Switch = False
    """Show the page in the browser."""
    rules: RulesFile = None
    """TOML file of lines 'PATTERN' = "CLASS", as for `cs336 kernels`: traces of runs that are still
    there are explained again, and names with the pattern are of this class.
    """


def run(arguments: ReportArguments) -> int:
    """Write all results in or below the directory again, or the page of the file."""
    from ..analysis.kernels.classes import read_rules

    path = arguments.path
    rules = None if arguments.rules is None else read_rules(arguments.rules)
    # pandas is slow to import, and the help does not need it
    from ..report.page.html import PAGE_FILE
    from .rebuild import is_foreign, rebuild_all, report_file

    with StatusLine() as status:
        if is_foreign(path):
            status.reading(path)
            outcome = OK
            page = report_file(path, status, arguments.formats, arguments.rules)
        else:
            outcome = rebuild_all(path, status, arguments.formats, rules)
            page = path / PAGE_FILE
    if arguments.open and page.exists() and not webbrowser.open(page.resolve().as_uri()):
        print_aside(f"note: no browser could be started here; open {page}")
    return outcome
