"""Curves between measured points: what was measured comes back, and what lies between does so
too.
"""

import csv
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from cs336.config import Precision, SdpaBackend
from cs336.costs.curves import FASTER_LAUNCHES, SLOWER_LAUNCHES, Curves, interpolated, with_backend
from cs336.costs.kernels import Matmul
from cs336.costs.tape import Form
from cs336.studies.ceilings_files import load_ceilings
from cs336.studies.ceilings_rows import LaunchKind

CEILINGS = Path(__file__).parents[2] / "data" / "published" / "ceilings"

SMALL = Matmul(rows=64, inner=64, columns=64, time_s=1e-6)
WIDE = Matmul(rows=128, inner=64, columns=1024, time_s=3e-6)
CURVES = Curves(
    matmuls={Precision.FP32: (SMALL, WIDE)},
    copies={8: 1e-12},
    adamw={8: 1.0},
    launch_s=1.0,
    kernel_s=1e-7,
)


@pytest.mark.parametrize("measured", [SMALL, WIDE])
def test_a_matmul_that_was_measured_has_its_time_until_it_is_left_out(measured: Matmul) -> None:
    sides = measured.rows, measured.inner, measured.columns
    time = CURVES.matmul_time(Precision.FP32, *sides)
    assert time is not None
    assert time.time_s == pytest.approx(measured.time_s)
    assert CURVES.has_matmul(Precision.FP32, *sides, Form.FORWARD, 1)
    without = CURVES.without(Precision.FP32, {measured.sides})
    assert not without.has_matmul(Precision.FP32, *sides, Form.FORWARD, 1)


def test_a_precision_without_matmuls_has_no_time() -> None:
    assert CURVES.matmul_time(Precision.BF16, 8, 8, 8) is None
    nothing = replace(CURVES, matmuls={Precision.FP32: ()})
    assert nothing.matmul_time(Precision.FP32, 8, 8, 8) is None


def test_passes_are_interpolated_by_logarithms_and_grow_beyond() -> None:
    curve = {100: 1.0, 10_000: 100.0}
    assert interpolated(curve, 1000) == pytest.approx(10.0)
    assert interpolated(curve, 1) == 1.0
    assert interpolated(curve, 30_000) == pytest.approx(300.0)
    assert [interpolated(curve, num_bytes) for num_bytes in curve] == pytest.approx([1.0, 100.0])


def test_a_pass_takes_no_less_than_a_smaller_one_that_was_measured() -> None:
    noisy = {10: 2.0, 20: 1.0, 40: 4.0}
    assert interpolated(noisy, 20) == interpolated(noisy, 15) == 2.0
    assert interpolated(noisy, 30) > 2.0
    assert interpolated(noisy, 40) == 4.0


def test_launches_of_published_hosts_lie_between_the_ends_of_the_interval() -> None:
    launches_s = defaultdict(list)
    for study in load_ceilings(CEILINGS).studies:
        launch_s = study.launch_s(LaunchKind.EAGER)
        assert launch_s is not None
        launches_s[study.device_name].append(launch_s)
    slower = [time_s / median(times_s) for times_s in launches_s.values() for time_s in times_s]
    assert len(slower) == 8
    # the ends, rounded to two digits
    assert 1 / min(slower) == pytest.approx(FASTER_LAUNCHES, rel=0.01)
    assert max(slower) == pytest.approx(SLOWER_LAUNCHES, rel=0.01)


def test_backends_of_attention_take_as_long_as_the_attention_study_says() -> None:
    """From 8,192 tokens on no kernel of the study waits for its launch. The bound is the distance
    of heads of 64 from those of 128, which one number stands for.
    """
    curves = load_ceilings(CEILINGS).curves("NVIDIA H200")
    assert curves is not None
    with (CEILINGS.parent / "attention" / "bf16" / "results.csv").open() as file:
        measured = {
            (row["implementation"], int(row["d_head"]), int(row["context_length"])): row
            for row in csv.DictReader(file)
        }
    for backend, d_head, context, (form, column) in product(
        (SdpaBackend.FLASH, SdpaBackend.EFFICIENT),
        (64, 128),
        (8192, 16384),
        ((Form.ATTENTION, "forward_mean_ms"), (Form.ATTENTION_BACKWARD, "backward_mean_ms")),
    ):
        sides = context, d_head, context
        times = {}
        for one in (backend, SdpaBackend.CUDNN):
            time = with_backend(curves, one).matmul_time(Precision.BF16, *sides, batch=8, form=form)
            assert time is not None
            times[one] = time.time_s
        foretold = times[backend] / times[SdpaBackend.CUDNN]
        by_backend = float(measured[backend.value, d_head, context][column])
        by_cudnn = float(measured["cudnn", d_head, context][column])
        assert foretold == pytest.approx(by_backend / by_cudnn, rel=0.15)


def test_in_fp32_backends_of_attention_take_the_same_time() -> None:
    curves = load_ceilings(CEILINGS).curves("NVIDIA H200")
    assert curves is not None
    slower = with_backend(curves, SdpaBackend.EFFICIENT)
    assert slower.matmuls[Precision.FP32] == curves.matmuls[Precision.FP32]
