"""The records of finished runs as one data frame with a row per configuration, failed ones too."""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..analysis.statistics import mean_interval, quotient_stdev
from ..analysis.warnings import in_doubt
from ..config import SIZES, Mode, Phase, Precision, RunConfig
from ..costs.accounting import mfu, step_flops
from ..costs.communication import calls
from ..costs.curves import time_s
from ..costs.memory import predicted_peak_bytes
from ..costs.ranks_time import predicted_time
from ..costs.time import prepare_forecasts
from ..record import Measurement, RunRecord, Status
from ..studies.ceilings_files import NO_CEILINGS, Ceilings
from .columns import VALUES, Steps
from .identity import SHAPE, SHORTCUTS, identities, identity, settings_of, shared_settings

if TYPE_CHECKING:
    from pandas.core.groupby.generic import SeriesGroupBy

RESULTS = tuple(
    dict.fromkeys(
        (
            "size",
            "arch",
            "d_model",
            "d_ff",
            "num_layers",
            "num_heads",
            "vocab_size",
            "context_length",
            "batch_size",
            "mode",
            "precision",
            "attention",
            "compile",
            "optimizer",
            "world_size",
            "device_name",
            "warmup_steps",
            "measured_steps",
            "status",
            "error",
            "forward_mean_ms",
            "forward_std_ms",
            "backward_mean_ms",
            "backward_std_ms",
            "optimizer_mean_ms",
            "optimizer_std_ms",
            "step_mean_ms",
            "step_std_ms",
            "step_cv",
            "step_median_ms",
            "step_min_ms",
            "step_ci95_low_ms",
            "step_ci95_high_ms",
            "tokens_per_s",
            "model_tflops_per_s",
            "mfu",
            "peak_allocated_gib",
            "peak_reserved_gib",
            "warnings",
            "predicted_peak_gib",
            "ceiling_share",
            "data_mean_ms",
            "data_std_ms",
            *SHORTCUTS,
            "predicted_step_ms",
            "predicted_step_error",
            *VALUES,
        )
    )
)
"""Columns of results.csv, in order; after them come `processes` and the settings that have no
column here.
"""
QUANTITIES = RESULTS[RESULTS.index("forward_mean_ms") : RESULTS.index("warnings")]
"""Columns that were measured or computed from measurements; NaN is unknown."""
SPEED_UPS: Mapping[str, tuple[str, ...]] = {
    "speed_up": ("precision",),
    "attention_speed_up": ("attention", "sdpa_backend"),
    "compile_speed_up": ("compile", "compile_blocks"),
    "optimizer_speed_up": ("optimizer", "own_optimizer"),
    "weak_scaling": ("parallel", "ranks", "shard_optimizer", "own_ddp", "bucket_mib"),
}
"""Columns of speed-ups, by the settings in which a run differs from its baseline.

The baseline has the first value of the first of these settings: fp32, naive attention, no
compilation, the plain AdamW, a step that is not shared. Each rank of a shared step has the
baseline's batch, so that the ratio of their times is the efficiency of weak scaling.
"""
SHARED = ("communication_mean_ms", "communication_std_ms", "sent_mib", "predicted_collectives_ms")
"""Columns that results.csv has only if a run has several ranks."""
BESIDE = (
    "processes",
    "parallel",
    "ranks",
    "bucket_mib",
    *SHARED,
    "first_step_ms",
    "prediction_is_doubted",
    "prediction_is_shipped",
    *(name for key in SPEED_UPS for name in (key, f"{key}_std", f"{key}_is_doubted")),
)
"""Columns that the frame has in addition to RESULTS; see `to_frame`."""
NUMBERS = (
    *QUANTITIES,
    *VALUES,
    "predicted_peak_gib",
    "predicted_step_ms",
    "predicted_step_error",
    "ceiling_share",
    "data_mean_ms",
    "data_std_ms",
    "first_step_ms",
    *SHARED,
    *SPEED_UPS,
    *(f"{key}_std" for key in SPEED_UPS),
)


