"""Charts as PNGs and SVGs: each shows every bar, point, failed run and text of the chart."""

import re
from xml.etree import ElementTree

from matplotlib.colors import to_hex

from cs336.report.charts import (
    CATEGORY_COLOURS,
    CLASS_COLOURS,
    PHASE_COLOURS,
    Bar,
    Chart,
    Panel,
    Style,
    ink,
)
from cs336.report.draw import figure_of, svg_of
from tests.report.drawn import overlaps, texts

STYLES = {
    "forward": Style(colour="#0072B2"),
    "idle": Style(colour="#FFFFFF", pattern="/", ink="#BBBBBB"),
}


def make_bars(name="small"):
    """Two panels of two bars; the second of the second panel failed; a mark at the first bar."""
    first = Panel(
        label="time (ms)",
        mark=f"{name} mean",
        bars=[
            Bar(name=name, parts={"forward": 1.0, "idle": 2.0}, figures=["3.00", name], mark=3.5),
            Bar(name="xl", parts={"forward": 4.0}),
        ],
    )
    lost = [Bar(name=name, parts={"idle": 5.0}), Bar(name="xl", failure=f"out of memory {name}")]
    second = Panel(label="time (ms)", bars=lost)
    return Chart(
        name="bars",
        title=f"Times {name}",
        settings=f"H200, {name}",
        panels=[first, second],
        styles=STYLES,
    )


def drawn_bars(axes):
    """Of each part that matplotlib drew: colour, place, where it begins and how long it is."""
    across = [(p.get_y() + p.get_height() / 2, p.get_x(), p.get_width()) for p in axes.patches]
    return sorted(
        (to_hex(patch.get_facecolor()), *map(near, own))
        for patch, own in zip(axes.patches, across, strict=True)
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


def test_the_legend_says_each_thing_once() -> None:
    (legend,) = figure_of(make_bars()).legends
    assert {text.get_text() for text in legend.get_texts()} - {""} == {
        "forward",
        "idle",
        "small mean",
    }


def test_an_svg_has_each_word_as_text() -> None:
    chart = make_bars()
    svg = svg_of(chart, "a")
    root = ElementTree.fromstring(svg)
    words = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert set(words) >= {
        line for text in texts(figure_of(chart)) for line in text.split("\n") if line.strip()
    }
    assert {"#0072b2", "light-dark(#e5e5e5, #2c2c2c)"} <= set(
        re.findall(r"(?:fill|stroke): ([^;]*?)[;\"]", svg)
    )
    assert svg == svg_of(chart, "a")
    assert len(svg) < 40_000


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    shares = [value / 255 for value in bytes.fromhex(colour[1:])]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_words_stand_out_from_the_colours_of_their_bars() -> None:
    for colour in (*CLASS_COLOURS.values(), *CATEGORY_COLOURS.values(), *PHASE_COLOURS.values()):
        low, high = sorted(map(luminance, (ink(colour), colour)))
        assert (high + 0.05) / (low + 0.05) > 3.5
