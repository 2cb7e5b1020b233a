"""Two sides compared: the verdict on each configuration, what is refused, and the pictures of both."""

import csv
import re
from pathlib import Path

import pytest
import scipy.stats

from cs336_systems.analysis.compare import compare
from cs336_systems.record import WarningCode, load_records
from cs336_systems.report.formats import WRITERS, csv_of, texts_of
from cs336_systems.report.plots.draw import figure_of
from cs336_systems.report.sections.comparison import comparison_table, processes_chart, ratio_charts, sweeps_section
from tests.report.making import HOSTILE, make_config, make_environment, make_failure, make_record

DATA = Path(__file__).parents[3] / "data/published/e2e_benchmark"


@pytest.mark.parametrize(("num_a", "num_b"), [(2, 2), (2, 5), (5, 5)])
def test_the_means_of_all_processes_and_an_interval_of_three_or_more(num_a, num_b):
    sides = [[0.1 + i / 1e3 for i in range(num_a)], [0.2 + i / 1e3 for i in range(num_b)]]
    table = comparison_table(("x", "y"), sides, compare(*sides))
    cells = [dict(zip([heading.name for heading in table.headings], row, strict=True)) for row in table.rows]
    for row, means in zip(cells, sides, strict=True):
        assert row["step of each process"] == ", ".join(f"{mean * 1e3:.3f}" for mean in means)
        if len(means) < 3:
            assert (row["step"], row.get("95 % interval", "")) == (f"{sum(means) / len(means) * 1e3:.1f}", "")
        else:
            expected = scipy.stats.t.interval(0.95, len(means) - 1, sum(means) / len(means), scipy.stats.sem(means))
            ends = [float(end) / 1e3 for end in row["95 % interval"].split(" to ")]
            assert ends == pytest.approx(expected, rel=1e-2)
            assert "±" in row["step"]
    if min(num_a, num_b) < 3:
        assert any("--repeats 5" in note for note in table.notes)
    if max(num_a, num_b) < 3:
        assert not any(re.search(r"\d to [+-]?\d|±", write(table)) for write in WRITERS.values())


def by_config(section):
    return {(row["size"], row["context_length"]): row for row in section.rows}


def test_every_configuration_has_a_row_with_its_verdict() -> None:
    """fp32 against bf16; by hand: 100 to 50 ms is half, 100 to 100.1 ms is too close."""
    steady = (1.001, 0.999)
    a = [make_record(make_config(size, 128), [0.1 * each for each in steady]) for size in ("small", "medium", "xl")]
    a += [make_record(make_config("large", 128), (0.3, 0.3)), make_record(make_config("small", 256), (0.2, 0.2))]
    b = [
        make_record(make_config(size, 128, precision="bf16"), [step_s * each for each in steady])
        for size, step_s in (("small", 0.05), ("medium", 0.1001), ("xl", 0.2))
    ]
    b.append(make_failure(make_config("large", 128, precision="bf16")))
    b.append(make_record(make_config("2.7B", 128, precision="bf16"), (1, 1)))
    section = sweeps_section(("old", "new"), (a, b))
    found = by_config(section)
    verdicts = {key: row["verdict"] for key, row in found.items()}
    assert verdicts == {
        ("small", 128): "faster", ("medium", 128): "cannot tell", ("xl", 128): "slower", ("large", 128): "not compared",
        ("small", 256): "only in A", ("2.7B", 128): "only in B",
    }  # fmt: skip
    assert found["small", 128]["ratio"] == pytest.approx(0.5)
    assert found["large", 128]["ratio"] is None
    assert found["large", 128]["b_status"] == "oom"
    assert {(row["precision_a"], row["precision_b"]) for row in section.rows} >= {("fp32", "bf16"), ("fp32", None)}
    (table,) = section.tables
    text = texts_of(section)["comparison.md"]
    assert "precision (fp32, bf16)" in text
    assert "out of memory" in table.rows[[row["size"] for row in section.rows].index("large")]
    assert len(list(csv.DictReader(csv_of(section).splitlines()))) == 6


def test_the_interval_is_of_processes_where_both_sides_have_three() -> None:
    """Three processes that differ by 5 % tell nothing of 4 %, however little the steps of each scatter."""
    a = [make_record(make_config(repeat=i), [mean_s] * 10) for i, mean_s in enumerate((0.095, 0.1, 0.105))]
    b = [make_record(make_config(repeat=i, seed=1), [mean_s] * 10) for i, mean_s in enumerate((0.099, 0.104, 0.109))]
    (of_three,) = sweeps_section(("a", "b"), (a, b)).rows
    assert (of_three["verdict"], of_three["a_processes"]) == ("cannot tell", 3)
    (of_one,) = sweeps_section(("a", "b"), (a[1:2], b[1:2])).rows
    assert of_one["verdict"] == "cannot tell", "one process each tells less than three"


def test_a_ratio_of_times_in_doubt_is_marked() -> None:
    a, b = (
        [make_record(make_config(precision=precision), (step_s, step_s), codes=codes)]
        for precision, step_s, codes in (("fp32", 0.1, ()), ("bf16", 0.2, (WarningCode.UNSTABLE,)))
    )
    (table,) = sweeps_section(("a", "b"), (a, b)).tables
    assert "2.00 ?" in table.rows[0]


def test_another_warm_up_is_refused_unless_allowed() -> None:
    a, b = ([make_record(make_config(warmup_steps=steps), (0.1, 0.1))] for steps in (5, 2))
    with pytest.raises(ValueError, match="A had 5 warm-up steps and B had 2"):
        sweeps_section(("a", "b"), (a, b))
    assert len(sweeps_section(("a", "b"), (a, b), allow_mixed=True).rows) == 1
    both = [*a, *b]
    assert [row["ratio"] for row in sweeps_section(("a", "b"), (both, both)).rows] == [1, 1], "a study of warm-up"


def test_one_configuration_on_two_devices_and_sweeps_without_a_common_one_are_refused() -> None:
    two = [make_record(make_config(), (0.1, 0.1), device_name=name) for name in ("NVIDIA H200", "NVIDIA A100")]
    with pytest.raises(ValueError, match="several devices"):
        sweeps_section(("a", "b"), (two, two), allow_mixed=True)
    sizes = ("small", "xl"), ("medium", "large")
    a, b = ([make_record(make_config(size, 128), (0.1, 0.1)) for size in own] for own in sizes)
    with pytest.raises(ValueError, match="no configuration of A is in B"):
        sweeps_section(("a", "b"), (a, b))


def test_two_devices_are_compared_if_allowed_and_named() -> None:
    a, b = (
        [make_record(make_config(size), (step_s, step_s), device_name=name) for size in ("small", "xl")]
        for name, step_s in (("NVIDIA H200", 0.1), ("NVIDIA A100", 0.2))
    )
    section = sweeps_section(("a", "b"), (a, b), allow_mixed=True)
    assert [row["verdict"] for row in section.rows] == ["slower"] * 2
    assert "device (NVIDIA H200, NVIDIA A100)" in texts_of(section)["comparison.md"]


def test_hostile_names_are_inert() -> None:
    a, b = (
        [make_record(make_config(model_factory=factory), (step_s, step_s))]
        for factory, step_s in (("a:b", 0.1), ("c:d", 0.2))
    )
    texts = texts_of(sweeps_section((HOSTILE, HOSTILE), (a, b)))
    assert "<img" not in texts["comparison.md"]
    assert all("\x1b" not in text and "\0" not in text for text in texts.values())
    assert make_environment().identity.device_name in texts["comparison.csv"]


def test_the_committed_sweeps_have_a_verdict_in_every_row() -> None:
    """The ratios are those of the means in the committed tables."""
    names, (records, _) = ("fp32", "bf16"), load_records(DATA / "train" / "runs")
    sides = [[record for record in records if record.config.precision == name] for name in names]
    found = by_config(sweeps_section(names, sides))
    with (DATA / "train" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tables = [
        {(row["size"], int(row["context_length"])): row for row in rows if row["precision"] == name} for name in names
    ]
    assert {*found} == {*tables[0]} == {*tables[1]}
    for key, row in found.items():
        fp32_ms, bf16_ms = (float(table[key]["step_mean_ms"]) for table in tables)
        assert row["verdict"] in ("faster", "slower", "cannot tell")
        assert row["ratio"] == pytest.approx(bf16_ms / fp32_ms)


def make_row(name, verdict, ratio=None, low=None, high=None, is_doubted=False):
    return {
        "name": name, "verdict": verdict, "ratio": ratio, "ratio_low": low, "ratio_high": high,
        "ratio_is_doubted": is_doubted,
    }  # fmt: skip


ROWS = (
    make_row("small", "faster", 0.5, 0.4, 0.6),
    make_row("medium", "slower", 2.0, 1.5, 3.0, True),
    make_row("large", "cannot tell", 1.0),
    make_row("xl", "cannot tell", 1.1, 1e-300, 1e300),
    make_row("2.7B", "only in A"),
)


def points_of(chart):
    (panel,) = chart.panels
    return {point.x: (curve.line.name, curve.is_hollow, point) for curve in panel.curves for point in curve.line.points}


def test_each_ratio_stands_with_its_interval_below_its_verdict():
    (chart,) = ratio_charts(ROWS, "")
    found = points_of(chart)
    assert list(chart.panels[0].x.names) == ["small", "medium", "large", "xl"]
    for row in ROWS[:4]:
        words, is_hollow, point = found[row["name"]]
        assert words.startswith(row["verdict"])
        assert is_hollow is row["ratio_is_doubted"] is ("doubt" in words)
        assert point.value == row["ratio"]
    for row in ROWS[:2]:
        point = found[row["name"]][2]
        assert (point.value - point.error_below, point.value + point.error) == pytest.approx(
            (row["ratio_low"], row["ratio_high"])
        )
    assert found["large"][2].error is None


def test_an_interval_that_says_nothing_leaves_the_others_visible():
    (chart,) = ratio_charts(ROWS, "")
    low, high = chart.panels[0].y.limits
    assert 0.01 < low < 0.4
    assert 3.0 < high < 100
    assert figure_of(chart).axes[0].get_ylim() == pytest.approx((low, high))
    points = [point for curve in chart.panels[0].curves for point in curve.line.known if point.error_below]
    assert points
    assert all(0 < point.value - point.error_below < point.value for point in points)


def test_one_ratio_is_no_picture():
    assert ratio_charts(ROWS[:1], "") == []
    assert ratio_charts([ROWS[0], ROWS[4]], "") == []


def test_the_processes_of_both_sides_stand_in_their_order():
    chart = processes_chart(("old", "new"), [[0.1, 0.2, 0.3], [0.4, 0.5]])
    (panel,) = chart.panels
    assert [[(point.x, point.value) for point in curve.line.points] for curve in panel.curves] == [
        [(1, pytest.approx(100)), (2, pytest.approx(200)), (3, pytest.approx(300))],
        [(1, pytest.approx(400)), (2, pytest.approx(500))],
    ]
    assert [curve.line.name for curve in panel.curves] == ["A", "B"]
    assert "old" in chart.settings
