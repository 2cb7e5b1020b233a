"""Hooks that are in no copy of a module, and in no checkpoint of it."""

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .dataless import HOOKS
from .observer import note_trouble


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
