"""Ceilings on a CPU: FLOPs, bytes and results from other libraries, clocks of a known rate,
injected failures.
"""

import contextlib
import gc
import itertools
import types
import weakref
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from cs336.config import SIZES, Attention, Device, Precision, RunConfig
from cs336.costs.communication import Collective
from cs336.costs.tape import Form, Operation, OperationKind, Pass
from cs336.costs.time import operations, step_time
from cs336.record import Status
from cs336.studies.ceilings_cell import (
    NARROW,
    make_fused_attention,
    make_matmul,
    make_pass,
    make_product,
    make_stream,
    measure_kernel,
    measure_rows,
    time_calls,
    why_unavailable,
)
from cs336.studies.ceilings_collectives import measure_collectives
from cs336.studies.ceilings_records import (
    PASS_BYTES,
    PASS_UNIT,
    CeilingsGrid,
    ProductPrecision,
    kernel_cells,
    pass_cells,
)
from cs336.studies.ceilings_rows import (
    STREAM_BYTES,
    UNTIMED,
    KernelCell,
    LaunchCell,
    LaunchKind,
    ProductCell,
    Shape,
    Stream,
)
from cs336.studies.cell import OperationObserver, attempt
from cs336.studies.loops import replayed, timed_loops
from cs336.studies.runner import run_study
from tests.report.ceilings import lasting, make_ceilings, make_rates, product_at, square, stream_at
from tests.rounding import of_chain, of_sum

SHAPE = Shape(rows=5, inner=7, columns=3, name="unequal on purpose")
GRID = CeilingsGrid(
    device=Device.CPU,
    shapes=(SHAPE,),
    precisions=(ProductPrecision.FP32,),
    stream_bytes=(2800,),
    loops=3,
    loop_s=0.002,
)


def row_of(precision: ProductPrecision, shape: Shape = SHAPE) -> ProductCell:
    """The row of one product."""
    cell = next(replace(GRID, shapes=(shape,), precisions=(precision,)).cells())
    (row,), _ = attempt(GRID, cell, measure_rows)
    return row


