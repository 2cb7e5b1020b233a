"""The GPUs of this machine as the driver's management library (NVML) sees them: no torch, no CUDA context."""

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

import pynvml

from cs336_systems.record import GpuState

THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean a clock below the one asked for (nvml.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that CUDA_VISIBLE_DEVICES lets this process see."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    """None where the GPU has no memory of its own."""
    usable_bytes: int | None = None
    """Of these, what the driver leaves to programs; None where it does not say."""
    driver: str


@functools.cache
def _initialised() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def visible_gpus(visible: str | None = None) -> tuple[Gpu, ...]:
    """GPUs that `visible` (default: CUDA_VISIBLE_DEVICES) names, in its order, by PCI bus where it gives numbers.

    As in CUDA, the first entry that names no GPU ends the list, and a GPU named twice empties it. Empty on a machine
    without an NVIDIA driver.
    """
    if not _initialised():
        return ()
    every = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    return tuple(every) if visible is None else select(every, visible)


def select(gpus: list[Gpu], visible: str) -> tuple[Gpu, ...]:
    """The part of `gpus` that a value of CUDA_VISIBLE_DEVICES names: by number or by UUID, as its first entry does."""
    entries = [entry.strip() for entry in visible.split(",")]
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[Gpu] = []
    for entry in entries:
        if by_uuid:
            match = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        else:
            match = [gpu for gpu in gpus if str(gpu.index) == entry]
        if len(match) != 1:
            break
        if match[0] in chosen:
            return ()
        chosen.append(match[0])
    return tuple(chosen)


def usable_gpu_bytes() -> int | None:
    """Memory that programs can have of the smallest visible GPU; None where that is not known."""
    sizes = [gpu.usable_bytes or gpu.memory_bytes for gpu in visible_gpus()]
    known = [size for size in sizes if size is not None]
    return min(known, default=None)


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=_memory_bytes(handle),
        usable_bytes=_usable_bytes(handle),
        driver=_text(pynvml.nvmlSystemGetDriverVersion()),
    )


def _memory_bytes(handle: object) -> int | None:
    with contextlib.suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return None


def _usable_bytes(handle: object) -> int | None:
    with contextlib.suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved)
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class GpuMonitor:
    """Reads the state of one GPU. Each reading takes about a millisecond: between steps at most."""

    def __init__(self, uuid: str) -> None:
        """Raise pynvml.NVMLError where the GPU or the driver does not answer."""
        pynvml.nvmlInit()
        self._handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def processes(self) -> int:
        """Processes that hold a compute context on the GPU, as far as the driver shows them."""
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle))

    def state(self, own_processes: int = 1) -> GpuState:
        """Clocks, power, temperature, throttle reasons and company right now."""
        handle = self._handle
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return GpuState(
            sm_clock_hz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1_000_000,
            max_sm_clock_hz=pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1_000_000,
            memory_clock_hz=pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM) * 1_000_000,
            power_w=pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_c=pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
            other_processes=max(0, self.processes() - own_processes),
        )

    def energy_j(self) -> float | None:
        """Energy since the driver was loaded, or None where the card does not count it (before Volta)."""
        with contextlib.suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        return None
