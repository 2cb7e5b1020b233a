"""What the pictures show, computed from the frame of results; nothing here draws."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cs336_systems.config import SETTINGS, Phase, Precision
from cs336_systems.record import Status
from cs336_systems.report.frame import apart_from, rows_of, speed_ups
from cs336_systems.report.words import STATUS_WORDS

AXES = ("size", "d_model", "d_ff", "num_layers", "num_heads", "context_length")
"""Fields that run along the axes and the lines of a picture; all else is equal within one picture."""
SETTINGS_ALONG = {name: setting.axis for name, setting in SETTINGS.items() if setting.axis}
"""Numeric settings that run along the axis of a picture of their own where they vary, and what the axis is called."""
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value with its standard deviation; None is unknown, and `failure` then says why."""

    x: str | int
    value: float | None
    error: float | None = None
    failure: str | None = None
    """How the run ended, in words, where it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One step, in milliseconds, and the phases in it."""

    size: str
    context_length: int
    step: Point
    phases_ms: dict[Phase, float]

    @property
    def rest_ms(self) -> float:
        """What of the step lies in none of the phases: reading data, the host between two phases."""
        return max(0.0, (self.step.value or 0.0) - sum(self.phases_ms.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points that belong together, in order along the axis."""

    name: str
    points: tuple[Point, ...]

    @property
    def known(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.value is not None)

    @property
    def failed(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.failure is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLines:
    """One size in the warm-up study: step time and first measured step in milliseconds, std/mean as a fraction."""

    name: str
    step: Line
    first: Line
    cv: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingLines:
    """One size over one setting, a line per precision: step time in milliseconds, peak of allocated memory in GiB."""

    name: str
    times: tuple[Line, ...]
    peaks: tuple[Line, ...]


def steady(frame: pd.DataFrame) -> pd.DataFrame:
    """Of rows that differ only in their number of warm-up steps, the one with most."""
    most: dict[tuple[object, ...], int] = {}
    keys = [apart_from(config, "warmup_steps") for config in frame.index]
    for key, steps in zip(keys, frame["warmup_steps"], strict=True):
        most[key] = max(most.get(key, 0), int(steps))
    return frame.iloc[[i for i, key in enumerate(keys) if most[key] == frame["warmup_steps"].iloc[i]]]


def split(frame: pd.DataFrame, *across: str) -> Iterator[pd.DataFrame]:
    """Parts of the frame that agree in all but AXES and `across`, each fit for one picture.

    A failed row that names no device goes to the device of the rest, where there is only one.
    """
    devices = frame["device_name"].dropna().unique()
    only = devices[0] if len(devices) == 1 else None
    parts: dict[tuple[object, ...], list[int]] = {}
    for position, (config, device) in enumerate(zip(frame.index, frame["device_name"], strict=True)):
        key = (only if pd.isna(device) else device, *apart_from(config, *AXES, *across))
        parts.setdefault(key, []).append(position)
    for positions in parts.values():
        yield frame.iloc[positions]


def size_names(frame: pd.DataFrame) -> list[str]:
    """A name for the size of every row: as much of its shape is added as tells shapes of one name apart."""
    rows = list(frame[["size", *AXES[1:5]]].itertuples(index=False, name=None))
    shapes: dict[str, dict[tuple[object, ...], None]] = {}
    for size, *shape in rows:
        shapes.setdefault(size, {})[tuple(shape)] = None
    names: dict[tuple[object, ...], str] = {}
    for size, same in shapes.items():
        d_models, d_ffs, layers, heads = (len(set(values)) > 1 for values in zip(*same, strict=True))
        for d_model, d_ff, num_layers, num_heads in same:
            told = [size, *([f"{d_model}x{num_layers}"] if d_models or layers else []),
                    *([f"d_ff {d_ff}"] if d_ffs else []), *([f"{num_heads} heads"] if heads else [])]  # fmt: skip
            names[size, d_model, d_ff, num_layers, num_heads] = " ".join(told)
    return [names[row] for row in rows]


def phase_bars(frame: pd.DataFrame) -> list[Bar]:
    """The steps with their phases, by context length and in the order of the sizes."""
    bars = []
    for name, row in zip(size_names(frame), rows_of(frame), strict=True):
        means = {phase: row[f"{phase}_mean_ms"] for phase in PHASES}
        phases = {phase: mean for phase, mean in means.items() if mean is not None}
        context_length = int(row["context_length"])
        bars.append(Bar(size=name, context_length=context_length, step=_step(row, name), phases_ms=phases))
    return sorted(bars, key=lambda bar: bar.context_length)


def context_lines(frame: pd.DataFrame) -> list[Line]:
    """Step time in milliseconds against context length, one line per size."""
    return _lines((name, _step(row, int(row["context_length"]))) for name, row in _named(frame))


def speed_up_lines(frame: pd.DataFrame, precision: Precision) -> list[Line]:
    """Speed-up over fp32; a failure names the precision that failed.

    Against size, one line per context length; where there are more context lengths than sizes, `x` is the context
    length, an int, and there is one line per size.
    """
    gains = speed_ups(frame)
    both = frame.assign(**{str(name): gains[name].to_numpy() for name in gains.columns})
    pairs = [pair for pair in _named(both) if pair[1]["precision"] == precision and pair[1]["full_status"] is not None]
    along_contexts = len({row["context_length"] for _, row in pairs}) > len({name for name, _ in pairs})
    points = []
    for name, row in pairs if along_contexts else sorted(pairs, key=lambda pair: pair[1]["context_length"]):
        context = int(row["context_length"])
        failure = _twin_failure(Status(row["full_status"]), precision, Status(row["status"]))
        x = context if along_contexts else name
        point = Point(x=x, value=row["speed_up"], error=row["speed_up_std"], failure=failure)
        points.append((name if along_contexts else f"context {context}", point))
    return _lines(points)


def warmup_lines(frame: pd.DataFrame) -> list[WarmupLines]:
    """The warm-up study of a `warmup_frame`, one group of lines per size; one context length at a time."""
    named = list(_named(frame))
    steps = _lines((name, _step(row, int(row["warmup_steps"]))) for name, row in named)
    firsts = _lines((name, _point(row, "first_step_ms")) for name, row in named)
    cvs = _lines((name, _point(row, "step_cv")) for name, row in named)
    return [
        WarmupLines(name=step.name, step=step, first=first, cv=cv)
        for step, first, cv in zip(steps, firsts, cvs, strict=True)
    ]


def setting_lines(frame: pd.DataFrame, setting: str) -> list[SettingLines]:
    """Step time and peak of memory over one setting, one group of lines per size; one context length at a time."""
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, row in _named(frame.sort_values(setting, kind="stable")):
        groups.setdefault(name, []).append((row["precision"], row))
    return [
        SettingLines(
            name=name,
            times=tuple(_lines((precision, _step(row, int(row[setting]))) for precision, row in rows)),
            peaks=tuple(_lines((precision, _peak(row, int(row[setting]))) for precision, row in rows)),
        )
        for name, rows in groups.items()
    ]


def _named(frame: pd.DataFrame) -> Iterator[tuple[str, dict[str, Any]]]:
    return zip(size_names(frame), rows_of(frame), strict=True)


def _lines(points: Iterable[tuple[str, Point]]) -> list[Line]:
    grouped: dict[str, list[Point]] = {}
    for name, point in points:
        grouped.setdefault(name, []).append(point)
    return [Line(name=name, points=tuple(points)) for name, points in grouped.items()]


def _step(row: dict[str, Any], x: str | int) -> Point:
    return Point(x=x, value=row["step_mean_ms"], error=row["step_std_ms"], failure=_failure(row))


def _peak(row: dict[str, Any], x: int) -> Point:
    return Point(x=x, value=row["peak_allocated_gib"], failure=_failure(row))


def _point(row: dict[str, Any], name: str) -> Point:
    return Point(x=int(row["warmup_steps"]), value=row[name], failure=_failure(row))


def _twin_failure(full: Status, precision: Precision, status: Status) -> str | None:
    if full is status:
        return None if status is Status.OK else f"both {STATUS_WORDS[status]}"
    ends = {Precision.FP32: full, precision: status}
    return ", ".join(f"{which} {STATUS_WORDS[end]}" for which, end in ends.items() if end is not Status.OK)


def _failure(row: dict[str, Any]) -> str | None:
    status = Status(row["status"])
    return None if status is Status.OK else STATUS_WORDS[status]