def drawn(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (ProductPrecision.FP32, torch.float32),
        (ProductPrecision.BF16, torch.bfloat16),
        (ProductPrecision.FP16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_product_is_that_of_a_linear_layer(precision, dtype, seed) -> None:
    factors = drawn((5, 7), (3, 7), dtype=dtype, seed=seed)
    left, right = (factor.double().numpy() for factor in factors)
    made = make_product(replace(GRID, seed=seed), precision, SHAPE)()
    assert made.dtype is dtype
    expected = left @ right.T
    bound = of_chain(dtype, 2) * abs(expected) + of_sum(torch.float32, 7) * abs(left) @ abs(right).T
    assert (abs(made.double().numpy() - expected) <= bound).all()


def test_flops_are_those_that_torch_counts() -> None:
    with FlopCounterMode(display=False) as counter:
        make_product(GRID, ProductPrecision.FP32, SHAPE)()
    assert SHAPE.flops == counter.get_total_flops()


def test_a_copy_copies_and_a_sum_sums() -> None:
    source = torch.rand(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(make_stream(GRID, Stream.COPY, 100)(), source)
    assert float(make_stream(GRID, Stream.READ, 100)()) == pytest.approx(
        float(source.double().sum())
    )
    assert STREAM_BYTES[Stream.COPY] * 100 == source.nbytes + source.clone().nbytes
    assert STREAM_BYTES[Stream.READ] * 100 == source.nbytes


def test_a_clock_of_known_rate_gives_that_rate() -> None:
    loops = timed_loops(lambda: None, lambda _, count: count * 1e-5, replace(GRID, loops=4))
    assert len(loops.times_s) == 4
    assert min(loops.times_s) >= GRID.loop_s
    assert loops.median_s == pytest.approx(1e-5)
    of_graphs = timed_loops(lambda: None, lambda _, count: count * 1e-5, GRID, runs_per_call=50)
    assert of_graphs.median_s == pytest.approx(2e-7)


def test_one_interruption_does_not_end_the_search() -> None:
    """The first loops take 50 ms longer, which is longer than asked for."""
    pauses = itertools.chain([0.05, 0.05], itertools.repeat(0.0))
    loops = timed_loops(lambda: None, lambda _, count: count * 1e-6 + next(pauses), GRID)
    assert loops.count * 1e-6 >= GRID.loop_s
    assert loops.median_s == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("capability", "missing"), [((8, 6), {ProductPrecision.FP8}), ((9, 0), set())], ids=str
)
def test_a_gpu_multiplies_what_its_generation_does(monkeypatch, capability, missing) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    lucky = Shape(rows=5, inner=64, columns=48)
    assert {p for p in ProductPrecision if why_unavailable(Device.CUDA, p, lucky)} == missing
    for unlucky in (replace(lucky, columns=50257), replace(lucky, inner=24)):
        assert {p for p in ProductPrecision if why_unavailable(Device.CUDA, p, unlucky)} == {
            ProductPrecision.FP8
        }


def test_calls_of_a_step_are_timed_by_a_run_of_it() -> None:
    """On a CPU, which computes longer than it calls. The forecast of a host alone is so many
    calls.
    """
    config = replace(NARROW, device=Device.CPU, warmup_steps=1, measured_steps=3)
    loops = time_calls(config)
    assert len(loops.times_s) == 3
    curves = make_rates().curves()
    assert curves is not None
    predicted = step_time(replace(config, device=Device.CUDA), curves)
    assert predicted is not None
    assert predicted.launch_s == pytest.approx(loops.count * curves.launch_s)


def test_a_whole_study_on_a_cpu() -> None:
    grid = replace(
        GRID,
        shapes=(SHAPE, SHAPE, replace(SHAPE, rows=9)),
        precisions=(ProductPrecision.FP32, ProductPrecision.FP8),
    )
    study = run_study(grid)
    products = [(cell.precision, cell.shape.rows) for cell in study.products]
    assert products == [*product(grid.precisions, (5, 9))]
    for cell in study.products:
        is_there = cell.precision is ProductPrecision.FP32
        assert cell.timing.status is (Status.OK if is_there else Status.UNAVAILABLE)
    assert {cell.moved_bytes for cell in study.streams} == {2800}
    assert [cell.stream for cell in study.streams] == [*Stream]
    assert [cell.launch for cell in study.launches] == [LaunchKind.EAGER]
    assert 1e-8 < study.launch_s(LaunchKind.EAGER) < 1e-2
    assert (study.reductions, study.cache_bytes) == ((), None)
    for timing in study.timings:
        if timing.status is Status.OK:
            assert len(timing.loops.times_s) == 3
            assert min(timing.loops.times_s) > 0


def test_processes_exchange_tensors() -> None:
    """In a study, whose worker starts them; whole tensors have a part for each process."""
    cells = run_study(replace(GRID, world_size=2, stream_bytes=(1 << 14,))).reductions
    assert [(cell.collective, cell.num_bytes) for cell in cells] == [
        (kind, size) for kind in list(Collective)[:4] for size in (1 << 12, 1 << 14, 1 << 16)
    ]
    for cell in cells:
        assert cell.timing.status is Status.OK, cell.timing.failure
        assert len(cell.timing.loops.times_s) == 3


def test_numbers_of_processes_are_powers_of_two_and_the_last() -> None:
    """Six divide no power of two, so their tensors are somewhat smaller."""
    grid = replace(GRID, world_size=6, stream_bytes=(1 << 14,))
    cells = [cell for cell in grid.cells() if "processes" in cell.label]
    ranks = [cell.rows[0].world_size for cell in cells]
    assert ranks == [2] * 4 + [4] * 4 + [6] * 4, "four kinds of each"
    for row, size in zip(cells[-1].rows, (1 << 12, 1 << 14, 1 << 16), strict=True):
        assert row.num_bytes % 24 == 0
        assert 0 <= size - row.num_bytes < 24


def test_a_process_that_fails_is_a_failure_of_all_sizes_of_its_kind() -> None:
    """No machine has a tensor of 2^50 bytes."""
    *_, last = replace(GRID, world_size=2, stream_bytes=(1 << 14,)).cells()
    cells = measure_collectives(GRID, [replace(last.rows[0], num_bytes=2**50)])
    assert [cell.timing.status for cell in cells] == [Status.OOM]


def test_processes_that_do_not_come_together_are_a_failure_of_every_row() -> None:
    """More processes than there are GPUs: the last has no device."""
    world_size = max(2, torch.cuda.device_count() + 1)
    *_, last = replace(
        GRID, device=Device.CUDA, world_size=world_size, stream_bytes=(8192,)
    ).cells()
    cells = measure_collectives(replace(GRID, device=Device.CUDA), last.rows)
    assert [(cell.collective, cell.num_bytes) for cell in cells] == [
        (row.collective, row.num_bytes) for row in last.rows
    ]
    for cell in cells:
        assert cell.timing.status in (Status.CRASHED, Status.CUDA_ERROR)
        assert cell.timing.failure.message
        assert "set_device" in cell.timing.failure.traceback


def test_what_a_graph_works_on_stays_as_long_as_it_can_be_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph without its tensors writes to memory that belongs to others by then."""
    replays = []
    graph = types.SimpleNamespace(replay=lambda: replays.append(1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    target = torch.zeros(1)
    seen = weakref.ref(target)
    replay = replayed(partial(target.add_, 1), 7)
    del target
    gc.collect()
    assert seen() is not None
    assert seen().item() == 7
    replay()
    assert replays == [1]
    del replay
    gc.collect()
    assert seen() is None


STEPS_GRID = CeilingsGrid(
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
    sides = {"batch": batch, "rows": rows, "inner": inner, "columns": columns}
    return KernelCell(precision=Precision.FP32, form=form, **sides, timing=UNTIMED)


class Matmuls(OperationObserver):
    """Shapes of the factors of matmuls, and in which of their last two axes neighbours in memory
    lie.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[tuple[int, ...], bool], ...]] = []

    def observe(self, func: Any, operands: Any, _output: object) -> None:
        if func.overloadpacket.__name__ in ("mm", "bmm"):
            factors = [(tuple(factor.shape), factor.stride(-1) == 1) for factor in operands]
            self.seen.append(tuple(factors))


