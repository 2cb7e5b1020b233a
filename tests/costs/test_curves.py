"""Curves between measured points: what was measured comes back, and what lies between does so
too.
"""

from dataclasses import replace

import pytest

from cs336.config import Precision
from cs336.costs.curves import Curves, Matmul, interpolated

SMALL = Matmul(rows=64, inner=64, columns=64, time_s=1e-6)
WIDE = Matmul(rows=128, inner=64, columns=1024, time_s=3e-6)
ODD = Matmul(rows=64, inner=64, columns=65, time_s=9e-6)
CURVES = Curves(
    matmuls={Precision.FP32: (SMALL, WIDE, ODD)},
    copies={8: 1.0},
    adamw={8: 1.0},
    launch_s=1.0,
    kernel_s=1.0,
)


@pytest.mark.parametrize("measured", [SMALL, WIDE, ODD])
def test_a_matmul_that_was_measured_and_its_transpose_have_its_time(measured: Matmul) -> None:
    rows, inner, columns = measured.rows, measured.inner, measured.columns
    for sides in ((rows, inner, columns), (columns, inner, rows)):
        assert CURVES.matmul_s(Precision.FP32, *sides) == pytest.approx(measured.time_s)


def test_a_matmul_halfway_between_two_has_the_geometric_mean_of_their_rates() -> None:
    far = replace(
        SMALL,
        rows=64 * 4,
        inner=64 * 4,
        columns=64 * 4,
        time_s=2 * 256**3 / (4 * SMALL.flops_per_s),
    )
    seconds = replace(CURVES, matmuls={Precision.FP32: (SMALL, far)}).matmul_s(
        Precision.FP32, 128, 128, 128
    )
    assert seconds == pytest.approx(2 * 128**3 / (2 * SMALL.flops_per_s))


def test_a_rate_lies_between_those_measured_and_aligned_matmuls_know_nothing_of_others() -> None:
    seconds = CURVES.matmul_s(Precision.FP32, 96, 32, 512)
    assert seconds is not None
    assert SMALL.flops_per_s < 2 * 96 * 32 * 512 / seconds < WIDE.flops_per_s
    assert CURVES.matmul_s(Precision.FP32, 31, 7, 5) == pytest.approx(
        2 * 31 * 7 * 5 / ODD.flops_per_s
    )


def test_a_batch_counts_as_the_rows_of_all() -> None:
    assert CURVES.matmul_s(Precision.FP32, 32, 64, 1024, batch=4) == pytest.approx(WIDE.time_s)


def test_a_precision_without_matmuls_has_no_time() -> None:
    assert CURVES.matmul_s(Precision.BF16, 8, 8, 8) is None


def test_passes_are_interpolated_by_logarithms_and_grow_beyond() -> None:
    curve = {100: 1.0, 10_000: 100.0}
    assert interpolated(curve, 1000) == pytest.approx(10.0)
    assert interpolated(curve, 1) == 1.0
    assert interpolated(curve, 30_000) == pytest.approx(300.0)
