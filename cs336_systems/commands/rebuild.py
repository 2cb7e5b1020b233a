"""Tables and plots of every results directory below another, written again from what was measured."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_systems.commands import ceilings, compare, ladder
from cs336_systems.commands.explaining import explain_or_warn
from cs336_systems.commands.outcome import FAILED, OK, PrintJson, UsageError, load_ceilings_or_warn
from cs336_systems.files import FileError, encode_json
from cs336_systems.record import load_records
from cs336_systems.studies.attention_records import AttentionStudy
from cs336_systems.studies.ceilings_files import FILE_NAME as CEILINGS_FILE
from cs336_systems.studies.ceilings_files import ceilings_beside
from cs336_systems.studies.fusion_records import FusionStudy
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.studies.records import read_study
from cs336_systems.sweep.store import SweepError
from cs336_systems.text import inert_line

if TYPE_CHECKING:
    from cs336_systems.report.status_line import StatusLine


def results_below(root: Path) -> list[Path]:
    """The results directories among `root`, what is in it and what is in that: OUTPUT/KIND/NAME is the deepest."""
    found: list[Path] = []
    for directory in (root, *sorted(root.glob("*")), *sorted(root.glob("*/*"))):
        is_within = any(other in directory.parents for other in found)  # earlier runs, set aside
        if not is_within and any((directory / name).exists() for name in _KINDS):
            found.append(directory)
    return sorted(found)


def rebuild_all(root: Path, status: "StatusLine", print_json: PrintJson | None) -> int:
    """Rebuild every results directory below `root`, and say what was done with each; one that fails stops no other."""
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
    """Write the tables and plots of one results directory again; return the name of what they were made from."""
    source = next(name for name in _KINDS if (directory / name).exists())
    _KINDS[source](directory, status)
    return source


def _sweep(directory: Path, status: "StatusLine") -> None:
    """A sweep, and the verdict where it is a comparison. Tables of profiles stay as they are where some are missing."""
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


def _ladder(directory: Path, status: "StatusLine") -> None:
    ladder.rebuild(directory, status)


def _attention(directory: Path, status: "StatusLine") -> None:
    status("drawing and writing")
    from cs336_systems.report.sections.attention import write_attention

    write_attention(read_study(directory / ATTENTION, AttentionStudy), directory)


def _fusion(directory: Path, status: "StatusLine") -> None:
    status("drawing and writing")
    from cs336_systems.report.sections.fusion import write_fusion

    write_fusion(read_study(directory / FUSION, FusionStudy), directory)


def _precision(directory: Path, status: "StatusLine") -> None:
    status("writing")
    from cs336_systems.report.sections.precision import write_precision

    write_precision(read_study(directory / PRECISION, PrecisionStudy), directory)


RUNS, ATTENTION, FUSION, PRECISION = "runs", "attention.json", "fusion.json", "precision.json"
_KINDS: Mapping[str, Callable[[Path, "StatusLine"], None]] = {
    ladder.LADDER_FILE: _ladder,
    CEILINGS_FILE: ceilings.rebuild,
    ATTENTION: _attention,
    FUSION: _fusion,
    PRECISION: _precision,
    RUNS: _sweep,
}
"""What writes the results of a directory again, by the file or folder that it has; the first that is there counts."""
