"""Pictures of hand-made memory profiles (see memory_profiles.py): what is drawn is what there was."""

import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from cs336_systems.analysis.memory.profile import Category
from cs336_systems.report import drawing
from cs336_systems.report.memory.plots import draw_memory, draw_peaks, write_pictures
from tests.report.drawn import overlaps, texts
from tests.report.kernels.test_plots import SIGHT, lab
from tests.report.making import HOSTILE
from tests.report.memory.profiles import make_bare, make_inference, make_memory, make_moment, make_oom

MAKERS = (make_memory, make_inference, make_bare, make_oom)


def areas(figure):
    """Memory x ms of each category that is drawn."""
    found = {}
    for patch in (part for part in figure.axes[0].collections if isinstance(part, PolyCollection)):
        (path,) = patch.get_paths()
        x, y = path.vertices[:, 0], path.vertices[:, 1]
        found[patch.get_label()] = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2  # shoelace
        assert to_hex(patch.get_facecolor()[0]) == drawing.CATEGORY_COLOURS[Category(patch.get_label())].lower()
    return found


def test_each_category_has_the_area_of_its_bytes_over_time() -> None:
    """Each step: 200 MiB for 5 ms, 400 for 3, 380 for 7 are saved; 20, 50 and 5 for 5, 7 and 5 ms temporary."""
    assert areas(draw_memory(make_memory())) == pytest.approx({
        "held throughout": 10 * 60, "parameters": 100 * 60, "optimizer state": 200 * 60,
        "gradients": 2 * (40 * 7 + 100 * 10), "saved activations": 2 * (200 * 5 + 400 * 3 + 380 * 7),
        "temporary": 2 * (20 * 5 + 50 * 7 + 5 * 5),
    })  # fmt: skip


def test_phases_and_steps_are_named_between_their_lines() -> None:
    figure = draw_memory(make_memory())
    shown = texts(figure)
    assert [shown.count(name) for name in ("forward", "backward", "optimizer", "step 0", "step 1")] == [2, 2, 2, 1, 1]
    (panel,) = figure.axes
    upright = sorted({line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 2})
    assert upright == pytest.approx([0, 10, 20, 30, 40, 50, 60])
    one = texts(draw_memory(make_inference()))
    assert "forward" in one
    assert not any("step" in text for text in one), "the only step needs no number"


def test_memory_from_a_gib_on_is_drawn_in_gib() -> None:
    (panel,) = draw_memory(make_memory()).axes
    assert panel.get_ylabel() == "memory (MiB)"
    figure = draw_memory(make_bare())
    assert figure.axes[0].get_ylabel() == "memory (GiB)"
    assert areas(figure) == pytest.approx({"held throughout": 1000 * 10 / 1024, "temporary": 500 * 4 / 1024})
    assert figure.axes[0].get_ylim()[1] > 2000 / 1024


def test_a_narrow_phase_has_a_short_name_or_none() -> None:
    whole = make_memory(num_steps=1, boundaries=make_memory().boundaries[:4])
    times_s = (0, 0.050, 0.0545, 0.0549)
    moved = [
        replace(phase, begin_s=begin_s, end_s=end_s)
        for phase, begin_s, end_s in zip(whole.phases[:3], times_s[:-1], times_s[1:], strict=True)
    ]
    shown = texts(draw_memory(replace(whole, phases=tuple(moved))))
    assert "forward" in shown
    assert "bwd" in shown
    assert not {"backward", "optimizer", "opt."} & set(shown)


def test_the_peak_is_marked_where_it_is() -> None:
    figure = draw_memory(make_memory())
    (panel,) = figure.axes
    (point,) = [line for line in panel.lines if line.get_marker() == "o"]
    assert (point.get_xdata()[0], point.get_ydata()[0]) == pytest.approx((13, 780))
    assert "peak 780.0 MiB, in backward" in texts(figure)
    assert panel.get_ylim()[1] > 900
    reserved = next(line for line in panel.lines if len(line.get_xdata()) == 13)
    assert set(reserved.get_ydata()) == {900}


def test_the_legend_says_what_the_peak_consists_of() -> None:
    (legend,) = draw_memory(make_memory()).legends
    assert {text.get_text() for text in legend.get_texts()} - {""} == {
        "held throughout, 10.00 MiB", "parameters, 100.0 MiB", "optimizer state, 200.0 MiB", "gradients, 40.00 MiB",
        "saved activations, 380.0 MiB", "temporary, 50.00 MiB", "reserved, 900.0 MiB",
    }  # fmt: skip


