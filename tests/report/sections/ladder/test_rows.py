"""What is credited to a rung, against numbers worked out by hand and scipy's intervals."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import Work
from cs336_systems.record import Status
from cs336_systems.report.sections.ladder.rows import counts_of, fastest_row, ladder_rows, speed_up
from cs336_systems.sweep.ladder import reference
from tests.report.ladders import FALLING, STEPS_S, make_entry, make_ladder, make_process, make_records, shifted
from tests.report.making import make_failure
from tests.report.sections.kernels.profiles import make_cpu_profile, make_profile


@pytest.fixture
def ladder():
    return make_ladder()


def by_name(rows):
    return {row["rung"]: row for row in rows}


def test_speed_ups_over_the_last_and_over_the_first(ladder):
    rows = by_name(ladder_rows(ladder, make_records(ladder), []))
    assert [row["rung"] for row in rows.values()] == ["fp32", "bf16", "compile", "fused"]
    assert rows["fp32"]["speed_up_over_last"] is None
    assert rows["fp32"]["speed_up_over_first"] is None
    ratios = {
        name: (row["speed_up_over_last"], row["speed_up_over_first"])
        for name, row in rows.items()
        if row["speed_up_over_last"]
    }
    assert ratios == {
        "bf16": (pytest.approx(2), pytest.approx(2)),
        "compile": (pytest.approx(4), pytest.approx(8)),
        "fused": (pytest.approx(2), pytest.approx(16)),
    }
    assert [row["last"] for row in rows.values()] == ["", "fp32", "bf16", "compile"]
    assert all(row["is_credited"] for row in rows.values())
    assert fastest_row(tuple(rows.values()))["rung"] == "fused"


def test_the_interval_is_welchs_of_scipy():
    generator = np.random.default_rng(0)
    slow, fast = generator.lognormal(-1, 0.02, size=3), generator.lognormal(-3, 0.05, size=4)
    found = speed_up(slow.tolist(), fast.tolist())
    welch = scipy.stats.ttest_ind(np.log(slow), np.log(fast), equal_var=False)
    assert found[1:] == pytest.approx(tuple(np.exp(welch.confidence_interval(0.95))))
    assert found[0] == pytest.approx(scipy.stats.gmean(slow) / scipy.stats.gmean(fast))


def test_one_process_has_a_ratio_and_no_interval():
    found = speed_up([0.3], [0.1, 0.2])
    assert found == (pytest.approx(2), None, None)
    assert speed_up([], [0.1]) is None
    assert speed_up([0.1, 0.1], []) is None
    assert speed_up([0.0], [0.1]) is None, "a clock that stands still says nothing"


def test_a_rung_that_fails_the_gate_has_its_time_and_is_nobodys_measure(ladder):
    records = make_records(ladder, losses={"compile": shifted(0.006)})
    rows = by_name(ladder_rows(ladder, records, []))
    assert rows["compile"]["gate"] == "FAILED"
    assert rows["compile"]["distance_largest"] == pytest.approx(0.006)
    assert rows["compile"]["step_mean_ms"] == pytest.approx(100)
    assert rows["compile"]["speed_up_over_last"] == pytest.approx(4)
    assert not rows["compile"]["is_credited"]
    assert (rows["fused"]["last"], rows["fused"]["speed_up_over_last"]) == ("bf16", pytest.approx(8))
    assert rows["fused"]["speed_up_over_first"] == pytest.approx(16)


def test_the_fastest_has_passed_the_gate(ladder):
    rows = ladder_rows(ladder, make_records(ladder, losses={"fused": shifted(0.006)}), [])
    assert fastest_row(rows)["rung"] == "compile"


def test_one_bad_process_of_three_fails_the_rung(ladder):
    records = make_records(ladder)
    bad = next(i for i, r in enumerate(records) if r.config == replace(ladder[2].config, repeat=1))
    records[bad] = replace(records[bad], losses=shifted(0.2))
    assert by_name(ladder_rows(ladder, records, []))["compile"]["gate"] == "FAILED"


def test_failures_are_rows_and_the_others_go_on(ladder):
    records = [r for r in make_records(ladder) if r.config.configuration != ladder[2].config]
    records += [make_failure(replace(ladder[2].config, repeat=n), Status.CRASHED, "no compiler") for n in range(3)]
    rows = by_name(ladder_rows(ladder, records, []))
    failed = rows["compile"]
    assert (failed["processes"], failed["status"], failed["error"]) == (0, "crashed", "no compiler")
    assert (failed["speed_up_over_last"], failed["speed_up_over_first"], failed["is_credited"]) == (None, None, False)
    assert rows["fused"]["speed_up_over_last"] == pytest.approx(8)


def test_a_repeat_that_fails_leaves_the_others(ladder):
    records = make_records(ladder)
    records[4] = make_failure(records[4].config, Status.KILLED, "killed")
    row = ladder_rows(ladder, records, [])[1]
    assert (row["processes"], row["status"], row["is_credited"]) == (2, "killed", True)
    assert row["speed_up_over_last"] == pytest.approx(0.8 * (0.99 * 1.01) ** (1 / 3) / (0.4 * (0.99 * 1.01) ** 0.5))


def test_a_rung_that_has_not_run_is_empty(ladder):
    records = [r for r in make_records(ladder) if r.config.configuration != ladder[3].config]
    row = ladder_rows(ladder, records, [])[3]
    assert (row["processes"], row["status"], row["step_mean_ms"]) == (0, None, None)
    assert row["speed_up_over_last"] is None


def without_first(ladder):
    records = [r for r in make_records(ladder) if r.config.configuration != ladder[0].config]
    return [*records, *(make_failure(replace(ladder[0].config, repeat=n)) for n in range(3))]


def test_without_a_reference_nothing_is_judged_nor_credited(ladder):
    rows = ladder_rows(ladder, without_first(ladder), [])
    assert {row["gate"] for row in rows} == {"", "no verdict"}
    assert not any(row["is_credited"] or row["speed_up_over_last"] or row["speed_up_over_first"] for row in rows)
    assert fastest_row(rows) is None


def test_where_the_first_rung_has_no_memory_a_checkpointed_run_is_the_reference(ladder):
    stand_in = replace(make_process(ladder[0], 2.0), config=reference(ladder[0]), losses=FALLING)
    rows = by_name(ladder_rows(ladder, [*without_first(ladder), stand_in], []))
    assert rows["fp32"]["processes"] == 0
    assert not rows["fp32"]["is_credited"]
    assert all(rows[name]["is_credited"] for name in ("bf16", "compile", "fused"))
    assert rows["bf16"]["speed_up_over_first"] is None, "it is the first that counts"
    assert rows["fused"]["speed_up_over_first"] == pytest.approx(8)
    off = replace(stand_in, losses=shifted(0.1))
    assert not any(row["is_credited"] for row in ladder_rows(ladder, [*without_first(ladder), off], []))


def test_the_checkpointed_run_does_not_count_where_the_first_rung_has_losses(ladder):
    stand_in = replace(make_process(ladder[0], 2.0), config=reference(ladder[0]), losses=shifted(0.5))
    assert all(row["is_credited"] for row in ladder_rows(ladder, [*make_records(ladder), stand_in], []))


def test_the_longest_compilation_counts(ladder):
    rows = by_name(ladder_rows(ladder, make_records(ladder), []))
    assert [row["compile_s"] for row in rows.values()] == [None, None, 20, 20]
    assert rows["fused"]["graphs"] == 2


def test_counts_of_a_profile_are_per_step():
    """Two steps: 50 kernels, 40 ms of them, 40.2 ms busy."""
    reason = counts_of(make_profile())
    assert reason["launches_per_step"] == 25
    assert reason["busy_ms"] == pytest.approx(20.1)
    assert sum(reason["class_s"].values()) == pytest.approx(0.020)
    assert reason["class_s"][KernelClass.MATMUL] == pytest.approx((6 + 8 + 8) / 2e3)


def test_busy_is_over_the_step_without_a_profiler(ladder):
    rows = by_name(ladder_rows(ladder, make_records(ladder), [make_entry(ladder[2]), make_entry(ladder[3])]))
    assert rows["compile"]["busy_share"] == pytest.approx(20.1 / 100)
    assert rows["fused"]["busy_share"] == pytest.approx(20.1 / 50)
    assert rows["bf16"]["busy_share"] is None
    faster = [make_process(rung, 0.01) for rung in ladder]
    assert ladder_rows(ladder, faster, [make_entry(ladder[3])])[3]["busy_share"] == 1, "20.1 ms in a step of 10"


def test_on_a_cpu_nothing_is_busy(ladder):
    profile = make_cpu_profile()
    entry = replace(make_entry(ladder[0]), profile=profile)
    row = ladder_rows(ladder, make_records(ladder), [entry])[0]
    assert (row["work"], row["launches_per_step"], row["busy_share"]) == (Work.OPERATORS, 29, None)


def test_records_of_other_configurations_are_not_mixed_in(ladder):
    other = make_process(replace(ladder[1], config=replace(ladder[1].config, seed=5)), 9.0, losses=shifted(1))
    rows = by_name(ladder_rows(ladder, [*make_records(ladder), other], []))
    assert rows["bf16"]["step_mean_ms"] == pytest.approx(1e3 * STEPS_S["bf16"])
    assert rows["bf16"]["gate"] == "passed"


def test_a_rung_of_an_own_model_claims_no_attention():
    (rung, *_) = make_ladder()
    own = replace(rung, config=replace(rung.config, model_factory="pkg.mod:make"))
    for ladder, expected in (((rung,), ("small", "naive-auto")), ((own,), ("make small", None))):
        (row,) = ladder_rows(ladder, [make_process(ladder[0], 0.1)], [])
        assert (row["size"], row["attention"]) == expected
