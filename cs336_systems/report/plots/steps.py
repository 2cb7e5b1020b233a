"""Charts of steps, each made only where the records support it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import TypeVar

import pandas as pd

from cs336_systems.config import SETTINGS, Mode, Precision
from cs336_systems.record import Status
from cs336_systems.report.columns import Row
from cs336_systems.report.frame import SPEED_UPS, apart_from, describe, numbered, over_warmup, rows_of, steady
from cs336_systems.report.identity import distinguishing, file_name, identities, names_of, rows_without
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
    Place,
    Point,
    Reference,
    Style,
    along,
    curves_of,
    doubling,
    shades,
    tints,
)
from cs336_systems.report.words import STEP_WORDS, significant, status_text

AXES = ("size", "d_model", "d_ff", "num_layers", "num_heads", "context_length")
"""Settings that run along the axes and the lines of a picture; all else is equal within one picture."""
Item = TypeVar("Item")

SETTINGS_ALONG = {name: setting.axis for name, setting in SETTINGS.items() if setting.axis}
"""Settings that run along the axis of a picture of their own where they vary, and what the axis is called."""
CHOICES = {name for settings in SPEED_UPS.values() for name in settings} - {"ranks", "shard_optimizer"}
"""Settings with named values, which tables list in the order in which they are declared."""
WARMUP = "warmup_steps"
WIDEST = 15.0
"""Most inches of a row of panels."""
MAX_ROWS = 4
"""Most rows of panels in one picture. It must not be larger, because matplotlib examines all panels that share an axis
again for each of them."""
MAX_SIZES = 20
"""Most sizes in one panel."""
MAX_COLUMNS = 5
"""Most columns of panels, one for each size, in a picture over a setting."""
LEAST_REST = 0.02
"""Least share of a step outside of the phases that is drawn."""
REST = "rest of the step"
WHOLE = "whole step ± standard deviation"
PARTS = {str(phase): Style(colour=colour) for phase, colour in PHASE_COLOURS.items()} | {
    REST: Style(colour=REST_COLOUR)
}
BLACK = "#000000"
LOOKS = {
    **{
        str(precision): (PRECISION_COLOURS[precision], mark)
        for precision, mark in zip(Precision, MARKERS, strict=False)
    },
    "mean ± standard deviation": (BLACK, "o"),
    "first measured step": (PRECISION_COLOURS[Precision.BF16], "D"),
    "std/mean": ("#888888", "s"),
}
"""Colour and marker of the lines over a setting, by their names."""
NAMED: dict[str, dict[Place, str]] = {SETTINGS_ALONG["checkpoint_blocks"]: {0: "none"}}
"""Words in place of a value, by what the axis is called."""
PEAK, LEAST = "peak of memory (GiB)", "least peak"
MILLISECONDS = Axis(label="time (ms)", unit="ms", from_zero=True)


def named_rows(frame: pd.DataFrame) -> list[Row]:
    """The rows of results, each with the `name` of its size, and how it ended as `failure` if it failed."""
    return [
        row | {"name": name, "failure": None if row["status"] == Status.OK else status_text(row["status"])}
        for name, row in zip(size_names(frame), rows_of(frame), strict=True)
    ]


def size_names(frame: pd.DataFrame) -> list[str]:
    """A name for the size of every row: as much of its shape is added as tells shapes of one name apart."""
    shape = ["d_model", "num_layers", "d_ff", "num_heads"]
    varied = frame.groupby("size")[shape].transform("nunique") > 1
    names = []
    for (size, *values), (d_models, layers, d_ffs, heads) in zip(
        frame[["size", *shape]].itertuples(index=False), varied.itertuples(index=False), strict=True
    ):
        d_model, num_layers, d_ff, num_heads = values
        parts = {f"{d_model}x{num_layers}": d_models or layers, f"d_ff {d_ff}": d_ffs, f"{num_heads} heads": heads}
        names.append(" ".join([size, *(part for part, is_needed in parts.items() if is_needed)]))
    return names


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


def line(name: str, rows: Iterable[Row], x: str, value: str, error: str = "") -> Line:
    """The values of one column over another, with their deviations."""
    points = (
        Point(
            x=row[x] if isinstance(row[x], str) else int(row[x]),
            value=row[value],
            error=row[error] if error else None,
            failure=row["failure"],
        )
        for row in rows
    )
    return Line(name=name, points=tuple(points))


def lines(rows: Iterable[Row], by: str, x: str, value: str, error: str = "") -> list[Line]:
    """A line for each text in the column `by`, in the order of the first row of each."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    return [line(name, own, x, value, error) for name, own in groups.items()]


