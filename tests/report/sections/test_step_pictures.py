from dataclasses import replace

import pytest
from matplotlib.container import ErrorbarContainer

from cs336_systems.config import Mode, Precision
from cs336_systems.report import draw
from cs336_systems.report.frame import to_frame
from cs336_systems.report.sections.steps import split
from tests.report.drawn import overlaps, texts
from tests.report.making import make_config, make_failure, make_record
from tests.report.writing import write_plots


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, in order; no file is rendered, which takes most of the time."""
    found = []
    monkeypatch.setattr(draw, "to_png", lambda figure: found.append(figure) or b"a picture")
    return found


def drawn_lines(panel):
    """The points of each line in a panel."""
    drawn = [container.lines[0] for container in panel.containers if isinstance(container, ErrorbarContainer)]
    return [[tuple(map(float, xy)) for xy in line.get_xydata()] for line in drawn]


def test_bars_hold_the_phases_and_the_rest_of_the_step_and_name_failures(grid, figures, tmp_path):
    """The fixture's steps are a quarter forward, half backward, an eighth optimizer, and an eighth none of these."""
    names = [path.stem for path in write_plots(grid, tmp_path)]
    figure = figures[names.index("step_time")]
    (panel,) = figure.axes
    labels = [label.get_text() for label in panel.get_yticklabels()]
    lengths = {name: [bar.get_width() for bar in panel.patches if round(bar.get_y() + bar.get_height() / 2) == place]
               for place, name in enumerate(labels)}  # fmt: skip
    assert lengths["small ctx 128 fp32"] == pytest.approx([25, 50, 12.5, 12.5])
    assert lengths["xl ctx 128 fp32"] == pytest.approx([150, 300, 75, 75])
    assert lengths["xl ctx 512 fp32"] == []
    assert {"out of memory", "100 ms", "Time of a step by phase"} <= set(texts(figure))
    assert overlaps(figure) == []


def test_all_configurations_are_drawn_in_some_picture(figures, tmp_path):
    paths = write_plots([make_record(make_config("tiny", 8 * i), (i / 10,)) for i in range(1, 101)], tmp_path)
    assert [path.name for path in paths] == ["step_time.png", "step_time_no2.png", "context_length_train.png"]
    labels = [label.get_text() for figure in figures[:2] for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"tiny ctx {8 * i}" for i in range(1, 101)]


def make_study():
    """Checkpoints around K blocks: 1 s and 8 GiB with none, else 1.5 s + K / 10 and 4 GiB + K; bf16 half the time."""
    measured = {0: (1.0, 8)} | {blocks: (1.5 + blocks / 10, 4 + blocks) for blocks in (1, 2, 4, 8)}
    return [
        make_record(
            make_config("xl", 512, precision=precision, checkpoint_blocks=blocks),
            (share * step_s,),
            peak_bytes=peak_gib * 2**30,
        )
        for blocks, (step_s, peak_gib) in measured.items()
        for precision, share in ((Precision.FP32, 1), (Precision.BF16, 0.5))
    ]


def test_a_study_of_one_setting_is_drawn_over_it(figures, tmp_path):
    records = make_study()
    assert [path.name for path in write_plots(records, tmp_path)] == [
        "step_time.png",
        "checkpoint_blocks_train_ctx512.png",
    ]
    _, figure = figures
    assert {"0", "8", "fp32", "bf16", "xl", "blocks per checkpoint", "peak of memory (GiB)"} <= set(texts(figure))
    fp32, bf16 = (
        [(place, pytest.approx(time_ms)) for place, time_ms in enumerate(times_ms)]
        for times_ms in ((1000, 1600, 1700, 1900, 2300), (500, 800, 850, 950, 1150))
    )
    times, peaks = figure.axes
    assert drawn_lines(times) == [shifted(fp32, -0.06), shifted(bf16, 0.06)]
    expected = list(enumerate((8, 5, 6, 8, 12)))
    assert drawn_lines(peaks) == [shifted(expected, -0.06), shifted(expected, 0.06)]
    assert overlaps(figure) == []


