import itertools
import warnings
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle, StepPatch

from cs336.analysis.kernels.classes import KernelClass
from cs336.analysis.kernels.step_profile import PicturedStep, StepLabel, StepProfile
from cs336.report import charts, draw
from cs336.report.charts import Chart
from cs336.report.draw import figure_of
from cs336.report.sections.kernels.bars import (
    COMPUTING,
    COPIES,
    EXPOSED,
    IDLE,
    OVERLAPPED,
    STYLES,
    communication_chart,
    configuration_chart,
    parts_ms,
)
from cs336.report.sections.kernels.plots import MAX_STREAMS, draw_steps, draw_timeline, utilisation
from tests.report.drawn import overlaps, texts
from tests.report.making import HOSTILE
from tests.report.sections.kernels.profiles import (
    make_cpu_profile,
    make_piece,
    make_profile,
    make_shared,
)

PRODUCT, SOFTMAX, ELEMENT_WISE, COPY, OTHER = (
    KernelClass.MATMUL,
    KernelClass.SOFTMAX,
    KernelClass.ELEMENT_WISE,
    KernelClass.COPY_AND_FILL,
    KernelClass.OTHER,
)


def configurations(profiles: list[tuple[str, StepProfile]]) -> Chart:
    chart = configuration_chart(profiles)
    assert chart is not None
    return chart


def test_the_parts_of_a_step_are_its_wall_time() -> None:
    """26 ms of wall time, of which 20 ms are kernels, 0.1 ms copies, and the rest idle; a CPU is
    never idle.
    """
    parts = parts_ms(make_profile())
    assert parts == pytest.approx(
        {PRODUCT: 11, SOFTMAX: 1.5, ELEMENT_WISE: 5.5, COPY: 1, OTHER: 1, COPIES: 0.1, IDLE: 5.9}
    )
    assert list(parts) == [name for name in STYLES if name in parts]
    assert parts[IDLE] == pytest.approx(sum(row.total_s for row in make_profile().idle) * 1e3 / 2)
    assert parts_ms(make_cpu_profile()) == pytest.approx(
        {PRODUCT: 18, SOFTMAX: 2, ELEMENT_WISE: 9, OTHER: 1}
    )


def test_a_shared_step_is_computing_communicating_both_or_idle() -> None:
    """28 ms, busy for 5 in forward, 10.1 in backward and 5 in the optimizer.

    Collectives run for 9 of these, and for 5 of them nothing else does.
    """
    chart = communication_chart(
        [("alone", make_profile()), ("shared", make_shared()), ("again", make_shared())]
    )
    assert chart is not None
    (panel,) = chart.panels
    bar, again = panel.bars
    assert (bar.name, again.name) == ("shared", "again")
    assert bar.parts == pytest.approx({COMPUTING: 11.1, OVERLAPPED: 4, EXPOSED: 5, IDLE: 7.9})
    assert communication_chart([("alone", make_profile()), ("shared", make_shared())]) is None


def test_configurations_share_a_scale_of_100() -> None:
    chart = configurations([("small, 128", make_profile()), ("on a CPU", make_cpu_profile())])
    (panel,) = chart.panels
    gpu, cpu = panel.bars
    assert [(bar.name, *bar.figures, sum(bar.parts.values())) for bar in panel.bars] == [
        ("small, 128", "26.0 ms", pytest.approx(100)),
        ("on a CPU", "32.0 ms", pytest.approx(100)),
    ]
    assert (gpu.parts[PRODUCT], gpu.parts[IDLE]) == pytest.approx((100 * 11 / 26, 100 * 5.9 / 26))
    assert cpu.parts[PRODUCT] == pytest.approx(100 * 18 / 30)
    (axes,) = figure_of(chart).axes
    assert axes.get_xlabel() == panel.label, "cut"
    assert configuration_chart([("small", make_profile())]) is None, (
        "one bar is compared with nothing"
    )


