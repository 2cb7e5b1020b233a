"""Kernels of a step as cells: they are those that PyTorch runs in a layer, and their times come back in a forecast."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.config import SIZES, Attention, Device, Precision, RunConfig
from cs336_systems.costs.tape import Form, Kind, Pass
from cs336_systems.costs.time import operations, step_time
from cs336_systems.studies.ceilings_cell import make_fused_attention, make_matmul, make_pass, measure_kernel
from cs336_systems.studies.ceilings_records import (
    PASS_BYTES,
    PASS_UNIT,
    UNTIMED,
    CeilingsGrid,
    KernelCell,
    Launch,
    LaunchCell,
    ProductPrecision,
    Shape,
    Stream,
    kernel_cells,
    pass_cells,
)
from tests.report.ceilings import lasting, make_ceilings, product_at, square, stream_at

GRID = CeilingsGrid(
    device=Device.CPU,
    shapes=(Shape(rows=4, inner=4, columns=4),),
    precisions=(ProductPrecision.FP32, ProductPrecision.BF16),
    stream_bytes=(2**20,),
    loops=3,
    loop_s=1e-4,
    step_presets=("tiny",),
    step_contexts=(16, 24),
    step_batch_size=2,
)


def kernel(form: Form, rows: int, inner: int, columns: int, batch: int = 1) -> KernelCell:
    return KernelCell(
        precision=Precision.FP32, form=form, batch=batch, rows=rows, inner=inner, columns=columns, timing=UNTIMED
    )  # fmt: skip


class Matmuls(TorchDispatchMode):
    """Shapes of the factors of matmuls, and in which of their last two axes neighbours in memory lie."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[tuple[int, ...], bool], ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm"):
            self.seen.append(tuple((tuple(each.shape), each.stride(-1) == 1) for each in args))
        return func(*args, **(kwargs or {}))


def of_cell(row: KernelCell) -> Any:
    with Matmuls() as matmuls:
        make_matmul(GRID, row)()
    return matmuls.seen


