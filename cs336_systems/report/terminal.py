"""What the commands print at their end."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from cs336_systems.config import Profiler, RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.report.failures import own_place, own_traceback
from cs336_systems.report.formats import Table, to_rich
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings

if TYPE_CHECKING:
    from cs336_systems.analysis.kernels.step_profile import StepProfile

WIDTH_WITHOUT_TERMINAL = 140
"""Columns to print where the output is no terminal, so that a log or a README gets whole rows."""


def _console() -> Console:
    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def print_table(table: Table) -> None:
    """One table."""
    console = _console()
    console.print(to_rich(table, console.width))


def say(text: str) -> None:
    """One line, however long."""
    _console().print(escape(text), soft_wrap=True)


def print_profile(profile: "StepProfile", top: int, config: RunConfig | None = None) -> None:
    """What was found in a kernel trace, then its tables; `config` is the run's, where it is known."""
    from cs336_systems.report.kernels.files import (
        profile_tables,  # matplotlib, half a second that most prints can spare
    )

    console = _console()
    for table in profile_tables(profile, top, config):
        console.print(to_rich(table, console.width))
        console.print()


def print_run(record: RunRecord, path: Path, ceilings: Ceilings = NO_CEILINGS) -> None:
    """The table of one run, what puts it in doubt, and where its record is."""
    from cs336_systems.report.frame import to_frame  # pandas, half a second that other prints can spare
    from cs336_systems.report.tables import results_table

    console = _console()
    console.print(to_rich(results_table(to_frame([record], ceilings)), console.width))
    if record.failure is not None:
        where = f" in {record.failure.where}" if record.failure.where else ""
        console.print(f"[red]{record.status}[/]{escape(where)}: {escape(record.failure.message)}")
        if traceback := own_traceback(record):
            console.print(escape(traceback.rstrip()), soft_wrap=True)
    for warning in record.warnings:
        console.print(f"[yellow]{warning.code}[/]: {escape(warning.message)}")
    console.print(f"record: {escape(str(path))}", soft_wrap=True)


def print_sweep(records: Sequence[RunRecord], directory: Path, ceilings: Ceilings = NO_CEILINGS) -> None:
    """The tables of a sweep, and where its files are."""
    from cs336_systems.report.frame import to_frame
    from cs336_systems.report.tables import results_table, warmup_table

    console = _console()
    published = [record for record in records if record.config.profiler is Profiler.NONE]
    if published:
        for table in (results_table(to_frame(published, ceilings)), warmup_table(published)):
            if table is not None:
                console.print(to_rich(table, console.width))
    for record in records:
        if record.failure is not None:
            place = f" ({place})" if (place := own_place(record)) else ""
            console.print(f"[red]{escape(record.config.label)}[/]: {escape(record.failure.message + place)}")
    console.print(f"results: {escape(str(directory))}", soft_wrap=True)
