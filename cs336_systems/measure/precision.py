"""Precision of a step: the mode of fp32 matmuls, autocast, types of tensors."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ..config import Device, Precision

T = TypeVar("T")

AUTOCAST_DTYPES = MappingProxyType({Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16})
"""The type that autocast casts to; other precisions run without autocast."""


def apply_math_mode(precision: Precision) -> None:
    """Run fp32 matmuls of this process in TF32 for `tf32`, and in true fp32 for every other
    precision.

    This includes the matmuls that autocast leaves in fp32. Call it after importing code that may
    have set modes of its own. PyTorch has an older and a newer set of switches. Once they disagree
    it refuses to read the older ones, which torch.compile reads; so the newer defaults are cleared
    here, and the older switches then set both.
    """
    tf32 = precision is Precision.TF32
    torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.backends.cudnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def math_modes() -> dict[str, Any]:
    """The modes of fp32 matmuls in force, as fields of `Environment`, read without touching a GPU;
    `mixed` or None if PyTorch's settings contradict each other.
    """
    return {
        "float32_matmul_precision": _read(torch.get_float32_matmul_precision) or "mixed",
        "allow_tf32_matmul": _read(lambda: torch.backends.cuda.matmul.allow_tf32),
        "allow_tf32_cudnn": _read(lambda: torch.backends.cudnn.allow_tf32),
    }


def _read(switch: Callable[[], T]) -> T | None:
    """The value of one of PyTorch's precision switches; None if PyTorch cannot tell."""
    try:
        return switch()
    except RuntimeError:  # set through both of PyTorch's interfaces, to different effect
        return None


def autocast(precision: Precision, device: Device) -> AbstractContextManager[None]:
    """Context for one forward pass and its loss.

    Make a new context for every step: on exit, autocast drops its low-precision copies of the
    parameters, which the optimizer changes next.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.value, dtype=dtype)


def check_dtypes(precision: Precision, observed: Iterable[tuple[str, torch.dtype]]) -> None:
    """Raise ValueError for the first of the named types that a run of this precision does not
    compute in.

    The types are observed ones, since a user's model may convert tensors or change PyTorch's
    default type.
    """
    low = AUTOCAST_DTYPES.get(precision, torch.float32)
    for what, dtype in observed:
        if dtype.is_floating_point and dtype not in (torch.float32, low):
            expected = " or ".join(dict.fromkeys(map(_word, (torch.float32, low))))
            message = (
                f"precision {precision} needs {expected}, got {_word(dtype)} in {what}: make the "
                "model in float32, and leave torch.set_default_dtype as it was"
            )
            for other, lower in AUTOCAST_DTYPES.items():
                if lower is dtype:
                    message += f", or ask for precision {other}"
            raise ValueError(message)


def _word(dtype: torch.dtype) -> str:
    """A data type's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
