"""How a command ends: its exit status, and the errors that mean wrong usage.

0: every configuration has a result (running out of memory is one); 1: something crashed, hung or was killed, or of
several records one is damaged; 2: wrong usage, a file that is not there or not what it should be; 130: interrupted.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from cs336_systems.config import Profiler, RunConfig
from cs336_systems.files import why_no_file
from cs336_systems.record import RecordError, RunRecord
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings, load_ceilings
from cs336_systems.sweep.store import VIEWERS, raw_profile_path

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
T = TypeVar("T")
PrintJson: TypeAlias = Callable[[bytes], None]


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
        raise UsageError(f"{path}: {problem}; needed {needed}")
    return path


def status_of(records: Sequence[RunRecord]) -> int:
    """The exit status that these results call for."""
    return OK if all(record.status.is_result for record in records) else FAILED


def load_ceilings_or_warn(directory: Path) -> Ceilings:
    """The ceilings measured into `directory`; a damaged one is said, and then there are none."""
    try:
        return load_ceilings(directory)
    except RecordError as error:
        print(f"warning: no share of a measured ceiling: {error}", file=sys.stderr)
        return NO_CEILINGS


@contextlib.contextmanager
def json_alone(is_asked: bool) -> Iterator[PrintJson | None]:
    """Yield what takes a command's JSON, to be printed at the end of the block; None where no JSON is asked for.

    The JSON is alone on standard output: all else that is printed meanwhile goes to standard error, by this program, a
    user's model, the libraries and processes that it uses.
    """
    if not is_asked:
        yield None
        return
    taken: list[bytes] = []
    with _stdout_to_stderr():
        yield taken.append
    for data in taken:
        sys.stdout.write(data.decode())


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What is printed within goes to standard error, whether Python, a library in C or a child process prints it."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def print_profile_paths(configs: Iterable[RunConfig], runs: Path) -> None:
    """Say where the profilers of these runs left what they recorded, and what opens it."""
    from cs336_systems.report.terminal import say

    watched = [config for config in configs if config.profiler is not Profiler.NONE]
    for profiler in dict.fromkeys(config.profiler for config in watched):
        paths = (raw_profile_path(config, runs) for config in watched if config.profiler is profiler)
        found = [path for path in paths if path.is_file()]
        if not found:
            continue
        folder, viewer = found[0].parent, VIEWERS[profiler]
        if len(found) == 1:
            say(f"{folder.name.removesuffix('s')}: {found[0]} (open it with {viewer})")
        else:
            say(f"{folder.name}: {folder} (open one with {viewer})")
