"""Charts as PNGs and as figures of the page: each shows every bar, point, failed run and text of the chart."""

import json
import math
import re
import warnings
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer

from cs336_systems.report.page.figures import height_of, spec_of
from cs336_systems.report.page.write import _inert
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.charts import (
    Axis,
    Bar,
    Chart,
    Curve,
    Line,
    Note,
    Panel,
    Point,
    Reference,
    Style,
    along,
    curves_of,
    distinct,
    doubling,
)
from cs336_systems.report.plots.draw import draw, png_of
from cs336_systems.report.plots.palette import FAILURE_COLOUR
from tests.report.drawn import overlaps, texts
from tests.report.making import HOSTILE
from tests.report.page.pages import HOSTILE_TEXTS

STYLES = {"forward": Style(colour="#0072B2"), "idle": Style(colour="#FFFFFF", pattern="/", ink="#BBBBBB")}


def make_bars(is_lying=False, name="small"):
    """Two panels of two bars; the second of the second panel failed; a mark with another deviation below than above."""
    x, y = Axis(names=[name, "xl"]), Axis(label="time (ms)", unit="ms", from_zero=True)
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
        Line(
            name=name, points=tuple(Point(x=float(x), value=x / 10, error=1.0, about=f"{name} {x}") for x in (64, 128))
        ),
        Line(name="xl", points=(Point(x=64.0, value=9.0), Point(x=128.0, value=None, failure=f"killed {name}"))),
    ]
    panel = Panel(
        x=doubling([64, 128], "context"), y=Axis(label=f"time {name}", unit="ms", is_log=True),
        curves=curves_of(lines, ["#0072B2", "#E69F00"]),
        references=[Reference(value=100.0, colour="#777777", name=f"cache {name}", is_upright=True)],
        notes=[Note(x=64.0, y=6.4, words=f"note {name}")],
    )  # fmt: skip
    return Chart(name="lines", title="Lines", settings=name, panels=[panel])


def drawn_bars(chart, axes):
    """Of each part that matplotlib drew: colour, place, where it begins and how long it is."""
    across = [(p.get_y() + p.get_height() / 2, p.get_x(), p.get_width()) if chart.is_lying else
              (p.get_x() + p.get_width() / 2, p.get_y(), p.get_height()) for p in axes.patches]  # fmt: skip
    return sorted(
        (to_hex(patch.get_facecolor()), *map(near, own)) for patch, own in zip(axes.patches, across, strict=True)
    )


def shown_bars(chart, spec, number):
    """The same of plotly's traces, which are stacked in their order."""
    ends, found = {}, []
    for trace in spec["data"]:
        if trace["type"] == "bar" and trace["xaxis"] == ("x" if number == 0 else f"x{number + 1}"):
            places, values = (trace["y"], trace["x"]) if chart.is_lying else (trace["x"], trace["y"])
            for place, value in zip(places, values, strict=True):
                at = -place if chart.is_lying else place
                found.append((trace["marker"]["color"].lower(), near(at), near(ends.get(at, 0.0)), near(value)))
                ends[at] = ends.get(at, 0.0) + value
    return sorted(found)


def near(value):
    return round(float(value), 9) + 0.0


@pytest.mark.parametrize("is_lying", [False, True], ids=["upright", "lying"])
def test_both_show_each_part_of_each_bar(is_lying) -> None:
    chart = make_bars(is_lying)
    blue, white = "#0072b2", "#ffffff"
    expected = [[(blue, 0, 0, 1), (blue, 1, 0, 4), (white, 0, 1, 2)], [(white, 0, 0, 5)]]
    figure, spec = draw(chart), spec_of(chart)
    for number, own in enumerate(expected):
        assert drawn_bars(chart, figure.axes[number]) == own
        assert shown_bars(chart, spec, number) == own
    assert overlaps(figure) == []


@pytest.mark.parametrize("is_lying", [False, True], ids=["upright", "lying"])
def test_both_show_how_far_a_mark_may_be_off(is_lying) -> None:
    chart = make_bars(is_lying)
    (container,) = (c for c in draw(chart).axes[0].containers if isinstance(c, ErrorbarContainer))
    (segments,) = container.lines[2]
    ends = [float(point[0 if is_lying else 1]) for point in segments.get_segments()[0]]
    assert ends == [2.75, 3.5]
    (mark,) = (trace for trace in spec_of(chart)["data"] if trace.get("name") == "small mean")
    errors = mark["error_x" if is_lying else "error_y"]
    assert (errors["array"], errors["arrayminus"], mark["x" if is_lying else "y"]) == ([0.5], [0.25], [3.0])


def test_both_show_each_point_and_where_runs_failed() -> None:
    chart = make_lines()
    expected = [[(64, 6.4), (128, 12.8)], [(64, 9.0)]]
    (axes,) = draw(chart).axes
    drawn = [c.lines[0] for c in axes.containers if isinstance(c, ErrorbarContainer)]
    assert [[tuple(map(float, xy)) for xy in line.get_xydata()] for line in drawn] == expected
    crosses = [line.get_xdata() for line in axes.lines if to_hex(line.get_color()) == FAILURE_COLOUR.lower()]
    assert [list(map(float, xs)) for xs in crosses] == [[128]]
    first, second, failed, note = spec_of(chart)["data"]
    assert [list(zip(trace["x"], trace["y"], strict=True)) for trace in (first, second)] == expected
    assert failed["x"] == [128]
    assert failed["y"][0] == 6.4, "at the lowest point: the axis is logarithmic"
    assert (note["x"], note["y"]) == ([64], [6.4])
    assert first["error_y"]["array"] == [1.0, 1.0]


