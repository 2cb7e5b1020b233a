"""Reads all results directories below a directory, and writes their tables, plots and pages again
from the records, and how far predicted times of steps were off. The file of another program gets a
directory and a page of its own.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from ..analysis.columns import ProfileError
from ..analysis.kernels.classes import KernelRules
from ..analysis.kernels.step_profile import read_profile
from ..analysis.memory.profile import read_memory_profile
from ..files import KERNEL_PROFILE, in_one_line, refuse_another_kind
from ..record import RUNS, load_records, published_runs
from ..report.compared import COMPARISON_FILE, load_compared
from ..report.formats import texts_of, write_files
from ..report.page.blocks import Page
from ..report.page.chapters import list_of, write_page_of
from ..report.page.directory import Directory
from ..report.page.html import PAGE_FILE, write_page
from ..report.progress import StatusLine
from ..report.results import STUDIES, Results, Study, StudyResults
from ..report.sections.forecast import forecast_section, scored
from ..report.sections.kernels.entry import Explained
from ..report.sections.kernels.files import PROFILE_FILE, TOP_ON_A_PAGE
from ..report.sections.ladder import write_ladder_report
from ..report.sections.memory.entry import MemoryEntry
from ..report.sections.memory.tables import MEMORY_FILE
from ..studies.ceilings_files import Ceilings, ceilings_beside, load_ceilings_or_warn
from ..studies.records import read_study
from ..sweep.run import explain_again
from ..text import print_aside, print_line
from . import ladder
from .explain import arguments_for
from .file_page import ENDINGS, made_directory
from .measuring import write_results
from .outcome import FAILED, OK, UsageError, checked

FORECAST_FOLDER = "forecast"
PUBLISHED = "published"
"""The folder of a results directory whose contents are under version control."""


def results_below(root: Path) -> list[Path]:
    """The results directories among `root` and the three levels below it, as in
    ROOT/OUTPUT/KIND/NAME.

    Results in `root`/published belong to the repository and not to the user: only a root in that
    folder finds them.
    """
    directories: list[Path] = []
    candidates = [root]
    for pattern in ("*", "*/*", "*/*/*"):
        below = sorted(root.glob(pattern))
        candidates += [path for path in below if path.relative_to(root).parts[0] != PUBLISHED]
    for directory in candidates:
        sources = {name for name in _READERS if (directory / name).exists()}
        if sources == {RUNS} and not any((directory / RUNS).glob("*.json")):
            continue  # a sweep that was interrupted before its first record
        # results within results are such as earlier runs that --fresh set aside
        if sources and directory not in directories and not {*directory.parents} & {*directories}:
            directories.append(directory)
    return sorted(directories)


def load(
    directory: Path, ceilings_at: Callable[[Path], Ceilings] = load_ceilings_or_warn
) -> Directory:
    """The results of one directory; raise where they cannot be read."""
    return _READERS[_source(directory)](directory, ceilings_at)


def rebuild_all(
    root: Path, status: StatusLine, formats: Collection[str], rules: KernelRules | None
) -> int:
    """Rebuild every results directory below `root` with its page, tables also in `formats`, and
    report what was done; continue after a failure. By `rules`, if any, traces that are still there
    are explained again.

    The page of the root lists all others.
    """
    paths = results_below(root) if root.is_dir() else []
    if not paths:
        raise UsageError(
            f"{root}: no results in or below it; needed a sweep's directory, one that holds "
            "several, or the file of a profiler"
        )
    problems: dict[Path, str] = {}
    rebuilt: list[Directory] = []
    pages: dict[Path, Page] = {}
    is_explained = True
    ceilings_at = cache(load_ceilings_or_warn)
    for number, path in enumerate(paths):
        try:
            runs = path / RUNS
            is_explained &= not explain_again(load_records(runs)[0], runs, status, rules=rules)
            status(f"reading {path}", number, len(paths))
            directory = load(path, ceilings_at)
            write(directory, status, formats)
            page, made = write_page_of(directory, status)
        except Exception as error:  # whatever its files hold, the others are written
            status.end()
            problems[path] = why = in_one_line(error)
            print_aside(f"error: {path} is not rebuilt: {why}")
        else:
            status.end()
            rebuilt.append(directory)
            pages[path.relative_to(root)] = made
            print_line(f"{path}: written from {_source(path)}")
    if not rebuilt:
        status.end()
        return FAILED
    if paths == [root]:
        print_line(made.title if made.glance is None else made.glance.answer)
    else:
        score_forecast(rebuilt, root, status, formats)
        print_line(f"rebuilt: {len(rebuilt)} of {len(paths)} directories")
        page = _write_list(root, pages, problems, status)
    status.end()
    print_line(f"page: {page}")
    return OK if is_explained and not problems else FAILED


def _write_list(
    root: Path, pages: Mapping[Path, Page], problems: Mapping[Path, str], status: StatusLine
) -> Path:
    """Write the page of the root, which lists all others and the directories with problems; return
    its path.
    """
    status("writing the list of all pages")
    # pages must not contain absolute paths of this machine
    before = f"{root}{os.sep}"
    lost = {path.relative_to(root): why.replace(before, "") for path, why in problems.items()}
    page = root / PAGE_FILE
    write_page(list_of(root, pages, lost), page)
    return page


def is_foreign(path: Path) -> bool:
    """Whether the path is a file, or a directory that holds files of profilers and no results."""
    if not path.is_dir():
        return path.exists()
    has_traces = any(beside.name.endswith(ENDINGS) for beside in path.iterdir() if beside.is_file())
    return has_traces and not results_below(path)


def report_file(
    path: Path, status: StatusLine, formats: Collection[str] = (), rules: Path | None = None
) -> Path:
    """Explain the file of any program, write its tables, and make its page; return the path of the
    page.
    """
    explanation = arguments_for(path, rules).explained()
    directory = made_directory(path)
    explanation.write(directory, TOP_ON_A_PAGE, formats)
    page, made = write_page_of(load(directory), status)
    status.end()
    if made.glance is not None:
        print_line(made.glance.answer)
    print_line(f"page: {page}")
    return page


def write(directory: Directory, status: StatusLine, formats: Collection[str] = ()) -> None:
    """Write the tables and plots of the results into their directory."""
    path = directory.path
    if directory.results is not None and not directory.rungs:
        write_results(directory.results, path, status, formats)
    else:
        status("drawing and writing")
    if directory.compared is not None:
        directory.compared.write(path, formats)
    if directory.rungs:
        write_ladder_report(directory.rungs, path, formats)
    if directory.study is not None:
        directory.study.write(path, formats)


def score_forecast(
    directories: Sequence[Directory], root: Path, status: StatusLine, formats: Collection[str] = ()
) -> None:
    """Write the errors of the step times predicted from ceilings, over all measured steps, if
    there are ceilings.
    """
    status("predicting the times of all steps")
    sweeps = {
        directory.path.relative_to(root): directory.results.configurations
        for directory in directories
        if directory.results is not None
    }
    rows, others = scored(sweeps)
    status.end()
    if rows:
        write_files(texts_of(forecast_section(rows, others)), root / FORECAST_FOLDER, formats)
        print_line(f"{root / FORECAST_FOLDER}: written from all records and ceilings")


def _source(directory: Path) -> str:
    """The file or folder in a results directory that tells what kind of results these are; there
    must be one.
    """
    return next(name for name in _READERS if (directory / name).exists())


def _sweep(directory: Path, ceilings_at: Callable[[Path], Ceilings]) -> Directory:
    """The records of a sweep, compared if `cs336 compare` measured them."""
    records, problems = load_records(directory / RUNS)
    if problems or not records:
        raise next(iter(problems), UsageError(f"no records in {directory / RUNS}"))
    results = Results.load(records, directory, ceilings_at(ceilings_beside(directory)))
    is_compared = (directory / COMPARISON_FILE).is_file()
    compared = checked(load_compared, directory, records) if is_compared else None
    return Directory(path=directory, results=results, compared=compared)


def _study(directory: Path, _: object, subject: str) -> Directory:
    """The results of a study of this subject, read from its directory."""
    study: Study = read_study(directory / f"{subject}.json", STUDIES[subject])
    return Directory(path=directory, study=StudyResults(study))


def _file(directory: Path, _: object) -> Directory:
    """The kept explanation of a single file, from `cs336 kernels` or `cs336 memory`."""
    memory, kernels = directory / MEMORY_FILE, directory / PROFILE_FILE
    if memory.exists():
        results = Results(records=(), memory=[MemoryEntry(profile=read_memory_profile(memory))])
        return Directory(path=directory, results=results)
    profile = read_profile(kernels)
    if profile is None:
        refuse_another_kind(kernels, kernels.read_bytes(), KERNEL_PROFILE, ProfileError)
        raise ProfileError(kernels, "not a step profile; explain the trace again")
    return Directory(
        path=directory, results=Results(records=(), kernels=[Explained(profile=profile)])
    )


_READERS: Mapping[str, Callable[[Path, Callable[[Path], Ceilings]], Directory]] = {
    ladder.LADDER_FILE: lambda path, at: ladder.load_results(path, at(ceilings_beside(path))),
    **{f"{subject}.json": partial(_study, subject=subject) for subject in STUDIES},
    RUNS: _sweep,
    published_runs(Path(RUNS)).name: _sweep,
    PROFILE_FILE: _file,
    MEMORY_FILE: _file,
}
"""The function that reads a directory, by a file or folder that it contains; the first match in
this order decides.
"""
