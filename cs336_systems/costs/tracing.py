# ruff: noqa: ANN401 (modes and hooks get whatever PyTorch passes)
"""Runs a step with meta tensors, as if it ran on a GPU, and records it.

Nothing here knows the model. The step's real code runs with meta tensors, which have shapes and
types and no data; code that asks sees them on a CUDA device. Where PyTorch's CUDA kernels or its
autocast do otherwise than its meta kernels, `on_cuda.py` and `operators.py` say so.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from importlib import import_module
from math import inf
from threading import get_ident
from time import monotonic
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .allocator import round_up
from .hopper import HOPPER, OF_THE_KIND
from .internals import (
    FakeTensor,
    TensorBase,
    address_of,
    determinism_checks,
    run_backward,
    tensor_module,
    without_modes,
)
from .on_cuda import as_on_cuda, clear_copies, without_autocast
from .operators import LAUNCHERS, one_pass
from .tape import Category, TraceError
from .trace import GPU, CudaStream, Launcher, StepTrace, tensors_in

_PLACES: dict[Any, Any] = {
    vars(TensorBase)[name].__get__: shown
    for name, shown in (("device", GPU), ("is_cuda", True), ("is_meta", False))
}
_PLACES[TensorBase.get_device] = GPU.index
"""What code that asks for a tensor's place gets to know."""


class _OnGpu(TorchFunctionMode):
    """Shows meta tensors as CUDA's, and makes CUDA's on meta."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _PLACES:
            return _PLACES[function] if args[0].device.type == "meta" else function(*args)
        kwargs = dict(kwargs or {})
        if function is torch.device:
            return function(*args, **kwargs)
        args = tuple(map(_moved, args))
        if "device" in kwargs:
            kwargs["device"] = _moved(kwargs["device"])
        if getattr(function, "__name__", "") == "cuda":
            return args[0].to("meta")
        return function(*args, **kwargs)


def _moved(device: Any) -> Any:
    is_gpu = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return torch.device("meta") if is_gpu else device


class _Gpu:
    """What a step gets to know of its GPU: what an H100 has in common with its kind. Raises
    TraceError for anything else, such as the size of its memory.
    """

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_KIND:
            return getattr(HOPPER, name)
        return _unknown(f"get_device_properties().{name}")


def _unknown(asked: str, *_: Any, **__: Any) -> Any:
    """Raise TraceError, because what a step asks of the GPU is known only where one is."""
    raise TraceError(
        f"the step asks for torch.cuda.{asked}, which a trace without a GPU does not know: let it "
        "do without, or measure it on a GPU"
    )


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: where nothing runs, there is nothing to wait for or to free."""


_CUDA: dict[str, Any] = {
    "Stream": CudaStream,
    "Event": CudaStream,
    "current_device": lambda: 0,
    "device_count": lambda: 2**20,
    "can_device_access_peer": lambda *_: True,
    "is_bf16_supported": lambda *_, **__: True,
    "get_device_properties": lambda *_: _Gpu(),
    "get_device_capability": lambda *_: (HOPPER.major, HOPPER.minor),
    "get_device_name": lambda *_: HOPPER.name,
    "init": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "reset_peak_memory_stats": _nothing,
}
_OF_MEMORY = (
    "mem_get_info",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_stats",
)
_CUDA |= {name: partial(_unknown, f"{name}()") for name in _OF_MEMORY}
"""torch.cuda of a Hopper GPU, as far as steps ask for it."""


@cache
def _is_in_place(function: Any) -> bool:
    """Whether running the operation would change nothing but data."""
    name = function.name().partition(".")[0]
    return (
        name.startswith("aten::")
        and name.endswith("_")
        and torch.Tag.inplace_view not in function.tags
    )


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The empty result of PyTorch's grouped matmul: `a` and `b` hold a factor each for every group.

    `a` is (groups, rows, inner), or has all groups one after the other: (all rows, inner) or (rows,
    all inner); `b` likewise. `offsets` (groups,) says where groups end in the axis that they share.
    The result is (groups, rows, columns) if both or none of the factors have the axis of groups,
    else (rows, columns). PyTorch's kernel for meta tensors refuses fp32, which CUDA's takes.
    """
    rows, columns = a.shape[-2], b.shape[-1]
    # rows begin at multiples of 16 bytes (create_grouped_gemm_output_tensor in GroupedMMUtils.h)
    row_stride = round_up(columns, 16 // a.element_size())
    shape: tuple[int, ...] = (rows, columns)
    strides: tuple[int, ...] = (row_stride, 1)
    if a.dim() == b.dim():
        groups = len(a) if offsets is None else len(offsets)
        shape = (groups, *shape)
        strides = (rows * row_stride, *strides)
    return torch.empty_strided(shape, strides, dtype=a.dtype, device="meta")


_META = {torch.ops.aten._grouped_mm.default: _grouped_mm}
"""Operators whose meta kernels refuse what CUDA's take."""


