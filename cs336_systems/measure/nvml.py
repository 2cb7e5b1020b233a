"""The GPUs of this machine, from the driver's management library (NVML), without torch and
without a CUDA context.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from ..record import GpuState

THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean a reduced clock (nvml.h)."""
THROTTLE_COUNTERS = {
    pynvml.NVML_FI_DEV_PERF_POLICY_POWER: "power cap",
    pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL: "thermal",
    pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT: "board limit",
    pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY: "reliability",
}
"""Counters of the nanoseconds in which the clock was reduced, since the driver was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one slice of a GPU (MIG)."""

    index: int
    """The driver's number; a slice has the number of its GPU."""
    uuid: str
    name: str
    memory_bytes: int | None
    """None if the GPU has no memory of its own."""
    slice_of: str | None = None
    """UUID of the GPU that this is a slice of; None for a whole GPU."""
    usable_bytes: int | None = None
    """The part of `memory_bytes` that the driver leaves to programs; None if not known."""
    driver: str


@functools.cache
def _initialised() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def visible_gpus() -> tuple[Gpu, ...]:
    """GPUs that CUDA_VISIBLE_DEVICES names, in its order, or all without it; numbers count by PCI
    bus.

    As in CUDA, the first entry that names no GPU ends the list, and naming a GPU twice empties it.
    A GPU in MIG mode appears as its slices only, and a process that sees a slice sees nothing else.
    Empty without an NVIDIA driver.
    """
    every = _every()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return _as_cuda_counts(every) if visible is None else select(every, visible)


def _every() -> list[Gpu]:
    """All GPUs that the driver lists; for a GPU in MIG mode, its slices."""
    indices = range(pynvml.nvmlDeviceGetCount()) if _initialised() else ()
    return [gpu for index in indices for gpu in _devices(index)]


def select(gpus: Sequence[Gpu], visible: str) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES names. All entries are numbers or UUIDs, as
    the first one is.
    """
    entries = [entry.strip() for entry in visible.split(",")]
    kind = next((prefix for prefix in ("GPU-", "MIG-") if entries[0].startswith(prefix)), "")
    chosen: list[Gpu] = []
    for entry in entries:
        match = _named(gpus, entry, kind)
        if match is None:
            break
        if match in chosen:
            return ()
        chosen.append(match)
    return _as_cuda_counts(chosen)


def _named(gpus: Sequence[Gpu], entry: str, kind: str) -> Gpu | None:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES names; None if it names none, or several.

    The entry is a number if `kind` is empty, else the beginning of a UUID of this kind. An entry
    that names a GPU in MIG mode as a whole stands for its first slice.
    """
    if kind == "MIG-":
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
    else:
        # of the slices of one GPU, which have its index, the first is kept
        whole_gpus = {str(gpu.index): gpu for gpu in reversed(gpus)}
        if not kind:
            return whole_gpus.get(entry)
        by_uuid = {gpu.slice_of or gpu.uuid: gpu for gpu in whole_gpus.values()}
    meant = [gpu for uuid, gpu in by_uuid.items() if uuid.startswith(entry)]
    return meant[0] if len(meant) == 1 and entry.startswith(kind) else None


