"""What the studies share: how a cell ended, as values of its row, and how the results become files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cs336_systems.analysis.warnings import in_doubt
from cs336_systems.files import encode_json
from cs336_systems.record import Failure, Measurement, RunWarning, Status
from cs336_systems.report.entries import Values
from cs336_systems.report.numbers import ratio
from cs336_systems.report.plots.drawing import to_png
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.studies.records import CellStatus


def end_of(status: CellStatus, failure: Failure | None, warnings: Sequence[RunWarning] = ()) -> Values:
    """How a cell ended, in words too, and whether its time is in doubt."""
    no_kernel = status is CellStatus.UNAVAILABLE
    return {
        "status": status,
        "error": failure.message if failure else None,
        "ended": "no kernel" if no_kernel else STATUS_WORDS[Status(status)],
        "warnings": ";".join(warning.code for warning in warnings) or None,
        "is_doubted": in_doubt(warning.code for warning in warnings),
    }


def times_ms(measured: Measurement | None, prefix: str = "") -> Values:
    """Median, mean and standard deviation of the times in milliseconds; None where there are none."""
    times_s = (None,) * 3 if measured is None else (measured.median_s, measured.mean_s, measured.stdev_s)
    values = zip(("median", "mean", "std"), times_s, strict=True)
    return {f"{prefix}{name}_ms": ratio(time_s, 1e-3) for name, time_s in values}


def write_study(
    name: str, study: object, sections: Iterable[Section], pictures: Mapping[str, Figure | None], directory: Path
) -> list[Path]:
    """Write the record of the study, each section and plots/ into the directory, which is made; return the paths.

    `name` is that of the record's file. A picture that is None shows nothing: an earlier one of its name is removed.
    """
    files: dict[str, str | bytes] = {name: encode_json(study)}
    for section in sections:
        files |= texts_of(section)
    files |= {f"plots/{title}.png": b"" if figure is None else to_png(figure) for title, figure in pictures.items()}
    return write_files(files, directory)
