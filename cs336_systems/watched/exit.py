"""The end of a watched loop that comes before its report: what was seen is reported then."""

import atexit
import os
import sys
from pathlib import Path
from typing import Protocol


class Reported(Protocol):
    """A watched loop."""

    def report(self, *, page: bool = True) -> Path | None:
        """Print and record what was seen."""

    def remove(self) -> None:
        """Take the hooks away."""


UNREPORTED: set[Reported] = set()
"""The loops of this process that have had steps since their last report."""
_PROCESS = os.getpid()


def conclude(loop: Reported) -> None:
    """Report a loop that has not been, and take its hooks away.

    What goes wrong is said in a line: it must not hide the exception that ended the loop.
    """
    try:
        if loop in UNREPORTED:
            loop.report(page=False)  # a page takes seconds, and the process is about to end
    except Exception as error:
        print(f"no report of the loop: {error}", file=sys.stderr)
    finally:
        loop.remove()


@atexit.register
def _conclude_all() -> None:
    if os.getpid() != _PROCESS:  # a child that was forked shares none of the loops
        return
    for loop in list(UNREPORTED):
        conclude(loop)
