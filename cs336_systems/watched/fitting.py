"""What would fit: the largest batch of a watched model, plain and with checkpoints, by a trace of
two batches.
"""

import copy
import functools
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import Phase
from ..costs.fit import last_that_fits
from ..costs.memory import allocated_levels, placed
from ..costs.tape import Category, Tape, TraceError, interpolated
from ..files import in_one_line
from ..loop_record import Fit
from ..text import inert_line
from .calls import Call, Several, Shape
from .dataless import NotTracedError, empty, tracing_copy, without_data
from .flops import loss_of
from .kept_state import kept_state
from .tokens import tensors_in

if TYPE_CHECKING:
    from ..costs.trace import StepTrace

LIMIT_S = 30.0
"""Longest time that all traces of one loop may take."""
STEPS = 2
"""Steps that are traced: the optimizer makes its state in the first."""
IMAGE_AXES = 4
"""Axes of a result whose second axis are its classes; of others, the last one is."""


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
    keeps_result: bool = True
    """Whether the loop has what the model returned until the next step, as by a name."""
    keeps_gradients: bool = False
    """Whether gradients are alive in the forward pass."""

    @property
    def batch_size(self) -> int:
        """The size of the batch axis of the first tensor that has one; raise NotTracedError
        without.
        """
        for shape in _shapes_in((self.call.inputs, self.call.named)):
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
    reason: str = ""
    """Why nothing is known."""


