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
from cs336_systems.report.plots import drawing, palette
from cs336_systems.report.plots.draw import draw
from cs336_systems.report.sections.kernels.plots import (
    COMPUTING,
    COPIES,
    EXPOSED,
    IDLE,
    OVERLAPPED,
    STYLES,
    class_chart,
    communication_chart,
    configuration_chart,
    draw_timeline,
    rounded_within,
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


def draw_classes(profile: StepProfile) -> Figure:
    return draw(class_chart(profile))


def draw_configurations(profiles: list[tuple[str, StepProfile]]) -> Figure:
    return draw(configuration_chart(profiles))


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
    chart = communication_chart([("alone", make_profile()), ("shared", make_shared())])
    assert chart is not None
    (panel,) = chart.panels
    (bar,) = panel.bars
    assert bar.name == "shared"
    assert bar.parts == pytest.approx({COMPUTING: 11.1, OVERLAPPED: 4, EXPOSED: 5, IDLE: 7.9})
    assert communication_chart([("alone", make_profile())]) is None


def test_operators_are_never_idle() -> None:
    bars = time_bars(make_cpu_profile())
    assert [bar.length_ms for bar in bars] == pytest.approx([10, 16, 4, 30])
    assert not any(IDLE in bar.parts_ms for bar in bars)
    assert IDLE not in [name for row in segments(draw_classes(make_cpu_profile()).axes[0]) for name, *_ in row]


@pytest.mark.parametrize(("wall_ms", "shown"), [(0.12, False), (0.14, True)])
def test_a_phase_that_ran_nothing_has_a_bar_if_it_took_long(wall_ms: float, shown: bool) -> None:
    whole = make_profile()  # 26 ms, of which 0.5 % is 0.13
    data = make_phase(DATA, (0, 0), (0, 0), (wall_ms, wall_ms), (wall_ms, wall_ms))
    names = [bar.row["phase"] for bar in time_bars(replace(whole, phases=(data, *whole.phases)))]
    assert ("data" in names) is shown
    copying = replace(data, copies=(1, 1))
    assert time_bars(replace(whole, phases=(copying, *whole.phases)))[0].row["phase"] == "data"


def test_what_is_drawn_of_the_classes() -> None:
    figure = draw_classes(make_profile())
    (panel,) = figure.axes
    forward, backward, optimizer = segments(panel)
    assert [(name, pytest.approx(left), pytest.approx(width)) for name, left, width in forward] == [
        (PRODUCT, 0, 3), (SOFTMAX, 3, 0.5), (ELEMENT_WISE, 3.5, 1.5), (IDLE, 5, 3),
    ]  # fmt: skip
    assert [name for name, *_ in backward] == [PRODUCT, SOFTMAX, COPY, COPIES, IDLE]
    assert [width for _, _, width in optimizer] == pytest.approx([4, 1, 1])
    assert panel.get_xlim() == (0, pytest.approx(12))
    assert [label.get_text() for label in panel.get_yticklabels()] == [
        "forward, 7 kernels", "backward, 8 kernels", "optimizer, 10 kernels",
    ]  # fmt: skip
    assert panel.yaxis_inverted()
    shown = texts(figure)
    assert {"8.00 ms wall\n62 % busy", "12.0 ms wall\n84 % busy", "6.00 ms wall\n83 % busy"} <= set(shown)
    assert "8.0" in shown  # backward's products
    assert "0.10" not in shown  # too short for its value
    assert "GPU time by phase and class of kernel" in shown
    assert any("small.nsys-rep" in text and "mean" in text for text in shown)


def test_a_legend_reads_row_by_row_with_the_sums_of_the_step() -> None:
    assert legend(draw_classes(make_profile())) == {
        "matrix product, 11.00 ms": "#0072b2",
        "softmax, 1.50 ms": "#d55e00",
        "element-wise, 5.50 ms": "#e69f00",
        "copy and fill, 1.00 ms": palette.CLASS_COLOURS[COPY].lower(),
        "other, 1.00 ms": "#cc79a7",
        "copy by the driver, 0.10 ms": "#ffffff",
        "idle, 5.90 ms": "#ffffff",
    }
    assert list(legend(draw_classes(make_profile())))[:3] == [
        "matrix product, 11.00 ms", "softmax, 1.50 ms", "element-wise, 5.50 ms",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "whole", "said"),
    [(11.304, 43.26, "11.30"), (0.0159, 43.26, "0.02"), (0.0049, 43.26, "< 0.01"), (579.04, 669, "579.0"),
     (1234.5, 23456, "1,234"), (0.2, 23456, "< 1"), (0.25, 0.5, "0.2500")],
)  # fmt: skip
def test_sums_are_rounded_to_four_digits_of_the_whole(value: float, whole: float, said: str) -> None:
    assert rounded_within(value, whole) == said