def to_frame(records: Iterable[RunRecord], ceilings: Ceilings = NO_CEILINGS) -> pd.DataFrame:
    """One row per configuration, with RESULTS and BESIDE; the index holds the configuration itself.

    Repeats are pooled: a mean is the mean over the processes' means; a standard deviation is that
    of a step within its process (the processes' variances, weighted by their degrees of freedom);
    median and minimum are over all steps; the confidence interval is over the processes' means, and
    unknown if fewer than three finished: the steps of one process are not independent. `processes`
    is the number of processes with times. Peaks are the largest of all processes. If some repeats
    failed, the times are those of the others, `status` and `error` are those of the first failure,
    and `warnings` counts the failures. Repeats on different devices are different rows.
    `ceiling_share` is `mfu` with the measured ceiling in place of the data sheet's peak.
    `predicted_step_ms` is the time of a step predicted from the measured ceilings of the device,
    and `predicted_step_error` by what share of the measured mean it is longer.
    `predicted_collectives_ms` is the time of a step's collectives, one after the other, from the
    measured ceilings of the device and the same number of ranks. `first_step_ms` is the first
    measured step, the mean over processes.

    `speed_up` is how many times faster a row is than the same configuration in fp32 on the same
    device. It is NaN for fp32 itself and where a time is missing, as is `speed_up_std` (both steps'
    std/mean, propagated); `speed_up_is_doubted` says whether a warning of either run puts its time
    in doubt. The other columns of SPEED_UPS are speed-ups by other settings.
    """
    groups = _repeats(records)
    configs = [group[0].config.configuration for group in groups]
    prepare_forecasts(configs)
    rows = [_row(group, ceilings) for group in groups]
    for name, settings in SPEED_UPS.items():
        keys = [apart_from(config, *settings) for config in configs]
        is_first = [_has_first_value(config, settings[0]) for config in configs]
        first = {
            (key, row["device_name"]): row
            for key, row, is_one in zip(keys, rows, is_first, strict=True)
            if is_one
        }
        for key, row, is_one in zip(keys, rows, is_first, strict=True):
            # a run that failed before it could name its device has none
            baseline = first.get((key, row["device_name"])) or first.get((key, None))
            row |= _speed_up(name, row, None if is_one else baseline)
    index = pd.Index(configs, dtype="object", name="config")
    kinds = dict.fromkeys(NUMBERS, "float64") | dict.fromkeys(SHAPE, "Int64")
    cells = {name: [row.get(name, math.nan) for row in rows] for name in (*RESULTS, *BESIDE)}
    return pd.DataFrame(
        {name: pd.Series(each, index, kinds.get(name, "object")) for name, each in cells.items()}
    )


def _has_first_value(config: RunConfig, setting: str) -> bool:
    value: StrEnum = settings_of(config)[setting]
    return value is next(iter(type(value)))


def _speed_up(
    name: str, row: Mapping[str, Any], baseline: Mapping[str, Any] | None
) -> dict[str, object]:
    base_ms, step_ms = (baseline or {}).get("step_mean_ms"), row.get("step_mean_ms")
    if baseline is None or not base_ms or not step_ms:
        return {f"{name}_is_doubted": False}
    ratio = base_ms / step_ms
    return {
        name: ratio,
        f"{name}_std": quotient_stdev(ratio, baseline.get("step_cv"), row.get("step_cv")),
        f"{name}_is_doubted": in_doubt([*codes_of(baseline), *codes_of(row)]),
    }


