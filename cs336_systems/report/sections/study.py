"""What the sections of all studies share: values of rows, doubtful times, pivoted tables; and
that of precision.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from ...analysis.statistics import quotient_stdev
from ...analysis.warnings import PASSES, Repeated, in_doubt, measurement_warnings
from ...config import Device
from ...costs.hardware import find_device
from ...record import Failure, Measurement, RunWarning, Status
from ...studies.records import Accumulation, NormalisedActivations, ObservedDtype, PrecisionStudy
from ..column import Column, Row
from ..columns import column, columns_of
from ..quantities import MS
from ..section import Section, make_table
from ..words import DOUBT, STATUS_WORDS, scaled, warning_counts


def end_of(status: Status, failure: Failure | None) -> Row:
    """How a cell ended: its status, its error, and under `ended` the words that a table shows in
    place of a time.
    """
    ended = "" if status is Status.OK else STATUS_WORDS[status]
    return {"status": status, "error": failure.message if failure else None, "ended": ended}


def has_failed(row: Row) -> bool:
    """Whether the cell of this row has no measurement."""
    return row["status"] is not Status.OK


def doubts_of(warnings: Sequence[RunWarning], prefix: str = "") -> Row:
    """The codes of the warnings about a time, and whether they put it in doubt; the keys begin
    with `prefix`.
    """
    codes = [warning.code for warning in warnings]
    return {f"{prefix}warnings": ";".join(codes) or None, f"{prefix}is_doubted": in_doubt(codes)}


def times_ms(measured: Measurement | None, prefix: str = "") -> Row:
    """Median, mean and deviation of times of passes in milliseconds, their cv and doubts; None if
    there are no times.

    The keys begin with `prefix`.
    """
    median_s = mean_s = stdev_s = cv = None
    if measured is not None:
        median_s, mean_s = measured.median_s, measured.mean_s
        stdev_s, cv = measured.stdev_s, measured.cv
    return {
        f"{prefix}median_ms": scaled(median_s, MS),
        f"{prefix}mean_ms": scaled(mean_s, MS),
        f"{prefix}std_ms": scaled(stdev_s, MS),
        f"{prefix}cv": cv,
        **doubts_of(measurement_warnings(measured, PASSES), prefix),
    }


def derived(key: str, value: float | None, *times: Row, prefix: str = "") -> Row:
    """A value that follows from the times of these rows, as the column of a `derived` value needs
    it: the value, its standard deviation and whether it is in doubt.

    The keys of the times begin with `prefix`.
    """
    std = None
    if value is not None:
        std = quotient_stdev(value, *(row[f"{prefix}cv"] for row in times))
    return {
        key: value,
        f"{key}_std": std,
        f"{key}_is_doubted": any(row[f"{prefix}is_doubted"] for row in times),
    }


def doubt_notes(codes: Sequence[str | None], rows: str, repeated: Repeated) -> Iterator[str]:
    """A note that counts the rows with each warning and says what to do; none without warnings.

    `rows` is what the rows are called, and `repeated` what was timed.
    """
    if said := warning_counts(codes, rows):
        yield (
            f"{DOUBT} marks a time in doubt, and what is computed from it, with its deviation: "
            f"{said}. Close other programs, or use {repeated.more}."
        )


def missing_notes(number: int, wanted: int) -> list[str]:
    """A note that counts the cells of a grid that were measured, unless all were."""
    if number >= wanted:
        return []
    return [f"Only {number} of the grid's {wanted} cells were measured: the study was interrupted."]


def promised_bandwidth(device_name: str) -> float | None:
    """Bandwidth of the device's memory in bytes per second by its data sheet; None for an
    unknown device.
    """
    spec = find_device(device_name)
    return None if spec is None else spec.memory_bandwidth_bytes_per_s


def pivoted(rows: Iterable[Row], index: Sequence[str], name: str) -> list[Row]:
    """Pivot the rows: one row for each combination of the values under the keys `index`.

    `name` is the key whose values become columns. With `name` "implementation", a pivoted row has
    the original row of naive attention under "naive", from which `across` writes a cell, and the
    values of that row under keys such as "naive forward_mean_ms"; both are missing where there is
    no such row.
    """
    table: dict[tuple[object, ...], Row] = {}
    for row in rows:
        values = tuple(row[key] for key in index)
        cells = table.setdefault(values, dict(zip(index, values, strict=True)))
        cells[row[name]] = row
        cells |= {f"{row[name]} {key}": value for key, value in row.items()}
    return list(table.values())


def across(name: str, cell: Column) -> Column:
    """The column of a pivoted table for this name. `cell` writes the row that stood there before
    pivoting; the cell is empty without one.
    """
    key = f"{name} {cell.key}"
    return replace(
        cell,
        name=name,
        text=lambda row: cell.cell(row[name]) if name in row else "",
        key=key,
        std="",
    )


ACCUMULATION = (
    "sum_dtype",
    "addend_dtype",
    "cast",
    "total",
    "error",
    "storage_error",
    "rounding_error",
    "growing_additions",
)
LAYER_NORM = (
    "activations",
    "dtype",
    "variance",
    "exact_variance",
    "output",
    "exact_output",
    "library_output",
)


def precision_sections(study: PrecisionStudy) -> list[Section]:
    """Sums, layer norm, and data types; records of earlier versions have no layer norm."""
    norms = [layer_norm_section(study.layer_norm)] if study.layer_norm else []
    return [accumulation_section(study.accumulation), *norms, dtype_section(study.dtypes)]


def accumulation_section(rows: Sequence[Accumulation]) -> Section:
    """The sums, their errors, and what the errors come from."""
    values = []
    for row in rows:
        values.append({key: getattr(row, key) for key in ACCUMULATION})
    title = f"{rows[0].addend} added {rows[0].count} times: exactly {rows[0].exact:g}"
    table = make_table(title, columns_of(*ACCUMULATION), values)
    return Section(name="accumulation", tables=(table,), rows=[asdict(row) for row in rows])


def layer_norm_section(rows: Sequence[NormalisedActivations]) -> Section:
    """Variance and output of each kind of activations in each data type, beside the exact ones."""
    values = []
    for row in rows:
        around = f"{row.centre:g} " if row.centre else ""
        texts = {
            "activations": f"{around}± {row.scale:g}",
            "variance_failure": f"beyond {row.dtype}",
            "output_failure": f"beyond {row.dtype}",
        }
        values.append(asdict(row) | texts)
    title = "Layer norm with every operation in one data type"
    note = (
        "PyTorch's layer norm has its statistics in fp32, whatever the data type of the "
        "activations."
    )
    table = make_table(title, columns_of(*LAYER_NORM), values, [note])
    return Section(name="layer_norm", tables=(table,), rows=[asdict(row) for row in rows])


OF_GPU = (
    "Observed on a CPU alone, whose autocast is not a GPU's: on an H200, layer norm's output (ln) "
    "and attention's softmax were in fp32 (data/published/precision of this project)."
)


def dtype_section(rows: Sequence[ObservedDtype]) -> Section:
    """One row for each quantity of each model, one column for each device and autocast type."""
    values = [asdict(row) | {"setting": f"{row.precision} on {row.device}"} for row in rows]
    columns = columns_of("model", "quantity")
    for setting in dict.fromkeys(row["setting"] for row in values):
        columns.append(across(setting, column("dtype")))
    devices = " and ".join(dict.fromkeys(row.device for row in rows))
    in_fp32 = ", ".join(_always(rows, in_fp32=True)) or "nothing"
    in_autocast = ", ".join(_always(rows, in_fp32=False)) or "nothing"
    findings = [
        f"In fp32 in every case on {devices}: {in_fp32}.",
        f"In the autocast type in every case on {devices}: {in_autocast}.",
    ]
    if all(row.device is Device.CPU for row in rows):
        findings.insert(0, OF_GPU)
    pivot = pivoted(values, ("model", "quantity"), "setting")
    title = "Data types under autocast, as observed"
    table = make_table(title, columns, pivot, findings, findings=findings)
    return Section(name="dtypes", tables=(table,), rows=[asdict(row) for row in rows])


def _always(rows: Sequence[ObservedDtype], *, in_fp32: bool) -> list[str]:
    """The quantities that are in fp32 (or, with `in_fp32` false, in the autocast type) in every row
    that has them.
    """
    always = dict.fromkeys(row.quantity for row in rows)
    for row in rows:
        if row.dtype != ("fp32" if in_fp32 else row.precision):
            always.pop(row.quantity, None)
    return list(always)
