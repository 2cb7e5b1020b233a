"""Writes the tables and plots of all results directories below a directory again, from the records in them."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_systems.commands import ceilings, compare, ladder
from cs336_systems.commands.explaining import explain_or_warn
from cs336_systems.commands.outcome import FAILED, OK, PrintJson, UsageError, load_ceilings_or_warn
from cs336_systems.files import FileError, encode_json
from cs336_systems.record import load_records
from cs336_systems.report.sections.attention import write_attention
from cs336_systems.report.sections.fusion import write_fusion
from cs336_systems.report.sections.precision import write_precision
from cs336_systems.studies.attention_records import AttentionStudy
from cs336_systems.studies.ceilings_files import FILE_NAME as CEILINGS_FILE
from cs336_systems.studies.ceilings_files import ceilings_beside
from cs336_systems.studies.fusion_records import FusionStudy
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.studies.records import StudyT, read_study
from cs336_systems.sweep.store import SweepError
from cs336_systems.text import inert_line

if TYPE_CHECKING:
    from cs336_systems.report.status_line import StatusLine


def results_below(root: Path) -> list[Path]:
    """The results directories among `root` and the two levels of directories below it, as in OUTPUT/KIND/NAME."""
    found: list[Path] = []
    for directory in (root, *sorted(root.glob("*")), *sorted(root.glob("*/*"))):
        is_within = any(other in directory.parents for other in found)  # it has earlier runs that --fresh set aside
        if not is_within and any((directory / name).exists() for name in _KINDS):
            found.append(directory)
    return sorted(found)


def rebuild_all(root: Path, status: "StatusLine", print_json: PrintJson | None) -> int:
    """Rebuild every results directory below `root`, and say what was done with each; go on after one that fails."""
    from cs336_systems.report.terminal import print_line

    if not root.is_dir() or not (directories := results_below(root)):
        raise UsageError(f"{root}: no results in or below it; needed a sweep's directory, or one that holds several")
    problems, is_explained = {}, True
    for directory in directories:
        try:
            is_explained &= explain_or_warn(load_records(directory / RUNS)[0], directory / RUNS, status)
            source = rebuild(directory, status)
        except (FileError, UsageError, SweepError) as error:
            status.end()
            problems[directory] = str(error)
            print(inert_line(f"error: {directory} is left as it was: {error}"), file=sys.stderr)
        else:
            status.end()
            print_line(f"{directory}: written from {source}")
    print_line(f"rebuilt: {len(directories) - len(problems)} of {len(directories)} directories")
    if print_json is not None:
        rebuilt = [str(directory) for directory in directories if directory not in problems]
        print_json(encode_json({"rebuilt": rebuilt, "failed": {str(path): text for path, text in problems.items()}}))
    return OK if is_explained and not problems else FAILED


def rebuild(directory: Path, status: "StatusLine") -> str:
    """Write the tables and plots of one results directory again; return what they were made from."""
    source = next(name for name in _KINDS if (directory / name).exists())
    _KINDS[source](directory, status)
    return source


def _sweep(directory: Path, status: "StatusLine") -> None:
    """Rebuild a sweep, and the verdict of a comparison. Tables of profiles stay as they are if one is missing."""
    status("reading records and profiles")
    records, problems = load_records(directory / RUNS)
    if problems or not records:
        raise problems[0] if problems else UsageError(f"no records in {directory / RUNS}")
    from cs336_systems.report.results import Results

    results = Results.load(records, directory)
    if results.lost:
        kept = f"warning: {directory}: {results.lost}, and the tables of profiles stay as they were"
        print(inert_line(kept), file=sys.stderr)
        results = Results(records=records)
    results.write(directory, load_ceilings_or_warn(ceilings_beside(directory)), status)
    if (directory / compare.COMPARISON_FILE).is_file():
        compare.rebuild(directory)


def _study(
    file: str, kind: type[StudyT], write: Callable[[StudyT, Path], object]
) -> Callable[[Path, "StatusLine"], object]:
    """A function that rebuilds a study of this kind, which is kept in `file` and written by `write`."""

    def rebuild_study(directory: Path, status: "StatusLine") -> None:
        status("drawing and writing")
        write(read_study(directory / file, kind), directory)

    return rebuild_study


RUNS, ATTENTION, FUSION, PRECISION = "runs", "attention.json", "fusion.json", "precision.json"
_KINDS: Mapping[str, Callable[[Path, "StatusLine"], object]] = {
    ladder.LADDER_FILE: ladder.rebuild,
    CEILINGS_FILE: ceilings.rebuild,
    ATTENTION: _study(ATTENTION, AttentionStudy, write_attention),
    FUSION: _study(FUSION, FusionStudy, write_fusion),
    PRECISION: _study(PRECISION, PrecisionStudy, write_precision),
    RUNS: _sweep,
}
"""The function that rebuilds a directory, by the file or folder in it; of several, the first in this order decides."""
