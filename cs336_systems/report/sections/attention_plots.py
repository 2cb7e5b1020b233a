"""Pictures of the attention grid: times and memory against context length, a panel for each head dimension."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from cs336_systems.config import Phase, Precision
from cs336_systems.record import Status
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.series import Line, Point
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.studies.attention_records import (
    AttentionStudy,
    CellResult,
    Implementation,
    naive_saved_bytes,
)
from cs336_systems.studies.records import CellStatus

PHASES = (Phase.FORWARD, Phase.BACKWARD)
COLOURS = {
    Implementation.NAIVE: "#333333",
    Implementation.COMPILED: "#E69F00",
    Implementation.SDPA: "#D55E00",
    Implementation.FLASH: "#0072B2",
    Implementation.EFFICIENT: "#009E73",
    Implementation.CUDNN: "#CC79A7",
    Implementation.MATH: "#56B4E9",
}
MARKERS = dict(zip(Implementation, drawing.MARKERS, strict=False))
CLOSED_FORM = "naive, in closed form"

Quantity = Callable[[CellResult], tuple[float, float | None] | None]
"""Value of a cell and its standard deviation, or None."""


def settings(study: AttentionStudy) -> str:
    """What all cells share, in words."""
    device = "" if study.environment is None else f", {study.environment.identity.device_name}"
    causal = ", causal" if study.grid.causal else ""
    return f"batch {study.grid.batch_size}, no heads{causal}{device}"


def attention_pictures(study: AttentionStudy) -> Iterator[tuple[str, Figure]]:
    """The name and the picture of each quantity at each precision, where at least one cell has it."""
    for precision in study.precisions:
        for phase in PHASES:
            if any(result.measurement(phase) for result in study.results_of(precision)):
                yield f"{phase}_{precision}", draw_times(study, precision, phase)
        if any(result.memory for result in study.results_of(precision)):
            yield f"memory_{precision}", draw_memory(study, precision)


def draw_times(study: AttentionStudy, precision: Precision, phase: Phase) -> Figure:
    """Time of one pass against context length, both axes logarithmic."""

    def quantity(result: CellResult) -> tuple[float, float | None] | None:
        measured = result.measurement(phase)
        if measured is None:
            return None
        return measured.mean_s * 1e3, None if measured.stdev_s is None else measured.stdev_s * 1e3

    return _draw(study, precision, f"{phase.capitalize()} pass of attention, {precision}", "time (ms)", quantity)


def draw_memory(study: AttentionStudy, precision: Precision) -> Figure:
    """What forward leaves for backward, with what written-out attention must leave in closed form."""

    def quantity(result: CellResult) -> tuple[float, float | None] | None:
        return None if result.memory is None else (result.memory.saved_bytes / 2**20, None)

    title = f"What attention's forward leaves for backward, {precision}"
    return _draw(study, precision, title, "memory (MiB)", quantity, closed_form=True)


def memory_line(study: AttentionStudy, precision: Precision, d_head: int) -> Line:
    """The closed form of what written-out attention leaves for backward, in MiB."""
    naive = [r for r in study.results_of(precision, Implementation.NAIVE) if r.cell.d_head == d_head]
    points = (
        Point(x=result.cell.context_length, value=naive_saved_bytes(study.grid, result.cell) / 2**20)
        for result in naive
    )
    return Line(name=CLOSED_FORM, points=tuple(points))


def attention_lines(study: AttentionStudy, precision: Precision, d_head: int, quantity: Quantity) -> list[Line]:
    """One line for each implementation; a kernel that there is not leaves out its points."""
    lines = []
    for implementation in study.available(precision):
        points = tuple(
            _point(result, quantity)
            for result in study.results_of(precision, implementation)
            if result.cell.d_head == d_head and result.status is not CellStatus.UNAVAILABLE
        )
        lines.append(Line(name=implementation, points=points))
    return lines


def _point(result: CellResult, quantity: Quantity) -> Point:
    value, error = quantity(result) or (None, None)
    failure = None if result.status is CellStatus.OK else STATUS_WORDS[Status(result.status)]
    return Point(x=result.cell.context_length, value=value, error=error, failure=failure)


def _draw(
    study: AttentionStudy, precision: Precision, title: str, label: str, quantity: Quantity, closed_form: bool = False
) -> Figure:
    d_heads = sorted({result.cell.d_head for result in study.results_of(precision)})
    columns = min(2, len(d_heads))
    rows = -(-len(d_heads) // columns)
    width = 5.0 * columns + 1.0
    passes = f"{study.grid.passes} passes" if study.grid.passes > 1 else "1 pass"
    figure = drawing.new_figure(width, 3.4 * rows + 1.3, title, f"{settings(study)}, {passes}")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    handles: dict[str, Any] = {}
    for panel, d_head in zip(panels, d_heads, strict=False):
        panel.set_title(f"d_head {d_head}", fontsize=10)
        lines = attention_lines(study, precision, d_head, quantity)
        handles |= _draw_panel(panel, lines, memory_line(study, precision, d_head) if closed_form else None)
    for panel in panels[len(d_heads) :]:
        panel.remove()
    _make_room(panels[: len(d_heads)], study, precision, quantity)
    for index in range(len(d_heads)):
        if index % columns == 0:
            panels[index].set_ylabel(label, fontsize=9)
        if index + columns >= len(d_heads):
            panels[index].set_xlabel("context length (tokens)", fontsize=9)
            panels[index].tick_params(labelbottom=True)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_panel(panel: Axes, lines: Sequence[Line], closed_form: Line | None) -> dict[str, Any]:
    drawing.style(panel)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({int(point.x) for line in lines for point in line.points})
    positions: dict[str | int, float] = {tick: tick for tick in ticks}
    handles: dict[str, Any] = {}
    if closed_form is not None and closed_form.known:
        drawn = drawing.draw_line(panel, closed_form, positions, "#999999", "")
        drawn.lines[0].set(linestyle="--", linewidth=5, alpha=0.6)
        handles[CLOSED_FORM] = drawn
    for line in lines:
        if line.known:
            implementation = Implementation(line.name)
            colour, marker = COLOURS[implementation], MARKERS[implementation]
            handles[line.name] = drawing.draw_line(panel, line, positions, colour, marker)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
    return handles


def _make_room(panels: Sequence[Axes], study: AttentionStudy, precision: Precision, quantity: Quantity) -> None:
    """Room for failed cells below the lines, as much in every panel, because the panels share an axis."""
    d_heads = sorted({result.cell.d_head for result in study.results_of(precision)})
    failures = [drawing.failure_rows(attention_lines(study, precision, d_head, quantity)) for d_head in d_heads]
    rows = max(map(len, failures))
    low, high = panels[0].get_ylim()
    band = min(0.07 * rows, 0.4)
    panels[0].set_ylim(low / (high / low) ** (band / (1 - band)), high)
    for panel, failed in zip(panels, failures, strict=True):
        for index, (words, places) in enumerate(failed.items()):
            _draw_failure(panel, band * (index + 0.6) / rows, words, [int(place) for place in places])


def _draw_failure(panel: Axes, height: float, words: str, contexts: Sequence[int]) -> None:
    """Crosses at the contexts that failed, with their words on the side that has more room."""
    across = panel.get_xaxis_transform()
    panel.plot(contexts, [height] * len(contexts), transform=across, **drawing.CROSS)
    left, right = panel.get_xlim()
    on_the_left = min(contexts) / left > right / max(contexts)
    panel.annotate(
        drawing.inert(words), (min(contexts) if on_the_left else max(contexts), height), (-8 if on_the_left else 8, 0),
        xycoords=across, textcoords="offset points", ha="right" if on_the_left else "left", va="center",
        fontsize=8, color=drawing.FAILURE_COLOUR,
    )  # fmt: skip
