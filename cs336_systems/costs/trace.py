# ruff: noqa: ANN401 (modules and operators get whatever PyTorch passes)
"""The record of a traced step: the tensors that it makes and frees and the kernels that it
launches, which become a Tape.
"""

import gc
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Phase
from .graphs import all_tensors, sorted_nodes
from .internals import FakeWork, address_of, current_node, next_sequence_number, without_modes
from .positions import Positions
from .routing import Routing
from .tape import WIDTHS, Category, Form, Names, OperationKey, Pass, Tape, TensorKey, path_of

GPU = torch.device("cuda", 0)
CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""PyTorch's default on a Hopper GPU, `:4096:8`, for each thread that calls cuBLAS: Python's and
autograd's.

Other GPUs get 8,519,680 bytes. With this size, predicted peaks of inference on an H200 are right to
the byte.
"""
BATCH = "batch"
"""The axis of sequences, which a trace of any model can name."""
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

UNREDUCED = frozenset(["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"])
"""Losses whose mean or sum keeps the memory of the losses of all elements, in which it stands
(aten/src/ATen/native/BinaryOps.cpp and Loss.cpp, cuda/Loss.cu).
"""

EFFICIENT_ATTENTION = "_scaled_dot_product_efficient_attention"

COPIED = {"native_layer_norm": 1, "native_layer_norm_backward": 2}
"""Operators that copy so many of their first tensors if these are not contiguous
(aten/src/ATen/native/cuda/layer_norm_kernel.cu).
"""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An operation that was dispatched, or a kernel in Triton that was launched."""

    name: str
    ins: Sequence[Tensor]
    """The tensors among its arguments."""
    outs: Sequence[Tensor]
    args: Any
    """All arguments of an operation in order, and those of a kernel in Triton that have names."""


Launcher = Callable[["StepTrace", Dispatch], None]
"""Notes what a call launches."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The meta tensors in a value, or in lists and tuples of values."""
    if isinstance(value, Tensor):
        if value.is_meta:
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


class CudaStream:
    """Stands for a CUDA stream or event."""

    device = GPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> "CudaStream":
        return self

    wait_stream = wait_event = record = record_event = synchronize = wait


