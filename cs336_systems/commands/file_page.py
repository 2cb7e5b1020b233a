"""Where the page of a single file is, and how it is written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write_atomically
from ..text import plain_word
from .flags import MAX_NAME_LENGTH

if TYPE_CHECKING:
    from ..report.results import Results

FILES = Path("data") / "files"
"""Where the pages of single files are, below the current directory."""
SOURCE = "file.txt"
"""Beside the page of a file, the path of that file, so that files of one name have pages of their
own.
"""
ENDINGS = (".gz", ".zip", ".json", ".trace", ".pt", ".sqlite", ".nsys-rep", ".pickle", ".pkl")
"""Endings of profilers' files, from the last one inwards, which the name of a page is without."""


def page_directory(path: Path, root: Path = FILES) -> Path:
    """The directory for the page of the file at `path`: named like the file, and with a number
    where another file of that name has its page.
    """
    name = path.resolve().name
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    name = plain_word(name)[:MAX_NAME_LENGTH].strip(".-") or "file"
    directory = root / name
    number = 1
    while directory.exists() and _source_text(directory) != os.fsencode(path.resolve()):
        number += 1
        directory = root / f"{name}-{number}"
    return directory


def _source_text(directory: Path) -> bytes:
    """The path of the file whose page is in the directory; empty if that is not known."""
    kept = directory / SOURCE
    return kept.read_bytes() if kept.is_file() else b""


def made_directory(path: Path) -> Path:
    """The directory of the page of the file at `path`, made if need be, with the file's path."""
    directory = page_directory(path)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / SOURCE, os.fsencode(path.resolve()))
    return directory


def write_page_of_file(
    path: Path, results: "Results", keep: Callable[[Path], object], directory: Path | None
) -> Path:
    """Write the page of an explained file into the directory, by default its own, where `keep`
    writes its profile too; return the path of the page.
    """
    from ..report.page.chapters import write_page_of
    from ..report.page.directory import Directory

    if directory is None:
        directory = made_directory(path)
        keep(directory)
    return write_page_of(Directory(path=directory, results=results), lambda _: None)[0]
