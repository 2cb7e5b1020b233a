"""Measures one cell of the study of attention: times of both passes, memory and errors."""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ..config import Device, Phase
from ..measure.clock import EventClock, HostClock
from ..measure.environment import lacking_bytes
from ..measure.failure import classify, describe
from ..measure.precision import apply_math_mode
from ..model.transformer import naive_attention
from ..model.user_code import load_callable
from ..record import Failure, Measurement, Status
from .cell import make_generator
from .operators import (
    AttentionCell,
    AttentionGrid,
    CellMemory,
    CellResult,
    ExactError,
    Implementation,
    Quantity,
    weights_bytes,
    wrong_quantities,
)
from .passes import Inputs, OpFunction, Passes, compiled, distance, full_attention, make_inputs

BLOCK_BYTES = 2**27
"""Most bytes of the scores of one block of queries in float64; a few tensors of this size exist
at the same time.
"""
_WITH_SCORES = (Implementation.NAIVE, Implementation.COMPILED, Implementation.MATH)
_BACKENDS = {
    Implementation.FLASH: SDPBackend.FLASH_ATTENTION,
    Implementation.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Implementation.CUDNN: SDPBackend.CUDNN_ATTENTION,
    Implementation.MATH: SDPBackend.MATH,
}
_NO_KERNEL = r"No available kernel|No viable backend|No (valid )?execution plans"
"""Errors by which PyTorch and cuDNN report that no allowed kernel takes such inputs."""


def make_attention(grid: AttentionGrid, cell: AttentionCell) -> OpFunction:
    """The function that the cell's implementation names; raises ValueError where the user's own is
    not there.
    """
    if cell.implementation is Implementation.OWN:
        # the user's may be compiled too, and refuse the ninth shape as ours would
        torch._dynamo.reset()
        own: Any = load_callable(str(grid.own), "--own", "a function or a torch.autograd.Function")
        if isinstance(own, type) and issubclass(own, torch.autograd.Function):
            own = own.apply
        return lambda q, k, v: own(q, k, v, grid.causal)
    if cell.implementation not in (Implementation.NAIVE, Implementation.COMPILED):
        return partial(_sdpa, _BACKENDS.get(cell.implementation), grid.causal)
    function: OpFunction = full_attention
    if grid.causal:
        length = cell.context_length
        mask = torch.ones(length, length, dtype=torch.bool, device=grid.device.value).tril()
        function = partial(naive_attention, mask=mask)
    return function if cell.implementation is Implementation.NAIVE else compiled(function)


