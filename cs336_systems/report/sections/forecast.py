"""How far the times that ceilings predict for steps are from the measured ones: by what limits
the steps, by device and by settings.

A forecast whose matmuls were measured for these very shapes is mostly a look-up. So each such step
is predicted once more, as if none of its matmuls had been measured: that is what a forecast of
another configuration is worth. So it is as if no step of its model size, or of its context length,
had been measured, and from the ceilings of another device.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import chain
from pathlib import Path

from ...config import Phase, RunConfig
from ...costs.curves import Curves, transferred_curves
from ...costs.hardware import find_device
from ...costs.ranks_time import predicted_time
from ...costs.time import StepLimit, TimePrediction, measured_share, without_products
from ...costs.traces import is_compiled
from ...record import WarningCode
from ...text import counted
from ..columns import Row, columns_of
from ..identity import settings_of
from ..quantities import MS, StepResult
from ..section import Section, Table, make_table
from ..words import ratio, scaled

SCORED_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP)
ERROR_COLUMNS = (
    "scored",
    "num_scored",
    "median_error",
    "error_of_nine",
    "largest_error",
    "median_bias",
    "inside",
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
    "fp8",
    "compile_blocks",
    "ranks",
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
    "fp8",
)
"""Columns by whose values the errors are also given: the device, and settings."""


COMPILED_BY = ("device_name", "size", "precision", "attention", "cuda_graph", "compile_blocks")
"""The same of compiled steps."""


class Shapes(StrEnum):
    """Whether most of the time of a step's matmuls is that of matmuls measured for these shapes."""

    MEASURED = "measured"
    UNMEASURED = "unmeasured"
    WITHOUT_SIZE = "size left out"
    """As if no matmul of any step of this model size had been measured."""
    WITHOUT_CONTEXT = "context left out"
    """The same of all steps at this context length."""
    OTHER_DEVICE = "other device"
    """From the ceilings of another device by the data sheets of both, with this one's host."""


ERROR_TITLES = {
    (StepLimit.DEVICE, Shapes.UNMEASURED): (
        "limited by the device, matmuls of shapes that were not measured"
    ),
    (StepLimit.DEVICE, Shapes.WITHOUT_SIZE): (
        "limited by the device, no matmul of this model size measured"
    ),
    (StepLimit.DEVICE, Shapes.WITHOUT_CONTEXT): (
        "limited by the device, no matmul of this context length measured"
    ),
    (StepLimit.DEVICE, Shapes.OTHER_DEVICE): (
        "limited by the device, from the ceilings of another device"
    ),
    (StepLimit.DEVICE, Shapes.MEASURED): "limited by the device, measured matmuls",
    (StepLimit.LAUNCHES, None): "limited by launches",
}
AS_IF = (
    "Each step is predicted as if none of its own matmuls had been measured: that is what a "
    "forecast of another configuration is worth."
)
NOTES = {
    Shapes.UNMEASURED: AS_IF,
    Shapes.WITHOUT_SIZE: "No matmul of any step of the same model size counts as measured.",
    Shapes.WITHOUT_CONTEXT: "No matmul of any step at the same context length counts as measured.",
    Shapes.OTHER_DEVICE: (
        "Times of kernels follow from the ceilings of another device and both data sheets; those "
        "of launches are this device's own."
    ),
}
OF_COMPILED = (
    "A fused kernel moves the bytes that inductor says it does, and takes as much longer than a "
    "copy of them as those of the fusion studies do. Matmuls, attention and the optimizer are "
    "foretold as in eager steps. Nothing was fitted to these steps."
)
HOST_OF_COMPILED = (
    "What the host takes to call compiled code was not measured: each of its launches is taken to "
    "cost what one of an eager step does, and the checks before it nothing. A graph needs neither."
)
MISSING = (
    "Missing are compiled steps that several ranks share or in other modes than the default, steps "
    "with a part of --fast, and devices without ceilings."
)
RULE = (
    "A step is limited by launches if its record says so. The forecast knows the configuration and "
    "the ceilings."
)


