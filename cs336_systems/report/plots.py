"""Pictures of the results, each written only where the records support it."""

from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from cs336_systems.config import Mode, Precision
from cs336_systems.json_files import write_atomically
from cs336_systems.record import RunRecord
from cs336_systems.report import drawing
from cs336_systems.report.formats import significant
from cs336_systems.report.frame import to_frame, warmup_frame
from cs336_systems.report.series import (
    PHASES,
    Bar,
    Line,
    WarmupLines,
    context_lines,
    phase_bars,
    speed_up_lines,
    split,
    steady,
    warmup_lines,
)
from cs336_systems.report.words import STEP_WORDS, describe

WIDEST = 15.0
"""Inches that a row of panels may take."""


def write_plots(records: Iterable[RunRecord], directory: Path) -> list[Path]:
    """Write the pictures that the records support into `directory`/plots and return their paths."""
    kept = tuple(records)
    frame = steady(to_frame(kept))
    pictures = [*_step_pictures(frame), *_speed_up_pictures(frame), *_warmup_pictures(warmup_frame(kept))]
    paths: list[Path] = []
    for stem, figure in pictures:
        (directory / "plots").mkdir(parents=True, exist_ok=True)
        taken = sum(path.stem == stem or path.stem.startswith(f"{stem}_no") for path in paths)
        paths.append(directory / "plots" / (f"{stem}_no{taken + 1}.png" if taken else f"{stem}.png"))
        write_atomically(paths[-1], drawing.to_png(figure))
    return paths


def _step_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    for part in split(frame):
        if part["step_mean_ms"].notna().any() and len(part) > 1:
            yield _stem("step_time", part), draw_phases(phase_bars(part), _step_words(part), describe(part))
            lines = context_lines(part)
            if any(len(line.points) > 1 and line.known for line in lines):
                yield _stem("context", part), draw_contexts(lines, _step_words(part), describe(part))


def _speed_up_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    for part in split(frame, "precision"):
        for precision in (Precision.TF32, Precision.BF16, Precision.FP16):
            lines = speed_up_lines(part, precision)
            if any(line.known for line in lines):
                both = part[part["precision"].isin([Precision.FP32, precision])]
                stem = f"speed_up_{precision}_{part['mode'].iloc[0]}"
                yield stem, draw_speed_ups(lines, precision, _step_words(part), describe(both))


def _warmup_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    for part in split(frame, "warmup_steps"):
        for context_length, rows in part.groupby("context_length"):
            sizes = warmup_lines(rows)
            if any(size.step.known for size in sizes):
                settings = f"context {context_length}, {describe(rows)}"
                yield f"{_stem('warmup', rows)}_ctx{context_length}", draw_warmup(sizes, _step_words(rows), settings)


def _stem(kind: str, part: pd.DataFrame) -> str:
    return f"{kind}_{part['mode'].iloc[0]}_{part['precision'].iloc[0]}"


def _step_words(part: pd.DataFrame) -> str:
    return STEP_WORDS[Mode(part["mode"].iloc[0])]


