"""The attention grid and the fusion study where their numbers count: on a GPU."""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from cs336.config import Device, Phase, Precision
from cs336.costs.hardware import find_device
from cs336.record import Status
from cs336.studies.attention_cell import measure_attention, measure_cell
from cs336.studies.cell import attempt
from cs336.studies.operators import (
    AttentionCell,
    AttentionGrid,
    CellResult,
    FusionGrid,
    FusionRow,
    Implementation,
    Op,
    Version,
    naive_saved_bytes,
    rows_bytes,
    weights_bytes,
)
from cs336.studies.records import Cell
from cs336.studies.runner import run_study

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GRID = AttentionGrid(
    device=Device.CUDA,
    batch_size=8,
    d_heads=(64,),
    context_lengths=(256, 512, 1024),
    implementations=(Implementation.NAIVE,),
    passes=5,
    warmup_passes=3,
    timeout_s=120.0,
)
FUSION = FusionGrid(
    device=Device.CUDA,
    batch_size=8,
    context_length=512,
    width=6400,
    num_heads=8,
    d_head=64,
    passes=20,
)
"""105 MB a tensor: twice the L2 cache of an H200, so that the memory's bandwidth counts."""


# What stands in for the study's own function in the worker: found there by name, so at the top of
# the module.
def out_of_memory_at_512(grid: AttentionGrid, rows: Sequence[CellResult]) -> list[CellResult]:
    def too_much(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * torch.empty(2**42, device="cuda")[0]

    return [
        measure_cell(grid, row.cell, too_much if row.cell.context_length == 512 else None)
        for row in rows
    ]


def device_assert_at_512(grid: AttentionGrid, rows: Sequence[CellResult]) -> list[CellResult]:
    def out_of_bounds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        picked = q.flatten()[torch.full((8,), q.numel() + 7, device="cuda")]
        torch.cuda.synchronize()
        return q * picked.sum()

    return [
        measure_cell(grid, row.cell, out_of_bounds if row.cell.context_length == 512 else None)
        for row in rows
    ]


class OutOfMemoryGrid(AttentionGrid):
    MEASURE = f"{__name__}:out_of_memory_at_512"


class DeviceAssertGrid(AttentionGrid):
    MEASURE = f"{__name__}:device_assert_at_512"


@pytest.mark.parametrize(
    ("kind", "status"), [(OutOfMemoryGrid, Status.OOM), (DeviceAssertGrid, Status.CUDA_ERROR)]
)
def test_a_cell_that_fails_on_the_device_leaves_the_next_one_whole(kind, status: Status) -> None:
    grid = kind(**{each.name: getattr(GRID, each.name) for each in fields(GRID)})
    before, failed, after = run_study(grid).results
    assert (before.status, failed.status, after.status) == (Status.OK, status, Status.OK), (
        failed.failure
    )
    if status is Status.OOM:
        assert failed.failure.requested_bytes == 2**44
        assert failed.failure.free_bytes > 0
    assert after.memory.saved_bytes == naive_saved_bytes(GRID, after.cell)


def test_the_grid_runs_out_of_memory_where_the_closed_form_says_so() -> None:
    """The T x T matrix alone is larger than the device; the fused kernel never makes it."""
    total = torch.cuda.get_device_properties(0).total_memory
    context_length = 1024
    while 2 * context_length**2 <= total:
        context_length *= 2
    grid = replace(
        GRID,
        batch_size=1,
        d_heads=(16,),
        context_lengths=(context_length,),
        precisions=(Precision.BF16,),
        passes=1,
        warmup_passes=1,
        implementations=(Implementation.NAIVE, Implementation.FLASH),
    )
    naive, flash = run_study(grid).results
    assert naive.status is Status.OOM
    assert naive.failure.requested_bytes == pytest.approx(weights_bytes(grid, naive.cell), rel=0.01)
    assert flash.status is Status.OK, flash.failure


def measured_alone(grid: AttentionGrid, cell: AttentionCell) -> CellResult:
    """The result of a cell with nothing in the allocator's cache."""
    blank = CellResult(cell=cell, status=Status.OK)
    (row,), is_fit = attempt(grid, Cell(label=cell.label, rows=(blank,)), measure_attention)
    assert is_fit, row.failure
    return row


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("causal", [False, True])
def test_measured_memory_is_the_closed_form(precision: Precision, causal: bool) -> None:
    grid = replace(GRID, causal=causal)
    cell = AttentionCell(
        implementation=Implementation.NAIVE, precision=precision, d_head=64, context_length=1024
    )  # all sizes are whole blocks of the allocator
    memory = measured_alone(grid, cell).memory
    assert memory.saved_bytes == naive_saved_bytes(grid, cell)
    assert memory.before_forward_bytes >= 4 * rows_bytes(grid, cell)
    assert memory.peak_bytes >= memory.before_backward_bytes + weights_bytes(grid, cell)
    flash = replace(cell, implementation=Implementation.FLASH, precision=Precision.BF16)
    fused = measured_alone(grid, flash).memory
    # the output, and one number for each query
    assert fused.saved_bytes < 2 * rows_bytes(grid, flash)


def test_flash_has_no_kernel_for_fp32_and_says_why() -> None:
    (result,) = run_study(
        replace(GRID, context_lengths=(256,), implementations=(Implementation.FLASH,))
    ).results
    assert result.status is Status.UNAVAILABLE
    assert "dtype" in result.failure.message, result.failure.message


@pytest.fixture(scope="module")
def forward() -> dict[tuple[Op, Version], FusionRow]:
    study = run_study(FUSION)
    for row in study.rows:
        assert row.status is Status.OK, (row.op, row.version, row.failure)
        print(row.op, row.version, row.phase, row.measurement.median_s, row.max_error, row.kernels)
    return {(row.op, row.version): row for row in study.rows if row.phase is Phase.FORWARD}


@pytest.mark.alone
def test_compiling_makes_one_kernel_of_many(forward: dict[tuple[Op, Version], FusionRow]) -> None:
    kernels = {key: row.kernels for key, row in forward.items()}
    assert len(kernels[Op.GELU, Version.EAGER]) > 5
    assert len(kernels[Op.SOFTMAX, Version.EAGER]) >= 5
    assert len(kernels[Op.RMS_NORM, Version.EAGER]) >= 6
    for op in (Op.GELU, Op.SOFTMAX, Op.RMS_NORM):
        assert len(kernels[op, Version.COMPILED]) == 1, kernels[op, Version.COMPILED]
        assert "triton" in kernels[op, Version.COMPILED][0]
    for op in (Op.GELU, Op.SOFTMAX):
        assert len(kernels[op, Version.FUSED]) == 1, kernels[op, Version.FUSED]


def rate_of(row: FusionRow) -> float:
    return row.must_move_bytes / row.measurement.median_s


@pytest.mark.alone
def test_fewer_bytes_take_less_time_and_none_move_faster_than_the_memory(
    forward: dict[tuple[Op, Version], FusionRow],
) -> None:
    eager, compiled = forward[Op.GELU, Version.EAGER], forward[Op.GELU, Version.COMPILED]
    assert eager.moved_bytes == 9 * eager.must_move_bytes
    assert eager.measurement.median_s > 4 * compiled.measurement.median_s
    spec = find_device(torch.cuda.get_device_name())
    if spec is None:
        pytest.skip("the bandwidth of this device is not known")
    for op in (Op.GELU, Op.SOFTMAX, Op.RMS_NORM):
        share = rate_of(forward[op, Version.FUSED]) / spec.memory_bandwidth_bytes_per_s
        print(f"{op}: {share:.1%} of the bandwidth")
        assert share < 1
    assert rate_of(compiled) > 0.5 * spec.memory_bandwidth_bytes_per_s
