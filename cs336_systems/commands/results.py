"""Writes and prints the results of sweeps, after a sweep and for `cs336 report`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_systems.commands.outcome import load_ceilings_or_warn, print_profile_paths
from cs336_systems.config import RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.sweep.keep import Listener
from cs336_systems.sweep.store import raw_profile_path
from cs336_systems.text import print_aside, print_line

if TYPE_CHECKING:
    from cs336_systems.report.page.chapters import Directory
    from cs336_systems.report.page.write import Page
    from cs336_systems.report.progress import StatusLine
    from cs336_systems.report.results import Results


def show_results(
    records: Sequence[RunRecord],
    directory: Path,
    output: Path,
    status: "StatusLine",
    *,
    prints_tables: bool = True,
) -> None:
    """Write tables, plots and page of the sweep in `directory` into `output`, and print the tables.

    Without `prints_tables`, only the answer of the page is printed. Profiled runs are only in the tables of profiles,
    which stay as they are if they would lose runs.
    """
    status("reading records and profiles")
    from cs336_systems.report.page.chapters import Directory
    from cs336_systems.report.results import Results
    from cs336_systems.report.terminal import print_sweep
    from cs336_systems.studies.ceilings_files import ceilings_beside, ceilings_files

    beside = [ceilings_beside(output), ceilings_beside(directory)]
    ceilings = load_ceilings_or_warn(next(filter(ceilings_files, beside), beside[0]))
    results = Results.load(records, directory, ceilings)
    written = replace(results, kernels=(), memory=()) if would_lose(results, directory, output) else results
    written.write(output, status)
    if records:
        page, made = write_page_of(Directory(path=output, sweep=written), status)
    status.end()
    if prints_tables:
        print_sweep(results.tables(), records, output)
    else:
        print_line(made.glance.answer if made.glance is not None else made.title)
        print_line(f"results: {output}")
    if records:
        print_line(f"page: {page}")
    print_profile_paths([record.config for record in records], directory / "runs")


def would_lose(results: "Results", directory: Path, output: Path) -> bool:
    """Whether tables in `output` would lose runs of this directory whose profiles cannot be explained any more.

    A warning says what becomes of such runs.
    """
    if all(raw_profile_path(config, directory / "runs").is_file() for config in results.without_profile):
        return False
    is_here = output.resolve() == directory.resolve()
    what = "the tables of profiles stay as they were" if is_here else "the tables are without these runs"
    print_aside(f"warning: {directory}: {results.lost}, and {what}; --fresh measures these runs again")
    return is_here


def write_page_of(directory: "Directory", status: "StatusLine") -> "tuple[Path, Page]":
    """Write the page of the results into their directory; return its path and what it shows."""
    from cs336_systems.report.page.chapters import PAGE_FILE, page_of
    from cs336_systems.report.page.write import write_page

    status(f"making the page of {directory.path.name}")
    made = page_of(directory)
    write_page(made, directory.path / PAGE_FILE)
    return directory.path / PAGE_FILE, made


def explain_or_warn(records: Sequence[RunRecord], runs: Path, say: Callable[[str], None], doing: str = "") -> bool:
    """Explain the raw profiles of `records` in `runs` that are not explained yet; return whether all could be.

    Before each, `say` is called with `doing`, or by default with the name of the run. A profile that cannot be
    explained is a warning on standard error.
    """
    from cs336_systems.sweep.run import explain_again

    return not explain_again(records, runs, _Lines(say, doing))


@dataclass(frozen=True, slots=True)
class _Lines(Listener):
    """Says which profile is being explained, and prints a warning for each that cannot be."""

    say: Callable[[str], None]
    doing: str

    def explaining(self, config: RunConfig) -> None:
        self.say(self.doing or f"explaining the profile of {config.label}")

    def explained(self, config: RunConfig, failure: str | None) -> None:
        if failure is not None:
            print_aside(f"warning: not explained: {config.label}: {failure}")
