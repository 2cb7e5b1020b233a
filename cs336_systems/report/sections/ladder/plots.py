"""The ladder as a chart: a bar for each rung, its time and its speed-up over the first; what failed is said."""

from collections.abc import Sequence
from dataclasses import replace

from cs336_systems.report.columns import Row
from cs336_systems.report.numbers import DOUBT, significant
from cs336_systems.report.plots.charts import Axis, Bar, Chart, Curve, Line, Panel, Point, Style

_FRACTION = 5
PASSED, UNCREDITED = "passed", "did not pass the gate"
STYLES = {PASSED: Style(colour="#0072B2"), UNCREDITED: Style(colour="#BBBBBB", pattern="/", ink="#000000")}


def ladder_chart(rows: Sequence[Row], settings: str) -> Chart:
    """Mean time of a step by rung, with the interval over processes where there are three or more.

    Rungs that the slowest would make all look alike stand a second time below, on a scale of their own.
    """
    fast, below = _fast(rows), f"Those that take less than 1/{_FRACTION} of the slowest"
    panels = [_panel(rows), *([_panel(fast, below)] if len(fast) > 1 else [])]
    has_both = any(row["step_mean_ms"] is not None and not row["is_credited"] for row in rows)
    return Chart(
        name="ladder", title="Time of a training step, rung by rung", settings=settings, panels=panels,
        size=(max(5.5, 0.95 * len(rows) + 0.9), 4.2), legend=2,
        styles=STYLES if has_both else {PASSED: replace(STYLES[PASSED], label="")},
    )  # fmt: skip


def _fast(rows: Sequence[Row]) -> list[Row]:
    """The rungs whose bars would be short beside the slowest's."""
    times = [row["step_mean_ms"] for row in rows]
    slowest_ms = max((time for time in times if time is not None), default=0.0)
    return [row for row, time in zip(rows, times, strict=True) if time is not None and time * _FRACTION < slowest_ms]


def _panel(rows: Sequence[Row], title: str = "") -> Panel:
    intervals = [
        Point(
            x=row["rung"],
            value=row["step_mean_ms"],
            error=row["step_ci95_high_ms"] - row["step_mean_ms"],
            error_below=row["step_mean_ms"] - max(0.0, row["step_ci95_low_ms"]),
        )
        for row in rows
        if row["step_mean_ms"] is not None and row["step_ci95_low_ms"] is not None
    ]
    means = Curve(line=Line(name="mean, 95 % interval", points=tuple(intervals)), colour="#000000", dash="", label="")
    return Panel(
        x=Axis(names=[row["rung"] for row in rows]), y=Axis(label="step (ms)", unit="ms", from_zero=True), title=title,
        bars=[_bar(row) for row in rows], curves=[means],
    )  # fmt: skip


def _bar(row: Row) -> Bar:
    mean_ms = row["step_mean_ms"]
    if mean_ms is None:
        return Bar(name=row["rung"], failure=row["ended"])
    gain = ""
    if row["speed_up_over_first"] is not None and row["is_credited"]:
        doubt = f" {DOUBT}" if row["speed_up_over_first_is_doubted"] else ""
        gain = f"\n{significant(row['speed_up_over_first'], 3)}x{doubt}"
    part = PASSED if row["is_credited"] else UNCREDITED
    return Bar(name=row["rung"], parts={part: mean_ms}, words=f"{significant(mean_ms, 3)}{gain}")
