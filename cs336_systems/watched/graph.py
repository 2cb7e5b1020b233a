"""What autograd's graph tells of a forward pass: which of its results backward reached, and the
type that its matmuls computed in.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

MATMULS = (
    "Mm",
    "Addmm",
    "Bmm",
    "Baddbmm",
    "Mv",
    "Addmv",
    "Linear",
    "Convolution",
    "ScaledDotProduct",
)
"""Beginnings of the names of autograd's nodes of matmuls, convolutions and attention."""
MOST_NODES = 64
"""Most nodes that are searched for a matmul: it is one of the module that has just been called."""
DEPTH = 3
"""How deep objects within objects are searched for tensors."""
HIGHER = (
    "a backward of the loop makes a graph of its own (create_graph), through which another one runs"
)
PARTIAL = "a backward of the loop computes the gradients of some parameters only"
TRANSFORMED = "the model is called within a transform of torch.func, which shows it other shapes"
REFROZEN = "parameters of the model are frozen in some passes and trained in others"
TWICE = "backward runs more than once through a forward pass"
UNSEEN = "no tensor is seen in what the model returns"
"""Why the FLOPs of the loop's passes are not those of their trace."""


def results_in(values: Iterable[Any], depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors in what a model returns, also in attributes of its objects, as of data classes
    and distributions, in an order that only depends on their classes.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from results_in(value.values(), depth)
        elif isinstance(value, list | tuple):
            yield from results_in(value, depth)
        elif depth and not isinstance(value, nn.Module | type):
            yield from results_in(_attributes(value), depth - 1)


def _attributes(value: object) -> list[Any]:
    """The values of an object's attributes; none of a callable, which may hold anything."""
    return [] if callable(value) else [*getattr(value, "__dict__", {}).values()]


def see_reached(result: Any) -> list[tuple[int, ...]] | None:  # noqa: ANN401
    """A list to which backward will add the places of the results that it reaches, each time that
    it does; None if no tensor was found in the result.
    """
    told: list[tuple[int, ...]] = []
    if isinstance(result, Tensor):  # the usual one, without a search
        nodes = {result.grad_fn: (0,)}
    else:
        nodes = {}
        place = -1
        for place, tensor in enumerate(results_in((result,))):
            # several results may have one node, as the parts of a split
            nodes[tensor.grad_fn] = (*nodes.get(tensor.grad_fn, ()), place)
        if place < 0:
            return None
    for node, places in nodes.items():
        if node is not None:
            node.register_prehook(lambda *_, places=places: told.append(places))
    return told


def multiplied_in(result: Any) -> torch.dtype | None:  # noqa: ANN401
    """The type of the matmul that is nearest to the result in autograd's graph; None if none is
    there, as where nothing is trained, or where it is hidden in a function of its own.
    """
    waiting = deque(tensor.grad_fn for tensor in results_in((result,)))
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(MATMULS):
            dtype: torch.dtype = node._input_metadata[0].dtype
            return dtype
        waiting.extend(following for following, _ in node.next_functions)
    return None


class TraceLimits:
    """What is seen of a loop by which its FLOPs are not those of a trace of its calls."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.reason = ""
        """Why they are not; empty if they are."""
        self._models = [ref(model) for model in models]
        self._trained: dict[ref[nn.Module], tuple[bool, ...]] = {}
        """Of each model, which parameters were trained when it was looked at first."""

    def see_backward(self, arguments: tuple[Any, ...]) -> None:
        """Look at a backward of the loop for what it computes beside the gradients of all trained
        parameters.

        `arguments` are those of autograd's engine: results, their gradients, whether the graph is
        kept, whether gradients get a graph, and of what they are: of all leaves if it is empty.
        """
        if self.reason or len(arguments) < 5:
            return
        makes_graph, wanted = arguments[3:5]
        if makes_graph:
            self.reason = HIGHER
        elif wanted and not self._trained_now() <= set(map(id, wanted)):
            self.reason = PARTIAL

    def see_trained(self, model: "ref[nn.Module]") -> None:
        """Look whether other parameters are trained than when the model was looked at first."""
        module = model()
        if module is None or self.reason:
            return
        trained = tuple([parameter.requires_grad for parameter in module.parameters()])
        if self._trained.setdefault(model, trained) != trained:
            self.reason = REFROZEN

    def _trained_now(self) -> set[int]:
        """The addresses of all parameters that are trained."""
        trained: set[int] = set()
        for reference in self._models:
            model = reference()
            if model is not None:
                trained.update(id(one) for one in model.parameters() if one.requires_grad)
        return trained
