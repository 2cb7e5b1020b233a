"""Charts of steps, each made only where the records support it: bars by phase, and lines over a setting that varies."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import TypeVar

import pandas as pd

from cs336_systems.config import SETTINGS, Mode, Precision
from cs336_systems.record import Status
from cs336_systems.report.columns import Row
from cs336_systems.report.frame import SPEED_UPS, apart_from, describe, numbered, over_warmup, rows_of, steady
from cs336_systems.report.identity import SHAPE, distinguishing, file_name, identities, names_of, rows_without
from cs336_systems.report.plots.charts import (
    MARKERS,
    PHASE_COLOURS,
    PRECISION_COLOURS,
    REST_COLOUR,
    Axis,
    Bar,
    Chart,
    Curve,
    Line,
    Panel,
    Point,
    Style,
    along,
)
from cs336_systems.report.words import STEP_WORDS, significant, status_text

CONTEXT, WARMUP = "context_length", "warmup_steps"
AXES = ("size", *SHAPE, CONTEXT)
"""Settings that tell the panels and bars of a picture apart; all else is equal within one picture."""
ALONG = {
    CONTEXT: "context length (tokens)",
    **{name: setting.axis for name, setting in SETTINGS.items() if setting.axis},
    WARMUP: "warm-up steps",
}
"""Settings that run along the axis of a picture of their own where they vary, and what the axis is called."""
CHOICES = {name for settings in SPEED_UPS.values() for name in settings} - {"ranks", "shard_optimizer", "bucket_mib"}
"""Settings with named values, whose points no line joins; tables list them in the order in which they are declared."""
TIME = ("time (ms), mean ± std", "step_mean_ms", "step_std_ms")
SHOWN = {
    CONTEXT: (TIME,),
    WARMUP: (TIME, ("first measured step (ms)", "first_step_ms", ""), ("std/mean", "step_cv", "")),
}
USUAL = (TIME, ("peak of memory (GiB)", "peak_allocated_gib", ""))
"""What a picture over a setting shows, a row of panels for each: name of the axis, column of values, of deviations."""
WIDEST = 15.0
"""Most inches of a row of panels."""
MAX_BARS = 60
"""Most configurations in one picture by phase."""
MAX_COLUMNS = 5
"""Most panels, one for each size, beside each other in a picture over a setting."""
LEAST_REST = 0.02
"""Least share of a step outside of the phases that is drawn."""
BY_PHASE = "Time of a step by phase"
REST = "rest of the step"
PARTS = {str(phase): Style(colour=colour) for phase, colour in PHASE_COLOURS.items()} | {
    REST: Style(colour=REST_COLOUR)
}
LOOKS = {str(own): (PRECISION_COLOURS[own], mark) for own, mark in zip(Precision, MARKERS, strict=False)}
"""Colour and marker of the lines over a setting, by their names."""
Item = TypeVar("Item")


def step_charts(frame: pd.DataFrame) -> Iterator[Chart]:
    """The charts that the results support, each with a name of its own."""
    taken: Counter[str] = Counter()
    for chart in chain(_by_phase(steady(frame)), *(_over(frame, setting) for setting in ALONG)):
        taken[chart.name.casefold()] += 1
        count = taken[chart.name.casefold()]
        yield chart if count == 1 else replace(chart, name=f"{chart.name}_no{count}")


def _by_phase(frame: pd.DataFrame) -> Iterator[Chart]:
    """Lying bars of several configurations, as many in one picture as can be read."""
    if len(frame) > 1 and frame["step_mean_ms"].notna().any():
        for bars in _batches(phase_bars(rows_of(frame)), MAX_BARS):
            panel = Panel(x=Axis(names=[bar.name for bar in bars]), y=Axis(label="time (ms)"), bars=bars)
            yield Chart(
                name="step_time", title=BY_PHASE, settings=describe(frame), panels=[panel], size=(6.0, 0.0), legend=5,
                styles=PARTS, is_lying=True,
            )  # fmt: skip


def phase_bars(rows: Sequence[Row]) -> list[Bar]:
    """A bar for each row of results, with its time in words: its phases, and the rest of the step if noticeable."""
    bars = []
    for name, row in zip(names_of([row["identity"] for row in rows]), rows, strict=True):
        step_ms = row["step_mean_ms"]
        parts = {str(phase): row[f"{phase}_mean_ms"] for phase in PHASE_COLOURS}
        parts = {phase: time_ms for phase, time_ms in parts.items() if time_ms is not None}
        rest_ms = (step_ms or 0.0) - sum(parts.values())
        if step_ms is not None and rest_ms > LEAST_REST * step_ms:
            parts[REST] = rest_ms
        words = "" if step_ms is None else f"{significant(step_ms, 3)} ms"
        bars.append(Bar(name=name, parts=parts, words=words, failure=_failure(row) or ""))
    return bars


def _failure(row: Row) -> str | None:
    """How the run ended, if it failed."""
    return None if row["status"] == Status.OK else status_text(row["status"])


def _over(frame: pd.DataFrame, setting: str) -> Iterator[Chart]:
    """The charts over one setting, where it varies: one for each context, unless the context is what varies."""
    frame = over_warmup(frame) if setting == WARMUP else steady(frame)
    frame = frame if setting in CHOICES else frame.sort_values(setting, kind="stable")
    for part, name, also in _parts(frame, setting, "precision"):
        mode, rows = part["mode"].iloc[0], named_rows(part)
        for context in [None] if setting == CONTEXT else _values(rows, CONTEXT):
            sizes: dict[str, list[Row]] = {}
            for row in rows:
                if context in (None, row[CONTEXT]):
                    sizes.setdefault(row["name"], []).append(row)
            timed = (line for own in sizes.values() for line in lines(own, "precision", setting, *TIME[1:]))
            if any(len({point.x for point in line.known}) > 1 for line in timed):
                stem = f"{setting}_{mode}{f'_ctx{context}' if context else ''}{name}"
                settings = f"{f'context {context}, ' if context else ''}{describe(part, also)}"
                for some in _batches(list(sizes.items()), MAX_COLUMNS):
                    title = f"One {STEP_WORDS[Mode(mode)]} by {ALONG[setting]}"
                    yield setting_chart(stem, dict(some), setting, title, settings)


def named_rows(frame: pd.DataFrame) -> list[Row]:
    """The rows of results, each with the `name` of its size, and how it ended as `failure` if it failed.

    The name has as much of the shape as tells shapes of one size apart.
    """
    rows = rows_of(frame)
    others = [name for name in (rows[0]["identity"] if rows else ()) if name not in ("size", *SHAPE)]
    names = names_of([row["identity"] for row in rows], always=("size",), without=others)
    return [row | {"name": name, "failure": _failure(row)} for name, row in zip(names, rows, strict=True)]


def split(frame: pd.DataFrame, *across: str) -> Iterator[pd.DataFrame]:
    """Parts of the frame that agree in all but AXES and `across`, each fit for one picture.

    A failed row that names no device goes to the device of the rest, where there is only one.
    """
    devices = frame["device_name"].dropna().unique()
    named = frame["device_name"].fillna(devices[0]) if len(devices) == 1 else frame["device_name"]
    keys = (
        (None if pd.isna(device) else device, *apart_from(config, *AXES, *across))
        for config, device in zip(frame.index, named, strict=True)
    )
    return (part for _, part in frame.groupby(numbered(keys)))


def _parts(frame: pd.DataFrame, *across: str) -> Iterator[tuple[pd.DataFrame, str, Sequence[str]]]:
    """The parts of `split`, with what tells each from the others: as the end of a file's name that begins with mode and
    precision, and as names of settings for the text below the title."""
    parts = list(split(frame, *across))
    runs = [(part.index[0], next(iter(part["device_name"].dropna()), None)) for part in parts]
    rows = rows_without(identities(runs), (*AXES, *across))
    names = names_of(rows, always=(), without=("mode", "precision"))
    for part, name in zip(parts, names, strict=True):
        yield part, f"_{file_name(name)}" if name else "", distinguishing(rows, always=())


def _values(rows: Iterable[Row], key: str) -> list[str]:
    """The distinct values of one column, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def setting_chart(name: str, sizes: dict[str, list[Row]], setting: str, title: str, settings: str) -> Chart:
    """Lines by precision over a setting: a column of panels for each size, a row for each quantity that is known."""
    rows = [row for own in sizes.values() for row in own]
    shown = [own for own in SHOWN.get(setting, USUAL) if any(row[own[1]] for row in rows)]
    panels = [_panel(sizes[size], size, setting, *own) for own, size in product(shown, sizes)]
    most = max((len(panel.x.names) for panel in panels), default=0)
    width = min(max(2.8, 0.45 * most), WIDEST / len(sizes))  # no name is left out if there is room
    return Chart(
        name=name, title=title, settings=settings, panels=panels, columns=len(sizes), size=(width, 2.45), legend=4
    )


def _panel(rows: Sequence[Row], size: str, setting: str, label: str, value: str, error: str) -> Panel:
    """The lines of one size, whose points stand beside each other so that equal values are seen."""
    names, named = along(_values(rows, setting), lines(rows, "precision", setting, value, error))
    curves = []
    for index, line in enumerate(named):
        colour, marker = LOOKS[line.name]
        aside = 0.12 * (index - (len(named) - 1) / 2)
        dash = "" if setting in CHOICES else "-"
        curves.append(Curve(line=line, colour=colour, marker=marker, dash=dash, aside=aside))
    return Panel(x=Axis(label=ALONG[setting], names=names), y=Axis(label=label, from_zero=True), title=size,
                 curves=curves)  # fmt: skip


def lines(rows: Iterable[Row], by: str, x: str, value: str, error: str = "") -> list[Line]:
    """A line for each text in the column `by`, in the order of the first row of each, with deviations if known."""
    groups: dict[str, list[Point]] = {}
    for row in rows:
        point = Point(x=row[x], value=row[value], error=row[error] if error else None, failure=row["failure"])
        groups.setdefault(row[by], []).append(point)
    return [Line(name=name, points=tuple(points)) for name, points in groups.items()]
