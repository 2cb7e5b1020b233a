"""Times with a known fault put in: whatever publishes them says so, as a benchmark does; steady
times pass.
"""

import re

import numpy as np
import pytest

from cs336.analysis.warnings import timing_warnings
from cs336.config import Precision
from cs336.record import Status, WarningCode
from cs336.report.configurations import step_results
from cs336.report.sections.ceilings import ceilings_sections
from cs336.report.sections.ladder import ladder_results, ladder_section
from cs336.report.sections.operators import attention_section, fusion_section
from cs336.report.sections.steps import results_table
from cs336.studies.ceilings_records import ProductPrecision
from cs336.studies.ceilings_rows import (
    CollectiveCell,
    LaunchCell,
    LaunchKind,
    Loops,
    ProductCell,
    Stream,
    StreamCell,
    Timing,
)
from cs336.studies.operators import Implementation, Version
from tests.report.ceilings import MIB, make_ceilings, square
from tests.report.ladders import make_ladder, make_process
from tests.report.making import make_config, make_record
from tests.report.reading import column, csv_rows
from tests.report.studies import make_cell, make_fusion, make_result, make_row, make_study

NUM = 30
QUIET = 1 + 0.002 * np.random.default_rng(0).standard_normal(NUM)
FAULTS = {
    WarningCode.DRIFT: QUIET * np.linspace(1, 1.08, NUM),
    WarningCode.OUTLIERS: np.where(np.arange(NUM) == 17, 1.2, QUIET),
    WarningCode.UNSTABLE: QUIET * np.where(np.arange(NUM) % 2, 0.85, 1.15),
}
"""Relative times, each with one cause. None is so large that it would be two."""


def times(mean_s, fault=None):
    return tuple((mean_s * (QUIET if fault is None else FAULTS[fault])).tolist())


def codes(mean_s, fault):
    """What a benchmark with such steps would say."""
    return [warning.code for warning in timing_warnings(times(mean_s, fault))]


def spread(*samples):
    """Relative deviation of a quotient of independent times, by its square: the sum of theirs."""
    return float(
        np.sqrt(sum((np.std(sample, ddof=1) / np.mean(sample)) ** 2 for sample in samples))
    )


def attention(fault):
    """Naive takes 20 ms, flash 5 with the fault: forward and backward alike."""
    naive = make_result(make_cell(Implementation.NAIVE), times(0.02), times(0.02))
    flash = make_result(make_cell(Implementation.FLASH), times(0.005, fault), times(0.005, fault))
    return make_study(naive, flash)


def fusion(fault):
    """Written out 20 ms, compiled 5 with the fault."""
    return make_fusion(
        make_row(times_s=times(0.02)),
        make_row(version=Version.COMPILED, times_s=times(0.005, fault)),
    )


def ceilings(fault):
    """One cell of each kind, in loops of 100 repetitions."""
    timing = Timing(status=Status.OK, loops=Loops(count=100, times_s=times(0.06, fault)))
    return make_ceilings(
        [ProductCell(precision=ProductPrecision.FP32, shape=square(1024), timing=timing)],
        [StreamCell(stream=stream, moved_bytes=64 * MIB, timing=timing) for stream in Stream],
        [LaunchCell(launch=launch, timing=timing) for launch in LaunchKind],
        [CollectiveCell(num_bytes=MIB, world_size=2, timing=timing)],
    )


def marked(text):
    """The numbers of a text before and after each ±, where a mark follows; none may be marked
    without a deviation.
    """
    found = re.findall(r"([\d,.]+) ± ([\d,.]+) \?", text)
    assert text.count("?") == len(found)
    return [tuple(float(number.replace(",", "")) for number in pair) for pair in found]


def test_the_faults_are_what_they_are_called():
    assert {code: codes(0.01, code) for code in FAULTS} == {code: [code] for code in FAULTS}
    assert codes(0.01, None) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_attention_says_which_times_are_in_doubt(fault):
    study = attention(fault)
    for table in attention_section(study).tables[:2]:
        assert not marked(column(table, "naive")[0])
        assert marked(column(table, "flash")[0])
        assert f"{fault} in 1 of 2 cells" in " ".join(table.notes)
        (gain,) = [marked(note) for note in table.notes if "times as fast as naive" in note]
        ratio = 4 / np.mean(FAULTS[fault])
        assert gain == [
            (
                pytest.approx(ratio, rel=0.05),
                pytest.approx(ratio * spread(FAULTS[fault], QUIET), rel=0.2),
            )
        ]
    naive, flash = csv_rows(attention_section(study))
    assert [naive["forward_warnings"], naive["backward_warnings"]] == ["", ""]
    assert [flash["forward_warnings"], flash["backward_warnings"]] == [fault, fault]


