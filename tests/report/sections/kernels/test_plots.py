import io
import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import IdleCause, PicturedStep, StepProfile
from cs336_systems.report.plots import charts, draw
from cs336_systems.report.plots.draw import figure_of
from cs336_systems.report.sections.kernels.plots import (
    COMPUTING,
    COPIES,
    EXPOSED,
    IDLE,
    OVERLAPPED,
    STYLES,
    communication_chart,
    configuration_chart,
    draw_timeline,
    time_bars,
)
from tests.report.drawn import overlaps, texts
from tests.report.making import HOSTILE
from tests.report.sections.kernels.profiles import (
    DATA,
    FORWARD,
    make_cpu_profile,
    make_gap,
    make_inference,
    make_phase,
    make_profile,
    make_shared,
)

PRODUCT, SOFTMAX, ELEMENT_WISE, COPY, OTHER = (
    KernelClass.MATMUL, KernelClass.SOFTMAX, KernelClass.ELEMENT_WISE, KernelClass.COPY_AND_FILL,
    KernelClass.OTHER,
)  # fmt: skip


def draw_configurations(profiles: list[tuple[str, StepProfile]]) -> Figure:
    chart = configuration_chart(profiles)
    assert chart is not None
    return figure_of(chart)


def segments(panel: Axes) -> list[list[tuple[str, float, float]]]:
    """Of each bar from the top: what each part is, where it starts and how long it is."""
    names = {(style.colour.lower(), style.pattern * 4 or None): name for name, style in STYLES.items()}
    rows: dict[float, list[tuple[str, float, float]]] = {}
    for patch in panel.patches:
        assert isinstance(patch, Rectangle)
        row = round(patch.get_y() + patch.get_height() / 2, 6)
        name = names[to_hex(patch.get_facecolor()), patch.get_hatch()]
        rows.setdefault(row, []).append((name, patch.get_x(), patch.get_width()))
    return [rows[row] for row in sorted(rows)]


