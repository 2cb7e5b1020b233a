"""Kernels of a step: which phase, module and class they belong to, and when the device waited."""

import shutil

HOW_TO_INSTALL = (
    "nsys (NVIDIA Nsight Systems) is not on the PATH: install it (package nsight-systems-cli of "
    "NVIDIA's CUDA repository, or developer.nvidia.com/nsight-systems), or use --profile, which "
    "needs nothing but PyTorch"
)


class NsysError(RuntimeError):
    """nsys is missing or failed; the message says what to do."""


def has_nsys() -> bool:
    """Whether nsys is installed."""
    return shutil.which("nsys") is not None


def find_nsys() -> str:
    """Path of nsys; raise NsysError if it is not installed."""
    if (nsys := shutil.which("nsys")) is None:
        raise NsysError(HOW_TO_INSTALL)
    return nsys
