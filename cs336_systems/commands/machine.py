"""The device that a command runs on, and what is said of it before a measurement."""

from typing import Annotated, Literal

import tyro

from ..config import Device
from ..measure.nvml import Gpu, disturbances, visible_gpus, why_none_visible
from ..text import plain_word, print_aside

DeviceChoice = Literal["auto", "cpu", "cuda"]
DeviceFlag = Annotated[
    DeviceChoice, tyro.conf.arg(help="Where to run; auto is the GPU if there is one.")
]


def first_gpu() -> Gpu | None:
    """The first GPU that this process sees, or None."""
    return next(iter(visible_gpus()), None)


def resolve_device(device: DeviceChoice) -> Device:
    """The device to use; raise ValueError for cuda where this process can see no GPU."""
    gpu = first_gpu()
    if device == "cuda" and gpu is None:
        raise ValueError(
            "--device cuda needs an NVIDIA GPU that this process can see (CUDA_VISIBLE_DEVICES), "
            "found none; try --device cpu"
        )
    return Device.CPU if device == "cpu" or gpu is None else Device.CUDA


def explain_cpu_fallback(device: DeviceChoice) -> None:
    """Print on standard error why `auto` means the CPU although the machine has GPUs, if none of
    them is visible.
    """
    why = why_none_visible() if device == "auto" else None
    if why is not None:
        print_aside(f"note: --device auto takes the CPU: {why}")


def look_at_machine(device: Device) -> None:
    """Say on standard error, before a measurement, what may put its times in doubt."""
    gpus = visible_gpus() if device is Device.CUDA else ()
    if reasons := disturbances(gpus):
        print_aside(f"in doubt: {'; '.join(reasons)}")


def device_word(device: Device) -> str:
    """The device's short name as part of a directory's name; `gpu` if the device is not in this
    machine.
    """
    if device is Device.CPU:
        return "cpu"
    gpu = first_gpu()
    return "gpu" if gpu is None else plain_word(gpu.name)
