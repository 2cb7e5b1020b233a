# ruff: noqa: ANN401 (modes and hooks get whatever PyTorch passes)
"""Traces a step: the tensors that it makes and frees and the operations that it launches, as a
Tape.

Nothing here knows the model. The step's real code runs with meta tensors, which have shapes and
types and no data; code that asks sees them on a CUDA device. Where PyTorch's CUDA kernels or its
autocast do otherwise than its meta kernels, `on_cuda.py` and the tables below say so, each entry
with its place in PyTorch's source.
"""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import Phase
from .on_cuda import HALF, as_on_cuda, clear_copies, without_autocast
from .routing import Routing
from .tape import Category, Form, Names, OperationKey, Pass, Tape, TensorKey, TraceError, path_of

CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""PyTorch's default on a Hopper GPU, `:4096:8`, for each thread that calls cuBLAS: Python's and
autograd's.

Other GPUs get 8,519,680 bytes. With this size, predicted peaks of inference on an H200 are right to
the byte.
"""
GPU = torch.device("cuda", 0)
_PLACES = {
    vars(torch._C.TensorBase)[name].__get__: shown
    for name, shown in (("device", GPU), ("is_cuda", True), ("is_meta", False))
}
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
        args = tuple(_moved(each) for each in args)
        if "device" in kwargs:
            kwargs["device"] = _moved(kwargs["device"])
        if getattr(function, "__name__", "") == "cuda":
            return args[0].to("meta")
        return function(*args, **kwargs)


def _moved(device: Any) -> Any:
    is_gpu = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return torch.device("meta") if is_gpu else device


# ---- what is recorded


def _tensors(value: Any) -> Iterator[Tensor]:
    """The meta tensors in a value, or in lists and tuples of values."""
    if isinstance(value, Tensor):
        if value.is_meta:
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


SILENT = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "lift_fresh",
    ]
)
"""Operations beside views that launch no kernel."""
LOOKUPS = frozenset(["embedding", "index", "index_select", "gather"])
MATMULS = frozenset(["mm", "addmm", "bmm", "baddbmm"])


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that was dispatched, or a kernel in Triton that was launched."""

    name: str
    ins: Sequence[Tensor]
    """The tensors among its arguments."""
    outs: Sequence[Tensor]
    args: Any
    """All arguments of an operation in order, and those of a kernel in Triton that have names."""


Kernel = Callable[["Trace", Call], None]
"""Notes what a call launches."""


