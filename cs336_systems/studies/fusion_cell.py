"""Measures one cell of the study of fusion: times of both passes, kernels, bytes and errors."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch
import torch._dynamo
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._ops import OpOverload
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from ..config import Device, Precision
from ..measure.clock import EventClock, HostClock
from ..measure.precision import apply_math_mode
from ..record import Measurement
from .cell import OperationObserver, make_generator
from .operators import FusionGrid, FusionRow, Op, Version, input_shapes
from .passes import OpFunction, Passes, compiled, distance, full_attention, make_inputs

T = TypeVar("T")
EPS = 1e-5
HEAD_START_CYCLES = 4_000_000
"""GPU cycles, about 2 ms, that the device waits so that the host can launch one pass forward and
backward.
"""
CACHES_FULL = 4
"""Sets of inputs take turns; together they are this many times as large as the L2 cache, so that
no set stays in it.
"""
MAX_SETS = 64
_NO_NEW_VALUES = ("aten.empty", "aten.new_empty", "aten._unsafe_view")
"""Allocations, and a view that its schema does not declare as one: these read and write nothing."""


def gelu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The tanh form of GELU (Hendrycks and Gimpel 2016), one operation after the other."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
    """Softmax along the last axis: maximum, difference, exponential, sum, quotient."""
    exponentials = (x - x.amax(dim=-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def rms_norm(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"]
) -> Float[Tensor, "*rows width"]:
    """x over its root mean square, times a learned gain (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS) * weight


OPS: Mapping[Op, tuple[OpFunction, OpFunction]] = MappingProxyType(
    {
        Op.GELU: (gelu, lambda x: F.gelu(x, approximate="tanh")),
        Op.SOFTMAX: (softmax, lambda x: F.softmax(x, dim=-1)),
        Op.RMS_NORM: (rms_norm, lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
        Op.ATTENTION: (full_attention, F.scaled_dot_product_attention),
    }
)
"""Each operation, written out and fused."""


def measure_fusion(
    grid: FusionGrid, rows: Sequence[FusionRow], fused: OpFunction | None = None
) -> list[FusionRow]:
    """The rows of forward and backward of a version, with everything that is measured. Raises
    whatever running raises.

    `fused` replaces the fused operation that the rows name.
    """
    op, version, precision = rows[0].op, rows[0].version, rows[0].precision
    apply_math_mode(precision)
    written_out, kernel = OPS[op]
    functions = {Version.EAGER: written_out, Version.FUSED: fused or kernel}
    passes = _taking_turns(grid, op, precision, functions.get(version) or compiled(written_out))
    for turn in range(grid.warmup_passes):
        passes.backward(passes.forward(turn), turn)
    on_gpu = grid.device is Device.CUDA
    clock, head_start = (EventClock(), HEAD_START_CYCLES) if on_gpu else (HostClock(), 0)
    turns = [passes.timed(clock, turn, head_start) for turn in range(grid.passes)]
    # operations of compiled code cannot be observed
    moved = [] if version is Version.COMPILED else _observed(passes, TrafficCounter)
    profilers = []
    if on_gpu:
        profilers = _observed(passes, partial(profile, activities=[ProfilerActivity.CUDA]))
    max_errors = _max_errors(passes, written_out)
    measured = []
    for index, row in enumerate(rows):
        times_s = tuple(turn[row.phase] for turn in turns)
        measurement = Measurement(row.phase, times_s)
        row = replace(row, measurement=measurement, max_error=max_errors[index])
        if moved:
            operations = tuple(moved[index].operations)
            row = replace(row, kernels=operations, moved_bytes=moved[index].num_bytes)
        if profilers:
            row = replace(row, kernels=_kernel_names(profilers[index]))
        measured.append(row)
    return measured


def _taking_turns(grid: FusionGrid, op: Op, precision: Precision, function: OpFunction) -> Passes:
    """Passes on as many sets of inputs as fill the caches; on a CPU on one set, which may stay
    in them.
    """
    make_set = partial(make_inputs, input_shapes(grid, op), precision, make_generator(grid))
    first = make_set()
    num_sets = 1
    if grid.device is Device.CUDA:
        set_bytes = sum(tensor.nbytes for tensor in (*first.forward, first.upstream))
        cache_bytes = torch.cuda.get_device_properties().L2_cache_size
        num_sets = min(MAX_SETS, math.ceil(CACHES_FULL * cache_bytes / set_bytes))
    return Passes(function, first, *(make_set() for _ in range(num_sets - 1)))


def _observed(passes: Passes, observer: Callable[[], AbstractContextManager[T]]) -> list[T]:
    """An observer of a forward pass, and another one of its backward pass."""
    with observer() as forward:
        output = passes.forward()
    with observer() as backward:
        passes.backward(output)
    return [forward, backward]


def _kernel_names(profiler: profile) -> tuple[str, ...]:
    """Names of the kernels that were launched on the GPU, in order, as the profiler sees them."""
    kernels = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        is_on_gpu = event.device_type == DeviceType.CUDA  # `is` would compare different objects
        is_copy = event.name.startswith(("Memcpy", "Memset"))
        if is_on_gpu and not event.is_user_annotation and not is_copy:
            kernels.append(event.name)
    return tuple(kernels)


class TrafficCounter(OperationObserver):
    """Notes the operations that compute new values, and adds up the bytes of their operands and
    results.
    """

    def __init__(self) -> None:
        """Start with no operation and no bytes counted."""
        super().__init__()
        self.operations: list[str] = []
        self.num_bytes = 0

    def observe(
        self, func: OpOverload[..., object], operands: Sequence[object], output: object
    ) -> None:
        """Add up what the operation reads and writes."""
        if func.is_view or str(func).startswith(_NO_NEW_VALUES):
            return
        self.operations.append(str(func))
        for leaf in tree_leaves((operands, output)):
            if isinstance(leaf, Tensor):
                # elements that a broadcast repeats lie in memory once
                axes = zip(leaf.shape, leaf.stride(), strict=True)
                elements = math.prod(size for size, stride in axes if stride)
                self.num_bytes += elements * leaf.element_size()


def _max_errors(passes: Passes, written_out: OpFunction) -> list[float | None]:
    """Largest distance of the output, and of the gradients, from those of the written-out form in
    float64.

    Only the first element of the batch counts, so the gradient of a weight, which sums over the
    batch, is left out.
    """
    inputs = passes.sets[0]
    output, *gradients = passes.both()
    exact_inputs = [_first(tensor).detach().double().requires_grad_() for tensor in inputs.forward]
    exact_output = written_out(*exact_inputs)
    exact_gradients = torch.autograd.grad(exact_output, exact_inputs, inputs.upstream[:1].double())
    batched = [
        (_first(a), b) for a, b in zip(gradients, exact_gradients, strict=True) if a.dim() > 1
    ]
    return [distance([(_first(output), exact_output)]), distance(batched)]


def _first(tensor: Tensor) -> Tensor:
    """The first of the batch; a weight, which has one axis, as a whole."""
    return tensor[:1] if tensor.dim() > 1 else tensor
