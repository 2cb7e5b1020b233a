"""The meaning of a command's --device flag."""

import re
from typing import Annotated, Literal

import tyro

from cs336_systems.commands.outcome import UsageError
from cs336_systems.config import Device
from cs336_systems.measure.nvml import visible_gpus, wants_slice, why_none_visible
from cs336_systems.text import print_aside

DeviceChoice = Literal["auto", "cpu", "cuda"]
DeviceFlag = Annotated[DeviceChoice, tyro.conf.arg(help="Where to run; auto is the GPU if there is one.")]


def resolve_device(device: DeviceChoice) -> Device:
    """The device to use; raise ValueError for cuda where this process can see no GPU."""
    found = bool(visible_gpus())
    if device == "cuda" and not found:
        raise ValueError(
            "--device cuda needs an NVIDIA GPU that this process can see (CUDA_VISIBLE_DEVICES), found none; "
            "try --device cpu"
        )
    return Device.CUDA if device == "cuda" or (device == "auto" and found) else Device.CPU


def explain_cpu_fallback(device: DeviceChoice) -> None:
    """Print on standard error why `auto` means the CPU although the machine has GPUs, if none of them is visible.

    Raises UsageError if that GPU would be a MIG slice: CUDA may have a slice that the driver does not list.
    """
    why = why_none_visible() if device == "auto" else None
    if why is not None and wants_slice():
        raise UsageError(f"--device auto finds no GPU: {why}. Correct that, or measure the CPU with --device cpu")
    if why is not None:
        print_aside(f"note: --device auto takes the CPU: {why}")


def device_word(device: Device) -> str:
    """The device as part of a directory's name; `gpu` for one that is not in this machine."""
    gpus = visible_gpus()
    return "cpu" if device is Device.CPU else plain_word(gpus[0].name) if gpus else "gpu"


def plain_word(text: str) -> str:
    """The text with hyphens in place of characters that are awkward in a directory name."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text).strip("-")