def fitting(loop: Loop, room_bytes: int) -> Fitting:
    """The largest batches whose steps fit into what PyTorch's allocator may have."""
    end_s = monotonic() + LIMIT_S
    fits: list[Fit] = []
    batches: tuple[int, ...] = ()
    size: int | None = None
    try:
        size = loop.batch_size
        batches = max(2, size // 2), max(3, size)
        model = loop.call.model()
        with kept_state([] if model is None else [model]):
            for is_checkpointed in (False, True):
                tapes = {}
                for batch in batches:
                    limit_s = max(end_s - monotonic(), 0.0)
                    tapes[batch] = _traced(loop, batch, limit_s, is_checkpointed=is_checkpointed)
                fits.append(_largest(tapes, room_bytes, is_checkpointed=is_checkpointed))
    except NotTracedError as error:
        if not fits and not isinstance(error, NoBlocksError):
            return Fitting(batch_size=size, reason=str(error))
    return Fitting(batch_size=size, fits=tuple(fits), traced_batches=batches)


class NoBlocksError(NotTracedError):
    """The model has no repeated blocks."""


def _largest(tapes: Mapping[int, Tape], room_bytes: int, *, is_checkpointed: bool) -> Fit:
    """The largest batch that fits, by steps of two batches that were traced."""
    if len({len(tape.tensors) for tape in tapes.values()}) > 1:
        sizes = " and ".join(map(str, tapes))
        raise NotTracedError(f"steps of batches of {sizes} make different tensors")

    def tape_at(number: int) -> Tape:
        return interpolated(tapes, number)

    batch = last_that_fits(tape_at, room_bytes)
    # of a step that does not fit, what it needs is known too
    tape = tape_at(max(batch, 1))
    allocator = placed(tape)
    return Fit(
        batch_size=batch,
        is_checkpointed=is_checkpointed,
        peak_bytes=max(allocated_levels(tape, allocator.sizes_bytes)),
        reserved_bytes=allocator.reserved_bytes,
    )


def _traced(loop: Loop, batch: int, limit_s: float, *, is_checkpointed: bool) -> Tape:
    """The tape of the loop's first steps with this batch size; raise NotTracedError with the
    reason.
    """
    model = loop.call.model()
    if model is None:
        raise NotTracedError("the model is gone")
    try:
        memo: dict[int, Any] = {}
        copied = without_data(model, memo)
        if is_checkpointed:
            _put_checkpoints(copied)
        optimizers = [_without_data(optimizer, memo) for optimizer in loop.optimizers]
        call = _resized(loop, batch)
        with tracing_copy(model, limit_s) as trace:
            tape = _steps(loop, call, copied, optimizers, trace)
            if trace.unknown_kernels:
                raise NotTracedError(f"nobody knows {', '.join(sorted(trace.unknown_kernels))}")
    except NotTracedError:
        raise
    except Exception as error:  # the user's code may raise anything
        reason = str(error) if isinstance(error, TraceError) else in_one_line(error)
        raise NotTracedError(inert_line(reason)) from error
    return tape


def _steps(
    loop: Loop,
    call: Call,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    trace: "StepTrace",
) -> Tape:
    """The tape of the first steps, as most loops do them, with a model without data."""
    inputs, named = call.arguments()
    parameters = list(model.parameters())
    _note(trace, Category.BUFFERS, [*model.buffers(), *tensors_in((inputs, named))])
    _note(trace, Category.PARAMETERS, parameters)
    _note(trace, Category.OPTIMIZER_STATE, _states(optimizers))
    for _ in range(STEPS):
        trace.begin(Phase.FORWARD)
        with torch.autocast("cuda", loop.autocast, enabled=loop.autocast is not None):
            # kept until the next step has its own, unless the loop gives it no name
            result = model(*inputs, **named)
            loss = loss_of_loop(result, loop.loss)
        if not loop.keeps_result:
            del result
        trace.begin(Phase.BACKWARD)
        if loss is None:
            raise NotTracedError("nothing that the model returns has a gradient")
        loss.backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        trace.note(Category.GRADIENTS, gradients)
        trace.begin(Phase.OPTIMIZER)
        for optimizer in optimizers:
            # a scheduler replaces the method of the object by one that steps the loop's own
            type(optimizer).step(optimizer)
        trace.note(Category.OPTIMIZER_STATE, _states(optimizers))
        trace.begin(Phase.STEP)
        del gradients
        if not loop.keeps_gradients:
            for parameter in parameters:
                parameter.grad = None
    tape = trace.tape()
    # a step in the steady state may place its tensors otherwise than the one before it
    tape.repeat()
    return tape


def _note(trace: "StepTrace", category: Category, tensors: Iterable[Tensor]) -> None:
    """Make tensors known to a trace that were there before it."""
    known = [tensor for tensor in tensors if tensor.is_meta]
    for tensor in known:
        trace.tensor(tensor.untyped_storage(), str(category), tensor.element_size())
    trace.note(category, known)


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    return [tensor for optimizer in optimizers for tensor in tensors_in(optimizer.state.values())]


def loss_of_loop(result: Any, function: str | None) -> Tensor | None:  # noqa: ANN401
    """The model's own loss, or that of the loop's function for its first result, or their sum."""
    tensors = [value for value in tensors_in((result,)) if value.requires_grad]
    numbers = [value for value in tensors if value.ndim == 0]
    if len(numbers) == 1 or function is None or not tensors:
        return loss_of(result)
    made: Tensor
    if function not in OF_CLASSES:
        made = getattr(F, function)(tensors[0], torch.empty_like(tensors[0], requires_grad=False))
        return made
    scores = tensors[0]
    if scores.ndim < IMAGE_AXES:
        scores = scores.flatten(0, -2)
    shape = [*scores.shape[:1], *scores.shape[2:]]
    made = getattr(F, function)(scores, scores.new_empty(shape, dtype=torch.int64))
    return made


OF_CLASSES = ("cross_entropy", "nll_loss")
ELEMENTWISE = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
LOSSES = (*OF_CLASSES, *ELEMENTWISE)
"""Functions of torch.nn.functional that compute a loss from a result and its target."""


def function_of(kind: type[nn.Module]) -> str | None:
    """The function of a loss that is a module."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()
    words = {"bceloss": "binary_cross_entropy", "mseloss": "mse_loss", "nllloss": "nll_loss"}.get(
        words, words
    )
    words = words.replace("bcewith_logits_loss", "binary_cross_entropy_with_logits")
    for name in (words, words.removesuffix("_loss")):
        if name in LOSSES:
            return name
    return None


def _put_checkpoints(model: nn.Module) -> None:
    """Put each block of the model into a checkpoint; raise NoBlocksError without blocks."""
    blocks = _blocks(model)
    if not blocks:
        raise NoBlocksError("the model has no repeated blocks")
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


def _shapes_in(value: Any) -> Iterable[Shape]:  # noqa: ANN401
    """The tensors among described arguments."""
    if isinstance(value, Shape):
        yield value
    elif isinstance(value, Several):
        yield from _shapes_in(value.values)
    elif isinstance(value, tuple):
        for part in value:
            yield from _shapes_in(part)


def _resized(loop: Loop, batch: int) -> Call:
    """The call with another batch size."""
    size, axis = loop.batch_size, loop.batch_axis

    def resized(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Several):
            return value._replace(values=tuple(map(resized, value.values)))
        if isinstance(value, Shape) and value.sizes[axis : axis + 1] == (size,):
            sizes = (*value.sizes[:axis], batch, *value.sizes[axis + 1 :])
            return value._replace(sizes=sizes)
        return value

    return loop.call._replace(inputs=resized(loop.call.inputs), named=resized(loop.call.named))
