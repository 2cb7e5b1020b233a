"""Measures one cell of the study of operators: times of forward and backward, memory or kernels,
and errors.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
import torch._dynamo
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ..config import Device, Phase, Precision
from ..measure.clock import Clock, EventClock, HostClock
from ..measure.failure import classify, describe
from ..measure.precision import apply_math_mode
from ..model.trainable import load_callable
from ..model.transformer import naive_attention
from ..record import Failure, Measurement, Status
from . import operators
from .cell import DTYPES, OperationObserver, make_generator, normal

OpFunction = Callable[..., Tensor]
T = TypeVar("T")
EPS = 1e-5
BLOCK_BYTES = 2**27
"""Most bytes of the scores of one block of queries in float64; a few tensors of this size exist
at the same time.
"""
HEAD_START_CYCLES = 4_000_000
"""GPU cycles, about 2 ms, that the device waits so that the host can launch one pass forward and
backward.
"""
CACHES_FULL = 4
"""Sets of inputs take turns; together they are this many times as large as the L2 cache, so that
no set stays in it.
"""
MAX_SETS = 64
_BACKENDS = {
    operators.Implementation.FLASH: SDPBackend.FLASH_ATTENTION,
    operators.Implementation.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    operators.Implementation.CUDNN: SDPBackend.CUDNN_ATTENTION,
    operators.Implementation.MATH: SDPBackend.MATH,
}
_NO_KERNEL = r"No available kernel|No viable backend|No (valid )?execution plans"
"""Errors by which PyTorch and cuDNN report that no allowed kernel takes such inputs."""
_NO_NEW_VALUES = ("aten.empty", "aten.new_empty", "aten._unsafe_view")
"""Allocations, and a view that its schema does not declare as one: these read and write nothing."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What goes into one pass: the inputs of forward, and the gradient of its output."""

    forward: tuple[Tensor, ...]
    upstream: Tensor


class Passes:
    """Forward and backward of a function on sets of inputs that take turns. Gradients are returned,
    not accumulated.

    Forward alone once `has_backward` is set to False; there are no gradients then.
    """

    def __init__(self, function: OpFunction, *sets: Inputs) -> None:
        self._function = function
        self.sets = sets
        self.has_backward = True

    def forward(self, turn: int = 0) -> Tensor:
        """Output for the set of inputs of this turn."""
        return self._function(*self.sets[turn % len(self.sets)].forward)

    def backward(self, output: Tensor, turn: int = 0) -> tuple[Tensor, ...]:
        """Gradients of all inputs of this turn."""
        if not self.has_backward:
            return ()
        inputs = self.sets[turn % len(self.sets)]
        return torch.autograd.grad(output, inputs.forward, inputs.upstream)

    def both(self) -> tuple[Tensor, ...]:
        """The output, and the gradients."""
        output = self.forward()
        return (output, *self.backward(output))

    def timed(self, clock: Clock) -> dict[Phase, float]:
        """Times in seconds of one forward and one backward pass, between two synchronisations of
        the device.
        """
        clock.start()
        output = self.forward()
        clock.lap(Phase.FORWARD)
        if self.has_backward:
            self.backward(output)
            clock.lap(Phase.BACKWARD)
        return clock.stop().phases_s


def make_inputs(
    shapes: Sequence[tuple[int, ...]], precision: Precision, generator: torch.Generator
) -> Inputs:
    """Normally distributed inputs of these shapes; the output is taken to have the first shape."""
    *inputs, upstream = normal(generator, (*shapes, shapes[0]), DTYPES[precision])
    return Inputs(tuple(tensor.requires_grad_() for tensor in inputs), upstream)


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


def full_attention(
    q: Float[Tensor, "*batch queries d_head"],
    k: Float[Tensor, "*batch keys d_head"],
    v: Float[Tensor, "*batch keys d_head"],
) -> Float[Tensor, "*batch queries d_head"]:
    """Written-out attention to all keys (Vaswani et al. 2017, eq. 1), as naive_attention
    computes it when causal.
    """
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return scores.softmax(dim=-1) @ v