def speed_up_lines(rows: Iterable[Row], precision: Precision) -> list[Line]:
    """Speed-up over fp32; a failure names the precision that failed.

    Against size, one line per context length; where there are more context lengths than sizes, `x` is the context
    length, an int, and there is one line per size.
    """
    pairs = [
        row | {"failure": _pair_failure(Status(row["fp32_status"]), precision, Status(row["status"]))}
        for row in rows
        if row["precision"] == precision and row["fp32_status"] is not None
    ]
    if len({row["context_length"] for row in pairs}) > len({row["name"] for row in pairs}):
        return lines(pairs, "name", "context_length", "speed_up", "speed_up_std")
    by_context = sorted(pairs, key=lambda row: row["context_length"])
    named = [row | {"context": f"context {row['context_length']}"} for row in by_context]
    return lines(named, "context", "name", "speed_up", "speed_up_std")


def _pair_failure(full: Status, precision: Precision, status: Status) -> str | None:
    if full is status:
        return None if status is Status.OK else f"both {status_text(status)}"
    ends = {Precision.FP32: full, precision: status}
    return ", ".join(f"{which} {status_text(end)}" for which, end in ends.items() if end is not Status.OK)


def step_charts(frame: pd.DataFrame) -> Iterator[Chart]:
    """The charts that the results support, each with a name of its own."""
    taken: Counter[str] = Counter()
    for chart in chain(_over_sizes(steady(frame)), _speed_ups(steady(frame)), _over_settings(frame)):
        taken[chart.name.casefold()] += 1
        count = taken[chart.name.casefold()]
        yield chart if count == 1 else replace(chart, name=f"{chart.name}_no{count}")


def _over_sizes(frame: pd.DataFrame) -> Iterator[Chart]:
    for part, name, also in _named(frame):
        if part["step_mean_ms"].notna().any() and len(part) > 1:
            rows, step, settings = named_rows(part), _step_words(part), describe(part, also)
            for page in pages(rows):
                yield phase_chart(_stem("step_time", part) + name, page, step, settings)
            over_contexts = lines(rows, "name", "context_length", "step_mean_ms", "step_std_ms")
            if any(len(line.points) > 1 and line.known for line in over_contexts):
                yield context_chart(_stem("context", part) + name, over_contexts, step, settings)


def _speed_ups(frame: pd.DataFrame) -> Iterator[Chart]:
    for part, name, also in _named(frame, "precision"):
        rows = named_rows(part)
        for precision in (Precision.TF32, Precision.BF16, Precision.FP16):
            found = speed_up_lines(rows, precision)
            if sum(len(line.known) for line in found) > 1:
                settings = describe(part[part["precision"].isin([Precision.FP32, precision])], also)
                stem = f"speed_up_{precision}_{part['mode'].iloc[0]}{name}"
                yield speed_up_chart(stem, found, precision, _step_words(part), settings)


def _over_settings(frame: pd.DataFrame) -> Iterator[Chart]:
    """Time, and below it the peak of memory or the spread, over each setting that varies; a chart per context."""
    for setting, axis in {**SETTINGS_ALONG, WARMUP: "warm-up steps"}.items():
        over, across = (over_warmup(frame), ()) if setting == WARMUP else (steady(frame), ("precision",))
        over = over if setting in CHOICES else over.sort_values(setting, kind="stable")
        for part, name, also in _named(over, setting, *across):
            stem = _stem("warmup", part) if setting == WARMUP else f"{setting}_{part['mode'].iloc[0]}"
            for context_length, own in part.groupby("context_length"):
                if own[setting].nunique() < 2:
                    continue
                rows = named_rows(own)
                sizes = {size: _panels([row for row in rows if row["name"] == size], setting) for size in _places(rows)}
                upper = [line for panels in sizes.values() for line in next(iter(panels.values()))]
                if any(len({point.x for point in line.known}) > 1 for line in upper):
                    title = f"One {_step_words(own)} by {axis}"
                    settings = f"context {context_length}, {describe(own, also)}"
                    for some in _batches(list(sizes.items()), MAX_COLUMNS):
                        yield setting_chart(f"{stem}_ctx{context_length}{name}", dict(some), axis, title, settings)


