"""Reads all results directories below a directory, and writes their tables, plots and pages again
from the records.

It also writes the errors of the predicted times of steps, by what limits the steps, by device and
by settings. A forecast whose matmuls were measured for these very shapes is mostly a look-up. So
each such step is predicted once more, as if none of its matmuls had been measured: that is what a
forecast of another configuration is worth.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from pathlib import Path

from ..config import Phase, Profiler, RunConfig
from ..costs.curves import Curves
from ..costs.ranks_time import predicted_time
from ..costs.time import Limit, TimePrediction, measured_share, without_own_products
from ..files import in_one_line
from ..record import RunRecord, Status, WarningCode, load_records
from ..report.columns import Row, columns_of
from ..report.compared import COMPARISON_FILE, load_compared
from ..report.formats import texts_of, write_files
from ..report.identity import settings_of
from ..report.page.chapters import PAGE_FILE, Directory, Page, list_of, write_page, write_page_of
from ..report.progress import StatusLine
from ..report.results import STUDIES, Results, Study, StudyResults
from ..report.section import Section, Table, make_table
from ..report.sections.ladder import write_ladder_report
from ..studies.ceilings_files import Ceilings, ceilings_beside, load_ceilings_or_warn
from ..studies.records import read_study
from ..sweep.run import explain_again
from ..text import counted, print_aside, print_line
from . import ladder
from .outcome import FAILED, OK, UsageError, checked
from .sweep import write_results

FOLDER = "forecast"
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
ERROR_KEYS = (
    "scored",
    "num_scored",
    "median_error",
    "error_of_nine",
    "largest_error",
    "median_bias",
)
SETTINGS = (
    "size",
    "context_length",
    "batch_size",
    "mode",
    "precision",
    "attention",
    "optimizer",
    "cuda_graph",
    "checkpoint_blocks",
)
GROUPS = (
    "device_name",
    "size",
    "context_length",
    "precision",
    "mode",
    "attention",
    "checkpoint_blocks",
    "fast",
)
"""Columns by whose values the errors are also given: the device, and settings."""


class Shapes(StrEnum):
    """Whether most of the time of a step's matmuls is that of matmuls measured for these shapes."""

    MEASURED = "measured"
    UNMEASURED = "unmeasured"


OF_SHAPES = {
    Shapes.UNMEASURED: "matmuls of shapes that were not measured",
    Shapes.MEASURED: "measured matmuls",
}
AS_IF = (
    "Each step is predicted as if none of its own matmuls had been measured: that is what a "
    "forecast of another configuration is worth."
)
OF_LIMIT = {Limit.DEVICE: "limited by the device", Limit.LAUNCHES: "limited by launches"}


def scored(
    sweeps: Mapping[Path, Sequence[RunRecord]], ceilings_of: Callable[[Path], Ceilings]
) -> tuple[list[Row], int]:
    """A row for each measured configuration of a sweep whose time is predicted, and the number of
    the others.

    A step that the device limits and whose matmuls were measured has a second row, predicted
    without them; its `shapes` are UNMEASURED. Several processes of one configuration count as one,
    with the median of their medians. Times are in ms, errors in percent of what was measured.
    """
    rows: list[Row] = []
    others = 0
    for directory, records in sorted(sweeps.items()):
        alike: dict[RunConfig, list[RunRecord]] = {}
        for record in records:
            config = record.config
            if config is None or config.profiler is not Profiler.NONE:
                continue
            if record.status is Status.OK:
                alike.setdefault(config.configuration, []).append(record)
        for config, own in alike.items():
            curves = ceilings_of(directory).curves(own[0].device_name or "")
            if curves is None or (found := predicted_time(config, curves)) is None:
                others += 1
            else:
                rows += _rows(directory, config, own, found, curves)
    return rows, others


