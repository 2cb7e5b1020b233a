"""The tape of a training step that a user wrote as a function: its phases are told by the calls of
models, of autograd and of optimizers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from ..config import Phase
from ..costs.internals import current_node, internal
from ..costs.tape import Category, Tape, TraceError
from ..costs.trace import StepTrace, has_parameters

STEPS = 2
"""Steps that are traced: the optimizer makes its state in the first."""


def own_steps(step: Callable[[], object], trace: StepTrace) -> Tape:
    """The tape of the first calls of a step; raise TraceError for one that leaves the GPU alone."""
    watched = _Phases(trace)
    with watched.told(), as_if_available():
        for _ in range(STEPS):
            trace.begin(Phase.FORWARD)
            # kept until the next step has its own, as by a loop's name
            result = step()
            trace.begin(Phase.STEP)
            trace.note_graphs()
    tape = trace.tape()
    del result
    begin = tape.steps[-1][0][1]
    allocates = any(event >= 0 for event in tape.events[begin:])
    if not allocates:
        raise TraceError("the step makes no tensor on a GPU: let it name the device cuda")
    return tape


def as_if_available() -> AbstractContextManager[object]:
    """While open, code that asks whether there is a GPU is told so."""
    return mock.patch.object(torch.cuda, "is_available", return_value=True)


class _Phases:
    """Tells a trace which phase begins, and what tensors are for."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self.models: list[nn.Module] = []
        """The outermost modules that are called."""

    @contextmanager
    def told(self) -> Iterator[None]:
        """While open, calls of models, of autograd and of optimizers begin phases."""
        run = internal("torch.autograd._engine_run_backward")

        def run_backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            """Run backward, as a phase of the step."""
            self._trace.begin(Phase.BACKWARD)
            try:
                return run(*args, **kwargs)
            finally:
                for model in self.models:
                    note_gradients(self._trace, model)

        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(torch.autograd, "_engine_run_backward", run_backward)
            )
            hooks = [
                nn.modules.module.register_module_forward_pre_hook(self._enter),
                nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
                optimizers.register_optimizer_step_pre_hook(self._update),
                optimizers.register_optimizer_step_post_hook(self._note_state),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
            yield

    def _enter(self, module: nn.Module, _: object) -> None:
        """Begin a forward pass, if a model is called from outside; checkpoints call from within
        backward.
        """
        if not self._is_model(module, depth=1):
            return
        self._trace.begin(Phase.FORWARD)
        if not any(module is model for model in self.models):
            self.models.append(module)
            self._trace.note_named(Category.PARAMETERS, module.named_parameters())
            self._trace.note_named(Category.BUFFERS, module.named_buffers())

    def _leave(self, module: nn.Module, *_: object) -> None:
        """End the pass of a model: what follows is another part of forward."""
        if self._is_model(module, depth=0):
            self._trace.begin(Phase.FORWARD)

    def _is_model(self, module: nn.Module, depth: int) -> bool:
        """Whether a module is a model that the step itself calls."""
        is_outermost = current_node() is None and self._trace.depth == depth
        return is_outermost and has_parameters(module)

    def _update(self, *_: object) -> None:
        """Begin the update of an optimizer."""
        self._trace.begin(Phase.OPTIMIZER)

    def _note_state(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note the state of an optimizer that has updated its parameters."""
        note_state(self._trace, optimizer.state, self.models)


def note_gradients(trace: StepTrace, model: nn.Module) -> None:
    """Tell the trace which tensors are gradients, and of which modules."""
    gradients = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients.append((name, parameter.grad))
    trace.note_named(Category.GRADIENTS, gradients)


def note_state(
    trace: StepTrace, states: Mapping[Tensor, dict[str, Any]], models: Iterable[nn.Module]
) -> None:
    """Tell the trace which tensors are an optimizer's state, and of which modules' parameters."""
    names: dict[Tensor, str] = {}
    for model in models:
        names |= {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in states.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        if parameter in names:
            trace.note_named(
                Category.OPTIMIZER_STATE, [(names[parameter], tensor) for tensor in tensors]
            )
        else:
            trace.note(Category.OPTIMIZER_STATE, tensors)
