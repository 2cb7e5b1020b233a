"""Reasons are sentences whose numbers are worked out by hand, from profiles whose changes are put in on purpose."""

from dataclasses import replace

import pytest

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import ClassTimes
from cs336_systems.costs.traffic import traffic
from cs336_systems.report.sections.ladder.notes import reasons
from cs336_systems.report.sections.ladder.rows import ladder_rows
from cs336_systems.report.sections.ladder.tables import ladder_section
from tests.report.ladders import make_entry, make_ladder, make_process, make_records, shifted
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    FORWARD,
    make_classes,
    make_cpu_profile,
    make_phase,
    make_profile,
    seconds,
)

GIGA = 1e9
PRODUCT, ELEMENT_WISE, COPY, SOFTMAX, NORM = (
    KernelClass.MATMUL, KernelClass.ELEMENT_WISE, KernelClass.COPY_AND_FILL, KernelClass.SOFTMAX,
    KernelClass.NORMALISATION,
)  # fmt: skip


@pytest.fixture
def ladder():
    return make_ladder()


def profile_of(busy_ms, class_ms, step_ms=50):
    """Two equal steps of 30 kernels each."""
    return make_profile(
        phases=(make_phase(FORWARD, (30, 30), (busy_ms, busy_ms), (step_ms, step_ms), (7, 7)),),
        classes=tuple(
            ClassTimes(kind=kind, phase=FORWARD, count=2, total_s=2 * time_ms / 1e3)
            for kind, time_ms in class_ms.items()
        ),
        step_s=seconds(step_ms, step_ms),
    )


def reasons_between(ladder, before, after):
    """Why the last rung (50 ms) is faster than an alike one before it, by their profiles alone."""
    rung = ladder[3]
    row, last = (
        ladder_rows([rung], make_records([rung]), [replace(make_entry(rung), profile=profile)])[0]
        for profile in (after, before)
    )
    return reasons(row, last)


def test_reasons_name_what_changes_and_nothing_else(ladder):
    """From the profile of 25 kernels: the last has 13 and half the matrix products; the memory changes too."""
    records = [r for r in make_records(ladder) if r.config.configuration != ladder[3].config]
    records += [make_process(ladder[3], 0.05, compiled=2.0, peak_bytes=2**29)]
    fewer = {FORWARD: (("ampere_sgemm_128x64_tn", 8, 3),), BACKWARD: (("ampere_sgemm_128x64_tn", 18, 8),)}
    profile = {"classes": make_classes(fewer), "phases": (make_phase(FORWARD, (13, 13), (5.5, 5.5), (8, 8), (7, 7)),)}
    entries = [make_entry(ladder[2]), make_entry(ladder[3], **profile)]
    *_, third, last = ladder_rows(ladder, records, entries)
    before, after = traffic(ladder[2].config), traffic(ladder[3].config)
    assert reasons(last, third) == (
        "25.0 -> 13.0 kernels; GPU busy 20.1 -> 5.50 ms (20.1 -> 11.0% of the step); matrix product 11.0 -> 5.50 ms; "
        "element-wise 5.50 -> 0 ms; "
        f"weights, gradients and AdamW move at least {before.state / GIGA:.1f} -> {after.state / GIGA:.2f} GB; "
        f"activations of the products at least {before.activations / GIGA:.2f} -> {after.activations / GIGA:.2f} GB; "
        "peak 1.00 -> 0.500 GiB"
    )
    assert reasons(third, third) == "GPU busy 20.1 -> 20.1 ms"


