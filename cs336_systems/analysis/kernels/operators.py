"""Time of kernels by the operator that launched them, with its shapes; the FLOPs and the least
bytes of operators.

What no operator of the file has launched is a row of its own, so that the rows add up to all
kernels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from ..columns import Ints
from .attribution import Attribution, totals
from .classes import MAX_NAME
from .phases import PHASES
from .step_profile import OperatorTimes
from .trace import Trace

Dims = Sequence[Any]
ClosedForm = Callable[[Dims, Dims], tuple[int, int]]
"""FLOPs and elements of the results, from the dimensions and the values of the arguments."""
ITEM_BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "int": 4,
    "long": 8,
    "long int": 8,
    "unsigned long": 8,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
"""Size of an element by the profiler's names of types."""
MAX_COUNT = 2**63 - 1


def operator_times(attribution: Attribution, kernels: pd.DataFrame) -> tuple[OperatorTimes, ...]:
    """Kernels by operator, shape and phase, the longest first; empty without any operator."""
    trace = attribution.trace
    operator = _operators_of(trace, kernels)
    if not (operator >= 0).any():
        return ()
    operators = trace.operators
    by_call = pd.DataFrame(
        {
            "name": np.append(operators.name, -1)[operator],
            "shape": np.append(operators.shape, -1)[operator],
            "phase": kernels["phase"].to_numpy(),
            "duration_ns": kernels["duration_ns"].to_numpy(),
            "operator": operator,
        }
    )
    calls = by_call.groupby(["name", "shape", "phase"])["operator"].nunique()

    def times(name: int, shape: int, phase: int, **sums: Any) -> OperatorTimes:  # noqa: ANN401
        known = _operator(trace, name, shape, int(calls[name, shape, phase]))
        return OperatorTimes(**known, phase=PHASES[phase], **sums)

    return tuple(totals(by_call, times, name=int, shape=int, phase=int))


def _operators_of(trace: Trace, kernels: pd.DataFrame) -> Ints:
    """The row of the innermost operator around each launch; -1 for none, and for kernels of graphs,
    whose operators ran when the graph was captured.
    """
    if trace.is_of_host and len(trace.operators):
        return kernels.index.to_numpy(dtype=np.int64)  # each is an operator itself
    operators = trace.operators
    thread, time = kernels["thread"].to_numpy(), kernels["launch_ns"].to_numpy()
    innermost = operators.by_thread().at(thread, time)
    is_known = kernels["is_launched"] & ~kernels["is_in_graph"]
    return np.where(is_known, innermost, -1)


def _operator(trace: Trace, name: int, shape: int, calls: int) -> dict[str, Any]:
    """What is known of so many calls of an operator; nothing where `name` is -1."""
    if name < 0:
        nothing = {"name": "", "shape": "", "type": "", "calls": 0}
        return nothing | {"flops": None, "bytes": None}
    name_text, shape_text = trace.strings[name], trace.strings[shape]
    work = work_of(name_text, shape_text, is_of_host=trace.is_of_host)
    tensors = _parsed(shape_text).tensors
    words = ", ".join("x".join(map(str, sides)) for sides, _ in tensors)
    return {
        "name": name_text[:MAX_NAME],
        "shape": words[:MAX_NAME],
        "type": str(tensors[0][1]) if tensors else "",
        "calls": calls,
        "flops": _count(work.get("flops"), calls),
        "bytes": _count(work.get("bytes"), calls),
    }


def _count(of_call: int | None, calls: int) -> int | None:
    """The sum over all calls; None if it is not known, or more than any computer does."""
    if of_call is None or of_call * calls > MAX_COUNT:
        return None
    return of_call * calls


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What the profiler says of the arguments of a call."""

    dims: Dims = ()
    types: Dims = ()
    values: Dims = ()

    @property
    def tensors(self) -> list[tuple[list[int], str]]:
        """Sides and type of each tensor."""
        pairs = zip(self.dims, self.types, strict=False)
        return [(sides, kind) for sides, kind in pairs if sides and _are_sides(sides)]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors; raises LookupError or ValueError for one of unknown size."""
        if len(self.tensors) < sum(map(bool, self.dims)):
            raise ValueError(f"needed the sides of tensors, got {self.dims}")
        return sum(math.prod(sides) * ITEM_BYTES[kind] for sides, kind in self.tensors)