def of_cell(row: KernelCell) -> Any:
    with Matmuls() as matmuls:
        make_matmul(STEPS_GRID, row)()
    return matmuls.seen


def test_matmuls_have_the_factors_of_a_linear_layer_as_they_lie_in_memory() -> None:
    """A layer from 24 to 40 features on 16 tokens: forward, then the gradients of its weight and
    of its input.
    """
    x, weight = torch.randn(16, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    with Matmuls() as matmuls:
        F.linear(x, weight).backward(torch.randn(16, 40))
    cells = (
        kernel(Form.FORWARD, 16, 24, 40),
        kernel(Form.WEIGHT, 40, 16, 24),
        kernel(Form.INPUT, 16, 40, 24),
    )
    ours = [seen for cell in cells for seen in of_cell(cell)]
    assert sorted(ours) == sorted(matmuls.seen)


def test_batched_matmuls_have_the_factors_of_attention_as_they_lie_in_memory() -> None:
    """Scores and values of 6 heads of 8 features and 16 positions, and the gradients of both
    factors of each.
    """
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
    values: Any = make_fused_attention(STEPS_GRID, row, with_backward=False)()
    assert values.shape == (1, 3, 8, 4)
    gradients: Any = make_fused_attention(STEPS_GRID, row, with_backward=True)()
    assert [gradient.shape for gradient in gradients] == [values.shape] * 3
    # the first position attends to itself alone, whatever its query
    assert not gradients[0][:, :, 0].any()


def test_backward_of_attention_is_what_both_take_more_than_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times_s = iter([lasting(2.0).loops, lasting(7.0, count=3).loops])
    monkeypatch.setattr("cs336.studies.ceilings_cell.measure", lambda *_: next(times_s))
    row = measure_kernel(STEPS_GRID, kernel(Form.ATTENTION_BACKWARD, 8, 4, 8))
    assert row.timing.time_s == pytest.approx(5.0)


@pytest.mark.parametrize("how", [how for how in Pass if how is not Pass.FUSED])
def test_passes_do_what_a_step_does(how: Pass) -> None:
    (row,) = [cell for cell in pass_cells(Device.CPU, [1]) if cell.how is how]
    assert row.moved_bytes == PASS_UNIT * PASS_BYTES[how]
    result: Any = make_pass(STEPS_GRID, row)()
    assert (result.numel(), result.dtype) == (PASS_UNIT, torch.float32)
    if how is Pass.SOFTMAX:
        assert torch.allclose(result.sum(-1), torch.ones(()))
    if how is Pass.MASKED:
        assert (result[0].triu(1) == -torch.ones(512, 512).triu(1)).all()


def matmuls_of(config: RunConfig) -> list[Operation]:
    steps = itertools.chain(*operations(config).values())
    return [operation for operation in steps if operation.kind is OperationKind.MATMUL]


def test_a_grid_has_each_matmul_of_the_steps_once() -> None:
    rows = [row for cell in STEPS_GRID.cells() for row in cell.rows if isinstance(row, KernelCell)]
    assert len(set(rows)) == len(rows)
    measured = {(row.form, row.batch, row.rows, row.inner, row.columns) for row in rows}
    for attention, context_length in product(Attention, STEPS_GRID.step_contexts):
        model = replace(SIZES["tiny"], context_length=context_length, attention=attention)
        config = RunConfig(size="tiny", model=model, batch_size=STEPS_GRID.step_batch_size)
        for matmul in matmuls_of(config):
            assert (matmul.form, matmul.batch, *matmul.sides) in measured


def launches_of(time_s: float) -> list[LaunchCell]:
    kinds = (LaunchKind.EAGER, LaunchKind.GRAPH)
    return [LaunchCell(launch=kind, timing=lasting(time_s)) for kind in kinds]


def test_a_forecast_has_the_measured_time_of_each_kernel() -> None:
    """Each kernel takes a millisecond, and nothing else takes time."""
    config = RunConfig(size="tiny", model=SIZES["tiny"], device=Device.CUDA)
    cells = kernel_cells(
        ["tiny"], [config.model.context_length], [Precision.FP32], config.batch_size
    )
    study = make_ceilings(
        [product_at(square(8), 1, precision=ProductPrecision.FP32)],
        [stream_at(1e9, stream=stream, num_bytes=2**40) for stream in (Stream.COPY, Stream.ADAMW)],
        launches_of(1e-9),
    )
    curves = replace(
        study, kernels=tuple(replace(cell, timing=lasting(1e-3)) for cell in cells)
    ).curves()
    assert curves is not None
    nothing = {1: 1e-12, 2**60: 1e-12}
    predicted = step_time(config, replace(curves, copies=nothing, adamw=nothing))
    assert predicted is not None
    assert predicted.step_s == pytest.approx(len(matmuls_of(config)) * 1e-3, rel=0.01)


def test_the_gap_is_what_a_queued_copy_takes_more_than_in_a_graph() -> None:
    launches = launches_of(1e-6)
    streams = [stream_at(1000, 2**28, stream) for stream in (Stream.COPY, Stream.ADAMW)]
    alone_s = 2**28 / 1e12
    without = make_ceilings([], streams, launches).curves()
    queued = LaunchCell(launch=LaunchKind.QUEUED, timing=lasting(alone_s + 1.5e-6))
    measured = make_ceilings([], streams, [*launches, queued]).curves()
    assert without is not None
    assert measured is not None
    assert without.gap_s == pytest.approx(1e-6)
    assert measured.gap_s == pytest.approx(1.5e-6)
