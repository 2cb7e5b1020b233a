"""What the studies share: values of a row, what puts its times in doubt, pivoted tables, and the writer of files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_systems.analysis.statistics import quotient_stdev
from cs336_systems.analysis.warnings import Repeated, in_doubt
from cs336_systems.costs.hardware import find_device
from cs336_systems.files import encode_json
from cs336_systems.record import Failure, Measurement, RunWarning, Status
from cs336_systems.report.columns import Column
from cs336_systems.report.entries import Values
from cs336_systems.report.numbers import DOUBT
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.words import STATUS_WORDS, warning_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def end_of(status: Status, failure: Failure | None) -> Values:
    """How a cell ended; in words where it has no time."""
    ended = "" if status is Status.OK else STATUS_WORDS[status]
    return {"status": status, "error": failure.message if failure else None, "ended": ended}


def doubts_of(warnings: Sequence[RunWarning], prefix: str = "") -> Values:
    """What puts a time in doubt, and whether anything does."""
    codes = [warning.code for warning in warnings]
    return {f"{prefix}warnings": ";".join(codes) or None, f"{prefix}is_doubted": in_doubt(codes)}


def times_ms(measured: Measurement | None, warnings: Sequence[RunWarning], prefix: str = "") -> Values:
    """Statistics of the times in milliseconds, None where there are none; what puts them in doubt."""
    times_s = (None,) * 3 if measured is None else (measured.median_s, measured.mean_s, measured.stdev_s)
    values = zip(("median", "mean", "std"), times_s, strict=True)
    return {
        **{f"{prefix}{name}_ms": None if time_s is None else time_s * 1e3 for name, time_s in values},
        f"{prefix}cv": None if measured is None else measured.cv,
        **doubts_of(warnings, prefix),
    }


def derived(key: str, value: float | None, *times: Values, prefix: str = "") -> Values:
    """What was computed from the times of these rows, for a `derived` column: value, deviation, whether in doubt."""
    std = None if value is None else quotient_stdev(value, *(row[f"{prefix}cv"] for row in times))
    return {key: value, f"{key}_std": std, f"{key}_is_doubted": any(row[f"{prefix}is_doubted"] for row in times)}


def doubt_notes(codes: Sequence[str | None], rows: str, repeated: Repeated) -> Iterator[str]:
    """How many of the rows, or what they are called here, carry each warning, and what to do; nothing without any."""
    if said := warning_counts(codes, rows):
        yield (
            f"{DOUBT} marks a time in doubt, and what is computed from it, with its deviation: {said}. "
            f"Close other programs, or use {repeated.more}."
        )


def promised_bandwidth(device_name: str) -> float | None:
    """The data sheet's bytes per second of the device's memory, or None where they are not known."""
    spec = find_device(device_name)
    return None if spec is None else spec.memory_bandwidth_bytes_per_s


def pivoted(rows: Iterable[Values], index: Sequence[str], name: str) -> list[Values]:
    """One row for each combination of values by the keys of the index, with the rows that have it by their `name`.

    Each of their values has a key too that begins with that name; None where there is no such row.
    """
    kept = list(rows)
    unknown = {f"{row[name]} {key}": None for row in kept for key in row}
    found: dict[tuple[object, ...], Values] = {}
    for row in kept:
        cells = found.setdefault(tuple(row[key] for key in index), {**unknown})
        cells |= {row[name]: row} | {f"{row[name]} {key}": value for key, value in row.items()}
    return [dict(zip(index, values, strict=True)) | cells for values, cells in found.items()]


def across(name: str, cell: Column) -> Column:
    """The column of a pivoted table that shows the cell of each row of this name; empty where there is no row."""
    key = f"{name} {cell.key}"
    return replace(cell, name=name, text=lambda row: cell.cell(row[name]) if name in row else "", key=key, std="")


def write_study(
    name: str, study: object, sections: Iterable[Section], pictures: Mapping[str, "Figure | None"], directory: Path
) -> list[Path]:
    """Write the record of the study, each section and plots/ into the directory, which is made; return the paths.

    `name` is that of the record's file. A picture that is None shows nothing: an earlier one of its name is removed.
    """
    from cs336_systems.report.plots.drawing import to_png  # brings matplotlib, which printing does not need

    files: dict[str, str | bytes] = {name: encode_json(study)}
    for section in sections:
        files |= texts_of(section)
    files |= {f"plots/{title}.png": b"" if figure is None else to_png(figure) for title, figure in pictures.items()}
    return write_files(files, directory)
