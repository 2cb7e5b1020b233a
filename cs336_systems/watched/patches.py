"""Functions of PyTorch that are wrapped while a loop is watched: backward, the DataLoader's,
torch.save, and the calls of compiled models.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._guards import TracingContext
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..config import Phase
from ..loop_record import Cause
from .marks import Timeline
from .pauses import Pauses
from .tokens import PassReader, batch_of


class ModelCalls(Protocol):
    """Sees the calls of one model."""

    def begins(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A call begins."""

    def ends(self, module: nn.Module, inputs: Any, result: Any) -> None:  # noqa: ANN401
        """The call ends."""

    def is_model(self, module: nn.Module) -> bool:
        """Whether the module is this model."""


class Seeing(Protocol):
    """What sees a loop."""

    timeline: Timeline
    reader: PassReader
    pauses: Pauses

    @property
    def models(self) -> Sequence[ModelCalls]:
        """Of each model, what sees its calls."""


def called(
    hooked: Iterable[ModelCalls],
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


class Patches:
    """Functions of PyTorch that are wrapped while any loop of this process is watched."""

    def __init__(self) -> None:
        # a loop that is forgotten ends wherever Python collects garbage, also in here
        self._lock = threading.RLock()
        self._loops: list[Seeing] = []
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        """Of each wrapped function: its owner and name, what the owner had, the wrapper."""
        self.has_compiler = False

    def add(self, loop: Seeing) -> None:
        """Watch a loop; with the first one, wrap the functions."""
        with self._lock:
            self._loops.append(loop)
            if not self._wrapped:
                self._wrap(torch.autograd, "_engine_run_backward", self._around(Phase.BACKWARD))
                self._wrap(_BaseDataLoaderIter, "__next__", self._around(Phase.DATA))
                self._wrap(DataLoader, "__iter__", self._around(Phase.DATA))
                self._wrap(torch, "save", self._save)

    def discard(self, loop: Seeing) -> None:
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

    def _enter(self, phase: Phase, arguments: tuple[Any, ...]) -> list[Seeing]:
        """Begin a phase in the loops of this thread, and return those that see it; `arguments` are
        those of what begins it.

        torch.compile must not compile what this calls, where it runs within compiled code.
        """
        prior = eval_frame.set_eval_frame(None)
        try:
            seeing = []
            for loop in tuple(self._loops):
                if loop.timeline.enter(phase):
                    seeing.append(loop)
                    # a model may differentiate within its forward pass, and then does so in a trace
                    if phase is Phase.BACKWARD and loop.reader.open_pass is None:
                        loop.reader.limits.see_backward(arguments)
            return seeing
        finally:
            eval_frame.set_eval_frame(prior)

    def _leave(self, loops: Iterable[Seeing], of: Any, result: Any) -> None:  # noqa: ANN401
        """End the phase, of a loader or of backward, in the loops that have seen it begin."""
        prior = eval_frame.set_eval_frame(None)
        try:
            for loop in loops:
                loop.timeline.leave()
                sampler = getattr(of, "_index_sampler", None)
                if sampler is not None:
                    size = getattr(sampler, "batch_size", None)
                    loop.reader.loader_batch = batch_of(size, result)
        finally:
            eval_frame.set_eval_frame(prior)

    def _around(self, phase: Phase) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What wraps a function so that its calls are this phase, on the thread of a loop."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*inputs: Any, **named: Any) -> Any:  # noqa: ANN401
                # the compiler traces backward while it compiles a forward pass
                if TracingContext.try_get() is not None:
                    return original(*inputs, **named)
                loops, result = self._enter(phase, inputs), None
                try:
                    result = original(*inputs, **named)
                finally:
                    self._leave(loops, next(iter(inputs), None), result)
                return result

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
            return called(calls, model, call_wrapper, inputs, named)

        return call


PATCHES = Patches()
