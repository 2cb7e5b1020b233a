"""Readers of profilers' files, and the choice of one by a file's content.

A module of this folder that defines `READER` is a reader. Other distributions offer theirs under
the entry point `cs336.readers`.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....plugins import load
from ...columns import ProfileError, read_head, what_it_is
from ..trace import Trace

HEAD_BYTES = 100


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads the files of one profiler."""

    needed: str
    """What these files are, in words, for the error about a file that no reader knows."""
    recognises: Callable[[Path, bytes], bool]
    """Whether the file with this path and these first HEAD_BYTES is one of them."""
    read: Callable[[Path], Trace]
    """The trace in the file; raises ProfileError, which says what is wrong with it."""


def readers() -> list[Reader]:
    """All readers. Those of other distributions come first, since their formats may look like
    one of this folder's, such as JSON.
    """
    modules = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
    of_this_folder = [importlib.import_module(module).READER for module in modules]
    return [*load("cs336.readers", Reader), *of_this_folder]


def read_trace(path: Path) -> Trace:
    """Read a profiler's file with the first reader that recognises it; raise ProfileError if none
    does.
    """
    candidates = readers()
    needed = ", or ".join(reader.needed for reader in candidates)
    head = read_head(path, HEAD_BYTES, needed)
    for reader in candidates:
        if reader.recognises(path, head):
            return reader.read(path)
    raise ProfileError(path, f"needed {needed}, but {what_it_is(path, head)}")
