import statistics
import warnings
from dataclasses import replace

import pytest
from PIL import Image

from cs336_systems.config import Mode, Phase, Precision
from cs336_systems.record import Status
from cs336_systems.report import drawing
from cs336_systems.report.frame import to_frame, warmup_frame
from cs336_systems.report.plots import draw_contexts, draw_phases, draw_speed_ups, write_plots
from cs336_systems.report.series import (
    Bar,
    Line,
    Point,
    context_lines,
    phase_bars,
    size_names,
    speed_up_lines,
    split,
    steady,
    warmup_lines,
)
from tests.report.making import HOSTILE, make_config, make_failure, make_record


def texts(figure):
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def part(grid, precision):
    return next(part for part in split(to_frame(grid)) if part["precision"].iloc[0] == precision)


def test_bars_hold_the_phases_and_the_rest_of_the_step(grid):
    bars = phase_bars(part(grid, "fp32"))
    assert [(bar.size, bar.context_length) for bar in bars] == [
        ("small", 128),
        ("xl", 128),
        ("small", 512),
        ("xl", 512),
    ]
    assert bars[0].phases_ms == pytest.approx({Phase.FORWARD: 25, Phase.BACKWARD: 50, Phase.OPTIMIZER: 12.5})
    assert bars[0].rest_ms == pytest.approx(12.5)
    assert (bars[0].step.value, bars[0].step.error) == pytest.approx((100, statistics.stdev([90, 100, 110])))
    assert bars[3] == Bar(
        size="xl", context_length=512, step=Point(x="xl", value=None, failure="out of memory"), phases_ms={}
    )


def test_context_lines_have_known_and_failed_points(grid):
    small, xl = context_lines(part(grid, "fp32"))
    assert [(point.x, point.value) for point in small.points] == [(128, pytest.approx(100)), (512, pytest.approx(400))]
    assert [point.x for point in xl.known] == [128]
    assert [(point.x, point.failure) for point in xl.failed] == [(512, "out of memory")]


def test_speed_up_lines_pair_whatever_there_is(grid):
    short, long = speed_up_lines(to_frame(grid), Precision.BF16)
    assert [(point.x, point.value) for point in short.points] == [("small", pytest.approx(2)), ("xl", pytest.approx(2))]
    assert [point.failure for point in long.points] == [None, "fp32 out of memory"]
    assert speed_up_lines(to_frame(grid), Precision.TF32) == []
    assert speed_up_lines(to_frame(grid[:1]), Precision.BF16) == []
    both = [make_failure(make_config(precision=precision)) for precision in (Precision.FP32, Precision.BF16)]
    assert speed_up_lines(to_frame(both), Precision.BF16)[0].points[0].failure == "both out of memory"


def test_warmup_lines(warmup_records):
    (size,) = warmup_lines(warmup_frame(warmup_records))
    assert [point.x for point in size.step.points] == [0, 1, 2, 5]
    assert [point.value for point in size.first.known] == pytest.approx([1000, 200, 100])
    expected = statistics.stdev([1.0, 0.1, 0.1]) / 0.4
    assert size.cv.points[0].value == pytest.approx(expected)
    assert [(point.x, point.failure) for point in size.step.failed] == [(2, "killed")]


def test_only_the_most_warmed_up_rows_are_steady(warmup_records):
    other = make_record(make_config("medium", warmup_steps=1), (0.1,))
    assert steady(to_frame([*warmup_records, other]))["warmup_steps"].tolist() == [5, 1]


@pytest.mark.parametrize(
    "other", [{"batch_size": 2}, {"seed": 3}, {"mode": Mode.FORWARD}, {"precision": Precision.BF16}], ids=str
)
def test_one_picture_never_holds_two_settings(other):
    records = [make_record(make_config(**fields), (0.1,)) for fields in ({}, other)]
    assert [len(rows) for rows in split(to_frame(records))] == [1, 1]


