"""Hand-made studies of ceilings, small enough to work out by hand."""

from cs336.config import Device
from cs336.record import Failure, Status
from cs336.studies.ceilings_records import CeilingsGrid, CeilingsStudy, ProductPrecision
from cs336.studies.ceilings_rows import (
    CollectiveCell,
    LaunchCell,
    LaunchKind,
    Loops,
    ProductCell,
    Shape,
    Stream,
    StreamCell,
    Timing,
)
from tests.report.making import H200, make_environment

MIB = 2**20
BF16, FP32, FP8 = ProductPrecision.BF16, ProductPrecision.FP32, ProductPrecision.FP8


def square(side):
    return Shape(rows=side, inner=side, columns=side)


def lasting(time_s, count=1, spread=0.0):
    """Three loops whose median is `time_s` for each repetition; the slowest takes `spread`
    longer than the fastest.
    """
    shares = (1, 1 / (1 + spread / 2), (1 + spread) / (1 + spread / 2))
    return Timing(
        status=Status.OK,
        loops=Loops(count=count, times_s=tuple(count * time_s * x for x in shares)),
    )


def lost(status=Status.OOM, message="no memory"):
    return Timing(status=status, failure=Failure(message=message))


def product_at(shape, tflops_per_s, precision=BF16, **loops):
    """A product at this rate."""
    return ProductCell(
        precision=precision, shape=shape, timing=lasting(shape.flops / tflops_per_s / 1e12, **loops)
    )


def stream_at(gb_per_s, num_bytes=64 * MIB, stream=Stream.COPY, **loops):
    return StreamCell(
        stream=stream, moved_bytes=num_bytes, timing=lasting(num_bytes / gb_per_s / 1e9, **loops)
    )


def make_ceilings(products=(), streams=(), launches=(), reductions=(), device_name=H200, **fields):
    """Of those cells; the shapes and precisions of the grid are theirs."""
    grid = CeilingsGrid(
        device=fields.pop("device", Device.CUDA),
        shapes=tuple(dict.fromkeys(cell.shape for cell in products)) or (square(8),),
        precisions=tuple(dict.fromkeys(cell.precision for cell in products)) or (FP32,),
        stream_bytes=tuple(dict.fromkeys(cell.moved_bytes for cell in streams)) or (MIB,),
        loops=3,
        world_size=reductions[0].world_size if reductions else 1,
    )
    return CeilingsStudy(
        grid=grid,
        products=tuple(products),
        streams=tuple(streams),
        launches=tuple(launches),
        reductions=tuple(reductions),
        environment=make_environment(device_name),
        **fields,
    )


def make_rates(tflops_per_s=1.0, gb_per_s=100, **fields):
    """One rate of matmuls of all sides and precisions, one bandwidth of all sizes, and 1 us for
    each launch.
    """
    return make_ceilings(
        [product_at(square(8192), tflops_per_s, precision) for precision in (FP32, BF16)],
        [stream_at(gb_per_s), stream_at(gb_per_s, stream=Stream.ADAMW)],
        [LaunchCell(launch=launch, timing=lasting(1e-6)) for launch in LaunchKind],
        **fields,
    )


def make_whole():
    """On an H200: bf16 reaches 800 TFLOP/s and fp32 50, copies 4000 GB/s: ridges at 200 and 12.5
    FLOPs a byte.
    """
    return make_ceilings(
        products=(
            product_at(square(1024), 300, spread=0.05),
            product_at(square(4096), 800),
            product_at(square(8192), 700),
            product_at(Shape(rows=2048, inner=768, columns=50257, name="gpt2 head"), 400),
            product_at(Shape(rows=2048, inner=768, columns=50304, name="gpt2 head, padded"), 600),
            product_at(square(1024), 50, FP32),
            ProductCell(
                precision=FP8, shape=square(1024), timing=lost(Status.UNAVAILABLE, "too old.")
            ),
            ProductCell(
                precision=FP8, shape=square(4096), timing=lost(Status.UNAVAILABLE, "too old.")
            ),
        ),
        streams=(
            stream_at(9000, MIB),
            stream_at(4000, 4096 * MIB),
            StreamCell(stream=Stream.COPY, moved_bytes=8192 * MIB, timing=lost()),
            stream_at(3600, 4096 * MIB, Stream.ADAMW),
        ),
        launches=(
            LaunchCell(launch=LaunchKind.EAGER, timing=lasting(4e-6, count=1000)),
            LaunchCell(launch=LaunchKind.GRAPH, timing=lasting(1e-6, count=1000)),
        ),
        reductions=(
            CollectiveCell(num_bytes=MIB, world_size=4, timing=lasting(MIB / 100e9)),
            CollectiveCell(num_bytes=64 * MIB, world_size=4, timing=lasting(64 * MIB / 200e9)),
        ),
        cache_bytes=50 * MIB,
    )


def all_tables(sections):
    return [table for section in sections for table in section.tables]
