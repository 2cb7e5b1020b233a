"""Hand-made records, small enough to work out by hand."""

from collections.abc import Sequence
from dataclasses import replace

from cs336.config import SIZES, Device, Phase, RunConfig
from cs336.record import (
    Environment,
    Failure,
    Identity,
    Measurement,
    Memory,
    RunRecord,
    RunWarning,
    Status,
    WarningCode,
)

H200 = "NVIDIA H200"


def make_config(size="small", context_length=128, **fields):
    model = replace(
        SIZES.get(size, SIZES["tiny"]), context_length=context_length, **fields.pop("model", {})
    )
    return RunConfig(size=size, model=model, device=Device.CUDA, **fields)


def make_environment(device_name=H200):
    return Environment(
        identity=Identity(device_name=device_name, driver="580", torch="2.11.0", code="abc"),
        python="3.12",
        platform="Linux",
        host="host",
        cpu="cpu",
        cpu_count=8,
        torch_threads=8,
        float32_matmul_precision="highest",
        package_version="0.1.0",
    )


def make_record(
    config: RunConfig, step_s: Sequence[float], *, device_name=H200, peak_bytes=2**30, codes=()
):
    """A run whose forward is a quarter of the step, its backward half, its optimizer an eighth."""
    shares = {Phase.FORWARD: 1 / 4, Phase.BACKWARD: 1 / 2, Phase.OPTIMIZER: 1 / 8, Phase.STEP: 1}
    phases = (*(phase for phase in config.phases if phase in shares), Phase.STEP)
    return RunRecord(
        config=config,
        status=Status.OK,
        started_at="2026-01-01T00:00:00Z",
        measurements=tuple(
            Measurement(phase, tuple(shares[phase] * time for time in step_s)) for phase in phases
        ),
        memory=None
        if peak_bytes is None
        else Memory(
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=2 * peak_bytes,
            segments_allocated=0,
            alloc_retries=0,
        ),
        environment=None if device_name is None else make_environment(device_name),
        warnings=tuple(RunWarning(code=code, message="") for code in codes),
    )


def make_failure(config: RunConfig, status=Status.OOM, message="no memory", device_name=None):
    return RunRecord(
        config=config,
        status=status,
        started_at="2026-01-01T00:00:00Z",
        failure=Failure(message=message),
        environment=None if device_name is None else make_environment(device_name),
    )


HOSTILE = (
    '=HYPERLINK("x")|`</script><img src=x>`$a$ #let * _ @b [c](d) ~ ^ % & {e} \\input{f} '
    "'g'\n\r\t\0 \x1b[31m"
)
CODES = (WarningCode.UNSTABLE, WarningCode.DRIFT)