@pytest.mark.parametrize(
    ("busy_ms", "before", "after", "told"),
    [
        pytest.param(
            (20.0, 16.0), {PRODUCT: 10.0, SOFTMAX: 3.0, COPY: 5.0}, {PRODUCT: 8.95, SOFTMAX: 2.05, COPY: 3.0},
            "copy and fill 5.00 -> 3.00 ms; matrix product 10.0 -> 8.95 ms",
            id="a quarter of 4 ms is 1: softmax's 0.95 is less",
        ),
        pytest.param(
            (20.0, 16.0), {PRODUCT: 10.0, SOFTMAX: 3.0, COPY: 5.0}, {PRODUCT: 5.0, SOFTMAX: 4.05, COPY: 5.0},
            "matrix product 10.0 -> 5.00 ms; softmax 3.00 -> 4.05 ms",
            id="what grows is told too",
        ),
        pytest.param(
            (20.0, 20.0), {PRODUCT: 10.0, SOFTMAX: 3.0, COPY: 5.0}, {PRODUCT: 10.15, SOFTMAX: 2.75, COPY: 5.3},
            "copy and fill 5.00 -> 5.30 ms; softmax 3.00 -> 2.75 ms",
            id="a hundredth of 20 ms is 0.2: the product's 0.15 is less",
        ),
        pytest.param(
            (20.0, 19.0), {PRODUCT: 8.0, SOFTMAX: 3.0, COPY: 5.0, ELEMENT_WISE: 4.0},
            {PRODUCT: 7.0, SOFTMAX: 4.5, COPY: 3.0, NORM: 3.0},
            "element-wise 4.00 -> 0 ms; normalisation 0 -> 3.00 ms; copy and fill 5.00 -> 3.00 ms",
            id="three at most, the largest first, new and gone ones as well",
        ),
    ],
)  # fmt: skip
def test_the_classes_that_account_for_the_change_of_the_busy_time(ladder, busy_ms, before, after, told):
    found = reasons_between(ladder, profile_of(busy_ms[0], before), profile_of(busy_ms[1], after))
    classes = "; ".join(part for part in found.split("; ") if part.endswith(" ms") and not part.startswith("GPU busy"))
    assert classes == told


def test_the_busy_time_is_always_told_and_its_share_where_it_changes(ladder):
    """Of a step of 50 ms: 20 to 20.8 ms are 40 to 41.6 %, less than 2 points; 20 to 21.2 are 2.4."""
    classes = {PRODUCT: 10.0}
    assert reasons_between(ladder, profile_of(20.0, classes), profile_of(20.8, classes)) == "GPU busy 20.0 -> 20.8 ms"
    assert reasons_between(ladder, profile_of(20.0, classes), profile_of(21.2, classes)) == (
        "GPU busy 20.0 -> 21.2 ms (40.0 -> 42.4% of the step)"
    )


def test_compiling_is_no_reason():
    """All else alike, one compiles in 20 s and the other in 2."""
    rung = make_ladder(names=("compile",))[1]
    rows = [ladder_rows([rung], [make_process(rung, 0.1, compiled=time_s)], [])[0] for time_s in (20.0, 2.0)]
    assert [row["compile_s"] for row in rows] == [20, 2]
    assert reasons(rows[1], rows[0]) == "no change that is counted here"


@pytest.mark.parametrize(("step_ms", "is_told"), [(54, True), (56, False)])
def test_class_times_of_a_step_that_the_profiler_slowed_are_no_reason(ladder, step_ms, is_told):
    """The plain step takes 50 ms: 8 % more passes, 12 % does not, on either side of the comparison."""
    profiles = profile_of(20.0, {PRODUCT: 10.0}, step_ms), profile_of(15.0, {PRODUCT: 5.0})
    for before, after in (profiles, profiles[::-1]):
        found = reasons_between(ladder, before, after)
        assert ("matrix product" in found) is is_told
        assert found.startswith(f"GPU busy {'20.0 -> 15.0' if before is profiles[0] else '15.0 -> 20.0'} ms")


def test_the_first_rung_says_what_there_is(ladder):
    row = ladder_rows(ladder, make_records(ladder), [make_entry(ladder[0])])[0]
    found = traffic(ladder[0].config)
    assert reasons(row, None) == (
        "25.0 kernels; GPU busy 20.1 ms (2.51% of the step); "
        "matrix product 11.0 ms; element-wise 5.50 ms; softmax 1.50 ms; "
        f"weights, gradients and AdamW move at least {found.state / GIGA:.1f} GB; "
        f"activations of the products at least {found.activations / GIGA:.2f} GB; peak 1.00 GiB"
    )


def test_reasons_are_over_the_rung_that_counts(ladder):
    """The third rung fails its gate; the second and the last have profiles."""
    records = make_records(ladder, losses={"compile": shifted(0.006)})
    why = ladder_section(ladder_rows(ladder, records, [make_entry(ladder[1]), make_entry(ladder[3])])).tables[3]
    assert [row[:2] for row in why.rows] == [("fp32", ""), ("bf16", "fp32"), ("compile", "bf16"), ("fused", "bf16")]
    assert why.rows[3][2].startswith("GPU busy 20.1 -> 20.1 ms (5.02 -> 40.2% of the step); ")


def test_on_a_cpu_there_are_operators_and_no_busy_time(ladder):
    entry = replace(make_entry(ladder[0]), profile=make_cpu_profile())
    row = ladder_rows(ladder, make_records(ladder), [entry])[0]
    assert reasons(row, None).startswith("29.0 operators; matrix product ")
    assert "busy" not in reasons(row, None)
