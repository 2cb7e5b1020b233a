"""One version of one operation: kernels launched, bytes moved, time and error, forward and backward."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch._dynamo
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cs336_systems.config import Device, Phase
from cs336_systems.measure.precision import apply_math_mode
from cs336_systems.record import Measurement
from cs336_systems.studies.cell import DTYPES
from cs336_systems.studies.fusion_ops import OPS, Moved, OpFunction, OpSpec, Watcher
from cs336_systems.studies.fusion_records import FusionGrid, FusionRow, Version, input_shapes
from cs336_systems.studies.timing import timed_pairs

CACHES_FULL = 4
"""Inputs that together are so many times the L2 cache take turns, so that none is still in it when its turn comes."""
MOST_SETS = 64
T = TypeVar("T")
_COMPILED_OPERATORS = re.compile(r"cpp_fused|^aten::(mm|bmm|addmm|baddbmm)$")
"""What a CPU's profile shows of compiled code that computes: generated kernels, and products left to a library."""


def measure_rows(grid: FusionGrid, rows: Sequence[FusionRow], spec: OpSpec | None = None) -> list[FusionRow]:
    """The rows of forward and backward of a version, with all that is measured. Raises whatever running it raises.

    `spec` takes the place of the operation's own.
    """
    row = rows[0]
    apply_math_mode(row.precision)
    torch._dynamo.reset()  # drops the code that was compiled for the last version
    subject = _Subject(grid, row, spec or OPS[row.op])
    subject.warm_up()
    times, kernels, moved, errors = subject.times_s(), subject.kernels(), subject.moved(), subject.max_errors()
    return [
        replace(
            row,
            measurement=Measurement(row.phase, times[row.phase]),
            kernels=kernels[row.phase],
            moved_bytes=None if moved is None else moved[row.phase].num_bytes,
            max_error=errors[row.phase],
        )
        for row in rows
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What goes into one pass: the inputs of forward, and the gradient of its output."""

    forward: tuple[Tensor, ...]
    upstream: Tensor


class _Subject:
    """One version of an operation with its inputs, ready to be run and looked at from several sides."""

    def __init__(self, grid: FusionGrid, row: FusionRow, spec: OpSpec) -> None:
        self._grid, self._spec, self._version = grid, spec, row.version
        self._function = _make_function(spec, row.version, grid.device)
        generator = torch.Generator(grid.device.value).manual_seed(grid.seed)
        first = _make_inputs(grid, row, generator)
        size = sum(tensor.nbytes for tensor in (*first.forward, first.upstream))
        others = range(_sets_to_fill_caches(size, grid.device) - 1)
        self._sets = [first, *(_make_inputs(grid, row, generator) for _ in others)]

    def forward(self, turn: int = 0) -> Tensor:
        return self._function(*self._sets[turn % len(self._sets)].forward)

    def backward(self, output: Tensor, turn: int = 0) -> tuple[Tensor, ...]:
        """Gradients of all inputs."""
        inputs = self._sets[turn % len(self._sets)]
        return torch.autograd.grad(output, inputs.forward, inputs.upstream)

    def warm_up(self) -> None:
        for turn in range(self._grid.warmup_passes):
            self.backward(self.forward(turn), turn)

    def times_s(self) -> dict[Phase, tuple[float, ...]]:
        """Seconds of forward and of backward in every timed pass."""
        forward_s, backward_s = timed_pairs(self.forward, self.backward, self._grid.passes, self._grid.device)
        return {Phase.FORWARD: forward_s, Phase.BACKWARD: backward_s}

    def kernels(self) -> dict[Phase, tuple[str, ...]]:
        """Names of the kernels that each phase launches; on a CPU, of its operators."""
        if self._grid.device is Device.CUDA or self._version is Version.COMPILED:
            output, forward = _profiled(self.forward, self._grid.device)
            _, backward = _profiled(lambda: self.backward(output), self._grid.device)
            return {Phase.FORWARD: forward, Phase.BACKWARD: backward}
        return {phase: tuple(moved.operations) for phase, moved in self._watched().items()}

    def moved(self) -> dict[Phase, Moved] | None:
        """What the operations of each phase read and write, or None for compiled code, whose kernels nobody sees."""
        return None if self._version is Version.COMPILED else self._watched()

    def _watched(self) -> dict[Phase, Moved]:
        with Watcher() as forward:
            output = self.forward()
        with Watcher() as backward:
            self.backward(output)
        return {Phase.FORWARD: forward.moved, Phase.BACKWARD: backward.moved}

    def max_errors(self) -> dict[Phase, float | None]:
        """Largest distance of the output, and of the gradients, from the written-out form in float64.

        Over the first of the batch: the gradient of a weight, which has no batch, is left out.
        """
        inputs = self._sets[0]
        output = self.forward()
        gradients = self.backward(output)
        exact_inputs = [_first(tensor).detach().double().requires_grad_() for tensor in inputs.forward]
        exact_output = self._spec.written_out(*exact_inputs)
        exact_gradients = torch.autograd.grad(exact_output, exact_inputs, inputs.upstream[:1].double())
        batched = [pair for pair in zip(gradients, exact_gradients, strict=True) if pair[0].dim() > 1]
        return {
            Phase.FORWARD: _distance([(output, exact_output)]),
            Phase.BACKWARD: _distance(batched),
        }


def _make_function(spec: OpSpec, version: Version, device: Device) -> OpFunction:
    if version is Version.COMPILED:
        # without it, a profile on a CPU does not show what was generated
        options: dict[str, str | int | bool | Callable[..., object]] = {"cpp.enable_kernel_profile": True}
        on_cpu = device is Device.CPU
        return torch.compile(spec.written_out, dynamic=False, fullgraph=True, options=options if on_cpu else None)
    return spec.written_out if version is Version.EAGER else spec.fused


def _make_inputs(grid: FusionGrid, row: FusionRow, generator: torch.Generator) -> _Inputs:
    shapes = input_shapes(grid, row.op)
    tensors = [
        torch.randn(shape, generator=generator, device=grid.device.value, dtype=DTYPES[row.precision])
        for shape in (*shapes, shapes[0])
    ]
    return _Inputs(forward=tuple(tensor.requires_grad_() for tensor in tensors[:-1]), upstream=tensors[-1])


def _sets_to_fill_caches(set_bytes: int, device: Device) -> int:
    """How many sets of inputs take turns; a CPU's caches are left as they are."""
    if device is Device.CPU:
        return 1
    cache_bytes: int = torch.cuda.get_device_properties().L2_cache_size
    return max(1, min(MOST_SETS, -(-CACHES_FULL * cache_bytes // set_bytes)))


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
            if event.device_type == DeviceType.CUDA  # another object each time
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
