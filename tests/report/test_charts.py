"""Charts as PNGs and SVGs: each shows every bar, point, failed run and text of the chart."""

import random
import re
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex

from cs336.analysis.kernels.classes import KernelClass
from cs336.report.charts import (
    CATEGORY_COLOURS,
    CLASS_COLOURS,
    LAUNCH_PHASES,
    PHASE_COLOURS,
    PHASE_STYLES,
    Bar,
    Chart,
    Panel,
    Style,
    ink,
)
from cs336.report.draw import LONGEST_LABEL, figure_of, svg_of, wrapped
from cs336.report.sections.kernels.bars import COMMUNICATION, EXPOSED
from cs336.report.sections.kernels.bars import STYLES as STYLES_OF_WORK
from cs336.report.sections.memory.bars import CATEGORIES
from cs336.report.sections.plan import PARTS as PARTS_OF_PLAN
from cs336.report.sections.steps import PARTS
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


def drawn_chart(rng):
    """Panels of bars with names, figures, failures, settings and lengths of any size."""
    word = rng.choice(["ctx 512", "xl", "path.to.module", "ddp-overlap ranks 2 shard optimizer"])
    panels = []
    for label in rng.choices(["time (ms)", "memory (GiB)"], k=rng.choice([1, 2, 3])):
        bars = []
        longest = 10 ** rng.uniform(-3, 6)
        for place in range(rng.choice([1, 2, 7])):
            parts = {name: longest * rng.random() for name in STYLES}
            figures = ["1,012.80 ± 0.08 ? ms", "57.7 GiB"][: rng.randrange(3)]
            bars.append(Bar(name=f"{word} {place}", parts=parts, figures=figures))
        if rng.random() < 0.4:
            bars = [Bar(name=bar.name, failure="out of memory\nin backward") for bar in bars]
        panels.append(Panel(label=label, bars=bars))
    settings = ", ".join([f"{word} a setting"] * rng.choice([0, 1, 9]))
    return Chart(name="a", title=word, settings=settings, panels=panels, styles=STYLES)


@pytest.mark.parametrize("seed", range(12))
def test_texts_of_a_chart_lie_apart_and_each_scale_has_its_unit(seed) -> None:
    chart = drawn_chart(random.Random(seed))
    figure = figure_of(chart)
    assert overlaps(figure) == []
    scales = [[label.get_text() for label in axes.get_xticklabels()] for axes in figure.axes]
    labels = [axes.get_xlabel() for axes in figure.axes]
    for place, panel in enumerate(chart.panels):
        assert next(filter(None, labels[place:])) == panel.label
        assert bool(scales[place]) is any(bar.parts for bar in panel.bars), "no run, no scale"
        for number in scales[place]:
            assert number == f"{float(number.replace(',', '')):,.9g}"
            assert len(number) <= 9


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


def to_linear(colour: str) -> np.ndarray:
    """Red, green and blue by the curve of sRGB."""
    shares = [value / 255 for value in bytes.fromhex(colour[1:])]
    return np.array([s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares])


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    return float(to_linear(colour) @ (0.2126, 0.7152, 0.0722))


def test_words_stand_out_from_the_colours_of_their_bars() -> None:
    for colour in (*CLASS_COLOURS.values(), *CATEGORY_COLOURS.values(), *PHASE_COLOURS.values()):
        low, high = sorted(map(luminance, (ink(colour), colour)))
        assert (high + 0.05) / (low + 0.05) > 3.5


TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
"""Oklab (Ottosson 2020)."""
VIEWS = [
    np.eye(3),
    np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
]
"""What people see: all colours, without red cones, and without green ones (Machado et al. 2009)."""
JUST_SEEN = 0.02
"""Distance in Oklab of two colours that can just be told apart beside each other."""
ON_ONE_PAGE = {
    "a sweep under a profiler": (PARTS, STYLES_OF_WORK, COMMUNICATION),
    "a trace": (LAUNCH_PHASES, STYLES_OF_WORK),
    "a sweep with snapshots": (PARTS, CATEGORIES),
    "a plan": (PHASE_STYLES, PARTS_OF_PLAN),
}
"""The styles of pictures that stand together."""
ONE_THING = dict.fromkeys((EXPOSED, "exposed communication"), str(KernelClass.COMMUNICATION))


def oklab(colour: str, view: np.ndarray) -> np.ndarray:
    seen = np.clip(view @ to_linear(colour), 0, 1)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ seen)


@pytest.mark.parametrize("page", ON_ONE_PAGE)
def test_no_colour_of_a_page_stands_for_two_things_and_nothing_has_two_colours(page) -> None:
    """Colours in different pictures are not beside each other, so that they are four times as far
    apart as those that can just be seen to differ; for people who see fewer, once as far.
    """
    colours: dict[str, str] = {}
    for styles in ON_ONE_PAGE[page]:
        for name, look in styles.items():
            if not look.pattern:
                thing = ONE_THING.get(name, str(name))
                assert colours.setdefault(thing, look.colour) == look.colour, name
    for view, least in zip(VIEWS, (4 * JUST_SEEN, JUST_SEEN, JUST_SEEN), strict=True):
        seen = {name: oklab(colour, view) for name, colour in colours.items()}
        for one, other in combinations(seen, 2):
            assert np.linalg.norm(seen[one] - seen[other]) > least, (one, other)


SETTINGS = "ctx", "batch", "micro-batches", "bf16 stream", "steps", "d_model", "keep hidden"


@pytest.mark.parametrize("seed", range(40))
def test_a_label_keeps_numbers_beside_the_settings_that_they_are_of(seed):
    chance = random.Random(seed)
    parts = [f"{chance.choice(SETTINGS)} {chance.choice((1, 15, 1024, 0.5))}" for _ in range(5)]
    label = " ".join(["gpt2-xl", *parts])
    lines = wrapped(label).split("\n")
    assert " ".join(lines).replace("\N{NO-BREAK SPACE}", " ") == label or "…" in "".join(lines)
    assert not any(re.match(r"[\d.]+( |$)", line) for line in lines)
    assert all(len(line) <= LONGEST_LABEL for line in lines)
