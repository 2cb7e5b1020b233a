"""Copies of a loop's models whose tensors have no data, on which its calls are made again."""

import copy
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..costs.trace import StepTrace

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
HOOKS_OF_WEIGHTS = "torch.nn.utils."
TRAINERS = ("lightning", "pytorch_lightning", "accelerate")
"""Libraries whose objects a model refers to without computing with them."""
WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")


class NotTracedError(Exception):
    """The FLOPs are not known; the message is the reason."""


@contextmanager
def tracing_copy(model: nn.Module, limit_s: float) -> Iterator["StepTrace"]:
    """Trace what a copy of the model does in this context; the model's classes and the states of
    random numbers are as before at the end.
    """
    from ..costs.tracing import tracing

    with (
        _kept_randomness(),
        _kept_classes(model),
        torch.enable_grad(),
        _default_device(model),
        tracing({}, limit_s=limit_s) as trace,
    ):
        yield trace


def without_data(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of the model, in training mode, whose parameters and buffers have no data; ties are
    kept, and of the hooks those that compute weights. `memo` gets what stands for each tensor.

    Raise NotTracedError where parameters are not plain tensors, as those that are sharded.
    """
    while type(model).__name__ in WRAPPERS:
        model = getattr(model, "module", None) or model._orig_mod  # type: ignore[assignment]
    memo = {} if memo is None else memo
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
            raise NotTracedError(f"the model has tensors of the class {type(tensor).__name__}")
        memo[id(tensor)] = empty(tensor)
    for module in model.modules():
        for name, value in vars(module).items():
            if name in HOOKS:
                memo[id(value)] = _kept_hooks(value)
            elif isinstance(value, Tensor):
                memo[id(value)] = empty(value)
            elif _is_shared(value):
                memo[id(value)] = value
    copied: nn.Module = copy.deepcopy(model, memo)
    # modules that are evaluated within a model that is trained stay so
    return copied if copied.training else copied.train()


def _kept_hooks(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Those of a module's hooks with which PyTorch computes its weights, as for a weight norm."""
    kept = OrderedDict()
    for key, hook in hooks.items():
        owner = hook if isinstance(hook, FunctionType) else type(hook)
        if isinstance(hook, bool) or owner.__module__.startswith(HOOKS_OF_WEIGHTS):
            kept[key] = hook
    return kept


@contextmanager
def _kept_classes(model: nn.Module) -> Iterator[None]:
    """Put back what the model's code changes in its own classes, where it may leave tensors."""
    kinds = {type(module) for module in model.modules()}
    before = {kind: dict(vars(kind)) for kind in kinds}
    try:
        yield
    finally:
        for kind, attributes in before.items():
            for name, value in dict(vars(kind)).items():
                if name not in attributes:
                    delattr(kind, name)
                elif attributes[name] is not value:
                    setattr(kind, name, attributes[name])


def _default_device(model: nn.Module) -> AbstractContextManager[object]:
    """Makes tensors without data where the code names no device and the model is on a CPU."""
    devices = {parameter.device.type for parameter in model.parameters()}
    return nullcontext() if "cuda" in devices else torch.device("meta")


def empty(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and class without data."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _is_shared(value: object) -> bool:
    """Whether the copy of the model has the very object: a trainer, which knows all of the loop."""
    return type(value).__module__.partition(".")[0] in TRAINERS


@contextmanager
def _kept_randomness() -> Iterator[None]:
    """Put the states of random numbers back at the end: PyTorch's, Python's and NumPy's."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