def test_hover_names_the_point_its_value_and_unit() -> None:
    (first, *_), (bars, *_) = spec_of(make_lines())["data"], spec_of(make_bars())["data"]
    assert first["text"] == ["small 64<br>context 64: 6.4 ± 1.0 ms", "small 128<br>context 128: 12.8 ± 1.0 ms"]
    assert bars["text"] == ["context 128 small, small: forward: 1.000 ms", "context 128 small, xl: forward: 4.000 ms"]
    assert {trace["type"] for chart in (make_lines(), make_bars()) for trace in spec_of(chart)["data"]} <= {
        "scatter", "bar",
    }, "WebGL needs eval, which the page forbids"  # fmt: skip


def test_both_have_the_lines_across_in_their_colour_and_the_ends_of_logarithmic_axes() -> None:
    (axes,), spec = draw(make_lines()).axes, spec_of(make_lines())
    (shape,) = spec["layout"]["shapes"]
    assert (shape["x0"], shape["x1"], shape["yref"], shape["line"]["color"]) == (100, 100, "y domain", "#777777")
    assert any(set(line.get_xdata()) == {100} and line.get_color() == "#777777" for line in axes.lines)
    ends = (64 / 1.25, 128 * 1.25)
    assert axes.get_xlim() == pytest.approx(ends)
    assert spec["layout"]["xaxis"]["range"] == pytest.approx([math.log10(end) for end in ends])
    assert spec["layout"]["xaxis"]["ticktext"] == ["64", "128"]


def test_the_legend_says_each_thing_once_and_in_both() -> None:
    chart = make_bars()
    chart = replace(chart, panels=[*chart.panels, *chart.panels])
    spec = spec_of(chart)
    parts = [*spec["data"], *spec["layout"]["shapes"]]
    said = [part["name"] for part in parts if part["showlegend"]]
    assert sorted(said) == ["failed", "forward", "idle", "limit", "small mean"]
    (legend,) = draw(chart).legends
    assert {text.get_text() for text in legend.get_texts()} - {""} == {"forward", "idle", "limit", "small mean"}


def test_panels_of_a_figure_do_not_cover_each_other() -> None:
    whole = make_bars()
    for chart in (
        replace(whole, panels=whole.panels * 3),
        replace(make_bars(True), panels=whole.panels * 2),
    ):
        endings, spec = ["", *range(2, len(chart.panels) + 1)], spec_of(chart)
        layout, narrow = spec["layout"], spec["narrow"]
        assert all(narrow[f"xaxis{n}"]["domain"] == [0, 1] for n in endings)
        assert len({narrow[f"yaxis{n}"]["domain"][0] for n in endings}) == len(endings), "each below the other"
        assert narrow["height"] > height_of(chart)
        boxes = [(layout[f"xaxis{n}"]["domain"], layout[f"yaxis{n}"]["domain"]) for n in endings]
        for number, ((left, right), (low, high)) in enumerate(boxes):
            assert 0 <= left < right <= 1.000001
            assert -1e-9 <= low < high <= 1.000001
            for (other_left, other_right), (other_low, other_high) in boxes[:number]:
                assert right <= other_left or other_right <= left or high <= other_low or other_high <= low


def test_every_lying_bar_is_named_in_both_however_many_there_are() -> None:
    names = distinct(["small", *(f"size {i}" for i in range(28)), "small"])
    assert len(set(names)) == 30
    bars = [Bar(name=name, parts={"forward": 1.0}) for name in names]
    panel = Panel(x=Axis(names=names), y=Axis(), bars=bars)
    chart = Chart(name="many", title="Many", settings="", panels=[panel], styles=STYLES, is_lying=True)
    (axes,) = draw(chart).axes
    assert (
        [label.get_text() for label in axes.get_yticklabels()] == spec_of(chart)["layout"]["yaxis"]["ticktext"] == names
    )
    assert len({place for _, place, *_ in drawn_bars(chart, axes)}) == 30


def test_numbers_along_equal_distances_may_have_words() -> None:
    line = Line(name="fp32", points=(Point(x=0, value=1.0), Point(x=4, value=2.0)))
    names, (moved,) = along([0, 4], [line], {0: "none"})
    assert names == ["none", "4"]
    assert [(Axis(names=names).place(point.x), point.value) for point in moved.points] == [(0, 1.0), (1, 2.0)]


@pytest.mark.parametrize("text", [HOSTILE, *HOSTILE_TEXTS])
def test_a_hostile_text_is_shown_as_it_is_in_both(text, monkeypatch) -> None:
    monkeypatch.setattr(drawing, "DPI", 40)  # which is quicker
    charts = [make_bars(name=text), make_bars(True, text), make_lines(text)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph|constrained_layout")
        for chart in charts:
            png_of(chart)
            assert not any(re.search(r"[\x00-\x09\x0b-\x1f\x1b‮]", shown) for shown in texts(draw(chart)))
    for chart in charts:
        words = re.sub(r"<br>|<extra></extra>", "", json.dumps(_inert(spec_of(chart), bytearray())))
        assert "<" not in words
        assert "$" not in words
        assert "&lt;" in words or "<" not in text, "it is escaped and not left out"
