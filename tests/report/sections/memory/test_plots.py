"""Pictures of hand-made memory profiles (see profiles.py): what is drawn is what there was."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from cs336.analysis.memory.profile import Category
from cs336.report import charts
from cs336.report.draw import MOST_POINTS, figure_of
from cs336.report.sections.memory.bars import peak_charts
from cs336.report.sections.memory.entry import MemoryEntry
from cs336.report.sections.memory.plots import draw_memory
from tests.report.drawn import overlaps, texts
from tests.report.making import make_config
from tests.report.sections.kernels.test_plots import SIGHT, lab
from tests.report.sections.memory.profiles import make_bare, make_inference, make_memory, make_oom

MAKERS = (make_memory, make_inference, make_bare, make_oom)


SIZES = {"other.pickle": "large"}
"""By source; each size has a panel."""


def draw_peaks(*profiles):
    entries = [
        MemoryEntry(
            subject=make_config(
                "large" if profile.source == "other.pickle" else "small", 128 << place
            ),
            profile=profile,
        )
        for place, profile in enumerate(profiles)
    ]
    (chart,) = peak_charts(entries)
    return figure_of(chart)


def areas(figure):
    """Memory x points of the timeline of each category that is drawn."""
    found = {}
    for patch in (part for part in figure.axes[0].collections if isinstance(part, PolyCollection)):
        (path,) = patch.get_paths()
        x, y = path.vertices[:, 0], path.vertices[:, 1]
        # shoelace
        found[patch.get_label()] = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
        assert (
            to_hex(patch.get_facecolor()[0])
            == charts.CATEGORY_COLOURS[Category(patch.get_label())].lower()
        )
    return found


def test_each_category_has_the_area_of_its_bytes_over_the_points_of_the_timeline() -> None:
    """12 steps from point to point; in each of two steps 200, 400 and 380 MiB are saved, and 20,
    50 and 5 temporary.
    """
    assert areas(draw_memory(make_memory())) == pytest.approx(
        {
            "held throughout": 10 * 12,
            "parameters": 100 * 12,
            "optimizer state": 200 * 12,
            "gradients": 2 * (40 + 100 + 100),
            "saved activations": 2 * (200 + 400 + 380),
            "temporary": 2 * (20 + 50 + 5),
        }
    )


def test_phases_and_steps_are_named_between_their_lines() -> None:
    figure = draw_memory(make_memory())
    shown = texts(figure)
    assert [
        shown.count(name) for name in ("forward", "backward", "optimizer", "step 0", "step 1")
    ] == [2, 2, 2, 1, 1]
    (panel,) = figure.axes
    upright = sorted({line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 2})
    assert upright == [0, 2, 4, 6, 8, 10, 12], "the numbers of the points at 0, 10, 20, ... ms"
    ticks = dict(
        zip(panel.get_xticks(), (text.get_text() for text in panel.get_xticklabels()), strict=True)
    )
    assert ticks == {0: "0.00", 2: "10.0", 4: "20.0", 6: "30.0", 8: "40.0", 10: "50.0", 12: "60.0"}
    one = texts(draw_memory(make_inference()))
    assert "forward" in one
    assert not any("step" in text for text in one), "the only step needs no number"


def test_the_peak_is_marked_where_it_is() -> None:
    figure = draw_memory(make_memory())
    (panel,) = figure.axes
    (point,) = [line for line in panel.lines if line.get_marker() == "o"]
    assert (point.get_xdata()[0], point.get_ydata()[0]) == pytest.approx((3, 780))
    assert panel.get_ylim()[1] > 900
    assert [tuple(map(float, xy)) for xy in reserved_line(panel)] == [(0, 900), (12, 900)]


def reserved_line(panel):
    (line,) = [line for line in panel.lines if line.get_drawstyle() == "steps-post"]
    return line.get_xydata()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_reserved_is_a_line_of_its_corners(seed) -> None:
    """A line of more points than MOST_POINTS is an image on a page, dark on a dark one."""
    rng = random.Random(seed)
    profile = make_memory()
    steps = [rng.choice([800, 900, 1000]) * 2**20 for _ in range(50)]
    reserved_bytes = [steps[point // 40] for point in range(2000)]
    timeline = replace(
        profile.timeline,
        time_s=tuple(point / 1e3 for point in range(2000)),
        num_bytes=tuple((0,) * 2000 for _ in profile.timeline.categories),
        reserved_bytes=tuple(reserved_bytes),
    )
    figure = draw_memory(replace(profile, timeline=timeline))
    corners = reserved_line(figure.axes[0])
    assert len(corners) <= MOST_POINTS
    levels = dict(corners.tolist())
    shown, level = [], None
    for point in range(2000):
        level = levels.get(point, level)
        shown.append(level * 2**20)
    assert shown == pytest.approx(reserved_bytes)


def test_out_of_memory_is_said_and_marked_where_it_was() -> None:
    figure = draw_memory(make_oom())
    shown = texts(figure)
    assert "Memory over time: peak 780.0 MiB, out of memory" in shown
    assert [shown.count(name) for name in ("forward", "backward", "optimizer")] == [2, 1, 1]
    (panel,) = figure.axes
    marks = [
        line.get_xdata()[0] for line in panel.lines if line.get_color() == charts.FAILURE_COLOUR
    ]
    assert marks == [7], "the number of the point at 35 ms"
    assert panel.get_xlim() == (0, 7), "what comes later is of no step"


@pytest.mark.parametrize("make", MAKERS)
def test_no_words_cover_others_or_leave_the_picture(make) -> None:
    figure = draw_memory(make())
    beyond = [
        f"{tick:.1f}" for tick in figure.axes[0].get_yticks() if tick > figure.axes[0].get_ylim()[1]
    ]
    assert [pair for pair in overlaps(figure) if pair[0] not in beyond] == [], (
        "a tick above the panel is not drawn"
    )
    assert overlaps(draw_peaks(make(), make_oom())) == []


def test_bars_hold_the_categories_of_the_peak() -> None:
    figure = draw_peaks(make_memory(), make_inference(), make_bare())
    first, second = figure.axes
    widths = [round(patch.get_width() * 1024, 6) for patch in first.patches]
    assert widths == [10, 100, 200, 40, 380, 50, 100, 60]
    assert [round(patch.get_width() * 1024, 6) for patch in second.patches] == [1000, 500]
    assert first.get_xlim()[1] == pytest.approx(900 / 1024)
    assert second.get_xlim()[1] == pytest.approx(2000 / 1024), "each group has its own scale"
    marks = [float(line.get_xdata()[0]) * 1024 for line in first.lines if line.get_marker() == "|"]
    assert marks == pytest.approx([900, 200])
    assert {"780.0 MiB\nin backward", "160.0 MiB\nin forward", "1.46 GiB"} <= set(texts(figure))
    assert "780.0 MiB\nout of memory" in texts(draw_peaks(make_oom(), make_oom()))


@pytest.mark.parametrize("sight", SIGHT)
def test_everyone_tells_the_categories_apart(sight: str) -> None:
    assert set(charts.CATEGORY_COLOURS) == set(Category)
    for one, other in itertools.combinations(charts.CATEGORY_COLOURS.values(), 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 12  # about 2 is just seen


def test_a_file_without_times_is_drawn_without_them() -> None:
    profile = make_bare()
    peak = replace(profile.peak, time_s=None)
    timeline = replace(profile.timeline, time_s=())
    (panel,) = draw_memory(replace(profile, peak=peak, timeline=timeline)).axes
    assert not panel.get_xticklabels()
    assert panel.get_xlim()[1] == len(timeline.reserved_bytes) - 1