def test_kernels_side_by_side_are_said_so() -> None:
    whole = make_profile()
    phases = tuple(replace(phase, busy_s=tuple(0.5 * time for time in phase.kernel_s)) for phase in whole.phases)
    # 20 ms of kernels and 0.1 ms of copies in 10 ms
    assert any("10.1\xa0ms\xa0of\xa0kernels" in text for text in texts(draw_classes(replace(whole, phases=phases))))
    assert not any("beside" in text for text in texts(draw_classes(whole)))


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
    with pytest.raises(ValueError, match="at least one profile"):
        draw_configurations([])


def test_pictures_have_the_width_of_a_page() -> None:
    for figure in (draw_classes(make_profile()), draw_timeline(make_profile())):
        with Image.open(io.BytesIO(drawing.to_png(figure))) as image:
            assert image.width == 6.5 * drawing.DPI
            assert 300 <= image.height <= 900
    with pytest.raises(ValueError, match="none"):
        draw_timeline(make_cpu_profile())


def test_an_empty_step_can_be_drawn() -> None:
    empty = make_profile(phases=(), classes=(), idle=(), gaps=(), pictured=PicturedStep(
        step=0, wall_s=0.001, windows=(), pieces=()))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (draw_classes(empty), draw_timeline(empty), draw_configurations([("nothing", empty)])):
            drawing.to_png(figure)


def make_long_names():
    gap = make_gap(
        0, 3, 1, FORWARD, IdleCause.LATE_LAUNCH, module=("block.47", "attention", "attention.softmax"),
        after="sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8", host_call="cudaLaunchKernelExC_v11060",
    )  # fmt: skip
    return make_profile(gaps=tuple(replace(gap, start_s=gap.start_s + 0.2e-3 * index) for index in range(3)))


@pytest.mark.parametrize("make", [make_profile, make_inference, make_long_names], ids=["train", "inference", "long"])
def test_no_text_covers_another(make) -> None:
    for figure in (
        draw_classes(make()),
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
        figures = (draw_classes(profile), draw_timeline(profile), draw_configurations([(bad, profile), ("_", profile)]))
        for figure in figures:
            drawing.to_png(figure)
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
    assert set(palette.CLASS_COLOURS) == set(KernelClass)
    for one, other in itertools.combinations(palette.CLASS_COLOURS.values(), 2):
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 12  # about 2 is just seen


def test_neighbours_differ_in_grey_too() -> None:
    lightness = [lab(colour, "normal")[0] for colour in palette.CLASS_COLOURS.values()]
    assert np.abs(np.diff(lightness)).min() > 12


def test_ink_is_readable_on_every_class() -> None:
    for colour in palette.CLASS_COLOURS.values():
        # WCAG 2: contrast of 4.5 for small text; lightness 50 is where black and white are as good
        assert palette.ink(colour) == ("black" if lab(colour, "normal")[0] > 50 else "white")
    assert (palette.ink("#FFFFFF"), palette.ink("#000000")) == ("black", "white")


def test_a_short_last_row_of_a_legend_stays_a_row() -> None:
    for count in (1, 3, 4, 7):
        figure = Figure()
        drawing.legend_below(figure, [Patch(label=str(index)) for index in range(count)], 3)
        assert list(legend(figure)) == [str(index) for index in range(count)]
