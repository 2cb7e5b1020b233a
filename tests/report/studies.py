"""Hand-made studies of attention and fusion, small enough to work out by hand."""

from cs336.config import Device, Phase, Precision
from cs336.record import Failure, Measurement, Status
from cs336.studies.operators import (
    AttentionCell,
    AttentionGrid,
    AttentionStudy,
    CellMemory,
    CellResult,
    FusionGrid,
    FusionRow,
    FusionStudy,
    Implementation,
    Op,
    Version,
)
from tests.report.making import H200, make_environment

MIB = 2**20


def make_grid(**fields):
    if Implementation.OWN in fields.get("implementations", ()):
        fields = {"own": "mine:flash", **fields}
    return AttentionGrid(
        **{
            "device": Device.CUDA,
            "batch_size": 2,
            "d_heads": (16, 64),
            "context_lengths": (512, 1024, 2048),
            "implementations": (Implementation.NAIVE, Implementation.FLASH),
            "passes": 3,
            **fields,
        }
    )


def make_cell(
    implementation=Implementation.NAIVE, d_head=64, context_length=1024, precision=Precision.FP32
):
    return AttentionCell(
        implementation=Implementation(implementation),
        precision=precision,
        d_head=d_head,
        context_length=context_length,
    )


def make_result(
    cell,
    forward_s=(0.00199, 0.002, 0.00201),
    backward_s=(0.00498, 0.005, 0.00502),
    saved_mib=8.0,
    peak_mib=64,
):
    memory = (
        None
        if saved_mib is None
        else CellMemory(
            before_forward_bytes=4 * MIB,
            before_backward_bytes=round((4 + saved_mib) * MIB),
            peak_bytes=peak_mib * MIB,
        )
    )
    return CellResult(
        cell=cell,
        status=Status.OK,
        measurements=(
            Measurement(Phase.FORWARD, forward_s),
            Measurement(Phase.BACKWARD, backward_s),
        ),
        first_pass_s=1.5,
        memory=memory,
    )


def make_failed(cell, status=Status.OOM, message="CUDA out of memory", requested_bytes=None):
    return CellResult(
        cell=cell, status=status, failure=Failure(message=message, requested_bytes=requested_bytes)
    )


def make_study(*results, device_name=H200, **fields):
    return AttentionStudy(
        grid=make_grid(**fields),
        results=results,
        environment=None if device_name is None else make_environment(device_name),
    )


def make_row(op=Op.GELU, version=Version.EAGER, phase=Phase.FORWARD, times_s=(0.002,), **fields):
    return FusionRow(
        **{
            "op": op,
            "precision": Precision.FP32,
            "version": version,
            "phase": phase,
            "status": Status.OK,
            "measurement": None if times_s is None else Measurement(phase, times_s),
            "kernels": ("a", "b"),
            "must_move_bytes": 2 * MIB,
            "moved_bytes": 18 * MIB,
            "max_error": 1.5e-7,
            **fields,
        }
    )


def make_lost_row(**fields):
    return make_row(
        times_s=None,
        status=Status.OOM,
        failure=Failure(message="no memory"),
        kernels=(),
        moved_bytes=None,
        max_error=None,
        **fields,
    )


def make_fusion(*rows, device_name=H200):
    grid = FusionGrid(
        device=Device.CUDA,
        ops=(Op.GELU,),
        batch_size=2,
        context_length=8,
        width=16,
        num_heads=2,
        d_head=4,
        passes=3,
    )
    return FusionStudy(grid=grid, rows=rows, environment=make_environment(device_name))
