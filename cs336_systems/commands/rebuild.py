"""Reads all results directories below a directory, and writes their tables, plots and pages again from the records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_systems.commands import ceilings, ladder
from cs336_systems.commands.outcome import FAILED, OK, PrintJson, UsageError, checked, load_ceilings_or_warn
from cs336_systems.commands.results import PAGE_FILE, explain_or_warn, would_lose, write_collection_page
from cs336_systems.files import encode_json, in_one_line
from cs336_systems.record import RunRecord, load_records
from cs336_systems.report.compared import COMPARISON_FILE, load_compared
from cs336_systems.report.page.chapters import Collection
from cs336_systems.report.results import STUDIES, Results, Study, StudyResults
from cs336_systems.report.sections.forecast import write_forecast
from cs336_systems.report.sections.ladder import write_ladder_report
from cs336_systems.studies.ceilings_files import FILE_NAME as CEILINGS_FILE
from cs336_systems.studies.ceilings_files import Ceilings, ceilings_beside
from cs336_systems.studies.records import read_study
from cs336_systems.text import print_aside, print_line

if TYPE_CHECKING:
    from cs336_systems.report.progress import StatusLine

PUBLISHED = "published"
"""The folder of a results directory whose contents are under version control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A results directory below the root of a collection."""

    directory: Path
    root: Path
    ceilings_at: Callable[[Path], Ceilings]

    @property
    def path(self) -> Path:
        """The directory, relative to the root."""
        return self.directory.relative_to(self.root)

    @property
    def beside(self) -> Ceilings:
        """The ceilings that were measured beside the results."""
        return self.ceilings_at(ceilings_beside(self.directory))


def _study(place: _Place, subject: str) -> Collection:
    study: Study = read_study(place.directory / f"{subject}.json", STUDIES[subject])
    return Collection(root=place.root, studies={place.path: StudyResults(study)})


def results_below(root: Path) -> list[Path]:
    """The results directories among `root` and the three levels below it, as in ROOT/OUTPUT/KIND/NAME.

    Results in `root`/published belong to the repository and not to the user: only a root in that folder finds them.
    """
    found: list[Path] = []
    below = (path for depth in ("*", "*/*", "*/*/*") for path in sorted(root.glob(depth)))
    for directory in (root, *(path for path in below if path.relative_to(root).parts[0] != PUBLISHED)):
        is_within = any(other in directory.parents for other in found)  # such as earlier runs that --fresh set aside
        if not is_within and any((directory / name).exists() for name in _KINDS):
            found.append(directory)
    return sorted(found)


def load(directory: Path, root: Path, ceilings_at: Callable[[Path], Ceilings] = load_ceilings_or_warn) -> Collection:
    """The results of one directory below `root`; raise where they cannot be read."""
    return _KINDS[_source(directory)](_Place(directory=directory, root=root, ceilings_at=ceilings_at))


def _unreadable(directory: Path, root: Path, why: str) -> Collection:
    why = why.replace(f"{root}/", "")  # pages must not contain absolute paths of this machine
    return Collection(root=root, unreadable={directory.relative_to(root): why})


def rebuild_all(root: Path, status: "StatusLine", print_json: PrintJson | None) -> int:
    """Rebuild every results directory below `root`, and report what was done with each; continue after a failure.

    The page of the root has all results that could be read. A directory below it gets a page only if it had one.
    """
    if not root.is_dir() or not (directories := results_below(root)):
        raise UsageError(f"{root}: no results in or below it; needed a sweep's directory, or one that holds several")
    problems: dict[Path, str] = {}
    found, is_explained, ceilings_at = [], True, cache(load_ceilings_or_warn)
    for number, directory in enumerate(directories):
        try:
            is_explained &= explain_or_warn(load_records(directory / RUNS)[0], directory / RUNS, status)
            status(f"reading {directory}", number, len(directories))
            own = load(directory, root, ceilings_at)
            write(own, status)
            if directory != root and (directory / PAGE_FILE).is_file():
                write_collection_page(own.at(directory), status)
        except Exception as error:  # whatever its files hold, the others are written
            status.end()
            problems[directory] = why = in_one_line(error)
            found.append(_unreadable(directory, root, why))
            print_aside(f"error: {directory} is left as it was: {why}")
        else:
            status.end()
            found.append(own)
            print_line(f"{directory}: written from {_source(directory)}")
    _score_forecast(Collection.together(root, found), status)
    num_rebuilt = len(directories) - len(problems)
    print_line(f"rebuilt: {num_rebuilt} of {len(directories)} directories")
    page = write_collection_page(Collection.together(root, found), status) if num_rebuilt else None
    status.end()
    if print_json is not None:
        rebuilt = [str(directory) for directory in directories if directory not in problems]
        failed = {str(path): text for path, text in problems.items()}
        print_json(encode_json({"rebuilt": rebuilt, "failed": failed, "page": page and str(page)}))
    if page is not None:
        print_line(f"page: {page}")
    return OK if is_explained and not problems else FAILED


def write(found: Collection, status: "StatusLine") -> None:
    """Write the tables and plots of all results of a collection into their directories."""
    for path, results in found.sweeps.items():
        directory = found.root / path
        written = replace(results, kernels=(), memory=()) if would_lose(results, directory, directory) else results
        written.write(directory, status)
    if not found.sweeps:
        status("drawing and writing")
    for path, compared in found.comparisons.items():
        compared.write(found.root / path)
    for path, climbed in found.ladders.items():
        write_ladder_report(climbed.rows, found.root / path)
    for path, study in found.studies.items():
        study.write(found.root / path)


def _score_forecast(found: Collection, status: "StatusLine") -> None:
    """Write the errors of the step times predicted from ceilings, over all measured steps, if there are ceilings."""
    status("predicting the times of all steps")
    sweeps = {path: results.published for path, results in found.measured.items()}
    written = write_forecast(sweeps, found.ceilings_of, found.root)
    status.end()
    if written is not None:
        print_line(f"{written}: written from all records and ceilings")


def is_study(directory: Path) -> bool:
    """Whether the directory has the results of something else than a sweep, such as a ladder, whose runs it has too."""
    return any((directory / name).exists() for name in _KINDS) and _source(directory) != RUNS


def _source(directory: Path) -> str:
    return next(name for name in _KINDS if (directory / name).exists())


def _sweep(place: _Place) -> Collection:
    directory, path = place.directory, place.path
    records, problems = load_records(directory / RUNS)
    if problems or not records:
        raise problems[0] if problems else UsageError(f"no records in {directory / RUNS}")
    is_compared = (directory / COMPARISON_FILE).is_file()
    return Collection(
        root=place.root,
        sweeps={path: Results.load(records, directory, place.beside)},
        comparisons=_comparison(place, records).comparisons if is_compared else {},
    )


def _comparison(place: _Place, records: Sequence[RunRecord] | None = None) -> Collection:
    compared = checked(partial(load_compared, place.directory, records))
    return Collection(root=place.root, comparisons={place.path: compared})


def _ladder(place: _Place) -> Collection:
    climbed, path = ladder.load(place.directory, place.beside), place.path
    return Collection(root=place.root, ladders={path: climbed})


def _of_ceilings(place: _Place) -> Collection:
    return Collection(root=place.root, studies={place.path: StudyResults(*ceilings.load(place.directory))})


RUNS = "runs"
_KINDS: Mapping[str, Callable[[_Place], Collection]] = {
    ladder.LADDER_FILE: _ladder,
    CEILINGS_FILE: _of_ceilings,
    **{f"{subject}.json": partial(_study, subject=subject) for subject in STUDIES if subject != "ceilings"},
    RUNS: _sweep,
    COMPARISON_FILE: _comparison,
}
"""The function that reads a directory, by a file or folder that it contains; the first match in this order decides."""
