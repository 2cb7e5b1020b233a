"""Prints results on standard output: tables, lines, and the summary of a run or a sweep."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from cs336_systems.record import RunRecord
from cs336_systems.report.failures import own_place, own_traceback
from cs336_systems.report.formats import to_rich
from cs336_systems.report.table import Table
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.text import inert_line, print_line, shortened

UNLIMITED = 1_000_000
"""Width that rich is given for an unlimited width."""
LONGEST_TRACEBACK = 20_000
HEIGHT = 25
"""Lines of the terminal. Nothing printed here depends on it, but without it rich looks for the width by itself."""


def print_table(table: Table, directory: Path | None = None) -> None:
    """Print a table within the terminal's width; `directory` is where its files are, if it was written."""
    width = _width()
    where = "" if directory is None else f"; the CSV and Markdown files in {directory} have them"
    _console(width).print(to_rich(table, width, where))


def _width() -> int | None:
    """The width to use: COLUMNS if set, else the terminal's; None, which is unlimited, if the output is no terminal."""
    try:
        asked = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        asked = 0
    if asked > 0:
        return asked
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _console(width: int | None) -> Console:
    return Console(highlight=False, emoji=False, width=width or UNLIMITED, height=HEIGHT)


def plain(text: str) -> str:
    """The text within rich's markup: without control characters, and escaped so that rich reads no markup in it."""
    return escape(inert_line(text))


def print_run(record: RunRecord, path: Path, ceilings: Ceilings = NO_CEILINGS) -> None:
    """Print the table of one run, its failure or warnings, and the path of its record."""
    from cs336_systems.report.frame import to_frame  # pandas is slow to import, and the other functions do not need it
    from cs336_systems.report.sections.steps import results_table

    print_table(results_table(to_frame([record], ceilings), has_csv=False))
    console = _console(_width())
    if record.failure is not None:
        where = f" in {record.failure.where}" if record.failure.where else ""
        console.print(f"[red]{record.status}[/]{plain(where)}: {plain(record.failure.message)}")
        for line in shortened(own_traceback(record), LONGEST_TRACEBACK).splitlines():
            console.print(plain(line), soft_wrap=True)
    for warning in record.warnings:
        console.print(f"[yellow]{warning.code}[/]: {plain(warning.message)}")
    print_line(f"record: {path}")


def print_sweep(tables: Iterable[Table], records: Sequence[RunRecord], directory: Path) -> None:
    """Print the tables of a sweep, its failed runs, and its directory."""
    for table in tables:
        print_table(table, directory)
    console = _console(_width())
    for record in records:
        if record.failure is not None:
            place = f" ({place})" if (place := own_place(record)) else ""
            console.print(f"[red]{plain(record.config.label)}[/]: {plain(record.failure.message + place)}")
    print_line(f"results: {directory}")