def legend(figure: Figure) -> dict[str, str]:
    """Colours by label, in the order in which the legend reads: row by row."""
    (found,) = figure.legends
    shown = [(text.get_text(), patch) for text, patch in zip(found.get_texts(), found.get_patches(), strict=True)]
    columns = found._ncols  # type: ignore[attr-defined]
    rows = -(-len(shown) // columns)
    by_row = [shown[column * rows + row] for row in range(rows) for column in range(columns)
              if column * rows + row < len(shown)]  # fmt: skip
    return {label: to_hex(patch.get_facecolor()) for label, patch in by_row if label}


def test_bars_hold_their_phases_up_to_the_wall_time() -> None:
    forward, backward, optimizer, step = time_bars(make_profile())
    assert [bar.row["phase"] for bar in (forward, backward, optimizer)] == ["forward", "backward", "optimizer"]
    assert forward.parts_ms == pytest.approx({PRODUCT: 3, SOFTMAX: 0.5, ELEMENT_WISE: 1.5, IDLE: 3})
    assert backward.parts_ms == pytest.approx({PRODUCT: 8, SOFTMAX: 1, COPY: 1, COPIES: 0.1, IDLE: 1.9})
    assert [bar.length_ms for bar in (forward, backward, optimizer, step)] == pytest.approx([8, 12, 6, 26])
    assert step.parts_ms == pytest.approx(
        {PRODUCT: 11, SOFTMAX: 1.5, ELEMENT_WISE: 5.5, COPY: 1, OTHER: 1, COPIES: 0.1, IDLE: 5.9}
    )
    assert list(step.parts_ms) == [name for name in STYLES if name in step.parts_ms]
    assert step.parts_ms[IDLE] == pytest.approx(sum(row.total_s for row in make_profile().idle) * 1e3 / 2)


def test_a_shared_step_is_computing_communicating_both_or_idle() -> None:
    """28 ms, busy for 5 in forward, 10.1 in backward and 5 in the optimizer.

    Collectives run for 9 of these, and for 5 of them nothing else does.
    """
    chart = communication_chart([("alone", make_profile()), ("shared", make_shared()), ("again", make_shared())])
    assert chart is not None
    (panel,) = chart.panels
    bar, again = panel.bars
    assert (bar.name, again.name) == ("shared", "again")
    assert bar.parts == pytest.approx({COMPUTING: 11.1, OVERLAPPED: 4, EXPOSED: 5, IDLE: 7.9})
    assert communication_chart([("alone", make_profile()), ("shared", make_shared())]) is None


def test_operators_are_never_idle() -> None:
    bars = time_bars(make_cpu_profile())
    assert [bar.length_ms for bar in bars] == pytest.approx([10, 16, 4, 30])
    assert not any(IDLE in bar.parts_ms for bar in bars)


@pytest.mark.parametrize(("wall_ms", "shown"), [(0.12, False), (0.14, True)])
def test_a_phase_that_ran_nothing_has_a_bar_if_it_took_long(wall_ms: float, shown: bool) -> None:
    whole = make_profile()  # 26 ms, of which 0.5 % is 0.13
    data = make_phase(DATA, (0, 0), (0, 0), (wall_ms, wall_ms), (wall_ms, wall_ms))
    names = [bar.row["phase"] for bar in time_bars(replace(whole, phases=(data, *whole.phases)))]
    assert ("data" in names) is shown
    copying = replace(data, copies=(1, 1))
    assert time_bars(replace(whole, phases=(copying, *whole.phases)))[0].row["phase"] == "data"


def test_configurations_share_a_scale_of_100() -> None:
    figure = draw_configurations([("small, 128", make_profile()), ("on a CPU", make_cpu_profile())])
    (panel,) = figure.axes
    gpu, cpu = segments(panel)
    assert sum(width for *_, width in gpu) == pytest.approx(100)
    assert sum(width for *_, width in cpu) == pytest.approx(100)
    assert {name: width for name, _, width in gpu}[PRODUCT] == pytest.approx(100 * 11 / 26)
    assert {name: width for name, _, width in gpu}[IDLE] == pytest.approx(100 * 5.9 / 26)
    assert {name: width for name, _, width in cpu}[PRODUCT] == pytest.approx(100 * 18 / 30)
    assert [label.get_text() for label in panel.get_yticklabels()] == ["small, 128", "on a CPU"]
    assert {"26.0 ms", "32.0 ms", "42"} <= set(texts(figure))
    assert set(legend(figure)) == {*time_bars(make_profile())[-1].parts_ms}
    assert configuration_chart([("small", make_profile())]) is None, "one bar is compared with nothing"


def test_pictures_have_the_width_of_a_page() -> None:
    with Image.open(io.BytesIO(draw.to_png(draw_timeline(make_profile())))) as image:
        assert image.width == 6.5 * draw.DPI
        assert 300 <= image.height <= 900
    with pytest.raises(ValueError, match="none"):
        draw_timeline(make_cpu_profile())


def test_an_empty_step_can_be_drawn() -> None:
    empty = make_profile(phases=(), classes=(), idle=(), gaps=(), pictured=PicturedStep(
        step=0, wall_s=0.001, windows=(), pieces=()))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (draw_timeline(empty), draw_configurations([("nothing", empty)] * 2)):
            draw.to_png(figure)


def make_long_names():
    gap = make_gap(
        0, 3, 1, FORWARD, IdleCause.LATE_LAUNCH, module=("block.47", "attention", "attention.softmax"),
        after="sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8", host_call="cudaLaunchKernelExC_v11060",
    )  # fmt: skip
    return make_profile(gaps=tuple(replace(gap, start_s=gap.start_s + 0.2e-3 * index) for index in range(3)))


@pytest.mark.parametrize("make", [make_profile, make_inference, make_long_names], ids=["train", "inference", "long"])
def test_no_text_covers_another(make) -> None:
    for figure in (
        draw_timeline(make()),
        draw_configurations([("small", make())] * 3),
    ):
        assert overlaps(figure) == []


def test_texts_of_a_file_are_inert() -> None:
    whole = make_profile()
    bad = f"</script>$x$ $\\frac{{\n{HOSTILE}" + "y" * 8000
    gaps = tuple(replace(gap, after=bad, module=(bad,), host_call=bad) for gap in whole.gaps)
    profile = replace(whole, source=bad, device_names=(HOSTILE,), gaps=gaps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures = (draw_timeline(profile), draw_configurations([(bad, profile), ("_", profile)]))
        for figure in figures:
            draw.to_png(figure)
    for figure in figures:
        assert not any("\x1b" in text or "\0" in text for text in texts(figure))


# Machado, Oliveira and Fernandes (2009), severity 1, in linear RGB
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip


def lab(colour: str, sight: str) -> np.ndarray:
    """CIE 1976 L*a*b* of an sRGB colour under D65, as it is seen."""
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
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
        assert lab(charts.ink(colour), "normal")[0] == pytest.approx(0 if lab(colour, "normal")[0] > 50 else 100, abs=1)
    assert (charts.ink("#FFFFFF"), charts.ink("#000000")) == (charts.BLACK, charts.WHITE)


def test_a_short_last_row_of_a_legend_stays_a_row() -> None:
    for count in (1, 3, 4, 7):
        figure = Figure()
        draw.legend_below(figure, [Patch(label=str(index)) for index in range(count)], 3)
        assert list(legend(figure)) == [str(index) for index in range(count)]
