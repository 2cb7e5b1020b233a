"""Hooks of a watched loop in its models and optimizers.

They change nothing that the loop computes, hold models and optimizers weakly, and are taken away
again.
"""

import contextlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from .dataless import HOOKS
from .marks import FORWARD, OPTIMIZER, Timeline
from .observer import note_trouble
from .patches import PATCHES, called
from .pauses import Pauses
from .tokens import ENOUGH_MATMULS, PassReader


class Hook:
    """Calls a method that it holds weakly; copies and pickles as a hook that does nothing.

    The copy is made of the standard library alone, so that a saved model loads where this program
    is not installed.
    """

    __slots__ = ("_call", "_owner")

    def __init__(self, method: Any) -> None:  # noqa: ANN401 (a bound method)
        self._owner, self._call = weakref.ref(method.__self__), method.__func__

    def __call__(self, *arguments: Any) -> None:  # noqa: ANN401
        # first of all, so that torch.compile traces nothing else of it
        if torch.compiler.is_compiling():
            return
        owner = self._owner()
        if owner is None:
            return
        try:
            self._call(owner, *arguments)
        except Exception as error:  # the loop of the user goes on without what this hook sees
            note_trouble(self._call, error)
            self._call = _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _nothing(*_: Any) -> None:  # noqa: ANN401
    """Stands for a method that has failed."""