def _rows(
    directory: Path,
    config: RunConfig,
    records: Sequence[RunRecord],
    found: TimePrediction,
    curves: Curves,
) -> Iterator[Row]:
    is_measured = measured_share(config, curves) > 1 / 2
    row = _row(directory, config, records, found)
    yield row | {"shapes": Shapes.MEASURED if is_measured else Shapes.UNMEASURED}
    others = without_own_products(config, curves)
    if (
        is_measured
        and row["limit"] is Limit.DEVICE
        and (again := predicted_time(config, others)) is not None
    ):
        yield _row(directory, config, records, again) | {"shapes": Shapes.UNMEASURED}


def _row(
    directory: Path, config: RunConfig, records: Sequence[RunRecord], found: TimePrediction
) -> Row:
    codes = {warning.code for record in records for warning in record.warnings}
    limit = Limit.LAUNCHES if WarningCode.LAUNCH_BOUND in codes else Limit.DEVICE
    row: Row = {
        "directory": directory.as_posix(),
        "key": config.key,
        "device_name": records[0].device_name,
    }
    settings = settings_of(config)
    row |= {key: settings[key] for key in SETTINGS} | {"fast": config.fused_blocks}
    for phase in (*PHASES, Phase.STEP):
        predicted_s = found.step_s if phase is Phase.STEP else found.phases_s.get(phase)
        measured = [
            each.median_s for record in records if (each := record.measurement(phase)) is not None
        ]
        measured_s = statistics.median(measured) if measured and predicted_s is not None else None
        row[f"{phase}_ms"] = None if measured_s is None else 1e3 * measured_s
        row[f"predicted_{phase}_ms"] = None if predicted_s is None else 1e3 * predicted_s
        row[f"{phase}_error"] = (
            None if not measured_s or predicted_s is None else 100 * (predicted_s / measured_s - 1)
        )
    limit_of = attrgetter(
        "limit" if any(record.host_phases for record in records) else "limit_of_whole"
    )
    row |= {
        "limit": limit,
        "predicted_limit": limit_of(found),
        "predicted_busy_share": found.busy_share,
    }
    return row | {"warnings": ";".join(sorted(codes))}


def forecast_section(rows: Sequence[Row], others: int) -> Section:
    """A table of errors for each limit; the values are those of each configuration."""
    by_device = [row for row in rows if row["limit"] is Limit.DEVICE]
    first = list({(row["directory"], row["key"]): row for row in reversed(rows)}.values())[::-1]
    tables = [
        *(
            _table(
                f"{OF_LIMIT[Limit.DEVICE]}, {words}",
                own,
                *([AS_IF] if shapes is Shapes.UNMEASURED else []),
            )
            for shapes, words in OF_SHAPES.items()
            if (own := [row for row in by_device if row["shapes"] is shapes])
        ),
        _table(OF_LIMIT[Limit.LAUNCHES], [row for row in first if row["limit"] is Limit.LAUNCHES]),
    ]
    note = (
        f"Not predicted: {counted(others, 'configuration')}. Missing are compiled models but for "
        "the whole of --fast, such steps on several ranks, and devices without ceilings."
    )
    last = replace(tables[-1], notes=(*tables[-1].notes, *([note] if others else ())))
    return Section(name="errors", tables=(*tables[:-1], last), rows=rows)


def _table(which: str, rows: Sequence[Row], *notes: str) -> Table:
    return make_table(
        f"Predicted times of steps {which}",
        columns_of(*ERROR_KEYS, "named_right"),
        [_summary(name, some) for name, some in _groups(rows) if some],
        [
            *notes,
            "A step is limited by launches if its record says so. The forecast knows the "
            "configuration and the ceilings.",
        ],
    )


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    yield "all", [*rows]
    unstable = {WarningCode.UNSTABLE, WarningCode.DRIFT}
    yield (
        "without unstable ones",
        [row for row in rows if unstable.isdisjoint(row["warnings"].split(";"))],
    )
    for key in GROUPS:
        values = list(dict.fromkeys(row[key] for row in rows))
        for value in values if len(values) > 1 else ():
            words = key.removesuffix("_name").replace("_", " ")
            yield f"{words} {value}", [row for row in rows if row[key] == value]


