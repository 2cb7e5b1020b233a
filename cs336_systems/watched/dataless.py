"""Copies of a loop's models whose tensors have no data, on which its calls are made again."""

import contextlib
import copy
import functools
import importlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..costs.tape import TraceError
from ..files import in_one_line
from ..text import inert_line
from .tokens import tensors_in

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
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
"""Classes of modules that compute what another module computes, and its name in them."""
LRU_CACHE = type(functools.lru_cache(lambda: None))
REFERRING = (FunctionType, MethodType, functools.partial, LRU_CACHE)
"""Classes of callables that may refer to modules."""


class NotTracedError(Exception):
    """The FLOPs are not known; the message is the reason."""


@contextlib.contextmanager
def saying_why_not_traced() -> Iterator[None]:
    """Context in which whatever is raised becomes a NotTracedError with the reason in one line."""
    try:
        yield
    except NotTracedError:
        raise
    except Exception as error:  # the user's code may raise anything
        reason = str(error) if isinstance(error, TraceError) else in_one_line(error)
        raise NotTracedError(inert_line(reason)) from error


class _NoneOnDevice(TorchFunctionMode):
    """Copies tensors of a GPU, wherever a model keeps them, without their data."""

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        is_copy = function in (Tensor.__deepcopy__, Tensor.clone)
        if is_copy and args[0].device.type not in ("cpu", "meta"):
            return empty(args[0])
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def tracing_copy(model: nn.Module, limit_s: float) -> Iterator["StepTrace"]:
    """Trace what a copy of the model does in this context; `kept_state` must be open."""
    # PyTorch imports it with the first matmul of a trace, and that takes longer than a trace: now,
    # so that its time does not count as the model's
    importlib.import_module("torch._dynamo")
    from ..costs.tracing import tracing

    with (
        torch.enable_grad(),
        _without_saving_hooks(),
        _without_compiled_code(),
        _default_device(model),
        tracing({}, limit_s=limit_s) as trace,
    ):
        yield trace


@contextlib.contextmanager
def _without_saving_hooks() -> Iterator[None]:
    """Let no hooks on saved tensors act in this context. Before 2.13, PyTorch leaves those of a
    checkpoint whose function has failed, and they would run the user's model again.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def without_data(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of the model, in training mode, whose parameters and buffers have no data; ties are
    kept, and of the hooks those that compute weights. `memo` gets what stands for each tensor.

    Raise NotTracedError where parameters are not plain tensors, as those that are sharded.
    """
    with _NoneOnDevice(), _as_classes_copy(model):
        copied = _Copying({} if memo is None else memo).module(model)
    # modules that are evaluated within a model that is trained stay so
    return copied if copied.training else copied.train()


@contextlib.contextmanager
def _as_classes_copy(model: nn.Module) -> Iterator[None]:
    """Let modules be copied as their classes say. A watched module is copied with the hooks that
    others have put there, which would act on the loop's own tensors.
    """
    ours = {}
    for module in model.modules():
        if (state := vars(module).pop("__getstate__", None)) is not None:
            ours[module] = state
    try:
        yield
    finally:
        for module, state in ours.items():
            vars(module)["__getstate__"] = state


