"""The records of finished runs by configuration, in the order of tables."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from ..config import SIZES
from ..costs.time import prepare_forecasts
from ..record import RunRecord
from ..studies.ceilings_files import NO_CEILINGS, Ceilings
from ..subject import Subject
from .identity import identities, settings_of
from .quantities import StepResult

_SORTED_BY = (
    "d_model",
    "num_layers",
    "d_ff",
    "num_heads",
    "context_length",
    "precision",
    "mode",
    "warmup_steps",
    "checkpoint_blocks",
    "batch_size",
    "attention",
    "sdpa_backend",
    "compile",
    "optimizer",
    "parallel",
    "ranks",
    "shard_optimizer",
)
"""Settings by which tables are sorted, after the size."""


def step_results(
    records: Iterable[RunRecord], ceilings: Ceilings = NO_CEILINGS
) -> list[StepResult]:
    """The result of each configuration on each device, failed ones too, in the order of tables.

    A forecast is made from the measured ceilings of the device.
    """
    groups = _by_configuration(records)
    results = [StepResult(group[0].subject.configuration, group, ceilings) for group in groups]
    prepare_forecasts([result.config for result in results if result.config is not None])
    rows = identities((result.subject, result.device_name) for result in results)
    for result, row in zip(results, rows, strict=True):
        result.identity = row
    for entry in StepResult.speed_ups():
        _find_baselines(results, entry.settings)
    return results


def _find_baselines(results: Sequence[StepResult], settings: tuple[str, ...]) -> None:
    """Give each result the baseline with which a speed-up, that of these settings, compares it.

    The baseline ran on the same device. Its value of settings[0] is the one that the setting's enum
    declares first, such as fp32 or naive attention. The other `settings` may differ too, and all
    settings besides these are equal. A result that has this first value itself gets no baseline.
    """
    baselines = {}
    for result in results:
        if _has_first_value(result.subject, settings[0]):
            baselines[apart_from(result.subject, *settings), result.device_name] = result
    for result in results:
        rest = apart_from(result.subject, *settings)
        # a run that failed before it could name its device is the baseline of runs on any device
        baseline = baselines.get((rest, result.device_name)) or baselines.get((rest, None))
        if baseline is not None and not _has_first_value(result.subject, settings[0]):
            result.baselines[settings] = baseline


def _has_first_value(subject: Subject, setting: str) -> bool:
    """Whether the setting has the first value of its type, as it is declared."""
    value: StrEnum | None = settings_of(subject)[setting]
    return value is not None and value is next(iter(type(value)))


def over_warmup(results: Sequence[StepResult]) -> list[StepResult]:
    """The results for which there is another that differs only in the number of warm-up steps."""
    counts = zip(results, _warmup_counts(results), strict=True)
    return [result for result, of_alike in counts if len(of_alike) > 1]


def steady(results: Sequence[StepResult]) -> list[StepResult]:
    """The results to judge a configuration by: of those that differ only in the number of warm-up
    steps, the one with the most.
    """
    counts = zip(results, _warmup_counts(results), strict=True)
    return [result for result, of_alike in counts if result.warmup_steps == max(of_alike)]


def _warmup_counts(results: Sequence[StepResult]) -> list[set[int]]:
    """For each result, the numbers of warm-up steps of those equal in all other settings."""
    others = [apart_from(result.subject, "warmup_steps") for result in results]
    counts: dict[tuple[object, ...], set[int]] = {}
    for rest, result in zip(others, results, strict=True):
        counts.setdefault(rest, set()).add(result.warmup_steps)
    return [counts[rest] for rest in others]


def apart_from(subject: Subject, *names: str) -> tuple[object, ...]:
    """A key of a run that is equal for runs which differ in nothing but the settings in `names` and
    the repeat.
    """
    left_out = ("repeat", *names)
    return tuple(value for name, value in settings_of(subject).items() if name not in left_out)


def _by_configuration(records: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """The records in groups of one configuration on one device, in the order of tables.

    A run that ended before it could name its device is in the group of the others if these name
    only one device.
    """
    kept = dict.fromkeys(records)  # the same record twice is still one process
    devices: dict[Subject, set[str | None]] = {}
    for record in kept:
        devices.setdefault(record.subject.configuration, {None}).add(record.device_name)
    groups: dict[tuple[Subject, str | None], list[RunRecord]] = {}
    for record in kept:
        subject = record.subject.configuration
        device_name = record.device_name if len(devices[subject]) > 2 else None
        groups.setdefault((subject, device_name), []).append(record)
    ordered = sorted(groups, key=lambda key: (*order(key[0]), key[1] is None, key[1] or ""))
    return [
        sorted(groups[key], key=lambda record: (record.subject.repeat, record.started_at))
        for key in ordered
    ]


def order(subject: Subject) -> tuple[Any, ...]:
    """Key to sort configurations by, in the order of tables: by size, then shape, context,
    precision, mode.

    Presets come in the order of their sizes, and values that have names in the order in which they
    are declared. What is not known of a watched loop comes first.
    """
    settings = settings_of(subject)
    sizes = list(SIZES)
    size = settings["size"]
    place = sizes.index(size) if size in sizes else len(sizes)
    return (place, size, *(_rank(settings[name]) for name in _SORTED_BY))


def _rank(value: StrEnum | int | None) -> int:
    """Sort key of a setting's value: for a name its place among the names as declared, a number as
    it is; an unknown value sorts first.
    """
    if isinstance(value, StrEnum):
        return list(type(value)).index(value)
    return -1 if value is None else value
