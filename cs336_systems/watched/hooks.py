"""Hooks of a watched loop: in its models and optimizers, in autograd and in PyTorch's DataLoader.

They change nothing that the loop computes, hold models and optimizers weakly, and are taken away
again.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._guards import TracingContext
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..config import Phase
from ..loop_record import Cause
from .marks import FORWARD, OPTIMIZER, Timeline
from .observer import note_trouble
from .pauses import Pauses
from .tokens import PassReader


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
        for name in HOOK_TABLES:
            items = [(key, value) for key, value in state[name].items() if key not in ours]
            state[name] = OrderedDict(items)
        return state

    def remove(self) -> None:
        """Let the module be copied and pickled as its class says."""
        module = self._module()
        if module is not None and vars(module).get("__getstate__") is self:
            del vars(module)["__getstate__"]


HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""The tables that a module has by the numbers of its hooks."""


def _without_hooks(modules: Iterable[nn.Module]) -> list[StateWithoutHooks]:
    """Copy and pickle these modules without hooks, but those that have a way of their own."""
    usual = object.__reduce_ex__, object.__reduce__
    states = []
    for module in modules:
        if (type(module).__reduce_ex__, type(module).__reduce__) == usual:
            states.append(StateWithoutHooks(module))
    return states


ENOUGH_MATMULS = 3
"""How often the type of a matmul is looked at; later, autocast around the model must be the same.
"""


def _nothing(*_: Any) -> None:  # noqa: ANN401
    """Stands for a method that has failed."""


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
        self._hooks = weakref.ref(hooks)

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401
        hooks = None if torch.compiler.is_compiling() else self._hooks()
        model = None if hooks is None else hooks.model
        if hooks is None or model is None:
            return self.call(*inputs, **named)
        return _called([hooks], model, self.call, inputs, named)


def _called(
    hooked: list[ModelHooks],
    model: nn.Module,
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Call what calls the model, and let its hooks see it."""
    result = None
    for hooks in hooked:
        hooks.begins(model, inputs, named)
    try:
        result = call(*inputs, **named)
    finally:
        for hooks in hooked:
            hooks.ends(model, inputs, result)
    return result


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
            models = [model for hooks in self.models if (model := hooks.model) is not None]
            modules = {*models, *self.reader.embeddings, *self.reader.matmuls}
            self._handles += _without_hooks(modules)
            if self.reader.num_seen < ENOUGH_MATMULS:
                self._of_matmuls = _before_calls(self.reader.matmuls, self.reader.multiplies)
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


class Patches:
    """Functions of PyTorch that are wrapped while any loop of this process is watched."""

    def __init__(self) -> None:
        # a loop that is forgotten ends wherever Python collects garbage, also in here
        self._lock = threading.RLock()
        self._loops: list[Hooks] = []
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        """Of each wrapped function: its owner and name, what the owner had, the wrapper."""
        self.has_compiler = False

    def add(self, loop: Hooks) -> None:
        """Watch a loop; with the first one, wrap the functions."""
        with self._lock:
            self._loops.append(loop)
            if not self._wrapped:
                self._wrap(torch.autograd, "_engine_run_backward", self._around(Phase.BACKWARD))
                self._wrap(_BaseDataLoaderIter, "__next__", self._around(Phase.DATA))
                self._wrap(DataLoader, "__iter__", self._around(Phase.DATA))
                self._wrap(torch, "save", self._save)

    def discard(self, loop: Hooks) -> None:
        """Watch a loop no more; with the last one, give the functions back."""
        with self._lock:
            if loop not in self._loops:
                return
            self._loops.remove(loop)
            if self._loops:
                return
            for owner, name, had, wrapper in self._wrapped:
                # who wrapped ours in the meantime keeps it
                if vars(owner).get(name) is wrapper:
                    if had is None:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, had)
            self._wrapped.clear()
            self.has_compiler = False

    def see_compiler(self) -> None:
        """See the calls of torch.compile's wrappers around watched models, made after `watch`."""
        from torch._dynamo.eval_frame import OptimizedModule, skip_code

        with self._lock:
            if self.has_compiler or not self._loops:
                return
            # within compiled code, these run as they are; what they call is not concerned
            for *_, wrapper in self._wrapped:
                skip_code(wrapper.__code__)
            skip_code(Patches._enter.__code__)
            skip_code(Patches._leave.__code__)
            self._wrap(OptimizedModule, "__call__", self._compiled)
            self.has_compiler = True

    def _wrap(self, owner: Any, name: str, make: Callable[..., Any]) -> None:  # noqa: ANN401
        original = getattr(owner, name)
        wrapper = functools.wraps(original)(make(original))
        self._wrapped.append((owner, name, vars(owner).get(name), wrapper))
        setattr(owner, name, wrapper)

    def _enter(self, phase: Phase) -> list[Hooks]:
        """Begin a phase in the loops of this thread, and return those that see it.

        torch.compile must not compile what this calls, where it runs within compiled code.
        """
        prior = eval_frame.set_eval_frame(None)
        try:
            seeing = []
            for loop in tuple(self._loops):
                if loop.timeline.enter(phase):
                    seeing.append(loop)
            return seeing
        finally:
            eval_frame.set_eval_frame(prior)

    def _leave(self, loops: Iterable[Hooks], of: Any) -> None:  # noqa: ANN401
        """End the phase, of a loader or of backward, in the loops that have seen it begin."""
        prior = eval_frame.set_eval_frame(None)
        try:
            for loop in loops:
                loop.timeline.leave()
                sampler = getattr(of, "_index_sampler", None)
                if sampler is not None:
                    loop.reader.loader_batch = getattr(sampler, "batch_size", None)
        finally:
            eval_frame.set_eval_frame(prior)

    def _around(self, phase: Phase) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What wraps a function so that its calls are this phase, on the thread of a loop."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*inputs: Any, **named: Any) -> Any:  # noqa: ANN401
                # the compiler traces backward while it compiles a forward pass
                if TracingContext.try_get() is not None:
                    return original(*inputs, **named)
                loops = self._enter(phase)
                try:
                    return original(*inputs, **named)
                finally:
                    self._leave(loops, next(iter(inputs), None))

            return timed

        return wrap

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*inputs: Any, **named: Any) -> Any:  # noqa: ANN401
            loops = [loop for loop in self._loops if loop.timeline.thread == get_ident()]
            for loop in loops:
                loop.pauses.begins(Cause.SAVING)
            try:
                return original(*inputs, **named)
            finally:
                for loop in loops:
                    loop.pauses.ends(Cause.SAVING)

        return save

    def _compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(wrapper: Any, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401
            if torch.compiler.is_compiling():
                return original(wrapper, *inputs, **named)
            model = wrapper._orig_mod
            models = [hooks for loop in tuple(self._loops) for hooks in loop.models]
            calls = [hooks for hooks in models if hooks.is_model(model)]
            call_wrapper = functools.partial(original, wrapper)
            return _called(calls, model, call_wrapper, inputs, named)

        return call


PATCHES = Patches()
