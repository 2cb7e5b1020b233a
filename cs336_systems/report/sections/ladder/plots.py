"""The ladder as a picture: a bar for each rung, its time and its speed-up over the first; what failed is said."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.report.columns import Row
from cs336_systems.report.numbers import DOUBT, significant
from cs336_systems.report.plots import drawing

COLOUR, UNCREDITED_COLOUR = "#0072B2", "#BBBBBB"
_FRACTION = 5
UNCREDITED = "did not pass the gate"


def draw_ladder(rows: Sequence[Row], settings: str) -> Figure:
    """Mean time of a step by rung, with the interval over processes where there are three or more.

    Rungs that the slowest would make all look alike stand a second time below, on a scale of their own.
    """
    fast = _fast(rows)
    parts = [rows, fast] if len(fast) > 1 else [rows]
    width, height = max(6.0, 0.95 * len(rows) + 1.4), 4.2 * len(parts) + 1
    figure = drawing.new_figure(width, height, "Time of a training step, rung by rung", settings)
    panels = figure.subplots(len(parts), squeeze=False)[:, 0]
    for panel, part in zip(panels, parts, strict=True):
        _draw_rungs(panel, part)
    if len(parts) > 1:
        panels[1].set_title(f"Those that take less than 1/{_FRACTION} of the slowest", fontsize=9, loc="left")
    if any(row["step_mean_ms"] is not None and not row["is_credited"] for row in rows):
        uncredited = Patch(facecolor=UNCREDITED_COLOUR, edgecolor="black", linewidth=0, label=UNCREDITED, hatch="//")
        handles = [Patch(facecolor=COLOUR, label="passed"), uncredited]
        drawing.legend_below(figure, handles, 2)
    return figure


def _fast(rows: Sequence[Row]) -> list[Row]:
    """The rungs whose bars would be short beside the slowest's."""
    times = [row["step_mean_ms"] for row in rows]
    slowest_ms = max((time for time in times if time is not None), default=0.0)
    return [row for row, time in zip(rows, times, strict=True) if time is not None and time * _FRACTION < slowest_ms]


def _draw_rungs(panel: Axes, rows: Sequence[Row]) -> None:
    drawing.style(panel)
    drawing.categories(panel, [row["rung"] for row in rows])
    panel.set_ylabel("step (ms)", fontsize=9)
    for index, row in enumerate(rows):
        _draw_bar(panel, index, row)
    panel.set_ylim(0, panel.get_ylim()[1] * 1.16)


def _draw_bar(panel: Axes, index: int, row: Row) -> None:
    mean_ms = row["step_mean_ms"]
    if mean_ms is None:
        drawing.write_upright(panel, index, row["ended"])
        return
    low_ms, high_ms = row["step_ci95_low_ms"], row["step_ci95_high_ms"]
    error = None if low_ms is None else [[mean_ms - max(0.0, low_ms)], [high_ms - mean_ms]]
    colour, hatch = (COLOUR, None) if row["is_credited"] else (UNCREDITED_COLOUR, "//")
    bar = panel.bar(index, mean_ms, 0.7, yerr=error, capsize=3, color=colour, hatch=hatch)
    gain = ""
    if row["speed_up_over_first"] is not None and row["is_credited"]:
        doubt = f" {DOUBT}" if row["speed_up_over_first_is_doubted"] else ""
        gain = f"\n{significant(row['speed_up_over_first'], 3)}x{doubt}"
    panel.bar_label(bar, [f"{significant(mean_ms, 3)}{gain}"], fontsize=8, padding=2)
