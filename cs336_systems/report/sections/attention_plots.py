"""Pictures of the attention grid: times and memory against context length, a panel for each head dimension."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from cs336_systems.config import Phase
from cs336_systems.record import Status
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.series import Line, Point
from cs336_systems.studies.attention_records import AttentionStudy, Implementation
from cs336_systems.studies.fusion_records import PHASES

COLOURS = {
    Implementation.NAIVE: "#333333",
    Implementation.COMPILED: "#E69F00",
    Implementation.SDPA: "#D55E00",
    Implementation.FLASH: "#0072B2",
    Implementation.EFFICIENT: "#009E73",
    Implementation.CUDNN: "#CC79A7",
    Implementation.MATH: "#56B4E9",
    Implementation.OWN: "#701C70",
}
MARKERS = dict(zip(Implementation, drawing.MARKERS, strict=False))
CLOSED_FORM = "naive, in closed form"

Rows = Sequence[Mapping[str, Any]]


def settings(study: AttentionStudy) -> str:
    """What all cells share, in words."""
    device = "" if study.environment is None else f", {study.environment.identity.device_name}"
    causal = ", causal" if study.grid.causal else ""
    return f"batch {study.grid.batch_size}, no heads{causal}{device}"


def attention_pictures(study: AttentionStudy, rows: Rows) -> Iterator[tuple[str, Figure]]:
    """The name and the picture of each quantity at each precision, where at least one cell has it."""
    for precision in study.precisions:
        own = [row for row in rows if row["precision"] is precision]
        for phase in PHASES:
            if any(row[f"{phase}_mean_ms"] is not None for row in own):
                yield f"{phase}_{precision}", draw_times(study, own, phase)
        if any(row["saved_mib"] is not None for row in own):
            yield f"memory_{precision}", draw_memory(study, own)


def draw_times(study: AttentionStudy, rows: Rows, phase: Phase) -> Figure:
    """Time of one pass against context length, both axes logarithmic; the rows are those of one precision."""
    title = f"{phase.capitalize()} pass of attention, {rows[0]['precision']}"
    return _draw(study, rows, title, "time (ms)", f"{phase}_mean_ms", f"{phase}_std_ms")


def draw_memory(study: AttentionStudy, rows: Rows) -> Figure:
    """What forward leaves for backward, with what written-out attention must leave in closed form."""
    title = f"What attention's forward leaves for backward, {rows[0]['precision']}"
    return _draw(study, rows, title, "memory (MiB)", "saved_mib", closed_form=True)


def attention_lines(rows: Rows, d_head: int, key: str, std: str = "") -> list[Line]:
    """The values by this key against context length, one line for each implementation that has kernels."""
    points: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda row: row["context_length"]):
        if row["d_head"] == d_head and row["status"] is not Status.UNAVAILABLE:
            error = row[std] if std else None
            point = Point(x=row["context_length"], value=row[key], error=error, failure=row["ended"] or None)
            points.setdefault(row["implementation"], []).append(point)
    names = dict.fromkeys(row["implementation"] for row in rows if row["implementation"] in points)
    return [Line(name=name, points=tuple(points[name])) for name in names]


def _draw(
    study: AttentionStudy, rows: Rows, title: str, label: str, key: str, std: str = "", closed_form: bool = False
) -> Figure:
    d_heads = sorted({row["d_head"] for row in rows})
    columns = min(2, len(d_heads))
    num_rows = -(-len(d_heads) // columns)
    width = 5.0 * columns + 1.0
    passes = f"{study.grid.passes} passes" if study.grid.passes > 1 else "1 pass"
    figure = drawing.new_figure(width, 3.4 * num_rows + 1.3, title, f"{settings(study)}, {passes}")
    panels = figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    lines = [attention_lines(rows, d_head, key, std) for d_head in d_heads]
    naive = [row for row in rows if row["implementation"] is Implementation.NAIVE]
    handles: dict[str, Any] = {}
    for panel, d_head, found in zip(panels, d_heads, lines, strict=False):
        panel.set_title(f"d_head {d_head}", fontsize=10)
        saved = attention_lines(naive, d_head, "closed_form_mib") if closed_form else []
        handles |= _draw_panel(panel, found, saved)
    for panel in panels[len(d_heads) :]:
        panel.remove()
    _make_room(panels[: len(d_heads)], [drawing.failure_rows(found) for found in lines])
    for index in range(len(d_heads)):
        if index % columns == 0:
            panels[index].set_ylabel(label, fontsize=9)
        if index + columns >= len(d_heads):
            panels[index].set_xlabel("context length (tokens)", fontsize=9)
            panels[index].tick_params(labelbottom=True)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_panel(panel: Axes, lines: Sequence[Line], closed_form: Sequence[Line]) -> dict[str, Any]:
    ticks = sorted({int(point.x) for line in lines for point in line.points})
    drawing.style(panel)
    drawing.doubling_axis(panel, ticks)
    panel.set_yscale("log")
    positions: dict[str | int, float] = {tick: tick for tick in ticks}
    handles: dict[str, Any] = {}
    for line in closed_form:
        drawn = drawing.draw_line(panel, line, positions, "#999999", "")
        drawn.lines[0].set(linestyle="--", linewidth=5, alpha=0.6)
        handles[CLOSED_FORM] = drawn
    for line in lines:
        if line.known:
            implementation = Implementation(line.name)
            colour, marker = COLOURS[implementation], MARKERS[implementation]
            handles[line.name] = drawing.draw_line(panel, line, positions, colour, marker)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
    return handles


def _make_room(panels: Sequence[Axes], failures: Sequence[Mapping[str, Sequence[str | int]]]) -> None:
    """Room for failed cells below the lines, as much in every panel, because the panels share an axis."""
    rows = max(map(len, failures))
    band = min(0.07 * rows, 0.4)
    drawing.leave_room(panels[0], band)
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