def _summary(name: str, rows: Sequence[Row]) -> Row:
    errors = [row["step_error"] for row in rows]
    sizes = sorted(map(abs, errors))
    return {
        "scored": name,
        "num_scored": len(rows),
        "median_error": statistics.median(sizes),
        "error_of_nine": sizes[math.ceil(0.9 * len(sizes)) - 1],
        "largest_error": sizes[-1],
        "median_bias": statistics.median(errors),
        "named_right": 100
        * sum(row["limit"] is row["predicted_limit"] for row in rows)
        / len(rows),
    }


PUBLISHED = "published"
"""The folder of a results directory whose contents are under version control."""


def results_below(root: Path) -> list[Path]:
    """The results directories among `root` and the three levels below it, as in
    ROOT/OUTPUT/KIND/NAME.

    Results in `root`/published belong to the repository and not to the user: only a root in that
    folder finds them.
    """
    found: set[Path] = set()
    below = (path for depth in ("*", "*/*", "*/*/*") for path in sorted(root.glob(depth)))
    for directory in (
        root,
        *(path for path in below if path.relative_to(root).parts[0] != PUBLISHED),
    ):
        # such as earlier runs that --fresh set aside
        is_within = not found.isdisjoint(directory.parents)
        kept = {name for name in _KINDS if (directory / name).exists()}
        if kept == {RUNS} and not any((directory / RUNS).glob("*.json")):
            continue  # a sweep that was interrupted before its first record
        if kept and not is_within:
            found.add(directory)
    return sorted(found)


def load(
    directory: Path, ceilings_at: Callable[[Path], Ceilings] = load_ceilings_or_warn
) -> Directory:
    """The results of one directory; raise where they cannot be read."""
    return _KINDS[_source(directory)](directory, ceilings_at)


def rebuild_all(root: Path, status: StatusLine) -> int:
    """Rebuild every results directory below `root` with its page, and report what was done;
    continue after a failure.

    The page of the root lists all others.
    """
    if not root.is_dir() or not (directories := results_below(root)):
        raise UsageError(
            f"{root}: no results in or below it; needed a sweep's directory, or one that holds "
            "several"
        )
    problems: dict[Path, str] = {}
    found: list[Directory] = []
    pages: dict[Path, tuple[str, Page]] = {}
    is_explained, ceilings_at = True, cache(load_ceilings_or_warn)
    for number, directory in enumerate(directories):
        try:
            is_explained &= not explain_again(
                load_records(directory / RUNS)[0], directory / RUNS, status
            )
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
        score_forecast(found, root, status)
        print_line(f"rebuilt: {len(found)} of {len(directories)} directories")
        status("writing the list of all pages")
        # pages must not contain absolute paths of this machine
        lost = {
            path.relative_to(root): text.replace(f"{root}/", "") for path, text in problems.items()
        }
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


def score_forecast(found: Sequence[Directory], root: Path, status: StatusLine) -> None:
    """Write the errors of the step times predicted from ceilings, over all measured steps, if
    there are ceilings.
    """
    status("predicting the times of all steps")
    measured = {own.path.relative_to(root): own.results for own in found if own.results is not None}
    sweeps = {path: results.published for path, results in measured.items()}
    rows, others = scored(sweeps, lambda path: measured[path].ceilings)
    status.end()
    if rows:
        write_files(texts_of(forecast_section(rows, others)), root / FOLDER)
        print_line(f"{root / FOLDER}: written from all records and ceilings")


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
    ladder.LADDER_FILE: lambda path, at: Directory(
        path=path, climbed=ladder.load(path, at(ceilings_beside(path)))
    ),
    **{f"{subject}.json": partial(_study, subject=subject) for subject in STUDIES},
    RUNS: _sweep,
}
"""The function that reads a directory, by a file or folder that it contains; the first match in
this order decides.
"""