def _panels(rows: Sequence[Row], setting: str) -> dict[str, list[Line]]:
    """The lines of one size by what the y axis of their panel is called."""
    if setting == WARMUP:
        mean = line("mean ± standard deviation", rows, setting, "step_mean_ms", "step_std_ms")
        first = line("first measured step", rows, setting, "first_step_ms")
        in_percent = [row | {"step_cv": row["step_cv"] and 100 * row["step_cv"]} for row in rows]
        return {"time (ms)": [mean, first], "std/mean (%)": [line("std/mean", in_percent, setting, "step_cv")]}
    return {
        "time (ms), mean ± std": lines(rows, "precision", setting, "step_mean_ms", "step_std_ms"),
        PEAK: lines(rows, "precision", setting, "peak_allocated_gib"),
    }


def _named(frame: pd.DataFrame, *across: str) -> Iterator[tuple[pd.DataFrame, str, Sequence[str]]]:
    """The parts of `split`, with what tells each from the others: as the end of a file's name that begins with mode and
    precision, and as names of settings for the text below the title."""
    parts = list(split(frame, *across))
    runs = [(part.index[0], next(iter(part["device_name"].dropna()), None)) for part in parts]
    rows = rows_without(identities(runs), (*AXES, *across))
    names = names_of(rows, always=(), without=("mode", "precision"))
    for part, name in zip(parts, names, strict=True):
        yield part, f"_{file_name(name)}" if name else "", distinguishing(rows, always=())


