"""How a command ends: its exit status, and the errors that mean wrong usage.

0: every configuration has a result (running out of memory is one); 1: something crashed, hung or
was killed, a profile could not be explained, or one of several records is damaged; 2: wrong usage,
or a file that is missing or not what it should be; 130: interrupted.
"""

import atexit
import codecs
import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TextIO, TypeAlias, TypeVar

import msgspec

from .. import interrupt
from ..config import Profiler
from ..files import encode_json, in_one_line, why_no_file
from ..record import RunRecord, load_records
from ..subject import Subject
from ..sweep.store import VIEWERS, raw_profile_path
from ..text import print_aside, print_line

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from ..report.section import Table

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, interrupt.STATUS
P = ParamSpec("P")
T = TypeVar("T")
PrintJson: TypeAlias = Callable[[bytes], None]


class UsageError(ValueError):
    """The command line is wrong; the message says what to correct."""


def checked(make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return what `make` returns, and raise its ValueError as a UsageError."""
    try:
        return make(*args, **options)
    except ValueError as error:
        raise UsageError(str(error)) from error


def existing(path: Path, needed: str) -> Path:
    """Return the path if it is a regular file; otherwise raise UsageError, which says what was
    `needed`.
    """
    if (problem := why_no_file(path)) is not None:
        raise UsageError(f"{path}: {problem}; needed {needed}")
    return path


def status_of(records: Sequence[RunRecord], unexplained: Container[Subject] = ()) -> int:
    """The exit status for these records; a run in `unexplained` lacks the explanation of its
    profile.
    """
    for record in records:
        if not record.status.is_result or record.subject in unexplained:
            return FAILED
    return OK


def load_records_or_warn(runs: Path) -> list[RunRecord]:
    """The records in `runs`; one that cannot be read is left out, with a warning on standard
    error.
    """
    records, problems = load_records(runs)
    for problem in problems:
        print_aside(f"warning: {problem}")
    return records


@contextlib.contextmanager
def json_alone(is_asked: bool) -> Iterator[PrintJson | None]:
    """Yield a function that takes the command's JSON, which is printed at the end of the block;
    None without --json.

    The JSON is alone on standard output: everything else printed in the block goes to standard
    error, whether this program, a user's model, a library or a child process prints it.
    """
    if not is_asked:
        yield None
        return
    taken: list[bytes] = []
    with stdout_to_stderr():
        yield taken.append
    for data in taken:
        sys.stdout.write(data.decode())


def with_statistics(measured: object, times_s: Mapping[str, Sequence[float]]) -> bytes:
    """What was measured in JSON, and before it the statistics of the times that there are."""
    from ..analysis.statistics import summaries

    return encode_json({"statistics": summaries(times_s), **msgspec.to_builtins(measured)})


def show(
    tables: Iterable["Table"],
    directory: Path | None = None,
    answer: Iterable[str] = (),
    *,
    json: bytes | None = None,
) -> None:
    """Print the answer in sentences and the tables, or only the JSON, and where the files are."""
    from ..report.terminal import print_tables

    if json is not None:
        sys.stdout.write(json.decode())
    else:
        print_tables(tables, directory, answer)
    if directory is not None:
        (print_line if json is None else print_aside)(f"results: {directory}")


def print_page(make: Callable[[], Path]) -> None:
    """Make a page, and print its path as the last line. The results are printed already: a page
    that cannot be written is only noted.
    """
    try:
        page = make()
    except OSError as error:
        print_aside(f"note: no page was written: {in_one_line(error)}")
    else:
        print_line(f"page: {page}")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, also for C libraries and child processes.

    What a user's code that has run in the block prints when this process ends goes there too.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        atexit.register(_stdout_ends)  # it runs before all that was registered earlier


def _stdout_ends() -> None:
    """Redirect standard output to standard error for the rest of the process, so that the JSON
    stays alone on it.
    """
    sys.stdout.flush()
    os.dup2(2, 1)


def print_profile_paths(subjects: Iterable[Subject], runs: Path) -> None:
    """Print where the raw profiles of these runs are, and which viewer opens them."""
    by_profiler: dict[Profiler, list[Path]] = {}
    for config in subjects:
        if config.profiler is not Profiler.NONE:
            path = raw_profile_path(config, runs)
            if path.is_file():
                by_profiler.setdefault(config.profiler, []).append(path)
    for profiler, paths in by_profiler.items():
        folder = paths[0].parent
        where = paths[0] if len(paths) == 1 else folder
        print_line(f"{folder.name}: {where} (open with {VIEWERS[profiler]})")


_CLOSED = (errno.EPIPE, errno.EIO, errno.EINVAL)
"""Errors of a pipe whose reader has ended (`| head`, Ctrl-C in `| tee log`), of a closed terminal,
and of such a pipe on Windows.
"""


class _Output(io.FileIO):
    """A standard stream that is redirected to the null device when a write fails.

    Results that cannot be written are an error, unless their reader has gone; messages that cannot
    be are dropped.
    """

    is_discarded = False
    is_for_results = False

    def write(self, data: "ReadableBuffer", /) -> int | None:  # type: ignore[override]
        """Write to the stream. If that fails, discard what follows; raise the error only for
        results, and only if their reader has not merely gone.
        """
        try:
            return super().write(data)
        except OSError as error:
            self.is_discarded = True
            _redirect_to_null(self.fileno())
            if self.is_for_results and error.errno not in _CLOSED:
                error.filename = "standard output"
                raise
            return memoryview(data).nbytes


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Error handler for characters that the stream's encoding lacks: JSON's escapes in their place,
    and where to go on.
    """
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("cs336.escaped", _escaped)


def guard_outputs() -> None:
    """Make each standard stream of this process survive the end of its reader, independently of the
    other.

    A stream that is closed already is redirected to the null device, so that no file gets its
    descriptor.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _redirect_to_null(descriptor)
    sys.stdout = _guarded(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _guarded(sys.stderr, sys.__stderr__, 2)


def print_last(text: str) -> None:
    """Print to standard error, and to standard output if the reader of standard error has gone."""
    print(text, file=sys.stderr, flush=True)
    buffer = getattr(sys.stderr, "buffer", None)
    if getattr(getattr(buffer, "raw", buffer), "is_discarded", False):
        print(text)


def _guarded(stream: TextIO | None, original: TextIO | None, descriptor: int) -> TextIO:
    """The stream on an `_Output`; a stream that has replaced the original one, as in a test, is
    left alone, and so is a console of Windows, to which no plain file can write.
    """
    if stream is None:
        return open(descriptor, "w", encoding="utf-8", closefd=False)
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    if not isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
        return stream
    raw = _Output(stream.fileno(), "wb", closefd=False)
    raw.is_for_results = descriptor == 1
    return io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="cs336.escaped",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _redirect_to_null(descriptor: int) -> None:
    """Make the descriptor one of the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    if null != descriptor:
        os.close(null)