OPS: Mapping[operators.Op, tuple[OpFunction, OpFunction]] = MappingProxyType(
    {
        operators.Op.GELU: (gelu, lambda x: F.gelu(x, approximate="tanh")),
        operators.Op.SOFTMAX: (softmax, lambda x: F.softmax(x, dim=-1)),
        operators.Op.RMS_NORM: (
            rms_norm,
            lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
        ),
        operators.Op.ATTENTION: (full_attention, F.scaled_dot_product_attention),
    }
)
"""Each operation, written out and fused."""


def compiled(function: OpFunction) -> OpFunction:
    """The function under torch.compile, which compiles when it is first called."""
    torch._dynamo.reset()  # otherwise it refuses the ninth shape of one function
    return cast("OpFunction", torch.compile(function, dynamic=False, fullgraph=True))


def make_attention(grid: operators.AttentionGrid, cell: operators.AttentionCell) -> OpFunction:
    """The function that the cell's implementation names."""
    if cell.implementation is operators.Implementation.OWN:
        # the user's may be compiled too, and refuse the ninth shape as ours would
        torch._dynamo.reset()
        own = load_own(str(grid.own))
        return lambda q, k, v: own(q, k, v, grid.causal)
    if cell.implementation not in (
        operators.Implementation.NAIVE,
        operators.Implementation.COMPILED,
    ):
        return partial(_sdpa, _BACKENDS.get(cell.implementation), grid.causal)
    function: OpFunction = full_attention
    if grid.causal:
        length = cell.context_length
        mask = torch.ones(length, length, dtype=torch.bool, device=grid.device.value).tril()
        function = partial(naive_attention, mask=mask)
    return function if cell.implementation is operators.Implementation.NAIVE else compiled(function)


