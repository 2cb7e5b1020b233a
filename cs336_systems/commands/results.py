"""Writes and prints the results of sweeps, after a sweep and for `cs336 report`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_systems.commands.outcome import load_ceilings_or_warn, print_profile_paths
from cs336_systems.record import RunRecord
from cs336_systems.report.progress import StatusLine
from cs336_systems.sweep.store import raw_profile_path
from cs336_systems.text import print_aside, print_line

if TYPE_CHECKING:
    from cs336_systems.report.page.chapters import Directory
    from cs336_systems.report.page.write import Page
    from cs336_systems.report.results import Results


def show_results(records: Sequence[RunRecord], directory: Path, status: StatusLine) -> None:
    """Write tables, plots and page of the sweep in the directory, and print the tables.

    Profiled runs are only in the tables of profiles, which stay as they are if they would lose runs.
    """
    status("reading records and profiles")
    from cs336_systems.report.page.chapters import Directory
    from cs336_systems.report.results import Results
    from cs336_systems.report.terminal import print_sweep
    from cs336_systems.studies.ceilings_files import ceilings_beside

    results = Results.load(records, directory, load_ceilings_or_warn(ceilings_beside(directory)))
    write_results(results, directory, status)
    page = write_page_of(Directory(path=directory, sweep=results), status)[0] if records else None
    status.end()
    print_sweep(results.tables(), records, directory)
    if page is not None:
        print_line(f"page: {page}")
    print_profile_paths([record.config for record in records], directory / "runs")


def write_results(results: "Results", directory: Path, status: StatusLine) -> None:
    """Write the tables and pictures of the sweep into its directory.

    Tables that would lose runs, whose profiles cannot be explained any more, stay as they are, with a warning.
    """
    if not all(raw_profile_path(config, directory / "runs").is_file() for config in results.without_profile):
        what = "the tables of profiles stay as they were; --fresh measures these runs again"
        print_aside(f"warning: {directory}: {results.lost}, and {what}")
        results = replace(results, kernels=(), memory=())
    results.write(directory, status)


def write_page_of(directory: "Directory", status: StatusLine) -> "tuple[Path, Page]":
    """Write the page of the results into their directory; return its path and what it shows."""
    from cs336_systems.report.page.chapters import PAGE_FILE, page_of
    from cs336_systems.report.page.write import write_page

    status(f"making the page of {directory.path.name}")
    made = page_of(directory)
    write_page(made, directory.path / PAGE_FILE)
    return directory.path / PAGE_FILE, made
