"""Named ranges around the parts of a step, for whichever profiler is in use.

`annotate` marks the forward pass, in place in the model. Backward runs on autograd's own thread,
where no Python of the model is on the stack, so `backward_ranges` marks it through the nodes of
autograd's graph.
"""

import functools
import gzip
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..ranges import Range

COMPRESSION = 6
"""Gzip level: takes a fifth of the time of torch's own level, 9, and makes the file a tenth
larger.
"""


class Annotator(StrEnum):
    """Where ranges are recorded: nowhere, by an NVTX tool such as Nsight Systems,
    torch.profiler, or `current_path`.
    """

    NONE = "none"
    NVTX = "nvtx"
    RECORD_FUNCTION = "record-function"
    PATH = "path"


@contextmanager
def kineto_trace(path: Path, with_cuda: bool) -> Iterator[None]:
    """Record with torch.profiler while open; a clean exit leaves the trace at `path`, as gzipped
    JSON.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if with_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    plain = path.with_name(f".{path.name}.plain.tmp")
    compressed = path.with_name(f".{path.name}.gzip.tmp")
    descriptor = os.open(path.parent, os.O_RDONLY)
    # PyTorch writes the path into the trace as it is, where a quote in a folder's name would end
    # the text
    folder = Path(f"/proc/self/fd/{descriptor}")
    if not folder.exists():
        folder = path.parent
    try:
        profiler.export_chrome_trace(str(folder / plain.name))
        with plain.open("rb") as source, gzip.open(compressed, "wb", COMPRESSION) as target:
            shutil.copyfileobj(source, target, 2**20)
        compressed.replace(path)
    finally:
        os.close(descriptor)
        for leftover in (plain, compressed):
            leftover.unlink(missing_ok=True)


class _Thread(threading.local):
    def __init__(self) -> None:
        """Start with no open range; every thread gets these lists of its own."""
        self.records: list[torch.profiler.record_function] = []
        self.path: list[str] = []
        self.in_backward: list[_ModuleCall] = []


_thread = _Thread()


def current_path() -> tuple[str, ...]:
    """Names of the open ranges of this thread, the outermost first; empty unless the annotator
    is PATH.
    """
    return tuple(_thread.path)


def _push_and_pop(annotator: Annotator) -> tuple[Callable[[str], object], Callable[[], object]]:
    """Two functions for the chosen annotator: the first opens a range of the given name on the
    calling thread, the second closes the range that was opened last.
    """
    if annotator is Annotator.PATH:
        return lambda name: _thread.path.append(name), lambda: _thread.path.pop()
    if annotator is Annotator.RECORD_FUNCTION:
        return _push_record, lambda: _thread.records.pop().__exit__(None, None, None)
    import nvtx  # which has no packages for macOS, and is needed for CUDA devices alone

    domain = nvtx.get_domain()  # the default one, and registered strings: for nsys's capture range
    attributes = functools.cache(lambda name: domain.get_event_attributes(message=name))
    return lambda name: domain.push_range(attributes(name)), domain.pop_range


def _push_record(name: str) -> None:
    """Open a range of torch.profiler on this thread."""
    record = torch.profiler.record_function(name)
    record.__enter__()
    _thread.records.append(record)


class _Annotation:
    """Opens and closes a range. It has no state, so one object per name serves nested uses and
    several threads.
    """

    __slots__ = ("_name", "_pop", "_push")

    def __init__(self, name: str, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        """`push` opens a range of the given name on the calling thread; `pop` closes the innermost
        one.
        """
        self._name, self._push, self._pop = name, push, pop

    def __enter__(self) -> None:
        """Open the range."""
        self._push(self._name)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close the range."""
        self._pop()


_NO_RANGE = nullcontext()
_annotation: Callable[[str], _Annotation] | None = None


def set_annotator(annotator: Annotator) -> None:
    """Choose where ranges are recorded from here on, for the whole process; no range may be
    open.
    """
    global _annotation
    if annotator is Annotator.NONE:
        _annotation = None
    else:
        push, pop = _push_and_pop(annotator)
        _annotation = functools.cache(lambda name: _Annotation(name, push, pop))


