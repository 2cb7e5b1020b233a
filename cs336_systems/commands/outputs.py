"""Standard output and error. One that nobody can read any more is given up, and never ends what the tool does."""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CLOSED = (errno.EPIPE, errno.EIO)
"""A pipe whose reader has ended, as after `| head` or Ctrl-C in `| tee log`; a terminal that has closed."""


class _Output(io.FileIO):
    """A standard stream that goes nowhere from the first write on that finds its reader gone."""

    is_given_up = False

    def write(self, data: "ReadableBuffer", /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            self.is_given_up = True
            _let_go_nowhere(self.fileno())
            return memoryview(data).nbytes


def guard_outputs() -> None:
    """Give up each standard stream of this process when it closes, for the rest of the process, and not the other.

    One that was closed before the start goes nowhere from the start; its number must not become a file's.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _let_go_nowhere(descriptor)
    sys.stdout = _guarded(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _guarded(sys.stderr, sys.__stderr__, 2)


def print_last(text: str) -> None:
    """Print to standard error, or to standard output where the former has been given up."""
    print(text, file=sys.stderr, flush=True)
    buffer = getattr(sys.stderr, "buffer", None)
    if getattr(getattr(buffer, "raw", buffer), "is_given_up", False):
        print(text)


def _guarded(stream: TextIO | None, original: TextIO | None, descriptor: int) -> TextIO:
    """The stream on a raw file that can be given up; what replaced the original, as in a test, is left alone."""
    if stream is None:
        return open(descriptor, "w", closefd=False)
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = _Output(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _let_go_nowhere(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    if null != descriptor:
        os.close(null)
