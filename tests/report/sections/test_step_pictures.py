import pytest

from cs336.config import Precision
from cs336.report import draw
from tests.report.drawn import overlaps, texts
from tests.report.making import make_config, make_failure, make_record
from tests.report.writing import write_plots


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written, in order; no file is rendered, which takes most of the time."""
    found = []
    monkeypatch.setattr(draw, "to_png", lambda figure: found.append(figure) or b"a picture")
    return found


def drawn_bars(figure):
    """The lengths of the parts of each bar, by its name."""
    lengths = {}
    for panel in figure.axes:
        for place, label in enumerate(panel.get_yticklabels()):
            lengths[label.get_text().replace("\N{NO-BREAK SPACE}", " ")] = [
                bar.get_width()
                for bar in panel.patches
                if round(bar.get_y() + bar.get_height() / 2) == place
            ]
    return lengths


def test_bars_hold_the_phases_and_the_rest_of_the_step_and_name_failures(grid, figures, tmp_path):
    """The fixture's steps are a quarter forward, half backward, an eighth optimizer, and an
    eighth none of these.
    """
    names = [path.stem for path in write_plots(grid, tmp_path)]
    figure = figures[names.index("step_time")]
    lengths = drawn_bars(figure)
    assert lengths["small ctx 128 fp32"] == pytest.approx([25, 50, 12.5, 12.5])
    assert lengths["xl ctx 128 fp32"] == pytest.approx([150, 300, 75, 75])
    assert lengths["xl ctx 512 fp32"] == []
    assert {"out of memory", "100 ± 10 ms\n1.00 GiB", "Time of a step by phase"} <= set(
        texts(figure)
    )
    assert overlaps(figure) == []
    assert len(figure.axes) == 2
    for panel, size in zip(figure.axes, ("small", "xl"), strict=True):
        of_size = [sum(parts) for name, parts in lengths.items() if name.startswith(size)]
        assert panel.get_xlim()[1] == pytest.approx(max(of_size)), "a size has its own scale"


def test_all_configurations_are_drawn_in_some_picture(figures, tmp_path):
    paths = write_plots(
        [make_record(make_config("tiny", 8 * i), (i / 10,)) for i in range(1, 101)], tmp_path
    )
    assert [path.name for path in paths] == ["step_time.png", "step_time_no2.png"]
    labels = [name for figure in figures for name in drawn_bars(figure)]
    assert labels == [f"tiny ctx {8 * i}" for i in range(1, 101)]


def make_study():
    """Checkpoints around K blocks: 1 s and 8 GiB with none, else 1.5 s + K / 10 and 4 GiB + K;
    bf16 half the time.
    """
    measured = {0: (1.0, 8)} | {blocks: (1.5 + blocks / 10, 4 + blocks) for blocks in (1, 2, 4)}
    return [
        make_record(
            make_config("xl", 512, precision=precision, checkpoint_blocks=blocks),
            (share * step_s,),
            peak_bytes=peak_gib * 2**30,
        )
        for blocks, (step_s, peak_gib) in measured.items()
        for precision, share in ((Precision.FP32, 1), (Precision.BF16, 0.5))
    ]


def test_a_study_of_one_setting_shows_times_and_peaks(figures, tmp_path):
    """The runs in the order of tables: of each precision, by the setting; one more has failed."""
    failed = make_failure(make_config("xl", 512, checkpoint_blocks=8))
    assert [path.name for path in write_plots([failed, *make_study()], tmp_path)] == [
        "step_time.png"
    ]
    bars = drawn_bars(figures[0])
    assert [sum(parts) for parts in bars.values()] == pytest.approx(
        [1000, 1600, 1700, 1900, 0, 500, 800, 850, 950]
    )
    assert {"1,600 ms\n5.00 GiB", "950.0 ms\n8.00 GiB", "out of memory"} <= set(texts(figures[0]))
    assert overlaps(figures[0]) == []


def test_times_over_warm_up_steps(warmup_records, figures, tmp_path):
    """Three numbers of warm-up steps of four have times."""
    write_plots(warmup_records, tmp_path)
    assert [sum(parts) for parts in drawn_bars(figures[0]).values()] == pytest.approx(
        [400, 400 / 3, 0, 100]
    )
    assert texts(figures[0]).count("killed") == 1


def test_pictures_are_those_that_the_records_support(grid, warmup_records, figures, tmp_path):
    def stems(records):
        return {path.stem for path in write_plots(records, tmp_path)}

    assert stems([]) == stems([make_failure(make_config())]) == stems(grid[:1]) == set()
    assert stems(grid) == {"step_time"}
    assert stems(warmup_records) == {"step_time"}