def _are_sides(sides: object) -> bool:
    """Whether these are the dimensions of one tensor, of which a list of tensors has several."""
    if not isinstance(sides, list):
        return False
    return all(isinstance(side, int) and side >= 0 for side in sides)


@lru_cache(maxsize=4096)
def _parsed(shape: str) -> _Arguments:
    """The arguments, of which nothing is known if the text is no shape."""
    try:
        lists = msgspec.json.decode(shape, type=tuple[list[Any], list[Any], list[Any]])
    except (msgspec.DecodeError, RecursionError):
        return _Arguments()
    return _Arguments(*lists)


def work_of(name: str, shape: str, *, is_of_host: bool = False) -> Mapping[str, int]:
    """The FLOPs and the least bytes of one call, as `flops` and `bytes`, as far as its dimensions
    say them.

    Of a host, whose operators call others, those that only call another one do no work.
    """
    operator = name.removeprefix("aten::")
    if operator == name or (is_of_host and operator == "linear"):
        return {}
    try:
        made = _work(operator, _parsed(shape))
    except (LookupError, TypeError, ValueError):
        return {}  # other arguments than the operator has
    return {key: count for key, count in made.items() if count > 0}


def _work(operator: str, given: _Arguments) -> dict[str, int]:
    """FLOPs and least bytes; raises LookupError, TypeError or ValueError for unknown arguments."""
    if operator in _FLOPS:
        flops, outputs = _FLOPS[operator](given.dims, given.values)
        kind = next(kind for kind in given.types if kind in ITEM_BYTES)
        return {"flops": flops, "bytes": given.num_bytes + outputs * ITEM_BYTES[kind]}
    if operator in _WRITTEN:
        largest, kind = max((math.prod(sides), kind) for sides, kind in given.tensors)
        return {"bytes": given.num_bytes + _WRITTEN[operator] * largest * ITEM_BYTES[kind]}
    return {}


