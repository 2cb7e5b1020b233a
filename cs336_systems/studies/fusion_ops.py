"""The operations of the fusion study: each written out, and as PyTorch's own.

`Watcher` observes operations as they are launched, and so counts what the written-out forms move without a formula.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from cs336_systems.studies.attention_cell import full_attention
from cs336_systems.studies.cell import OperationObserver
from cs336_systems.studies.fusion_records import Op

EPS = 1e-5
_NO_NEW_VALUES = ("aten.empty", "aten.new_empty", "aten._unsafe_view")
"""Allocations, and a view that its schema does not declare as one: these read and write nothing."""

OpFunction = Callable[..., Tensor]


def gelu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The tanh form of GELU (Hendrycks and Gimpel 2016), one operation after the other."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
    """Softmax along the last axis: maximum, difference, exponential, sum, quotient."""
    exponentials = (x - x.amax(dim=-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def rms_norm(x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"]) -> Float[Tensor, "*rows width"]:
    """x over its root mean square, times a learned gain (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS) * weight


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """One operation, written out and fused."""

    written_out: OpFunction
    fused: OpFunction


OPS: Mapping[Op, OpSpec] = MappingProxyType(
    {
        Op.GELU: OpSpec(written_out=gelu, fused=lambda x: F.gelu(x, approximate="tanh")),
        Op.SOFTMAX: OpSpec(written_out=softmax, fused=lambda x: F.softmax(x, dim=-1)),
        Op.RMS_NORM: OpSpec(written_out=rms_norm, fused=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
        Op.ATTENTION: OpSpec(written_out=full_attention, fused=F.scaled_dot_product_attention),
    }
)


@dataclass(slots=True)
class Moved:
    """Operations that computed new values, and the bytes of their operands and results."""

    operations: list[str] = field(default_factory=list)
    num_bytes: int = 0


class Watcher(OperationObserver):
    """Adds to `moved` each operation that computes new values, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = Moved()

    def observe(
        self, func: OpOverload[..., object], args: Sequence[object], kwargs: Mapping[str, object], output: object
    ) -> None:
        """Add up what the operation reads and writes."""
        if not func.is_view and not str(func).startswith(_NO_NEW_VALUES):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
            self.moved.operations.append(str(func))
            self.moved.num_bytes += sum(map(distinct_bytes, tensors))


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor; elements that a broadcast repeats count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()
