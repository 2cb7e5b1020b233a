"""What holds the memory of a device: tensors by category and by module of the watched models.

They are found as Python knows them, and in the graphs of autograd, by their storages; nothing is
allocated, and no hook of the user's runs.
"""

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.graphs import sorted_nodes
from ..costs.tape import REPEATED, Category, path_of
from ..loop_record import Holder
from .calls import described
from .tokens import tensors_in

OTHER = "other tensors"
VIEWS_OF_WEIGHTS = frozenset(
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "ToCopy", "View", "UnsafeView", "Expand", "Slice")
)
"""Nodes of autograd that only look at a parameter in another way, or cast it."""
SAVED = "_raw_saved"
"""Names of what a node keeps begin so; reading these runs no hooks, as a checkpoint's."""


class Ledger:
    """Bytes of storages on one device: each counts once, for who claims it first."""

    def __init__(self, device: torch.device, block_bytes: Mapping[int, int]) -> None:
        """`block_bytes` has the allocator's blocks by address; other storages have their own
        sizes.
        """
        self._device, self._block_bytes = device, block_bytes
        self._claimed: set[int] = set()
        self._bytes = Counter[tuple[str, str]]()
        self._counts = Counter[tuple[str, str]]()

    def claim(self, tensor: Tensor, category: str, module: str = "") -> int:
        """Count the tensor's storage, and return its bytes; 0 if it is not on the device, or was
        counted before.
        """
        part = getattr(tensor, "_local_tensor", tensor)  # a DTensor's part on this rank
        # sparse and fake tensors have no storage
        with contextlib.suppress(RuntimeError, NotImplementedError):
            if part.device != self._device:
                return 0
            storage = part.untyped_storage()
            address = storage.data_ptr()
            if address and address not in self._claimed:
                self._claimed.add(address)
                key = str(category), part_of(module)
                held: int = self._block_bytes.get(address, storage.nbytes())
                self._bytes[key] += held
                self._counts[key] += 1
                return held
        return 0

    def holders(self) -> list[Holder]:
        """What was claimed, the largest first."""
        rows = []
        for (category, module), held in self._bytes.most_common():
            count = self._counts[category, module]
            rows.append(Holder(category=category, module=module, held_bytes=held, count=count))
        return rows


def part_of(path: str) -> str:
    """The part of a model that a module belongs to: a child of a block, for all blocks together,
    or else the first two names of the path.
    """
    names = path_of(path).split(".")
    repeated = REPEATED.strip(".")
    depth = names.index(repeated) + 2 if repeated in names else 2
    return ".".join(names[:depth])


class Modules:
    """The modules of some models by their parameters."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)
        self.paths: dict[int, str] = {}
        """Paths of modules by identity."""
        self._owners: dict[int, list[tuple[str, bool]]] = {}
        """Of each parameter, the modules that have it: their paths, and whether they embed."""
        for model in self.models:
            for path, module in model.named_modules():
                self.paths[id(module)] = path
                for parameter in module._parameters.values():
                    if parameter is not None:
                        owner = path, isinstance(module, nn.Embedding)
                        self._owners.setdefault(id(parameter), []).append(owner)

    def path(self, parameter: Tensor, node: str = "") -> str | None:
        """The module that has the parameter; of a tied one, that in which this node of autograd
        may be. None if none has it.
        """
        owners = self._owners.get(id(parameter))
        if not owners:
            return None
        fitting = [path for path, embeds in owners if embeds == node.startswith("Embedding")]
        return fitting[0] if fitting else owners[0][0]


class Graph:
    """The nodes of autograd that tensors keep, each with the module that made it."""

    def __init__(self, tensors: Iterable[Tensor], modules: Modules, running: str) -> None:
        """`running` is the module that ran last."""
        self.nodes = sorted_nodes(tensors)
        """In the order in which they were made."""
        parametric = {node: _module_of(node, modules) for node in self.nodes}
        self._parametric = [node for node, path in parametric.items() if path is not None]
        within = _reached(self._parametric)
        self._places = _places(parametric, within, running)
        self._behind = _behind(self.nodes, set(self._parametric))

    def has_result(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of these tensors was made by the last module or behind it, and is no number:
        the loop still has what the model returned.
        """
        last = max((node._sequence_nr() for node in self._parametric), default=0)
        for tensor in tensors:
            with contextlib.suppress(RuntimeError):
                node: Any = tensor.grad_fn
                if node in self._places and tensor.numel() > 1 and node._sequence_nr() >= last:
                    return True
        return False

    def category(self, node: Any) -> str:  # noqa: ANN401
        """What the tensors of a node are for."""
        if self._places.get(node) is not None:
            return Category.ACTIVATIONS
        return Category.LOSS if node in self._behind else OTHER

    def place(self, node: Any) -> str:  # noqa: ANN401
        """The module of a node; empty behind the last one."""
        return self._places.get(node) or ""

    def next_backward(self) -> str:
        """The module of the last node whose tensors are kept, which is where backward is."""
        for node in reversed(self.nodes):
            if next(saved_in(node), None) is not None:
                return self._places[node] or ""
        return ""