class _Copying:
    """Copies modules with `deepcopy`, and the functions that they hold, which it does not copy: a
    function that refers to a module then refers to the module's copy.
    """

    def __init__(self, copies: dict[int, Any]) -> None:
        self._copies = copies
        """By the address of an object, what stands for it in the copy; deepcopy's memo."""

    def module(self, root: nn.Module) -> nn.Module:
        """The copy of a module and of what it holds."""
        modules = list(root.modules())
        for tensor in (*root.parameters(), *root.buffers()):
            if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
                raise NotTracedError(f"the model has tensors of the class {type(tensor).__name__}")
            self._copies.setdefault(id(tensor), empty(tensor))
        for module in modules:
            self._prepare(vars(module))
        # the innermost come last
        for module in reversed(modules):
            name = WRAPPERS.get(type(module).__name__)
            if name is not None:
                self._copies[id(module)] = copy.deepcopy(getattr(module, name), self._copies)
        copied: nn.Module = copy.deepcopy(root, self._copies)
        for module in modules:
            made = self._copies.get(id(module))
            if type(made) is type(module) and made is not module:
                self._refer_to_copies(vars(module), vars(made))
        return copied

    def _prepare(self, attributes: Mapping[str, Any]) -> None:
        """Decide what stands for those attributes of a module that deepcopy is not to copy."""
        for name, value in attributes.items():
            if name in HOOKS:
                self._copies[id(value)] = _kept_hooks(value)
            elif _is_shared(value):
                self._copies[id(value)] = value
            else:
                for tensor in tensors_in((value,)):
                    self._copies.setdefault(id(tensor), empty(tensor))

    def _refer_to_copies(self, original: dict[str, Any], copied: dict[str, Any]) -> None:
        """Let the functions in a copied dictionary refer to copies, also those in its lists."""
        for key, value in original.items():
            if key in HOOKS or key not in copied:
                continue
            if isinstance(value, REFERRING) or (type(value) is tuple and _has_callables(value)):
                copied[key] = self.standing_for(value)
            elif type(value) is list and copied[key] is not value and _has_callables(value):
                copied[key][:] = map(self.standing_for, value)
            elif type(value) is dict and copied[key] is not value:
                self._refer_to_copies(value, copied[key])

    def standing_for(self, value: Any) -> Any:  # noqa: ANN401
        """What a function of the copy has in the place of a value: tensors without data and copies
        of modules, also within functions, lists and dictionaries; else the value itself.
        """
        # deepcopy has copied these, but not the functions in them
        if isinstance(value, REFERRING):
            return self._callable(value)
        if type(value) is tuple:
            return tuple(map(self.standing_for, value))
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, Tensor):
            return self._copies.setdefault(id(value), empty(value))
        if isinstance(value, nn.Module):
            return self.module(value)
        if type(value) is dict:
            named = self._copies[id(value)] = {}
            named.update((key, self.standing_for(part)) for key, part in value.items())
            return named
        if type(value) is list:
            parts = self._copies[id(value)] = []
            parts.extend(map(self.standing_for, value))
            return parts
        return value

    def _callable(self, value: Any) -> Any:  # noqa: ANN401 (one of REFERRING)
        """The callable with what it refers to in the copy; of a cache only the function."""
        if isinstance(value, MethodType):
            return MethodType(self.standing_for(value.__func__), self.standing_for(value.__self__))
        if isinstance(value, functools.partial):
            inputs = map(self.standing_for, value.args)
            named = self.standing_for(dict(value.keywords))
            return functools.partial(self.standing_for(value.func), *inputs, **named)
        if isinstance(value, LRU_CACHE):
            return self.standing_for(value.__wrapped__)
        return self._copies.get(id(value)) or self._function(value)

    def _function(self, function: FunctionType) -> FunctionType:
        """The function with variables of outer functions, globals and defaults of the copy; the
        function itself if it has none that could differ.
        """
        variables = function.__closure__ or ()
        shown = function.__globals__
        modules = {
            name: self._copies[id(shown[name])]
            for name in _names_in(function.__code__)
            if isinstance(shown.get(name), nn.Module) and id(shown[name]) in self._copies
        }
        if not (variables or modules or function.__defaults__ or function.__kwdefaults__):
            return function
        copied = FunctionType(
            function.__code__,
            {**shown, **modules} if modules else shown,
            function.__name__,
            closure=tuple([CellType() for _ in variables]),
        )
        self._copies[id(function)] = copied  # before its variables, as it may refer to itself
        copied.__dict__.update(function.__dict__)
        copied.__defaults__ = self.standing_for(function.__defaults__)
        copied.__kwdefaults__ = self.standing_for(function.__kwdefaults__)
        for variable, cell in zip(variables, copied.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # raised by one that is not assigned
                cell.cell_contents = self.standing_for(variable.cell_contents)
        return copied


def _has_callables(values: Iterable[object]) -> bool:
    """Whether one of the values is a callable that may refer to modules."""
    return any(isinstance(value, REFERRING) for value in values)


def _names_in(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in the code of a function and of those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _without_compiled_code() -> contextlib.AbstractContextManager[object]:
    """Runs compiled functions as they are written, because a trace would be compiled with them."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _default_device(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Makes tensors without data where the code names no device and the model is on a CPU."""
    devices = {parameter.device.type for parameter in model.parameters()}
    return contextlib.nullcontext() if "cuda" in devices else torch.device("meta")


def _kept_hooks(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Those of a module's hooks with which PyTorch computes its weights, as for a weight norm."""
    kept = OrderedDict()
    for key, hook in hooks.items():
        owner = hook if isinstance(hook, FunctionType) else type(hook)
        if isinstance(hook, bool) or owner.__module__.startswith(HOOKS_OF_WEIGHTS):
            kept[key] = hook
    return kept


def empty(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and class without data."""
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _is_shared(value: object) -> bool:
    """Whether the copy of the model has the very object: a trainer, which knows all of the loop."""
    return type(value).__module__.partition(".")[0] in TRAINERS