def annotate(name: str) -> AbstractContextManager[None]:
    """Range `name` around a `with` block; nothing without an annotator, and inside what
    torch.compile traces.
    """
    if torch.compiler.is_compiling():
        return nullcontext()  # Dynamo enters only contexts that it has seen created
    return _NO_RANGE if _annotation is None else _annotation(name)


def module_names(model: nn.Module, depth: int) -> dict[nn.Module, str]:
    """Names of the ranges of a model that has none: for each module down to `depth` levels, its
    place.

    The place of the model itself is its class; that of another module is its path below the module
    that calls it, such as `layers.0` or `self_attn`. Lists and dictionaries of modules are never
    called, so they are no level.
    """

    def placed(module: nn.Module, name: str, depth: int) -> Iterator[tuple[nn.Module, str]]:
        """The module and, down to `depth` levels, those that it calls, with their names."""
        yield module, f"{name} module" if name in _OF_STEPS else name
        for child, place in _called(module, "") if depth else ():
            yield from placed(child, place, depth - 1)

    return dict(placed(model, type(model).__name__, depth))


_OF_STEPS = {
    Range.STEP,
    Range.FORWARD,
    Range.LOSS,
    Range.BACKWARD,
    Range.COMMUNICATION,
    Range.OPTIMIZER,
    Range.MEASURE,
}
"""Names of ranges that no module may have."""


def _called(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str]]:
    """The modules in `module` that are called, with their paths below it."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{prefix}{name}.")
        else:
            yield child, f"{prefix}{name}"


@contextmanager
def forward_ranges(names: Mapping[nn.Module, str]) -> Iterator[None]:
    """While open, each call of one of these modules has a range of its name."""
    with ExitStack() as hooks:
        for module, name in names.items():
            enter, leave = functools.partial(_enter, name), functools.partial(_leave, name)
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _enter(name: str, *_: object) -> None:
    """Forward pre-hook of a module: open a range of this name. The hook's arguments are ignored."""
    annotate(name).__enter__()


def _leave(name: str, *_: object) -> None:
    """Forward hook of a module: close the range of this name. The hook's arguments are ignored."""
    annotate(name).__exit__(None, None, None)


def own_names(model: nn.Module) -> dict[nn.Module, str]:
    """Modules that have a string attribute `range`, with that string, which names their profiler
    ranges. Such modules open their ranges of forward in their own code.
    """
    names = {}
    for module in model.modules():
        name = getattr(module, "range", None)
        if isinstance(name, str):
            names[module] = name
    return names


@contextmanager
def backward_ranges(names: Mapping[nn.Module, str]) -> Iterator[None]:
    """While open, backward has a range for each of these modules, by their names.

    A module's range opens when the gradient of its output is ready and closes when that of its
    input is (for an embedding, whose input has no gradient: when those of its parameters are). The
    hooks are on nodes of autograd's graph, not on the modules' inputs and outputs, so no identity
    nodes are added and no gradient lives longer: numbers and memory stay the same. Compiled code
    has no such nodes, and no ranges. A backward that raises, or that ends in the outermost of these
    modules, leaves ranges open.
    """
    with ExitStack() as hooks:
        for module, name in names.items():
            calls = _ModuleCalls(name)
            hooks.callback(module.register_forward_pre_hook(calls.begin, with_kwargs=True).remove)
            # always: a checkpoint ends its recomputation by an exception
            hooks.callback(module.register_forward_hook(calls.end, always_call=True).remove)
        yield