class StepTrace:
    """Collects what is dispatched; `tape()` makes a Tape of it."""

    def __init__(
        self, axes: Mapping[str, int], launchers: Mapping[str, Launcher], usual: Launcher
    ) -> None:
        self.names = Names(axes)
        self.launchers = launchers
        """Functions that note what an operation launches, by its name."""
        self.usual = usual
        """The function for all other operations."""
        self.routing = Routing()
        self.positions = Positions()
        self.made: list[list[Any]] = []
        """Of each tensor by its handle: category, label, shape, bytes per element, stream."""
        self.events: list[int] = []
        self.launches: list[int] = []
        self.steps: list[list[tuple[Phase, int, int]]] = []
        self.phase: Phase | None = None
        self._operations: dict[OperationKey, int] = {}
        self._views = 0
        """Views, and other calls that launch nothing, since the last launch."""
        self.shape_of = cache(self._shape_of)
        """Gives, for bytes in all and bytes per element, a shape that names as many axes as
        possible, and the bytes of its elements.
        """
        self._handles: dict[int, int | None] = {}
        """Handles of storages that exist, by their address."""
        self._watches: dict[int, Any] = {}
        self.is_engine_calling = False
        """Whether autograd itself has called the operator that is dispatched, and no other code."""
        self._last_sum: tuple[int, int] | None = None
        """Addresses of the storages of a gradient and of its sum with another one."""
        self._workspaces: set[tuple[str, str]] = set()
        """Threads that have a library's workspace, with its label."""
        self.unknown_kernels: set[str] = set()
        """Kernels in Triton of which only the tensors are known."""
        self.main_stream = self.stream = CudaStream()
        self._streams: dict[int, str] = {}
        self.places: list[str | None] = []
        self.owners: list[str | None] = []
        self.again: list[int] = []
        self.graphs: list[dict[str, int]] = []
        self._first_node = next_sequence_number()
        self._paths: list[str | None] = []
        self._path_changes: tuple[list[int], list[str | None]] = [], []
        """Sequence numbers of autograd's next node, and the module that runs from there on."""
        self._names: dict[int, str] = {}

    @property
    def is_first_forward(self) -> bool:
        """Whether the first step's forward runs, of several micro-batches that of the first."""
        return len(self.steps) == 1 == len(self.steps[0])

    @property
    def _module(self) -> str | None:
        """The path of the module that runs; None outside of the model."""
        return self._paths[-1] if self._paths else None

    @property
    def depth(self) -> int:
        """How many modules run, one within the other."""
        return len(self._paths)

    @property
    def place(self) -> str:
        """The module that runs, for messages."""
        return "" if self._module is None else f"{self._module or 'the model'}: "

    # phases

    def begin(self, phase: Phase) -> None:
        """Begin a phase of a step; the first forward after a step begins the next one."""
        self._views = 0
        is_between = self.phase in (None, Phase.STEP)
        self.phase = phase
        if phase is Phase.FORWARD and is_between:
            self.steps.append([])
        if self.steps:
            self.steps[-1].append((phase, len(self.events), len(self.launches)))

    def note_named(self, category: Category, named: Iterable[tuple[str, Tensor]]) -> None:
        """Say what these tensors are for, and by their names which module has them."""
        for name, tensor in named:
            self.note(category, [tensor], path_of(name.rpartition(".")[0]))

    def note(self, category: Category, tensors: Iterable[Tensor], owner: str | None = None) -> None:
        """Say what these tensors are for, and which module has them if `owner` is its path."""
        for tensor in tensors:
            part = getattr(tensor, "_local_tensor", tensor)  # a DTensor's part on this rank
            if (handle := self._handles.get(address_of(part.untyped_storage()))) is not None:
                self.made[handle][0] = category
                if owner is not None:
                    self.owners[handle] = owner

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
        if not self._paths and id(module) not in self._names and has_parameters(module):
            self._names = {id(part): path_of(name) for name, part in module.named_modules()}
        self._paths.append(self._names.get(id(module), self._module))
        self._note_path()

    def leave(self, _: Any, __: Any, out: Any) -> None:
        self._paths.pop()
        self._note_path()
        if not self._paths:
            with without_modes():
                self.note(Category.LOSS, tensors_in(out))

    @contextmanager
    def within(self, path: str) -> Iterator[None]:
        """While open, what runs is part of the model, under this path."""
        self._paths.append(path)
        self._note_path()
        try:
            yield
        finally:
            self._paths.pop()
            self._note_path()

    def _note_path(self) -> None:
        numbers, paths = self._path_changes
        numbers.append(next_sequence_number())
        paths.append(self._module)

    def _path(self) -> str | None:
        """The module that runs; in backward, the one whose forward made the node that runs."""
        node = None
        if self.phase is Phase.BACKWARD and self._module is None:
            node = current_node()
        return self._module if node is None else self._path_of(node)

    def _path_of(self, node: Any) -> str | None:
        """The module that ran when a node of autograd was made."""
        numbers, paths = self._path_changes
        place = bisect_right(numbers, node._sequence_nr())
        return paths[place - 1] if place else None

    def note_graphs(self) -> None:
        """Count the nodes of autograd from which something can still be reached, as a step ends."""
        counts = self._nodes_left()
        if self.graphs and counts.total() > sum(self.graphs[-1].values()):
            gc.collect()  # nobody keeps what only cycles of references hold
            counts = self._nodes_left()
        self.graphs.append(dict(counts))

    def _nodes_left(self) -> Counter[str]:
        with without_modes():  # which would show meta tensors on a GPU
            nodes = sorted_nodes(tensor for tensor in all_tensors() if tensor.is_meta)
        # earlier traces of this process may have left some
        of_steps = [node for node in nodes if node._sequence_nr() >= self._first_node]
        return Counter(self._path_of(node) or "" for node in of_steps)

    # tensors

    def tensor(
        self,
        storage: torch.UntypedStorage,
        label: str,
        element_bytes: int,
        shape: str | None = None,
    ) -> int | None:
        """The handle of a storage; None if it is empty."""
        key = address_of(storage)
        if key not in self._handles:
            self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))
            size = storage.nbytes()
            self._handles[key] = self.add(None, label, size, element_bytes, shape) if size else None
        return self._handles[key]

    def adopt(self, model: torch.nn.Module) -> None:
        """Know the tensors of a model that was made before: its parameters, buffers and others."""
        with without_modes():
            members = [*model.parameters(), *model.buffers()]
            for module in model.modules():
                members += tensors_in([*vars(module).values()])
            for tensor in tensors_in(members):
                shape = self._sizes_of(tensor)
                self.tensor(tensor.untyped_storage(), "model", tensor.element_size(), shape)

    def _forget(self, key: int) -> None:
        if not self._hands_over(key):
            self._drop(key)
        del self._handles[key], self._watches[key]

    def _note_sum(self, gradient: Tensor, total: Tensor) -> None:
        """Remember a sum of gradients. On CUDA autograd adds in place, if nothing else needs the
        first one (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp).
        """
        sides = zip(gradient.shape, gradient.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in sides)
        is_alike = gradient.dtype is total.dtype and extent == gradient.numel() == total.numel()
        if is_alike and not gradient._is_view():  # a view shares its memory with what it is of
            storages = gradient.untyped_storage(), total.untyped_storage()
            self._last_sum = address_of(storages[0]), address_of(storages[1])

    def _hands_over(self, key: int) -> bool:
        """Let the last sum have the memory of this storage, if that is the first gradient's and is
        freed at once.
        """
        gradient, total = self._last_sum or (None, 0)
        self._last_sum = None
        if key != gradient or self.events[-1] != self._handles.get(total):
            return False
        self.events.pop()
        self.made.pop()
        self.owners.pop()
        self._handles[total] = self._handles[key]
        return True

    def _drop(self, key: int) -> None:
        if (handle := self._handles[key]) is not None:
            self.events.append(~handle)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Note that a storage is emptied, or filled again, as those of sharded parameters are."""
        key = address_of(storage)
        if key in self._handles:
            self._drop(key)
            self._handles[key] = None
            if num_bytes:
                self._handles[key] = self.add(
                    Category.GATHERED, "resized storage", num_bytes, 1, None
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
        size = self.shape_of(num_bytes, element_bytes) if shape is None else (shape, element_bytes)
        self.made.append([category or self._category(), label, *size, self._name_of_stream()])
        self.owners.append(self._path())
        self.events.append(handle)
        return handle

    def _category(self) -> Category:
        """What a tensor that is made now is for, unless somebody says otherwise later."""
        if self.phase is None:
            return Category.BUFFERS
        if self.phase is Phase.OPTIMIZER:
            return Category.OPTIMIZER_WORKSPACE
        if self._module is not None:
            return Category.ACTIVATIONS
        return Category.LOSS if self.phase is Phase.FORWARD else Category.TEMPORARIES

    def workspace(self, label: str, shape: str, element_bytes: int) -> None:
        """A tensor that exists only within a kernel."""
        self.workspaces([(label, shape, element_bytes)])

    def workspaces(self, parts: Iterable[tuple[str, str, int]]) -> None:
        """Tensors that exist together within a kernel: label, shape and bytes per element."""
        handles = []
        for label, shape, element_bytes in parts:
            handles.append(self.add(Category.TEMPORARIES, label, 0, element_bytes, shape))
        self.events += [~handle for handle in handles]

    def _shape_of(self, num_bytes: int, element_bytes: int) -> tuple[str, int]:
        of_elements = self.names.product(num_bytes // element_bytes)
        of_bytes = self.names.product(num_bytes)
        if num_bytes % element_bytes == 0 and _count_axes(of_elements) >= _count_axes(of_bytes):
            return of_elements, element_bytes
        number, *axes = of_bytes.split()
        return " ".join(axes), int(number)

    def moved(self, tensor: Tensor) -> tuple[str, int]:
        """The shape of a tensor, in which axes that are expanded count once, and its bytes per
        element.
        """
        sides = zip(tensor.shape, tensor.stride(), strict=True)
        count = prod(size for size, stride in sides if stride)
        return self.shape_of(count * tensor.element_size(), tensor.element_size())

    # operations

    def launch(self, make: str, *arguments: Any) -> None:
        """Note that an operation launches its kernels now, in the module that runs.

        The operation is described by `make`, the name of the method by which the tape makes it
        (`OperationKey`), that method's arguments, and the number of views that the host has made
        since the launch before. Equal operations share a number.
        """
        key = (self._views, make, *arguments)
        operation = self._operations.setdefault(key, len(self._operations))
        # backward's own formulas run without gradients, what a checkpoint runs again with them
        if torch.is_grad_enabled() and current_node() is not None:
            self.again.append(len(self.launches))
        self.launches.append(operation)
        self.places.append(self._path())
        self._views = 0

    def record(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Note an operation that was dispatched: its new tensors and what it launches."""
        outs = [*tensors_in(out)]
        others = [value for key, value in kwargs.items() if key != "out"]
        ins = [*tensors_in((args, *others))]
        if not outs and not ins:
            return
        if name == EFFICIENT_ATTENTION:
            outs = outs[:2]  # its seeds are on the host
        self.routing.note(name, ins, args, outs)
        try:
            self.positions.follow(name, args, outs)
        except IndexError as error:
            raise IndexError(f"{self.place}{error}") from None
        first_new = len(self.made)
        copies = self._copies(ins[: COPIED.get(name, 0)])
        handles = self._add_results(name, ins, outs)
        if name == "add" and self.is_engine_calling and not torch.is_grad_enabled():
            self._note_sum(args[0], outs[0])
        self.events += [~copy for copy in copies]
        is_new = any(handle is not None and handle >= first_new for handle in handles)
        is_written = name.endswith("_") or "out" in kwargs
        is_view = len(outs) > 0 and not is_new and not is_written
        if is_view or name in SILENT:
            self._views += 1
            return
        self.launchers.get(name, self.usual)(self, Dispatch(name, ins, outs, args))

    def _add_results(
        self, name: str, ins: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> list[int | None]:
        """The handles of an operation's results, of which those that are new are added. Some take
        more memory than their elements.
        """
        label = self._label(name)
        if name == EFFICIENT_ATTENTION:  # pads the sums (cuda/attention.cu)
            batch, heads, queries, _ = outs[0].shape
            padded = f"{self.names.product(batch * heads)} {self.names.product(queries)}^32"
            self.tensor(outs[1].untyped_storage(), label, 4, padded)
        elif name in UNREDUCED and outs[0].dim() == 0:
            elements = self.names.product(max(tensor.numel() for tensor in ins))
            self.tensor(outs[0].untyped_storage(), label, outs[0].element_size(), elements)
        handles = []
        for out in reversed(outs) if name == "native_dropout" else outs:  # whose mask is made first
            shape = self._sizes_of(out)
            handles.append(self.tensor(out.untyped_storage(), label, out.element_size(), shape))
        return handles

    def _copies(self, tensors: Iterable[Tensor]) -> list[int]:
        """The handles of the copies that a kernel makes first of those that are not contiguous."""
        copies = []
        for tensor in tensors:
            if not tensor.is_contiguous():
                shape, width = self.moved(tensor)
                copies.append(self.add(Category.TEMPORARIES, "contiguous copy", 0, width, shape))
        return copies

    def _label(self, name: str) -> str:
        """What a tensor is called: the operator that makes it, and its module or autograd node."""
        word = name.strip("_")
        if self._module is not None:
            return f"{word} in {self._module}"
        node = current_node() if self.phase is Phase.BACKWARD else None
        return word if node is None else f"{word} of {node.name()}"

    def _sizes_of(self, tensor: Tensor) -> str | None:
        """The sizes of a new tensor one by one, if names stand for none but the batch's."""
        is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        is_own = self.names.axes.keys() <= {BATCH}
        return " ".join(map(self.names.product, tensor.shape)) if is_whole and is_own else None

    def triton(self, name: str, tensors: Sequence[Tensor], named: Mapping[str, Any]) -> None:
        """A kernel in Triton; one without an entry reads or writes each of its tensors once."""
        if name in self.launchers:
            self.launchers[name](self, Dispatch(name, tensors, (), named))
        else:
            self.unknown_kernels.add(name)
            self.moves(tensors)

    def moves(
        self, tensors: Iterable[Tensor], how: Pass = Pass.COPY, *, is_dispatched: bool = True
    ) -> None:
        """Launch a kernel that reads or writes these tensors, each as often as it is given.

        One that is not dispatched is a further kernel of the operator before it.
        """
        launches_and_calls = () if is_dispatched else (1, 0)
        self.launch("passes", tuple(map(self.moved, tensors)), how, *launches_and_calls)

    def fused(self, moved_bytes: int | None, tensors: Sequence[Tensor]) -> None:
        """Launch a kernel of torch.compile that moves these bytes; None stands for all that its
        tensors have.
        """
        if moved_bytes is None:
            self.moves(tensors, Pass.FUSED)
        else:
            self.launch("passes", ((str(moved_bytes), 1),), Pass.FUSED)

    def collective(self, function: Any, args: Any) -> Any:
        """A collective among ranks that are not there, which takes no time and changes nothing."""
        work = FakeWork().boxed()
        returns = [value.type.str() for value in function._schema.returns]
        tensors = [value for value in args if isinstance(value, (list, Tensor))]
        made = [work if "Work" in kind else tensors[0] for kind in returns]
        return made[0] if len(made) == 1 else tuple(made)

    def tape(self) -> Tape:
        """The tape of all that was recorded."""
        kinds: dict[TensorKey, int] = {}
        tensors = [kinds.setdefault(tuple(key), len(kinds)) for key in self.made]
        idle_parameters = None
        if self.routing.is_assumed:
            idle_parameters = round(self.routing.idle_parameters)
        return Tape(
            axes=self.names.axes,
            kinds=[*kinds],
            makes=[*self._operations],
            tensors=tensors,
            events=[*self.events],
            launches=[*self.launches],
            steps=self.steps,
            idle_parameters=idle_parameters,
        )

    def matmul(
        self,
        form: Form,
        sides: Sequence[int],
        element_bytes: int,
        batch: int = 1,
        make: str = "matmul",
    ) -> None:
        """Launch a matmul, or a batch of them, of (rows, inner) by (inner, columns) matrices; of
        experts `make` says so.
        """
        self.launch(
            make, form, *map(self.names.product, sides), element_bytes, self.names.product(batch)
        )
        self.claim_workspace("cuBLAS workspace", CUBLAS_WORKSPACE_BYTES)

    def attention(self, form: Form, batch: int, sides: Sequence[int], element_bytes: int) -> None:
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

    def claim_workspace(self, label: str, size_bytes: int) -> None:
        """Make a library's workspace at its first use by a thread; it is never freed."""
        thread = "backward" if self.phase is Phase.BACKWARD else "forward"
        if (thread, label) not in self._workspaces:
            self._workspaces.add((thread, label))
            self.add(Category.LIBRARY_WORKSPACE, label, 0, 1, str(size_bytes))


def has_parameters(module: nn.Module) -> bool:
    """Whether a module that a step calls is a model, and not a loss."""
    return next(module.parameters(), None) is not None


def _count_axes(shape: str) -> int:
    """How many axes a shape names, of which a width has two."""
    widths = dict(WIDTHS)
    words = [word for word in shape.split() if not word.isdigit()]
    return len(words) + sum(word in widths for word in words)
