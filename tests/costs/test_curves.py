"""Curves between measured points: what was measured comes back, and what lies between does so
too.
"""

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from cs336.config import Precision, SdpaBackend
from cs336.costs.curves import (
    FASTER_LAUNCHES,
    FUSED_SLOWER,
    FUSED_SPREAD,
    SLOWER_LAUNCHES,
    Curves,
    interpolated,
    with_backend,
)
from cs336.costs.hardware import find_device
from cs336.costs.kernels import Matmul
from cs336.costs.tape import MATMULS_OF, Form
from cs336.studies.ceilings_files import data_sheet_curves, load_ceilings
from cs336.studies.ceilings_rows import LaunchKind

PUBLISHED = Path(__file__).parents[2] / "data" / "published"
CEILINGS = PUBLISHED / "ceilings"

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
    ceilings = load_ceilings(CEILINGS)
    alone_s: defaultdict[str | None, list[float]] = defaultdict(list)
    in_steps = []
    for study in ceilings.studies:
        curves, call_s = ceilings.curves(study.device_name or ""), study.host_call_s
        launch_s = study.launch_s(LaunchKind.EAGER)
        assert curves is not None
        assert call_s is not None
        assert launch_s is not None
        alone_s[study.device_name].append(launch_s)
        in_steps.append(call_s / curves.launch_s)
    alone = [time_s / median(times_s) for times_s in alone_s.values() for time_s in times_s]
    slower = [*alone, *in_steps]
    assert len(alone) == len(in_steps) == 8
    # the ends, rounded
    assert 1 / min(slower) == pytest.approx(FASTER_LAUNCHES, rel=0.01)
    assert max(slower) == pytest.approx(SLOWER_LAUNCHES, rel=0.01)


@pytest.mark.parametrize("d_head", [64, 128])
@pytest.mark.parametrize("backend", [SdpaBackend.FLASH, SdpaBackend.EFFICIENT])
@pytest.mark.parametrize(
    ("form", "column"),
    [(Form.ATTENTION, "forward_mean_ms"), (Form.ATTENTION_BACKWARD, "backward_mean_ms")],
)
def test_backends_of_attention_take_as_long_as_the_attention_studies_say(
    backend: SdpaBackend, d_head: int, form: Form, column: str
) -> None:
    """The study with a mask, from which the numbers are; and the one without, which has another
    number of heads, by what cuDNN takes in it. No kernel of these waits for its launch.
    """
    curves = load_ceilings(CEILINGS).curves("NVIDIA H200")
    assert curves is not None
    slower = with_backend(curves, backend)

    def foretold_ms(own: Curves, context: int, heads: int) -> float:
        """Milliseconds of attention."""
        sides = context, d_head, context
        time = own.matmul_time(Precision.BF16, *sides, batch=heads, form=form)
        assert time is not None
        return 1e3 * time.time_s

    masked = _attention_study("causal")[backend.value, d_head, 32_768]
    assert foretold_ms(slower, 32_768, 32) == pytest.approx(float(masked[column]), rel=0.01)
    for context in (8192, 16_384):
        study = _attention_study("bf16")
        rows = [study[name, d_head, context] for name in (backend.value, "cudnn")]
        by_backend, by_cudnn = (float(row[column]) for row in rows)
        ratio = foretold_ms(slower, context, 8) / foretold_ms(curves, context, 8)
        assert ratio == pytest.approx(by_backend / by_cudnn, rel=0.15)


def _attention_study(name: str) -> dict[tuple[str, int, int], dict[str, str]]:
    """The rows of a published study by implementation, width of heads and context."""
    with (CEILINGS.parent / "attention" / name / "results.csv").open() as file:
        return {
            (row["implementation"], int(row["d_head"]), int(row["context_length"])): row
            for row in csv.DictReader(file)
        }


