"""What would fit: the largest batch of a watched model, plain and with checkpoints, by a trace of
two batches.
"""

import copy
import functools
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import Phase
from ..costs.allocator import SMALL_BYTES
from ..costs.fit import last_number, last_that_fits
from ..costs.memory import allocated_levels, placed
from ..costs.tape import Category, Tape, interpolated
from ..loop_record import Fit
from .calls import Call, Several, Shape, shapes_in
from .dataless import NotTracedError, empty, saying_why_not_traced, tracing_copy, without_data
from .flops import loss_of
from .kept_state import kept_state
from .tokens import tensors_in

if TYPE_CHECKING:
    from ..costs.trace import StepTrace

LIMIT_S = 30.0
"""Longest time that all traces of one loop may take."""
STEPS = 2
"""Steps that are traced: the optimizer makes its state in the first."""
OF_CUDNN = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Modules whose operators are cuDNN's."""
OF_RECURRENT = "what recurrent layers of cuDNN keep is taken for what was not reached"
"""What is assumed of a model that has some."""
OF_CLASSES = ("cross_entropy", "nll_loss")
"""Functions of torch.nn.functional that compare a result with the numbers of classes."""
LOSSES = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll_loss",
    nn.MSELoss: "mse_loss",
    nn.L1Loss: "l1_loss",
    nn.SmoothL1Loss: "smooth_l1_loss",
    nn.HuberLoss: "huber_loss",
    nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
}
"""Modules of losses, and the functions of torch.nn.functional that do the same with a result and
its target.
"""
IMAGE_AXES = 4
"""Axes of a result whose second axis are its classes; of others, the last one is."""


class Kept(Enum):
    """How long a loop has what the model returned."""

    LOSS = auto()
    """Until its loss is computed, as where it has no name."""
    BACKWARD = auto()
    """Until the function returns that runs backward."""
    STEP = auto()
    """Until the next step has its own, as where the loop itself gives it a name."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What is known of a loop, to make its steps again."""

    call: Call
    batch_axis: int
    optimizers: Sequence[torch.optim.Optimizer] = ()
    autocast: torch.dtype | None = None
    """The type of autocast around the model; None without."""
    loss: str | None = None
    """The function of torch.nn.functional that the loop computes its loss with, outside of the
    model; None if it is not known.
    """
    kept: "Kept"
    """How long the loop has what the model returned."""
    beside: tuple[Shape, ...] = ()
    """Tensors with the batch axis that the loop has beside what it gives the model."""
    keeps_gradients: bool = False
    """Whether gradients are alive in the forward pass."""

    @property
    def batch_size(self) -> int:
        """The size of the batch axis of the first tensor that has one; raise NotTracedError
        without.
        """
        for shape in shapes_in((self.call.inputs, self.call.named)):
            if len(shape.sizes) > self.batch_axis:
                return shape.sizes[self.batch_axis]
        raise NotTracedError("the model is given no tensor with a batch axis")


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """What fits, and how it is known."""

    batch_size: int | None = None
    """The batch size of the loop."""
    fits: tuple[Fit, ...] = ()
    traced_batches: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = ()
    """What the traces take for granted, because it was not seen."""
    reason: str = ""
    """Why nothing is known, or nothing of checkpoints."""


