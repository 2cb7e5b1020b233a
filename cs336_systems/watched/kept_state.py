"""Keeps what a trace of somebody's model would leave behind in their program: numbers drawn at
random, attributes of classes, and tensors without data in caches.
"""

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from .dataless import LRU_CACHE
from .tokens import tensors_in

NOT_THEIRS = sys.stdlib_module_names | {"torch", __name__.partition(".")[0]}
"""Packages whose names are left alone: they keep no tensors of a model."""
MOST_ENTRIES = 1000
"""Most entries of a dictionary or a list that may be a cache of tensors."""
ONE_AT_A_TIME = threading.RLock()
"""Held while PyTorch is patched: of two traces in two threads, the one that ends last would put
back what the other one had patched, and leave all compiled code without its compiler.
"""
NOTHING = object()
"""Stands for the value of a name that there was not."""


@contextmanager
def kept_state(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put back, at the end, what the models' code changes in the program beside its own copy.

    These are the states of random numbers (PyTorch's, Python's and NumPy's) and the attributes of
    the models' classes. Functions with `lru_cache` have another cache meanwhile, on this thread
    alone, and tensors without data that came into variables, dictionaries and lists of modules and
    classes are taken out: the loop itself would get them later.
    """
    with ONE_AT_A_TIME, _kept_randomness(), _kept_names(models):
        yield


@contextmanager
def _kept_names(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put back the attributes of the models' classes, and take out tensors without data."""
    modules = _their_modules()
    kinds = {kind for model in models for part in model.modules() for kind in type(part).__mro__}
    of_models = [kind for kind in kinds if _is_theirs(kind.__module__)]
    owners = dict.fromkeys([*modules, *_classes_in(modules), *of_models])
    states = list(map(_State, owners))
    attributes = {kind: dict(vars(kind)) for kind in of_models}
    with _other_caches(owners):
        try:
            yield
        finally:
            for kind, before in attributes.items():
                _put_back(kind, before)
            for state in states:
                state.take_out_leftovers()


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] not in NOT_THEIRS


def _their_modules() -> list[ModuleType]:
    """The loaded modules of the user's program, with the libraries that it uses."""
    return [
        module
        for name, module in tuple(sys.modules.items())
        # not isinstance, which some objects answer by importing what they stand for
        if issubclass(type(module), ModuleType) and _is_theirs(name)
    ]


def _classes_in(modules: Iterable[ModuleType]) -> Iterator[type]:
    """The classes that are written in these modules."""
    for module in modules:
        for value in tuple(vars(module).values()):
            if issubclass(type(value), type) and value.__module__ == vars(module).get("__name__"):
                yield value


@contextmanager
def _kept_randomness() -> Iterator[None]:
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _put_back(owner: Any, before: dict[str, Any], names: Iterable[str] = ()) -> None:  # noqa: ANN401
    """Give a module or a class the values that it had of these names, or of all without them."""
    for name in tuple(names or vars(owner)):
        value = before.get(name, NOTHING)
        if value is NOTHING:
            delattr(owner, name)
        elif vars(owner)[name] is not value:
            setattr(owner, name, value)


class _State:
    """The variables of a module, or the attributes of a class, before a trace, with the entries of
    those that are dictionaries or lists.
    """

    def __init__(self, owner: Any) -> None:  # noqa: ANN401 (a module or a class)
        self._owner = owner
        self._values = dict(vars(owner))
        self._containers = [
            (value, value.copy())
            for value in self._values.values()
            if type(value) in (dict, list) and len(value) <= MOST_ENTRIES
        ]

    def take_out_leftovers(self) -> None:
        """Take out tensors without data that were not there before, and put back what they have
        replaced.
        """
        left = [
            name
            for name, value in tuple(vars(self._owner).items())
            if value is not self._values.get(name, NOTHING) and _has_no_data(value)
        ]
        if left:
            _put_back(self._owner, self._values, left)
        for container, before in self._containers:
            if isinstance(container, list):
                _clean_list(container, before)
            else:
                _clean_dict(container, before)


def _clean_dict(container: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key, value in tuple(container.items()):
        earlier = before.get(key, NOTHING)
        if value is earlier or not _has_no_data(value):
            continue
        if earlier is NOTHING:
            del container[key]
        else:
            container[key] = earlier


def _clean_list(container: list[Any], before: list[Any]) -> None:
    known = set(map(id, before))
    for index, value in reversed(list(enumerate(container))):
        if id(value) in known or not _has_no_data(value):
            continue
        if index < len(before):
            container[index] = before[index]
        else:
            del container[index]


def _has_no_data(value: object) -> bool:
    """Whether a value is, or has, a tensor without data."""
    if not isinstance(value, torch.Tensor | list | tuple | dict):
        return False
    return any(tensor.is_meta for tensor in tensors_in((value,)))


@contextmanager
def _other_caches(owners: Iterable[Any]) -> Iterator[None]:
    """Let the functions with `lru_cache` among these variables and attributes use an empty cache of
    their own on this thread.
    """
    replaced = []
    others: dict[int, Callable[..., Any]] = {}
    try:
        for owner in owners:
            for name, value in tuple(vars(owner).items()):
                other = _with_other_cache(value, others)
                if other is not None:
                    with contextlib.suppress(AttributeError, TypeError):  # of a class that refuses
                        setattr(owner, name, other)
                        replaced.append((owner, name, value, other))
        yield
    finally:
        for owner, name, value, other in replaced:
            if vars(owner).get(name) is other:
                setattr(owner, name, value)


def _with_other_cache(value: Any, others: dict[int, Callable[..., Any]]) -> Any:  # noqa: ANN401
    """What does as a function, a method or a property, but with another cache; None for what has
    none. `others` are those of functions, by the address of the usual one.
    """
    kind = type(value)
    if kind is LRU_CACHE:
        if id(value) not in others:
            others[id(value)] = _on_this_thread(value)
        return others[id(value)]
    if kind in (staticmethod, classmethod) and type(value.__func__) is LRU_CACHE:
        return kind(_with_other_cache(value.__func__, others))
    if kind is property and type(value.fget) is LRU_CACHE:
        return value.getter(_with_other_cache(value.fget, others))
    return None


def _on_this_thread(cached: Any) -> Callable[..., Any]:  # noqa: ANN401
    """A function that has another cache on this thread, and on others that of `cached`."""
    other = functools.lru_cache(**cached.cache_parameters())(cached.__wrapped__)
    thread = get_ident()

    @functools.wraps(cached.__wrapped__)
    def called(*inputs: Any, **named: Any) -> Any:  # noqa: ANN401
        return (other if get_ident() == thread else cached)(*inputs, **named)

    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(called, name, getattr(cached, name))
    return called