def _as_cuda_counts(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """All of `gpus`, or only the first slice if there is one among them, as documented for CUDA."""
    slices = [gpu for gpu in gpus if gpu.slice_of]
    return tuple(slices[:1] or gpus)


def why_none_visible() -> str | None:
    """Why no GPU is visible on a machine that has some, in words.

    None if a GPU is visible, if the machine has none, and if CUDA_VISIBLE_DEVICES hides them on
    purpose (empty or -1).
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_gpus() or not _initialised():
        return None
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    every = _every()
    if visible is not None and every:
        known = []
        for gpu in every:
            name = gpu.uuid if gpu.slice_of else gpu.index
            known.append(f"{name} ({gpu.name})")
        here = ", ".join(known)
        return f"CUDA_VISIBLE_DEVICES={visible} names none of the GPUs here: {here}"
    if pynvml.nvmlDeviceGetCount():
        return "all GPUs are in MIG mode and the driver lists no slice (nvidia-smi -L lists them)"
    return None


def alike(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs with the same name as the first: times of different GPUs do not belong in one
    table.
    """
    return tuple(gpu for gpu in gpus if gpu.name == gpus[0].name)


def usable_gpu_bytes() -> int | None:
    """Memory for programs on the smallest visible GPU that has the first one's name; None if not
    known.
    """
    sizes = [gpu.usable_bytes or gpu.memory_bytes for gpu in alike(visible_gpus())]
    known = [size for size in sizes if size is not None]
    return min(known, default=None)


def _devices(index: int) -> list[Gpu]:
    """The GPU with that number, or its slices (possibly none) in MIG mode."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    gpu = _gpu(index, handle)
    is_sliced = False
    with contextlib.suppress(pynvml.NVMLError):  # raised by GPUs without MIG
        is_sliced = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    if not is_sliced:
        return [gpu]
    slices = []
    for slice_handle in _slices(handle):
        part = _gpu(index, slice_handle)
        name = part.name
        # the driver may give a slice the name of the whole GPU, whose peaks do not apply to it
        if " MIG " not in name:
            size = "" if part.memory_bytes is None else f" {part.memory_bytes / 2**30:.0f}gb"
            name = f"{gpu.name} MIG{size}"
        slices.append(replace(part, name=name, slice_of=gpu.uuid))
    return slices


def _gpu(index: int, handle: object) -> Gpu:
    total = usable = None
    # raised by GPUs that share the host's memory, and by old drivers
    with contextlib.suppress(pynvml.NVMLError):
        total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        usable = int(memory.total - memory.reserved)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=total,
        usable_bytes=usable,
        driver=pynvml.nvmlSystemGetDriverVersion(),
    )


def _slices(handle: object) -> Iterator[object]:
    with contextlib.suppress(pynvml.NVMLError):
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(pynvml.NVMLError):  # not every possible slice exists
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


class GpuMonitor:
    """Reads the state of one GPU. A reading takes about a millisecond, so never read inside a
    step.
    """

    def __init__(self, uuid: str) -> None:
        """Raise pynvml.NVMLError if the GPU or the driver does not answer."""
        pynvml.nvmlInit()
        self._handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def processes(self) -> int:
        """Number of processes with a compute context on the GPU, as far as the driver shows
        them.
        """
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle))

    def state(self) -> GpuState:
        """Clocks, power, temperature, throttle reasons and processes beside this one right now."""
        handle = self._handle
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        clock_mhz = functools.partial(pynvml.nvmlDeviceGetClockInfo, handle)
        max_sm_mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        return GpuState(
            sm_clock_hz=clock_mhz(pynvml.NVML_CLOCK_SM) * 1_000_000,
            max_sm_clock_hz=max_sm_mhz * 1_000_000,
            memory_clock_hz=clock_mhz(pynvml.NVML_CLOCK_MEM) * 1_000_000,
            power_w=pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_c=pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
            other_processes=max(0, self.processes() - 1),
        )

    def throttled_s(self) -> dict[str, float]:
        """For how long each reason has reduced the clock since the driver was loaded, in seconds;
        without those that the card does not count.
        """
        with contextlib.suppress(pynvml.NVMLError):
            values = pynvml.nvmlDeviceGetFieldValues(self._handle, list(THROTTLE_COUNTERS))
            return {
                THROTTLE_COUNTERS[value.fieldId]: value.value.ullVal / 1e9
                for value in values
                if value.nvmlReturn == pynvml.NVML_SUCCESS
            }
        return {}

    def energy_j(self) -> float | None:
        """Energy since the driver was loaded; None if the card does not count it (before Volta)."""
        with contextlib.suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        return None


BUSY_CORES = 1.0
"""Load of the last minute from which other programs take time from a step that uses all cores."""
CORES_OF_A_GPU = 2
"""Cores that a step keeps busy for each GPU: one thread launches forward, another one backward."""
LEAST_FREE = 0.1
"""Share of the memory that must be free, or the machine may begin to swap."""


def disturbances(gpus: Sequence[Gpu]) -> list[str]:
    """What of this machine and of the GPUs to be used may put times in doubt, in words."""
    import psutil  # slow to import, and only needed before a measurement

    reasons = []
    load = psutil.getloadavg()[0]
    memory = psutil.virtual_memory()
    cores = os.cpu_count() or 1
    needed = CORES_OF_A_GPU * len(gpus) if gpus else cores
    if load >= BUSY_CORES and load > cores - needed:
        reasons.append(f"the load is {load:.1f} on {cores} cores: close other programs")
    if memory.available < LEAST_FREE * memory.total:
        reasons.append(
            f"only {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory are "
            "free"
        )
    battery = psutil.sensors_battery()
    if battery is not None and battery.power_plugged is False:
        reasons.append("the machine runs on its battery, which lowers its clocks: plug it in")
    for gpu in gpus:
        with contextlib.suppress(pynvml.NVMLError):
            if count := GpuMonitor(gpu.uuid).processes():
                reasons.append(
                    f"{count} other process(es) use GPU {gpu.index} ({gpu.name}): end them"
                )
    return reasons