def _sdpa(backend: SDPBackend | None, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention, with an added axis of one head, because its fused kernels only take
    four axes.
    """
    q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).squeeze(1)


def measure_attention(grid: AttentionGrid, rows: Sequence[CellResult]) -> list[CellResult]:
    """Each row with its times and memory. Raises whatever running raises."""
    return [measure_cell(grid, row.cell) for row in rows]


def measure_cell(
    grid: AttentionGrid, cell: AttentionCell, attention: OpFunction | None = None
) -> CellResult:
    """Warm up, time `grid.passes` passes, then read the memory of one more. Raises whatever running
    raises.

    `attention` replaces the function that the cell names.
    """
    if lacking := _lacking_memory(grid, cell):
        needed = Failure(message=lacking, where=cell.label)
        return CellResult(cell=cell, status=Status.OOM, failure=needed)
    apply_math_mode(cell.precision)
    inputs = _inputs_of(grid, cell)
    passes = Passes(attention or make_attention(grid, cell), inputs)
    clock = EventClock() if grid.device is Device.CUDA else HostClock()
    failure = None
    started = perf_counter()
    if cell.implementation is Implementation.OWN:
        output = passes.forward()
        if fault := fault_of(output, inputs):
            failure = Failure(message=f"{grid.own} {fault}", where=cell.label)
            return CellResult(cell=cell, status=Status.INVALID, failure=failure)
        try:
            passes.backward(output)
        except NotImplementedError as error:
            failure = describe(error, Status.CRASHED, cell.label, grid.device)
            passes.has_backward = False
    elif reason := _why_unavailable(lambda: passes.timed(clock)):
        return CellResult(cell=cell, status=Status.UNAVAILABLE, failure=Failure(message=reason))
    first_pass_s = perf_counter() - started
    for _ in range(grid.warmup_passes - 1):
        passes.timed(clock)
    times = [passes.timed(clock) for _ in range(grid.passes)]
    result = CellResult(
        cell=cell,
        status=Status.OK,
        failure=failure,
        measurements=_measurements(times),
        first_pass_s=first_pass_s,
        memory=_memory(passes) if grid.device is Device.CUDA else None,
    )
    return _compared(grid, result, passes) if grid.own else result


def _lacking_memory(grid: AttentionGrid, cell: AttentionCell) -> str | None:
    """What attention with all its scores needs on the CPU and what this machine has, in words, if
    that is too little; else None. In backward the weights and their gradient exist at once.

    The system would give the memory, and end some process once it is used.
    """
    if grid.device is Device.CUDA or cell.implementation not in _WITH_SCORES:
        return None
    return lacking_bytes(2 * weights_bytes(grid, cell))


def _measurements(times: Sequence[Mapping[Phase, float]]) -> tuple[Measurement, ...]:
    """The times of each phase, from those of each pass."""
    measurements = []
    for phase in times[0]:
        times_s = tuple(of_pass[phase] for of_pass in times)
        measurements.append(Measurement(phase, times_s))
    return tuple(measurements)


def _inputs_of(grid: AttentionGrid, cell: AttentionCell) -> Inputs:
    """Random queries, keys and values of the cell, each (batch, context length, d_head)."""
    shape = (grid.batch_size, cell.context_length, cell.d_head)
    return make_inputs([shape] * 3, cell.precision, make_generator(grid))


def fault_of(output: object, inputs: Inputs) -> str | None:
    """What is wrong with the form of the user's output, as a predicate; None if nothing is."""
    q = inputs.forward[0]
    if not isinstance(output, Tensor):
        return f"must return a tensor, got {type(output).__name__}"
    for what, needed, got in (
        ("shape", tuple(q.shape), tuple(output.shape)),
        ("data type", q.dtype, output.dtype),
        ("device", q.device, output.device),
    ):
        if needed != got:
            return f"must return a tensor of {what} {needed}, got {got}"
    return None


def _why_unavailable(run: Callable[[], object]) -> str | None:
    """Run the first pass; return PyTorch's reasons if it has no kernel for such inputs, and None
    if it has one.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except RuntimeError as error:
            if not re.search(_NO_KERNEL, str(error)):
                raise
            reasons = []
            for warning in caught:
                text = str(warning.message).partition(" (Triggered internally")[0].strip()
                # a heading, and kernels that this study has switched off itself
                if not text.endswith("because:") and "runtime disabled" not in text:
                    reasons.append(text)
            return " ".join(dict.fromkeys(reasons)) or str(error).splitlines()[0]
    return None


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


def _compared(grid: AttentionGrid, result: CellResult, passes: Passes) -> CellResult:
    """The result with the errors of one more pass against float64, and invalid if they show a wrong
    own function.

    Without errors if float64 does not fit into memory.
    """
    cell = result.cell
    # new ones, because a faulty kernel may have overwritten those of the passes
    inputs = _inputs_of(grid, cell)
    try:
        exact = exact_attention(inputs, causal=grid.causal)
        result = replace(result, errors=exact_errors(passes.both(), exact))
        if cell.implementation is not Implementation.OWN:
            return result
        kernel = exact_errors(Passes(partial(_sdpa, None, grid.causal), inputs).both(), exact)
    except Exception as failure:
        if classify(failure) is not Status.OOM:
            raise
        return result
    wrong = wrong_quantities(cell, result.errors, kernel)
    if not wrong:
        return result
    parts = []
    for error in result.errors:
        if error.quantity in wrong:
            relative = math.inf if error.relative is None else error.relative
            of_kernel = wrong[error.quantity]
            parts.append(f"{error.quantity} {relative:.2g} (PyTorch's {of_kernel:.2g})")
    message = f"{grid.own}: errors against float64, over the largest magnitude: {', '.join(parts)}"
    return replace(
        result, status=Status.INVALID, failure=Failure(message=message, where=cell.label)
    )


def exact_attention(inputs: Inputs, *, causal: bool) -> tuple[Tensor, ...]:
    """The output and the gradients of queries, keys and values, each (batch, seq, d_head) in
    float64.

    In blocks of queries, whose scores backward computes again; keys that no query of a block
    attends to are left out, which halves the work where it is causal.
    """
    q, k, v = leaves = tuple(tensor.detach().double().requires_grad_() for tensor in inputs.forward)
    batch, length, _ = q.shape
    positions = torch.arange(length, device=q.device)
    queries_in_block = max(1, BLOCK_BYTES // (batch * length * torch.float64.itemsize))
    blocks = []
    for queries in positions.split(queries_in_block):
        first = int(queries[0])
        end = int(queries[-1]) + 1
        num_keys = end if causal else length
        mask = torch.ones(len(queries), num_keys, dtype=torch.bool, device=q.device)
        if causal:
            mask = queries[:, None] >= positions[:num_keys]
        block = q[:, first:end], k[:, :num_keys], v[:, :num_keys], mask
        blocks.append(checkpoint(naive_attention, *block, use_reentrant=False))
    output = torch.cat(blocks, dim=1)
    return output.detach(), *torch.autograd.grad(output, leaves, inputs.upstream.double())


def exact_errors(computed: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[ExactError, ...]:
    """How far the output, and the gradients of queries, keys and values if there are any, are
    from those in float64.
    """
    return tuple(
        ExactError(
            quantity=quantity,
            max_error=distance([(tensor, exact_tensor)]),
            max_exact=float(exact_tensor.abs().max()),
        )
        for quantity, tensor, exact_tensor in zip(Quantity, computed, exact, strict=False)
    )