def pages(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The bars of each picture: as many sizes as a panel has room for, and as many context lengths as a picture has."""
    places = _places(rows)
    panels: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        panels.setdefault((places[row["name"]] // MAX_SIZES, row["context_length"]), []).append(row)
    for _, keys in groupby(sorted(panels), lambda key: key[0]):
        for page in _batches(list(keys), MAX_ROWS * _columns(min(len(places), MAX_SIZES))):
            yield [row for key in page for row in panels[key]]


def _places(rows: Iterable[Row]) -> dict[str, int]:
    """Where along an axis each size stands."""
    return {name: place for place, name in enumerate(dict.fromkeys(row["name"] for row in rows))}


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _stem(kind: str, part: pd.DataFrame) -> str:
    return f"{kind}_{part['mode'].iloc[0]}_{part['precision'].iloc[0]}"


def _step_words(part: pd.DataFrame) -> str:
    return STEP_WORDS[Mode(part["mode"].iloc[0])]


def phase_chart(name: str, rows: Sequence[Row], step: str, settings: str) -> Chart:
    """Stacked bars by phase, a panel for each context length; the deviation is that of the whole step."""
    places = list(_places(rows))
    contexts = dict.fromkeys(row["context_length"] for row in rows)
    panels = []
    for context in contexts:
        own = [row for row in rows if row["context_length"] == context]
        points = [Point(x=row["name"], value=row["step_mean_ms"], error=row["step_std_ms"]) for row in own]
        whole = Curve(line=Line(name=WHOLE, points=tuple(points)), colour=BLACK, marker="_", dash="", size=4, width=1)
        bars = [_phase_bar(row) for row in own]
        x = Axis(names=places)
        panels.append(Panel(x=x, y=MILLISECONDS, title=f"context {context}", bars=bars, curves=[whole]))
    columns = min(len(contexts), _columns(len(places)))
    return Chart(
        name=name, title=f"Time of one {step} by phase", settings=settings, panels=panels, columns=columns,
        size=(_panel_width(len(places)), 3.2), legend=5 if columns * _panel_width(len(places)) > 9 else 3, styles=PARTS,
        is_shared=True,
    )  # fmt: skip


def _phase_bar(row: Row) -> Bar:
    step_ms = row["step_mean_ms"]
    parts = {str(phase): row[f"{phase}_mean_ms"] for phase in PHASE_COLOURS}
    parts = {phase: time_ms for phase, time_ms in parts.items() if time_ms is not None}
    rest_ms = (step_ms or 0.0) - sum(parts.values())
    if step_ms is not None and rest_ms > LEAST_REST * step_ms:
        parts[REST] = rest_ms
    words = "" if step_ms is None else significant(step_ms, 3)
    return Bar(name=row["name"], parts=parts, words=words, failure=row["failure"] or "")


def _panel_width(num_sizes: int) -> float:
    return max(2.4, 0.62 * num_sizes + 0.6)


def _columns(num_sizes: int) -> int:
    """Panels of so many bars that stand beside each other."""
    return max(1, int(WIDEST / _panel_width(num_sizes)))


def context_chart(name: str, lines: Sequence[Line], step: str, settings: str) -> Chart:
    """Step time against context length, a line for each size, both axes logarithmic."""
    x = doubling({float(point.x) for line in lines for point in line.points}, "context length (tokens)")
    y = Axis(label="time (ms), mean ± standard deviation", unit="ms", is_log=True)
    panel = Panel(x=x, y=y, curves=curves_of(lines, shades(len(lines))))
    title = f"Time of one {step} against context length"
    return Chart(name=name, title=title, settings=settings, panels=[panel], size=(7.1, 4.2))


def speed_up_chart(name: str, lines: Sequence[Line], precision: Precision, step: str, settings: str) -> Chart:
    """Speed-up over fp32 against size, a line for each context length, or the other way round."""
    is_over_contexts = any(isinstance(point.x, int) for line in lines for point in line.points)
    names, named = along(values_along(lines), lines)
    panel = Panel(
        x=Axis(label="context length (tokens)" if is_over_contexts else "size", names=names),
        y=Axis(label=f"fp32 time / {precision} time, ± standard deviation", unit="times", from_zero=True),
        curves=curves_of(named, tints(PRECISION_COLOURS[precision], len(lines))),
        references=[Reference(value=1, colour="#888888")],
    )
    title = f"Speed-up of one {step}, {precision} over fp32"
    return Chart(name=name, title=title, settings=settings, panels=[panel], size=(7.1, 4.1))


def setting_chart(
    name: str, sizes: Mapping[str, Mapping[str, Sequence[Line]]], axis: str, title: str, settings: str
) -> Chart:
    """The lines of each size, by what the y axis is called; what is known of no size has no panel."""
    every = next(iter(sizes.values()))
    labels = [label for label in every if any(line.known for panels in sizes.values() for line in panels[label])]
    panels = [_over_values(panels[label], label, axis, size) for label in labels for size, panels in sizes.items()]
    most = max((len(panel.x.names) for panel in panels), default=0)
    width = min(max(2.8, 0.45 * most), WIDEST / len(sizes))  # no name is left out if there is room
    return Chart(
        name=name, title=title, settings=settings, panels=panels, columns=len(sizes), size=(width, 2.45), legend=4,
        styles={name: Style(colour=colour) for name, (colour, _) in LOOKS.items()},
    )  # fmt: skip


def values_along(lines: Sequence[Line]) -> list[str | float]:
    """The values along the axis: numbers in order, names in the order of the points."""
    found = dict.fromkeys(point.x for line in lines for point in line.points)
    return sorted(found, key=float) if all(isinstance(value, int) for value in found) else list(found)


def _over_values(lines: Sequence[Line], label: str, axis: str, title: str) -> Panel:
    """Lines over numbers, bars over choices, beside each other, so that equal values are seen."""
    values = values_along(lines)
    is_number = all(isinstance(value, int) for value in values)
    names, named = along(values, lines, NAMED.get(axis, {}))
    width = 0.12 if is_number else 0.8 / len(lines)
    bars, curves = [], []
    for index, own in enumerate(named):
        colour, marker = LOOKS[own.name]
        aside = width * (index - (len(lines) - 1) / 2)
        if is_number:
            curves.append(Curve(line=own, colour=colour, marker=marker, aside=aside))
            continue
        with_error = tuple(point for point in own.known if point.error is not None)
        if with_error:
            known = replace(own, points=with_error)
            curves.append(Curve(line=known, colour="#888888", dash="", label="", aside=aside))
        for point in own.points:
            parts = {} if point.value is None else {own.name: point.value}
            failure = f"{own.name}: {point.failure}" if point.failure and len(lines) > 1 else point.failure or ""
            bars.append(Bar(name=str(point.x), parts=parts, failure=failure, aside=aside, width=0.9 * width))
    if (axis, label) == (SETTINGS_ALONG["checkpoint_blocks"], PEAK):
        curves += [_least(curve) for curve in curves if len(curve.line.known) > 1]
    unit = label.partition("(")[2].partition(")")[0]
    return Panel(x=Axis(label=axis, names=names), y=Axis(label=label, unit=unit, from_zero=True), title=title,
                 bars=bars, curves=curves)  # fmt: skip


def _least(curve: Curve) -> Curve:
    """A ring around the point of the curve with the least value."""
    least = min(curve.line.known, key=lambda point: point.value or 0.0)
    line = Line(name=LEAST, points=(replace(least, error=None),))
    return Curve(line=line, colour=BLACK, marker="o", dash="", size=11, is_hollow=True, aside=curve.aside)