@pytest.mark.parametrize("fault", FAULTS)
def test_fusion_says_which_times_are_in_doubt(fault):
    (table,) = fusion_section(fusion(fault)).tables
    assert [bool(marked(cell)) for cell in column(table, "time")] == [False, True]
    (gain,) = marked(column(table, "speed-up")[1])
    ratio = np.median(QUIET) * 4 / np.median(FAULTS[fault])
    assert gain == (
        pytest.approx(ratio, rel=0.05),
        pytest.approx(ratio * spread(FAULTS[fault], QUIET), rel=0.2),
    )
    assert f"{fault} in 1 of 2 rows" in " ".join(table.notes)
    assert [row["warnings"] for row in csv_rows(fusion_section(fusion(fault)))] == ["", fault]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_ceiling_says_that_its_time_is_in_doubt(fault):
    summary, *others = [section for section in ceilings_sections(ceilings(fault)) if section.tables]
    (table,) = summary.tables
    assert all(marked(cell) for cell in column(table, "measured"))
    products, reductions = 1, 1
    rows = products + len(Stream) + len(LaunchKind) + reductions
    assert [row["warnings"] for row in csv_rows(summary)] == [fault] * rows
    for section in others:
        cells = column(section.tables[0], "time")
        assert cells
        assert all(marked(cell) for cell in cells)
        assert f"{fault} in {len(cells)} of {len(cells)} rows" in " ".join(section.tables[0].notes)
        assert [row["warnings"] for row in csv_rows(section)] == [fault] * len(cells)
    (deviation,) = {row["std_us"] for row in csv_rows(others[2])}
    assert float(deviation) == pytest.approx(0.06 / 100 * 1e6 * np.std(FAULTS[fault], ddof=1))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_ladder_marks_a_speed_up_of_times_in_doubt(fault):
    ladder = make_ladder()
    records = [
        make_process(rung, 0.8, codes=codes(0.8, fault) if rung is ladder[2] else ())
        for rung in ladder
    ]
    speed = ladder_section(ladder_results(ladder, records, [])).tables[0]
    over_last, over_first = column(speed, "over last"), column(speed, "over first")
    assert [bool(marked(cell)) for cell in over_last] == [False, False, True, True]
    assert [bool(marked(cell)) for cell in over_first] == [False, False, True, False]
    assert marked(over_last[2]) == [(1.0, 0.2)], (
        "two steps 10 % off their mean: each deviates by sqrt(2) / 10"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sweep_marks_a_speed_up_of_times_in_doubt(fault):
    configs = [make_config(precision=precision) for precision in (Precision.FP32, Precision.BF16)]
    full = make_record(configs[0], times(0.02))
    fast = make_record(configs[1], times(0.005, fault), codes=codes(0.005, fault))
    ratio = 4 / np.mean(FAULTS[fault])
    expected = (
        pytest.approx(ratio, rel=0.05),
        pytest.approx(ratio * spread(FAULTS[fault], QUIET), rel=0.2),
    )
    assert marked(column(results_table(step_results([full, fast])), "speed-up")[1]) == [expected]
    assert not marked(
        column(
            results_table(step_results([full, make_record(configs[1], times(0.005))])), "speed-up"
        )[1]
    )


def test_steady_times_have_no_mark_anywhere():
    tables = [
        *attention_section(attention(None)).tables,
        *fusion_section(fusion(None)).tables,
        *(table for section in ceilings_sections(ceilings(None)) for table in section.tables),
    ]
    for table in tables:
        for texts in (*table.rows, table.notes):
            assert "?" not in "".join(texts)


def test_a_share_of_a_best_in_doubt_is_in_doubt():
    """The best itself is the whole, whatever its time."""
    best, other = (
        ProductCell(
            precision=ProductPrecision.FP32,
            shape=square(side),
            timing=Timing(status=Status.OK, loops=Loops(count=1, times_s=times(0.01, fault))),
        )
        for side, fault in ((1024, WarningCode.UNSTABLE), (512, None))
    )
    (table,) = ceilings_sections(make_ceilings([best, other]))[1].tables
    whole, part = column(table, "of best")
    assert whole == "100"
    assert marked(part)