def scored(sweeps: Mapping[Path, Sequence[StepResult]]) -> tuple[list[Row], int]:
    """A row for each measured configuration of a sweep whose time is predicted, and the number of
    the others.

    A step that the device limits has more rows, each from curves that know less of it (Shapes).
    Several processes of one configuration count as one, with the median of their medians. Times are
    in ms, errors in percent of what was measured.
    """
    rows: list[Row] = []
    others = 0
    alike = _alike(chain.from_iterable(sweeps.values()))
    for directory, results in sorted(sweeps.items()):
        for result in results:
            curves = result.ceilings.curves(result.device_name or "")
            if result.config is None or not result.done:
                continue
            if curves is None or result.forecast is None:
                others += 1
            else:
                rows += _rows(directory, result, result.config, curves, alike)
    return rows, others


Alike = Mapping[tuple[str, object], Sequence[RunConfig]]
"""Configurations whose time is predicted, by a setting and its value."""
LEFT_OUT = {Shapes.WITHOUT_SIZE: "size", Shapes.WITHOUT_CONTEXT: "context_length"}
"""Settings of which one value is left out of the ceilings."""


def _alike(results: Iterable[StepResult]) -> Alike:
    """The configurations with each value of the settings of LEFT_OUT."""
    alike: defaultdict[tuple[str, object], dict[RunConfig, None]] = defaultdict(dict)
    for result in results:
        if result.config is not None and result.step_mean_ms and result.forecast is not None:
            settings = settings_of(result.config)
            for name in LEFT_OUT.values():
                alike[name, settings[name]][result.config] = None
    return {key: tuple(configs) for key, configs in alike.items()}


def _rows(
    directory: Path, result: StepResult, config: RunConfig, curves: Curves, alike: Alike
) -> Iterator[Row]:
    """The row of one configuration, and, if the device limits it, those of predictions that know
    less.
    """
    assert result.forecast is not None
    is_measured = measured_share(config, curves) > 1 / 2
    row = _row(directory, result, config, result.forecast)
    yield row | {"shapes": Shapes.MEASURED if is_measured else Shapes.UNMEASURED}
    if row["limit"] is not StepLimit.DEVICE:
        return
    for shapes, less in _less_known(result, config, curves, alike):
        if shapes is Shapes.UNMEASURED and not is_measured:
            continue
        prediction = predicted_time(config, less)
        if prediction is not None:
            yield _row(directory, result, config, prediction) | {"shapes": shapes}


def _less_known(
    result: StepResult, config: RunConfig, curves: Curves, alike: Alike
) -> Iterator[tuple[Shapes, Curves]]:
    """Curves that know less of a step, and in what way."""
    yield Shapes.UNMEASURED, without_products(curves, config.precision, (config,))
    settings = settings_of(config)
    for shapes, name in LEFT_OUT.items():
        others = alike[name, settings[name]]
        same = tuple(other for other in others if other.precision is config.precision)
        yield shapes, without_products(curves, config.precision, same)
    device = find_device(result.device_name or "")
    for name in result.ceilings.device_names:
        other = find_device(name)
        measured = result.ceilings.curves(name)
        if other is None or device is None or measured is None or other is device:
            continue
        elsewhere = transferred_curves(measured, other, device)
        yield (
            Shapes.OTHER_DEVICE,
            replace(elsewhere, launch_s=curves.launch_s, collectives=curves.collectives),
        )


def _row(directory: Path, result: StepResult, config: RunConfig, prediction: TimePrediction) -> Row:
    """Measured and predicted times of one configuration, by phase, and what limits it."""
    settings = settings_of(config)
    row: Row = {
        "directory": directory.as_posix(),
        "key": config.key,
        "device_name": result.device_name,
        **{key: settings[key] for key in SCORED_SETTINGS},
        "fast": config.fused_blocks,
        "compiled": is_compiled(config),
    }
    predicted_s = {**prediction.phases_s, Phase.STEP: prediction.step_s}
    for phase in SCORED_PHASES:
        medians_s = [measured.median_s for measured in result.measured(phase)]
        measured_s = None
        if medians_s and phase in predicted_s:
            measured_s = statistics.median(medians_s)
        quotient = ratio(predicted_s.get(phase), measured_s)
        row[f"{phase}_ms"] = scaled(measured_s, MS)
        row[f"predicted_{phase}_ms"] = scaled(predicted_s.get(phase), MS)
        row[f"{phase}_error"] = None if quotient is None else 100 * (quotient - 1)
    low_s, high_s = prediction.low_s, prediction.high_s
    row["low_step_ms"], row["high_step_ms"] = scaled(low_s, MS), scaled(high_s, MS)
    warnings = chain.from_iterable(record.warnings for record in result.done)
    codes = {warning.code for warning in warnings}
    has_host_times = any(record.host_phases for record in result.done)
    row["limit"] = StepLimit.LAUNCHES if WarningCode.LAUNCH_BOUND in codes else StepLimit.DEVICE
    row["predicted_limit"] = prediction.limit if has_host_times else prediction.limit_of_whole
    row["predicted_busy_share"] = prediction.busy_share
    row["warnings"] = ";".join(sorted(codes))
    return row


