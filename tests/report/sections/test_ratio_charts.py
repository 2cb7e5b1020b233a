"""The pictures of a comparison show each ratio with its interval, and the processes of two configurations."""

import pytest

from cs336_systems.report.page.figures import spec_of
from cs336_systems.report.plots.draw import draw
from cs336_systems.report.sections.comparison import processes_chart, ratio_charts


def make_row(name, verdict, ratio=None, low=None, high=None, is_doubted=False):
    return {
        "name": name, "verdict": verdict, "ratio": ratio, "ratio_low": low, "ratio_high": high,
        "ratio_is_doubted": is_doubted,
    }  # fmt: skip


ROWS = (
    make_row("small", "faster", 0.5, 0.4, 0.6),
    make_row("medium", "slower", 2.0, 1.5, 3.0, True),
    make_row("large", "cannot tell", 1.0),
    make_row("xl", "cannot tell", 1.1, 1e-300, 1e300),
    make_row("2.7B", "only in A"),
)


def points_of(chart):
    (panel,) = chart.panels
    return {point.x: (curve.line.name, curve.is_hollow, point) for curve in panel.curves for point in curve.line.points}


def test_each_ratio_stands_with_its_interval_below_its_verdict():
    (chart,) = ratio_charts(ROWS, "")
    found = points_of(chart)
    assert list(chart.panels[0].x.names) == ["small", "medium", "large", "xl"]
    for row in ROWS[:4]:
        words, is_hollow, point = found[row["name"]]
        assert words.startswith(row["verdict"])
        assert is_hollow is row["ratio_is_doubted"] is ("doubt" in words)
        assert point.value == row["ratio"]
    for row in ROWS[:2]:
        point = found[row["name"]][2]
        assert (point.value - point.error_below, point.value + point.error) == pytest.approx(
            (row["ratio_low"], row["ratio_high"])
        )
    assert found["large"][2].error is None


def test_an_interval_that_says_nothing_leaves_the_others_visible():
    (chart,) = ratio_charts(ROWS, "")
    low, high = chart.panels[0].y.limits
    assert 0.01 < low < 0.4
    assert 3.0 < high < 100
    assert draw(chart).axes[0].get_ylim() == pytest.approx((low, high))
    for trace in spec_of(chart)["data"]:
        below = trace.get("error_y", {}).get("arrayminus", ())
        assert all(0 < y - down < y for y, down in zip(trace["y"], below, strict=False) if down)


def test_one_ratio_is_no_picture():
    assert ratio_charts(ROWS[:1], "") == []
    assert ratio_charts([ROWS[0], ROWS[4]], "") == []


def test_the_processes_of_both_sides_stand_in_their_order():
    chart = processes_chart(("old", "new"), [[0.1, 0.2, 0.3], [0.4, 0.5]])
    (panel,) = chart.panels
    assert [[(point.x, point.value) for point in curve.line.points] for curve in panel.curves] == [
        [(1, pytest.approx(100)), (2, pytest.approx(200)), (3, pytest.approx(300))],
        [(1, pytest.approx(400)), (2, pytest.approx(500))],
    ]
    assert [curve.line.name for curve in panel.curves] == ["A", "B"]
    assert "old" in chart.settings
