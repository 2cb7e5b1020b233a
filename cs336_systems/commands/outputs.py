"""Keeps the program running if the reader of its output or error stream ends, as in `| head`."""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of a pipe whose reader has ended (`| head`, Ctrl-C in `| tee log`) and of a closed terminal."""


class _Output(io.FileIO):
    """A standard stream that is redirected to the null device when a write finds that its reader has gone."""

    is_discarded = False

    def write(self, data: "ReadableBuffer", /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            self.is_discarded = True
            _redirect_to_null(self.fileno())
            return memoryview(data).nbytes


def guard_outputs() -> None:
    """Make each standard stream of this process survive the end of its reader, independently of the other.

    A stream that is closed already is redirected to the null device, so that no file gets its descriptor.
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
    """The stream on an `_Output`; a stream that has replaced the original one, as in a test, is left alone."""
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


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    if null != descriptor:
        os.close(null)
