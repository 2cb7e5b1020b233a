"""What is credited to a rung, its tables and its picture: by numbers worked out by hand and
scipy's intervals.
"""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from cs336.record import Status
from cs336.report.draw import figure_of
from cs336.report.sections.ladder import (
    UNCREDITED,
    fastest_rung,
    ladder_chart,
    ladder_results,
    ladder_section,
)
from tests.report.drawn import overlaps, texts
from tests.report.ladders import make_entry, make_ladder, make_process, make_records, shifted
from tests.report.making import make_failure
from tests.report.reading import column


@pytest.fixture
def ladder():
    return make_ladder()


def by_name(rows):
    return {row["rung"]: row for row in rows}


def test_the_interval_is_that_of_scipy_for_pairs(ladder):
    generator = np.random.default_rng(0)
    slow, fast = generator.lognormal(-1, 0.02, size=4), generator.lognormal(-3, 0.05, size=4)
    records = []
    for rung, means_s in zip(ladder, (slow, fast), strict=False):
        records += [make_process(rung, mean_s, repeat) for repeat, mean_s in enumerate(means_s)]
    gain = ladder_results(ladder[:2], records, [])[1].over_last
    of_pairs = scipy.stats.ttest_rel(np.log(slow), np.log(fast))
    assert (gain.low, gain.high) == pytest.approx(tuple(np.exp(of_pairs.confidence_interval(0.95))))
    assert gain.ratio == pytest.approx(scipy.stats.gmean(slow) / scipy.stats.gmean(fast))


def test_one_bad_process_of_three_fails_the_rung(ladder):
    records = make_records(ladder)
    bad = next(i for i, r in enumerate(records) if r.config == replace(ladder[2].config, repeat=1))
    records[bad] = replace(records[bad], losses=shifted(0.2))
    assert by_name(ladder_results(ladder, records, []))["compile"]["gate"] == "FAILED"


def without_first(ladder):
    records = [r for r in make_records(ladder) if r.config.configuration != ladder[0].config]
    return [*records, *(make_failure(replace(ladder[0].config, repeat=n)) for n in range(3))]


def test_without_a_reference_nothing_is_judged_nor_credited(ladder):
    rows = ladder_results(ladder, without_first(ladder), [])
    assert {row["gate"] for row in rows} == {"", "no verdict"}
    assert not any(row.is_credited for row in rows)
    assert {row.speed_up_over_last for row in rows} == {None}
    assert {row.speed_up_over_first for row in rows} == {None}
    assert fastest_rung(rows) is None


def test_counts_of_a_profile_are_per_step(ladder):
    """Two steps: 50 kernels, 40 ms of them, 40.2 ms busy."""
    _, row, *_ = ladder_results(ladder, [], [make_entry(ladder[1])])
    assert row.launches_per_step == 25
    assert row.busy_ms == pytest.approx(20.1)


def test_busy_is_over_the_step_without_a_profiler(ladder):
    rows = by_name(
        ladder_results(ladder, make_records(ladder), [make_entry(ladder[2]), make_entry(ladder[3])])
    )
    assert rows["compile"]["busy_share"] == pytest.approx(20.1 / 100)
    assert rows["fused"]["busy_share"] == pytest.approx(20.1 / 50)
    assert rows["bf16"]["busy_share"] is None
    faster = [make_process(rung, 0.01) for rung in ladder]
    assert ladder_results(ladder, faster, [make_entry(ladder[3])])[3]["busy_share"] == 1, (
        "20.1 ms in a step of 10"
    )


def test_a_rung_of_an_own_model_claims_no_attention():
    (rung, *_) = make_ladder()
    own = replace(rung, config=replace(rung.config, model_factory="pkg.mod:make"))
    for ladder, expected in (((rung,), ("small", "naive-auto")), ((own,), ("make small", None))):
        (row,) = ladder_results(ladder, [make_process(ladder[0], 0.1)], [])
        assert (row["size"], row["attention"]) == expected


@pytest.fixture
def rows(ladder):
    """The third rung fails its gate; the second and the last have profiles."""
    records = make_records(ladder, losses={"compile": shifted(0.006)})
    return ladder_results(ladder, records, [make_entry(ladder[1]), make_entry(ladder[3])])


def draw_ladder(rows):
    return figure_of(ladder_chart(rows))


def test_speed_by_hand(rows):
    speed = ladder_section(rows).tables[0]
    assert column(speed, "rung") == ["fp32", "bf16", "compile", "fused"]
    # two steps each, 10 % off the mean
    assert column(speed, "step") == ["800 ± 113", "400 ± 57", "100 ± 14", "50 ± 7"]
    assert column(speed, "tokens/s") == ["2,560", "5,120", "20,480", "40,960"]  # 4 x 512 a step
    # blocks that agree to the last digit show no scatter, and have no interval
    assert column(speed, "over last") == ["", "2.00", "4.00", "8.00"]
    assert column(speed, "over first") == ["", "2.00", "8.00", "16.0"]
    assert column(speed, "gate") == ["passed", "passed", "FAILED", "passed"]
    assert speed.failed == {2}
    assert column(speed, "change")[1] == "fp32 matmuls in TF32, autocast to bf16"
    assert "The fastest rung is fused: 50.00 ms, 16.0 times as fast as fp32." in speed.notes
    assert "Not credited, so no measure for others: compile." in speed.notes


def test_gate_and_compilation_by_hand(rows):
    gate = ladder_section(rows).tables[1]
    assert column(gate, "loss 20") == ["10.0000", "10.0000", "10.0120", "10.0000"]
    assert column(gate, "distance") == ["0", "0", "0.60", "0"]
    assert [text.startswith("< 0.001") or text == "0" for text in column(gate, "largest")] == [
        True,
        True,
        False,
        True,
    ]
    assert column(gate, "bound") == ["0.1", "0.5", "0.5", "0.5"]
    assert column(gate, "compiling") == ["", "", "20.0", "20.0"]
    assert column(gate, "graphs") == ["", "", "2", "2"]
    assert column(gate, "graph breaks") == ["", "", "1", "1"]
    assert column(gate, "recompiles") == ["", "", "0", "0"]
    assert gate.failed == {2}


def test_failures_are_told_in_words(ladder):
    records = [
        r
        for r in make_records(ladder)
        if r.config.configuration not in (ladder[1].config, ladder[2].config)
    ]
    records += [make_failure(ladder[2].config, Status.CRASHED, "no compiler")]
    rows = ladder_results(ladder, records, [])
    speed = ladder_section(rows).tables[0]
    assert column(speed, "step")[1:3] == ["not run", "crashed"]
    assert speed.failed == {1, 2}
    assert "compile: no compiler" in speed.notes
    assert not any(note.startswith("Not credited") for note in speed.notes), (
        "it has nothing to be credited with"
    )
    drawn = texts(draw_ladder(rows))
    assert {"not run", "crashed"} <= set(drawn)


def test_bars_show_times_and_what_did_not_pass(rows):
    figure = draw_ladder(rows)
    lengths = [[bar.get_width() for bar in panel.patches] for panel in figure.axes]
    assert lengths == [pytest.approx([800, 400, 100, 50])]
    assert [bar.get_hatch() for bar in figure.axes[0].patches] == [None, None, "////", None]
    lines = {line for text in texts(figure) for line in text.split("\n")}
    assert {"800 ms", "400 ms", "2.00x", "100 ms", "50.0 ms", "16.0x", UNCREDITED} <= lines
    assert not overlaps(figure)