def test_an_empty_step_can_be_drawn_and_none_not() -> None:
    with pytest.raises(ValueError, match="none"):
        draw_timeline(make_cpu_profile())
    empty = make_profile(
        phases=(),
        classes=(),
        idle=(),
        gaps=(),
        pictured=PicturedStep(step=0, wall_s=0.001, windows=(), pieces=()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (draw_timeline(empty), figure_of(configurations([("nothing", empty)] * 2))):
            draw.to_png(figure)


def test_no_text_covers_another() -> None:
    for figure in (
        draw_timeline(make_profile()),
        figure_of(configurations([("small", make_profile())] * 3)),
    ):
        assert overlaps(figure) == []


def test_texts_of_a_file_are_inert() -> None:
    bad = f"</script>$x$ $\\frac{{\n{HOSTILE}" + "y" * 8000
    profile = replace(make_profile(), source=bad, device_names=(HOSTILE,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures = (
            draw_timeline(profile),
            figure_of(configurations([(bad, profile), ("_", profile)])),
        )
        for figure in figures:
            draw.to_png(figure)
    for figure in figures:
        assert not any("\x1b" in text or "\0" in text for text in texts(figure))


# one step over time


def test_utilisation_is_that_of_a_brute_force() -> None:
    pieces = [
        make_piece(PRODUCT, 0.25, 1.75),
        replace(make_piece(PRODUCT, 2.0, 4.0), busy_s=0.5e-3),
        make_piece(SOFTMAX, 3.0, 3.0),
        make_piece(SOFTMAX, 7.5, 9.0),
    ]
    edges = np.linspace(0, 8e-3, 9)
    found = utilisation(pieces, edges)
    ticks = (np.arange(8000) + 0.5) * 1e-6  # microsecond by microsecond
    for kind in (PRODUCT, SOFTMAX):
        density = np.zeros(8000)
        for piece in pieces:
            if piece.kind is kind and piece.end_s > piece.start_s:
                within = (ticks > piece.start_s) & (ticks < piece.end_s)
                density += within * piece.busy_s / (piece.end_s - piece.start_s)
        np.testing.assert_allclose(found[kind], density.reshape(8, 1000).mean(axis=1), atol=1e-9)
    assert list(found) == [PRODUCT, SOFTMAX]
    assert utilisation([], edges) == {}


def test_a_stream_is_drawn_as_busy_as_it_was() -> None:
    figure = draw_timeline(make_profile())
    phases, first, second = figure.axes
    assert [panel.get_ylabel() for panel in (first, second)] == [
        "stream 7\nbusy (%)",
        "stream 20\nbusy (%)",
    ]
    area: dict[str, float] = {}
    top = np.zeros(0)
    for patch in (patch for patch in first.patches if isinstance(patch, StepPatch)):
        values, edges, baseline = patch.get_data()
        if len(top):
            np.testing.assert_allclose(baseline, top)  # stacked
        top = values
        area[str(patch.get_label())] = float(((values - baseline) * np.diff(edges)).sum() / 100)
        assert (
            to_hex(patch.get_facecolor())
            == charts.CLASS_COLOURS[KernelClass(patch.get_label())].lower()
        )
    assert area == pytest.approx({PRODUCT: 10.9, SOFTMAX: 1.5, ELEMENT_WISE: 5.5, COPY: 1})
    assert top.max() <= 100 + 1e-9
    for panel in (phases, first, second):
        assert panel.get_xlim() == (0, pytest.approx(25))


def test_phases_are_drawn_on_the_host_and_on_the_device() -> None:
    panel = draw_timeline(make_profile()).axes[0]
    bars = [patch for patch in panel.patches if isinstance(patch, Rectangle)]
    drawn = {
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_x() + bar.get_width())
        for bar in bars
    }
    assert drawn == {(1, 0, 7), (0, 0, 8), (1, 7, 18), (0, 8, 20), (1, 18, 22), (0, 20, 25)}
    assert [label.get_text() for label in panel.get_yticklabels()] == ["CPU", "GPU"]
    assert [text.get_text() for text in panel.texts].count("backward") == 2


def test_a_phase_too_short_for_its_name_has_a_short_one_or_none() -> None:
    whole = make_profile()
    step = whole.pictured
    narrow = [
        replace(step.windows[0], host_end_s=end_s, device_end_s=end_s) for end_s in (0.0018, 0.0002)
    ]
    for window, said in zip(narrow, (["fwd", "fwd"], []), strict=True):
        panel = draw_timeline(replace(whole, pictured=replace(step, windows=(window,)))).axes[0]
        assert [text.get_text() for text in panel.texts] == said


def test_the_busiest_streams_are_drawn_and_the_rest_is_said() -> None:
    whole = make_profile()
    pieces = tuple(make_piece(PRODUCT, 0, 1 + stream, stream) for stream in range(MAX_STREAMS + 2))
    figure = draw_timeline(replace(whole, pictured=replace(whole.pictured, pieces=pieces)))
    labels = [panel.get_ylabel().partition("\n")[0] for panel in figure.axes[1:]]
    assert labels == [f"stream {stream}" for stream in range(2, MAX_STREAMS + 2)]
    assert any("2\xa0less\xa0busy\xa0streams" in text for text in texts(figure))


# several steps


def test_steps_beside_each_other_are_drawn_by_kind_on_one_scale() -> None:
    """Three of four steps of two kinds, of 10, 20 and 40 ms: a product for a half of
    each, beside it a softmax for a quarter.
    """
    steps = []
    for number, wall_s in ((0, 0.01), (1, 0.04), (3, 0.02)):
        window = replace(make_profile().pictured.windows[0], device_end_s=wall_s)
        pieces = (make_piece(PRODUCT, 0, 500 * wall_s, 7), make_piece(SOFTMAX, 0, 250 * wall_s, 8))
        steps.append(PicturedStep(step=number, wall_s=wall_s, windows=(window,), pieces=pieces))
    labels = tuple(StepLabel(kind=kind) for kind in ("decode", "prefill", "decode", "decode"))
    whole = replace(make_profile(), num_steps=4, step_labels=labels, beside=tuple(steps))
    figure = draw_steps(whole)
    lanes = [panel.get_yticklabels()[0].get_text().split() for panel in figure.axes]
    assert [(lane[0], lane[2]) for lane in lanes] == [
        ("decode", "1:"),
        ("decode", "4:"),
        ("prefill", "2:"),
    ]
    for panel, wall_ms in zip(figure.axes, (10, 20, 40), strict=True):
        assert panel.get_xlim() == (0, pytest.approx(40))
        area = defaultdict(float)
        for patch in (patch for patch in panel.patches if isinstance(patch, StepPatch)):
            values, edges, baseline = patch.get_data()
            area[patch.get_label()] += ((values - baseline) * np.diff(edges)).sum() / 100
        assert area == pytest.approx({PRODUCT: wall_ms / 2, SOFTMAX: wall_ms / 4})
    assert any("3 of 4" in text for text in texts(figure))


# colours

# Machado, Oliveira and Fernandes (2009), severity 1, in linear RGB
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def lab(colour: str, sight: str) -> np.ndarray:
    """CIE 1976 L*a*b* of an sRGB colour under D65, as it is seen."""
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(SIGHT[sight] @ linear, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
def test_everyone_tells_the_classes_apart(sight: str) -> None:
    assert set(charts.CLASS_COLOURS) == set(KernelClass)
    for one, other in itertools.combinations(charts.CLASS_COLOURS.values(), 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 12  # about 2 is just seen


def test_neighbours_differ_in_grey_too() -> None:
    lightness = [lab(colour, "normal")[0] for colour in charts.CLASS_COLOURS.values()]
    assert np.abs(np.diff(lightness)).min() > 12


def test_ink_is_readable_on_every_class() -> None:
    for colour in charts.CLASS_COLOURS.values():
        # WCAG 2: contrast of 4.5 for small text; lightness 50 is where black and white are as good
        assert lab(charts.ink(colour), "normal")[0] == pytest.approx(
            0 if lab(colour, "normal")[0] > 50 else 100, abs=1
        )
    assert (charts.ink("#FFFFFF"), charts.ink("#000000")) == ("#000000", "#FFFFFF")
