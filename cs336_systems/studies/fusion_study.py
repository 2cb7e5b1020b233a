"""What fusing does, op by op: kernels launched, bytes moved, time and error of each version, on this machine."""

import contextlib
import gc
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter_ns
from typing import TypeVar

import torch
import torch._dynamo
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cs336_systems.config import Device, Phase, Precision
from cs336_systems.measure.environment import environment
from cs336_systems.measure.failure import classify, describe
from cs336_systems.measure.nvml import visible_gpus
from cs336_systems.measure.precision import apply_math_mode
from cs336_systems.measure.progress import Say, say_nothing
from cs336_systems.record import Measurement, Status
from cs336_systems.studies.fusion_ops import OPS, Moved, OpFunction, OpSpec, Watcher, matmul_flops, must_move_bytes
from cs336_systems.studies.fusion_records import FusionGrid, FusionRow, FusionStudy, Op, Version
from cs336_systems.sweep.locks import exclusive, gpu_lock_path

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}
CACHES_FULL = 4
"""Inputs that together are so many times the L2 cache take turns, so that none is still in it when its turn comes."""
MOST_SETS = 64
HEAD_START_CYCLES = 4_000_000
"""About 2 ms, for the host to launch one pass forward and backward."""
PHASES = (Phase.FORWARD, Phase.BACKWARD)
T = TypeVar("T")
_COMPILED_OPERATORS = re.compile(r"cpp_fused|^aten::(mm|bmm|addmm|baddbmm)$")
"""What a CPU's profile shows of compiled code that computes: generated kernels, and products left to a library."""


def run_fusion_study(grid: FusionGrid, say: Say = say_nothing) -> FusionStudy:
    """Measure every version of every operation in this process; one that fails has rows that say so.

    `say` is told of each before it begins. Raises LockedError where a sweep is at work on the GPU.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which NVML names them
    gpu = next(iter(visible_gpus()), None) if grid.device is Device.CUDA else None
    rows: list[FusionRow] = []
    with contextlib.ExitStack() as stack:
        if gpu is not None:
            stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})"))
        cells = list(product(dict.fromkeys(grid.precisions), dict.fromkeys(grid.ops), Version))
        for done, (precision, op, version) in enumerate(cells):
            say(f"{op} {version} {precision}", done, len(cells))
            rows += measure_version(grid, op, precision, version)
        return FusionStudy(grid=grid, rows=tuple(rows), environment=environment(grid.device, gpu))


def measure_version(
    grid: FusionGrid, op: Op, precision: Precision, version: Version, spec: OpSpec | None = None
) -> list[FusionRow]:
    """The rows of forward and backward. Never raises for what a run can die of: that is a row too.

    `spec` takes the place of the operation's own.
    """
    spec = spec or OPS[op]
    apply_math_mode(precision)
    _tidy(grid.device)
    blanks = {
        phase: FusionRow(
            op=op,
            precision=precision,
            version=version,
            phase=phase,
            status=Status.OK,
            must_move_bytes=must_move_bytes(spec, grid, phase, DTYPES[precision].itemsize),
            matmul_flops=matmul_flops(spec, grid, phase),
        )
        for phase in PHASES
    }
    try:
        subject = _Subject(grid, spec, precision, version)
        subject.warm_up()
        times, kernels, moved, errors = subject.times_s(), subject.kernels(), subject.moved(), subject.max_errors()
    except Exception as error:
        status = classify(error)
        failure = describe(error, status, f"{version} {op}", grid.device)
        return [replace(blank, status=status, failure=failure) for blank in blanks.values()]
    return [
        replace(
            blank,
            measurement=Measurement(phase, times[phase]),
            kernels=kernels[phase],
            moved_bytes=None if moved is None else moved[phase].num_bytes,
            max_error=errors[phase],
        )
        for phase, blank in blanks.items()
    ]


def _tidy(device: Device) -> None:
    """Drop what the last version left: its garbage, its cached memory, its compiled code."""
    gc.collect()
    torch._dynamo.reset()
    if device is Device.CUDA:
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What goes into one pass: the inputs of forward, and the gradient of its output."""

    forward: tuple[Tensor, ...]
    upstream: Tensor


class _Subject:
    """One version of an operation with its inputs, ready to be run and looked at from several sides."""

    def __init__(self, grid: FusionGrid, spec: OpSpec, precision: Precision, version: Version) -> None:
        self._grid, self._spec, self._version = grid, spec, version
        self._function = _make_function(spec, version, grid.device)
        generator = torch.Generator(grid.device.value).manual_seed(grid.seed)
        first = _make_inputs(grid, spec, DTYPES[precision], generator)
        size = sum(tensor.nbytes for tensor in (*first.forward, first.upstream))
        others = range(_sets_to_fill_caches(size, grid.device) - 1)
        self._sets = [first, *(_make_inputs(grid, spec, DTYPES[precision], generator) for _ in others)]

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
        """Seconds of forward and of backward in every timed pass.

        On a GPU the device pauses before each pass while the host launches it, so that the times are the device's own.
        """
        on_gpu = self._grid.device is Device.CUDA
        stamps = [[_Stamp(on_gpu) for _ in range(3)] for _ in range(self._grid.passes)]
        for turn, (start, middle, end) in enumerate(stamps):
            if on_gpu:
                torch.cuda._sleep(HEAD_START_CYCLES)
            start.set()
            output = self.forward(turn)
            middle.set()
            self.backward(output, turn)
            end.set()
        if on_gpu:
            torch.cuda.synchronize()
        return {
            Phase.FORWARD: tuple(start.seconds_until(middle) for start, middle, _ in stamps),
            Phase.BACKWARD: tuple(middle.seconds_until(end) for _, middle, end in stamps),
        }

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


def _make_inputs(grid: FusionGrid, spec: OpSpec, dtype: torch.dtype, generator: torch.Generator) -> _Inputs:
    shapes = spec.input_shapes(grid)
    tensors = [
        torch.randn(shape, generator=generator, device=grid.device.value, dtype=dtype) for shape in (*shapes, shapes[0])
    ]
    return _Inputs(forward=tuple(tensor.requires_grad_() for tensor in tensors[:-1]), upstream=tensors[-1])


def _sets_to_fill_caches(set_bytes: int, device: Device) -> int:
    """How many sets of inputs take turns; a CPU's caches are left as they are."""
    if device is Device.CPU:
        return 1
    cache_bytes: int = torch.cuda.get_device_properties().L2_cache_size
    return max(1, min(MOST_SETS, -(-CACHES_FULL * cache_bytes // set_bytes)))


class _Stamp:
    """A moment on the GPU's stream, or by the host's clock."""

    def __init__(self, on_gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None

    def set(self) -> None:
        if self._event is None:
            self._time_ns = perf_counter_ns()
        else:
            self._event.record()

    def seconds_until(self, end: "_Stamp") -> float:
        if self._event is None or end._event is None:
            return (end._time_ns - self._time_ns) / 1e9
        return float(self._event.elapsed_time(end._event)) / 1e3


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