def fitting(loop: Loop, room_bytes: int, unreached_bytes: int = 0) -> Fitting:
    """The largest batches whose steps fit into what PyTorch's allocator may have.

    cuDNN chooses its workspaces itself, and tries others where memory does not suffice. So where a
    model has its operators, and where checkpoints are the user's to put, the allocator is to give
    nothing back to the driver: where it has to, the exact order of tensors decides what fits. What
    recurrent layers keep is not known; the bytes that were not reached at the failure are left free
    for it.
    """
    end_s = monotonic() + LIMIT_S
    fits: list[Fit] = []
    batches: tuple[int, ...] = ()
    size: int | None = None
    reason = ""
    assumptions: list[str] = []
    try:
        size = loop.batch_size
        batches = max(2, size // 2), max(3, size)
        model = loop.call.model()
        room_bytes -= _bucket_bytes(model)
        if _has(model, nn.RNNBase):
            room_bytes -= unreached_bytes
            assumptions.append(OF_RECURRENT)
        with kept_state([] if model is None else [model]):
            for is_checkpointed in (False, True):
                tapes, assumed = _tapes(loop, batches, end_s, is_checkpointed=is_checkpointed)
                assumptions += assumed
                is_exact = not (is_checkpointed or _has(model, OF_CUDNN))
                largest = _largest(tapes, room_bytes, is_exact=is_exact)
                fits.append(_fit(tapes, largest, is_checkpointed=is_checkpointed))
    except NotTracedError as error:
        reason = str(error)
    return Fitting(
        batch_size=size,
        fits=tuple(fits),
        traced_batches=batches,
        assumptions=tuple(dict.fromkeys(assumptions)),
        reason=reason,
    )


def _tapes(
    loop: Loop, batches: Iterable[int], end_s: float, *, is_checkpointed: bool
) -> tuple[dict[int, Tape], list[str]]:
    """The tapes of the loop's first steps by batch size, and what they take for granted; raise
    NotTracedError with the reason. Traces end when the clock is at `end_s`.
    """
    tapes: dict[int, Tape] = {}
    assumptions: list[str] = []
    for batch in batches:
        limit_s = max(end_s - monotonic(), 0.0)
        tapes[batch], assumed = _traced(loop, batch, limit_s, is_checkpointed=is_checkpointed)
        assumptions += assumed
    return tapes, assumptions


def _has(model: nn.Module | None, kinds: tuple[type, ...] | type) -> bool:
    """Whether a part of the model is of one of these classes."""
    return model is not None and any(isinstance(part, kinds) for part in model.modules())


def _bucket_bytes(model: nn.Module | None) -> int:
    """What DistributedDataParallel has beside the gradients, in which it sends them."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return 0
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def _largest(tapes: Mapping[int, Tape], room_bytes: int, *, is_exact: bool) -> int:
    """The largest batch that fits, by steps of two batches that were traced."""
    if len({len(tape.tensors) for tape in tapes.values()}) > 1:
        sizes = " and ".join(map(str, tapes))
        raise NotTracedError(f"steps of batches of {sizes} make different tensors")
    if is_exact:
        return last_that_fits(lambda number: interpolated(tapes, number), room_bytes)
    return last_number(
        lambda number: placed(interpolated(tapes, number)).reserved_bytes <= room_bytes
    )


def _fit(tapes: Mapping[int, Tape], batch: int, *, is_checkpointed: bool) -> Fit:
    """What steps with this batch need; of a batch of 0, those of 1, which do not fit."""
    tape = interpolated(tapes, max(batch, 1))
    allocator = placed(tape)
    return Fit(
        batch_size=batch,
        is_checkpointed=is_checkpointed,
        peak_bytes=max(allocated_levels(tape, allocator.sizes_bytes)),
        reserved_bytes=allocator.reserved_bytes,
    )


def _traced(
    loop: Loop, batch: int, limit_s: float, *, is_checkpointed: bool
) -> tuple[Tape, list[str]]:
    """The tape of the loop's first steps with this batch size, and what it takes for granted;
    raise NotTracedError with the reason.
    """
    assumptions: list[str] = []
    model = loop.call.model()
    if model is None:
        raise NotTracedError("the model is gone")
    with saying_why_not_traced():
        memo: dict[int, Any] = {}
        copied = without_data(model, memo)
        if is_checkpointed:
            _put_checkpoints(copied)
        optimizers = [_without_data(optimizer, memo) for optimizer in loop.optimizers]
        with tracing_copy(model, limit_s) as trace:
            tape = _steps(_resized(loop, batch), copied, optimizers, trace, assumptions)
            if trace.unknown_kernels:
                raise NotTracedError(f"nobody knows {', '.join(sorted(trace.unknown_kernels))}")
    if tape.idle_parameters is not None:
        assumptions.append("experts are chosen equally often")
    return tape, assumptions


def _steps(
    loop: Loop,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    trace: "StepTrace",
    assumptions: list[str],
) -> Tape:
    """The tape of the first steps, as most loops do them, with a model without data; add what it
    takes for granted.
    """
    parameters = list(model.parameters())
    _note(trace, Category.BUFFERS, model.buffers())
    _note(trace, Category.PARAMETERS, parameters)
    _note(trace, Category.OPTIMIZER_STATE, _states(optimizers))
    batches = deque[object](maxlen=1)
    for _ in range(STEPS):
        trace.begin(Phase.FORWARD)
        # a loop's names keep the batch before until they have the next one
        inputs, named = loop.call.arguments()
        beside = [shape.tensor() for shape in loop.beside]
        _note(trace, Category.BUFFERS, tensors_in((inputs, named, beside)))
        batches.append((inputs, named, beside))
        with torch.autocast("cuda", loop.autocast, enabled=loop.autocast is not None):
            result = model(*inputs, **named)
            known = [*tensors_in((beside, inputs, named))]
            loss, assumption = loss_of_loop(result, loop.loss, known)
        assumptions[:] = assumption
        if loop.kept is Kept.LOSS:
            del result
        trace.begin(Phase.BACKWARD)
        if loss is None:
            raise NotTracedError("nothing that the model returns has a gradient")
        loss.backward()
        if loop.kept is Kept.BACKWARD:
            del result
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        trace.note(Category.GRADIENTS, gradients)
        trace.begin(Phase.OPTIMIZER)
        for optimizer in optimizers:
            # a scheduler replaces the method of the object by one that steps the loop's own
            type(optimizer).step(optimizer)
        trace.note(Category.OPTIMIZER_STATE, _states(optimizers))
        trace.begin(Phase.STEP)
        del gradients, inputs, named, beside, known
        if not loop.keeps_gradients:
            for parameter in parameters:
                parameter.grad = None
    tape = trace.tape()
    # a step in the steady state may place its tensors otherwise than the one before it
    tape.repeat()
    return tape


def _note(trace: "StepTrace", category: Category, tensors: Iterable[Tensor]) -> None:
    """Make tensors known to a trace that were there before it; those of the host take nothing."""
    # within a trace, tensors without data say that they are on the GPU
    known = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    for tensor in known:
        trace.tensor(tensor.untyped_storage(), str(category), tensor.element_size())
    trace.note(category, known)


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    return [tensor for optimizer in optimizers for tensor in tensors_in(optimizer.state.values())]


def loss_of_loop(
    result: Any,  # noqa: ANN401
    function: str | None,
    known: Iterable[Tensor] = (),
) -> tuple[Tensor | None, list[str]]:
    """The model's own loss, or that of the loop's function for its first result, or the sum of its
    results; and what is taken for granted.

    The target is the first of the loop's `known` tensors that has its size and type, else a tensor
    of its own.
    """
    tensors = [value for value in tensors_in((result,)) if value.requires_grad]
    numbers = [value for value in tensors if value.ndim == 0]
    if len(numbers) == 1 or not tensors:
        return loss_of(result), []
    if function is None:
        return loss_of(result), ["the loss outside of the model was not seen, and takes nothing"]
    scores, kind = tensors[0], tensors[0].dtype
    shape = [*scores.shape]
    if function in OF_CLASSES:
        if scores.ndim < IMAGE_AXES:
            scores = scores.flatten(0, -2)
        shape, kind = [*scores.shape[:1], *scores.shape[2:]], torch.int64
    # within a trace, tensors without data say that they are on the GPU
    alike = [one for one in known if one.dtype is kind and one.numel() == prod(shape)]
    on_device = [one for one in alike if one.device == scores.device]
    target = on_device[0].reshape(shape) if on_device else scores.new_empty(shape, dtype=kind)
    loss = getattr(F, function)(scores, target)
    return loss, [f"the loss outside of the model is {function}, which its code names"]


def _put_checkpoints(model: nn.Module) -> None:
    """Put each block of the model into a checkpoint, by the model's own way if it has that of
    transformers, which then keeps no keys and values; raise NotTracedError without blocks.
    """
    own_way = getattr(model, "gradient_checkpointing_enable", None)
    if callable(own_way):
        own_way(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    blocks = _blocks(model)
    if not blocks:
        raise NotTracedError("the model has no repeated blocks")
    for block in blocks:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated modules of the outermost lists: of one class each, and with parts."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        children = list(model)
        kinds = {type(child) for child in children}
        if len(children) > 1 and len(kinds) == 1 and next(children[0].children(), None) is not None:
            return children
    return [block for child in model.children() for block in _blocks(child)]


def _without_data(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy of the optimizer for the copied parameters; single numbers on the host are kept."""
    tensors = [*tensors_in((optimizer.param_groups, optimizer.defaults))]
    for parameter, state in optimizer.state.items():
        tensors += [*tensors_in([parameter, state])]
    for tensor in tensors:
        if id(tensor) not in memo and (tensor.ndim or tensor.device.type != "cpu"):
            memo[id(tensor)] = empty(tensor)
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    for name in ("state", "param_groups", "defaults"):
        setattr(copied, name, copy.deepcopy(getattr(optimizer, name), memo))
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(copied, name, OrderedDict())
    return copied


def beside_call(
    loop: Loop, tensors: Iterable[tuple[Hashable, int]]
) -> tuple[tuple[Shape, ...], int]:
    """Which of these tensors, given with their bytes, have the batch axis and are not those of the
    call; and the bytes of those that have none, as of data that stays on the device.
    """
    try:
        size, axis = loop.batch_size, loop.batch_axis
    except NotTracedError:
        return (), 0
    given = Counter(
        (shape.sizes, shape.dtype) for shape in shapes_in((loop.call.inputs, loop.call.named))
    )
    beside, constant_bytes = [], 0
    for shape, held in tensors:
        if not isinstance(shape, Shape):
            continue
        # a batch may be a view of all the data
        is_whole = 2 * shape.num_bytes >= held or held <= SMALL_BYTES
        if not is_whole or shape.sizes[axis : axis + 1] != (size,):
            constant_bytes += held
        elif given[shape.sizes, shape.dtype]:
            given[shape.sizes, shape.dtype] -= 1
        else:
            beside.append(shape)
    return tuple(beside), constant_bytes


def _resized(loop: Loop, batch: int) -> Loop:
    """The loop with another batch size."""
    size, axis = loop.batch_size, loop.batch_axis

    def resized(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Several):
            return value._replace(values=tuple(map(resized, value.values)))
        if isinstance(value, Shape) and value.sizes[axis : axis + 1] == (size,):
            sizes = (*value.sizes[:axis], batch, *value.sizes[axis + 1 :])
            return value._replace(sizes=sizes)
        return value

    call = loop.call._replace(inputs=resized(loop.call.inputs), named=resized(loop.call.named))
    return replace(loop, call=call, beside=tuple(map(resized, loop.beside)))
