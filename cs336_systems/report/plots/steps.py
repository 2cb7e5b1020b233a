"""Pictures of the results, each written only where the records support it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from cs336_systems.config import SETTINGS, Mode, Precision
from cs336_systems.files import write_atomically
from cs336_systems.record import RunRecord
from cs336_systems.report.frame import SPEED_UPS, describe, over_warmup, steady, to_frame
from cs336_systems.report.identity import apart_from, distinguishing, file_name, identities, names_of
from cs336_systems.report.numbers import significant
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.series import AXES, Line, Row, line, lines, named_rows, speed_up_lines, split
from cs336_systems.report.plots.settings import draw_over_setting
from cs336_systems.report.words import STEP_WORDS

Item = TypeVar("Item")

SETTINGS_ALONG = {name: setting.axis for name, setting in SETTINGS.items() if setting.axis}
"""Settings that run along the axis of a picture of their own where they vary, and what the axis is called."""
CHOICES = {name for settings in SPEED_UPS.values() for name in settings}
"""Settings with named values, which tables list in the order in which they are declared."""
WARMUP = "warmup_steps"
WIDEST = 15.0
"""Inches that a row of panels may take."""
MAX_ROWS = 4
"""Of panels in one picture. All that share an axis are looked at again for each, so a picture must not grow further."""
MAX_SIZES = 20
"""In one panel."""
MAX_COLUMNS = 5
"""Of panels, one for each size, in a picture over a setting."""
LEAST_REST = 0.02
"""Part of a step outside of the phases that is drawn."""


def write_plots(records: Iterable[RunRecord], directory: Path) -> list[Path]:
    """Write the pictures that the records support into `directory`/plots and return their paths."""
    paths: list[Path] = []
    for stem, draw in pictures(to_frame(records)):
        (directory / "plots").mkdir(parents=True, exist_ok=True)
        paths.append(directory / "plots" / f"{stem}.png")
        write_atomically(paths[-1], drawing.to_png(draw()))
    return paths


def pictures(frame: pd.DataFrame) -> Iterator[tuple[str, partial[Figure]]]:
    """The pictures that the results support: the name of each file without an ending, and what draws it from what."""
    taken: Counter[str] = Counter()
    for stem, draw in chain(
        _step_pictures(steady(frame)),
        _speed_up_pictures(steady(frame)),
        _setting_pictures(frame),
    ):
        taken[stem.casefold()] += 1
        number = f"_no{taken[stem.casefold()]}" if taken[stem.casefold()] > 1 else ""
        yield f"{stem}{number}", draw


def _step_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, partial[Figure]]]:
    for part, name, also in _named(frame):
        if part["step_mean_ms"].notna().any() and len(part) > 1:
            rows, step, settings = named_rows(part), _step_words(part), describe(part, also)
            for page in pages(rows):
                yield _stem("step_time", part) + name, partial(draw_phases, page, step, settings)
            over_contexts = lines(rows, "name", "context_length", "step_mean_ms", "step_std_ms")
            if any(len(line.points) > 1 and line.known for line in over_contexts):
                yield _stem("context", part) + name, partial(draw_contexts, over_contexts, step, settings)


def _speed_up_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, partial[Figure]]]:
    for part, name, also in _named(frame, "precision"):
        rows = named_rows(part)
        for precision in (Precision.TF32, Precision.BF16, Precision.FP16):
            found = speed_up_lines(rows, precision)
            if sum(len(line.known) for line in found) > 1:
                settings = describe(part[part["precision"].isin([Precision.FP32, precision])], also)
                stem = f"speed_up_{precision}_{part['mode'].iloc[0]}{name}"
                yield stem, partial(draw_speed_ups, found, precision, _step_words(part), settings)


def _setting_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, partial[Figure]]]:
    """Time, and below it the peak of memory or the spread, over each setting that varies; a picture per context."""
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
                        draw = partial(draw_over_setting, dict(some), setting, axis, title, settings)
                        yield f"{stem}_ctx{context_length}{name}", draw


def _panels(rows: Sequence[Row], setting: str) -> dict[str, list[Line]]:
    """The lines of one size by what the y axis of their panel is called."""
    if setting == WARMUP:
        mean = line("mean ± standard deviation", rows, setting, "step_mean_ms", "step_std_ms")
        first = line("first measured step", rows, setting, "first_step_ms")
        in_percent = [row | {"step_cv": row["step_cv"] and 100 * row["step_cv"]} for row in rows]
        return {"time (ms)": [mean, first], "std/mean (%)": [line("std/mean", in_percent, setting, "step_cv")]}
    return {
        "time (ms), mean ± std": lines(rows, "precision", setting, "step_mean_ms", "step_std_ms"),
        "peak of memory (GiB)": lines(rows, "precision", setting, "peak_allocated_gib"),
    }


def _named(frame: pd.DataFrame, *across: str) -> Iterator[tuple[pd.DataFrame, str, Sequence[str]]]:
    """The parts of `split`, with what tells each from the others: as the end of a file's name that begins with mode and
    precision, and as names of settings for the text below the title."""
    parts = list(split(frame, *across))
    runs = [(part.index[0], next(iter(part["device_name"].dropna()), None)) for part in parts]
    rows = apart_from(identities(runs), (*AXES, *across))
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


def draw_phases(rows: Sequence[Row], step: str, settings: str) -> Figure:
    """Stacked bars by phase, one panel per context length; the error bar is the whole step's standard deviation."""
    contexts, places = list(dict.fromkeys(row["context_length"] for row in rows)), _places(rows)
    num_columns = min(len(contexts), _columns(len(places)))
    num_rows = -(-len(contexts) // num_columns)
    width = max(6.0, num_columns * _panel_width(len(places)))
    figure = drawing.new_figure(width, 3.3 * num_rows + 1.1, f"Time of one {step} by phase", settings)
    grid = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False)
    panels = dict(zip(contexts, grid.flat, strict=False))
    highest = max((row["step_mean_ms"] or 0) + (row["step_std_ms"] or 0) for row in rows)
    grid[0, 0].set_ylim(0, highest * 1.12 or 1.0)
    handles: dict[str, Any] = {}
    for context_length, panel in panels.items():
        drawing.style(panel)
        panel.set_title(f"context {context_length}", fontsize=10)
        drawing.categories(panel, list(places), MAX_SIZES)
    for row in rows:
        handles |= _draw_bar(panels[row["context_length"]], places[row["name"]], row)
    for panel in grid.flat[len(contexts) :]:
        panel.remove()
    for panel in grid[:, 0]:
        panel.set_ylabel("time (ms)", fontsize=9)
    drawing.legend_below(figure, handles, 5 if width > 9 else 3, fontsize=9)
    return figure