def _module_of(node: Any, modules: Modules) -> str | None:  # noqa: ANN401
    """The module whose parameter the node computes with; None if it takes none."""
    for before, _ in node.next_functions:
        parameter = _looked_at(before)
        path = None if parameter is None else modules.path(parameter, node.name())
        if path is not None:
            return path
    return None


def _looked_at(node: Any) -> Tensor | None:  # noqa: ANN401
    """The parameter that a node stands for, itself or through views and casts."""
    while node is not None:
        parameter: Tensor | None = getattr(node, "variable", None)
        if parameter is not None:
            return parameter
        if node.name() not in VIEWS_OF_WEIGHTS or len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return None


def _reached(nodes: Iterable[Any]) -> set[Any]:
    """All nodes on which these depend, and these."""
    waiting = list(nodes)
    reached: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in reached:
            reached.add(node)
            waiting += [before for before, _ in node.next_functions]
    return reached


def _places(
    parametric: dict[Any, str | None], within: set[Any], running: str
) -> dict[Any, str | None]:
    """The modules of nodes, which are given in order with those that they take parameters of.

    A node without parameters on which a later module depends (`within`) is in the innermost module
    that has both the last one before and the next one behind it. Of others, those that were made
    last are in the module that runs; if none does, and before, they are of the loss.
    """
    behind: dict[Any, str | None] = {}
    following: str | None = None
    for node, path in reversed(parametric.items()):
        if path is not None:
            following = path
        is_last = following is None and running
        behind[node] = following if node in within else (running if is_last else None)
    places: dict[Any, str | None] = {}
    before = ""
    for node, path in parametric.items():
        before = before if path is None else path
        following = behind[node]
        places[node] = path
        if path is None and following is not None:
            places[node] = _common(before, following)
    return places


def _behind(nodes: Iterable[Any], parametric: set[Any]) -> set[Any]:
    """Those of the nodes, given in order, that depend on these."""
    behind: set[Any] = set()
    for node in nodes:
        if any(before in parametric or before in behind for before, _ in node.next_functions):
            behind.add(node)
    return behind


def _common(path: str, other: str) -> str:
    """The innermost module that has both."""
    names = []
    for name, same in zip(path.split("."), other.split("."), strict=False):
        if name != same:
            break
        names.append(name)
    return ".".join(names)


@cache
def _names_of_saved(kind: type) -> list[str]:
    """Names of what nodes of a class keep."""
    return [name for name in dir(kind) if name.startswith(SAVED)]


def saved_in(node: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """The tensors that a node keeps for backward; what hooks have packed counts if it is one."""
    for name in _names_of_saved(type(node)):  # type: ignore[arg-type]
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed
            continue
        for value in saved if isinstance(saved, list | tuple) else [saved]:
            yield from tensors_in([getattr(value, "data", None)])
    # a function of the user's may keep more
    yield from tensors_in(getattr(node, "__dict__", {}).values())


def held_by(
    ledger: Ledger,
    modules: Modules,
    optimizers: Iterable[torch.optim.Optimizer],
    tensors: Sequence[Tensor],
    graph: Graph,
) -> list[tuple[Hashable, int]]:
    """Claim what the models, their optimizers and the graphs hold, and then the other tensors;
    return what describes these, and their bytes.
    """
    parameters = [parameter for model in modules.models for parameter in model.parameters()]
    for parameter in parameters:
        ledger.claim(parameter, Category.PARAMETERS, modules.path(parameter) or "")
    for model in modules.models:
        for name, buffer in model.named_buffers():
            ledger.claim(buffer, Category.BUFFERS, name.rpartition(".")[0])
    for parameter in parameters:
        if parameter.grad is not None:
            ledger.claim(parameter.grad, Category.GRADIENTS, modules.path(parameter) or "")
    for optimizer in optimizers:
        for key, state in optimizer.state.items():
            path = modules.path(key) if isinstance(key, Tensor) else None
            for tensor in tensors_in([state]):
                ledger.claim(tensor, Category.OPTIMIZER_STATE, path or "")
    for node in graph.nodes:
        for tensor in saved_in(node):
            ledger.claim(tensor, graph.category(node), graph.place(node))
    others = []
    for tensor in tensors:
        node = None
        with contextlib.suppress(RuntimeError):
            node = tensor.grad_fn
        category = graph.category(node)
        held = ledger.claim(tensor, category, graph.place(node))
        if held and category == OTHER:
            others.append((described(tensor), held))
    return others
