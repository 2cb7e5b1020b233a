"""Failures: the status that an exception means, and what a record keeps of it."""

import contextlib
import os
import re
import sys
import traceback
from pathlib import Path

import torch

from ..config import Device
from ..record import Failure, Status
from ..text import shortened

MAX_MESSAGE_LENGTH = 500
MAX_TRACEBACK_LENGTH = 20_000

_CUDA_ERROR = r"CUDA error|Triton Error \[CUDA\]|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error"
_OUT_OF_MEMORY = (
    r"DefaultCPUAllocator: (can't|not enough)|CUBLAS_STATUS_ALLOC_FAILED|"
    r"(CUDA error|Triton Error \[CUDA\]): out of memory"
)


def classify(error: BaseException) -> Status:
    """The status of a run that ended with this exception."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or re.search(_OUT_OF_MEMORY, text):
        return Status.OOM
    if isinstance(error, torch.AcceleratorError) or re.search(_CUDA_ERROR, text):
        return Status.CUDA_ERROR
    return Status.CRASHED


def describe(error: BaseException, status: Status, where: str, device: Device) -> Failure:
    """The failure as a record keeps it; `where` is the phase and step that raised `error`. Long
    texts are shortened.
    """
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    first_line = _storable(shortened(first_line, MAX_MESSAGE_LENGTH))
    trace = _without_roots("".join(traceback.format_exception(error, limit=-20)))
    free: int | None = None
    if status is Status.OOM and device is Device.CUDA:
        with contextlib.suppress(RuntimeError):
            free = torch.cuda.mem_get_info()[0]
    return Failure(
        message=first_line
        if status is not Status.CRASHED
        else f"{type(error).__name__}: {first_line}",
        where=where,
        requested_bytes=requested_bytes(str(error)) if status is Status.OOM else None,
        free_bytes=free,
        traceback=_storable(shortened(trace, MAX_TRACEBACK_LENGTH)),
    )


def _without_roots(text: str) -> str:
    """The traceback with file names relative to sys.path: records are published, and absolute
    paths are private.
    """
    text = text.replace(f'File "{Path(__file__).parents[1]}{os.sep}', 'File "cs336/')
    roots = {str(Path(root).absolute()) for root in (*sys.path, ".")} - {"/"}
    for root in sorted(roots, key=len, reverse=True):
        text = text.replace(f'File "{root}{os.sep}', 'File "')
    return text


def _storable(text: str) -> str:
    """The text with escapes for lone surrogates (bytes of file names), which JSON cannot
    represent.
    """
    return text.encode(errors="backslashreplace").decode()


def requested_bytes(message: str) -> int | None:
    """Size of the failed allocation, rounded as in PyTorch's message; None if the message has
    none.
    """
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)", message)
    return round(float(match[1]) * units[match[2]]) if match else None