def test_matmuls_have_the_factors_of_a_linear_layer_as_they_lie_in_memory() -> None:
    """A layer from 24 to 40 features on 16 tokens: forward, then the gradients of its weight and of its input."""
    x, weight = torch.randn(16, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    with Matmuls() as matmuls:
        F.linear(x, weight).backward(torch.randn(16, 40))
    cells = kernel(Form.FORWARD, 16, 24, 40), kernel(Form.WEIGHT, 40, 16, 24), kernel(Form.INPUT, 16, 40, 24)
    ours = [seen for cell in cells for seen in of_cell(cell)]
    assert sorted(ours) == sorted(matmuls.seen)


def test_batched_matmuls_have_the_factors_of_attention_as_they_lie_in_memory() -> None:
    """Scores and values of 6 heads of 8 features and 16 positions, and the gradients of both factors of each."""
    q, k, v = (torch.randn(6, 16, 8, requires_grad=True) for _ in "qkv")
    with Matmuls() as matmuls:
        (q @ k.transpose(-2, -1) @ v).backward(torch.randn(6, 16, 8))
    cells = [
        kernel(Form.FORWARD, 16, 8, 16, 6),
        kernel(Form.INPUT, 16, 16, 8, 6),
        kernel(Form.WEIGHT, 16, 16, 8, 6),
        kernel(Form.FORWARD, 16, 8, 16, 6),
        kernel(Form.WEIGHT, 8, 16, 16, 6),
        kernel(Form.INPUT, 16, 16, 8, 6),
    ]
    ours = [seen for cell in cells for seen in of_cell(cell)]
    assert sorted(ours) == sorted(matmuls.seen)


def test_attention_is_causal_and_has_gradients() -> None:
    row = kernel(Form.ATTENTION, 8, 4, 8, batch=3)
    values: Any = make_fused_attention(GRID, row, with_backward=False)()
    assert values.shape == (1, 3, 8, 4)
    gradients: Any = make_fused_attention(GRID, row, with_backward=True)()
    assert [each.shape for each in gradients] == [values.shape] * 3
    assert not gradients[0][:, :, 0].any()  # the first position attends to itself alone, whatever its query


def test_backward_of_attention_is_what_both_take_more_than_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([lasting(2.0).loops, lasting(7.0, count=3).loops])
    monkeypatch.setattr("cs336_systems.studies.ceilings_cell.measure", lambda *_: next(times_s))
    row = measure_kernel(GRID, kernel(Form.ATTENTION_BACKWARD, 8, 4, 8))
    assert row.timing.time_s == pytest.approx(5.0)


@pytest.mark.parametrize("how", Pass)
def test_passes_do_what_a_step_does(how: Pass) -> None:
    (row,) = [each for each in pass_cells(Device.CPU, [1]) if each.how is how]
    assert row.moved_bytes == PASS_UNIT * PASS_BYTES[how]
    result: Any = make_pass(GRID, row)()
    assert (result.numel(), result.dtype) == (PASS_UNIT, torch.float32)
    if how is Pass.SOFTMAX:
        assert torch.allclose(result.sum(-1), torch.ones(()))
    if how is Pass.MASKED:
        assert (result[0].triu(1) == -torch.ones(512, 512).triu(1)).all()


def test_a_grid_has_each_matmul_of_the_steps_once() -> None:
    rows = [row for cell in GRID.cells() for row in cell.rows if isinstance(row, KernelCell)]
    assert len(set(rows)) == len(rows)
    found = {(row.form, row.batch, row.rows, row.inner, row.columns) for row in rows}
    for attention, context_length in product(Attention, GRID.step_contexts):
        model = replace(SIZES["tiny"], context_length=context_length, attention=attention)
        config = RunConfig(size="tiny", model=model, batch_size=GRID.step_batch_size)
        for of_phase in operations(config).values():
            wanted = {(each.form, each.batch, *each.sides) for each in of_phase if each.kind is Kind.MATMUL}
            assert wanted <= found


def test_a_forecast_has_the_measured_time_of_each_kernel() -> None:
    """Each kernel takes a millisecond, and nothing else takes time."""
    config = RunConfig(size="tiny", model=SIZES["tiny"], device=Device.CUDA)
    cells = kernel_cells(["tiny"], [config.model.context_length], [Precision.FP32], config.batch_size)
    study = make_ceilings(
        [product_at(square(8), 1, precision=ProductPrecision.FP32)],
        [stream_at(1e9, stream=stream, num_bytes=2**40) for stream in (Stream.COPY, Stream.ADAMW)],
        [LaunchCell(launch=launch, timing=lasting(1e-9)) for launch in (Launch.EAGER, Launch.GRAPH)],
    )
    curves = replace(study, kernels=tuple(replace(cell, timing=lasting(1e-3)) for cell in cells)).curves()
    assert curves is not None
    nothing = {1: 1e-12, 2**60: 1e-12}
    found = step_time(config, replace(curves, copies=nothing, adamw=nothing))
    assert found is not None
    matmuls = sum(each.kind is Kind.MATMUL for of_phase in operations(config).values() for each in of_phase)
    assert found.step_s == pytest.approx(matmuls * 1e-3, rel=0.01)


def test_the_gap_is_what_a_queued_copy_takes_more_than_in_a_graph() -> None:
    launches = [LaunchCell(launch=launch, timing=lasting(1e-6)) for launch in (Launch.EAGER, Launch.GRAPH)]
    streams = [stream_at(1000, 2**28, stream) for stream in (Stream.COPY, Stream.ADAMW)]
    alone_s = 2**28 / 1e12
    without = make_ceilings([], streams, launches).curves()
    queued = LaunchCell(launch=Launch.QUEUED, timing=lasting(alone_s + 1.5e-6))
    measured = make_ceilings([], streams, [*launches, queued]).curves()
    assert without is not None
    assert measured is not None
    assert without.gap_s == pytest.approx(1e-6)
    assert measured.gap_s == pytest.approx(1.5e-6)