def test_times_over_the_context_have_a_panel_for_each_size(grid, figures, tmp_path):
    names = [path.stem for path in write_plots(grid, tmp_path)]
    figure = figures[names.index("context_length_train")]
    small, xl, *_ = figure.axes
    assert [y for line in drawn_lines(small) for _, y in line] == pytest.approx([100, 400, 50, 200])
    assert [y for line in drawn_lines(xl) for _, y in line] == pytest.approx([600, 300, 1200])
    assert "fp32: out of memory" in texts(figure)


def shifted(points, aside):
    return [(pytest.approx(x + aside), y) for x, y in points]


def test_any_numeric_setting_has_its_picture_and_failures_are_in_it(figures, tmp_path):
    done = [make_record(make_config(batch_size=size), (size / 10,), peak_bytes=None) for size in (1, 2)]
    failed = make_failure(make_config(batch_size=4))
    assert [path.name for path in write_plots([*done, failed], tmp_path)] == [
        "step_time.png",
        "batch_size_train_ctx128.png",
    ]
    _, figure = figures
    assert len(figure.axes) == 1, "no peak is known, as on a CPU"
    assert "out of memory" in texts(figure)
    assert [path.stem for path in write_plots([done[0], failed], tmp_path)] == ["step_time"], "one time is no line"


def test_a_setting_with_named_values_has_points_that_no_line_joins(figures, tmp_path):
    times_s = {("none", "fp32"): 0.4, ("default", "fp32"): 0.3, ("none", "bf16"): 0.2, ("default", "bf16"): 0.1}
    done = [make_record(make_config(compile=choice, precision=precision), (time_s, time_s))
            for (choice, precision), time_s in times_s.items()]  # fmt: skip
    failed = make_failure(make_config(compile="reduce-overhead"))
    names = [path.name for path in write_plots([*done, failed], tmp_path)]
    figure = figures[names.index("compile_train_ctx128.png")]
    times, peaks = figure.axes
    assert [[(round(x), round(y, 6)) for x, y in line] for line in drawn_lines(times)] == [
        [(0, 400), (1, 300)], [(0, 200), (1, 100)],
    ], "in the order of declaration"  # fmt: skip
    assert {y for line in drawn_lines(peaks) for _, y in line} == {1}
    assert {"none", "default", "reduce-overhead", "fp32: out of memory"} <= set(texts(figure))
    assert {line.get_linestyle() for line in times.lines if len(line.get_xdata()) == 2} == {"None"}
    assert overlaps(figure) == []


def test_labels_of_many_points_do_not_cover_each_other(figures, tmp_path):
    write_plots([make_record(make_config(warmup_steps=i), (0.1, 0.2)) for i in range(40)], tmp_path)
    assert [overlaps(figure) for figure in figures] == [[]] * len(figures)


def test_times_over_warm_up_steps(warmup_records, figures, tmp_path):
    """Three numbers of warm-up steps of four have times, which stand at the places 0, 1 and 3."""
    write_plots(warmup_records, tmp_path)
    times, _ = figures[0].axes
    assert [y for _, y in drawn_lines(times)[0]] == pytest.approx([400, 400 / 3, 100])
    assert texts(figures[0]).count("killed") == 2


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


def test_pictures_are_those_that_the_records_support(grid, warmup_records, figures, tmp_path):
    def stems(records):
        return {path.stem for path in write_plots(records, tmp_path)}

    assert stems([]) == stems([make_failure(make_config())]) == stems(grid[:1]) == set()
    assert stems(grid) == {
        "step_time", "context_length_train",
    }  # fmt: skip
    assert stems(warmup_records) == {"warmup_steps_train_ctx128"}
    assert stems([make_record(make_config(size), (0.1,)) for size in ("small", "xl")]) == {"step_time"}
    again = [
        replace(record, config=replace(record.config, batch_size=2)) for record in grid if record.config.size == "small"
    ]
    assert "context_length_train_batch_2" in stems([*grid, *again])