@pytest.mark.parametrize(
    ("form", "d_head", "published"),
    [
        (Form.ATTENTION, 64, 299e12),
        (Form.ATTENTION, 128, 335e12),
        (Form.ATTENTION_BACKWARD, 64, 291e12),
        (Form.ATTENTION_BACKWARD, 128, 322e12),
    ],
)
def test_flash_attention_2_is_as_fast_on_an_h100_as_others_measured(
    form: Form, d_head: int, published: float
) -> None:
    """Shah et al. 2024, figures 5 and 6: FLOPs a second at 16,384 tokens of 2,048 columns, forward
    with a mask and backward without, which counts all scores.
    """
    curves = load_ceilings(CEILINGS).curves("NVIDIA H100 80GB HBM3")
    assert curves is not None
    context, heads = 16_384, 2048 // d_head
    time = with_backend(curves, SdpaBackend.FLASH).matmul_time(
        Precision.BF16, context, d_head, context, batch=heads, form=form
    )
    assert time is not None
    scores = heads * context**2 / 2
    flops = 2 * MATMULS_OF[form] * scores * d_head
    assert flops / time.time_s == pytest.approx(published, rel=0.04)


@pytest.mark.parametrize("form", [Form.ATTENTION, Form.ATTENTION_BACKWARD])
def test_flash_attention_2_reaches_on_an_a100_what_its_paper_says(form: Form) -> None:
    """Dao 2023: 50 to 73 % of the peak, with heads of 128 columns; of 64 it is taken to reach
    less, as cuDNN does on Hopper.
    """
    d_head = 128
    device = find_device("NVIDIA A100-SXM4-80GB")
    assert device is not None
    context, heads = 16_384, 2048 // d_head
    chosen = data_sheet_curves(device)
    asked = [chosen, with_backend(chosen, SdpaBackend.FLASH)]
    for curves in asked:
        sides = context, d_head, context
        time = curves.matmul_time(Precision.BF16, *sides, batch=heads, form=form)
        assert time is not None
        flops = 2 * MATMULS_OF[form] * heads * context**2 / 2 * d_head
        assert 0.50 <= flops / time.time_s / 312e12 <= 0.73


def test_kernels_of_before_hopper_are_as_much_slower_than_each_other_on_an_a100() -> None:
    a100, h200 = find_device("NVIDIA A100-SXM4-80GB"), load_ceilings(CEILINGS).curves("NVIDIA H200")
    assert a100 is not None
    assert h200 is not None
    for form in (Form.ATTENTION, Form.ATTENTION_BACKWARD):
        ratios = []
        for curves in (h200, data_sheet_curves(a100)):
            times_s = []
            for backend in (SdpaBackend.FLASH, SdpaBackend.EFFICIENT):
                time = with_backend(curves, backend).matmul_time(
                    Precision.BF16, 8192, 128, 8192, batch=32, form=form
                )
                assert time is not None
                times_s.append(time.time_s)
            ratios.append(times_s[1] / times_s[0])
        assert ratios[1] == pytest.approx(ratios[0], rel=0.01)


def test_in_fp32_backends_of_attention_take_the_same_time() -> None:
    curves = load_ceilings(CEILINGS).curves("NVIDIA H200")
    assert curves is not None
    slower = with_backend(curves, SdpaBackend.EFFICIENT)
    assert slower.matmuls[Precision.FP32] == curves.matmuls[Precision.FP32]


def test_fused_kernels_are_as_much_slower_than_copies_as_torch_compile_has_made_them() -> None:
    ratios = []
    for file in sorted(PUBLISHED.glob("fusion/*/results.csv")):
        for row in csv.DictReader(file.open()):
            # attention has matmuls in it, and RMSNorm's backward kernels of PyTorch's own
            if row["version"] == "compiled" and row["kernels"] == "1":
                curves = load_ceilings(CEILINGS).curves(row["device_name"])
                assert curves is not None
                num_bytes = round(float(row["must_move_mib"]) * 2**20)
                ratios.append(
                    float(row["median_ms"]) / 1e3 / interpolated(curves.copies, num_bytes)
                )
    middle = median(ratios)
    distances = sorted(max(ratio / middle, middle / ratio) for ratio in ratios)
    ninth = distances[round(0.9 * len(distances)) - 1]
    assert len(ratios) == 10
    assert pytest.approx(middle, rel=0.01) == FUSED_SLOWER
    assert pytest.approx(ninth, rel=0.01) == FUSED_SPREAD
