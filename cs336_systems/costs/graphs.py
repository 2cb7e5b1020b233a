"""The graphs of autograd that a program keeps. No private name of PyTorch is needed here, so that
all versions will do.
"""

import contextlib
import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def all_tensors() -> list[Tensor]:
    """All tensors that Python knows, so those of its frames too."""
    # isinstance would ask proxies for their class, which may do anything
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def sorted_nodes(tensors: Iterable[Tensor]) -> list[Any]:
    """All nodes that these tensors reach, but those that only fill gradients."""
    waiting = []
    for tensor in tensors:
        with contextlib.suppress(RuntimeError):  # a view that was changed without a graph
            waiting.append(tensor.grad_fn)
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return sorted(seen, key=lambda node: node._sequence_nr())
