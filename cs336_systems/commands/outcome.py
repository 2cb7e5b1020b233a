"""How a command ends: its exit status, and the errors that mean wrong usage.

0: every configuration has a result (running out of memory is one); 1: something crashed, hung or was killed, or a file
is damaged; 2: wrong usage, a file that is not there among it; 130: interrupted.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from cs336_systems.json_files import why_no_file
from cs336_systems.record import RecordError, RunRecord
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings, load_ceilings

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
T = TypeVar("T")


class UsageError(ValueError):
    """The command line asks for something that cannot be."""


def checked(make: Callable[[], T]) -> T:
    """What `make` returns; its ValueError is the user's mistake."""
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def existing(path: Path, needed: str) -> Path:
    """The path of a regular file, as it is; raise UsageError, which says what is `needed`, where there is none."""
    if (problem := why_no_file(path)) is not None:
        raise UsageError(f"{path}: not a file: {problem}; needed {needed}")
    return path


def status_of(records: Sequence[RunRecord]) -> int:
    """The exit status that these results call for."""
    return OK if all(record.status.is_result for record in records) else FAILED


def ceilings_or_say(directory: Path) -> Ceilings:
    """The ceilings measured into `directory`; a damaged one is said, and then there are none."""
    try:
        return load_ceilings(directory)
    except RecordError as error:
        print(f"warning: no share of a measured ceiling: {error}", file=sys.stderr)
        return NO_CEILINGS
