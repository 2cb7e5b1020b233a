"""One cell of the attention grid: times of forward and backward, and memory."""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from cs336_systems.measure.failure import classify, describe
from cs336_systems.measure.precision import apply_math_mode
from cs336_systems.model.transformer import naive_attention
from cs336_systems.record import Failure, Measurement, Status
from cs336_systems.studies.attention_exact import exact_attention, exact_errors
from cs336_systems.studies.attention_own import (
    NoBackwardError,
    call_own,
    described,
    fault_of,
    load_own,
    why_gpu_needed,
    wrong_in_words,
)
from cs336_systems.studies.attention_records import (
    AttentionCell,
    AttentionGrid,
    CellMemory,
    CellResult,
    Implementation,
    wrong_quantities,
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
    try:
        return _measure(grid, cell, attention)
    except Exception as error:
        is_on_cpu = cell.implementation is Implementation.OWN and grid.device is Device.CPU
        if is_on_cpu and (why := why_gpu_needed(error)):
            return CellResult(cell=cell, status=Status.UNAVAILABLE, failure=Failure(message=f"needs a GPU: {why}"))
        raise


def _measure(grid: AttentionGrid, cell: AttentionCell, attention: AttentionFunction | None) -> CellResult:
    apply_math_mode(cell.precision)
    inputs = _inputs(grid, cell)
    function = attention or make_attention(grid, cell)
    passes = Passes(function, inputs)
    run = partial(_timed, passes, EventClock() if grid.device is Device.CUDA else HostClock())
    failure = None
    started = perf_counter()
    if cell.implementation is Implementation.OWN:
        try:
            if fault := fault_of(function, inputs):
                return _invalid(grid, cell, fault)
        except NoBackwardError as error:
            cause = error.__cause__ or error
            failure = describe(cause, Status.CRASHED, cell.label, grid.device)
            run = partial(run, with_backward=False)
    elif reason := _why_unavailable(run):
        return CellResult(cell=cell, status=Status.UNAVAILABLE, failure=Failure(message=reason))
    first_pass_s = perf_counter() - started
    for _ in range(grid.warmup_passes - 1):
        run()
    times = [run() for _ in range(grid.passes)]
    result = CellResult(
        cell=cell,
        status=Status.OK,
        failure=failure,
        measurements=tuple(Measurement(phase, tuple(time[phase] for time in times)) for phase in times[0]),
        first_pass_s=first_pass_s,
        memory=_memory(passes, with_backward=failure is None) if grid.device is Device.CUDA else None,
    )
    return _compared(grid, result, passes) if grid.own else result


def _inputs(grid: AttentionGrid, cell: AttentionCell) -> Inputs:
    shape = (grid.batch_size, cell.context_length, cell.d_head)
    return make_inputs([shape] * 3, cell.precision, make_generator(grid))


def _invalid(grid: AttentionGrid, cell: AttentionCell, fault: str) -> CellResult:
    """A cell of the user's own with what is wrong with it, and where it is defined."""
    failure = Failure(message=f"{described(str(grid.own))} {fault}", where=cell.label)
    return CellResult(cell=cell, status=Status.INVALID, failure=failure)


def _compared(grid: AttentionGrid, result: CellResult, passes: Passes) -> CellResult:
    """The result with the errors of one more pass against float64, and invalid if they show a wrong own function.

    Without errors if float64 does not fit into memory.
    """
    cell = result.cell
    inputs = _inputs(grid, cell)  # new ones, because a faulty kernel may have overwritten those of the passes
    try:
        found = _pass(passes, with_backward=result.failure is None)
        exact = exact_attention(inputs, causal=grid.causal)
        errors = exact_errors(found, exact)
        result = replace(result, errors=errors)
        if cell.implementation is not Implementation.OWN:
            return result
        kernel = exact_errors(_pass(Passes(partial(_sdpa, None, grid.causal), inputs)), exact)
        if not wrong_quantities(cell, errors, kernel):
            return result
        others = exact_errors(found, exact_attention(inputs, causal=not grid.causal))
        is_other = not wrong_quantities(cell, others, kernel)
        likeness = f"equals attention {'without' if grid.causal else 'with'} the causal mask" if is_other else None
    except Exception as error:
        if classify(error) is not Status.OOM:
            raise
        return result
    invalid = _invalid(grid, cell, wrong_in_words(cell, errors, kernel, likeness))
    return replace(result, status=invalid.status, failure=invalid.failure)


def _pass(passes: Passes, *, with_backward: bool = True) -> tuple[Tensor, ...]:
    """The output of one pass, and the gradients."""
    output = passes.forward()
    return (output, *passes.backward(output)) if with_backward else (output,)


def _timed(passes: Passes, clock: Clock, *, with_backward: bool = True) -> dict[Phase, float]:
    """Times in seconds of one forward and one backward pass, between two synchronisations of the device."""
    clock.start()
    output = passes.forward()
    clock.lap(Phase.FORWARD)
    if with_backward:
        passes.backward(output)
        clock.lap(Phase.BACKWARD)
    return clock.stop().phases_s


def _memory(passes: Passes, *, with_backward: bool) -> CellMemory:
    """What the allocator holds before forward, before backward, and at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before_forward = torch.cuda.memory_allocated()
    output = passes.forward()
    before_backward = torch.cuda.memory_allocated()
    if with_backward:
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
