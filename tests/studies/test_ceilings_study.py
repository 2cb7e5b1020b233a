"""Ceilings on a CPU: FLOPs, bytes and results from other libraries, clocks of a known rate, injected failures."""

import contextlib
import gc
import itertools
import time
import types
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.config import Device
from cs336_systems.costs.communication import Collective
from cs336_systems.costs.time import step_time
from cs336_systems.record import Status
from cs336_systems.studies import ceilings_cell
from cs336_systems.studies.ceilings_cell import (
    GRAPH_S,
    MAX_GRAPH_RUNS,
    NARROW,
    host_timer,
    make_product,
    make_stream,
    measure_collectives,
    measure_rows,
    replayed,
    runs_in_graph,
    time_calls,
    timed_loops,
    why_unavailable,
)
from cs336_systems.studies.ceilings_records import (
    STREAM_BYTES,
    CeilingsGrid,
    Launch,
    ProductCell,
    ProductPrecision,
    Shape,
    Stream,
)
from cs336_systems.studies.cell import attempt
from cs336_systems.studies.runner import run_study
from tests.report.ceilings import make_rates

SHAPE = Shape(rows=5, inner=7, columns=3, name="unequal on purpose")
GRID = CeilingsGrid(
    device=Device.CPU, shapes=(SHAPE,), precisions=(ProductPrecision.FP32,), stream_bytes=(2800,), loops=3, loop_s=0.002
)


def row_of(precision: ProductPrecision, shape: Shape = SHAPE) -> ProductCell:
    """The row of one product."""
    cell = next(replace(GRID, shapes=(shape,), precisions=(precision,)).cells())
    (row,), _ = attempt(GRID, cell, measure_rows)
    return row


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        (ProductPrecision.FP32, torch.float32, 1e-5),
        (ProductPrecision.BF16, torch.bfloat16, 2**-7),
        (ProductPrecision.FP16, torch.float16, 2**-10),
    ],
    ids=str,
)
def test_a_product_is_that_of_a_linear_layer(precision, dtype, tolerance) -> None:
    left, right = drawn((5, 7), (3, 7), dtype=dtype)
    expected = np.einsum("ri,ci->rc", left.double().numpy(), right.double().numpy())
    made = make_product(GRID, precision, SHAPE)()
    assert made.dtype is dtype
    np.testing.assert_allclose(made.double().numpy(), expected, rtol=tolerance, atol=10 * tolerance)
    other = make_product(replace(GRID, seed=1), precision, SHAPE)()
    assert not torch.equal(made, other)


def test_flops_are_those_that_torch_counts() -> None:
    with FlopCounterMode(display=False) as counter:
        make_product(GRID, ProductPrecision.FP32, SHAPE)()
    assert SHAPE.flops == counter.get_total_flops()


def test_a_copy_copies_and_a_sum_sums() -> None:
    source = torch.rand(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(make_stream(GRID, Stream.COPY, 100)(), source)
    assert float(make_stream(GRID, Stream.READ, 100)()) == pytest.approx(float(source.double().sum()))
    assert STREAM_BYTES[Stream.COPY] * 100 == source.nbytes + source.clone().nbytes
    assert STREAM_BYTES[Stream.READ] * 100 == source.nbytes


def test_the_step_of_adamw_is_that_of_torch_and_its_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = torch._fused_adamw_

    def watched(*tensors, **settings):
        before = [[tensor.clone() for tensor in group] for group in tensors]
        real(*tensors, **settings)
        seen.append((before, tensors))

    monkeypatch.setattr(torch, "_fused_adamw_", watched)
    make_stream(GRID, Stream.ADAMW, 100)()
    before, (parameters, _, *state) = seen[0]
    parameter = torch.nn.Parameter(before[0][0].clone())
    parameter.grad = before[1][0]
    torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01, eps=1e-8, foreach=False).step()
    torch.testing.assert_close(parameters[0], parameter.detach())
    read = [group[0] for group in before[:4]]
    written = [a for (a,), (b,) in zip([parameters, *state[:2]], [before[0], *before[2:4]], strict=True)
               if not torch.equal(a, b)]  # fmt: skip
    assert STREAM_BYTES[Stream.ADAMW] * 100 == sum(tensor.nbytes for tensor in (*read, *written))