def test_out_of_memory_is_said() -> None:
    shown = texts(draw_memory(make_oom()))
    assert "Memory over time: peak 780.0 MiB, out of memory" in shown
    words = "asked for 300.0 MiB with 120.0 MiB free in forward of step 1".replace(" ", "\N{NO-BREAK SPACE}")
    assert any(words in text for text in shown)
    assert [shown.count(name) for name in ("forward", "fwd", "backward", "optimizer")] == [1, 1, 1, 1]


@pytest.mark.parametrize("make", MAKERS)
def test_no_words_cover_others_or_leave_the_picture(make) -> None:
    figure = draw_memory(make())
    beyond = [f"{tick:.1f}" for tick in figure.axes[0].get_yticks() if tick > figure.axes[0].get_ylim()[1]]
    assert [pair for pair in overlaps(figure) if pair[0] not in beyond] == [], "a tick above the panel is not drawn"
    assert overlaps(draw_peaks([[("small ctx 128 train fp32", make()), ("other", make_oom())]])) == []


def test_bars_hold_the_categories_of_the_peak() -> None:
    figure = draw_peaks([[("train", make_memory()), ("inference", make_inference())], [("bare", make_bare())]])
    first, second = figure.axes
    widths = [round(patch.get_width() * 1024, 6) for patch in first.patches]
    assert widths == [10, 100, 200, 40, 380, 50, 100, 60]
    assert [round(patch.get_width() * 1024, 6) for patch in second.patches] == [1000, 500]
    assert first.get_xlim()[1] == pytest.approx(900 / 1024)
    assert second.get_xlim()[1] == pytest.approx(2000 / 1024), "each group has its own scale"
    marks = [line.get_xdata()[0] * 1024 for line in first.lines if line.get_marker() == "|"]
    assert marks == pytest.approx([900, 200])
    assert {"780.0 MiB\nin backward", "160.0 MiB\nin forward", "1.46 GiB"} <= set(texts(figure))
    assert "780.0 MiB\nout of memory" in texts(draw_peaks([[("train", make_oom())]]))


def test_what_cannot_be_drawn_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one profile"):
        draw_peaks([])
    with pytest.raises(ValueError, match="at least one profile in each group"):
        draw_peaks([[("a", make_memory())], []])
    empty = replace(make_memory().timeline, time_s=(), categories=(), num_bytes=(), reserved_bytes=())
    with pytest.raises(ValueError, match=r"small.pickle: a picture needs points"):
        draw_memory(make_memory(timeline=empty))


def test_a_profile_of_one_moment_of_nothing_is_drawn() -> None:
    timeline = replace(make_bare().timeline, time_s=(0.0,), num_bytes=((0,), (0,)), reserved_bytes=(0,))
    peak = make_moment("", 0, 0, step=-1, counted=False)
    nothing = make_bare(timeline=timeline, peak=peak)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing.to_png(draw_memory(nothing))
        drawing.to_png(draw_peaks([[("nothing", nothing)]]))


def test_hostile_names_are_drawn_as_they_are(tmp_path) -> None:
    bad = f"</script>$x$ $\\frac{{\n{HOSTILE}" + "y" * 8000
    whole = make_memory()
    boundaries = tuple(m if m.phase == "start" else replace(m, phase=bad) for m in whole.boundaries)
    phases = tuple(replace(phase, phase=bad) for phase in whole.phases)
    failure = replace(make_oom().work.first_failure, phase=bad)
    work = replace(make_oom().work, first_failure=failure)
    profile = replace(
        whole, source=bad, boundaries=boundaries, phases=phases, work=work, peak=replace(whole.peak, phase=bad)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(write_pictures(profile, tmp_path)) == 1
        drawing.to_png(draw_peaks([[(bad, profile), ("_hidden", profile)]]))
    for figure in (draw_memory(profile), draw_peaks([[(bad, profile)]])):
        assert not any("\x1b" in text or "\0" in text for text in texts(figure))


@pytest.mark.parametrize("sight", SIGHT)
def test_everyone_tells_the_categories_apart(sight: str) -> None:
    assert set(drawing.CATEGORY_COLOURS) == set(Category)
    for one, other in itertools.combinations(drawing.CATEGORY_COLOURS.values(), 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 12  # about 2 is just seen
