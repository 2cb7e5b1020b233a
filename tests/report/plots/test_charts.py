"""Charts as PNGs and SVGs: each shows every bar, point, failed run and text of the chart."""

import re
import warnings
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer

from cs336_systems.report.plots import draw
from cs336_systems.report.plots.charts import (
    CATEGORY_COLOURS,
    CLASS_COLOURS,
    FAILURE_COLOUR,
    PHASE_COLOURS,
    Axis,
    Bar,
    Chart,
    Curve,
    Line,
    Panel,
    Point,
    Reference,
    Style,
    contrast,
    curves_of,
    distinct,
    doubling,
    ink,
)
from cs336_systems.report.plots.draw import figure_of, png_of, svg_of
from tests.report.drawn import overlaps, texts
from tests.report.making import HOSTILE
from tests.report.page.pages import HOSTILE_TEXTS

STYLES = {"forward": Style(colour="#0072B2"), "idle": Style(colour="#FFFFFF", pattern="/", ink="#BBBBBB")}


def make_bars(is_lying=False, name="small"):
    """Two panels of two bars; the second of the second panel failed; a mark with another deviation below than above."""
    x, y = Axis(names=[name, "xl"]), Axis(label="time (ms)", from_zero=True)
    marks = Line(name=f"{name} mean", points=(Point(x=name, value=3.0, error=0.5, error_below=0.25),))
    first = Panel(
        x=x, y=y, title=f"context 128 {name}",
        bars=[Bar(name=name, parts={"forward": 1.0, "idle": 2.0}, words=f"3.00\n{name}"),
              Bar(name="xl", parts={"forward": 4.0})],
        curves=[Curve(line=marks, colour="#000000", marker="o", dash="")],
        references=[Reference(value=3.5, colour="#777777", name="limit")],
    )  # fmt: skip
    lost = [Bar(name=name, parts={"idle": 5.0}), Bar(name="xl", failure=f"out of memory {name}")]
    second = Panel(x=x, y=y, bars=lost)
    return Chart(
        name="bars", title=f"Times {name}", settings=f"H200, {name}", panels=[first, second],
        columns=1 if is_lying else 2, legend=3, size=(6.0, 4.0), styles=STYLES, is_lying=is_lying,
    )  # fmt: skip


def make_lines(name="small"):
    """Two lines over a logarithmic axis, of which one has a failed run and none has a value there."""
    lines = [
        Line(name=name, points=tuple(Point(x=float(x), value=x / 10, error=1.0) for x in (64, 128))),
        Line(name="xl", points=(Point(x=64.0, value=9.0), Point(x=128.0, value=None, failure=f"killed {name}"))),
    ]
    panel = Panel(
        x=doubling([64, 128], "context"), y=Axis(label=f"time {name}", is_log=True),
        curves=curves_of(lines, ["#0072B2", "#E69F00"]),
        references=[Reference(value=100.0, colour="#777777", name=f"cache {name}", is_upright=True)],
    )  # fmt: skip
    return Chart(name="lines", title="Lines", settings=name, panels=[panel])


def drawn_bars(chart, axes):
    """Of each part that matplotlib drew: colour, place, where it begins and how long it is."""
    across = [(p.get_y() + p.get_height() / 2, p.get_x(), p.get_width()) if chart.is_lying else
              (p.get_x() + p.get_width() / 2, p.get_y(), p.get_height()) for p in axes.patches]  # fmt: skip
    return sorted(
        (to_hex(patch.get_facecolor()), *map(near, own)) for patch, own in zip(axes.patches, across, strict=True)
    )


def near(value):
    return round(float(value), 9) + 0.0


@pytest.mark.parametrize("is_lying", [False, True], ids=["upright", "lying"])
def test_a_picture_shows_each_part_of_each_bar(is_lying) -> None:
    chart = make_bars(is_lying)
    blue, white = "#0072b2", "#ffffff"
    expected = [[(blue, 0, 0, 1), (blue, 1, 0, 4), (white, 0, 1, 2)], [(white, 0, 0, 5)]]
    figure = figure_of(chart)
    for number, own in enumerate(expected):
        assert drawn_bars(chart, figure.axes[number]) == own
    assert overlaps(figure) == []


