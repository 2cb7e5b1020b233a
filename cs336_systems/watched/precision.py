"""The precision in which a watched loop computes."""

import torch
from torch import nn

from ..config import Device, Precision


def precision_of(model: nn.Module, device: Device) -> Precision | None:
    """The precision of the model's matmuls, from autocast, else from its parameters, else from
    the mode of fp32.
    """
    if torch.is_autocast_enabled(device.value):
        dtype = torch.get_autocast_dtype(device.value)
    else:
        parameter = next(model.parameters(), None)
        if parameter is None:
            return None
        dtype = parameter.dtype
    if dtype in (torch.bfloat16, torch.float16):
        return Precision.BF16 if dtype is torch.bfloat16 else Precision.FP16
    is_tf32 = device is Device.CUDA and torch.get_float32_matmul_precision() != "highest"
    return Precision.TF32 if is_tf32 else Precision.FP32