def draw_phases(bars: list[Bar], step: str, settings: str) -> Figure:
    """Stacked bars by phase, one panel per context length; the error bar is the whole step's standard deviation."""
    contexts = list(dict.fromkeys(bar.context_length for bar in bars))
    names = list(dict.fromkeys(bar.size for bar in bars))
    panel_width = max(2.4, 0.62 * len(names) + 0.6)
    columns = max(1, min(len(contexts), int(WIDEST / panel_width)))
    rows = -(-len(contexts) // columns)
    width = max(6.0, columns * panel_width)
    figure = drawing.new_figure(width, 3.3 * rows + 1.1, f"Time of one {step} by phase", settings)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten().tolist()
    top = max((bar.step.value or 0) + (bar.step.error or 0) for bar in bars) * 1.12
    handles: dict[str, Any] = {}
    for panel, context in zip(panels, contexts, strict=False):
        drawing.style(panel)
        panel.set_title(f"context {context}", fontsize=10)
        panel.set_ylim(0, top)
        drawing.categories(panel, names)
        for bar in (bar for bar in bars if bar.context_length == context):
            handles |= _draw_bar(panel, names.index(bar.size), bar)
    for panel in panels[len(contexts) :]:
        panel.remove()
    for row in range(rows):
        panels[row * columns].set_ylabel("time (ms)", fontsize=9)
    ncols = 5 if width > 9 else 3
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=ncols,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_bar(panel: Axes, x: int, bar: Bar) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    bottom = 0.0
    for phase in PHASES:
        if phase in bar.phases_ms:
            colour = drawing.PHASE_COLOURS[phase]
            handles[str(phase)] = panel.bar(x, bar.phases_ms[phase], 0.7, bottom, color=colour)
            bottom += bar.phases_ms[phase]
    if bar.step.value is not None:
        if bar.rest_ms > 0.02 * bar.step.value:
            handles["rest of the step"] = panel.bar(x, bar.rest_ms, 0.7, bottom, color=drawing.REST_COLOUR)
        error = bar.step.error or 0.0
        handles["whole step ± standard deviation"] = panel.errorbar(
            x, bar.step.value, error, color="black", capsize=3, linewidth=1, marker="_", markersize=4
        )
        above = (x, bar.step.value + error)
        value = significant(bar.step.value, 3)
        panel.annotate(value, above, (0, 3), textcoords="offset points", ha="center", fontsize=8)
    if bar.step.failure is not None:
        drawing.write_upright(panel, x, bar.step.failure)
    return handles


def draw_contexts(lines: list[Line], step: str, settings: str) -> Figure:
    """Step time against context length, one line per size, both axes logarithmic."""
    figure = drawing.new_figure(7.6, 5.2, f"Time of one {step} against context length", settings)
    panel = figure.subplots()
    drawing.style(panel)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({int(point.x) for line in lines for point in line.points})
    positions: dict[str | int, float] = {tick: tick for tick in ticks}
    handles = _draw_lines(panel, lines, positions, drawing.shades(len(lines)))
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
    failures = drawing.failure_rows(lines)
    low, high = panel.get_ylim()
    band = drawing.failure_band(len(failures))
    panel.set_ylim(low / (high / low) ** (band / (1 - band)), high)  # room for the failures below the lines
    drawing.draw_failures(panel, failures, positions)
    panel.set_xlabel("context length (tokens)", fontsize=9)
    panel.set_ylabel("time (ms), mean ± standard deviation", fontsize=9)
    _legend(panel, handles)
    return figure


def draw_speed_ups(lines: list[Line], precision: Precision, step: str, settings: str) -> Figure:
    """Speed-up over fp32 against size, one line per context length."""
    figure = drawing.new_figure(7.6, 5.0, f"Speed-up of one {step}, {precision} over fp32", settings)
    panel = figure.subplots()
    drawing.style(panel)
    named = [Line(name=f"context {line.name}", points=line.points) for line in lines]
    names = list(dict.fromkeys(str(point.x) for line in named for point in line.points))
    positions: dict[str | int, float] = {name: index for index, name in enumerate(names)}
    drawing.categories(panel, names)
    panel.axhline(1, color="#888888", linewidth=1, linestyle="--", zorder=1)
    colours = drawing.tints(drawing.PRECISION_COLOURS[precision], len(named))
    handles = _draw_lines(panel, named, positions, colours)
    failures = drawing.failure_rows(named)
    band = drawing.failure_band(len(failures))
    least = min(point.value - (point.error or 0.0) for line in named for point in line.known if point.value is not None)
    top = panel.get_ylim()[1]
    room = (least - band * top) / (1 - band)  # the bottom that leaves the band below the least point
    panel.set_ylim(min(0.0, room), top)
    drawing.draw_failures(panel, failures, positions)
    panel.set_xlabel("size", fontsize=9)
    panel.set_ylabel(f"fp32 time / {precision} time, ± standard deviation", fontsize=9)
    _legend(panel, handles)
    return figure


def draw_warmup(sizes: list[WarmupLines], step: str, settings: str) -> Figure:
    """Above, mean, standard deviation and first measured step; below, std/mean; by number of warm-up steps."""
    width = max(5.2, 2.5 * len(sizes) + 0.6)
    figure = drawing.new_figure(width, 6.0, f"Effect of warm-up on the time of one {step}", settings)
    panels = figure.subplots(2, len(sizes), squeeze=False)
    handles: dict[str, Any] = {}
    for size, upper, lower in zip(sizes, panels[0], panels[1], strict=True):
        upper.set_title(drawing.inert(size.name), fontsize=10)
        handles |= _draw_warmup_times(upper, size)
        _draw_warmup_spread(lower, size)
    panels[0][0].set_ylabel("time (ms)", fontsize=9)
    panels[1][0].set_ylabel("std/mean (%)", fontsize=9)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _draw_warmup_times(panel: Axes, size: WarmupLines) -> dict[str, Any]:
    counts = _warmup_axis(panel, size)
    left: dict[str | int, float] = {count: index - 0.14 for index, count in enumerate(counts)}
    mean = drawing.draw_line(panel, size.step, left, "black", "o", joined=False)
    firsts = [(counts.index(int(point.x)) + 0.14, point.value or 0.0) for point in size.first.known]
    first = panel.plot(
        [x for x, _ in firsts], [value for _, value in firsts], linestyle="none", marker="D", markersize=6,
        markerfacecolor="white", color=drawing.PRECISION_COLOURS[Precision.BF16], zorder=4,
    )[0]  # fmt: skip
    panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
    for point in size.step.failed:
        drawing.write_upright(panel, counts.index(int(point.x)), point.failure or "")
    return {"mean ± standard deviation": mean, "first measured step": first}


def _draw_warmup_spread(panel: Axes, size: WarmupLines) -> None:
    counts = _warmup_axis(panel, size)
    percents = {counts.index(int(point.x)): 100 * (point.value or 0.0) for point in size.cv.known}
    bars = panel.bar(list(percents), list(percents.values()), 0.6, color="#888888")
    panel.bar_label(bars, [significant(percent, 2) for percent in percents.values()], fontsize=8, padding=2)
    panel.set_ylim(0, max([*percents.values(), 1e-9]) * 1.18)
    for point in size.step.failed:
        drawing.write_upright(panel, counts.index(int(point.x)), point.failure or "")
    panel.set_xlabel("warm-up steps", fontsize=9)


def _warmup_axis(panel: Axes, size: WarmupLines) -> list[int]:
    counts = sorted({int(point.x) for point in size.step.points})
    drawing.style(panel)
    drawing.categories(panel, [str(count) for count in counts])
    return counts


def _draw_lines(
    panel: Axes, lines: list[Line], positions: dict[str | int, float], colours: list[drawing.Colour]
) -> dict[str, Any]:
    return {
        line.name: drawing.draw_line(panel, line, positions, colour, marker)
        for line, colour, marker in zip(lines, colours, cycle(drawing.MARKERS), strict=False)
        if line.known
    }


def _legend(panel: Axes, handles: dict[str, Any]) -> None:
    """Legend to the right, in the order in which growing values stand above each other."""
    names = [drawing.inert(name) for name in reversed(handles)]
    shown = list(handles.values())[::-1]
    panel.legend(shown, names, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
