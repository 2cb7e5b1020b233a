"""`cs336 report`: writes the tables, plots and pages of finished runs again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..report.progress import StatusLine
from .flags import FormatArguments


@dataclass(frozen=True, kw_only=True)
class ReportArguments(FormatArguments):
    """Make the tables, plots and page (index.html) of finished runs again, of a sweep's directory.

    A directory that holds no results itself stands for all below it, of sweeps, ladders, studies
    and comparisons: each is written again where it is, with its page, as in `cs336 report data`.
    The directory gets a page that lists them by subject. If there are ceilings, forecast/ gets a
    table of how far the times that they predict for all steps are from the measured ones.

    A run under a profiler whose raw profile was not explained, or whose explanation was lost, is
    explained first.
    """

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directory of a sweep (with runs/ in it), or of anything else, or with results below it."""


def run(arguments: ReportArguments) -> int:
    """Write all results in or below the directory again."""
    # pandas is slow to import, and the help does not need it
    from .rebuild import rebuild_all

    with StatusLine() as status:
        return rebuild_all(arguments.directory, status, arguments.formats)
