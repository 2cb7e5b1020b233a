"""A driver's management library that tells what a test wants it to, in place of the machine's
own.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pynvml
import pytest

WHOLE_BYTES = 85_520_809_984


@dataclass(frozen=True)
class Slice:
    """A part of a GPU (MIG), and its own handle."""

    uuid: str
    name: str
    memory_bytes: int


def unsupported(*_: object, **__: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def fake_driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One with two GPUs; a test may change its answers, and put slices, or gaps among them, into
    `slices`.
    """
    slices: dict[str, list[Slice | None]] = {}

    def memory(handle: str | Slice, version: int = 1) -> SimpleNamespace:
        is_v2 = version == pynvml.nvmlMemory_v2
        if isinstance(handle, Slice):
            return SimpleNamespace(total=handle.memory_bytes, reserved=2**20 if is_v2 else None)
        return SimpleNamespace(total=WHOLE_BYTES, reserved=680_000_000 if is_v2 else None)

    def slice_of(handle: str, number: int) -> Slice:
        if (found := slices[handle][number]) is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found

    answers = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUUID=lambda handle: handle.uuid if isinstance(handle, Slice) else handle,
        nvmlDeviceGetName=lambda handle: (
            handle.name if isinstance(handle, Slice) else "NVIDIA H100 80GB HBM3"
        ),
        nvmlDeviceGetMigMode=lambda handle: [1, 1] if handle in slices else unsupported(),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: len(slices[handle]),
        nvmlDeviceGetMigDeviceHandleByIndex=slice_of,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetClockInfo=lambda handle, kind: {
            pynvml.NVML_CLOCK_SM: 1755,
            pynvml.NVML_CLOCK_MEM: 2619,
        }[kind],
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1980}[kind],
        nvmlDeviceGetPowerUsage=lambda handle: 698_250,
        nvmlDeviceGetTemperature=lambda handle, kind: 61,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0,
        nvmlDeviceGetFieldValues=unsupported,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: ["this one"],
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 1_234_567,
    )
    for name in vars(answers):
        monkeypatch.setattr(
            pynvml,
            name,
            lambda *arguments, name=name, **options: getattr(answers, name)(*arguments, **options),
        )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answers.slices = slices
    return answers