class _Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled; True would import torch.compile, which takes 2 s

    def __init__(self, trace: StepTrace, limit_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._limit_s, self._end_s = trace, limit_s, monotonic() + limit_s
        self._results: dict[Any, tuple[Any, Any, torch.dtype]] = {}
        """Shape, strides and type of results, as PyTorch works them out slowly, and layers
        repeat.
        """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._trace.is_engine_calling = sys._getframe(1).f_code is run_backward.__code__
        with without_modes(), without_autocast():  # tensors are meta here
            return self._run(function, types, args, kwargs)

    def _run(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if monotonic() > self._end_s:
            raise TraceError(f"{self._trace.place}tracing takes longer than {self._limit_s:g} s")
        # with which DTensor finds how results are sharded
        if any(issubclass(kind, FakeTensor) for kind in types):
            return function(*args, **(kwargs or {}))
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # such as DTensor, whose operations on its parts come here next
        if function.namespace == "c10d":
            return self._trace.collective(function, args)
        is_copy = function is torch.ops.aten.copy_.default
        if is_copy and args[1].is_meta and not args[0].is_meta:
            return args[0]  # there is no data to copy to the host
        name = function.name().split("::")[1].split(".")[0]
        out = self._trace.routing.answer(name, args)
        if out is None:
            out = self._result(function, args, kwargs or {})
        self._trace.record(name, args, kwargs or {}, out)
        return out

    def _result(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What the operation makes of meta tensors; raise TraceError if that depends on values."""
        if _is_in_place(function) and next(tensors_in(args), None) is not None:
            return args[0] if function._schema.returns else None
        key = _key_of(function, args, kwargs)
        if key in self._results:
            shape, strides, dtype = self._results[key]
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        try:
            out = _META.get(function, function)(*args, **kwargs)
            if key is not None and _is_new(out, args):
                self._results[key] = out.shape, out.stride(), out.dtype
            return out
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
                raise  # it fails with values too
            raise TraceError(
                f"{self._trace.place}{function.name()} needs the values of a tensor, so the step "
                "cannot be traced; its parameters and optimizer state can be counted nevertheless"
            ) from error


@cache
def _makes_one_tensor(function: Any) -> bool:
    """Whether the operation is PyTorch's own and returns one tensor, which is no view by its
    schema.
    """
    returns = function._schema.returns
    return (
        function.namespace == "aten"
        and len(returns) == 1
        and str(returns[0].type) == "Tensor"
        and all(argument.alias_info is None for argument in (*function._schema.arguments, *returns))
    )


def _key_of(function: Any, args: Any, kwargs: Any) -> Any:
    """What the result's shape follows from, of an operation that makes one tensor; else None.

    Values of tensors on the host, such as indices, may decide it too: they have no key.
    """
    if not _makes_one_tensor(function):
        return None
    try:
        return (function, *map(_told, args), *((name, _told(kwargs[name])) for name in kwargs))
    except (TypeError, ValueError):
        return None


def _told(value: Any) -> Any:
    """What an argument says of a result, to be compared; raise ValueError for a tensor that has
    data.
    """
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise ValueError("its values may matter")
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_told, value))
    return type(value), value


def _is_new(out: Any, args: Any) -> bool:
    """Whether the result is a tensor without data that fills memory of its own."""
    if not (isinstance(out, Tensor) and out.is_meta):
        return False
    storage = out.untyped_storage()
    given = {address_of(tensor.untyped_storage()) for tensor in tensors_in(args)}
    return out.nbytes == storage.nbytes() and address_of(storage) not in given


def _on_this_thread(instead: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    """A function that stands for `usual`, and does what `instead` does on this thread alone:
    others, such as those that load data, go on as ever.
    """
    thread = get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (instead if get_ident() == thread else usual)(*args, **kwargs)

    if isinstance(instead, type):  # annotations that are evaluated meanwhile need a class
        return type(
            instead.__name__, (), {"__new__": lambda _, *args, **named: chosen(*args, **named)}
        )
    return chosen


class _Switch:
    """What a trace patches, which is off while torch.compile looks at the model."""

    def __init__(self, turn_on: Callable[[ExitStack], None]) -> None:
        """`turn_on` enters all that is patched."""
        self._turn_on = turn_on
        self._patches: ExitStack | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """While open, everything is patched."""
        before = self._patches
        with ExitStack() as patches:
            self._turn_on(patches)
            self._patches = patches
            try:
                yield
            finally:
                self._patches = before

    @contextmanager
    def off(self) -> Iterator[None]:
        """While open, nothing is patched."""
        patches = self._patches
        assert patches is not None, "the trace has ended"
        patches.close()
        try:
            yield
        finally:
            self._turn_on(patches)


Patch = tuple[Any, str, Callable[..., Any]]
"""A module or class of PyTorch, the name of a function there, and what stands for it in a trace."""


def _patches(trace: StepTrace) -> list[Patch]:
    """All functions of PyTorch that do otherwise while a step is traced."""
    patches: list[Patch] = [
        (torch.cuda.amp.common, "amp_definitely_not_available", _never),
        (torch, "compile", lambda model=None, **_: (lambda it: it) if model is None else model),
    ]
    for name in vars(nn.init):
        if name.endswith("_") and not name.startswith("_"):
            patches.append((nn.init, name, lambda tensor, *_, **__: tensor))
    # functions written in Python run as usual, and only what they call gets to the modes
    for module in (F, tensor_module, torch.autograd, torch.functional):
        names = [name for name in vars(module) if name.startswith("has_torch_function")]
        patches += [(module, name, _never) for name in names]
    for name, function in _cuda_of(trace).items():
        patches.append((torch.cuda, name, function))
    return [*patches, *_patches_of_memory(trace)]


def _never(*_: object) -> bool:
    return False


def _no_guard(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


def _cuda_of(trace: StepTrace) -> dict[str, Callable[..., Any]]:
    """The functions of torch.cuda as steps see them that run on the GPU of the trace."""

    def is_capturing() -> bool:
        """Answer yes within modules, so that transformers does not look at values, which meta
        tensors lack.

        The answer is no where transformers decides whether it needs a mask and there is no padding
        mask. It is no outside of modules too, where optimizers of torch 2.11 would refuse to run.
        """
        # is_tracing and is_cuda_stream_capturing of transformers, and what chooses by thread, are
        # between
        asker = sys._getframe(4).f_locals
        return bool(trace.place) and asker.get("padding_mask", trace) is not None

    return {
        **_CUDA,
        "stream": trace.on_stream,
        "current_stream": lambda *_: trace.stream,
        "is_current_stream_capturing": is_capturing,
        "_DeviceGuard": _no_guard,
        "set_device": _no_guard,
    }


def _patches_of_memory(trace: StepTrace) -> list[Patch]:
    """The functions that make or free memory, or launch kernels, without an operation of PyTorch
    that a mode sees: the trace is told what they do.
    """
    clear_autocast_cache = torch.clear_autocast_cache
    resize_storage = torch.UntypedStorage.resize_

    def clear() -> None:
        clear_autocast_cache()
        clear_copies()

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> None:
        resize_storage(storage, num_bytes)
        trace.resize(storage, num_bytes)

    def run_triton(kernel: Any, *tensors: Any, **named: Any) -> None:
        with without_modes():
            trace.triton(kernel.__name__, [*tensors_in((*tensors, *named.values()))], named)

    patches: list[Patch] = [
        (torch, "clear_autocast_cache", clear),
        (torch.UntypedStorage, "resize_", resize),
    ]
    with suppress(ImportError):
        patches.append((import_module("triton.runtime.jit").JITFunction, "run", run_triton))
    return patches


def _turn_on(
    trace: StepTrace, recorder: _Recorder, patches: Iterable[Patch], opened: ExitStack
) -> None:
    """Patch PyTorch and watch the modules that run, until `opened` is closed."""
    before = modules.register_module_forward_pre_hook(_on_this_thread(trace.enter, _nothing))
    after = modules.register_module_forward_hook(
        _on_this_thread(trace.leave, _nothing), always_call=True
    )
    opened.callback(before.remove)
    opened.callback(after.remove)
    for place, name, function in patches:
        chosen = _on_this_thread(function, getattr(place, name))
        opened.enter_context(mock.patch.object(place, name, chosen))
    opened.enter_context(recorder)
    opened.enter_context(_OnGpu())


@contextmanager
def tracing(
    axes: Mapping[str, int],
    launchers: Mapping[str, Launcher] = MappingProxyType({}),
    limit_s: float = inf,
    *,
    compiles: bool = False,
) -> Iterator[StepTrace]:
    """Yield a trace that records all operations in this context, as if they ran on a GPU.

    PyTorch is patched meanwhile, for this thread: tensors of a GPU are made as meta tensors, which
    have no data, and code that asks is told that they are on a GPU. `axes` has the sizes of the
    axes that the trace describes shapes by. `launchers` has, for operators that are not PyTorch's,
    functions that note the kernels which these launch, by the operator's name. The first operation
    after `limit_s` raises TraceError. With `compiles`, torch.compile does what it does on a GPU;
    otherwise compiled functions are traced as they are.
    """
    trace = StepTrace(axes, {**LAUNCHERS, **launchers}, one_pass)
    patches = _patches(trace)
    switch = _Switch(partial(_turn_on, trace, _Recorder(trace, limit_s), patches))
    if compiles:
        from .compiling import Compiler

        patches.append((torch, "compile", Compiler(trace, switch.off, switch.on)))
    with (
        # places differ between what runs in this mode and what runs below it
        mock.patch.dict(determinism_checks, default=lambda _: None),
        as_on_cuda(lambda copy: trace.note(Category.WEIGHT_COPIES, [copy])),
        switch.on(),
    ):
        yield trace
