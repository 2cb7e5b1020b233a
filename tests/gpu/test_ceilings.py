"""Ceilings where they count: on a GPU, against its data sheet and against times by other means."""

import time
from dataclasses import replace

import pytest
import torch

from cs336.analysis.warnings import judged
from cs336.config import Device
from cs336.costs.communication import TIMED
from cs336.costs.hardware import find_device
from cs336.measure.run import measure as measure_run
from cs336.record import Status, WarningCode
from cs336.studies.ceilings_cell import NARROW, measure_rows, why_unavailable
from cs336.studies.ceilings_records import CeilingsGrid, ProductPrecision
from cs336.studies.ceilings_rows import Shape, Stream, StreamCell
from cs336.studies.cell import attempt
from cs336.studies.loops import measure, replayed
from cs336.studies.runner import run_study

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]

MIB = 2**20
LARGE, SMALL = (Shape(rows=side, inner=side, columns=side) for side in (8192, 256))
GRID = CeilingsGrid(
    device=Device.CUDA,
    shapes=(SMALL, LARGE),
    precisions=tuple(ProductPrecision),
    stream_bytes=(MIB, 1024 * MIB),
    loops=3,
    loop_s=0.03,
)
SLEEP_CYCLES = 2_000_000


def product_of(precision, shape):
    """The row of one product."""
    (row,), _ = attempt(
        GRID, next(replace(GRID, shapes=(shape,), precisions=(precision,)).cells()), measure_rows
    )
    return row


def measured(precision, shape):
    """TFLOP/s."""
    cell = product_of(precision, shape)
    if cell.timing.status is Status.UNAVAILABLE:
        pytest.skip(cell.timing.failure.message)
    assert cell.timing.status is Status.OK, cell.timing.failure
    print(f"{precision} {shape.label}: {cell.flops_per_s / 1e12:.1f} TFLOP/s, {cell.timing}")
    return cell.flops_per_s / 1e12


@pytest.mark.parametrize("precision", ProductPrecision)
def test_no_product_is_faster_than_promised_and_large_ones_come_near(precision):
    rate = measured(precision, LARGE)
    device = find_device(torch.cuda.get_device_name())
    promised = None if device is None else device.peak(precision)
    if promised is None:
        pytest.skip("the peak of this device is not known")
    assert 0.5 * promised < 1e12 * rate < promised


def test_fewer_bits_are_faster_and_true_fp32_is_not_tf32():
    fp32, tf32, bf16 = (
        measured(precision, LARGE)
        for precision in (ProductPrecision.FP32, ProductPrecision.TF32, ProductPrecision.BF16)
    )
    assert fp32 < 0.5 * tf32
    assert tf32 < 0.8 * bf16
    if why_unavailable(Device.CUDA, ProductPrecision.FP8, LARGE) is None:
        assert measured(ProductPrecision.FP8, LARGE) > 1.2 * bf16


def test_a_sleep_on_the_device_takes_as_long_from_a_graph():
    """Short sleeps are repeated from a graph, long ones launched; both give the time by events
    around queued ones.
    """

    def seconds(cycles):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10 * SLEEP_CYCLES)  # meanwhile the host launches the rest
        before.record()
        for _ in range(50):
            torch.cuda._sleep(cycles)
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after) / 50 / 1e3

    for cycles in (SLEEP_CYCLES // 100, SLEEP_CYCLES):  # about 10 us and 1 ms
        loops = measure(lambda cycles=cycles: torch.cuda._sleep(cycles), GRID)
        assert loops.median_s == pytest.approx(seconds(cycles), rel=0.05, abs=2e-6), cycles
        # the loop by which their length was chosen took that long
        assert min(loops.times_s) >= 0.99 * GRID.loop_s


def test_a_run_that_the_host_is_slow_to_launch_takes_what_the_device_needs():
    """The host needs 0.3 ms for each, as for a backward pass, and the device about 0.01 ms."""

    def run():
        end = time.perf_counter() + 3e-4
        while time.perf_counter() < end:
            pass
        torch.cuda._sleep(SLEEP_CYCLES // 100)

    assert measure(run, GRID).median_s < 5e-5


def test_a_graph_runs_as_often_as_it_says():
    counter = torch.zeros(1, device="cuda")

    def run():
        return counter.add_(1)

    run()
    graph = replayed(run, 7)
    assert counter.item() == 1  # capturing runs nothing
    graph()
    graph()
    assert counter.item() == 1 + 2 * 7


def test_memory_is_no_faster_than_promised_but_its_cache_may_be():
    rows = [row for cell in GRID.cells() for row in cell.rows if isinstance(row, StreamCell)]
    sizes = [size for _ in Stream for size in GRID.stream_bytes]
    measured = [measure_rows(GRID, [row])[0] for row in rows]
    rates = {
        (row.stream, size): row.timing.rate(size) for row, size in zip(measured, sizes, strict=True)
    }
    print(
        {
            f"{stream} {size // MIB} MiB": f"{rate / 1e9:.0f} GB/s"
            for (stream, size), rate in rates.items()
        }
    )
    spec = find_device(torch.cuda.get_device_name())
    if spec is None:
        pytest.skip("the bandwidth of this device is not known")
    for stream in Stream:
        assert (
            0.5 * spec.memory_bandwidth_bytes_per_s
            < rates[stream, 1024 * MIB]
            < spec.memory_bandwidth_bytes_per_s
        )


def test_the_host_alone_decides_how_long_the_narrow_step_takes():
    """A device that is idle for most of each step would not end it sooner if it were faster."""
    record = judged(measure_run(replace(NARROW, device=Device.CUDA)))
    assert WarningCode.LAUNCH_BOUND in {warning.code for warning in record.warnings}


def test_a_whole_study():
    study = run_study(replace(GRID, shapes=(SMALL,), stream_bytes=(MIB,)))
    assert {timing.status for timing in study.timings} <= {Status.OK, Status.UNAVAILABLE}
    assert study.cache_bytes == torch.cuda.get_device_properties().L2_cache_size
    assert (
        study.device_name in torch.cuda.get_device_name()
        or torch.cuda.get_device_name() in study.device_name
    )


def test_gpus_exchange_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rates = {}
    for cell in run_study(
        replace(GRID, shapes=(SMALL,), world_size=2, stream_bytes=(256 * MIB,))
    ).reductions:
        assert cell.timing.status is Status.OK, cell.timing.failure
        rate = cell.timing.rate(cell.num_bytes)
        print(f"{cell.collective} of {cell.num_bytes / MIB} MiB: {rate / 1e9:.1f} GB/s")
        rates.setdefault(cell.collective, []).append(rate)
    assert len(rates) == len(TIMED)
    for by_size in rates.values():
        assert by_size == sorted(by_size), "large tensors are exchanged at a higher rate"