def forecast_section(rows: Sequence[Row], others: int) -> Section:
    """A table of errors for each limit, of all its rows and of groups of them, and one for compiled
    steps; the values are those of each configuration.
    """
    eager = [row for row in rows if not row["compiled"]]
    tables = []
    for (limit, shapes), title in ERROR_TITLES.items():
        notes = [RULE] if shapes not in NOTES else [NOTES[shapes], RULE]
        if limit is StepLimit.LAUNCHES:
            tables += _tables_of_compiled([row for row in rows if row["compiled"]])
            if others:
                notes.append(f"Not predicted: {counted(others, 'configuration')}. {MISSING}")
        of_limit = [row for row in eager if row["limit"] is limit]
        kept = [row for row in of_limit if shapes in (None, row["shapes"])]
        if kept or limit is StepLimit.LAUNCHES:
            tables.append(_errors_table(f"steps {title}", kept, notes))
    return Section(name="errors", tables=tuple(tables), rows=rows)


def _tables_of_compiled(rows: Sequence[Row]) -> list[Table]:
    """The table of the errors of compiled steps, whatever limits them; none without such steps."""
    kept = [
        row
        for row in rows
        if row["shapes"] is Shapes.UNMEASURED or row["limit"] is StepLimit.LAUNCHES
    ]
    title = "compiled steps, matmuls of shapes that were not measured"
    notes = [AS_IF, OF_COMPILED, HOST_OF_COMPILED]
    return [_errors_table(title, kept, notes, COMPILED_BY)] if kept else []


def _errors_table(
    title: str, rows: Sequence[Row], notes: Sequence[str], keys: Sequence[str] = GROUPED_BY
) -> Table:
    """The table of errors of all these rows, and of groups of them by these columns."""
    summaries = [_summary(name, group) for name, group in _groups(rows, keys) if group]
    return make_table(f"Predicted times of {title}", columns_of(*ERROR_COLUMNS), summaries, notes)


def _groups(rows: Sequence[Row], keys: Sequence[str]) -> Iterator[tuple[str, Sequence[Row]]]:
    """Groups of rows by name, whose errors are summarised: all rows, the stable ones, and those
    with each value of these columns.
    """
    yield "all", rows
    unstable = {WarningCode.UNSTABLE, WarningCode.DRIFT}
    stable = [row for row in rows if unstable.isdisjoint(row["warnings"].split(";"))]
    yield "without unstable ones", stable
    for key in keys:
        by_value: dict[object, list[Row]] = {}
        for row in rows:
            by_value.setdefault(row[key], []).append(row)
        if len(by_value) > 1:
            words = key.removesuffix("_name").replace("_", " ")
            for value, group in by_value.items():
                yield f"{words} {value}", group


def _summary(name: str, rows: Sequence[Row]) -> Row:
    """Statistics of the errors of predicted step times in one group of rows."""
    errors = [row["step_error"] for row in rows]
    sizes = sorted(map(abs, errors))
    num_right = sum(row["limit"] is row["predicted_limit"] for row in rows)
    num_inside = sum(row["low_step_ms"] <= row["step_ms"] <= row["high_step_ms"] for row in rows)
    return {
        "scored": name,
        "num_scored": len(rows),
        "median_error": statistics.median(sizes),
        "error_of_nine": sizes[math.ceil(0.9 * len(sizes)) - 1],
        "largest_error": sizes[-1],
        "median_bias": statistics.median(errors),
        "inside": 100 * num_inside / len(rows),
        "named_right": 100 * num_right / len(rows),
    }
