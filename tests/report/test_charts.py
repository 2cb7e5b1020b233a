"""Charts as PNGs and SVGs: each shows every bar, point, failed run and text of the chart."""

import re
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer

from cs336_systems.report.charts import (
    CATEGORY_COLOURS,
    CLASS_COLOURS,
    FAILURE_COLOUR,
    PHASE_COLOURS,
    Bar,
    Chart,
    Curve,
    Panel,
    Point,
    Style,
    contrast,
    distinct,
    ink,
)
from cs336_systems.report.draw import figure_of, svg_of
from tests.report.drawn import overlaps, texts

STYLES = {"forward": Style(colour="#0072B2"), "idle": Style(colour="#FFFFFF", pattern="/", ink="#BBBBBB")}


def make_bars(name="small"):
    """Two panels of two bars; the second of the second panel failed; a mark at the first bar."""
    marks = Curve(name=f"{name} mean", points=(Point(x=name, value=3.5),), colour="#000000", marker="o")
    names = [name, "xl"]
    first = Panel(
        names=names, label="time (ms)", title=f"context 128 {name}", curves=[marks],
        bars=[Bar(name=name, parts={"forward": 1.0, "idle": 2.0}, words=f"3.00\n{name}"),
              Bar(name="xl", parts={"forward": 4.0})],
    )  # fmt: skip
    lost = [Bar(name=name, parts={"idle": 5.0}), Bar(name="xl", failure=f"out of memory {name}")]
    second = Panel(names=names, label="time (ms)", bars=lost)
    return Chart(name="bars", title=f"Times {name}", settings=f"H200, {name}", panels=[first, second], styles=STYLES)


def make_lines(name="small"):
    """Two lines, of which one has a failed run and none has a value there."""
    points = tuple(Point(x=x, value=int(x) / 10, error=1.0) for x in ("64", "128"))
    lost = (Point(x="64", value=9.0), Point(x="128", value=None, failure=f"killed {name}"))
    curves = [
        Curve(name=name, points=points, colour="#0072B2", marker="o", is_joined=True),
        Curve(name="xl", points=lost, colour="#E69F00", marker="s", aside=0.25),
    ]
    panel = Panel(names=["64", "128"], axis="context", label=f"time {name}", curves=curves)
    return Chart(name="lines", title="Lines", settings=name, panels=[panel, panel], columns=2, size=(4.0, 3.0))


def drawn_bars(axes):
    """Of each part that matplotlib drew: colour, place, where it begins and how long it is."""
    across = [(p.get_y() + p.get_height() / 2, p.get_x(), p.get_width()) for p in axes.patches]
    return sorted(
        (to_hex(patch.get_facecolor()), *map(near, own)) for patch, own in zip(axes.patches, across, strict=True)
    )


def near(value):
    return round(float(value), 9) + 0.0


def test_a_picture_shows_each_part_of_each_bar_and_each_mark() -> None:
    figure = figure_of(make_bars())
    blue, white = "#0072b2", "#ffffff"
    expected = [[(blue, 0, 0, 1), (blue, 1, 0, 4), (white, 0, 1, 2)], [(white, 0, 0, 5)]]
    assert [drawn_bars(axes) for axes in figure.axes] == expected
    (mark,) = figure.axes[0].lines
    assert [tuple(map(float, xy)) for xy in mark.get_xydata()] == [(3.5, 0)]
    assert overlaps(figure) == []


def test_a_picture_shows_each_point_with_its_deviation_and_where_runs_failed() -> None:
    axes, _ = figure_of(make_lines()).axes
    drawn = [c for c in axes.containers if isinstance(c, ErrorbarContainer)]
    points = [[tuple(map(float, xy)) for xy in own.lines[0].get_xydata()] for own in drawn]
    assert points == [[(0, 6.4), (1, 12.8)], [(0.25, 9.0)]]
    (segments,) = drawn[0].lines[2]
    assert [float(y) for _, y in segments.get_segments()[0]] == pytest.approx([5.4, 7.4])
    crosses = [line.get_xdata() for line in axes.lines if to_hex(line.get_color()) == FAILURE_COLOUR.lower()]
    assert [list(map(float, xs)) for xs in crosses] == [[1]]


def test_the_legend_says_each_thing_once() -> None:
    (legend,) = figure_of(make_bars()).legends
    assert {text.get_text() for text in legend.get_texts()} - {""} == {"forward", "idle", "small mean"}


def test_every_lying_bar_is_named_however_many_there_are() -> None:
    names = distinct(["small", *(f"size {i}" for i in range(28)), "small"])
    assert len(set(names)) == 30
    bars = [Bar(name=name, parts={"forward": 1.0}) for name in names]
    panel = Panel(names=names, label="", bars=bars)
    chart = Chart(name="many", title="Many", settings="", panels=[panel], styles=STYLES)
    (axes,) = figure_of(chart).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert len({place for _, place, *_ in drawn_bars(axes)}) == 30


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
    names = [str(x) for x in range(2000)]
    points = tuple(Point(x=x, value=int(x) % 7) for x in names)
    curve = Curve(name="long", points=points, colour="#0072B2", marker="o", is_joined=True)
    panel = Panel(names=names, label="", curves=[curve])
    svg = svg_of(Chart(name="long", title="Long", settings="", panels=[panel], size=(6.0, 4.0)), "a")
    assert "<image" in svg
    assert len(svg) < 100_000
