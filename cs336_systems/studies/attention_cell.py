"""One cell of the attention grid: times of forward and backward, and memory."""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import cast

import torch
import torch._dynamo
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.config import Device, Phase
from cs336_systems.measure.clock import Clock, EventClock, HostClock
from cs336_systems.measure.failure import classify
from cs336_systems.measure.precision import apply_math_mode
from cs336_systems.model.transformer import naive_attention
from cs336_systems.record import Failure, Measurement, Status
from cs336_systems.studies.attention_exact import exact_errors
from cs336_systems.studies.attention_own import call_own, described, fault_of, load_own
from cs336_systems.studies.attention_records import (
    AttentionCell,
    AttentionGrid,
    CellMemory,
    CellResult,
    ExactError,
    Implementation,
)
from cs336_systems.studies.cell import Inputs, Passes, make_generator, make_inputs

Rows = Float[Tensor, "batch seq d_head"]
AttentionFunction = Callable[[Rows, Rows, Rows], Rows]

_BACKENDS = {
    Implementation.FLASH: SDPBackend.FLASH_ATTENTION,
    Implementation.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Implementation.CUDNN: SDPBackend.CUDNN_ATTENTION,
    Implementation.MATH: SDPBackend.MATH,
}
_NO_KERNEL = r"No available kernel|No viable backend|No (valid )?execution plans"
"""Errors by which PyTorch and cuDNN report that no allowed kernel takes such inputs."""


def full_attention(
    q: Float[Tensor, "*batch queries d_head"],
    k: Float[Tensor, "*batch keys d_head"],
    v: Float[Tensor, "*batch keys d_head"],
) -> Float[Tensor, "*batch queries d_head"]:
    """Written-out attention to all keys (Vaswani et al. 2017, eq. 1), as naive_attention computes it when causal."""
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return scores.softmax(dim=-1) @ v


def make_attention(grid: AttentionGrid, cell: AttentionCell) -> AttentionFunction:
    """The function that the cell's implementation names; it compiles when it is first called."""
    if cell.implementation is Implementation.OWN:
        torch._dynamo.reset()  # the user's may be compiled too, and refuse the ninth shape as ours would
        return partial(call_own, load_own(str(grid.own)), grid.causal)
    if cell.implementation not in (Implementation.NAIVE, Implementation.COMPILED):
        return partial(_sdpa, _BACKENDS.get(cell.implementation), grid.causal)
    function: AttentionFunction = full_attention
    if grid.causal:
        length = cell.context_length
        mask = torch.ones(length, length, dtype=torch.bool, device=grid.device.value).tril()
        function = partial(naive_attention, mask=mask)
    if cell.implementation is Implementation.NAIVE:
        return function
    torch._dynamo.reset()  # otherwise it refuses the ninth shape of one function
    return cast("AttentionFunction", torch.compile(function, dynamic=False, fullgraph=True))


def _sdpa(backend: SDPBackend | None, causal: bool, q: Rows, k: Rows, v: Rows) -> Rows:
    """PyTorch's attention, with an added axis of one head, because its fused kernels only take four axes."""
    choice: AbstractContextManager[object] = nullcontext() if backend is None else sdpa_kernel(backend)
    q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    with choice:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).squeeze(1)


def measure_rows(grid: AttentionGrid, rows: Sequence[CellResult]) -> list[CellResult]:
    """Each row with its times and memory. Raises whatever running it raises."""
    return [measure_cell(grid, row.cell) for row in rows]


def measure_cell(grid: AttentionGrid, cell: AttentionCell, attention: AttentionFunction | None = None) -> CellResult:
    """Warm up, time `grid.passes` passes, then read the memory of one more. Raises whatever running raises.

    `attention` replaces the function that the cell names.
    """
    apply_math_mode(cell.precision)
    shape = (grid.batch_size, cell.context_length, cell.d_head)
    inputs = make_inputs([shape] * 3, cell.precision, make_generator(grid))
    function = attention or make_attention(grid, cell)
    passes = Passes(function, inputs)
    run = partial(_timed, passes, EventClock() if grid.device is Device.CUDA else HostClock())
    started = perf_counter()
    if cell.implementation is Implementation.OWN:
        if fault := fault_of(function, inputs):
            message = f"{described(str(grid.own))} {fault}"
            return CellResult(cell=cell, status=Status.INVALID, failure=Failure(message=message, where=cell.label))
    elif reason := _why_unavailable(run):
        return CellResult(cell=cell, status=Status.UNAVAILABLE, failure=Failure(message=reason))
    first_pass_s = perf_counter() - started
    for _ in range(grid.warmup_passes - 1):
        run()
    times = [run() for _ in range(grid.passes)]
    return CellResult(
        cell=cell,
        status=Status.OK,
        measurements=tuple(
            Measurement(phase, tuple(time[phase] for time in times)) for phase in (Phase.FORWARD, Phase.BACKWARD)
        ),
        first_pass_s=first_pass_s,
        memory=_memory(passes) if grid.device is Device.CUDA else None,
        # with new inputs, because a faulty kernel may have overwritten those of the passes
        errors=_errors(passes, make_inputs([shape] * 3, cell.precision, make_generator(grid)), grid)
        if grid.own
        else (),
    )


def _errors(passes: Passes, inputs: Inputs, grid: AttentionGrid) -> tuple[ExactError, ...]:
    """Errors of one more pass against float64; empty if float64 does not fit into memory."""
    try:
        output = passes.forward()
        return exact_errors((output, *passes.backward(output)), inputs, causal=grid.causal)
    except Exception as error:
        if classify(error) is not Status.OOM:
            raise
        return ()


def _timed(passes: Passes, clock: Clock) -> dict[Phase, float]:
    """Times in seconds of one forward and one backward pass, between two synchronisations of the device."""
    clock.start()
    output = passes.forward()
    clock.lap(Phase.FORWARD)
    passes.backward(output)
    clock.lap(Phase.BACKWARD)
    return clock.stop().phases_s


def _memory(passes: Passes) -> CellMemory:
    """What the allocator holds before forward, before backward, and at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before_forward = torch.cuda.memory_allocated()
    output = passes.forward()
    before_backward = torch.cuda.memory_allocated()
    passes.backward(output)
    return CellMemory(
        before_forward_bytes=before_forward,
        before_backward_bytes=before_backward,
        peak_bytes=torch.cuda.max_memory_allocated(),
    )


def _why_unavailable(run: Callable[[], object]) -> str | None:
    """Run the first pass; return PyTorch's reasons if it has no kernel for such inputs, and None if it has one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except RuntimeError as error:
            if not re.search(_NO_KERNEL, str(error)):
                raise
            said = [str(warning.message).partition(" (Triggered internally")[0].strip() for warning in caught]
            reasons = [text for text in said if not text.endswith("because:") and "runtime disabled" not in text]
            return " ".join(dict.fromkeys(reasons)) or str(error).splitlines()[0]
    return None