class _ModuleCalls:
    """The hooks of one module, and its calls that have not returned."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the module's ranges in backward."""
        self._name = name
        self._running: list[_ModuleCall] = []

    def begin(self, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Forward pre-hook of the module: register this call, whose range in backward closes once
        the gradient of its input is ready.
        """
        self._running.append(call := _ModuleCall(self._name))
        if node := _first_node((*inputs, *named.values())):
            call.has_input = True
            _before_node(node, call.close)

    def end(self, _module: nn.Module, _inputs: tuple[Any, ...], output: object) -> None:
        """Forward hook of the module: let the call's range in backward open once the gradient of
        its output is ready.

        If no input has a gradient, the range closes when the gradients of all parameters behind the
        output have been accumulated.
        """
        call = self._running.pop()
        outputs = output.values() if isinstance(output, Mapping) else (output,)
        if node := _first_node(outputs):
            if not call.has_input:
                _before_node(node, _CloseAfter(call, _leaves(node)).start)
            _before_node(node, call.open)


class _ModuleCall:
    """One call of a module, and its range in backward.

    The node that opens the range or the one that closes it may never run: recomputation by a
    checkpoint and unused results leave such nodes. So `close` does nothing unless the range is
    open, and closes ranges left open inside it.
    """

    def __init__(self, name: str) -> None:
        """`name` is the name of the call's range in backward."""
        self._name = name
        self.has_input = False
        """Whether the input has a gradient."""

    def open(self) -> None:
        """Open the range in backward."""
        annotate(self._name).__enter__()
        _thread.in_backward.append(self)

    def close(self) -> None:
        """Close the call's range in backward, and ranges that were left open inside it; do nothing
        if the range is not open.
        """
        while self in _thread.in_backward:
            annotate(_thread.in_backward.pop()._name).__exit__(None, None, None)


def _first_node(values: Iterable[object]) -> Node | None:
    """The node that backward runs first, of those that computed the tensors in `values` or in
    tuples among them.

    None if no tensor has a node, and while compiling.
    """
    if torch.compiler.is_compiling():
        return None
    nodes: list[Node] = []
    for value in values:
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Tensor) and part.grad_fn is not None:
                nodes.append(part.grad_fn)
    return max(nodes, key=lambda node: node._sequence_nr(), default=None)


def _before_node(node: Node, action: Callable[[], None]) -> None:
    """Call `action` just before `node` runs; the action added last runs first, as backward is
    forward in reverse.
    """
    # a property that torch's stub calls a method
    metadata = cast("dict[str, list[Callable[[], None]]]", node.metadata)
    actions = metadata.get("ranges")
    if actions is None:
        metadata["ranges"] = actions = []
        node.register_prehook(functools.partial(_run_in_reverse, actions))
    actions.append(action)


def _run_in_reverse(actions: list[Callable[[], None]], _gradients: object) -> None:
    """Autograd pre-hook: call the actions registered for a node, the last added first."""
    for action in reversed(actions):
        action()


class _CloseAfter:
    """Closes the range of `call` when, once started, each of `leaves` has run.

    All graphs that use a parameter share its leaf, so hooks of earlier graphs stay on the leaf and
    must do nothing.
    """

    def __init__(self, call: _ModuleCall, leaves: list[Node]) -> None:
        """Count on each of `leaves`, autograd nodes that accumulate a parameter's gradient, how
        often it has run.
        """
        self._call = call
        self._num_leaves = len(leaves)
        self._remaining = 0
        for leaf in leaves:
            leaf.register_hook(self._count)

    def start(self) -> None:
        """Begin to count: the range closes after as many runs of leaves as there are leaves."""
        self._remaining = self._num_leaves

    def _count(self, *_gradients: object) -> None:
        """Note that a leaf has run; close the range after the last one."""
        if self._remaining:
            self._remaining -= 1
            if not self._remaining:
                self._call.close()


def _leaves(node: Node) -> list[Node]:
    """The nodes of autograd's graph that are reached from `node` and have no successor: those that
    accumulate the gradients of parameters.
    """
    leaves: list[Node] = []
    reached: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in reached:
            continue
        reached.add(current)
        following = [function for function, _ in current.next_functions if function is not None]
        pending += following
        if not following:
            leaves.append(current)
    return leaves
