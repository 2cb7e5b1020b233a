"""The type in which autocast computes matmuls."""

import torch
from torch import Tensor


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's type; autocast alone would make, and backward would keep, a copy for each matmul that reads x."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
