"""The precision in which a watched loop computes, from what its matmuls are given."""

import torch
from torch import Tensor, nn

from ..config import Precision

FP32, TF32 = Precision.FP32, Precision.TF32
PRECISIONS = {torch.bfloat16: Precision.BF16, torch.float16: Precision.FP16}


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast computes in here; None without autocast."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def precision_of(dtype: torch.dtype | None, device_type: str) -> Precision | None:
    """The precision of matmuls of this type; None of a type that no setting has, or unknown."""
    if dtype is not torch.float32:
        return None if dtype is None else PRECISIONS.get(dtype)
    is_tf32 = device_type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return TF32 if is_tf32 else FP32


def only_low_dtype(model: nn.Module) -> torch.dtype | None:
    """The type of all parameters, if it is one of 16 bits: then matmuls are in it, also those of a
    compiled model, in which no hook looks. Parameters of fp32 do not tell: autocast may run within.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return dtypes.pop() if len(dtypes) == 1 and dtypes < set(PRECISIONS) else None


def computed_in(value: Tensor, device_type: str) -> torch.dtype:
    """The type of a matmul that is given this value, where the hook stands."""
    return autocast_dtype(device_type) or value.dtype