def test_a_clock_of_known_rate_gives_that_rate() -> None:
    loops = timed_loops(lambda: None, lambda _, count: count * 1e-5, replace(GRID, loops=4))
    assert len(loops.times_s) == 4
    assert min(loops.times_s) >= GRID.loop_s
    assert loops.median_s == pytest.approx(1e-5)
    of_graphs = timed_loops(lambda: None, lambda _, count: count * 1e-5, GRID, runs_per_call=50)
    assert of_graphs.median_s == pytest.approx(2e-7)


@pytest.mark.parametrize("time_s", [1e-6, 1e-5, 1.7e-4, 9e-4, 2e-3, 5.0])
def test_runs_that_may_be_launches_are_repeated_in_a_graph_that_is_not_long(time_s: float) -> None:
    runs = runs_in_graph(time_s)
    assert (runs == 0) is (time_s > 1e-3)
    assert runs <= MAX_GRAPH_RUNS
    assert runs * time_s < GRAPH_S + time_s


def test_one_interruption_does_not_end_the_search() -> None:
    """The first loops take 50 ms longer, which is longer than asked for."""
    pauses = itertools.chain([0.05, 0.05], itertools.repeat(0.0))
    loops = timed_loops(lambda: None, lambda _, count: count * 1e-6 + next(pauses), GRID)
    assert loops.count * 1e-6 >= GRID.loop_s
    assert loops.median_s == pytest.approx(1e-6)


@pytest.mark.parametrize("time_s", [1e-6, 3e-4, 0.0019, 0.05])
def test_the_search_takes_no_longer_than_two_loops(time_s: float) -> None:
    """Of the time of a whole study it is the part that measures nothing."""
    asked = []

    def timer(_: object, count: int) -> float:
        asked.append(count)
        return count * time_s

    loops = timed_loops(lambda: None, timer, GRID)
    searching_s = sum(asked) * time_s - sum(loops.times_s)
    assert searching_s <= 2 * max(1.1 * GRID.loop_s + time_s, time_s)


@pytest.mark.parametrize(("capability", "missing"), [((8, 6), {ProductPrecision.FP8}), ((9, 0), set())], ids=str)
def test_a_gpu_multiplies_what_its_generation_does(monkeypatch, capability, missing) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    lucky = Shape(rows=5, inner=64, columns=48)
    assert {p for p in ProductPrecision if why_unavailable(Device.CUDA, p, lucky)} == missing
    for unlucky in (replace(lucky, columns=50257), replace(lucky, inner=24)):
        assert {p for p in ProductPrecision if why_unavailable(Device.CUDA, p, unlucky)} == {ProductPrecision.FP8}


@pytest.mark.parametrize(
    ("precision", "mode"),
    [(ProductPrecision.FP32, "highest"), (ProductPrecision.TF32, "high"), (ProductPrecision.BF16, "highest")],
    ids=str,
)
def test_fp32_is_true_fp32_and_tf32_is_not(monkeypatch: pytest.MonkeyPatch, precision, mode) -> None:
    seen = []

    def measured(run, grid):
        seen.append(torch.get_float32_matmul_precision())
        return timed_loops(run, host_timer, grid)

    monkeypatch.setattr(ceilings_cell, "measure", measured)
    monkeypatch.setattr(ceilings_cell, "why_unavailable", lambda *_: None)
    try:
        assert row_of(precision).timing.status is Status.OK
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [mode]