class StateWithoutHooks:
    """What a hooked module is copied and pickled as: as it was before this program hooked it.

    With torch.load(weights_only=True), a user allows the classes of a model and knows of no hooks.
    A later process may also give the number of a saved hook to one of its own.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        # copy and pickle ask the object itself, and not its class
        vars(module)["__getstate__"] = self

    def __call__(self) -> Any:  # noqa: ANN401
        module = self._module()
        state = None if module is None else type(module).__getstate__(module)
        if not isinstance(state, dict):
            return state
        state = {**state}
        del state["__getstate__"]
        ours: set[int] = set()
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            ours.update(key for key, hook in state[name].items() if isinstance(hook, Hook))
        for name in HOOKS:
            items = [(key, value) for key, value in state[name].items() if key not in ours]
            state[name] = OrderedDict(items)
        return state

    def remove(self) -> None:
        """Let the module be copied and pickled as its class says."""
        module = self._module()
        if module is not None and vars(module).get("__getstate__") is self:
            del vars(module)["__getstate__"]


def without_hooks(modules: Iterable[nn.Module]) -> list[StateWithoutHooks]:
    """Copy and pickle these modules without hooks, but those that have a way of their own."""
    usual = object.__reduce_ex__, object.__reduce__
    states = []
    for module in modules:
        if (type(module).__reduce_ex__, type(module).__reduce__) == usual:
            states.append(StateWithoutHooks(module))
    return states


class ModelHooks:
    """The hooks of one model: forward is what its outermost call takes."""

    def __init__(
        self, model: nn.Module, timeline: Timeline, reader: PassReader, pauses: Pauses
    ) -> None:
        self._model = weakref.ref(model)
        self._timeline, self._reader, self._pauses = timeline, reader, pauses
        self._evaluated_ns: int | None = None
        """When an open call that trains nothing began."""
        self._opened: list[bool] = []
        """Of each open call of the model, whether it began a phase."""
        self._compiled: CompiledCall | None = None

    @property
    def model(self) -> nn.Module | None:
        """The model that is hooked; None once it is gone."""
        return self._model()

    def attach(self) -> list[Any]:
        """Hook the model, and return what takes the hooks away."""
        model = self._model()
        if model is None:
            return []
        # hooks of others are part of the call, as those of fully_shard, which gather parameters
        before = model.register_forward_pre_hook(Hook(self.begins), prepend=True, with_kwargs=True)
        after = model.register_forward_hook(Hook(self.ends), always_call=True)
        return [before, after]

    def detach(self) -> None:
        """Give back the model's compiled call."""
        model, compiled = self._model(), self._compiled
        if model is not None and compiled is not None and model._compiled_call_impl is compiled:
            model._compiled_call_impl = compiled.call
        self._compiled = None

    def forget_open(self) -> None:
        """Forget the calls that an exception has left."""
        self._opened.clear()

    def step_begins(self) -> None:
        """See the calls of a model that was compiled in place, in which no hooks run."""
        model = self._model()
        call = None if model is None else model._compiled_call_impl
        if model is not None and call is not None and call is not self._compiled:
            self._compiled = CompiledCall(call, self)
            model._compiled_call_impl = self._compiled

    def begins(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Begin forward if the module is the model itself, on the thread of the step."""
        timeline = self._timeline
        # a replica of nn.DataParallel has the same hooks
        if get_ident() != timeline.thread or module is not self._model():
            return
        has_grad = torch.is_grad_enabled()
        if not (has_grad and timeline.in_step):
            self._evaluated_ns = perf_counter_ns()
        if not timeline.in_step:
            return
        is_forward = has_grad and timeline.enter(FORWARD)
        self._opened.append(is_forward)
        if is_forward:
            self._reader.begins(self._model, inputs, named, timeline.num_marks() - 1)

    def ends(self, module: nn.Module, _inputs: Any, result: Any) -> None:  # noqa: ANN401
        """End forward where `begins` began it."""
        timeline = self._timeline
        if get_ident() != timeline.thread or module is not self._model():
            return
        if self._evaluated_ns is not None:
            self._pauses.evaluates(self._evaluated_ns, in_step=timeline.in_step)
            self._evaluated_ns = None
        if timeline.in_step and self._opened and self._opened.pop():
            timeline.leave_forward(self._reader.ends(module, result))

    def is_model(self, module: nn.Module) -> bool:
        """Whether the module is the model that is hooked."""
        return module is self._model()


class CompiledCall:
    """The call of a model that was compiled in place, seen as its hooks would see it.

    PyTorch neither copies nor pickles it with the model.
    """

    def __init__(self, call: Callable[..., Any], hooks: ModelHooks) -> None:
        self.call = call
        self._hooks = hooks

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401
        model = None if torch.compiler.is_compiling() else self._hooks.model
        if model is None:
            return self.call(*inputs, **named)
        return called([self._hooks], model, self.call, inputs, named)


class OptimizerHooks:
    """The hooks of one optimizer: its phase is what its `step` takes."""

    def __init__(self, optimizer: torch.optim.Optimizer, timeline: Timeline) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._timeline = timeline
        self._opened: list[bool] = []

    def attach(self) -> list[Any]:
        """Hook the optimizer, and return what takes the hooks away."""
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        before = optimizer.register_step_pre_hook(Hook(self.begins))
        return [before, optimizer.register_step_post_hook(Hook(self.ends))]

    def forget_open(self) -> None:
        """Forget a call that an exception has left."""
        self._opened.clear()

    def begins(self, *_: Any) -> None:  # noqa: ANN401
        """Begin the phase."""
        self._opened.append(self._timeline.enter(OPTIMIZER))

    def ends(self, *_: Any) -> None:  # noqa: ANN401
        """End the phase where `begins` began it."""
        if self._opened and self._opened.pop():
            self._timeline.leave()


def hookable(optimizer: Any) -> torch.optim.Optimizer | None:  # noqa: ANN401
    """The optimizer of PyTorch that this is or wraps, as those of Accelerate and Lightning do; None
    without one.
    """
    while optimizer is not None:
        # a wrapper may be a subclass that was never initialised as an optimizer
        if "_optimizer_step_pre_hooks" in vars(optimizer):
            assert isinstance(optimizer, torch.optim.Optimizer)
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


class Hooks:
    """All hooks of one loop."""

    def __init__(
        self,
        timeline: Timeline,
        models: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        reader: PassReader,
        pauses: Pauses,
    ) -> None:
        self.timeline, self.reader, self.pauses = timeline, reader, pauses
        self.models = [ModelHooks(model, timeline, reader, pauses) for model in models]
        updates = [OptimizerHooks(optimizer, timeline) for optimizer in optimizers]
        self._hooked: list[ModelHooks | OptimizerHooks] = [*self.models, *updates]
        self._handles: list[Any] = []
        self._of_matmuls: list[Any] = []

    def attach(self) -> None:
        """Hook everything, unless it is hooked."""
        if not self._handles:
            for hooked in self._hooked:
                self._handles += hooked.attach()
            self._handles += _before_calls(self.reader.embeddings, self.reader.embeds)
            self._handles += _before_calls(self.reader.mixers, self.reader.mixes)
            models = [model for hooks in self.models if (model := hooks.model) is not None]
            reader = self.reader
            modules = {*models, *reader.embeddings, *reader.mixers, *reader.matmuls}
            self._handles += without_hooks(modules)
            if self.reader.num_seen < ENOUGH_MATMULS:
                hook = Hook(reader.multiplies)
                for module in reader.matmuls:
                    self._of_matmuls.append(module.register_forward_hook(hook))
            self.pauses.attach()
            PATCHES.add(self)

    def detach(self) -> None:
        """Take all hooks away."""
        for handle in (*self._handles, *self._of_matmuls):
            handle.remove()
        self._handles.clear()
        for model in self.models:
            model.detach()
        PATCHES.discard(self)
        self.pauses.detach()
        self.timeline.forget()

    def step_begins(self) -> None:
        """Prepare the hooks for a step."""
        if not self._handles:
            self.attach()
        for model in self.models:
            model.step_begins()
        self.pauses.step_begins()
        if not PATCHES.has_compiler and "torch._dynamo" in sys.modules:
            PATCHES.see_compiler()
        # the compiler would compile again where a hook has gone
        if self._of_matmuls and self.reader.num_seen >= ENOUGH_MATMULS and not _has_compiled():
            self._of_matmuls.pop().remove()

    def forget_open(self) -> None:
        """Forget the calls that an exception has left open, and the pauses."""
        for hooked in self._hooked:
            hooked.forget_open()
        self.pauses.forget_open()


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return utilities is not None and bool(utilities.counters.get("frames"))


def _before_calls(modules: Iterable[nn.Module], method: Any) -> list[Any]:  # noqa: ANN401
    """Hook a method before the calls of modules, and return what takes the hooks away."""
    hook = Hook(method)
    return [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
