"""One version of one operation: kernels launched, bytes moved, time and error, forward and backward."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch._dynamo
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cs336_systems.config import Device
from cs336_systems.measure.precision import apply_math_mode
from cs336_systems.record import Measurement
from cs336_systems.studies.cell import Passes, make_generator, make_inputs
from cs336_systems.studies.fusion_ops import OPS, Moved, OpFunction, OpSpec, Watcher
from cs336_systems.studies.fusion_records import FusionGrid, FusionRow, Version, input_shapes
from cs336_systems.studies.timing import timed_pairs

CACHES_FULL = 4
"""Sets of inputs take turns; together they are this many times as large as the L2 cache, so that no set stays in it."""
MAX_SETS = 64
T = TypeVar("T")
_COMPILED_OPERATORS = re.compile(r"cpp_fused|^aten::(mm|bmm|addmm|baddbmm)$")
"""What a CPU's profile shows of compiled code: generated kernels, and the matmuls that are left to a library."""


def measure_rows(grid: FusionGrid, rows: Sequence[FusionRow], spec: OpSpec | None = None) -> list[FusionRow]:
    """The rows of forward and backward of a version, with everything that is measured. Raises whatever running raises.

    `spec` replaces the operation that the rows name.
    """
    row = rows[0]
    apply_math_mode(row.precision)
    torch._dynamo.reset()  # drops the code that was compiled for the last version
    spec, is_compiled = spec or OPS[row.op], row.version is Version.COMPILED
    passes = _make_passes(grid, row, _make_function(spec, row.version, grid.device))
    for turn in range(grid.warmup_passes):
        passes.backward(passes.forward(turn), turn)
    times_s = timed_pairs(passes.forward, passes.backward, grid.passes, grid.device)
    moved = None if is_compiled else _moved(passes)
    kernels = _kernels(passes, grid.device) if moved is None or grid.device is Device.CUDA else _operations(moved)
    return [
        replace(
            row,
            measurement=Measurement(row.phase, times_s[index]),
            kernels=kernels[index],
            moved_bytes=None if moved is None else moved[index].num_bytes,
            max_error=max_error,
        )
        for index, (row, max_error) in enumerate(zip(rows, _max_errors(passes, spec), strict=True))
    ]


def _make_passes(grid: FusionGrid, row: FusionRow, function: OpFunction) -> Passes:
    """Passes on as many sets of inputs as fill the caches."""
    make_set = partial(make_inputs, input_shapes(grid, row.op), row.precision, make_generator(grid))
    first = make_set()
    size = sum(tensor.nbytes for tensor in (*first.forward, first.upstream))
    return Passes(function, first, *(make_set() for _ in range(_sets_to_fill_caches(size, grid.device) - 1)))


def _kernels(passes: Passes, device: Device) -> list[tuple[str, ...]]:
    """Names of the kernels that forward and backward launch, as the profiler sees them."""
    output, forward = _profiled(passes.forward, device)
    _, backward = _profiled(lambda: passes.backward(output), device)
    return [forward, backward]


def _moved(passes: Passes) -> list[Moved]:
    """What the operations of forward and of backward read and write. Those of compiled code cannot be watched."""
    with Watcher() as forward:
        output = passes.forward()
    with Watcher() as backward:
        passes.backward(output)
    return [forward.moved, backward.moved]


def _operations(moved: Sequence[Moved]) -> list[tuple[str, ...]]:
    """Operations of forward and backward, which a CPU has in place of kernels."""
    return [tuple(each.operations) for each in moved]


def _max_errors(passes: Passes, spec: OpSpec) -> list[float | None]:
    """Largest distance of the output, and of the gradients, from those of the written-out form in float64.

    Only the first element of the batch counts, so the gradient of a weight, which sums over the batch, is left out.
    """
    inputs = passes.sets[0]
    output = passes.forward()
    gradients = passes.backward(output)
    exact_inputs = [_first(tensor).detach().double().requires_grad_() for tensor in inputs.forward]
    exact_output = spec.written_out(*exact_inputs)
    exact_gradients = torch.autograd.grad(exact_output, exact_inputs, inputs.upstream[:1].double())
    batched = [pair for pair in zip(gradients, exact_gradients, strict=True) if pair[0].dim() > 1]
    return [_distance([(output, exact_output)]), _distance(batched)]


def _make_function(spec: OpSpec, version: Version, device: Device) -> OpFunction:
    if version is Version.COMPILED:
        # without this option, a profile on a CPU does not show the generated kernels
        options: dict[str, str | int | bool | Callable[..., object]] = {"cpp.enable_kernel_profile": True}
        on_cpu = device is Device.CPU
        return torch.compile(spec.written_out, dynamic=False, fullgraph=True, options=options if on_cpu else None)
    return spec.written_out if version is Version.EAGER else spec.fused


def _sets_to_fill_caches(set_bytes: int, device: Device) -> int:
    """How many sets of inputs take turns; on a CPU one set, which may stay in the caches."""
    if device is Device.CPU:
        return 1
    cache_bytes: int = torch.cuda.get_device_properties().L2_cache_size
    return max(1, min(MAX_SETS, -(-CACHES_FULL * cache_bytes // set_bytes)))


def _profiled(run: Callable[[], T], device: Device) -> tuple[T, tuple[str, ...]]:
    """What `run` returns, and the names of the kernels that it launched, in order."""
    on_gpu = device is Device.CUDA
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        result = run()
        if on_gpu:
            torch.cuda.synchronize()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    if on_gpu:
        return result, tuple(
            event.name
            for event in events
            if event.device_type == DeviceType.CUDA  # `is` would compare different objects
            and not event.is_user_annotation
            and not event.name.startswith(("Memcpy", "Memset"))
        )
    return result, tuple(event.name for event in events if _COMPILED_OPERATORS.search(event.name))


def _first(tensor: Tensor) -> Tensor:
    """The first of the batch; a weight, which has one axis, as a whole."""
    return tensor[:1] if tensor.dim() > 1 else tensor


def _distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    errors = [(_first(found).detach().double() - exact.detach()).abs().max() for found, exact in pairs]
    largest = float(torch.stack(errors).max())  # NaN if any is
    return largest if math.isfinite(largest) else None