_WRITTEN = {
    **dict.fromkeys(
        (
            *("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "relu", "relu_", "neg"),
            *("gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "tanh", "exp", "sqrt"),
            *("pow", "rsqrt", "clone", "threshold_backward", "masked_fill_", "addcmul_"),
            *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
            *("native_layer_norm", "native_layer_norm_backward", "addcdiv_", "lerp_"),
        ),
        1,
    ),
    **dict.fromkeys(("copy_", "fill_", "zero_", "sum", "mean", "max", "argmax", "amax"), 0),
}
"""How many tensors of the size of the largest argument each operator writes beside its arguments,
all of which it reads or writes once. Those that read only a part, as lookups do, are not here.
"""


def _matmul(a: Sequence[int], b: Sequence[int]) -> tuple[int, int]:
    """FLOPs and elements of the result of a matmul, or of a batch of them."""
    if len(a) < 2 or len(b) != len(a) or a[-1] != b[-2]:
        raise ValueError(f"needed factors of a matmul, got {a} and {b}")
    outputs = math.prod(a[:-1]) * b[-1]
    return 2 * outputs * a[-1], outputs


def _linear(dims: Dims, _: Dims) -> tuple[int, int]:
    x, weight = dims[:2]
    return _matmul([math.prod(x[:-1]), x[-1]], weight[::-1])


_FORWARD, _BACKWARD = 2, 5
"""Matmuls of fused attention; backward computes the scores again."""


def _attention(name: str, causal: int) -> ClosedForm:
    """The closed form of a kernel of attention; `causal` is the place of the argument that says
    whether a mask is.
    """
    is_backward = "backward" in name  # whose first argument is the gradient
    # the functions that PyTorch took over have positions before heads
    is_by_head = not name.startswith(("_flash", "_efficient"))
    passes = _BACKWARD if is_backward else _FORWARD

    def flops(dims: Dims, values: Dims) -> tuple[int, int]:
        q, k = dims[is_backward : is_backward + 2]
        if len(q) != 4 or len(k) != 4:
            raise ValueError(f"needed four sides, got {q} and {k}")
        batch, heads, rows, d_head = q if is_by_head else (q[0], q[2], q[1], q[3])
        columns = k[2] if is_by_head else k[1]
        if values[causal] not in ("True", "False", "0", "1", "2"):
            raise ValueError(f"needed whether a mask is causal, got {values[causal]}")
        outputs = math.prod(q)
        if is_backward:
            outputs += 2 * math.prod(k)
        pairs = rows * columns
        if values[causal] in ("True", "1", "2"):
            pairs = _causal_pairs(rows, columns)
        return 2 * passes * batch * heads * pairs * d_head, outputs

    return flops


def _causal_pairs(queries: int, keys: int) -> int:
    """The fewest pairs that a causal mask leaves, whichever corners it aligns."""
    square = min(queries, keys)
    return square * (square + 1) // 2


def _convolution(padding: int) -> ClosedForm:
    """The closed form of a convolution, whose padding is the argument of this number, with stride
    and dilation after it.
    """

    def flops(dims: Dims, values: Dims) -> tuple[int, int]:
        x, weight = dims[:2]
        pad, stride, dilation = (_list(values[padding + place]) for place in range(3))
        outputs = x[0] * weight[0]
        for axis, side in enumerate(x[2:]):
            reach = dilation[axis] * (weight[2 + axis] - 1) + 1
            outputs *= (side + 2 * pad[axis] - reach) // stride[axis] + 1
        return 2 * outputs * math.prod(weight[1:]), outputs

    return flops


def _convolution_backward(dims: Dims, values: Dims) -> tuple[int, int]:
    """Each of the gradients of input and weight takes as many FLOPs as forward."""
    gradient, x, weight = dims[:3]
    wanted = _list(values[10].lower())[:2]
    outputs = wanted[0] * math.prod(x) + wanted[1] * math.prod(weight)
    return 2 * math.prod(gradient) * math.prod(weight[1:]) * sum(wanted), outputs


def _list(text: str) -> list[int]:
    """A list of numbers, which the profiler writes as text."""
    return msgspec.json.decode(text, type=list[int | bool])


_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_cudnn_attention_forward": 10,
    "_flash_attention_forward": 8,
    "_efficient_attention_forward": 9,
    "_flash_attention_backward": 11,
    "_efficient_attention_backward": 14,
}
"""Place of the argument that says whether a mask is causal, by operator."""
_FLOPS: dict[str, ClosedForm] = {
    "mm": lambda dims, _: _matmul(dims[0], dims[1]),
    "bmm": lambda dims, _: _matmul(dims[0], dims[1]),
    "addmm": lambda dims, _: _matmul(dims[1], dims[2]),
    "_addmm_activation": lambda dims, _: _matmul(dims[1], dims[2]),
    "addmm_": lambda dims, _: _matmul(dims[1], dims[2]),
    "baddbmm": lambda dims, _: _matmul(dims[1], dims[2]),
    "linear": _linear,
    "cudnn_convolution": _convolution(2),
    "mkldnn_convolution": _convolution(3),
    "convolution_backward": _convolution_backward,
    **{name: _attention(name, causal) for name, causal in _CAUSAL.items()},
}
"""FLOPs and elements of the results by operator, from the dimensions and values of its arguments.
A multiply-add counts as 2 FLOPs, and what a causal mask leaves out does not count.
"""
