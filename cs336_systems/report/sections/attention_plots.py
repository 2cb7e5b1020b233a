"""Charts of the attention grid: times and memory against context length, a panel for each head dimension."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cs336_systems.record import Status
from cs336_systems.report.plots.charts import MARKERS as MARKS
from cs336_systems.report.plots.charts import Axis, Chart, Curve, Line, Panel, Point, doubling
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
MARKERS = dict(zip(Implementation, MARKS, strict=False))
CLOSED_FORM = "naive, in closed form"

Rows = Sequence[Mapping[str, Any]]


def settings(study: AttentionStudy) -> str:
    """What all cells share, in words."""
    device = "" if study.environment is None else f", {study.environment.identity.device_name}"
    causal = ", causal" if study.grid.causal else ""
    return f"batch {study.grid.batch_size}, no heads{causal}{device}"


def attention_charts(study: AttentionStudy, rows: Rows) -> Iterator[Chart]:
    """A chart of each quantity at each precision, where at least one cell has it."""
    for precision in study.precisions:
        own = [row for row in rows if row["precision"] is precision]
        for phase in PHASES:
            if any(row[f"{phase}_mean_ms"] is not None for row in own):
                y = Axis(label="time (ms)", unit="ms", is_log=True)
                title = f"{phase.capitalize()} pass of attention, {precision}"
                yield _chart(study, own, f"{phase}_{precision}", title, y, f"{phase}_mean_ms", f"{phase}_std_ms")
        if any(row["saved_mib"] is not None for row in own):
            y = Axis(label="memory (MiB)", unit="MiB", is_log=True)
            title = f"What attention's forward leaves for backward, {precision}"
            yield _chart(study, own, f"memory_{precision}", title, y, "saved_mib")


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


def _chart(study: AttentionStudy, rows: Rows, name: str, title: str, y: Axis, key: str, std: str = "") -> Chart:
    """Both axes logarithmic; memory beside what written-out attention must leave in closed form."""
    d_heads = sorted({row["d_head"] for row in rows})
    naive = [row for row in rows if row["implementation"] is Implementation.NAIVE and not std]
    panels = []
    for d_head in d_heads:
        lines = attention_lines(rows, d_head, key, std)
        closed_form = [replace(line, name=CLOSED_FORM) for line in attention_lines(naive, d_head, "closed_form_mib")]
        curves = [_thick(replace(line, points=line.known)) for line in closed_form]
        curves += [Curve(line=line, colour=COLOURS[own], marker=MARKERS[own])
                   for line in lines if (own := Implementation(line.name))]  # fmt: skip
        x = doubling({float(point.x) for line in lines for point in line.points}, "context length (tokens)", 1.4)
        panels.append(Panel(x=x, y=y, title=f"d_head {d_head}", curves=curves))
    passes = f"{study.grid.passes} passes" if study.grid.passes > 1 else "1 pass"
    return Chart(
        name=name, title=title, settings=f"{settings(study)}, {passes}", panels=panels, columns=min(2, len(panels)),
        size=(5.0, 3.4), legend=4, is_shared=True,
    )  # fmt: skip


def _thick(line: Line) -> Curve:
    return Curve(line=line, colour="#999999", dash="--", width=5, opacity=0.6)
