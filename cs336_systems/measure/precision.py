"""Arithmetic of a step: the mode of fp32 matrix products, autocast, loss scaling."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TypedDict, TypeVar

import torch

from cs336_systems.config import Device, Precision

T = TypeVar("T")

AUTOCAST_DTYPES = MappingProxyType({Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16})
"""What autocast casts to; a precision that is not here runs without autocast."""


class MathModes(TypedDict):
    """What is in force for fp32 products; `mixed` or None where settings of PyTorch contradict each other."""

    float32_matmul_precision: str
    allow_tf32_matmul: bool | None
    allow_tf32_cudnn: bool | None


def apply_math_mode(precision: Precision) -> None:
    """Let fp32 products of this process run in TF32 for `tf32`, and in true fp32 for every other precision.

    The products that autocast leaves in fp32 are true fp32 too. Call it after importing code that may have set modes of
    its own. PyTorch has two sets of switches and refuses to read the older, which torch.compile does, once they
    disagree: the newer defaults are cleared here, and the older switches then set both.
    """
    tf32 = precision is Precision.TF32
    torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.backends.cudnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def math_modes() -> MathModes:
    """Read back the modes in force, without touching a GPU."""
    return MathModes(
        float32_matmul_precision=_read(torch.get_float32_matmul_precision) or "mixed",
        allow_tf32_matmul=_read(lambda: torch.backends.cuda.matmul.allow_tf32),
        allow_tf32_cudnn=_read(lambda: torch.backends.cudnn.allow_tf32),
    )


def _read(switch: Callable[[], T]) -> T | None:
    try:
        return switch()
    except RuntimeError:  # set through both of PyTorch's interfaces, to different effect
        return None


def autocast(precision: Precision, device: Device) -> AbstractContextManager[None]:
    """Context for one forward pass and its loss.

    Make a new one for every step: on leaving, autocast forgets the low-precision copies of the parameters, which the
    optimizer is about to change.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.value, dtype=dtype)


def check_dtypes(precision: Precision, found: Iterable[tuple[str, torch.dtype]]) -> None:
    """Raise ValueError for the first that a run of this precision does not compute in; each has a name in words.

    What is computed is observed, as the code of a user's own model may convert it or change PyTorch's default type.
    """
    low = AUTOCAST_DTYPES.get(precision, torch.float32)
    for what, dtype in found:
        if dtype.is_floating_point and dtype not in (torch.float32, low):
            expected = " or ".join(dict.fromkeys(map(_word, (torch.float32, low))))
            asked = [other for other, lower in AUTOCAST_DTYPES.items() if lower is dtype]
            raise ValueError(
                f"precision {precision} needs {expected}, got {_word(dtype)} in {what}: make the model in float32, and "
                "leave torch.set_default_dtype as it was" + (f", or ask for precision {asked[0]}" if asked else "")
            )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_grad_scaler(precision: Precision, device: Device) -> torch.amp.GradScaler | None:
    """Loss scaling for fp16, whose small gradients would vanish; None for the precisions with the range of fp32."""
    return torch.amp.GradScaler(device.value) if precision is Precision.FP16 else None
