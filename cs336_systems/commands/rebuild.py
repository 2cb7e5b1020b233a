"""Reads all results directories below a directory, and writes their tables, plots and pages again from the records."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from cs336_systems.commands import ladder
from cs336_systems.commands.outcome import FAILED, OK, UsageError, checked, load_ceilings_or_warn
from cs336_systems.commands.sweep import write_results
from cs336_systems.files import in_one_line
from cs336_systems.record import load_records
from cs336_systems.report.compared import COMPARISON_FILE, load_compared
from cs336_systems.report.page.chapters import PAGE_FILE, Directory, Page, list_of, write_page, write_page_of
from cs336_systems.report.progress import StatusLine
from cs336_systems.report.results import STUDIES, Results, Study, StudyResults
from cs336_systems.report.sections.forecast import write_forecast
from cs336_systems.report.sections.ladder import write_ladder_report
from cs336_systems.studies.ceilings_files import Ceilings, ceilings_beside
from cs336_systems.studies.records import read_study
from cs336_systems.sweep.run import explain_again
from cs336_systems.text import print_aside, print_line

PUBLISHED = "published"
"""The folder of a results directory whose contents are under version control."""


def results_below(root: Path) -> list[Path]:
    """The results directories among `root` and the three levels below it, as in ROOT/OUTPUT/KIND/NAME.

    Results in `root`/published belong to the repository and not to the user: only a root in that folder finds them.
    """
    found: set[Path] = set()
    below = (path for depth in ("*", "*/*", "*/*/*") for path in sorted(root.glob(depth)))
    for directory in (root, *(path for path in below if path.relative_to(root).parts[0] != PUBLISHED)):
        is_within = not found.isdisjoint(directory.parents)  # such as earlier runs that --fresh set aside
        kept = {name for name in _KINDS if (directory / name).exists()}
        if kept == {RUNS} and not any((directory / RUNS).glob("*.json")):
            continue  # a sweep that was interrupted before its first record
        if kept and not is_within:
            found.add(directory)
    return sorted(found)


def load(directory: Path, ceilings_at: Callable[[Path], Ceilings] = load_ceilings_or_warn) -> Directory:
    """The results of one directory; raise where they cannot be read."""
    return _KINDS[_source(directory)](directory, ceilings_at)


def rebuild_all(root: Path, status: StatusLine) -> int:
    """Rebuild every results directory below `root` with its page, and report what was done; continue after a failure.

    The page of the root lists all others.
    """
    if not root.is_dir() or not (directories := results_below(root)):
        raise UsageError(f"{root}: no results in or below it; needed a sweep's directory, or one that holds several")
    problems: dict[Path, str] = {}
    found: list[Directory] = []
    pages: dict[Path, tuple[str, Page]] = {}
    is_explained, ceilings_at = True, cache(load_ceilings_or_warn)
    for number, directory in enumerate(directories):
        try:
            is_explained &= not explain_again(load_records(directory / RUNS)[0], directory / RUNS, status)
            status(f"reading {directory}", number, len(directories))
            own = load(directory, ceilings_at)
            write(own, status)
            page, made = write_page_of(own, status)
        except Exception as error:  # whatever its files hold, the others are written
            status.end()
            problems[directory] = why = in_one_line(error)
            print_aside(f"error: {directory} is left as it was: {why}")
        else:
            status.end()
            found.append(own)
            pages[directory.relative_to(root)] = own.subject, made
            print_line(f"{directory}: written from {_source(directory)}")
    if found and directories == [root]:
        print_line(made.glance.answer if made.glance is not None else made.title)
    elif found:
        _score_forecast(found, root, status)
        print_line(f"rebuilt: {len(found)} of {len(directories)} directories")
        status("writing the list of all pages")
        # pages must not contain absolute paths of this machine
        lost = {path.relative_to(root): text.replace(f"{root}/", "") for path, text in problems.items()}
        page = root / PAGE_FILE
        write_page(list_of(root, pages, lost), page)
    status.end()
    if found:
        print_line(f"page: {page}")
    return OK if is_explained and not problems else FAILED


def write(found: Directory, status: StatusLine) -> None:
    """Write the tables and plots of the results into their directory."""
    if found.sweep is not None:
        write_results(found.sweep, found.path, status)
    else:
        status("drawing and writing")
    if found.compared is not None:
        found.compared.write(found.path)
    if found.climbed is not None:
        write_ladder_report(found.climbed.rows, found.path)
    if found.study is not None:
        found.study.write(found.path)


def _score_forecast(found: Sequence[Directory], root: Path, status: StatusLine) -> None:
    """Write the errors of the step times predicted from ceilings, over all measured steps, if there are ceilings."""
    status("predicting the times of all steps")
    measured = {own.path.relative_to(root): own.results for own in found if own.results is not None}
    sweeps = {path: results.published for path, results in measured.items()}
    written = write_forecast(sweeps, lambda path: measured[path].ceilings, root)
    status.end()
    if written is not None:
        print_line(f"{written}: written from all records and ceilings")


def _source(directory: Path) -> str:
    return next(name for name in _KINDS if (directory / name).exists())


def _sweep(directory: Path, ceilings_at: Callable[[Path], Ceilings]) -> Directory:
    records, problems = load_records(directory / RUNS)
    if problems or not records:
        raise problems[0] if problems else UsageError(f"no records in {directory / RUNS}")
    sweep = Results.load(records, directory, ceilings_at(ceilings_beside(directory)))
    is_compared = (directory / COMPARISON_FILE).is_file()
    compared = checked(partial(load_compared, directory, records)) if is_compared else None
    return Directory(path=directory, sweep=sweep, compared=compared)


def _study(directory: Path, _: object, subject: str) -> Directory:
    study: Study = read_study(directory / f"{subject}.json", STUDIES[subject])
    return Directory(path=directory, study=StudyResults(study))


RUNS = "runs"
_KINDS: Mapping[str, Callable[[Path, Callable[[Path], Ceilings]], Directory]] = {
    ladder.LADDER_FILE: lambda path, at: Directory(path=path, climbed=ladder.load(path, at(ceilings_beside(path)))),
    **{f"{subject}.json": partial(_study, subject=subject) for subject in STUDIES},
    RUNS: _sweep,
}
"""The function that reads a directory, by a file or folder that it contains; the first match in this order decides."""