def _sdpa(backend: SDPBackend | None, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention, with an added axis of one head, because its fused kernels only take
    four axes.
    """
    choice: AbstractContextManager[object] = (
        nullcontext() if backend is None else sdpa_kernel(backend)
    )
    q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    with choice:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).squeeze(1)


def load_own(name: str) -> Callable[..., Any]:
    """Import the function, or `apply` of the torch.autograd.Function; raise ValueError where it
    is not there.
    """
    found: Any = load_callable(name, "--own", "a function or a torch.autograd.Function")
    is_autograd = isinstance(found, type) and issubclass(found, torch.autograd.Function)
    own: Callable[..., Any] = found.apply if is_autograd else found
    return own


def measure_attention(
    grid: operators.AttentionGrid, rows: Sequence[operators.CellResult]
) -> list[operators.CellResult]:
    """Each row with its times and memory. Raises whatever running raises."""
    return [measure_cell(grid, row.cell) for row in rows]


def measure_cell(
    grid: operators.AttentionGrid,
    cell: operators.AttentionCell,
    attention: OpFunction | None = None,
) -> operators.CellResult:
    """Warm up, time `grid.passes` passes, then read the memory of one more. Raises whatever running
    raises.

    `attention` replaces the function that the cell names.
    """
    apply_math_mode(cell.precision)
    inputs = _inputs_of(grid, cell)
    passes = Passes(attention or make_attention(grid, cell), inputs)
    run = partial(passes.timed, EventClock() if grid.device is Device.CUDA else HostClock())
    failure = None
    started = perf_counter()
    if cell.implementation is operators.Implementation.OWN:
        output = passes.forward()
        if fault := fault_of(output, inputs):
            failure = Failure(message=f"{grid.own} {fault}", where=cell.label)
            return operators.CellResult(cell=cell, status=Status.INVALID, failure=failure)
        try:
            passes.backward(output)
        except NotImplementedError as error:
            failure = describe(error, Status.CRASHED, cell.label, grid.device)
            passes.has_backward = False
    elif reason := _why_unavailable(run):
        return operators.CellResult(
            cell=cell, status=Status.UNAVAILABLE, failure=Failure(message=reason)
        )
    first_pass_s = perf_counter() - started
    for _ in range(grid.warmup_passes - 1):
        run()
    times = [run() for _ in range(grid.passes)]
    result = operators.CellResult(
        cell=cell,
        status=Status.OK,
        failure=failure,
        measurements=tuple(
            Measurement(phase, tuple(time[phase] for time in times)) for phase in times[0]
        ),
        first_pass_s=first_pass_s,
        memory=_memory(passes) if grid.device is Device.CUDA else None,
    )
    return _compared(grid, result, passes) if grid.own else result


def _inputs_of(grid: operators.AttentionGrid, cell: operators.AttentionCell) -> Inputs:
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
            said = [
                str(warning.message).partition(" (Triggered internally")[0].strip()
                for warning in caught
            ]
            reasons = [
                text
                for text in said
                if not text.endswith("because:") and "runtime disabled" not in text
            ]
            return " ".join(dict.fromkeys(reasons)) or str(error).splitlines()[0]
    return None


def _memory(passes: Passes) -> operators.CellMemory:
    """What the allocator holds before forward, before backward, and at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before_forward = torch.cuda.memory_allocated()
    output = passes.forward()
    before_backward = torch.cuda.memory_allocated()
    passes.backward(output)
    return operators.CellMemory(
        before_forward_bytes=before_forward,
        before_backward_bytes=before_backward,
        peak_bytes=torch.cuda.max_memory_allocated(),
    )


def _compared(
    grid: operators.AttentionGrid, result: operators.CellResult, passes: Passes
) -> operators.CellResult:
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
        if cell.implementation is not operators.Implementation.OWN:
            return result
        kernel = exact_errors(Passes(partial(_sdpa, None, grid.causal), inputs).both(), exact)
    except Exception as error:
        if classify(error) is not Status.OOM:
            raise
        return result
    if not (wrong := operators.wrong_quantities(cell, result.errors, kernel)):
        return result
    of_kernel = {each.quantity: each.relative or 0 for each in kernel}
    said = [
        f"{each.quantity} {math.inf if each.relative is None else each.relative:.2g} (PyTorch's "
        f"{of_kernel[each.quantity]:.2g})"
        for each in result.errors
        if each.quantity in wrong
    ]
    message = f"{grid.own}: errors against float64, over the largest magnitude: {', '.join(said)}"
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
    positions, blocks = torch.arange(length, device=q.device), []
    for queries in positions.split(
        max(1, BLOCK_BYTES // (batch * length * torch.float64.itemsize))
    ):
        first, last = int(queries[0]), int(queries[-1])
        keys = positions[: last + 1 if causal else length]
        mask = (
            (queries[:, None] >= keys)
            if causal
            else torch.ones(len(queries), length, device=q.device).bool()
        )
        block = q[:, first : last + 1], k[:, : len(keys)], v[:, : len(keys)], mask
        blocks.append(checkpoint(naive_attention, *block, use_reentrant=False))
    output = torch.cat(blocks, dim=1)
    return output.detach(), *torch.autograd.grad(output, leaves, inputs.upstream.double())


def exact_errors(
    found: Sequence[Tensor], exact: Sequence[Tensor]
) -> tuple[operators.ExactError, ...]:
    """How far the output, and the gradients of queries, keys and values if there are any, are
    from those in float64.
    """
    return tuple(
        operators.ExactError(
            quantity=quantity,
            max_error=distance([(tensor, right)]),
            max_exact=float(right.abs().max()),
        )
        for quantity, tensor, right in zip(operators.Quantity, found, exact, strict=False)
    )


def distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """The largest distance of an element from the exact one, over all pairs; None if any is not
    finite.
    """
    errors = [(found.detach().double() - exact.detach()).abs().max() for found, exact in pairs]
    largest = float(torch.stack(errors).max())  # NaN if any is
    return largest if math.isfinite(largest) else None


def measure_fusion(
    grid: operators.FusionGrid, rows: Sequence[operators.FusionRow], fused: OpFunction | None = None
) -> list[operators.FusionRow]:
    """The rows of forward and backward of a version, with everything that is measured. Raises
    whatever running raises.

    `fused` replaces the fused operation that the rows name.
    """
    op, version, precision = rows[0].op, rows[0].version, rows[0].precision
    apply_math_mode(precision)
    written_out, kernel = OPS[op]
    functions = {operators.Version.EAGER: written_out, operators.Version.FUSED: fused or kernel}
    passes = _taking_turns(grid, op, precision, functions.get(version) or compiled(written_out))
    for turn in range(grid.warmup_passes):
        passes.backward(passes.forward(turn), turn)
    times_s = _timed_turns(passes, grid)
    moved = None if version is operators.Version.COMPILED else _moved(passes)
    if grid.device is Device.CUDA:
        kernels = _kernels(passes)
    else:
        kernels = [tuple(each.operations) for each in moved or ()] or [(), ()]
    return [
        replace(
            row,
            measurement=Measurement(row.phase, times_s[index]),
            kernels=kernels[index],
            moved_bytes=None if moved is None else moved[index].num_bytes,
            max_error=max_error,
        )
        for index, (row, max_error) in enumerate(
            zip(rows, _max_errors(passes, written_out), strict=True)
        )
    ]


def _taking_turns(
    grid: operators.FusionGrid, op: operators.Op, precision: Precision, function: OpFunction
) -> Passes:
    """Passes on as many sets of inputs as fill the caches; on a CPU on one set, which may stay
    in them.
    """
    make_set = partial(
        make_inputs, operators.input_shapes(grid, op), precision, make_generator(grid)
    )
    first = make_set()
    size = sum(tensor.nbytes for tensor in (*first.forward, first.upstream))
    cache_bytes = (
        torch.cuda.get_device_properties().L2_cache_size if grid.device is Device.CUDA else 0
    )
    sets = max(1, min(MAX_SETS, -(-CACHES_FULL * cache_bytes // size)))
    return Passes(function, first, *(make_set() for _ in range(sets - 1)))


def _timed_turns(passes: Passes, grid: operators.FusionGrid) -> list[tuple[float, ...]]:
    """Times in seconds of forward, and of backward, in each turn.

    On a GPU the device waits before each turn while the host launches it, so that the times are the
    device's own.
    """
    if grid.device is Device.CPU:
        turns = [passes.timed(HostClock()) for _ in range(grid.passes)]
        return [tuple(turn[phase] for turn in turns) for phase in operators.PHASES]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(grid.passes)]
    for turn, (start, middle, end) in enumerate(events):
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        output = passes.forward(turn)
        middle.record()
        passes.backward(output, turn)
        end.record()
    torch.cuda.synchronize()
    return [
        tuple(turn[index].elapsed_time(turn[index + 1]) / 1e3 for turn in events)
        for index in range(2)
    ]


def _kernels(passes: Passes) -> list[tuple[str, ...]]:
    """Names of the kernels that forward and backward launch on the GPU, in order, as the
    profiler sees them.
    """
    output, forward = _profiled(passes.forward)
    _, backward = _profiled(lambda: passes.backward(output))
    return [forward, backward]


def _profiled(run: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        result = run()
        torch.cuda.synchronize()
    return result, tuple(
        event.name
        for event in sorted(profiler.events(), key=lambda event: event.time_range.start)
        if event.device_type == DeviceType.CUDA  # `is` would compare different objects
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    )


class Watcher(OperationObserver):
    """Notes operations that compute new values, and the bytes of their operands and results:
    counted, no formula.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.num_bytes = 0

    def observe(
        self,
        func: OpOverload[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        output: object,
    ) -> None:
        """Add up what the operation reads and writes."""
        if not func.is_view and not str(func).startswith(_NO_NEW_VALUES):
            self.operations.append(str(func))
            for leaf in tree_leaves((args, kwargs, output)):
                if isinstance(leaf, Tensor):  # elements that a broadcast repeats count once
                    sizes = (
                        size
                        for size, stride in zip(leaf.shape, leaf.stride(), strict=True)
                        if stride
                    )
                    self.num_bytes += math.prod(sizes) * leaf.element_size()


def _moved(passes: Passes) -> list[Watcher]:
    """What the operations of forward and of backward read and write. Those of compiled code
    cannot be watched.
    """
    with Watcher() as forward:
        output = passes.forward()
    with Watcher() as backward:
        passes.backward(output)
    return [forward, backward]


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
