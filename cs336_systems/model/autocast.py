"""The type in which autocast computes matmuls."""

import torch
from torch import Tensor


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x, cast once to autocast's type if autocast is on. Autocast itself casts and saves a copy for each matmul."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