def test_split_keeps_devices_apart_and_nameless_failures_with_the_only_one():
    here, failed = make_record(make_config(), (0.1,)), make_failure(make_config("xl"))
    there = make_record(make_config("medium"), (0.1,), device_name="NVIDIA A100")
    assert [len(rows) for rows in split(to_frame([here, failed]))] == [2]
    assert [len(rows) for rows in split(to_frame([here, there]))] == [1, 1]


def test_sizes_of_one_name_and_several_shapes_get_names_of_their_own():
    configs = [make_config("custom", model={"num_layers": layers}) for layers in (3, 5)]
    frame = to_frame([make_failure(config) for config in (*configs, make_config())])
    assert size_names(frame) == ["small", "custom 128x3", "custom 128x5"]


def test_pictures_are_those_that_the_records_support(grid, warmup_records, tmp_path):
    def stems(records):
        return {path.stem for path in write_plots(records, tmp_path)}

    assert stems([]) == stems([make_failure(make_config())]) == stems(grid[:1]) == set()
    assert stems(grid) == {
        "step_time_train_fp32", "context_train_fp32", "step_time_train_bf16", "context_train_bf16",
        "speed_up_bf16_train",
    }  # fmt: skip
    assert stems(warmup_records) == {"warmup_train_fp32_ctx128"}
    assert stems([make_record(make_config(size), (0.1,)) for size in ("small", "xl")]) == {"step_time_train_fp32"}
    again = [
        replace(record, config=replace(record.config, batch_size=2)) for record in grid if record.config.size == "small"
    ]
    assert "step_time_train_bf16_no2" in stems([*grid, *again])


def test_pictures_open_at_a_readable_size(grid, warmup_records, tmp_path):
    for path in write_plots([*grid, *warmup_records], tmp_path):
        assert path.parent == tmp_path / "plots"
        with Image.open(path) as image:
            image.verify()
            assert image.format == "PNG"
            assert 800 <= image.width <= 2500
            assert 600 <= image.height <= 2000


def test_failures_are_written_into_every_picture(grid):
    full = part(grid, "fp32")
    assert "out of memory" in texts(draw_phases(phase_bars(full), "step", "settings"))
    assert "xl: out of memory" in texts(draw_contexts(context_lines(full), "step", "settings"))
    lines = speed_up_lines(to_frame(grid), Precision.BF16)
    assert "context 512: fp32 out of memory" in texts(draw_speed_ups(lines, Precision.BF16, "step", "settings"))


def test_titles_and_axes_say_what_is_shown(grid, tmp_path):
    shown = texts(draw_phases(phase_bars(part(grid, "bf16")), "training step", "NVIDIA H200, batch 4"))
    assert {"Time of one training step by phase", "context 128", "context 512", "time (ms)", "small", "xl"} <= set(
        shown
    )
    assert any("NVIDIA" in text and "batch" in text for text in shown)


def test_texts_of_a_configuration_are_inert(tmp_path):
    configs = [make_config(HOSTILE, context) for context in (128, 256)]
    hidden = [make_config("_hidden", context) for context in (128, 256)]
    records = [make_record(config, (0.1, 0.2), device_name=r"$\frac{") for config in (*configs, *hidden)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(write_plots([*records, make_failure(make_config(HOSTILE, 512), Status.KILLED)], tmp_path)) == 2
    assert drawing.inert("a$b$c") == r"a\$b\$c"
    assert drawing.inert("x" * 100, 10) == "x" * 9 + "…"
    assert not drawing.inert("_x").startswith("_")


def test_failures_of_a_line_share_a_row():
    points = tuple(Point(x=x, value=None, failure=why) for x, why in ((1, "killed"), (2, "oom"), (3, "oom")))
    assert drawing.failure_rows([Line(name="xl", points=points)]) == {"xl: killed": [1], "xl: oom": [2, 3]}


def test_phases_and_precisions_have_colours_of_their_own():
    for colours in (drawing.PHASE_COLOURS, drawing.PRECISION_COLOURS):
        assert len(set(colours.values())) == len(colours)
    assert set(drawing.PRECISION_COLOURS) == set(Precision)
    assert len(set(drawing.shades(11))) == 11
    assert drawing.shades(1)