def over_warmup(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that differ from some other row in nothing but the number of warm-up steps."""
    return frame[_warmup_steps(frame).transform("nunique") > 1]


def steady(frame: pd.DataFrame) -> pd.DataFrame:
    """Of rows that differ only in their number of warm-up steps, the one with the most."""
    return frame[_warmup_steps(frame).transform("max") == frame["warmup_steps"]]


def _warmup_steps(frame: pd.DataFrame) -> "SeriesGroupBy[Any, Any]":
    """The numbers of warm-up steps, grouped by all other settings."""
    others = pd.Series(
        [apart_from(config, "warmup_steps") for config in frame.index], dtype="object"
    )
    return frame["warmup_steps"].groupby(pd.factorize(others)[0])


def codes_of(row: Mapping[str, Any]) -> list[str]:
    """The warnings of a row one by one."""
    return (row["warnings"] or "").split(";")


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dicts, with None for unknown values; with all settings, the `config` and its
    `identity`.
    """
    names, columns = [*map(str, frame)], [column.tolist() for _, column in frame.items()]
    rows = [
        {name: None if pd.isna(value) else value for name, value in zip(names, values, strict=True)}
        for values in zip(*columns, strict=True)
    ]
    found = identities(
        (config, row["device_name"]) for config, row in zip(frame.index, rows, strict=True)
    )
    return [
        {**own, **row, "config": config, "identity": own}
        for config, row, own in zip(frame.index, rows, found, strict=True)
    ]


def describe(frame: pd.DataFrame, also: Collection[str] = ()) -> str:
    """The settings that all rows share; see `shared_settings`."""
    return shared_settings([(row["config"], row["device_name"]) for row in rows_of(frame)], also)


def apart_from(config: RunConfig, *names: str) -> tuple[object, ...]:
    """The values of all settings except `names` and the repeat: equal for runs that differ in
    nothing else.
    """
    return tuple(
        value for name, value in settings_of(config).items() if name not in ("repeat", *names)
    )


def _repeats(records: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """The records in groups of one configuration on one device, in the order of tables.

    A run that ended before it could name its device is in the group of the others if these name
    only one device.
    """
    kept = dict.fromkeys(records)  # the same record twice is still one process
    devices: dict[RunConfig, set[str | None]] = {}
    for record in kept:
        devices.setdefault(record.config.configuration, {None}).add(record.device_name)
    groups: dict[tuple[RunConfig, str | None], list[RunRecord]] = {}
    for record in kept:
        config = record.config.configuration
        device_name = record.device_name if len(devices[config]) > 2 else None
        groups.setdefault((config, device_name), []).append(record)
    ordered = sorted(groups, key=lambda key: (*order(key[0]), key[1] is None, key[1] or ""))
    return [
        sorted(groups[key], key=lambda record: (record.config.repeat, record.started_at))
        for key in ordered
    ]


def order(config: RunConfig) -> tuple[Any, ...]:
    """Key to sort configurations by, in the order of tables: by size, then shape, context,
    precision, mode.

    Attention, compilation and optimizer come last, their values in the order in which they are
    declared.
    """
    sizes, model = list(SIZES), config.model
    rank = sizes.index(config.size) if config.size in sizes else len(sizes)
    shape = (model.d_model, model.num_layers, model.d_ff, model.num_heads, model.context_length)
    precision, mode = list(Precision).index(config.precision), list(Mode).index(config.mode)
    choices = [
        list(type(each)).index(each)
        for each in (
            model.attention,
            model.sdpa_backend,
            config.compile,
            config.optimizer,
            config.parallel,
        )
    ]
    numbers = config.warmup_steps, config.checkpoint_blocks, config.batch_size
    return (
        rank,
        config.size,
        *shape,
        precision,
        mode,
        *numbers,
        *choices,
        config.ranks,
        config.shard_optimizer,
    )


def _row(group: Sequence[RunRecord], ceilings: Ceilings) -> dict[str, Any]:
    config = group[0].config
    done = [record for record in group if record.status is Status.OK]
    failed = [record for record in group if record.status is not Status.OK]
    codes = dict.fromkeys(str(warning.code) for record in group for warning in record.warnings)
    if done and failed:
        codes[f"{len(failed)}-of-{len(group)}-repeats-failed"] = None
    sent_bytes = [sum(own.sent_bytes for own in record.traffic or ()) for record in done]
    memories = [record.memory for record in done if record.memory is not None]
    device_name = next((name for record in group if (name := record.device_name) is not None), None)
    curves = None if device_name is None else ceilings.curves(device_name)
    predicted = None if curves is None else predicted_time(config, curves)
    row = {
        **identity(config, device_name),
        "world_size": config.ranks,
        "status": str(failed[0].status if failed else Status.OK),
        "error": next(
            (record.failure.message for record in failed if record.failure is not None), None
        ),
        "warnings": ";".join(codes) or None,
        "predicted_peak_gib": _scaled(predicted_peak_bytes(config), 2**-30),
        "peak_allocated_gib": _scaled(
            max((m.peak_allocated_bytes for m in memories), default=None), 2**-30
        ),
        "predicted_step_ms": None if predicted is None else predicted.step_s * 1e3,
        "prediction_is_doubted": predicted is not None
        and curves is not None
        and curves.is_in_doubt,
        "prediction_is_shipped": predicted is not None and ceilings.is_shipped(device_name or ""),
        "sent_mib": _scaled(max(sent_bytes, default=None), 2**-20) if config.is_shared else None,
        "predicted_collectives_ms": _scaled(
            _predicted_collectives_s(config, device_name, ceilings), 1e3
        ),
        "peak_reserved_gib": _scaled(
            max((m.peak_reserved_bytes for m in memories), default=None), 2**-30
        ),
    }
    for phase in Phase:
        mean_s, stdev_s = _mean_and_stdev(_measured(done, phase))
        row |= {f"{phase}_mean_ms": _scaled(mean_s, 1e3), f"{phase}_std_ms": _scaled(stdev_s, 1e3)}
    steps = _measured(done, Phase.STEP)
    row["processes"] = len(steps)
    if steps:
        row |= _step(steps, config, device_name, ceilings)
    if predicted is not None and row["step_mean_ms"]:
        row["predicted_step_error"] = predicted.step_s * 1e3 / row["step_mean_ms"] - 1
    return row


def _step(
    measured: Sequence[Measurement], config: RunConfig, device_name: str | None, ceilings: Ceilings
) -> dict[str, object]:
    """Columns that follow from the times of the whole step in each process."""
    times_s = [time_s for measurement in measured for time_s in measurement.times_s]
    mean_s, stdev_s = _mean_and_stdev(measured)
    low_s, high_s = mean_interval([measurement.mean_s for measurement in measured]) or (None, None)
    columns: dict[str, object] = {
        "first_step_ms": statistics.fmean(measurement.times_s[0] for measurement in measured) * 1e3,
        "step_median_ms": statistics.median(times_s) * 1e3,
        "step_min_ms": min(times_s) * 1e3,
        "step_ci95_low_ms": _scaled(low_s, 1e3),
        "step_ci95_high_ms": _scaled(high_s, 1e3),
    }
    if not mean_s:
        return columns
    flops = step_flops(config)
    columns |= {
        name: value(Steps(config, times_s, mean_s, stdev_s)) for name, value in VALUES.items()
    }
    columns["model_tflops_per_s"] = _scaled(flops, config.ranks * 1e-12 / mean_s)
    if flops is not None and device_name is not None:
        ceiling_flops_per_s = ceilings.flops_per_s(device_name, config.precision)
        columns["mfu"] = mfu(flops / mean_s, device_name, config.precision)
        columns["ceiling_share"] = (
            None if ceiling_flops_per_s is None else flops / mean_s / ceiling_flops_per_s
        )
    return columns


def _predicted_collectives_s(
    config: RunConfig, device_name: str | None, ceilings: Ceilings
) -> float | None:
    found = calls(config)
    if found is None or device_name is None:
        return None
    return time_s(found, ceilings.collective_times(device_name, config.ranks))


def _measured(records: Iterable[RunRecord], phase: Phase) -> list[Measurement]:
    found = (record.measurement(phase) for record in records)
    return [measurement for measurement in found if measurement is not None]


def _mean_and_stdev(measured: Sequence[Measurement]) -> tuple[float | None, float | None]:
    """The mean over processes, and the deviation within them; None for unknown."""
    if not measured:
        return None, None
    spreads = [(len(m.times_s) - 1, m.stdev_s) for m in measured if m.stdev_s is not None]
    freedom = sum(own for own, _ in spreads)
    stdev_s = (
        math.sqrt(sum(own * stdev_s**2 for own, stdev_s in spreads) / freedom) if freedom else None
    )
    return statistics.fmean(m.mean_s for m in measured), stdev_s


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
