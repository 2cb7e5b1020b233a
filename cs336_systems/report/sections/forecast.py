"""How far the times that ceilings predict for steps are from the measured ones: by what limits
the steps, by device and by settings.

A forecast whose matmuls were measured for these very shapes is mostly a look-up. So each such step
is predicted once more, as if none of its matmuls had been measured: that is what a forecast of
another configuration is worth.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from ...config import Phase, Profiler, RunConfig
from ...costs.curves import Curves
from ...costs.ranks_time import predicted_time
from ...costs.time import StepLimit, TimePrediction, measured_share, without_own_products
from ...record import RunRecord, Status, WarningCode
from ...studies.ceilings_files import Ceilings
from ...text import counted
from ..columns import Row, columns_of
from ..identity import settings_of
from ..section import Section, Table, make_table

SCORED_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP)
ERROR_COLUMNS = (
    "scored",
    "num_scored",
    "median_error",
    "error_of_nine",
    "largest_error",
    "median_bias",
    "named_right",
)
SCORED_SETTINGS = (
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
GROUPED_BY = (
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


ERROR_TITLES = {
    (StepLimit.DEVICE, Shapes.UNMEASURED): (
        "limited by the device, matmuls of shapes that were not measured"
    ),
    (StepLimit.DEVICE, Shapes.MEASURED): "limited by the device, measured matmuls",
    (StepLimit.LAUNCHES, None): "limited by launches",
}
AS_IF = (
    "Each step is predicted as if none of its own matmuls had been measured: that is what a "
    "forecast of another configuration is worth."
)
RULE = (
    "A step is limited by launches if its record says so. The forecast knows the configuration and "
    "the ceilings."
)


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
        repeats: dict[RunConfig, list[RunRecord]] = {}
        for record in records:
            config = record.config
            if config is None or config.profiler is not Profiler.NONE:
                continue
            if record.status is Status.OK:
                repeats.setdefault(config.configuration, []).append(record)
        for config, same in repeats.items():
            curves = ceilings_of(directory).curves(same[0].device_name or "")
            prediction = None if curves is None else predicted_time(config, curves)
            if curves is None or prediction is None:
                others += 1
            else:
                rows += _rows(directory, config, same, prediction, curves)
    return rows, others


def _rows(
    directory: Path,
    config: RunConfig,
    records: Sequence[RunRecord],
    prediction: TimePrediction,
    curves: Curves,
) -> Iterator[Row]:
    """The row of one configuration, and that without its own matmuls if they were measured."""
    is_measured = measured_share(config, curves) > 1 / 2
    row = _row(directory, config, records, prediction)
    yield row | {"shapes": Shapes.MEASURED if is_measured else Shapes.UNMEASURED}
    if is_measured and row["limit"] is StepLimit.DEVICE:
        without = predicted_time(config, without_own_products(config, curves))
        if without is not None:
            yield _row(directory, config, records, without) | {"shapes": Shapes.UNMEASURED}


def _row(
    directory: Path, config: RunConfig, records: Sequence[RunRecord], prediction: TimePrediction
) -> Row:
    """Measured and predicted times of one configuration, by phase, and what limits it."""
    codes = {warning.code for record in records for warning in record.warnings}
    settings = settings_of(config)
    row: Row = {
        "directory": directory.as_posix(),
        "key": config.key,
        "device_name": records[0].device_name,
        **{key: settings[key] for key in SCORED_SETTINGS},
        "fast": config.fused_blocks,
    }
    for phase in SCORED_PHASES:
        predicted_s = prediction.phases_s.get(phase)
        if phase is Phase.STEP:
            predicted_s = prediction.step_s
        measurements = [record.measurement(phase) for record in records]
        medians_s = [measured.median_s for measured in measurements if measured is not None]
        row |= {f"{phase}_ms": None, f"predicted_{phase}_ms": None, f"{phase}_error": None}
        if predicted_s is None:
            continue
        row[f"predicted_{phase}_ms"] = 1e3 * predicted_s
        if medians_s:
            measured_s = statistics.median(medians_s)
            row[f"{phase}_ms"] = 1e3 * measured_s
            if measured_s:
                row[f"{phase}_error"] = 100 * (predicted_s / measured_s - 1)
    has_host_times = any(record.host_phases for record in records)
    row["limit"] = StepLimit.LAUNCHES if WarningCode.LAUNCH_BOUND in codes else StepLimit.DEVICE
    row["predicted_limit"] = prediction.limit if has_host_times else prediction.limit_of_whole
    row["predicted_busy_share"] = prediction.busy_share
    row["warnings"] = ";".join(sorted(codes))
    return row


def forecast_section(rows: Sequence[Row], others: int) -> Section:
    """A table of errors for each limit; the values are those of each configuration."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        first.setdefault((row["directory"], row["key"]), row)
    tables = []
    for (limit, shapes), title in ERROR_TITLES.items():
        of_shapes = first.values() if shapes is None else rows
        scored_rows = [
            row for row in of_shapes if row["limit"] is limit and shapes in (None, row["shapes"])
        ]
        if scored_rows or shapes is None:
            notes = [AS_IF] if shapes is Shapes.UNMEASURED else []
            tables.append(_table(title, scored_rows, [*notes, RULE]))
    if others:
        note = (
            f"Not predicted: {counted(others, 'configuration')}. Missing are compiled models but "
            "for the whole of --fast, such steps on several ranks, and devices without ceilings."
        )
        tables[-1] = replace(tables[-1], notes=(*tables[-1].notes, note))
    return Section(name="errors", tables=tuple(tables), rows=rows)


def _table(title: str, rows: Sequence[Row], notes: Sequence[str]) -> Table:
    """The errors of all rows, and of groups of them."""
    groups = {name: group for name, group in _groups(rows) if group}
    return make_table(
        f"Predicted times of steps {title}",
        columns_of(*ERROR_COLUMNS),
        [_summary(name, group) for name, group in groups.items()],
        notes,
    )


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row]]]:
    """All rows, those that were stable, and those of each value of the columns GROUPED_BY."""
    yield "all", rows
    unstable = {WarningCode.UNSTABLE, WarningCode.DRIFT}
    stable = [row for row in rows if unstable.isdisjoint(row["warnings"].split(";"))]
    yield "without unstable ones", stable
    for key in GROUPED_BY:
        by_value: dict[object, list[Row]] = {}
        for row in rows:
            by_value.setdefault(row[key], []).append(row)
        if len(by_value) > 1:
            words = key.removesuffix("_name").replace("_", " ")
            for value, group in by_value.items():
                yield f"{words} {value}", group


def _summary(name: str, rows: Sequence[Row]) -> Row:
    """What is said of the errors of one group."""
    errors = [row["step_error"] for row in rows]
    sizes = sorted(map(abs, errors))
    num_right = sum(row["limit"] is row["predicted_limit"] for row in rows)
    return {
        "scored": name,
        "num_scored": len(rows),
        "median_error": statistics.median(sizes),
        "error_of_nine": sizes[math.ceil(0.9 * len(sizes)) - 1],
        "largest_error": sizes[-1],
        "median_bias": statistics.median(errors),
        "named_right": 100 * num_right / len(rows),
    }
