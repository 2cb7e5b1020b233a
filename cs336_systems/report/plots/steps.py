"""Pictures of the results, each written only where the records support it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, groupby
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from cs336_systems.config import Mode, Precision
from cs336_systems.files import write_atomically
from cs336_systems.record import RunRecord
from cs336_systems.report.frame import to_frame, warmup_frame
from cs336_systems.report.identity import apart_from, file_name, identities, names_of, telling
from cs336_systems.report.numbers import significant
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.series import (
    AXES,
    PHASES,
    SETTINGS_ALONG,
    Bar,
    Line,
    context_lines,
    phase_bars,
    setting_lines,
    speed_up_lines,
    split,
    steady,
    warmup_lines,
)
from cs336_systems.report.plots.settings import draw_setting, draw_warmup
from cs336_systems.report.words import STEP_WORDS, describe

Item = TypeVar("Item")

WIDEST = 15.0
"""Inches that a row of panels may take."""
MAX_ROWS = 4
"""Of panels in one picture. All that share an axis are looked at again for each, so a picture must not grow further."""
MAX_SIZES = 20
"""In one panel."""
TICKS_APART = 1 / 14
"""Of a logarithmic axis: what the label of a tick needs."""
MAX_COLUMNS = 5
"""Of panels, one for each size, in a picture that has two rows."""


def write_plots(records: Iterable[RunRecord], directory: Path) -> list[Path]:
    """Write the pictures that the records support into `directory`/plots and return their paths."""
    kept = tuple(records)
    frame = steady(to_frame(kept))
    paths: list[Path] = []
    taken: Counter[str] = Counter()
    for stem, figure in chain(
        _step_pictures(frame),
        _speed_up_pictures(frame),
        _setting_pictures(frame),
        _warmup_pictures(warmup_frame(kept)),
    ):
        (directory / "plots").mkdir(parents=True, exist_ok=True)
        taken[stem.casefold()] += 1
        number = f"_no{taken[stem.casefold()]}" if taken[stem.casefold()] > 1 else ""
        paths.append(directory / "plots" / f"{stem}{number}.png")
        write_atomically(paths[-1], drawing.to_png(figure))
    return paths


def _step_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    for part, name, told in _named(frame):
        if part["step_mean_ms"].notna().any() and len(part) > 1:
            settings = describe(part, also=told)
            for bars in pages(phase_bars(part)):
                yield _stem("step_time", part) + name, draw_phases(bars, _step_words(part), settings)
            lines = context_lines(part)
            if any(len(line.points) > 1 and line.known for line in lines):
                yield _stem("context", part) + name, draw_contexts(lines, _step_words(part), settings)


def _speed_up_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    for part, name, told in _named(frame, "precision"):
        for precision in (Precision.TF32, Precision.BF16, Precision.FP16):
            lines = speed_up_lines(part, precision)
            if sum(len(line.known) for line in lines) > 1:
                both = part[part["precision"].isin([Precision.FP32, precision])]
                stem = f"speed_up_{precision}_{part['mode'].iloc[0]}{name}"
                yield stem, draw_speed_ups(lines, precision, _step_words(part), describe(both, also=told))


def _setting_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    for setting in SETTINGS_ALONG:
        for part, name, told in _named(frame, setting, "precision"):
            for context_length, rows in part.groupby("context_length"):
                shown = setting_lines(rows, setting)
                if any(len({point.x for point in line.known}) > 1 for size in shown for line in size.times):
                    stem = f"{setting}_{rows['mode'].iloc[0]}_ctx{context_length}{name}"
                    settings = f"context {context_length}, {describe(rows, also=told)}"
                    for sizes in _batches(shown, MAX_COLUMNS):
                        yield stem, draw_setting(sizes, setting, _step_words(rows), settings)


def _warmup_pictures(frame: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    for part, name, told in _named(frame, "warmup_steps"):
        for context_length, rows in part.groupby("context_length"):
            sizes = warmup_lines(rows)
            if any(size.step.known for size in sizes):
                settings = f"context {context_length}, {describe(rows, also=told)}"
                for shown in _batches(sizes, MAX_COLUMNS):
                    stem = f"{_stem('warmup', rows)}_ctx{context_length}{name}"
                    yield stem, draw_warmup(shown, _step_words(rows), settings)


def _named(frame: pd.DataFrame, *across: str) -> Iterator[tuple[pd.DataFrame, str, Sequence[str]]]:
    """The parts of `split`, with what tells each from the others: for the name of a file that begins with mode and
    precision, empty if these do, and as settings to say."""
    parts = list(split(frame, *across))
    runs = [(part.index[0], next(iter(part["device_name"].dropna()), None)) for part in parts]
    rows = apart_from(identities(runs), (*AXES, *across))
    names = names_of(rows, always=(), without=("mode", "precision"))
    for part, name in zip(parts, names, strict=True):
        yield part, f"_{file_name(name)}" if name else "", telling(rows, always=())


def pages(bars: Sequence[Bar]) -> Iterator[list[Bar]]:
    """The bars of each picture: as many sizes as a panel has room for, and as many context lengths as a picture has."""
    places = {name: place for place, name in enumerate(dict.fromkeys(bar.size for bar in bars))}
    panels: dict[tuple[int, int], list[Bar]] = {}
    for bar in bars:
        panels.setdefault((places[bar.size] // MAX_SIZES, bar.context_length), []).append(bar)
    for _, keys in groupby(sorted(panels), lambda key: key[0]):
        for page in _batches(list(keys), MAX_ROWS * _columns(min(len(places), MAX_SIZES))):
            yield [bar for key in page for bar in panels[key]]


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _stem(kind: str, part: pd.DataFrame) -> str:
    return f"{kind}_{part['mode'].iloc[0]}_{part['precision'].iloc[0]}"


def _step_words(part: pd.DataFrame) -> str:
    return STEP_WORDS[Mode(part["mode"].iloc[0])]


def draw_phases(bars: list[Bar], step: str, settings: str) -> Figure:
    """Stacked bars by phase, one panel per context length; the error bar is the whole step's standard deviation."""
    by_context = {context: list(own) for context, own in groupby(bars, lambda bar: bar.context_length)}
    places = {name: place for place, name in enumerate(dict.fromkeys(bar.size for bar in bars))}
    columns = min(len(by_context), _columns(len(places)))
    rows = -(-len(by_context) // columns)
    width = max(6.0, columns * _panel_width(len(places)))
    figure = drawing.new_figure(width, 3.3 * rows + 1.1, f"Time of one {step} by phase", settings)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten().tolist()
    panels[0].set_ylim(0, max((bar.step.value or 0) + (bar.step.error or 0) for bar in bars) * 1.12 or 1.0)
    handles: dict[str, Any] = {}
    for panel, (context, own) in zip(panels, by_context.items(), strict=False):
        drawing.style(panel)
        panel.set_title(f"context {context}", fontsize=10)
        drawing.categories(panel, list(places), MAX_SIZES)
        for bar in own:
            handles |= _draw_bar(panel, places[bar.size], bar)
    for panel in panels[len(by_context) :]:
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


def _panel_width(num_sizes: int) -> float:
    return max(2.4, 0.62 * num_sizes + 0.6)


def _columns(num_sizes: int) -> int:
    """Panels of so many bars that stand beside each other."""
    return max(1, int(WIDEST / _panel_width(num_sizes)))


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
    labelled = _apart(ticks)
    panel.set_xticks(labelled, [str(tick) for tick in labelled])
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


def _apart(ticks: Sequence[int]) -> list[int]:
    """Of sorted ticks on a logarithmic axis, those whose labels do not cover each other."""
    kept: list[int] = []
    for tick in ticks:
        if not kept or tick / kept[-1] >= (ticks[-1] / ticks[0]) ** TICKS_APART:
            kept.append(tick)
    return kept


def draw_speed_ups(lines: list[Line], precision: Precision, step: str, settings: str) -> Figure:
    """Speed-up over fp32 against size, one line per context length, or the other way round (see `speed_up_lines`)."""
    figure = drawing.new_figure(7.6, 5.0, f"Speed-up of one {step}, {precision} over fp32", settings)
    panel = figure.subplots()
    drawing.style(panel)
    contexts: list[str | int] = sorted({point.x for line in lines for point in line.points if isinstance(point.x, int)})
    places = contexts or list(dict.fromkeys(point.x for line in lines for point in line.points))
    positions: dict[str | int, float] = {place: index for index, place in enumerate(places)}
    drawing.categories(panel, [str(place) for place in places])
    panel.axhline(1, color="#888888", linewidth=1, linestyle="--", zorder=1)
    colours = drawing.tints(drawing.PRECISION_COLOURS[precision], len(lines))
    handles = _draw_lines(panel, lines, positions, colours)
    failures = drawing.failure_rows(lines)
    band = drawing.failure_band(len(failures))
    least = min(point.value - (point.error or 0.0) for line in lines for point in line.known if point.value is not None)
    top = panel.get_ylim()[1]
    room = (least - band * top) / (1 - band)  # the bottom that leaves the band below the least point
    panel.set_ylim(min(0.0, room), top)
    drawing.draw_failures(panel, failures, positions)
    panel.set_xlabel("context length (tokens)" if contexts else "size", fontsize=9)
    panel.set_ylabel(f"fp32 time / {precision} time, ± standard deviation", fontsize=9)
    _legend(panel, handles)
    return figure


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
    names = drawing.thinned(list(handles))[::-1]
    title = f"{len(names)} of {len(handles)} lines" if len(names) < len(handles) else None
    panel.legend(
        [handles[name] for name in names], [drawing.inert(name) for name in names], title=title, title_fontsize=9,
        frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip
