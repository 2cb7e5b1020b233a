"""Tables, CSV and picture of a hand-made ladder; the reasons are sentences whose numbers are worked out by hand."""

import re
import statistics
import warnings
from dataclasses import replace

import pytest
import scipy.stats
from PIL import Image

from cs336_systems.costs.traffic import traffic
from cs336_systems.record import Status
from cs336_systems.report.plots.draw import figure_of
from cs336_systems.report.sections.ladder.rows import ladder_rows
from cs336_systems.report.sections.ladder.tables import (
    UNCREDITED,
    ladder_chart,
    ladder_section,
    settings,
    write_ladder_report,
)
from tests.report.drawn import overlaps, texts
from tests.report.ladders import NOISE, make_entry, make_ladder, make_process, make_records, shifted
from tests.report.making import HOSTILE, make_failure
from tests.report.reading import column, csv_rows

GIGA = 1e9


@pytest.fixture
def ladder():
    return make_ladder()


@pytest.fixture
def rows(ladder):
    """The third rung fails its gate; the second and the last have profiles."""
    records = make_records(ladder, losses={"compile": shifted(0.006)})
    return ladder_rows(ladder, records, [make_entry(ladder[1]), make_entry(ladder[3])])


def draw_ladder(rows, words):
    return figure_of(ladder_chart(rows, words))


def test_speed_by_hand(rows):
    speed = ladder_section(rows).tables[0]
    assert column(speed, "rung") == ["fp32", "bf16", "compile", "fused"]
    assert column(speed, "step") == ["800 ± 113", "400 ± 57", "100 ± 14", "50 ± 7"]  # two steps each, 10 % off the mean
    assert column(speed, "tokens/s") == ["2,560", "5,120", "20,480", "40,960"]  # 4 x 512 a step
    assert column(speed, "over last") == ["", "2.00", "4.00", "8.00"]
    assert column(speed, "over first") == ["", "2.00", "8.00", "16.0"]
    assert column(speed, "gate") == ["passed", "passed", "FAILED", "passed"]
    assert speed.failed == {2}
    assert column(speed, "change")[1] == "fp32 products in TF32, autocast to bf16"
    assert "The fastest is fused: 50.00 ms, 16.0 times as fast as fp32." in speed.notes
    assert "Not credited, so no measure for others: compile." in speed.notes


def test_intervals_are_shown_where_there_are_some(ladder, rows):
    speed = ladder_section(rows).tables[0]
    low, high = column(speed, "interval")[1].split(" to ")
    assert 1.9 < float(low) < 2 < float(high) < 2.1
    ends = [float(end) for end in column(speed, "95 % interval")[1].split(" to ")]
    means_ms = [400 * noise for noise in NOISE]
    expected = scipy.stats.t.interval(0.95, 2, statistics.fmean(means_ms), scipy.stats.sem(means_ms))
    assert ends == pytest.approx(expected, rel=1e-3)
    assert any("95% over the means of 3 fresh processes of each" in note for note in speed.notes)
    two = ladder_section(ladder_rows(ladder, make_records(ladder, repeats=2), [])).tables[0]
    assert not any("interval" in heading.name for heading in two.headings)
    assert not any(re.search(r"\d to \d", cell) for row in two.rows for cell in row)
    assert any("--repeats 3" in note for note in two.notes)
    single = ladder_section(ladder_rows(ladder, make_records(ladder, repeats=1), [])).tables[0]
    assert not any("interval" in heading.name for heading in single.headings)
    assert any(note.startswith("One process of each") for note in single.notes)


def test_mfu_is_over_the_peak_of_the_rungs_own_precision(rows):
    found = csv_rows(ladder_section(rows))
    flops = [float(row["model_tflops_per_s"]) * 1e12 for row in found]
    assert [float(row["mfu"]) for row in found] == pytest.approx(
        [flops[0] / 67e12, *(value / 989.5e12 for value in flops[1:])]
    )


def test_gate_and_compilation_by_hand(rows):
    gate = ladder_section(rows).tables[1]
    assert column(gate, "loss 20") == ["10.0000", "10.0000", "10.0120", "10.0000"]
    assert column(gate, "distance") == ["0", "0", "0.60", "0"]
    assert [text.startswith("<0.001") or text == "0" for text in column(gate, "largest")] == [True, True, False, True]
    assert column(gate, "bound") == ["0.1", "0.5", "0.5", "0.5"]
    assert column(gate, "compiling") == ["", "", "20.0", "20.0"]
    assert column(gate, "graphs") == ["", "", "2", "2"]
    assert column(gate, "graph breaks") == ["", "", "1", "1"]
    assert column(gate, "recompiles") == ["", "", "0", "0"]
    assert gate.failed == {2}


def test_no_verdict_is_said_with_its_reason(ladder):
    records = [replace(record, losses=record.losses[:10]) for record in make_records(ladder)]
    speed, gate, *_ = ladder_section(ladder_rows(ladder, records, [])).tables
    assert set(column(gate, "gate")) == {"no verdict"}
    assert "No verdict where the reference has no 20 finite losses." in gate.notes
    assert "over last" not in [heading.name for heading in speed.headings]
    assert not any(note.startswith("The fastest") for note in speed.notes)


def test_counts_by_hand(ladder, rows):
    counts = ladder_section(rows).tables[2]
    assert column(counts, "kernels") == ["", "25.0", "", "25.0"]
    assert column(counts, "busy") == ["", "20.10", "", "20.10"]
    assert column(counts, "GPU busy") == ["", "5.02", "", "40.2"]
    assert [float(text) for text in column(counts, "AdamW")] == pytest.approx(
        [traffic(rung.config).optimizer / GIGA for rung in ladder], rel=0.005
    )
    assert column(counts, "casts")[0] == "0"


def test_failures_are_told_in_words_and_the_first_that_counts_is_named(ladder):
    records = [r for r in make_records(ladder) if r.config.configuration not in (ladder[0].config, ladder[2].config)]
    records += [make_failure(ladder[2].config, Status.CRASHED, "no compiler")]
    stand_in = replace(make_process(ladder[0], 1.0), config=replace(ladder[0].config, checkpoint_blocks=1))
    rows = ladder_rows(ladder, [*records, stand_in], [])
    speed = ladder_section(rows).tables[0]
    assert column(speed, "step")[0] == "not run"
    assert column(speed, "step")[2] == "crashed"
    assert speed.failed == {0, 2}
    assert "The first rung that counts is bf16." in speed.notes
    assert "compile: no compiler" in speed.notes
    assert not any(note.startswith("Not credited") for note in speed.notes), "it has nothing to be credited with"
    drawn = texts(draw_ladder(rows, ""))
    assert {"not run", "crashed"} <= set(drawn)


def test_csv_has_every_value(ladder, rows):
    found = csv_rows(ladder_section(rows))
    assert [row["rung"] for row in found] == ["fp32", "bf16", "compile", "fused"]
    assert [row["processes"] for row in found] == ["3"] * 4
    assert [row["last"] for row in found] == ["", "fp32", "bf16", "bf16"]
    assert [float(row["speed_up_over_first"] or 1) for row in found] == pytest.approx([1, 2, 8, 16])
    assert float(found[3]["speed_up_over_last_ci95_low"]) < 8 < float(found[3]["speed_up_over_last_ci95_high"])
    assert [float(row["distance_largest"]) for row in found] == pytest.approx([0, 0, 0.006, 0], abs=1e-12)
    assert [row["attention"] for row in found] == ["naive-auto"] * 3 + ["sdpa-flash"]
    assert [row["optimizer"] for row in found] == ["foreach"] * 3 + ["fused"]
    assert [row["pad_vocabulary"] for row in found] == ["1", "1", "1", "128"]
    assert int(found[3]["least_optimizer_bytes"]) == traffic(ladder[3].config).optimizer
    assert (found[3]["launches_per_step"], found[0]["launches_per_step"]) == ("25", "")


def test_a_users_own_model_has_neither_bytes_nor_mfu(ladder):
    own = [replace(rung, config=replace(rung.config, model_factory="a:b")) for rung in ladder[:3]]
    rows = ladder_rows(own, make_records(own), [])
    assert len(ladder_section(rows).tables) == 2
    assert {row["mfu"] for row in csv_rows(ladder_section(rows))} == {""}
    assert settings(rows).startswith("a:b, ")


def test_everything_is_written(rows, tmp_path):
    paths = write_ladder_report(rows, tmp_path / "deep")
    assert {str(path.relative_to(tmp_path / "deep")) for path in paths} == {
        "ladder.csv", "ladder.md", "ladder.tex", "ladder.typ", "plots/ladder.png",
    }  # fmt: skip
    with Image.open(tmp_path / "deep" / "plots" / "ladder.png") as image:
        image.verify()
        assert image.width >= 600
    assert (tmp_path / "deep" / "ladder.md").read_text().count("### ") == 4


def test_bars_show_times_and_what_did_not_pass(rows):
    figure = draw_ladder(rows, settings(rows))
    heights = [[bar.get_height() for bar in panel.patches] for panel in figure.axes]
    assert heights == [pytest.approx([800, 400, 100, 50]), pytest.approx([100, 50])]
    assert [bar.get_hatch() for bar in figure.axes[0].patches] == [None, None, "////", None]
    assert {"800", "400\n2.00x", "100", "50.0\n16.0x", UNCREDITED} <= set(texts(figure))
    assert not overlaps(figure)


def test_all_rungs_of_gpt2_have_room(ladder):
    every = make_ladder("gpt2", ("tf32", "bf16", "compile", "attention", "vocabulary", "fused", "cudnn", "cast-once",
                                 "graph", "blocks"))  # fmt: skip
    records = [make_process(rung, 0.4 / (index + 1), repeat) for index, rung in enumerate(every) for repeat in (0, 1)]
    assert not overlaps(draw_ladder(ladder_rows(every, records, []), "settings"))


def test_bars_that_differ_little_are_drawn_once(ladder):
    records = [make_process(rung, time_s) for rung, time_s in zip(ladder, (0.5, 0.4, 0.3, 0.05), strict=True)]
    (panel,) = draw_ladder(ladder_rows(ladder, records, []), "").axes
    assert [bar.get_height() for bar in panel.patches] == pytest.approx([500, 400, 300, 50])


def test_text_from_elsewhere_is_inert(ladder, tmp_path):
    config = replace(ladder[0].config, size=HOSTILE, tokens=HOSTILE)
    hostile = [replace(ladder[0], name=HOSTILE, change=HOSTILE, config=config)]
    rows = ladder_rows(hostile, [make_process(hostile[0], 0.1, device_name=HOSTILE)], [])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        write_ladder_report(rows, tmp_path)
    markdown = (tmp_path / "ladder.md").read_text()
    assert "<img" not in markdown
    assert "\x1b" not in markdown
    assert csv_rows(ladder_section(rows))[0]["rung"].startswith("'=HYPERLINK")