class Trace:
    """Collects what is dispatched; `tape()` makes a Tape of it."""

    def __init__(
        self, axes: Mapping[str, int], kernels: Mapping[str, Kernel] = MappingProxyType({})
    ) -> None:
        self.axes, self.names = axes, Names(axes)
        self.kernels = {**_KERNELS, **kernels}
        """Functions that note what an operation launches, by its name; _pass notes that of all
        others.
        """
        self.routing = Routing()
        self.made: list[list[Any]] = []
        """Of each tensor by its handle: category or None, label, shape, bytes per element,
        stream; phase.
        """
        self.events: list[int] = []
        self.launches: list[int] = []
        self.steps: list[list[tuple[Phase, int, int]]] = []
        self.phase: Phase | None = None
        self._operations: dict[OperationKey, int] = {}
        self._views = 0
        self._shapes: dict[tuple[int, int], tuple[str, int]] = {}
        self._handles: dict[int, int | None] = {}
        """Handles of storages that exist, by their address."""
        self._watches: dict[int, Any] = {}
        self._positions: dict[int, range] = {}
        """The values in storages that `arange` has filled, and of sums with these, by their
        address.
        """
        self._threads: set[str] = set()
        """Threads that have cuBLAS's workspace."""
        self.main_stream = self.stream = _Stream()
        self._streams: dict[int, str] = {}
        self.places: list[str | None] = []
        self._paths: list[str] = []
        self._path_changes: tuple[list[int], list[str | None]] = [], []
        """Sequence numbers of autograd's next node, and the module that runs from there on."""
        self._names: dict[int, str] = {}

    @property
    def is_first_forward(self) -> bool:
        """Whether the first step's forward runs."""
        return len(self.steps) == 1 and self.phase is Phase.FORWARD

    @property
    def place(self) -> str:
        """The module that runs, for messages."""
        return f"{self._paths[-1] or 'the model'}: " if self._paths else ""

    # phases

    def begin(self, phase: Phase) -> None:
        """Begin a phase of a step; forward begins a step."""
        self._views = 0
        self.phase = phase
        if phase is Phase.FORWARD:
            self.steps.append([])
        if self.steps:
            self.steps[-1].append((phase, len(self.events), len(self.launches)))

    def note(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Say what these tensors are for."""
        for tensor in tensors:
            own = getattr(tensor, "_local_tensor", tensor)  # a DTensor's part on this rank
            if (handle := self._handles.get(own.untyped_storage()._cdata)) is not None:
                self.made[handle][0] = category

    # streams

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """While open, tensors are made on this stream; None stands for the one that is in use."""
        before, self.stream = self.stream, self.stream if stream is None else stream
        try:
            yield
        finally:
            self.stream = before

    def _name_of_stream(self) -> str:
        if self.stream is self.main_stream:
            return ""
        return self._streams.setdefault(id(self.stream), f"stream {len(self._streams) + 1}")

    # modules

    def enter(self, module: Any, _: Any) -> None:
        if not self._paths and id(module) not in self._names:
            self._names = {id(each): path_of(name) for name, each in module.named_modules()}
        self._paths.append(self._names.get(id(module), self._paths[-1] if self._paths else ""))
        self._note_path()

    def leave(self, _: Any, __: Any, out: Any) -> None:
        self._paths.pop()
        self._note_path()
        if not self._paths:
            with torch._C.DisableTorchFunction():
                self.note(Category.LOSS, _tensors(out))

    def _note_path(self) -> None:
        numbers, paths = self._path_changes
        numbers.append(torch._C._autograd._get_sequence_nr())
        paths.append(self._paths[-1] if self._paths else None)

    def _path(self) -> str | None:
        """The module that runs; in backward, the one whose forward made the node that runs."""
        node = (
            torch._C._current_autograd_node()
            if self.phase is Phase.BACKWARD and not self._paths
            else None
        )
        if node is None:
            return self._paths[-1] if self._paths else None
        numbers, paths = self._path_changes
        place = bisect_right(numbers, node._sequence_nr())
        return paths[place - 1] if place else None

    # tensors

    def tensor(
        self,
        storage: torch.UntypedStorage,
        label: str,
        element_bytes: int,
        shape: str | None = None,
    ) -> int | None:
        """The handle of a storage; None if it is empty."""
        key = storage._cdata
        if key not in self._handles:
            self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))
            size = storage.nbytes()
            self._handles[key] = self.add(None, label, size, element_bytes, shape) if size else None
        return self._handles[key]

    def _forget(self, key: int) -> None:
        self._positions.pop(key, None)
        self._drop(key)
        del self._handles[key], self._watches[key]

    def _drop(self, key: int) -> None:
        if (handle := self._handles[key]) is not None:
            self.events.append(~handle)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Note that a storage is emptied, or filled again, as those of sharded parameters are."""
        key = storage._cdata
        if key in self._handles:
            self._drop(key)
            self._handles[key] = (
                self.add(Category.GATHERED, "resized storage", num_bytes, 1, None)
                if num_bytes
                else None
            )

    def add(
        self,
        category: Category | None,
        label: str,
        num_bytes: int,
        element_bytes: int,
        shape: str | None,
    ) -> int:
        handle = len(self.made)
        size = self.bytes_of(num_bytes, element_bytes) if shape is None else (shape, element_bytes)
        self.made.append(
            [category, label, *size, self._name_of_stream(), self.phase, bool(self._paths)]
        )
        self.events.append(handle)
        return handle

    def workspace(self, label: str, shape: str, element_bytes: int) -> None:
        """A tensor that exists only within a kernel."""
        self.events.append(~self.add(Category.TEMPORARIES, label, 0, element_bytes, shape))

    def bytes_of(self, num_bytes: int, element_bytes: int) -> tuple[str, int]:
        """Bytes as a shape and the bytes of its elements, with as many axes in the shape as
        there are.
        """
        key = num_bytes, element_bytes
        if key not in self._shapes:
            self._shapes[key] = self._bytes_of(*key)
        return self._shapes[key]

    def _bytes_of(self, num_bytes: int, element_bytes: int) -> tuple[str, int]:
        of_elements, of_bytes = (
            self.names.product(num_bytes // element_bytes),
            self.names.product(num_bytes),
        )
        if num_bytes % element_bytes == 0 and _count_axes(of_elements) >= _count_axes(of_bytes):
            return of_elements, element_bytes
        number, *axes = of_bytes.split()
        return " ".join(axes), int(number)

    def moved(self, tensor: Tensor) -> tuple[str, int]:
        """The shape of a tensor, in which axes that are expanded count once, and its bytes per
        element.
        """
        count = prod(
            size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
        )
        return self.bytes_of(count * tensor.element_size(), tensor.element_size())

    # operations

    def launch(self, make: str, *arguments: Any) -> None:
        key = (self._views, make, *arguments)
        self.launches.append(self._operations.setdefault(key, len(self._operations)))
        self.places.append(self._path())
        self._views = 0

    def record(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        outs, ins = [*_tensors(out)], [*_tensors((args, *kwargs.values()))]
        if not outs and not ins:
            return
        name = function.name().split("::")[1].split(".")[0]
        node = torch._C._current_autograd_node() if self.phase is Phase.BACKWARD else None
        word = name.strip("_")
        label = (
            f"{word} in {self._paths[-1]}"
            if self._paths
            else word
            if node is None
            else f"{word} of {node.name()}"
        )
        known = len(self.made)
        if name == "_scaled_dot_product_efficient_attention":  # pads the sums (cuda/attention.cu)
            batch, heads, queries, _ = outs[0].shape
            padded = f"{self.names.product(batch * heads)} {self.names.product(queries)}^32"
            self.tensor(outs[1].untyped_storage(), label, 4, padded)
            outs = outs[:2]  # seeds are on the host
        self._follow_positions(name, args, outs)
        handles = [
            self.tensor(each.untyped_storage(), label, each.element_size(), self._sizes_of(each))
            for each in outs
        ]
        if (
            all(handle is None or handle < known for handle in handles)
            and not name.endswith("_")
            and outs
        ):
            self._views += 1
            return
        if name in SILENT:
            self._views += 1
            return
        self.kernels.get(name, _pass)(self, Call(name, ins, outs, args))

    def _sizes_of(self, tensor: Tensor) -> str | None:
        """The sizes of a new tensor as they are, if no names stand for them."""
        is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        return " ".join(map(str, tensor.shape)) if is_whole and not self.axes else None

    def _follow_positions(self, name: str, args: Any, outs: Sequence[Tensor]) -> None:
        """Know the positions of tokens, which are no data, and refuse those that a table does
        not have.
        """
        if name == "arange" and all(isinstance(each, int) for each in args):
            self._positions[outs[0].untyped_storage()._cdata] = range(*args)
        elif name == "add" and isinstance(args[1], int) and (before := self._values(args[0])):
            moved = range(before.start + args[1], before.stop + args[1], before.step)
            if len(moved) == outs[0].numel():  # which it is not if the positions are repeated
                self._positions[outs[0].untyped_storage()._cdata] = moved
        elif name.endswith("_") and args and isinstance(args[0], Tensor):
            self._positions.pop(args[0].untyped_storage()._cdata, None)
        elif name in ("embedding", "index"):
            indices = args[1] if name == "index" else args[1:2]
            for rows, index in zip(args[0].shape, indices, strict=False):
                if (values := self._values(index)) and max(values[0], values[-1]) >= rows:
                    raise IndexError(
                        f"{self.place}a table of {rows:,} rows has no position "
                        f"{max(values[0], values[-1]):,}"
                    )

    def _values(self, tensor: Tensor | None) -> range:
        """The values from the first to the last of a tensor's; none if they are not known."""
        if tensor is None:
            return range(0)
        values = self._positions.get(tensor.untyped_storage()._cdata, range(0))
        first, steps = tensor.storage_offset(), zip(tensor.shape, tensor.stride(), strict=True)
        return values[first : first + 1 + sum((size - 1) * stride for size, stride in steps)]

    def triton(self, name: str, tensors: Sequence[Tensor], named: Mapping[str, Any]) -> None:
        """A kernel in Triton; one without an entry reads or writes each of its tensors once."""
        if name in self.kernels:
            self.kernels[name](self, Call(name, tensors, (), named))
        else:
            self.moves(tensors)

    def moves(self, tensors: Sequence[Tensor]) -> None:
        """Launch a kernel that reads or writes these tensors, each as often as it is given."""
        self.launch("passes", _moves(self, tensors), Pass.COPY)

    def collective(self, function: Any, args: Any) -> Any:
        """A collective among ranks that are not there, which takes no time and changes nothing."""
        work = FakeWork().boxed()
        returns = [each.type.str() for each in function._schema.returns]
        tensors = [each for each in args if isinstance(each, (list, Tensor))]
        made = [work if "Work" in kind else tensors[0] for kind in returns]
        return made[0] if len(made) == 1 else tuple(made)

    def tape(self) -> Tape:
        """The tape of all that was recorded."""
        kinds: dict[TensorKey, int] = {}
        tensors = []
        for category, label, shape, element_bytes, stream, phase, in_module in self.made:
            key = (category or _category(phase, in_module), label, shape, element_bytes, stream)
            tensors.append(kinds.setdefault(key, len(kinds)))
        tape = Tape(self.axes, [*kinds], [*self._operations])
        tape.tensors, tape.events, tape.launches, tape.steps = (
            tensors,
            [*self.events],
            [*self.launches],
            self.steps,
        )
        if self.routing.is_assumed:
            tape.idle_parameters = round(self.routing.idle_parameters)
        return tape

    def matmul(
        self, form: Form, sides: tuple[int, int, int], element_bytes: int, batch: int = 1
    ) -> None:
        """Launch a matmul, or a batch of them, of (rows, inner) by (inner, columns) matrices."""
        self.launch(
            "matmul",
            form,
            *map(self.names.product, sides),
            element_bytes,
            self.names.product(batch),
        )
        self.claim_workspace()

    def attention(
        self, form: Form, batch: int, sides: tuple[int, int, int], element_bytes: int
    ) -> None:
        """Launch fused attention of so many heads in all, with the sides of its scores."""
        tensors = 4 if form is Form.ATTENTION else 8
        moved = (self.names.product(batch * sides[0] * sides[1]),) * tensors
        self.launch(
            "attention",
            form,
            *map(self.names.product, sides),
            element_bytes,
            self.names.product(batch),
            moved,
        )

    def claim_workspace(self) -> None:
        """Make cuBLAS's workspace at the first matmul of a thread; it is never freed."""
        thread = "backward" if self.phase is Phase.BACKWARD else "forward"
        if thread not in self._threads:
            self._threads.add(thread)
            self.add(
                Category.LIBRARY_WORKSPACE, "cuBLAS workspace", 0, 1, str(CUBLAS_WORKSPACE_BYTES)
            )


def _category(phase: Phase | None, in_module: bool) -> Category:
    """What a tensor is for, by when it was made, if nobody has said."""
    if phase is None:
        return Category.BUFFERS
    if phase is Phase.OPTIMIZER:
        return Category.OPTIMIZER_WORKSPACE
    if in_module:
        return Category.ACTIVATIONS
    return Category.LOSS if phase is Phase.FORWARD else Category.TEMPORARIES


def _moves(trace: Trace, tensors: Iterable[Tensor]) -> tuple[tuple[str, int], ...]:
    return tuple(map(trace.moved, tensors))


def _count_axes(shape: str) -> int:
    return sum(not word.isdigit() for word in shape.split())


def _pass(trace: Trace, call: Call) -> None:
    """Any operation without an entry: one kernel that reads its arguments and writes its
    results.
    """
    name, ins, outs = call.name, call.ins, call.outs or call.ins[:1]
    if name in LOOKUPS:
        ins = outs  # of what they read from, as many elements as they write
    elif name.startswith("nll_loss"):
        ins = ()  # they read or write one element of each row, and backward writes zeros
    ins = [*{id(each): each for each in ins}.values()]
    how = Pass.COPY
    widest = max((each.element_size() for each in ins), default=8)
    if "softmax" in name and "log" not in name:
        how = Pass.SOFTMAX
    elif name == "masked_fill_":
        how = Pass.MASKED
    elif name in ("clone", "copy_", "_to_copy") and ins and ins[-1].stride() != outs[0].stride():
        how = Pass.STRIDED
    elif outs and outs[0].element_size() > widest:
        how = Pass.WIDEN
    trace.launch("passes", _moves(trace, [*ins, *outs]), how)


def _matmul(trace: Trace, call: Call) -> None:
    a, b = call.ins[-2:]
    is_transposed = [x.stride(-2) == 1 and x.shape[-2] > 1 for x in (a, b)]
    form = Form.FORWARD if is_transposed[1] else Form.WEIGHT if is_transposed[0] else Form.INPUT
    sides = a.shape[-2], a.shape[-1], b.shape[-1]
    trace.matmul(form, sides, a.element_size(), batch=len(a) if a.dim() == 3 else 1)
    if trace.is_first_forward and sides[0] in trace.routing.counts:
        trace.routing.note_experts(sides[0], b.numel())


def _grouped_matmul(trace: Trace, call: Call) -> None:
    """Matmuls of groups, the experts, whose sizes are data: they are taken to be as equal as
    they can be.
    """
    a, b = call.ins[:2]
    sides = [a.shape[-2], a.shape[-1], b.shape[-1]]
    form = Form.FORWARD if b.stride(-2) == 1 else Form.WEIGHT if a.stride(-2) == 1 else Form.INPUT
    groups = next(len(each) for each in (b, a, call.outs[0]) if each.dim() == 3)
    if a.dim() == b.dim() == 3:
        trace.matmul(form, (sides[0], sides[1], sides[2]), a.element_size(), groups)
        return
    trace.routing.is_assumed = True
    divided = 1  # in the gradients of weights, the rows of all tokens are the inner side
    if a.dim() != b.dim():
        divided = 0 if a.dim() == 2 else 2
    if trace.is_first_forward:
        trace.routing.note_experts(Fraction(sides[divided], groups), b.numel())
    least, more = divmod(sides[divided], groups)
    for size, count in ((least, groups - more), (least + 1, more)):
        sides[divided] = size
        if size and count:
            trace.matmul(form, (sides[0], sides[1], sides[2]), a.element_size(), count)


def _attention_kernel(trace: Trace, call: Call) -> None:
    q, k = call.ins[:2]
    trace.attention(
        Form.ATTENTION,
        q.shape[0] * q.shape[1],
        (q.shape[2], q.shape[3], k.shape[2]),
        q.element_size(),
    )


def _attention_backward_kernel(trace: Trace, call: Call) -> None:
    """Flash sums the queries' gradient in fp32 (flash_attn/flash_api.cpp); the efficient kernel
    multiplies output and gradient (cuda/attention_backward.cu). cuDNN's workspace is not
    documented; that of flash is assumed.
    """
    q, k = call.ins[1:3]
    batch, heads, queries, d_head = q.shape
    rows = f"{trace.names.product(batch * heads)} {trace.names.product(queries)}^128"
    trace.workspace("row sums of output x gradient", rows, 4)
    padded = f"{rows} {trace.names.product(d_head)}^32"
    trace.workspace(
        "workspace of fused attention",
        padded if q.dtype in HALF else trace.names.product(q.numel()),
        4,
    )
    trace.attention(
        Form.ATTENTION_BACKWARD, batch * heads, (queries, d_head, k.shape[2]), q.element_size()
    )


def _softmax_backward(trace: Trace, call: Call) -> None:
    """CUDA multiplies gradient and output first (softmax_backward_cuda_out in
    aten/src/ATen/native/cuda/SoftMax.cu).
    """
    gradient, output = call.ins[:2]
    trace.workspace("gradient x softmax", *trace.moved(gradient))
    trace.launch("passes", _moves(trace, [gradient, output, gradient]), Pass.COPY)
    trace.launch("passes", _moves(trace, [gradient, output, call.outs[0]]), Pass.COPY, 1, 0)


def _norm_backward(trace: Trace, call: Call) -> None:
    """One kernel for the gradient of the input, one for those of the parameters
    (cuda/layer_norm_kernel.cu).
    """
    trace.launch("passes", _moves(trace, [*call.ins[:2], call.outs[0]]), Pass.COPY)
    trace.launch("passes", _moves(trace, call.ins[:2]), Pass.COPY, 1, 0)


def _foreach(trace: Trace, call: Call) -> None:
    """A pass over lists of tensors, of which one may be given twice."""
    lists = {
        id(each[0]): each
        for each in call.args
        if isinstance(each, (list, tuple)) and [*_tensors(each)]
    }
    if lists:
        first = next(iter(lists.values()))
        shapes = tuple(trace.names.product(each.numel()) for each in first)
        trace.launch("foreach", len(lists) + 1, first[0].element_size(), shapes)


_KERNELS: Mapping[str, Kernel] = {
    **dict.fromkeys(MATMULS, _matmul),
    "_grouped_mm": _grouped_matmul,
    "_scaled_grouped_mm": _grouped_matmul,
    "_scaled_dot_product_flash_attention": _attention_kernel,
    "_scaled_dot_product_flash_attention_backward": _attention_backward_kernel,
    "_scaled_dot_product_cudnn_attention": _attention_kernel,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward_kernel,
    "_scaled_dot_product_efficient_attention": _attention_kernel,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward_kernel,
    "_softmax_backward_data": _softmax_backward,
    "rms_norm_backward": _norm_backward,
    "native_layer_norm_backward": _norm_backward,
    "_fused_adamw_": lambda trace, call: trace.launch(
        "adamw", 28, tuple(trace.names.product(each.numel()) for each in call.args[0])
    ),
    **{
        f"_foreach_{each}": _foreach
        for each in (
            "mul_",
            "add_",
            "lerp_",
            "addcmul_",
            "sqrt",
            "div_",
            "addcdiv_",
            "sub_",
            "neg",
            "reciprocal_",
        )
    },
}


class _Stream:
    """Stands for a CUDA stream or event."""

    device = GPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> "_Stream":
        return self

    wait_stream = wait_event = record = record_event = synchronize = wait


_CUDA: dict[str, Any] = {
    "Stream": _Stream,
    "Event": _Stream,
    "current_device": lambda: 0,
    "device_count": lambda: 2**20,
    "can_device_access_peer": lambda *_: True,
    "is_bf16_supported": lambda *_, **__: True,
    "get_device_properties": lambda *_: SimpleNamespace(
        multi_processor_count=132, major=9, minor=0
    ),
    "get_device_capability": lambda *_: (9, 0),
}
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
    """CUDA takes fp32 too, and aligns rows to 16 bytes (create_grouped_gemm_output_tensor in
    GroupedMMUtils.h).
    """
    groups = [len(offsets if offsets is not None else a)] if a.dim() == b.dim() else []
    rows, columns, multiple = a.shape[-2], b.shape[-1], 16 // a.element_size()
    width = -(-columns // multiple) * multiple
    shape, strides = (*groups, rows, columns), (*[rows * width for _ in groups], width, 1)
    return torch.empty_strided(shape, strides, dtype=a.dtype, device="meta")


_META = {torch.ops.aten._grouped_mm.default: _grouped_mm}
"""Operators whose meta kernels refuse what CUDA's take."""


class _Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch would import its compiler, for 2 s

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._forms: dict[Any, list[Any]] = {}
        """Of the new tensors that an operation makes, by what it is given."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction(), without_autocast():  # tensors are meta here
            return self._run(function, types, args, kwargs)

    def _run(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # with which DTensor finds how results are sharded
        if any(issubclass(each, FakeTensor) for each in types):
            return function(*args, **(kwargs or {}))
        if any(each not in (Tensor, nn.Parameter) for each in types):
            return NotImplemented  # such as DTensor, whose operations on its parts come here next
        if function.namespace == "c10d":
            return self._trace.collective(function, args)
        if function is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # there is no data to copy to the host
        name = function.name().split("::")[1].split(".")[0]
        if (answer := self._trace.routing.answer(name, args)) is not None:
            self._trace.record(function, args, kwargs or {}, answer)
            return answer
        try:
            if _is_in_place(function) and next(_tensors(args), None) is not None:
                out = args[0] if function._schema.returns else None
            else:
                out = self._result(function, args, kwargs or {})
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
                raise  # it fails with values too
            raise TraceError(
                f"{self._trace.place}{function.name()} needs the values of a tensor, so the step "
                "cannot be traced; its parameters and optimizer state can be counted nevertheless"
            ) from error
        self._trace.record(function, args, kwargs or {}, out)
        self._trace.routing.note(name, [*_tensors(args)], args, [*_tensors(out)])
        return out

    def _result(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What the operation makes: most come again in each layer, and PyTorch takes far longer
        to find its form.
        """
        key = function, _form_of((args, *kwargs.items()))
        if forms := self._forms.get(key):
            made = [
                torch.empty_strided(size, strides, dtype=dtype, device="meta")
                for size, strides, dtype, _ in forms
            ]
            return made[0] if len(made) == 1 else tuple(made)
        out = _META.get(function, function)(*args, **kwargs)
        outs, ins = out if isinstance(out, tuple) else (out,), [*_tensors((args, *kwargs.values()))]
        if all(isinstance(each, Tensor) and each.is_meta and not each.is_conj() for each in outs):
            new = {
                each.untyped_storage()._cdata
                for each in outs
                if each.nbytes == each.untyped_storage().nbytes()
            }
            is_new = len(new.difference(each.untyped_storage()._cdata for each in ins)) == len(outs)
            self._forms[key] = [*map(_form_of, outs)] if is_new else []
        return out


def _form_of(value: Any) -> Any:
    """All of an argument that decides what an operation on meta tensors makes."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return (*map(_form_of, value),) if isinstance(value, (list, tuple)) else (type(value), value)


@contextmanager
def tracing(
    axes: Mapping[str, int], kernels: Mapping[str, Kernel] = MappingProxyType({})
) -> Iterator[Trace]:
    """While open, all that runs is recorded, as if it ran on a GPU; `kernels` are those of own
    operators, by name.
    """
    trace = Trace(axes, kernels)
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        clear()
        clear_copies()

    def never(*_: object) -> bool:
        return False

    def is_capturing() -> bool:
        """What transformers asks before it looks at values: yes, unless it asks whether to mask
        without any padding.

        Outside of modules no: optimizers of torch 2.11 would refuse to run.
        """
        asks = sys._getframe(3).f_locals  # is_cuda_stream_capturing and is_tracing are between
        return bool(trace.place) and asks.get("padding_mask", trace) is not None

    resize_storage = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> None:
        resize_storage(storage, num_bytes)
        trace.resize(storage, num_bytes)

    def run_triton(kernel: Any, *tensors: Any, **named: Any) -> None:
        with torch._C.DisableTorchFunction():
            trace.triton(kernel.__name__, [*_tensors((*tensors, *named.values()))], named)

    initialisers = [
        name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")
    ]
    harmless: dict[str, Any] = dict.fromkeys(initialisers, lambda tensor, *_, **__: tensor)
    hooks = [
        modules.register_module_forward_pre_hook(trace.enter),
        modules.register_module_forward_hook(trace.leave, always_call=True),
    ]
    with (
        mock.patch.multiple(nn.init, **harmless),
        mock.patch("torch.amp.autocast_mode.torch.clear_autocast_cache", clear_all),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", never),
        mock.patch.multiple(
            torch.cuda, **_CUDA, stream=trace.on_stream, current_stream=lambda *_: trace.stream
        ),
        mock.patch("torch.cuda.is_current_stream_capturing", is_capturing),
        mock.patch(
            "torch.compile", lambda model=None, **_: (lambda it: it) if model is None else model
        ),
        mock.patch("torch.UntypedStorage.resize_", resize),
        # places differ between what runs in this mode and what runs below it
        mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=lambda _: None),
        ExitStack() as patches,
    ):
        with suppress(ImportError):
            patches.enter_context(mock.patch("triton.runtime.jit.JITFunction.run", run_triton))
        for module in (F, torch._tensor, torch.autograd, torch.functional):
            for name in [name for name in vars(module) if name.startswith("has_torch_function")]:
                patches.enter_context(mock.patch.object(module, name, never))
        patches.enter_context(_Recorder(trace))
        patches.enter_context(_OnGpu())
        patches.enter_context(as_on_cuda(lambda copy: trace.note(Category.WEIGHT_COPIES, [copy])))
        try:
            yield trace
        finally:
            for hook in hooks:
                hook.remove()
