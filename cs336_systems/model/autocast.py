"""The type in which autocast computes matmuls."""

import torch
from torch import Tensor


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x cast once to autocast's type. Otherwise each matmul that reads x casts it again and saves its own copy."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