def _panel_width(num_sizes: int) -> float:
    return max(2.4, 0.62 * num_sizes + 0.6)


def _columns(num_sizes: int) -> int:
    """Panels of so many bars that stand beside each other."""
    return max(1, int(WIDEST / _panel_width(num_sizes)))


def _draw_bar(panel: Axes, x: int, row: Row) -> dict[str, Any]:
    step_ms, error_ms = row["step_mean_ms"], row["step_std_ms"] or 0.0
    parts = {str(phase): (row[f"{phase}_mean_ms"], colour) for phase, colour in drawing.PHASE_COLOURS.items()}
    rest_ms = (step_ms or 0.0) - sum(time_ms or 0.0 for time_ms, _ in parts.values())
    if step_ms is not None and rest_ms > LEAST_REST * step_ms:
        parts["rest of the step"] = rest_ms, drawing.REST_COLOUR
    handles: dict[str, Any] = {}
    bottom = 0.0
    for name, (time_ms, colour) in parts.items():
        if time_ms is not None:
            handles[name] = panel.bar(x, time_ms, 0.7, bottom, color=colour)
            bottom += time_ms
    if step_ms is not None:
        handles["whole step ± standard deviation"] = panel.errorbar(
            x, step_ms, error_ms, color="black", capsize=3, linewidth=1, marker="_", markersize=4
        )
        above = (x, step_ms + error_ms)
        panel.annotate(significant(step_ms, 3), above, (0, 3), textcoords="offset points", ha="center", fontsize=8)
    if row["failure"] is not None:
        drawing.write_upright(panel, x, row["failure"])
    return handles


def draw_contexts(lines: Sequence[Line], step: str, settings: str) -> Figure:
    """Step time against context length, one line per size, both axes logarithmic."""
    figure = drawing.new_figure(7.6, 5.2, f"Time of one {step} against context length", settings)
    panel = figure.subplots()
    drawing.style(panel)
    ticks = sorted({int(point.x) for line in lines for point in line.points})
    drawing.doubling_axis(panel, ticks)
    panel.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    drawing.draw_lines(panel, lines, {tick: tick for tick in ticks}, drawing.shades(len(lines)))
    panel.set_xlabel("context length (tokens)", fontsize=9)
    panel.set_ylabel("time (ms), mean ± standard deviation", fontsize=9)
    return figure


def draw_speed_ups(lines: Sequence[Line], precision: Precision, step: str, settings: str) -> Figure:
    """Speed-up over fp32 against size, one line per context length, or the other way round (see `speed_up_lines`)."""
    figure = drawing.new_figure(7.6, 5.0, f"Speed-up of one {step}, {precision} over fp32", settings)
    panel = figure.subplots()
    drawing.style(panel)
    is_over_contexts = any(isinstance(point.x, int) for line in lines for point in line.points)
    places = list(dict.fromkeys(point.x for line in lines for point in line.points))
    places = sorted(places, key=int) if is_over_contexts else places
    drawing.categories(panel, [str(place) for place in places])
    panel.axhline(1, color="#888888", linewidth=1, linestyle="--", zorder=1)
    colours = drawing.tints(drawing.PRECISION_COLOURS[precision], len(lines))
    drawing.draw_lines(panel, lines, {place: index for index, place in enumerate(places)}, colours)
    panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
    panel.set_xlabel("context length (tokens)" if is_over_contexts else "size", fontsize=9)
    panel.set_ylabel(f"fp32 time / {precision} time, ± standard deviation", fontsize=9)
    return figure