@pytest.mark.parametrize("is_lying", [False, True], ids=["upright", "lying"])
def test_a_picture_shows_how_far_a_mark_may_be_off(is_lying) -> None:
    chart = make_bars(is_lying)
    (container,) = (c for c in figure_of(chart).axes[0].containers if isinstance(c, ErrorbarContainer))
    (segments,) = container.lines[2]
    ends = [float(point[0 if is_lying else 1]) for point in segments.get_segments()[0]]
    assert ends == [2.75, 3.5]


def test_a_picture_shows_each_point_and_where_runs_failed() -> None:
    chart = make_lines()
    expected = [[(64, 6.4), (128, 12.8)], [(64, 9.0)]]
    (axes,) = figure_of(chart).axes
    drawn = [c.lines[0] for c in axes.containers if isinstance(c, ErrorbarContainer)]
    assert [[tuple(map(float, xy)) for xy in line.get_xydata()] for line in drawn] == expected
    crosses = [line.get_xdata() for line in axes.lines if to_hex(line.get_color()) == FAILURE_COLOUR.lower()]
    assert [list(map(float, xs)) for xs in crosses] == [[128]]


def test_a_picture_has_the_lines_across_in_their_colour_and_the_ends_of_logarithmic_axes() -> None:
    (axes,) = figure_of(make_lines()).axes
    assert any(set(line.get_xdata()) == {100} and line.get_color() == "#777777" for line in axes.lines)
    ends = (64 / 1.25, 128 * 1.25)
    assert axes.get_xlim() == pytest.approx(ends)


def test_the_legend_says_each_thing_once() -> None:
    chart = make_bars()
    chart = replace(chart, panels=[*chart.panels, *chart.panels])
    (legend,) = figure_of(chart).legends
    assert {text.get_text() for text in legend.get_texts()} - {""} == {"forward", "idle", "limit", "small mean"}


def test_every_lying_bar_is_named_however_many_there_are() -> None:
    names = distinct(["small", *(f"size {i}" for i in range(28)), "small"])
    assert len(set(names)) == 30
    bars = [Bar(name=name, parts={"forward": 1.0}) for name in names]
    panel = Panel(x=Axis(names=names), y=Axis(), bars=bars)
    chart = Chart(name="many", title="Many", settings="", panels=[panel], styles=STYLES, is_lying=True)
    (axes,) = figure_of(chart).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert len({place for _, place, *_ in drawn_bars(chart, axes)}) == 30


@pytest.mark.parametrize("text", [HOSTILE, *HOSTILE_TEXTS])
def test_a_hostile_text_is_shown_without_control_characters(text, monkeypatch) -> None:
    monkeypatch.setattr(draw, "DPI", 40)  # which is quicker
    charts = [make_bars(name=text), make_bars(True, text), make_lines(text)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph|constrained_layout")
        for chart in charts:
            png_of(chart)
            assert not any(re.search(r"[\x00-\x09\x0b-\x1f\x1b‮]", shown) for shown in texts(figure_of(chart)))


def test_an_svg_has_each_word_as_text() -> None:
    chart = make_bars()
    svg = svg_of(chart, "a")
    root = ElementTree.fromstring(svg)
    words = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert set(words) >= {line for text in texts(figure_of(chart)) for line in text.split("\n") if line.strip()}
    assert {"#0072b2", "light-dark(#e5e5e5, #2c2c2c)"} <= set(re.findall(r"(?:fill|stroke): ([^;]*?)[;\"]", svg))
    assert svg == svg_of(chart, "a")
    assert len(svg) < 40_000


def test_words_stand_out_from_the_colours_of_their_bars() -> None:
    every = {colour for table in (CLASS_COLOURS, CATEGORY_COLOURS, PHASE_COLOURS) for colour in table.values()}
    assert all(contrast(ink(colour), colour) > 3.5 for colour in every)


def test_a_curve_of_very_many_points_is_an_image_of_the_svg() -> None:
    line = Line(name="long", points=tuple(Point(x=float(x), value=x % 7) for x in range(5000)))
    panel = Panel(x=Axis(), y=Axis(), curves=[Curve(line=line, colour="#0072B2")])
    svg = svg_of(Chart(name="long", title="Long", settings="", panels=[panel]), "a")
    assert "<image" in svg
    assert len(svg) < 100_000