def test_calls_of_a_step_are_timed_by_a_run_of_it() -> None:
    """On a CPU, which computes longer than it calls. The forecast of a host alone is so many calls."""
    config = replace(NARROW, device=Device.CPU, warmup_steps=1, measured_steps=3)
    found = time_calls(config)
    assert len(found.times_s) == 3
    curves = make_rates().curves()
    assert curves is not None
    predicted = step_time(replace(config, device=Device.CUDA), curves)
    assert predicted is not None
    assert predicted.launch_s == pytest.approx(found.count * curves.launch_s)


def test_a_whole_study_on_a_cpu() -> None:
    grid = replace(
        GRID, shapes=(SHAPE, SHAPE, replace(SHAPE, rows=9)), precisions=(ProductPrecision.FP32, ProductPrecision.FP8)
    )
    study = run_study(grid)
    assert [(cell.precision, cell.shape.rows) for cell in study.products] == [
        (ProductPrecision.FP32, 5), (ProductPrecision.FP32, 9), (ProductPrecision.FP8, 5), (ProductPrecision.FP8, 9),
    ]  # fmt: skip
    assert [cell.timing.status for cell in study.products] == [Status.OK] * 2 + [Status.UNAVAILABLE] * 2
    assert [(cell.stream, cell.moved_bytes) for cell in study.streams] == [(stream, 2800) for stream in Stream]
    assert [cell.launch for cell in study.launches] == [Launch.EAGER]
    assert 1e-8 < study.launch_s(Launch.EAGER) < 1e-2
    assert study.product_ceiling(ProductPrecision.FP32) == max(cell.flops_per_s for cell in study.products[:2])
    assert (study.reductions, study.cache_bytes) == ((), None)
    for timing in study.timings:
        assert timing.status is Status.UNAVAILABLE or (len(timing.loops.times_s) == 3 and min(timing.loops.times_s) > 0)


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
    cells = [cell for cell in replace(GRID, world_size=6, stream_bytes=(1 << 14,)).cells() if "processes" in cell.label]
    assert [cell.rows[0].world_size for cell in cells] == [2] * 4 + [4] * 4 + [6] * 4, "four kinds of each"
    for row in cells[-1].rows:
        assert row.num_bytes % 24 == 0
        assert 0 <= min(size - row.num_bytes for size in (1 << 12, 1 << 14, 1 << 16) if size >= row.num_bytes) < 24


def test_a_process_that_fails_is_a_failure_of_all_sizes_of_its_kind() -> None:
    """No machine has a tensor of 2^50 bytes."""
    *_, last = replace(GRID, world_size=2, stream_bytes=(1 << 14,)).cells()
    cells = measure_collectives(GRID, [replace(last.rows[0], num_bytes=2**50)])
    assert [cell.timing.status for cell in cells] == [Status.OOM]


def test_processes_that_do_not_come_together_are_a_failure_of_every_row() -> None:
    """More processes than there are GPUs: the last has no device."""
    world_size = max(2, torch.cuda.device_count() + 1)
    *_, last = replace(GRID, device=Device.CUDA, world_size=world_size, stream_bytes=(8192,)).cells()
    cells = measure_collectives(replace(GRID, device=Device.CUDA), last.rows)
    assert [(cell.collective, cell.num_bytes) for cell in cells] == [
        (row.collective, row.num_bytes) for row in last.rows
    ]
    for cell in cells:
        assert cell.timing.status in (Status.CRASHED, Status.CUDA_ERROR)
        assert cell.timing.failure.message
        assert "set_device" in cell.timing.failure.traceback


def test_what_a_graph_works_on_stays_as_long_as_it_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_run_is_called_as_often_as_it_is_counted() -> None:
    calls = itertools.count()
    asked = []

    def timer(run, count):
        asked.append(count)
        return host_timer(run, count)

    loops = timed_loops(lambda: (next(calls), time.sleep(0.001)), timer, GRID)
    assert next(calls) == sum(asked)
    assert loops.median_s >= 0.001
    assert asked[-3:] == [loops.count] * 3
