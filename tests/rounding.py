"""How far rounding may take a result from the exact one, and a processor that rounds otherwise than
this one.

A test of numbers takes its bound from here: from the type that is rounded to, and from how often
that happens on the way to the result. Two results that are both rounded so often may be twice as
far from each other.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVIATIONS = 4
"""Of so many standard deviations a normal error has less than one chance in ten thousand."""


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def of_chain(dtype: torch.dtype, roundings: int) -> float:
    """Relative error of a value that is rounded so many times in a row, at the worst (Higham
    2002, lemma 3.1).
    """
    return math.expm1(roundings * math.log1p(unit(dtype)))


def of_sum(dtype: torch.dtype, terms: int) -> float:
    """Error of a sum of products in any order, relative to the sum of their magnitudes (Higham
    2002, section 3.1).
    """
    return of_chain(dtype, terms)


def of_walk(dtype: torch.dtype, roundings: int, values: int = 1) -> float:
    """As `of_chain`, where errors are independent; or of the mean of so many values (Higham and
    Mary 2019).

    One rounding has a standard deviation of at most its largest error over the root of 3.
    """
    return DEVIATIONS * unit(dtype) * math.sqrt(roundings / 3 / values)


SUMS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_softmax",
    "_log_softmax",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "sum",
    "mean",
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "exp",
    "gelu",
    "silu",
}
"""Operators whose rounding differs from processor to processor: by the order of sums, and by
approximations.
"""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


class OtherProcessor(TorchDispatchMode):
    """Rounds each result of SUMS up or down at random, and alike for the same operands; exact
    results stay so.

    This is the least that is known of any processor. `OTHER_PROCESSOR=1 python -m pytest
    tests/model` runs tests on it; the number is the seed.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile refuses others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        narrow = min(
            (value.dtype for value in tensors), key=lambda dtype: dtype.itemsize, default=None
        )
        is_real = all(type(value) is Tensor and value.device.type == "cpu" for value in tensors)
        if (
            func.overloadpacket.__name__ not in SUMS
            or func._schema.is_mutable
            or narrow not in WIDER
            or not is_real
        ):
            return results

        def widened(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(WIDER[narrow]) if value.dtype is narrow else value
            return WIDER[narrow] if value is narrow else value

        wide = func(*tree_map(widened, args), **tree_map(widened, kwargs or {}))
        return tree_map(self._rounded, results, wide)

    def _rounded(self, result: Any, wide: Any) -> Any:
        """One of the two neighbours of the wide result, of the narrow result's type."""
        if not torch.is_tensor(result) or WIDER.get(result.dtype) is not wide.dtype:
            return result
        nearest = wide.to(result.dtype)
        direction = torch.where(nearest.to(wide.dtype) < wide, math.inf, -math.inf).to(result.dtype)
        other = torch.where(
            nearest.to(wide.dtype) == wide, nearest, torch.nextafter(nearest, direction)
        )
        place = torch.arange(wide.numel()).view(wide.shape)
        drawn = (
            nearest.float().view(torch.int32).long() + 40_503 * place + self._seed
        ) * 2_654_435_761 >> 20
        return torch.where((drawn % 2 == 0) | ~nearest.isfinite(), nearest, other)


def enter_other_processor() -> None:
    """Compute as another processor until this process ends, if OTHER_PROCESSOR has a seed."""
    if seed := os.environ.get("OTHER_PROCESSOR"):
        OtherProcessor(int(seed)).__enter__()
